"""DeepSeek-V2 and V3: latent attention, dense first layers, then many experts and some for all tokens.

V3 also corrects the choice of experts by a bias per expert. Layers for the prediction of more than one token
(`num_nextn_predict_layers`) are left out: they lie behind the last layer and training does not use them.
"""

from slime.config.errors import ConfigError
from slime.config.hf_config import HFConfig
from slime.models import blocks
from slime.models.table import Param


def declare_v2(c: HFConfig, vocab_multiple: int) -> list[Param]:
    return _declare(c, vocab_multiple, router_bias=False)


def declare_v3(c: HFConfig, vocab_multiple: int) -> list[Param]:
    return _declare(c, vocab_multiple, router_bias=True)


def _declare(c: HFConfig, vocab_multiple: int, router_bias: bool) -> list[Param]:
    if c.raw.get("attention_bias") or c.raw.get("mlp_bias"):
        raise ConfigError(f"{c.model_type}: attention_bias and mlp_bias are not known; DeepSeek's models have none")
    return [
        *blocks.embedding(c, vocab_multiple),
        *blocks.latent_attention(c),
        *blocks.gated_mlp(c, c.dense_layers),
        *(blocks.experts(c, router_bias=router_bias) if c.moe_layers else []),
        *blocks.shared_experts(c, "shared_experts"),
        *blocks.head(c, vocab_multiple),
    ]
