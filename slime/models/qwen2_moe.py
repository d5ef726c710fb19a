"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention; experts, and one for all tokens behind a gate, in most layers."""

from slime.config.hf_config import HFConfig
from slime.models import blocks
from slime.models.table import Param


def declare(c: HFConfig, vocab_multiple: int) -> list[Param]:
    return [
        *blocks.embedding(c, vocab_multiple),
        *blocks.grouped_query_attention(c, qkv_bias=c.attention_bias),
        *blocks.gated_mlp(c, c.dense_layers),
        *blocks.experts(c),
        *blocks.shared_experts(c, "shared_expert", gated=True),
        *blocks.head(c, vocab_multiple),
    ]
