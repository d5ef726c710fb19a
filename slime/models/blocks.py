"""The parts that decoder families share: each function declares the parameters of one block.

Rows are what `torch.nn.Linear.weight` calls its first dimension, in Hugging Face and in Megatron alike, so nothing is
ever transposed; what differs is which rows lie together.
"""

from collections.abc import Container
from dataclasses import dataclass

from slime.config.hf_config import HFConfig
from slime.models.rows import EveryOther, Form, Halves, Interleave, Pad
from slime.models.table import HFTensor, Param

MEGATRON_LAYER = "decoder.layers.{layer}."
HF_LAYER = "model.layers.{layer}."

COLUMN = Form()  # cut by output rows
ROW = Form(axis=1)  # cut by input columns
WHOLE = Form(cut=False)  # on every rank
SIDE_BY_SIDE = Form((Interleave(None),))
FUSED_HALVES = Form((Halves(), Interleave(None)))
ALTERNATING = Form((EveryOther(), Interleave(None)))


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


def latent_attention(c: HFConfig) -> list[Param]:
    """The norm before it and DeepSeek's latent attention: queries, and keys with values, go through narrow layers.

    Megatron's own layers cut the narrow ones over tensor-parallel ranks; Transformer Engine's keep them whole.
    """
    assert c.latent is not None
    lat, heads = c.latent, c.num_attention_heads
    hf, meg = HF_LAYER + "self_attn.", MEGATRON_LAYER + "self_attention."

    def linear(megatron: str, name: str, out: int, into: int, form: Form = COLUMN, maybe_whole: bool = False) -> Param:
        source = (HFTensor(f"{hf}{name}.weight", (out, into)),)
        return Param((f"{meg}{megatron}.weight",), source, form, maybe_whole=maybe_whole)

    def norm(name: str, fused: str, source: str, size: int) -> Param:
        return Param((meg + name, meg + fused), (HFTensor(hf + source, (size,)),), WHOLE)

    params = [
        Param(
            (MEGATRON_LAYER + "input_layernorm.weight",),
            (HFTensor(HF_LAYER + "input_layernorm.weight", (c.hidden_size,)),),
            WHOLE,
        )
    ]
    if lat.q_rank is None:
        params.append(linear("linear_q_proj", "q_proj", heads * lat.query_dim, c.hidden_size))
    else:
        params += [
            linear("linear_q_down_proj", "q_a_proj", lat.q_rank, c.hidden_size, maybe_whole=True),
            norm("q_layernorm.weight", "linear_q_up_proj.layer_norm_weight", "q_a_layernorm.weight", lat.q_rank),
            linear("linear_q_up_proj", "q_b_proj", heads * lat.query_dim, lat.q_rank),
        ]
    return [
        *params,
        linear(
            "linear_kv_down_proj", "kv_a_proj_with_mqa", lat.kv_rank + lat.rope_dim, c.hidden_size, maybe_whole=True
        ),
        norm("kv_layernorm.weight", "linear_kv_up_proj.layer_norm_weight", "kv_a_layernorm.weight", lat.kv_rank),
        linear("linear_kv_up_proj", "kv_b_proj", heads * (lat.nope_dim + lat.value_dim), lat.kv_rank),
        linear("linear_proj", "o_proj", c.hidden_size, heads * lat.value_dim, ROW),
    ]


def mlp_norm(c: HFConfig, layers: Container[int] | None = None) -> Param:
    return Param(
        (MEGATRON_LAYER + "pre_mlp_layernorm.weight", MEGATRON_LAYER + "mlp.linear_fc1.layer_norm_weight"),
        (HFTensor(HF_LAYER + "post_attention_layernorm.weight", (c.hidden_size,)),),
        WHOLE,
        layers,
    )


def gated_mlp(c: HFConfig, layers: Container[int] | None = None, *, fused: bool = False) -> list[Param]:
    """The norm before it, and gate, up and down. Each rank holds its gate rows, then its up rows.

    fused: the file has gate and up in one tensor.
    """
    meg, hf = MEGATRON_LAYER + "mlp.", HF_LAYER + "mlp."
    n = c.intermediate_size
    sources = {"gate_up_proj": 2 * n} if fused else {"gate_proj": n, "up_proj": n}
    return [
        mlp_norm(c, layers),
        Param(
            (meg + "linear_fc1.weight",),
            tuple(HFTensor(f"{hf}{name}.weight", (rows, c.hidden_size)) for name, rows in sources.items()),
            FUSED_HALVES if fused else SIDE_BY_SIDE,
            layers,
        ),
        Param((meg + "linear_fc2.weight",), (HFTensor(hf + "down_proj.weight", (c.hidden_size, n)),), ROW, layers),
    ]


@dataclass(frozen=True)
class ExpertNames:
    """What a family calls its experts, inside of a layer."""

    router: str = "mlp.gate"
    one: str = "mlp.experts.{expert}."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def experts(c: HFConfig, names: ExpertNames = ExpertNames(), *, router_bias: bool = False) -> list[Param]:
    """The norm before it, the router, and gate, up and down of every expert, in the layers that have experts.

    Megatron's experts are separate modules, or, with Transformer Engine's grouped GEMM, numbered weights of one module.
    router_bias: what is added to scores when experts are chosen, and not trained (DeepSeek-V3, arXiv:2412.19437).
    """
    layers, one = c.moe_layers, HF_LAYER + names.one
    assert c.num_experts and c.moe_intermediate_size
    n, h = c.moe_intermediate_size, c.hidden_size
    params = [mlp_norm(c, layers), router(c, names.router)]
    if router_bias:
        bias = HFTensor(f"{HF_LAYER}{names.router}.e_score_correction_bias", (c.num_experts,), float32=True)
        params.append(Param((MEGATRON_LAYER + "mlp.router.expert_bias",), (bias,), WHOLE, layers))
    return [
        *params,
        Param(
            expert_names("linear_fc1.weight"),
            (HFTensor(f"{one}{names.gate}.weight", (n, h)), HFTensor(f"{one}{names.up}.weight", (n, h))),
            SIDE_BY_SIDE,
            layers,
            expert=True,
        ),
        Param(
            expert_names("linear_fc2.weight"),
            (HFTensor(f"{one}{names.down}.weight", (h, n)),),
            ROW,
            layers,
            expert=True,
        ),
    ]


def router(c: HFConfig, name: str) -> Param:
    assert c.num_experts
    source = HFTensor(f"{HF_LAYER}{name}.weight", (c.num_experts, c.hidden_size))
    return Param((MEGATRON_LAYER + "mlp.router.weight",), (source,), WHOLE, c.moe_layers)


def expert_names(leaf: str) -> tuple[str, str]:
    """Megatron's names of an expert's parameter, as "linear_fc1.weight": separate modules, then grouped."""
    meg = MEGATRON_LAYER + "mlp.experts."
    return meg + "local_experts.{expert}." + leaf, meg + leaf + "{expert}"


def shared_experts(c: HFConfig, name: str, *, gated: bool = False) -> list[Param]:
    """The experts that every token passes, as one MLP. gated: weighted by the sigmoid of one output per token."""
    meg, hf = MEGATRON_LAYER + "mlp.shared_experts.", f"{HF_LAYER}mlp.{name}."
    n = c.shared_intermediate_size
    if not n:
        return []
    wide = (n, c.hidden_size)
    params = [
        Param(
            (meg + "linear_fc1.weight",),
            (HFTensor(hf + "gate_proj.weight", wide), HFTensor(hf + "up_proj.weight", wide)),
            SIDE_BY_SIDE,
            c.moe_layers,
        ),
        Param((meg + "linear_fc2.weight",), (HFTensor(hf + "down_proj.weight", wide[::-1]),), ROW, c.moe_layers),
    ]
    if gated:
        gate = HFTensor(f"{HF_LAYER}mlp.{name}_gate.weight", (1, c.hidden_size))
        params.append(Param((meg + "gate_weight",), (gate,), WHOLE, c.moe_layers))
    return params
