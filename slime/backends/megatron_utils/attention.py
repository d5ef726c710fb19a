"""Core attention of the torch layer spec: causal attention over packed sequences (THD), each one for itself."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slime.backends.megatron_utils.attention_cp import context_parallel_attention


class PackedAttention(torch.nn.Module):
    """Grouped-query attention softmax(q k^T * scale) v with a causal mask inside each packed sequence.

    Takes query [T, heads, D], key [T, groups, D] and value [T, groups, Dv] of this tensor-parallel rank and the
    boundaries in `packed_seq_params.cu_seqlens_q` (Megatron's THD layout); returns [T, heads, Dv]. A sliding window of
    w tokens lets a token see itself and the w - 1 before it. No dropout. With softmax_type "learnable" each head has a
    sink, `softmax_offset` [heads]: one logit more in the softmax's sum, with no value of its own (gpt-oss).
    Under context parallelism `packed_seq_params.part` says which tokens this rank holds (`attention_cp.py`).
    """

    softmax_offset: torch.nn.Parameter | None

    def __init__(
        self, config: Any, layer_number: int, softmax_scale: float | None = None, pg_collection: Any = None, **_: Any
    ) -> None:
        super().__init__()
        if config.attention_dropout:
            raise ValueError("the torch layer spec has no attention dropout; set attention_dropout to 0")
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window: int | None = config.window_size[0] + 1 if windowed else None
        self.tp_group = pg_collection.tp if pg_collection is not None else None
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            device = None if config.use_cpu_initialization else torch.cuda.current_device()
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=device))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        elif config.softmax_type != "vanilla":
            raise ValueError(f"the torch layer spec has no softmax of type {config.softmax_type!r}")

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """For Megatron's checkpoints: the sinks are cut over tensor-parallel ranks."""
        state = self.state_dict(prefix="", keep_vars=True)
        groups = dict(tp_group=self.tp_group, dp_cp_group=(metadata or {}).get("dp_cp_group"))
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets, **groups)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise ValueError("the torch layer spec takes packed sequences only: pass packed_seq_params with 'thd'")
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("the torch layer spec is causal per sequence and takes no attention mask or bias")
        # Rotary embedding may have been computed in float32, to be rounded here once (`rounding.py`).
        query, key = query.to(value.dtype), key.to(value.dtype)
        if (part := getattr(packed_seq_params, "part", None)) is not None:
            return context_parallel_attention(query, key, value, part, self.window, self._softmax)
        lengths = _lengths(packed_seq_params)
        batches = similar_lengths(tuple(lengths))
        if len(batches) == len(lengths):
            # One split per tensor rather than slices: the backward of a split writes each gradient once.
            parts = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
            return torch.cat([self._attend(*(x.unsqueeze(0) for x in part)).squeeze(0) for part in parts])
        plan = padding_plan(tuple(lengths), query.device)
        padded = (x.index_select(0, plan.source).split(plan.sizes) for x in (query, key, value))
        out = [
            self._attend(*(x.unflatten(0, shape) for x in part)).flatten(0, 1)
            for part, shape in zip(zip(*padded, strict=True), plan.shapes, strict=True)
        ]
        return torch.cat(out).index_select(0, plan.place)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B, L, heads, D], [B, L, groups, D], [B, L, groups, Dv] -> [B, L, heads, Dv]; each row attends to itself."""
        length = query.size(1)
        mask = None
        if self.window is not None and length > self.window:
            at = torch.arange(length, device=query.device)
            distance = at[:, None] - at[None, :]
            mask = (distance >= 0) & (distance < self.window)
        return self._softmax(query, key, value, mask)

    def _softmax(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """[B, n, heads, D], [B, m, groups, D], [B, m, groups, Dv] -> [B, n, heads, Dv]. mask: bool [n, m], true where a
        token sees another; None: causal, with n = m."""
        if self.softmax_offset is not None:
            if mask is None:
                mask = torch.ones(query.size(1), key.size(1), dtype=torch.bool, device=query.device).tril()
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            return _attend_with_sinks(q, k, v, mask, self.softmax_offset, self.scale).transpose(1, 2)
        out = scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=query.size(2) != key.size(2),
        )
        return out.transpose(1, 2)


def _attend_with_sinks(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """softmax over scores and one sink per head, computed in float32, without the sink's share: [B, heads, L, Dv].

    query [B, heads, L, D], key and value [B, groups, M, D], mask [L, M] true where a token sees another, sinks [heads].
    """
    batch, heads, length, _ = query.shape
    key, value = (x.repeat_interleave(heads // x.size(1), dim=1) for x in (key, value))
    scores = (query @ key.mT).float().mul(scale).masked_fill(~mask, float("-inf"))
    with_sink = torch.cat([scores, sinks.float()[:, None, None].expand(batch, heads, length, 1)], dim=-1)
    return with_sink.softmax(-1)[..., :-1].to(value.dtype) @ value


# Batching pays where a call costs more than its arithmetic, so long sequences stay alone and padding stays small.
LONG = 1024
BATCH_TOKENS = 8192
PADDING = 1 / 8


@functools.lru_cache(maxsize=64)
def similar_lengths(lengths: tuple[int, ...]) -> list[list[int]]:
    """Sequences (by index) that are attended in one call: nearly equal lengths, so that padding to the longest is
    at most `PADDING` of a row. Every index is in exactly one batch.

    Padding goes to the right, where a causal mask hides it from every real token, so results do not change.
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        batch = batches[-1] if batches else []
        longest = lengths[batch[0]] if batch else LONG
        padding, tokens = longest - lengths[i], longest * (len(batch) + 1)
        if longest < LONG and padding <= longest * PADDING and tokens <= BATCH_TOKENS:
            batch.append(i)
        else:
            batches.append([i])
    return batches


@dataclasses.dataclass(frozen=True)
class PaddingPlan:
    """shapes: [sequences, longest] of each batch; sizes: their products. source: int64 [sum of sizes], the packed row
    that each padded row is read from (a real one for padding too). place: int64 [T], where each packed row's result is.
    """

    shapes: list[tuple[int, int]]
    sizes: list[int]
    source: Tensor
    place: Tensor


@functools.lru_cache(maxsize=8)
def padding_plan(lengths: tuple[int, ...], device: torch.device) -> PaddingPlan:
    """How `lengths` packed sequences are laid out in the batches of `similar_lengths`; the same for all layers."""
    batches = similar_lengths(lengths)
    starts = [0, *itertools.accumulate(lengths)]
    shapes = [(len(batch), lengths[batch[0]]) for batch in batches]
    source, place, offset = [], [torch.empty(0)] * len(lengths), 0
    for batch, (_, longest) in zip(batches, shapes, strict=True):
        for i in batch:
            source.append(starts[i] + torch.arange(longest).clamp(max=lengths[i] - 1))
            place[i] = torch.arange(offset, offset + lengths[i])
            offset += longest
    return PaddingPlan(shapes, [b * n for b, n in shapes], torch.cat(source).to(device), torch.cat(place).to(device))


def _lengths(packed: PackedSeqParams) -> list[int]:
    """Lengths of the packed sequences. `data.pack` leaves them on the host, so that no layer waits for the GPU."""
    lengths = getattr(packed, "lengths", None)
    if lengths is None:
        bounds = packed.cu_seqlens_q
        lengths = (bounds[1:] - bounds[:-1]).tolist()
    return lengths
