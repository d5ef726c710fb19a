"""Qwen3-MoE: Qwen3's attention, experts in every layer."""

from slime.config.errors import ConfigError
from slime.config.hf_config import HFConfig
from slime.models import blocks
from slime.models.table import Param


def declare(c: HFConfig, vocab_multiple: int) -> list[Param]:
    if c.raw.get("mlp_only_layers") or c.raw.get("decoder_sparse_step", 1) != 1:
        raise ConfigError(
            "qwen3_moe: dense layers among the experts (mlp_only_layers, decoder_sparse_step) are not known"
        )
    bias = c.attention_bias
    return [
        *blocks.embedding(c, vocab_multiple),
        *blocks.grouped_query_attention(c, qkv_bias=bias, out_bias=bias, qk_norm=True),
        *blocks.experts(c),
        *blocks.head(c, vocab_multiple),
    ]
