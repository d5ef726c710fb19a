"""One rank's columns of a vocabulary that may be split over ranks, and softmax statistics over all of it."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Rows whose float32 logits are in work at once on a CPU: they stay in its cache between the passes over them.
_CPU_BLOCK_BYTES = 4 * 1024**2


class VocabShard:
    """This rank's columns of the vocabulary: ids from `start`, the first `valid` of them real."""

    def __init__(self, tp_group: Any, columns: int, vocab_size: int | None) -> None:
        """tp_group None, or of one rank: `group` is None, and nothing is sent. vocab_size None: no padding."""
        self.group = tp_group if tp_group is not None and dist.get_world_size(tp_group) > 1 else None
        rank, size = (0, 1) if self.group is None else (dist.get_rank(self.group), dist.get_world_size(self.group))
        self.start = rank * columns
        self.vocab_size = columns * size if vocab_size is None else vocab_size
        self.valid = max(0, min(columns, self.vocab_size - self.start))

    def check(self, targets: Tensor) -> None:
        if targets.device.type == "cpu" and targets.numel():  # on a GPU this would wait for the device
            low, high = int(targets.min()), int(targets.max())
            if low < 0 or high >= self.vocab_size:
                raise ValueError(f"token id {low if low < 0 else high} is outside the vocabulary of {self.vocab_size}")

    def local(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(column of each target here, 0 where it lives on another rank; whether it lives here), of their shape."""
        column = targets - self.start
        here = (column >= 0) & (column < self.valid)
        return torch.where(here, column, 0), here

    def reduce(self, x: Tensor, op: Any) -> Tensor:
        if self.group is not None:
            dist.all_reduce(x, op=op, group=self.group)
        return x


def softmax_statistics(
    logits: Tensor, targets: Tensor, shard: VocabShard, scale: float, with_entropy: bool
) -> tuple[Tensor, ...]:
    """Statistics of logits * scale over the whole vocabulary: log-probs [N, K], log-sum-exp and entropy [N].

    logits: [N, valid columns], any float dtype; not changed. targets: [N, K].
    """
    n, k = targets.shape
    column, here = shard.local(targets)
    # Maximum, then sum of exp, sum of exp * logit and the targets' logits, all relative to the maximum.
    wide = wide_dtype(logits.dtype)
    top = torch.full((n,), -torch.inf, dtype=wide, device=logits.device)
    if shard.valid:
        top = logits.amax(dim=1).to(wide) * scale
    shard.reduce(top, dist.ReduceOp.MAX)
    sums = torch.zeros((2 + k, n), dtype=wide, device=logits.device)
    if shard.valid:
        for rows in cache_blocks(logits):
            z = scaled_copy(logits[rows], scale)
            z.sub_(top[rows, None])
            sums[2:, rows] = (z.gather(1, column[rows]) * here[rows]).t()
            if with_entropy:
                e = z.exp()
                sums[1, rows] = torch.linalg.vecdot(e, z)
            else:
                e = z.exp_()
            sums[0, rows] = e.sum(dim=1)
    shard.reduce(sums, dist.ReduceOp.SUM)
    log_sum = sums[0].log()
    entropy = log_sum - sums[1] / sums[0]
    return (sums[2:] - log_sum).t(), log_sum + top, entropy


def for_matmul(x: Tensor) -> Tensor:
    """x itself; in float32 on a CPU without instructions for half precision, where torch is up to 100 times slower."""
    if x.device.type != "cpu" or x.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return x
    return x.float()


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def scaled_copy(logits: Tensor, scale: float) -> Tensor:
    """A fresh wide tensor, logits * scale."""
    return logits.to(wide_dtype(logits.dtype), copy=True).mul_(scale)


def cache_blocks(logits: Tensor) -> Iterator[slice]:
    """Slices of rows small enough for a CPU's cache; all rows at once on a GPU."""
    rows = logits.size(0)
    if logits.device.type == "cpu":
        step = max(1, _CPU_BLOCK_BYTES // (4 * max(1, logits.size(1))))
    else:
        step = max(1, rows)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))
