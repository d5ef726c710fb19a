"""MemPO: what a memory is worth, and what it saves. Parts for a rollout function of agents that rewrite their memory.

A trajectory is a question and rounds. Each round after the first starts with a memory that rewrites all before it. The
reward of a memory is how much likelier the known answer is after it than after the whole history:
R = P(answer | question, memory) - P(answer | question, all rounds before), P the geometric mean over the answer's
tokens. The difference matters: the more evidence a round has, the higher are both. Advantages: `memory_advantages` of
`slime.utils.ppo_utils` over all memories of a question, `add_span_advantages` onto each memory's own tokens.
"""

import dataclasses
from collections.abc import Sequence

from slime.utils.ppo_utils import geometric_mean_probability


@dataclasses.dataclass(frozen=True)
class Round:
    """Token ids of one round. memory: with its tags; None in the first round, and where its form is broken. step:
    thought and call, or answer. observation: what came back, empty in the last round."""

    memory: list[int] | None
    step: list[int]
    observation: list[int] = dataclasses.field(default_factory=list)

    def tokens(self) -> list[int]:
        return [*(self.memory or []), *self.step, *self.observation]


@dataclasses.dataclass(frozen=True)
class Probe:
    """Two sequences that end in the same answer tokens, to be scored without gradient. round: index of the memory's."""

    round: int
    after_memory: list[int]
    after_all: list[int]


def probes(question: list[int], rounds: Sequence[Round], answer: list[int], opening: Sequence[int] = ()) -> list[Probe]:
    """A probe for each memory of a trajectory. opening: tokens that open an answer (`<answer>`), not scored.

    Raises ValueError for an answer without tokens.
    """
    if not answer:
        raise ValueError("an answer without tokens has no probability: give the known answer's tokens")
    out, before = [], list(question)
    for i, one in enumerate(rounds):
        if one.memory is not None and i > 0:
            memory = [*question, *one.memory]
            out.append(Probe(i, [*memory, *opening, *answer], [*before, *opening, *answer]))
        before += one.tokens()
    return out


def memory_reward(after_memory: Sequence[float], after_all: Sequence[float]) -> float:
    """P_mem - P_full in (-1, 1), of the answer's log-probs under both sequences of a probe."""
    return geometric_mean_probability(after_memory) - geometric_mean_probability(after_all)


@dataclasses.dataclass(frozen=True)
class TokenUse:
    """total: tokens that the model read over all rounds of a trajectory. peak: the most in one round."""

    total: int
    peak: int


def token_use(contexts: Sequence[int]) -> TokenUse:
    """contexts: tokens in the context of each round."""
    return TokenUse(sum(contexts), max(contexts, default=0))


@dataclasses.dataclass(frozen=True)
class ObjectiveScores:
    """Sums over the questions of one prompt, each in [0, how many]. f1: of sets of words. exact: equal answers."""

    f1: float
    exact: float


def objective_scores(answer: str, golds: Sequence[str]) -> ObjectiveScores:
    """Scores of answers to several questions, `a1; a2; ...`; 0 where there are not as many as questions."""
    answers = [part.strip() for part in answer.split(";")]
    if len(answers) != len(golds):
        return ObjectiveScores(0.0, 0.0)
    pairs = list(zip(answers, golds, strict=True))
    return ObjectiveScores(sum(_word_f1(a, g) for a, g in pairs), float(sum(a == g.strip() for a, g in pairs)))


def _word_f1(answer: str, gold: str) -> float:
    words, wanted = set(answer.split()), set(gold.split())
    common = len(words & wanted)
    return 2 * common / (len(words) + len(wanted)) if common else 0.0
