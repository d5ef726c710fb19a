"""Qwen2 and Qwen2.5: biases on query, key and value, none on the output."""

from slime.config.hf_config import HFConfig
from slime.models import blocks
from slime.models.table import Param


def declare(c: HFConfig, vocab_multiple: int) -> list[Param]:
    return [
        *blocks.embedding(c, vocab_multiple),
        *blocks.grouped_query_attention(c, qkv_bias=True),
        *blocks.gated_mlp(c),
        *blocks.head(c, vocab_multiple),
    ]
