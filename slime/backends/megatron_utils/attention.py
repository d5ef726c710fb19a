"""Core attention of the torch layer spec: causal attention over packed sequences (THD), each one for itself."""

import math
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class PackedAttention(torch.nn.Module):
    """Grouped-query attention softmax(q k^T * scale) v with a causal mask inside each packed sequence.

    Takes query [T, heads, D] and key, value [T, groups, D] of this tensor-parallel rank and the boundaries in
    `packed_seq_params.cu_seqlens_q` (Megatron's THD layout); returns [T, heads, D]. A sliding window of w tokens
    lets a token see itself and the w - 1 before it. Has no parameters and no dropout.
    """

    def __init__(
        self, config: Any, layer_number: int, softmax_scale: float | None = None, pg_collection: Any = None, **_: Any
    ) -> None:
        super().__init__()
        if config.attention_dropout:
            raise ValueError("the torch layer spec has no attention dropout; set attention_dropout to 0")
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window: int | None = config.window_size[0] + 1 if windowed else None

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
        lengths = _lengths(packed_seq_params)
        # One split per tensor rather than slices: the backward of a split writes each gradient once.
        parts = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        return torch.cat([self._one_sequence(q, k, v) for q, k, v in parts])

    def _one_sequence(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[L, heads, D], [L, groups, D] twice -> [L, heads, D]."""
        length = query.size(0)
        mask = None
        if self.window is not None and length > self.window:
            at = torch.arange(length, device=query.device)
            distance = at[:, None] - at[None, :]
            mask = (distance >= 0) & (distance < self.window)
        out = scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),
            key.transpose(0, 1).unsqueeze(0),
            value.transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        return out.squeeze(0).transpose(0, 1)


def _lengths(packed: PackedSeqParams) -> list[int]:
    """Lengths of the packed sequences. `data.pack` leaves them on the host, so that no layer waits for the GPU."""
    lengths = getattr(packed, "lengths", None)
    if lengths is None:
        bounds = packed.cu_seqlens_q
        lengths = (bounds[1:] - bounds[:-1]).tolist()
    return lengths
