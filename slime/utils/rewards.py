"""Rewards to scalars: what a response's reward means beside its siblings'. numpy float64, statistics by group id.

Groups may have any sizes and lie in any order. Every function takes rewards [n] and group_ids [n] and returns
float64 [n]; a reward that is not finite raises ValueError, so callers leave such samples out first.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence

import numpy as np

Array = np.ndarray
STD_EPS = 1e-6


def group_norm(
    rewards: Sequence[float] | Array, group_ids: Sequence[Hashable] | Array, *, std: bool = True, ddof: int = 1
) -> Array:
    """(r - mean) / (std + 1e-6) within each group: GRPO (arXiv 2402.03300); without std: Dr.GRPO (arXiv 2503.20783).

    Two passes, so a large common offset costs no digits. A group of one, or whose rewards are all equal, is exactly
    0.0 each: the rounding residue of a mean is never divided by the epsilon.
    """

    def one(r: Array) -> Array:
        if _constant(r):
            return np.zeros_like(r)
        centred = _centre(r)
        return centred / (np.sqrt((centred**2).sum() / (r.size - ddof)) + STD_EPS) if std else centred

    return _by_group(rewards, group_ids, one)


def rloo(rewards: Sequence[float] | Array, group_ids: Sequence[Hashable] | Array) -> Array:
    """r minus the mean of the others in its group (RLOO, arXiv 2402.14740); 0.0 in a group of one."""

    def one(r: Array) -> Array:
        return np.zeros_like(r) if _constant(r) else _centre(r) * (r.size / (r.size - 1))

    return _by_group(rewards, group_ids, one)


def maxrl(rewards: Sequence[float] | Array, group_ids: Sequence[Hashable] | Array, *, centred: bool = True) -> Array:
    """(r - p) / p, or r / p when not centred; p is the group's mean reward (MaxRL, arXiv 2602.02710).

    0.0 for a group that fails altogether, and centred for a group of one. Uncentred values are likelihood weights
    of the successes, right for stale data too. Raises ValueError for rewards outside [0, 1], where p loses its sense.
    """
    _check_range("maxrl", rewards, 0.0, 1.0)

    def one(r: Array) -> Array:
        p = r.mean()
        if p == 0.0 or (centred and _constant(r)):
            return np.zeros_like(r)
        return (_centre(r) if centred else r) / p

    return _by_group(rewards, group_ids, one)


def tailrl(
    rewards: Sequence[float] | Array,
    group_ids: Sequence[Hashable] | Array,
    *,
    centred: bool = True,
    low: float = 0.0,
    high: float = 1.0,
) -> Array:
    """Weights of the tail likelihood: the integral of log P(r > tau) over tau in [0, 1] (TailRL, arXiv 2609.02987).

    With ascending r_(1) <= ... <= r_(N) and r_(0) = 0: W_(i) = N * sum_{j<=i} (r_(j) - r_(j-1)) / (N - j + 1); centred
    subtracts the mean, which is the largest reward. Rewards are first rescaled from the known bounds [low, high];
    one outside raises ValueError. For rewards 0 and 1 it equals `maxrl`.
    """
    _check_range("tailrl", rewards, low, high)

    def one(r: Array) -> Array:
        if centred and _constant(r):
            return np.zeros_like(r)
        order = np.argsort(r, kind="stable")
        steps = np.diff(r[order], prepend=0.0)
        weights = np.empty_like(r)
        weights[order] = np.cumsum(steps / np.arange(r.size, 0, -1)) * r.size
        return weights - r.max() if centred else weights

    return _by_group((np.asarray(rewards, np.float64) - low) / (high - low), group_ids, one)


def session_baseline(
    rewards: Sequence[float | None],
    session_ids: Sequence[Hashable],
    *,
    mode: str = "prior",
    b0: float = 0.0,
    k0: float = 0.0,
    alpha: float = 0.1,
) -> Array:
    """r_i minus a running baseline of its session's earlier rewards, in the order given.

    prior: (k0 * b0 + sum of earlier) / (k0 + number of earlier), b0 where there is no history and k0 is 0.
    inclusive: the mean with r_i itself. ema: exponential mean of the earlier ones with weight `alpha`, from b0.
    None (no judgement) gives 0.0 and leaves the baseline as it is.
    """
    if mode not in ("prior", "inclusive", "ema"):
        raise ValueError(f"session baseline mode {mode!r}: use prior, inclusive or ema")
    known = np.asarray([r for r in rewards if r is not None], np.float64)
    _check_finite(known)
    out = np.zeros(len(rewards), np.float64)
    state: dict[Hashable, tuple[float, int, float]] = {}  # sum and number of earlier rewards, exponential mean
    for i, (reward, session) in enumerate(zip(rewards, session_ids, strict=True)):
        if reward is None:
            continue
        total, count, mean = state.get(session, (0.0, 0, b0))
        if mode == "prior":
            base = (k0 * b0 + total) / (k0 + count) if k0 + count > 0 else b0
        elif mode == "inclusive":
            base = (total + reward) / (count + 1)
        else:
            base = mean
        out[i] = reward - base
        state[session] = (total + reward, count + 1, (1 - alpha) * mean + alpha * reward)
    return out


def memory_advantages(
    memory_rewards: Sequence[float] | Array, question_ids: Sequence[Hashable] | Array, *, std: bool = True
) -> Array:
    """MemPO's advantage of each memory: P_mem - P_full, normalised over all trajectories and turns of a question.

    One entry per memory; each weighs the same, so trajectories may have different numbers of turns. A pool of one or
    without spread is 0.0. `add_span_advantages` puts the result on the memory's tokens.
    """
    return group_norm(memory_rewards, question_ids, std=std)


def geometric_mean_probability(log_probs: Sequence[float] | Array) -> float:
    """exp of the mean log-prob of an answer's tokens: MemPO's P. Raises ValueError for an answer without tokens."""
    values = np.asarray(log_probs, np.float64)
    if values.size == 0:
        raise ValueError("the probability of an answer without tokens is not defined: give its log-probs")
    return float(np.exp(values.mean()))


def count_zero_variance_groups(rewards: Sequence[float] | Array, group_ids: Sequence[Hashable] | Array) -> int:
    """Groups whose rewards are all equal: they teach nothing."""
    r = np.asarray(rewards, np.float64)
    return sum(_constant(r[rows]) for rows in _groups(group_ids))


def _constant(r: Array) -> bool:
    return bool((r == r[0]).all())


def _centre(r: Array) -> Array:
    """r - mean, by two passes: the first mean's rounding error is taken out by the second."""
    centred = r - r.mean()
    return centred - centred.mean()


def _groups(group_ids: Sequence[Hashable] | Array) -> Iterator[Array]:
    members: dict[Hashable, list[int]] = {}
    for i, group in enumerate(group_ids.tolist() if isinstance(group_ids, np.ndarray) else group_ids):
        members.setdefault(group, []).append(i)
    return (np.asarray(rows) for rows in members.values())


def _by_group(
    rewards: Sequence[float] | Array, group_ids: Sequence[Hashable] | Array, one: Callable[[Array], Array]
) -> Array:
    r = np.asarray(rewards, np.float64)
    if r.ndim != 1 or len(group_ids) != r.size:
        raise ValueError(f"one group id per reward: {r.shape} rewards, {len(group_ids)} group ids")
    _check_finite(r)
    out = np.zeros_like(r)
    for rows in _groups(group_ids):
        out[rows] = one(r[rows])
    return out


def _check_finite(r: Array) -> None:
    if not np.isfinite(r).all():
        raise ValueError(f"rewards at {np.flatnonzero(~np.isfinite(r)).tolist()} are not finite: leave them out")


def _check_range(name: str, rewards: Sequence[float] | Array, low: float, high: float) -> None:
    r = np.asarray(rewards, np.float64)
    outside = np.flatnonzero(~((r >= low) & (r <= high)))
    if outside.size:
        raise ValueError(
            f"--advantage-estimator {name} needs rewards in [{low:g}, {high:g}]; reward {outside[0]} is {r[outside[0]]}"
        )
