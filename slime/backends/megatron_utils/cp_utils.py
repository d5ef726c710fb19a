"""Context parallelism: which tokens of a packed row a rank holds, and how per-token values become whole again.

The ranks of a context-parallel group see the same samples and each runs the model on a part of their tokens:

- zigzag (Megatron's and Transformer Engine's): every sequence is padded to a multiple of 2 * cp and cut into 2 * cp
  chunks; rank r holds chunks r and 2 * cp - 1 - r, so that causal attention costs each rank the same.
- contiguous (--allgather-cp): the packed row itself is cut into cp parts, wherever sequences begin and end.

Only the model, and so its logits, is cut. Log-probs, entropies and values of responses are put together before any
loss sees them, and every column of a batch is whole. So each rank computes the loss of whole samples, all of them
the same number, and the backward pass gives each rank the gradient of its own tokens; DDP adds these up. No formula
knows of context parallelism, neither ours nor a user's.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class ContextParallel:
    """Where a rank stands among the `size` ranks that share its samples, and how they cut the row."""

    rank: int = 0
    size: int = 1
    contiguous: bool = False

    @property
    def sequence_multiple(self) -> int:
        """What the length of each sequence must be a multiple of."""
        return 1 if self.contiguous or self.size == 1 else 2 * self.size


WHOLE = ContextParallel()


def context_parallel(args: Any) -> ContextParallel:
    """This rank's place, from Megatron's parallel state and --allgather-cp."""
    if not mpu.model_parallel_is_initialized() or (size := mpu.get_context_parallel_world_size()) == 1:
        return WHOLE
    return ContextParallel(mpu.get_context_parallel_rank(), size, args.allgather_cp)


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Neighbouring tokens of one sequence on one rank. sequence: its index; start: position of the first token."""

    sequence: int
    start: int
    length: int


@dataclasses.dataclass(frozen=True)
class RowPart:
    """What one rank holds of a packed row. lengths: tokens of each (padded) sequence; stretches in local order."""

    context: ContextParallel
    lengths: tuple[int, ...]
    stretches: tuple[Stretch, ...]

    @functools.cached_property
    def index(self) -> Tensor:
        """int64 [T / cp] on the CPU: place in the whole row of each token that this rank holds."""
        begins = torch.tensor((0, *self.lengths)).cumsum(0)
        return torch.cat([torch.arange(s.length) + (begins[s.sequence] + s.start) for s in self.stretches])


def cut_row(lengths: Sequence[int], context: ContextParallel) -> RowPart:
    """This rank's part of a row of sequences with these (padded) lengths; ValueError where they do not divide."""
    size, rank = context.size, context.rank
    unit = context.sequence_multiple
    if sum(lengths) % size or any(n % unit for n in lengths):
        raise ValueError(
            f"sequences of {list(lengths)} tokens cannot be cut over {size} context-parallel ranks: their sum must be "
            f"a multiple of {size} and each of {unit}"
        )
    stretches = []
    if context.contiguous:
        part = sum(lengths) // size
        low, high, begin = rank * part, (rank + 1) * part, 0
        for sequence, length in enumerate(lengths):
            first, last = max(low, begin), min(high, begin + length)
            if first < last:
                stretches.append(Stretch(sequence, first - begin, last - first))
            begin += length
    else:
        for sequence, length in enumerate(lengths):
            chunk = length // (2 * size)
            stretches += [Stretch(sequence, r * chunk, chunk) for r in (rank, 2 * size - 1 - rank)]
    return RowPart(context, tuple(lengths), tuple(stretches))


@functools.lru_cache(maxsize=64)
def joined_order(lengths: tuple[int, ...], context: ContextParallel, device: torch.device) -> Tensor:
    """int64 [T]: where each token of the whole row is when the ranks' parts of it are joined by rank."""
    parts = [cut_row(lengths, dataclasses.replace(context, rank=rank)).index for rank in range(context.size)]
    return torch.cat(parts).argsort().to(device)


def pad_lengths(lengths: Sequence[int], context: ContextParallel, multiple: int = 1) -> list[int]:
    """Lengths with padding, and a last sequence that nobody reads where each rank's rows need it for `multiple`."""
    unit = context.sequence_multiple
    padded = [-(-n // unit) * unit for n in lengths]
    rest = -sum(padded) % math.lcm(unit, context.size * multiple)
    return [*padded, rest] if rest else padded


@dataclasses.dataclass(frozen=True)
class ResponsePart:
    """Logits rows of this rank that predict response tokens. All int64, on the CPU.

    rows: [n], in this rank's logits. places: [n], of what they predict among all `count` response tokens.
    """

    rows: Tensor
    places: Tensor
    count: int
    context: ContextParallel

    def whole(self, x: Tensor) -> Tensor:
        """Values of this rank's rows [n, ...] to those of all response tokens [count, ...], on every rank."""
        if self.context.size == 1:
            return x
        return _Whole.apply(x, self.places.to(x.device), self.count)


def response_part(rows: Tensor, lengths: Sequence[int], context: ContextParallel, local_rows: int) -> ResponsePart:
    """Which of `rows` (int64 [N], into the row of unpadded sequences) this rank's logits [local_rows, ...] hold."""
    padded = pad_lengths(lengths, context)
    if rest := local_rows * context.size - sum(padded):
        padded.append(rest)
    part = cut_row(padded, context)
    # From the unpadded row into the padded one, and from there to this rank's rows.
    ends = torch.tensor(lengths).cumsum(0)
    shift = torch.tensor((0, *padded)).cumsum(0)[: len(lengths)] - (ends - torch.tensor(lengths))
    sequence = torch.searchsorted(ends, rows, right=True)
    local = torch.full((sum(padded),), -1)
    local[part.index] = torch.arange(len(part.index))
    here = local[rows + shift[sequence]]
    places = (here >= 0).nonzero().squeeze(1)
    return ResponsePart(here[places], places, len(rows), context)


class _Whole(torch.autograd.Function):
    """Puts parts together over the context-parallel ranks.

    Each rank has the same loss of the whole, so the gradient of its part is its part of its own gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(places)
        out = x.new_zeros((count, *x.shape[1:]))
        out[places] = x
        dist.all_reduce(out, group=mpu.get_context_parallel_group())  # adds zeros, so every value stays what it was
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (places,) = ctx.saved_tensors
        return grad[places], None, None


def slice_log_prob_with_cp(log_prob: Tensor, total_length: int, response_length: int) -> Tensor:
    """This rank's part of a per-token tensor [response_length] of one sample as losses see it: all of it.

    Here losses work on whole responses under any layout (see above). Both functions are there for plug-ins that cut
    and gather: they hand back what they got, and raise ValueError for anything but a whole response.
    """
    return _check_whole(log_prob, response_length)


def all_gather_with_cp(tensor: Tensor, total_length: int, response_length: int) -> Tensor:
    """The whole per-token tensor [response_length] of one sample from what losses see of it: the same."""
    return _check_whole(tensor, response_length)


def _check_whole(x: Tensor, response_length: int) -> Tensor:
    if x.size(0) != response_length:
        raise ValueError(f"a per-token tensor of {x.size(0)} for a response of {response_length} tokens")
    return x
