"""Speculative decoding with several drafts per place, exact for the policy (OpenClaw-RL's fourth kind of group).

Distributions are float64 [V] that sum to 1: `p` of the policy, `q` of the model that drafts. One draft: Leviathan et
al. 2023, arXiv 2211.17192. Several: after a draft that was not accepted the target becomes the residual, and the next
draft is held against that (SpecInfer, arXiv 2305.09781); against the policy itself once more, the result would be
biased.
The engine has its own speculative decoding (--sglang-speculative-*); this is for rollout functions that group drafts.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

Array = np.ndarray


def residual(p: Array, q: Array) -> Array | None:
    """max(p - q, 0), normalised: what to draw from after a draft of q was not accepted. None where p is q."""
    rest = np.maximum(np.asarray(p, np.float64) - q, 0.0)
    total = rest.sum()
    return rest / total if total > 1e-15 else None


def acceptance(p: Array, q: Array) -> Array:
    """min(1, p / q) of each token [V]; 1 for what q never drafts."""
    p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
    return np.minimum(1.0, np.divide(p, q, out=np.ones_like(q), where=q > 0))


def verify(p: Array, q: Array, drafts: Sequence[int], rng: np.random.Generator) -> tuple[int, int | None]:
    """(token, number of the draft that was accepted, or None): the token is distributed as p, whatever q is.

    drafts: tokens drawn independently from q.
    """
    target = np.asarray(p, np.float64)
    for i, token in enumerate(drafts):
        if rng.random() < acceptance(target, q)[token]:
            return token, i
        rest = residual(target, q)
        assert rest is not None  # where the target is q every draft is accepted
        target = rest
    return int(rng.choice(len(target), p=target)), None


@dataclasses.dataclass(frozen=True)
class Verification:
    """What `verify` does in expectation. output: [V], is p. accepted: probability that each draft is the one taken.
    rest: probability that none is."""

    output: Array
    accepted: list[float]
    rest: float


def expected_verification(p: Array, q: Array, drafts: int) -> Verification:
    """`verify` with so many drafts of q, summed over all drafts and all acceptances."""
    output, accepted, live = np.zeros(len(p)), [], 1.0
    target: Array | None = np.asarray(p, np.float64)
    for _ in range(drafts):
        if target is None:
            break
        taken = np.asarray(q, np.float64) * acceptance(target, q)  # [V]: drafted, and accepted
        output += live * taken
        accepted.append(float(live * taken.sum()))
        live *= 1.0 - float(taken.sum())
        target = residual(target, q)
    return Verification(output if target is None else output + live * target, accepted, live)


def tokens_per_verification(rate: float, length: int) -> float:
    """Tokens that one pass of the policy yields, when each of `length` drafted ones is accepted with chance `rate`."""
    return float(length + 1) if rate == 1.0 else (1.0 - rate ** (length + 1)) / (1.0 - rate)


def draft_weights(log_p: Array, log_q: Array, cap: float = 2.0) -> Array:
    """min(cap, p / q): importance weights of tokens that q drafted and the policy is trained on, accepted or not."""
    return np.minimum(cap, np.exp(np.asarray(log_p, np.float64) - log_q))
