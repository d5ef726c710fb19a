"""Megatron's flags for the sizes of a model. They are read from the model's config.json here, so a script need not
give them; one written for Megatron or slime may, and then they must agree with the file."""

import math
from collections.abc import Iterator
from typing import Any

from slime.config.fields import arg, flag_of, group
from slime.config.hf_config import HFConfig


@group("model sizes (read from config.json; where given, they must agree with it)")
class ArchitectureArgs:
    num_layers: int | None = arg(None, "transformer layers")
    hidden_size: int | None = arg(None, "width of the residual stream")
    ffn_hidden_size: int | None = arg(None, "width of the dense MLP")
    num_attention_heads: int | None = arg(None, "attention heads")
    group_query_attention: bool | None = arg(None, "fewer key and value heads than query heads")
    num_query_groups: int | None = arg(None, "key and value heads")
    kv_channels: int | None = arg(None, "channels of a head")
    vocab_size: int | None = arg(None, "tokens of the vocabulary, without padding")
    rotary_base: float | None = arg(None, "base of the rotary embedding")
    use_rotary_position_embeddings: bool | None = arg(None, "rotary positions")
    position_embedding_type: str | None = arg(None, "kind of positions")
    normalization: str | None = arg(None, "kind of norm")
    norm_epsilon: float | None = arg(None, "epsilon of the norms")
    swiglu: bool | None = arg(None, "gated MLP with SiLU")
    qk_layernorm: bool | None = arg(None, "norm of queries and keys")
    add_qkv_bias: bool | None = arg(None, "bias of query, key and value")
    disable_bias_linear: bool | None = arg(None, "no bias in the MLP")
    untie_embeddings_and_output_weights: bool | None = arg(None, "output layer with weights of its own")
    num_experts: int | None = arg(None, "experts of a mixture-of-experts layer")
    moe_ffn_hidden_size: int | None = arg(None, "width of one expert")
    moe_router_topk: int | None = arg(None, "experts per token")
    attention_dropout: float | None = arg(None, "dropout of attention; there is none")
    hidden_dropout: float | None = arg(None, "dropout of the residual stream; there is none")
    attention_softmax_in_fp32: bool | None = arg(None, "softmax of attention in fp32; it always is")
    optimizer: str | None = arg(None, "optimizer; it is Adam with decoupled weight decay", choices=["adam"])


def architecture_of(hf: HFConfig) -> dict[str, Any]:
    """What the model's config.json says to each flag of `ArchitectureArgs`."""
    return {
        "num_layers": hf.num_layers,
        "hidden_size": hf.hidden_size,
        "ffn_hidden_size": hf.intermediate_size,
        "num_attention_heads": hf.num_attention_heads,
        "group_query_attention": hf.num_key_value_heads != hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": hf.head_dim,
        "vocab_size": hf.vocab_size,
        "rotary_base": hf.rope_theta,
        "use_rotary_position_embeddings": True,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "norm_epsilon": hf.rms_norm_eps,
        "swiglu": True,
        "qk_layernorm": hf.qk_norm,
        "add_qkv_bias": hf.attention_bias,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": not hf.tie_word_embeddings,
        "num_experts": hf.num_experts,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_router_topk": hf.num_experts_per_tok,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "optimizer": "adam",
    }


def disagreements(args: Any, hf: HFConfig) -> Iterator[str]:
    """A line per flag that says something else than the model's config.json."""
    for name, actual in architecture_of(hf).items():
        given = getattr(args, name)
        if given is None or given == actual or _close(given, actual):
            continue
        yield (
            f"{flag_of(name)} {given}: the model has {'none' if actual is None else actual} "
            f"({args.hf_checkpoint}/config.json); leave the flag out, sizes are read from the model"
        )


def _close(given: Any, actual: Any) -> bool:
    numbers = isinstance(given, float) and isinstance(actual, (int, float))
    return numbers and math.isclose(given, actual, rel_tol=1e-9)
