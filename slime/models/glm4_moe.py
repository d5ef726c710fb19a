"""GLM-4.5 (MoE): grouped-query attention with DeepSeek-V3's experts after the first dense layers."""

from slime.config.hf_config import HFConfig
from slime.models import blocks
from slime.models.table import Param


def declare(c: HFConfig, vocab_multiple: int) -> list[Param]:
    return [
        *blocks.embedding(c, vocab_multiple),
        *blocks.grouped_query_attention(c, qkv_bias=c.attention_bias, qk_norm=c.qk_norm),
        *blocks.gated_mlp(c, c.dense_layers),
        *blocks.experts(c, router_bias=True),
        *blocks.shared_experts(c, "shared_experts"),
        *blocks.head(c, vocab_multiple),
    ]
