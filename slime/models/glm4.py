"""GLM-4-0414 (dense): norms also after attention and MLP, and gate and up in one tensor."""

from slime.config.hf_config import HFConfig
from slime.models import blocks
from slime.models.table import HFTensor, Param


def declare(c: HFConfig, vocab_multiple: int) -> list[Param]:
    return [
        *blocks.embedding(c, vocab_multiple),
        *blocks.grouped_query_attention(c, qkv_bias=c.attention_bias),
        _post_norm(c, "self_attn"),
        *blocks.gated_mlp(c, fused=True),
        _post_norm(c, "mlp"),
        *blocks.head(c, vocab_multiple),
    ]


def _post_norm(c: HFConfig, part: str) -> Param:
    """The norm of a part's output, before the residual sum. Our layers keep it in the module of the sum."""
    name = f"post_{part}_layernorm.weight"
    return Param(
        (f"{blocks.MEGATRON_LAYER}{part}_bda.norm.weight", blocks.MEGATRON_LAYER + name),
        (HFTensor(blocks.HF_LAYER + name, (c.hidden_size,)),),
        blocks.WHOLE,
    )
