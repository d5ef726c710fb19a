"""Llama 2 and 3, SmolLM2."""

from slime.config.hf_config import HFConfig
from slime.models import blocks
from slime.models.table import Param


def declare(c: HFConfig, vocab_multiple: int) -> list[Param]:
    return [
        *blocks.embedding(c, vocab_multiple),
        *blocks.grouped_query_attention(c, qkv_bias=c.attention_bias, out_bias=c.out_bias),
        *blocks.gated_mlp(c),
        *blocks.head(c, vocab_multiple),
    ]
