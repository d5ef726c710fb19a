"""What a judge's votes say about a turn (OpenClaw-RL): scores, hints, and whether the turn is trained."""

import re
from collections import Counter
from collections.abc import Sequence

_DIGIT = re.compile(r"\\boxed\{([-+]?\d)\}")
_BOX = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", re.DOTALL)
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")
_HINT = re.compile(r"\[HINT_START\](.*?)\[HINT_END\]", re.DOTALL)
SHORTEST_HINT = 11  # characters


def parse_score(text: str) -> int | None:
    r"""The last \boxed{d} of a judgement, when it is -1, 0 or 1; else None."""
    found = _DIGIT.findall(text)
    score = int(found[-1]) if found else None
    return score if score in (-1, 0, 1) else None


def parse_sign(text: str) -> int:
    r"""The first \boxed{...} of a judgement of one step, when it is a number equal to 1 or -1; else 0."""
    found = _BOX.search(text)
    inside = found.group(1).strip() if found else ""
    value = float(inside) if _NUMBER.fullmatch(inside) else 0.0
    return int(value) if value in (-1.0, 1.0) else 0


def parse_hint(text: str) -> str | None:
    """The last text between [HINT_START] and [HINT_END], stripped."""
    found = _HINT.findall(text)
    return found[-1].strip() if found else None


def majority(scores: Sequence[int | None]) -> float:
    """The score with most votes; 0 for a tie and where nobody voted. None is no vote."""
    counts = Counter(score for score in scores if score is not None)
    if not counts:
        return 0.0
    most = max(counts.values())
    winners = [score for score, count in counts.items() if count == most]
    return float(winners[0]) if len(winners) == 1 else 0.0


def mean_vote(scores: Sequence[int | None]) -> float:
    """The mean of the votes that are -1 or 1; 0 where there is none."""
    votes = [score for score in scores if score in (-1, 1)]
    return sum(votes) / len(votes) if votes else 0.0  # type: ignore[arg-type]


def terminal_reward(accuracy: float, process: float, coefficient: float = 1.0) -> float:
    """Reward of an agent's step in a terminal: 2 accuracy - 1, and the judge's mean vote of the step, weighed."""
    return 2.0 * accuracy - 1.0 + coefficient * process


def accepted_hints(votes: Sequence[tuple[int | None, str | None]], most: int | None = None) -> list[str]:
    """Different hints of votes (score, hint) with score 1 and more than ten characters, from short to long.

    most: so many at most. One positive vote is enough: hints are not decided by majority.
    """
    hints = {hint.strip() for score, hint in votes if score == 1 and hint is not None}
    return sorted((h for h in hints if len(h) >= SHORTEST_HINT), key=lambda h: (len(h), h))[:most]


def longest_hint(votes: Sequence[tuple[int | None, str | None]]) -> str | None:
    """The hint of the method's first version: the longest accepted one."""
    hints = accepted_hints(votes)
    return hints[-1] if hints else None


def trained_turns(turns: Sequence[tuple[float, bool]]) -> list[bool]:
    """Which turns (score, whether a next state was seen) of a session are trained, in their order.

    Those with a score that is not 0; and the first with a next state where nothing was trained before, whatever its
    score: its advantage is 0 unless a baseline, an entropy bonus or a KL makes something of it.
    """
    out: list[bool] = []
    for score, has_next_state in turns:
        out.append(has_next_state and (score != 0 or not any(out)))
    return out
