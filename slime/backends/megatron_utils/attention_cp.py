"""Attention of the torch layer spec under context parallelism: keys and values are gathered, queries stay."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from slime.backends.megatron_utils.cp_utils import RowPart, joined_order

Softmax = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def context_parallel_attention(
    query: Tensor, key: Tensor, value: Tensor, part: RowPart, window: int | None, softmax: Softmax
) -> Tensor:
    """Causal attention of this rank's queries to their sequences' tokens on all context-parallel ranks.

    query: [T / cp, heads, D]; key: [T / cp, groups, D]; value: [T / cp, groups, Dv], rows as `part` says; window,
    softmax: `PackedAttention`'s. Returns [T / cp, heads, Dv]. One collective forward (all-gather) and one backward
    (reduce-scatter), on every rank.
    """
    group = mpu.get_context_parallel_group()
    keys_values = gather_from_sequence_parallel_region(torch.cat([key, value], -1), group=group)
    keys_values = keys_values.index_select(0, joined_order(part.lengths, part.context, key.device))
    sequences = [kv.split([key.size(-1), value.size(-1)], -1) for kv in keys_values.split(part.lengths)]
    out = []
    for stretch, q in zip(part.stretches, query.split([s.length for s in part.stretches]), strict=True):
        stop = stretch.start + stretch.length
        first = 0 if window is None else max(0, stretch.start - window + 1)
        mask = None
        if stretch.start or (window is not None and stop > window):
            distance = _range(stretch.start, stop, q)[:, None] - _range(first, stop, q)
            mask = (distance >= 0) & (distance < (window or stop))
        k, v = (x[first:stop].unsqueeze(0) for x in sequences[stretch.sequence])
        out.append(softmax(q.unsqueeze(0), k, v, mask).squeeze(0))
    return torch.cat(out)


def _range(start: int, stop: int, like: Tensor) -> Tensor:
    return torch.arange(start, stop, device=like.device)


class _Alone:
    """A process group of one, as far as rotary embedding asks."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


class ContiguousSelfAttention(SelfAttention):
    """Self-attention whose rotary embedding goes by the position of each token.

    Megatron's own knows, under context parallelism, only the zigzag cut. This one looks the angles of this rank's
    tokens up and lets Megatron apply them row by row, as to one sequence on one rank.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        groups: Any = copy.copy(self.pg_collection)  # type: ignore[has-type]
        groups.cp = _Alone()  # Megatron's attention asks it for rotary embedding only
        self.pg_collection = groups

    def forward(
        self, hidden_states: Tensor, *args: Any, rotary_pos_emb: Any, packed_seq_params: Any, **kwargs: Any
    ) -> Any:
        angles = rotary_pos_emb[packed_seq_params.positions]  # [max length, 1, 1, D] -> [T / cp, 1, 1, D]
        return super().forward(
            hidden_states, *args, rotary_pos_emb=angles, packed_seq_params=packed_seq_params, **kwargs
        )
