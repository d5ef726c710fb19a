"""What sets one model family apart in Megatron's configuration: experts, routers, attention, activations.

`check_runnable` names what a model needs and Megatron-Core or this trainer lacks; conversion works for it all the same.
"""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.activations import quick_gelu

from slime.backends.megatron_utils.rope import attention_factor, scaling_kind
from slime.config.errors import ConfigError
from slime.config.hf_config import HFConfig

_SIGMOID_ROUTER = ("deepseek_v3", "glm4_moe")


def expert_settings(hf: HFConfig, te: bool) -> dict[str, Any]:
    """Fields of TransformerConfig for a model with experts; te: Transformer Engine's kernels are there."""
    if not hf.moe_layers:
        return {}
    out: dict[str, Any] = dict(
        num_moe_experts=hf.num_experts,
        moe_router_topk=hf.num_experts_per_tok,
        moe_ffn_hidden_size=hf.moe_intermediate_size,
        moe_router_load_balancing_type="none",  # an auxiliary loss would bend the policy gradient
        moe_aux_loss_coeff=0.0,
        moe_router_dtype="fp32",
        moe_grouped_gemm=te,
        moe_permute_fusion=te,
    )
    if hf.dense_layers:
        out["moe_layer_freq"] = [int(layer in hf.moe_layers) for layer in range(hf.num_layers)]
    if hf.shared_intermediate_size:
        out["moe_shared_expert_intermediate_size"] = hf.shared_intermediate_size
        out["moe_shared_expert_gate"] = hf.model_type == "qwen2_moe"
    if hf.model_type in _SIGMOID_ROUTER:
        out.update(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
        out["moe_router_bias_update_rate"] = 0.0  # balancing would bend the policy gradient, and engines never see it
    else:
        # softmax over the chosen experts equals softmax over all, then divided by the chosen ones' sum
        out["moe_router_pre_softmax"] = not hf.norm_topk_prob
    groups, chosen = hf.expert_groups
    if groups > 1 and _limits_groups(hf):
        out.update(moe_router_num_groups=groups, moe_router_group_topk=chosen)
    if hf.routed_scaling_factor != 1.0:
        out["moe_router_topk_scaling_factor"] = hf.routed_scaling_factor
    return out


def _limits_groups(hf: HFConfig) -> bool:
    return hf.model_type != "deepseek_v2" or hf.raw.get("topk_method") == "group_limited_greedy"


def attention_settings(hf: HFConfig) -> dict[str, Any]:
    """Fields of TransformerConfig, or of MLATransformerConfig for latent attention."""
    if hf.latent is None:
        factor = attention_factor(hf)
        scale = factor * factor / hf.head_dim**0.5 if factor != 1.0 else None
        return dict(kv_channels=hf.head_dim, rotary_interleaved=hf.model_type == "glm4", softmax_scale=scale)
    lat, scaling = hf.latent, hf.rope_scaling or {}
    out: dict[str, Any] = dict(
        q_lora_rank=lat.q_rank,
        kv_lora_rank=lat.kv_rank,
        qk_head_dim=lat.nope_dim,
        qk_pos_emb_head_dim=lat.rope_dim,
        v_head_dim=lat.value_dim,
        qk_layernorm=True,
        rotary_base=hf.rope_theta,
        rope_type="yarn" if scaling_kind(hf) == "yarn" else "rope",
    )
    if out["rope_type"] == "yarn":
        out.update(
            rotary_scaling_factor=scaling["factor"],
            original_max_position_embeddings=scaling.get(
                "original_max_position_embeddings", hf.max_position_embeddings
            ),
            beta_fast=scaling.get("beta_fast") or 32.0,
            beta_slow=scaling.get("beta_slow") or 1.0,
            mscale=scaling.get("mscale") or 1.0,
            mscale_all_dim=scaling.get("mscale_all_dim") or 0.0,
        )
    return out


def activation_settings(hf: HFConfig) -> dict[str, Any]:
    """Gated SiLU without biases; gpt-oss clamps, gates with x * sigmoid(1.702 x), adds one, and has biases."""
    if hf.model_type != "gpt_oss":
        return dict(activation_func=torch.nn.functional.silu, add_bias_linear=False)
    return dict(
        activation_func=quick_gelu,
        glu_linear_offset=1.0,
        activation_func_clamp_value=hf.raw.get("swiglu_limit", 7.0),
        add_bias_linear=True,
        softmax_type="learnable",
    )


def check_runnable(args: Any, hf: HFConfig, te: bool) -> None:
    """Raises ConfigError for a part of the model that is not built."""
    for fault in _missing(args, hf, te):
        raise ConfigError(f"{hf.model_type}: {fault}")


def _missing(args: Any, hf: HFConfig, te: bool) -> Iterator[str]:
    raw = hf.raw
    if (hf.out_bias and hf.model_type != "gpt_oss") or raw.get("mlp_bias"):
        yield "attention_bias/mlp_bias true puts biases on output projections: not supported"
    if hf.hidden_act not in ("silu", "swish"):
        yield f"hidden_act {hf.hidden_act!r} is not supported, only silu"
    if hf.model_type == "qwen2_moe" and raw.get("use_sliding_window") and raw.get("layer_types") is None:
        yield "use_sliding_window needs layer_types, which says the layers that have a window"
    groups, chosen = hf.expert_groups
    if hf.model_type == "deepseek_v2" and groups > 1 and _limits_groups(hf):
        yield (
            "topk_method group_limited_greedy ranks groups by their best expert, Megatron-Core's router by the sum of "
            "several: not supported (conversion is)"
        )
    if hf.moe_layers and hf.num_experts_per_tok == 1 and expert_settings(hf, te).get("moe_router_pre_softmax") is False:
        yield "num_experts_per_tok 1 with norm_topk_prob: every weight is 1, and nothing would train the router"
    if hf.model_type in _SIGMOID_ROUTER and hf.moe_layers:
        if not hf.norm_topk_prob or hf.num_experts_per_tok == 1:
            yield "Megatron-Core's sigmoid router divides by the sum of several experts: norm_topk_prob must be true"
        if groups > 1 and (hf.num_experts_per_tok or 0) // chosen != 2:
            yield (
                f"num_experts_per_tok {hf.num_experts_per_tok} with topk_group {chosen}: Megatron-Core's router ranks "
                "groups by two experts only when there are twice as many experts as groups"
            )
    if te and args.context_parallel_size > 1 and (hf.latent is not None or hf.model_type == "gpt_oss"):
        yield (
            "latent attention and attention sinks are supported with --context-parallel-size above 1 by our torch spec "
            "only; use --transformer-impl local"
        )
    if hf.latent is not None:
        if not raw.get("rope_interleave", True):
            yield "rope_interleave false is not supported: Megatron-Core's latent attention rotates neighbours"
        if scaling_kind(hf) not in ("default", "yarn"):
            yield f"rope scaling {scaling_kind(hf)!r} is not supported with latent attention"
        scaling = hf.rope_scaling or {}
        if scaling_kind(hf) == "yarn" and (
            bool(scaling.get("mscale")) != bool(scaling.get("mscale_all_dim"))
            or scaling.get("attention_factor")
            or not scaling.get("truncate", True)
        ):
            yield "yarn with one of mscale and mscale_all_dim only, attention_factor or truncate false is not supported"
        if te and hf.rms_norm_eps != 1e-6:
            yield f"rms_norm_eps {hf.rms_norm_eps} is not supported with Transformer Engine, whose inner norms share it"
    if hf.model_type == "gpt_oss":
        if not hf.attention_bias:
            yield "attention_bias false is not supported: Megatron-Core has biases on all linear layers or on none"
        if raw.get("swiglu_alpha", 1.702) != 1.702:
            yield f"swiglu_alpha {raw['swiglu_alpha']} is not supported: Megatron-Core's gate has 1.702"
        if (args.expert_tensor_parallel_size or args.tensor_model_parallel_size) != 1:
            yield "experts with biases need --expert-tensor-parallel-size 1 (Megatron-Core would add biases per rank)"
