"""Which rank trains which samples, in which micro-batches. Pure Python: same input, same schedule, on every machine.

Invariants (tests/test_maths_schedule.py holds them against random inputs):

1. Every sample is in exactly one optimizer step, on one data-parallel rank, in one micro-batch. Nothing is dropped.
2. Steps take rollouts in order, `global_batch_size` of them each; the last step takes what is left. Pieces that share
   a rollout id (fan-out) are one rollout and stay in one step.
3. In a step all ranks have the same number of micro-batches, so that no rank skips a collective. A rank that has
   fewer samples than that gets empty micro-batches, `[]`.
4. With `use_dynamic_batch_size` a micro-batch holds at most `max_tokens_per_gpu * context_parallel_size` tokens; a
   longer sample is alone in its micro-batch. Without, it holds at most `micro_batch_size` samples.
5. Denominators belong to the whole step, over all ranks and micro-batches, and are fixed before the first backward:
   `num_samples` counts rollouts with at least one trained token, `num_tokens` counts trained tokens, and a sample's
   own denominator is the trained tokens of its rollout. Hence the gradient does not depend on ranks or packing.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

Bins = list[list[int]]


@dataclasses.dataclass(frozen=True)
class RankStep:
    """One optimizer step as one rank sees it. micro_batches: indices into that rank's columns; `[]` is empty.

    num_samples, num_tokens: denominators of the step over all ranks.
    """

    micro_batches: Bins
    num_samples: int
    num_tokens: int


@dataclasses.dataclass(frozen=True)
class ScheduleStep:
    """One optimizer step. ranks[r]: micro-batches of data-parallel rank r, as indices into the rollout's samples."""

    ranks: list[Bins]
    num_samples: int
    num_tokens: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """All optimizer steps of a rollout. sample_denominators: one per sample of the rollout, at least 1.0."""

    steps: list[ScheduleStep]
    dp_size: int
    sample_denominators: list[float]


@dataclasses.dataclass(frozen=True)
class RankData:
    """What travels to one data-parallel rank: its samples' columns (`slime.data.batch`) and its steps.

    samples: the number of each in the rollout, by which groups of other data-parallel sizes know it.
    """

    columns: dict[str, list[Any]]
    steps: list[RankStep]
    sample_denominators: list[float]
    samples: list[int]


def make_schedule(
    args: Any,
    total_lengths: Sequence[int],
    trained_tokens: Sequence[int],
    rollout_ids: Sequence[Hashable],
    dp_size: int,
) -> Schedule:
    """Splits samples over optimizer steps, data-parallel ranks and micro-batches, by the rules above.

    total_lengths: tokens of each sample, prompt and response. trained_tokens: those with loss mask 1.
    Uses args.global_batch_size, balance_data, use_dynamic_batch_size, max_tokens_per_gpu, context_parallel_size,
    micro_batch_size. Raises ValueError for columns of different length.
    """
    if not len(total_lengths) == len(trained_tokens) == len(rollout_ids):
        raise ValueError(
            f"columns disagree: {len(total_lengths)} total_lengths, {len(trained_tokens)} trained_tokens, "
            f"{len(rollout_ids)} rollout_ids; one entry per sample each"
        )
    of_rollout: dict[Hashable, int] = {}
    for rollout, trained in zip(rollout_ids, trained_tokens, strict=True):
        of_rollout[rollout] = of_rollout.get(rollout, 0) + int(trained)

    steps = []
    for samples in _split_steps(rollout_ids, args.global_batch_size):
        spread = _balanced if args.balance_data else _in_order
        ranks = [
            _pack(args, samples_of_rank, total_lengths) for samples_of_rank in spread(samples, total_lengths, dp_size)
        ]
        count = max(len(bins) for bins in ranks)
        steps.append(
            ScheduleStep(
                ranks=[_grow(bins, count, total_lengths) for bins in ranks],
                num_samples=sum(of_rollout[rollout] > 0 for rollout in {rollout_ids[i] for i in samples}),
                num_tokens=sum(int(trained_tokens[i]) for i in samples),
            )
        )
    return Schedule(steps, dp_size, [float(max(of_rollout[rollout], 1)) for rollout in rollout_ids])


def split_for_ranks(columns: dict[str, list[Any]], schedule: Schedule) -> list[RankData]:
    """The share of each data-parallel rank, with micro-batches as indices into that share."""
    size = len(schedule.sample_denominators)
    wrong = {name: len(values) for name, values in columns.items() if len(values) != size}
    if wrong:
        raise ValueError(f"every column needs one entry per sample ({size}); these have other lengths: {wrong}")
    out = []
    for rank in range(schedule.dp_size):
        mine = [i for step in schedule.steps for bin_ in step.ranks[rank] for i in bin_]
        local = {sample: position for position, sample in enumerate(mine)}
        steps = [
            RankStep([[local[i] for i in bin_] for bin_ in step.ranks[rank]], step.num_samples, step.num_tokens)
            for step in schedule.steps
        ]
        own = {name: [values[i] for i in mine] for name, values in columns.items()}
        out.append(RankData(own, steps, [schedule.sample_denominators[i] for i in mine], mine))
    return out


def _split_steps(rollout_ids: Sequence[Hashable], global_batch_size: int | None) -> Bins:
    """Samples of each step, in order."""
    number: dict[Hashable, int] = {}
    for rollout in rollout_ids:
        number.setdefault(rollout, len(number))
    size = global_batch_size or max(len(number), 1)
    steps: Bins = [[] for _ in range(-(-len(number) // size))]
    for sample, rollout in enumerate(rollout_ids):
        steps[number[rollout] // size].append(sample)
    return steps


def _in_order(samples: list[int], lengths: Sequence[int], dp_size: int) -> Bins:
    """Neighbouring samples on the same rank, numbers of samples as equal as can be."""
    bounds = [len(samples) * rank // dp_size for rank in range(dp_size + 1)]
    return [samples[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


def _balanced(samples: list[int], lengths: Sequence[int], dp_size: int) -> Bins:
    """Longest sample first, each to the rank with the fewest tokens so far that has not its share of samples yet.

    Numbers of samples differ by at most one, so fixed-size micro-batches come out equal as well.
    """
    share = [(len(samples) + rank) // dp_size for rank in reversed(range(dp_size))]
    ranks: Bins = [[] for _ in range(dp_size)]
    tokens = [0] * dp_size
    for sample in sorted(samples, key=lambda i: (-lengths[i], i)):
        rank = min((r for r in range(dp_size) if len(ranks[r]) < share[r]), key=lambda r: (tokens[r], r))
        ranks[rank].append(sample)
        tokens[rank] += lengths[sample]
    return [sorted(rank) for rank in ranks]


def _pack(args: Any, samples: list[int], lengths: Sequence[int]) -> Bins:
    if not args.use_dynamic_batch_size:
        size = args.micro_batch_size
        return [samples[i : i + size] for i in range(0, len(samples), size)]
    return first_fit(samples, lengths, args.max_tokens_per_gpu * args.context_parallel_size)


def first_fit(samples: Sequence[int], lengths: Sequence[int], limit: int) -> Bins:
    """First-fit decreasing bin packing (Johnson 1973: at most 11/9 of the best number of bins, plus one)."""
    bins: Bins = []
    room: list[int] = []
    for sample in sorted(samples, key=lambda i: (-lengths[i], i)):
        place = next((b for b, free in enumerate(room) if lengths[sample] <= free), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(limit)
        bins[place].append(sample)
        room[place] -= lengths[sample]
    return [sorted(bin_) for bin_ in bins]


def _grow(bins: Bins, count: int, lengths: Sequence[int]) -> Bins:
    """`count` bins: halves the heaviest bin that has two samples or more; only then adds empty ones."""
    out = [list(bin_) for bin_ in bins]
    while len(out) < count:
        splittable = [b for b in range(len(out)) if len(out[b]) > 1]
        if not splittable:
            out.append([])
            continue
        heaviest = max(splittable, key=lambda b: (sum(lengths[i] for i in out[b]), -b))
        whole = out.pop(heaviest)
        out[heaviest:heaviest] = _balanced(whole, lengths, 2)
    return out
