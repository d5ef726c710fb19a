"""Qwen3-MoE: Qwen3's attention; experts in most layers."""

from slime.config.hf_config import HFConfig
from slime.models import blocks
from slime.models.table import Param


def declare(c: HFConfig, vocab_multiple: int) -> list[Param]:
    return [
        *blocks.embedding(c, vocab_multiple),
        *blocks.grouped_query_attention(c, qkv_bias=c.attention_bias, out_bias=c.out_bias, qk_norm=True),
        *blocks.gated_mlp(c, c.dense_layers),
        *blocks.experts(c),
        *blocks.head(c, vocab_multiple),
    ]
