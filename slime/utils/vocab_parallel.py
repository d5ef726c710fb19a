"""Log-probs and entropy over a vocabulary that may be split over tensor-parallel ranks, in bounded memory.

Two autograd functions with the same arithmetic, in float32 whatever the input's dtype (float64 stays float64):

- `linear_log_probs_and_entropy` starts from hidden states and the output layer's weight. It holds the logits of one
  chunk of rows at a time; the backward pass has those of the last chunk and computes the others again.
- `vocab_parallel_log_probs_and_entropy` starts from logits.

With logits z, p = softmax(z), H = -sum p log p:  d log p_t / dz_v = [v = t] - p_v  and  dH / dz_v = -p_v (log p_v + H).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.utils.vocab_shard import VocabShard, cache_blocks, for_matmul, scaled_copy, softmax_statistics, wide_dtype


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
    shard = VocabShard(tp_group, weight.size(0), vocab_size)
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
    shard = VocabShard(tp_group, logits.size(1), vocab_size)
    shard.check(targets)
    log_probs, entropy = _LogitsLogProbs.apply(logits, _per_row(targets), shard, with_entropy)
    return log_probs.reshape(targets.shape), entropy


def _per_row(targets: Tensor) -> Tensor:
    """[N, K]; one target per row is K = 1."""
    return targets if targets.dim() == 2 else targets.unsqueeze(1)


def _backward(
    logits: Tensor,
    targets: Tensor,
    shard: VocabShard,
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
    for rows in cache_blocks(logits):
        z = scaled_copy(logits[rows], scale)
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
        shard: VocabShard,
        scale: float,
        chunk: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        n = hidden.size(0)
        w = for_matmul(weight[: shard.valid])
        log_probs = torch.empty(targets.shape, dtype=wide_dtype(hidden.dtype), device=hidden.device)
        log_z, entropy = log_probs.new_empty(n), log_probs.new_empty(n)
        buffer = w.new_empty((min(chunk, n), w.size(0)))  # one for all chunks: fresh pages are slow on a CPU
        last = max(0, (n - 1) // chunk * chunk)
        for start in range(0, n, chunk):
            rows = slice(start, min(start + chunk, n))
            logits = torch.mm(for_matmul(hidden[rows]), w.t(), out=buffer[: rows.stop - start])
            log_probs[rows], log_z[rows], entropy[rows] = softmax_statistics(
                logits, targets[rows], shard, scale, with_entropy
            )
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
        w = for_matmul(weight[: shard.valid])
        grad_hidden = torch.zeros(hidden.shape, dtype=wide_dtype(hidden.dtype), device=hidden.device)
        sum_weight = _ProductSum(weight, shard.valid)

        def pick(x: Tensor | None, rows: Tensor) -> Tensor | None:
            return None if x is None else x[rows]

        def add(rows: Tensor, logits: Tensor) -> None:
            """Turns logits of `rows` into their gradient, in place, and adds what comes of it."""
            grads = pick(entropy, rows), pick(grad_lp, rows), pick(grad_entropy, rows)
            _backward(logits, targets[rows], shard, ctx.scale, log_z[rows], *grads, out=logits)
            grad_hidden[rows] = (logits @ w).to(grad_hidden.dtype)
            sum_weight.add(logits, for_matmul(hidden[rows]))

        live = _rows_with_gradient(grad_lp, grad_entropy, hidden)
        kept = live[live >= ctx.kept]
        if kept.numel():
            whole = kept.numel() == hidden.size(0) - ctx.kept
            add(kept, buffer[: kept.numel()] if whole else buffer[kept - ctx.kept])
        for rows in live[live < ctx.kept].split(ctx.chunk):
            if rows.numel():
                add(rows, torch.mm(for_matmul(hidden[rows]), w.t(), out=buffer[: rows.numel()]))
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
        elif self.total.dtype == grad.dtype == wide_dtype(grad.dtype):
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
        ctx: Any, logits: Tensor, targets: Tensor, shard: VocabShard, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        log_probs, log_z, entropy = softmax_statistics(logits[:, : shard.valid], targets, shard, 1.0, with_entropy)
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
