"""Log-probs and entropy over a vocabulary that may be split over tensor-parallel ranks, in bounded memory.

Two autograd functions with the same arithmetic, in float32 whatever the input's dtype (float64 stays float64):

- `linear_log_probs_and_entropy` starts from hidden states and the output layer's weight. It holds the logits of one
  chunk of rows at a time; the backward pass has those of the last chunk and computes the others again.
- `vocab_parallel_log_probs_and_entropy` starts from logits.

With logits z, p = softmax(z), H = -sum p log p:  d log p_t / dz_v = [v = t] - p_v  and  dH / dz_v = -p_v (log p_v + H).
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Rows whose float32 logits are in work at once on a CPU: they stay in its cache between the passes over them.
_CPU_BLOCK_BYTES = 4 * 1024**2


def linear_log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    tp_group: Any = None,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    with_entropy: bool = False,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden @ weight.T / temperature) at `targets`, and the entropy of that softmax in nats.

    hidden: [N, H], the same on all ranks of tp_group. weight: [V / tp, H], this rank's rows; same dtype as hidden.
    targets: int64 [N], ids of the whole vocabulary, or [N, K] for K of them per row, at the cost of one.
    tp_group None, or of size 1: no communication.
    vocab_size: true size; weight rows beyond it (padding) have probability 0. chunk_size: rows of logits per chunk.
    Returns (float32 of the shape of `targets`, float32 [N] or None). The gradient of `hidden` is complete on every
    rank; rows that receive no gradient cost nothing in the backward pass. Raises ValueError for shapes or targets that
    do not fit.
    """
    fits = targets.dim() in (1, 2) and targets.shape[:1] == hidden.shape[:1]
    if hidden.dim() != 2 or weight.dim() != 2 or not fits or hidden.size(1) != weight.size(1):
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)} do not fit: "
            "expected [N, H], [V / tp, H] and [N] or [N, K]"
        )
    group = _group(tp_group)
    shard = _Shard(group, weight.size(0), vocab_size)
    shard.check(targets)
    log_probs, entropy = _LinearLogProbs.apply(
        hidden, weight, _per_row(targets), shard, 1.0 / temperature, max(1, chunk_size), with_entropy
    )
    return log_probs.reshape(targets.shape), entropy


def vocab_parallel_log_probs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    tp_group: Any = None,
    with_entropy: bool = False,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits) at `targets` and the entropy of that softmax in nats.

    logits: [N, V / tp], this rank's columns; targets: int64 [N] or [N, K]. Otherwise as `linear_log_probs_and_entropy`.
    """
    if logits.dim() != 2 or targets.dim() not in (1, 2) or targets.shape[:1] != logits.shape[:1]:
        raise ValueError(
            f"logits {tuple(logits.shape)} and targets {tuple(targets.shape)}: expected [N, V / tp] and [N] or [N, K]"
        )
    shard = _Shard(_group(tp_group), logits.size(1), vocab_size)
    shard.check(targets)
    log_probs, entropy = _LogitsLogProbs.apply(logits, _per_row(targets), shard, with_entropy)
    return log_probs.reshape(targets.shape), entropy


class _Shard:
    """This rank's columns of the vocabulary: ids from `start`, the first `valid` of them real."""

    def __init__(self, group: Any, columns: int, vocab_size: int | None) -> None:
        self.group = group
        rank, size = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
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


def _per_row(targets: Tensor) -> Tensor:
    """[N, K]; one target per row is K = 1."""
    return targets if targets.dim() == 2 else targets.unsqueeze(1)


def _for_matmul(x: Tensor) -> Tensor:
    """x itself; in float32 on a CPU without instructions for half precision, where torch is up to 100 times slower."""
    if x.device.type != "cpu" or x.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return x
    return x.float()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _scaled(logits: Tensor, scale: float) -> Tensor:
    """A fresh wide tensor, logits * scale."""
    return logits.to(_wide(logits.dtype), copy=True).mul_(scale)


def _group(tp_group: Any) -> Any:
    return tp_group if tp_group is not None and dist.get_world_size(tp_group) > 1 else None


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Slices of rows small enough for a CPU's cache; all rows at once on a GPU."""
    rows = logits.size(0)
    if logits.device.type == "cpu":
        step = max(1, _CPU_BLOCK_BYTES // (4 * max(1, logits.size(1))))
    else:
        step = max(1, rows)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _forward(logits: Tensor, targets: Tensor, shard: _Shard, scale: float, with_entropy: bool) -> tuple[Tensor, ...]:
    """Statistics of logits * scale over the whole vocabulary: log-probs [N, K], log-sum-exp and entropy [N].

    logits: [N, valid columns], any float dtype; not changed. targets: [N, K].
    """
    n, k = targets.shape
    column, here = shard.local(targets)
    # Maximum, then sum of exp, sum of exp * logit and the targets' logits, all relative to the maximum.
    wide = _wide(logits.dtype)
    top = torch.full((n,), -torch.inf, dtype=wide, device=logits.device)
    if shard.valid:
        top = logits.amax(dim=1).to(wide) * scale
    shard.reduce(top, dist.ReduceOp.MAX)
    sums = torch.zeros((2 + k, n), dtype=wide, device=logits.device)
    if shard.valid:
        for rows in _blocks(logits):
            z = _scaled(logits[rows], scale)
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


def _backward(
    logits: Tensor,
    targets: Tensor,
    shard: _Shard,
    scale: float,
    log_z: Tensor,
    entropy: Tensor | None,
    grad_lp: Tensor | None,
    grad_entropy: Tensor | None,
    out: Tensor,
) -> None:
    """Writes the gradient with respect to `logits` into `out` [N, valid columns], of any float dtype.

    targets and grad_lp: [N, K]; log_z, entropy and grad_entropy: [N].
    """
    if not shard.valid:
        return  # this rank holds padding only
    column, here = shard.local(targets)
    row_lp = None if grad_lp is None else grad_lp.sum(1)  # of a row's log-probs, each of which has the same -p
    for rows in _blocks(logits):
        z = _scaled(logits[rows], scale)
        z.sub_(log_z[rows, None])  # log p
        if grad_entropy is not None:
            assert entropy is not None
            p = z.exp()
            z.add_(entropy[rows, None]).mul_(grad_entropy[rows, None])
            if row_lp is not None:
                z.add_(row_lp[rows, None])
            grad = z.mul_(p)
        else:
            assert row_lp is not None
            grad = z.exp_().mul_(row_lp[rows, None])
        if grad_lp is not None:
            grad.scatter_add_(1, column[rows], -(grad_lp[rows] * here[rows]))
        out[rows] = grad.mul_(-scale)


class _LinearLogProbs(torch.autograd.Function):
    """Keeps the last chunk's logits for the backward pass and computes those of the others again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        shard: _Shard,
        scale: float,
        chunk: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        n = hidden.size(0)
        w = _for_matmul(weight[: shard.valid])
        log_probs = torch.empty(targets.shape, dtype=_wide(hidden.dtype), device=hidden.device)
        log_z, entropy = log_probs.new_empty(n), log_probs.new_empty(n)
        buffer = w.new_empty((min(chunk, n), w.size(0)))  # one for all chunks: fresh pages are slow on a CPU
        last = max(0, (n - 1) // chunk * chunk)
        for start in range(0, n, chunk):
            rows = slice(start, min(start + chunk, n))
            logits = torch.mm(_for_matmul(hidden[rows]), w.t(), out=buffer[: rows.stop - start])
            log_probs[rows], log_z[rows], entropy[rows] = _forward(logits, targets[rows], shard, scale, with_entropy)
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy if with_entropy else None)
        ctx.shard, ctx.scale, ctx.chunk = shard, scale, chunk
        ctx.buffer, ctx.kept = buffer, last  # the buffer holds the logits of rows from `last` on
        ctx.set_materialize_grads(False)
        return log_probs, entropy.clone() if with_entropy else None

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_lp: Tensor | None, grad_entropy: Tensor | None = None) -> tuple[Any, ...]:
        hidden, weight, targets, log_z, entropy = ctx.saved_tensors
        shard, buffer = ctx.shard, ctx.buffer
        w = _for_matmul(weight[: shard.valid])
        grad_hidden = torch.zeros(hidden.shape, dtype=_wide(hidden.dtype), device=hidden.device)
        sum_weight = _ProductSum(weight, shard.valid)

        def pick(x: Tensor | None, rows: Tensor) -> Tensor | None:
            return None if x is None else x[rows]

        def add(rows: Tensor, logits: Tensor) -> None:
            """Turns logits of `rows` into their gradient, in place, and adds what comes of it."""
            grads = pick(entropy, rows), pick(grad_lp, rows), pick(grad_entropy, rows)
            _backward(logits, targets[rows], shard, ctx.scale, log_z[rows], *grads, out=logits)
            grad_hidden[rows] = (logits @ w).to(grad_hidden.dtype)
            sum_weight.add(logits, _for_matmul(hidden[rows]))

        live = _rows_with_gradient(grad_lp, grad_entropy, hidden)
        kept = live[live >= ctx.kept]
        if kept.numel():
            whole = kept.numel() == hidden.size(0) - ctx.kept
            add(kept, buffer[: kept.numel()] if whole else buffer[kept - ctx.kept])
        for rows in live[live < ctx.kept].split(ctx.chunk):
            if rows.numel():
                add(rows, torch.mm(_for_matmul(hidden[rows]), w.t(), out=buffer[: rows.numel()]))
        ctx.kept = hidden.size(0)  # overwritten: a second backward over a retained graph computes all again
        shard.reduce(grad_hidden, dist.ReduceOp.SUM)
        return grad_hidden.to(hidden.dtype), sum_weight.result(), None, None, None, None, None


def _rows_with_gradient(grad_lp: Tensor | None, grad_entropy: Tensor | None, like: Tensor) -> Tensor:
    """Indices of rows that any gradient reaches: masked tokens and those without advantage cost nothing."""
    grads = [g for g in (grad_lp, grad_entropy) if g is not None]
    if not grads:
        return torch.zeros(0, dtype=torch.long, device=like.device)
    return _reached(grads).nonzero().squeeze(1)


def _reached(grads: list[Tensor]) -> Tensor:
    """bool [N]: rows where any of the gradients, [N] or [N, K], is not 0."""
    return torch.stack([(g != 0).any(1) if g.dim() == 2 else g != 0 for g in grads]).any(0)


class _ProductSum:
    """Sum of grad.T @ hidden over chunks, [V / tp, H], in float32 when there is more than one term."""

    def __init__(self, weight: Tensor, valid: int) -> None:
        self.weight, self.valid = weight, valid
        self.total: Tensor | None = None

    def add(self, grad: Tensor, hidden: Tensor) -> None:
        if self.total is None:
            self.total = grad.t() @ hidden
        elif self.total.dtype == grad.dtype == _wide(grad.dtype):
            self.total.addmm_(grad.t(), hidden)
        else:
            self.total = self.total.float() + grad.t() @ hidden

    def result(self) -> Tensor:
        if self.total is None:
            return torch.zeros_like(self.weight)
        total = self.total.to(self.weight.dtype)
        padding = self.weight.size(0) - self.valid
        return torch.nn.functional.pad(total, (0, 0, 0, padding)) if padding else total


class _LogitsLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, shard: _Shard, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        log_probs, log_z, entropy = _forward(logits[:, : shard.valid], targets, shard, 1.0, with_entropy)
        ctx.save_for_backward(logits, targets, log_z, entropy if with_entropy else None)
        ctx.shard = shard
        ctx.set_materialize_grads(False)
        return log_probs, entropy if with_entropy else None

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_lp: Tensor | None, grad_entropy: Tensor | None = None) -> tuple[Any, ...]:
        logits, targets, log_z, entropy = ctx.saved_tensors
        out = torch.zeros_like(logits)
        grads = [g for g in (grad_lp, grad_entropy) if g is not None]
        if grads:
            valid = ctx.shard.valid
            _backward(logits[:, :valid], targets, ctx.shard, 1.0, log_z, entropy, grad_lp, grad_entropy, out[:, :valid])
            out.masked_fill_(~_reached(grads)[:, None], 0.0)  # masked rows may hold NaN
        return out, None, None, None
