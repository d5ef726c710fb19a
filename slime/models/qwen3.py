"""Qwen3 (dense): a norm per head on queries and keys."""

from slime.config.hf_config import HFConfig
from slime.models import blocks
from slime.models.table import Param


def declare(c: HFConfig, vocab_multiple: int) -> list[Param]:
    bias = c.attention_bias
    return [
        *blocks.embedding(c, vocab_multiple),
        *blocks.grouped_query_attention(c, qkv_bias=bias, out_bias=bias, qk_norm=True),
        *blocks.gated_mlp(c),
        *blocks.head(c, vocab_multiple),
    ]
