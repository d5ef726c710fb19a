"""Which modules a transformer layer is made of: Transformer Engine's on GPUs, ours on plain torch otherwise."""

import dataclasses
import functools
import importlib.util
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_mlp_module_spec_for_backend
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from slime.backends.megatron_utils.attention import PackedAttention
from slime.backends.megatron_utils.attention_cp import ContiguousSelfAttention
from slime.backends.megatron_utils.attention_latent import LatentAttention
from slime.backends.megatron_utils.device import has_cuda
from slime.backends.megatron_utils.norm import LatentNorm, NormedResidual, RMSNorm
from slime.backends.megatron_utils.rounding import (
    FusedRopeSelfAttention,
    RegionContiguousSelfAttention,
    RegionSelfAttention,
    ResidualAdd,
    SwiGLU,
)
from slime.config.errors import ConfigError
from slime.config.rounding import has_regions


@functools.cache
def has_transformer_engine() -> bool:
    return has_cuda() and importlib.util.find_spec("transformer_engine") is not None


def uses_transformer_engine(args: Any) -> bool:
    """--transformer-impl: auto takes Transformer Engine where it is installed with CUDA. Raises ConfigError.

    Under context parallelism auto takes the torch spec for what Transformer Engine's attention lacks: the contiguous
    cut of --allgather-cp.
    """
    if args.transformer_impl == "transformer_engine" and not has_transformer_engine():
        raise ConfigError(
            "--transformer-impl transformer_engine: needs CUDA and the package transformer-engine; use auto or local"
        )
    return args.transformer_impl != "local" and has_transformer_engine() and not _cuts_contiguously(args)


def _cuts_contiguously(args: Any) -> bool:
    return args.context_parallel_size > 1 and args.allgather_cp


def block_spec(
    args: Any, config: TransformerConfig, vp_stage: int | None = None, *, post_norms: bool = False
) -> TransformerBlockSubmodules:
    """The layers that this pipeline stage (and virtual stage) builds, and the final norm.

    post_norms: the outputs of attention and MLP are normalised before they are added (GLM-4).
    """
    te = uses_transformer_engine(args)
    if te and not has_regions(args):
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    else:
        block = our_block_spec(config, layer_parts(args, te), vp_stage)
    for layer in block.layer_specs if post_norms else ():
        parts = layer.submodules
        parts.self_attn_bda, parts.mlp_bda = (ModuleSpec(NormedResidual, {"config": config}) for _ in range(2))
        names = {f"{part}_bda.norm.": f"post_{part}_layernorm." for part in ("self_attn", "mlp")}
        parts.sharded_state_dict_keys_map = {**parts.sharded_state_dict_keys_map, **names}
    return block


@dataclasses.dataclass(frozen=True)
class LayerParts:
    """The parts that differ between the layers that are built here. backend: whose linear layers and experts."""

    backend: Any
    attention: type[SelfAttention]
    core_attention: Any
    residual_add: Any


class _RegionBackend(LocalSpecProvider):
    """Megatron's own linear layers, and an activation with a rounding region."""

    def activation_func(self) -> type:
        return SwiGLU


def layer_parts(args: Any, te: bool) -> LayerParts:
    """Plain torch; with rounding regions also Transformer Engine's linear layers and attention.

    Its fused norm and linear layer is taken apart there, because the region `norm` ends between the two.
    """
    contiguous = _cuts_contiguously(args)
    if not has_regions(args):
        attention = ContiguousSelfAttention if contiguous else SelfAttention
        return LayerParts(LocalSpecProvider(), attention, PackedAttention, get_bias_dropout_add)
    if not te:
        attention = RegionContiguousSelfAttention if contiguous else RegionSelfAttention
        return LayerParts(_RegionBackend(), attention, PackedAttention, ResidualAdd)
    backend = _unfused_transformer_engine()
    return LayerParts(backend, FusedRopeSelfAttention, backend.core_attention(), ResidualAdd)


def _unfused_transformer_engine() -> Any:
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    class Backend(TESpecProvider):
        def fuse_layernorm_and_linear(self) -> bool:
            return False

        def activation_func(self) -> type:
            return SwiGLU

    return Backend()


def our_block_spec(
    config: TransformerConfig, parts: LayerParts, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The layers of this stage."""
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    layers = [our_layer_spec(config, parts, is_moe_layer(config, offset + i)) for i in range(count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def is_moe_layer(config: TransformerConfig, layer: int) -> bool:
    """Whether the layer of this index (from 0) has experts, by Megatron's `moe_layer_freq`."""
    if not config.num_moe_experts:
        return False
    freq = config.moe_layer_freq
    return layer % freq == 0 if isinstance(freq, int) else bool(freq[layer])


def our_layer_spec(config: TransformerConfig, parts: LayerParts, moe: bool = False) -> ModuleSpec:
    """A layer of Megatron's parallel linear layers (or those of `parts`) with our norm.

    `sharded_state_dict_keys_map` names the norms in checkpoints as Transformer Engine's fused layers do, so that a
    checkpoint written with one spec loads with the other.
    """
    mlp = get_mlp_module_spec_for_backend(
        backend=parts.backend,
        num_experts=config.num_moe_experts if moe else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        use_te_activation_func=config.use_te_activation_func,
    )
    if moe and config.add_bias_linear:
        mlp.submodules.experts.submodules.linear_fc2 = BiasedExpertOutput
    if config.multi_latent_attention:
        attention = _latent_attention(parts)
        keys = {f"self_attention.{x}_layernorm.": f"self_attention.linear_{x}_up_proj.layer_norm_" for x in ("q", "kv")}
    else:
        attention = _self_attention(parts, config)
        keys = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if not moe:
        keys["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=parts.residual_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=parts.residual_add,
            sharded_state_dict_keys_map=keys,
        ),
    )


class BiasedExpertOutput(RowParallelLinear):
    """The second layer of an expert with biases (gpt-oss), for what Megatron's expert does with the bias.

    It adds the bias in place, which a view of an autograd function's output does not allow. And its bias is marked
    as one that tensor-parallel ranks share, each for its part of the sequence: the gradients of different experts would
    be added, and the norm of all gradients would leave out those of every rank but the first.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bias.sequence_parallel = False  # type: ignore[union-attr]
        self.bias.tensor_model_parallel = True  # type: ignore[union-attr]

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(input_)
        return output.clone(), bias


def _self_attention(parts: LayerParts, config: TransformerConfig) -> ModuleSpec:
    head_norm: Any = RMSNorm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=parts.attention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=parts.backend.column_parallel_linear(),
            core_attention=parts.core_attention,
            linear_proj=parts.backend.row_parallel_linear(),
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def _latent_attention(parts: LayerParts) -> ModuleSpec:
    column: Any = parts.backend.column_parallel_linear()
    return ModuleSpec(
        module=LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=column,
            linear_q_down_proj=column,
            linear_q_up_proj=column,
            linear_kv_down_proj=column,
            linear_kv_up_proj=column,
            core_attention=parts.core_attention,
            linear_proj=parts.backend.row_parallel_linear(),
            q_layernorm=LatentNorm,
            kv_layernorm=LatentNorm,
        ),
    )
