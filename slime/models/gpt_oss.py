"""gpt-oss: a learned sink per attention head, biases everywhere, and all experts of a layer in one tensor.

In the file an expert's weights have input rows first, and gate and up alternate. Files in MXFP4 are read as bfloat16
(`quantised.py`).
"""

from slime.config.hf_config import HFConfig
from slime.models import blocks
from slime.models.blocks import ALTERNATING, COLUMN, HF_LAYER, MEGATRON_LAYER, ROW, WHOLE
from slime.models.rows import Form
from slime.models.table import HFTensor, Param


def declare(c: HFConfig, vocab_multiple: int) -> list[Param]:
    sinks = (HFTensor(HF_LAYER + "self_attn.sinks", (c.num_attention_heads,)),)
    return [
        *blocks.embedding(c, vocab_multiple),
        *blocks.grouped_query_attention(c, qkv_bias=c.attention_bias, out_bias=c.out_bias),
        Param((MEGATRON_LAYER + "self_attention.core_attention.softmax_offset",), sinks, COLUMN),
        *_experts(c),
        *blocks.head(c, vocab_multiple),
    ]


def _experts(c: HFConfig) -> list[Param]:
    assert c.num_experts and c.moe_intermediate_size
    n, h, layers = c.moe_intermediate_size, c.hidden_size, c.moe_layers

    def expert(leaf: str, name: str, shape: tuple[int, ...], form: Form) -> Param:
        source = HFTensor(f"{HF_LAYER}mlp.experts.{name}", shape, stacked=c.num_experts, transposed=len(shape) == 2)
        return Param(blocks.expert_names(leaf), (source,), form, layers, expert=True)

    bias = HFTensor(HF_LAYER + "mlp.router.bias", (c.num_experts,))
    return [
        blocks.mlp_norm(c, layers),
        blocks.router(c, "mlp.router"),
        Param((MEGATRON_LAYER + "mlp.router.bias",), (bias,), WHOLE, layers),
        expert("linear_fc1.weight", "gate_up_proj", (2 * n, h), ALTERNATING),
        expert("linear_fc1.bias", "gate_up_proj_bias", (2 * n,), ALTERNATING),
        expert("linear_fc2.weight", "down_proj", (h, n), ROW),
        expert("linear_fc2.bias", "down_proj_bias", (h,), WHOLE),
    ]
