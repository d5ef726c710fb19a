"""The most likely tokens of each row and their log-probs, over a vocabulary that may be split over ranks.

No gradient: for a teacher, or for the candidates of an old policy. The student's log-probs at these ids, with a
gradient, are `linear_log_probs_and_entropy` with targets [N, K].
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.utils.vocab_shard import VocabShard, for_matmul, softmax_statistics


@torch.no_grad()
def linear_topk_log_probs(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    tp_group: Any = None,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The k largest entries of log softmax(hidden @ weight.T / temperature), largest first, and their ids.

    hidden: [N, H], the same on all ranks of tp_group. weight: [V / tp, H], this rank's rows. vocab_size: true size;
    weight rows beyond it (padding) are never chosen. Of equal entries any may come. Holds the logits of `chunk_size`
    rows at a time. Returns (float32 [N, k], int64 [N, k]), the same on every rank; float64 for float64 inputs.
    Raises ValueError for a k outside [1, vocabulary].
    """
    shard = _checked_shard(tp_group, weight.size(0), vocab_size, k)
    w = for_matmul(weight[: shard.valid])
    chunks = hidden.split(max(1, chunk_size))
    parts = [_topk(for_matmul(rows) @ w.t(), k, shard, weight.size(0), 1.0 / temperature) for rows in chunks]
    log_probs, ids = zip(*parts, strict=True)
    return torch.cat(log_probs), torch.cat(ids)


@torch.no_grad()
def vocab_parallel_topk_log_probs(
    logits: Tensor, k: int, *, tp_group: Any = None, vocab_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """The same of log softmax(logits); logits: [N, V / tp], this rank's columns."""
    shard = _checked_shard(tp_group, logits.size(1), vocab_size, k)
    return _topk(logits[:, : shard.valid], k, shard, logits.size(1), 1.0)


def _checked_shard(tp_group: Any, columns: int, vocab_size: int | None, k: int) -> VocabShard:
    shard = VocabShard(tp_group, columns, vocab_size)
    if not 1 <= k <= shard.vocab_size:
        raise ValueError(f"the {k} most likely tokens of a vocabulary of {shard.vocab_size}: k must be in [1, that]")
    return shard


def _topk(logits: Tensor, k: int, shard: VocabShard, columns: int, scale: float) -> tuple[Tensor, Tensor]:
    """logits: [n, valid columns], not scaled. columns: of each rank, padding included."""
    n = logits.size(0)
    nowhere = torch.zeros((n, 0), dtype=torch.long, device=logits.device)
    _, log_z, _ = softmax_statistics(logits, nowhere, shard, scale, with_entropy=False)
    own = min(k, shard.valid)
    values, ids = logits.topk(own, dim=1)
    # Every rank sends as much, whatever padding it holds: what it lacks can never be chosen.
    lacking = min(k, columns) - own
    values = torch.nn.functional.pad(values.to(log_z.dtype) * scale, (0, lacking), value=-torch.inf)
    ids = torch.nn.functional.pad(ids + shard.start, (0, lacking))
    if shard.group is not None:
        values, ids = _gather(values, shard.group), _gather(ids, shard.group)
    best, places = values.topk(min(k, values.size(1)), dim=1)
    return best - log_z[:, None], ids.gather(1, places)


def _gather(x: Tensor, group: Any) -> Tensor:
    """[n, c] of each rank to [n, ranks * c]."""
    out = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(out, x.contiguous(), group=group)
    return torch.cat(out, dim=1)
