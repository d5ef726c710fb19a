"""The parts that decoder families share: each function declares the parameters of one block.

Rows are what `torch.nn.Linear.weight` calls its first dimension, in Hugging Face and in Megatron alike, so nothing is
ever transposed; what differs is which rows lie together.
"""

from slime.config.hf_config import HFConfig
from slime.models.rows import Form, Interleave, Pad
from slime.models.table import HFTensor, Param

MEGATRON_LAYER = "decoder.layers.{layer}."
HF_LAYER = "model.layers.{layer}."

COLUMN = Form()  # cut by output rows
ROW = Form(axis=1)  # cut by input columns
WHOLE = Form(cut=False)  # on every rank
SIDE_BY_SIDE = Form((Interleave(None),))


def embedding(c: HFConfig, vocab_multiple: int) -> list[Param]:
    """The vocabulary, padded with zero rows to a multiple of `vocab_multiple` times the tensor-parallel ranks."""
    return [
        Param(
            ("embedding.word_embeddings.weight",),
            (HFTensor("model.embed_tokens.weight", (c.vocab_size, c.hidden_size)),),
            Form((Pad(vocab_multiple),)),
        )
    ]


def head(c: HFConfig, vocab_multiple: int) -> list[Param]:
    """Final norm and output layer. Tied: the last pipeline stage may hold a copy of the embedding, never exported."""
    source = "model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight"
    return [
        Param(("decoder.final_layernorm.weight",), (HFTensor("model.norm.weight", (c.hidden_size,)),), WHOLE),
        Param(
            ("output_layer.weight",),
            (HFTensor(source, (c.vocab_size, c.hidden_size)),),
            Form((Pad(vocab_multiple),)),
            exported=not c.tie_word_embeddings,
        ),
    ]


def grouped_query_attention(
    c: HFConfig, *, qkv_bias: bool = False, out_bias: bool = False, qk_norm: bool = False
) -> list[Param]:
    """The norm before it and self attention. Megatron lays query heads, key and value of each group together."""
    q_rows, kv_rows = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    by_group = Form((Interleave(c.num_key_value_heads),))
    hf, meg = HF_LAYER + "self_attn.", MEGATRON_LAYER + "self_attention."
    rows = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
    params = [
        Param(
            (MEGATRON_LAYER + "input_layernorm.weight", meg + "linear_qkv.layer_norm_weight"),
            (HFTensor(HF_LAYER + "input_layernorm.weight", (c.hidden_size,)),),
            WHOLE,
        ),
        Param(
            (meg + "linear_qkv.weight",),
            tuple(HFTensor(f"{hf}{name}.weight", (n, c.hidden_size)) for name, n in rows.items()),
            by_group,
        ),
    ]
    if qkv_bias:
        biases = tuple(HFTensor(f"{hf}{name}.bias", (n,)) for name, n in rows.items())
        params.append(Param((meg + "linear_qkv.bias",), biases, by_group))
    if qk_norm:
        for name in "q", "k":
            norm = HFTensor(f"{hf}{name}_norm.weight", (c.head_dim,))
            params.append(Param((f"{meg}{name}_layernorm.weight",), (norm,), WHOLE))
    params.append(Param((meg + "linear_proj.weight",), (HFTensor(hf + "o_proj.weight", (c.hidden_size, q_rows)),), ROW))
    if out_bias:
        params.append(Param((meg + "linear_proj.bias",), (HFTensor(hf + "o_proj.bias", (c.hidden_size,)),), WHOLE))
    return params


def gated_mlp(c: HFConfig, layers: range | None = None) -> list[Param]:
    """The norm before it, and gate, up and down. Each rank holds its gate rows, then its up rows."""
    meg, hf = MEGATRON_LAYER + "mlp.", HF_LAYER + "mlp."
    wide = (c.intermediate_size, c.hidden_size)
    return [
        Param(
            (MEGATRON_LAYER + "pre_mlp_layernorm.weight", meg + "linear_fc1.layer_norm_weight"),
            (HFTensor(HF_LAYER + "post_attention_layernorm.weight", (c.hidden_size,)),),
            WHOLE,
            layers,
        ),
        Param(
            (meg + "linear_fc1.weight",),
            (HFTensor(hf + "gate_proj.weight", wide), HFTensor(hf + "up_proj.weight", wide)),
            SIDE_BY_SIDE,
            layers,
        ),
        Param((meg + "linear_fc2.weight",), (HFTensor(hf + "down_proj.weight", wide[::-1]),), ROW, layers),
    ]


def experts(c: HFConfig, layers: range | None = None) -> list[Param]:
    """The norm before it, the router, and gate, up and down of every expert (Qwen's names).

    Megatron's experts are separate modules, or, with Transformer Engine's grouped GEMM, numbered weights of one module.
    """
    meg, hf = MEGATRON_LAYER + "mlp.", HF_LAYER + "mlp."
    one = hf + "experts.{expert}."
    assert c.num_experts and c.moe_intermediate_size
    wide = (c.moe_intermediate_size, c.hidden_size)
    return [
        Param(
            (MEGATRON_LAYER + "pre_mlp_layernorm.weight",),
            (HFTensor(HF_LAYER + "post_attention_layernorm.weight", (c.hidden_size,)),),
            WHOLE,
            layers,
        ),
        Param((meg + "router.weight",), (HFTensor(hf + "gate.weight", (c.num_experts, c.hidden_size)),), WHOLE, layers),
        Param(
            (meg + "experts.local_experts.{expert}.linear_fc1.weight", meg + "experts.linear_fc1.weight{expert}"),
            (HFTensor(one + "gate_proj.weight", wide), HFTensor(one + "up_proj.weight", wide)),
            SIDE_BY_SIDE,
            layers,
            expert=True,
        ),
        Param(
            (meg + "experts.local_experts.{expert}.linear_fc2.weight", meg + "experts.linear_fc2.weight{expert}"),
            (HFTensor(one + "down_proj.weight", wide[::-1]),),
            ROW,
            layers,
            expert=True,
        ),
    ]
