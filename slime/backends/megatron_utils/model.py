"""From config.json and flags to Megatron's model, DDP, optimizer and learning-rate schedule."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from slime.backends.megatron_utils import device
from slime.backends.megatron_utils.head import install_head
from slime.backends.megatron_utils.parallel import virtual_pipeline_size
from slime.backends.megatron_utils.rope import rope_frequencies
from slime.backends.megatron_utils.rounding import set_regions
from slime.backends.megatron_utils.spec import block_spec, uses_transformer_engine
from slime.backends.megatron_utils.value_head import install_value_head
from slime.backends.megatron_utils.variants import (
    activation_settings,
    attention_settings,
    check_runnable,
    expert_settings,
)
from slime.config.errors import ConfigError
from slime.config.hf_config import HFConfig
from slime.config.layout import cut_faults
from slime.config.rounding import has_regions, rounding_regions
from slime.utils.misc import load_function

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


def transformer_config(args: Any, hf: HFConfig, *, structure_only: bool = False) -> TransformerConfig:
    """Megatron's configuration of the model in `hf` under the layout in `args`. Raises ConfigError, naming the flag.

    structure_only: for names and shapes; a model that could not run is fine then.
    """
    check_layout(args, hf)
    te = uses_transformer_engine(args)
    if not structure_only:
        check_runnable(args, hf, te)
    dtype = _DTYPES[args.params_dtype]
    kind = TransformerConfig if hf.latent is None else MLATransformerConfig
    settings: dict[str, Any] = {"qk_layernorm": hf.qk_norm, **activation_settings(hf), **attention_settings(hf)}
    windowed = [int(layer in hf.windowed_layers) for layer in range(hf.num_layers)]
    rope_fusion = te and not settings.get("rotary_interleaved") and settings.get("rope_type") != "rope"
    return kind(
        num_layers=hf.num_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        ffn_hidden_size=hf.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        add_qkv_bias=hf.attention_bias,
        window_size=(hf.sliding_window - 1, 0) if hf.sliding_window else None,
        window_attn_skip_freq=windowed if hf.sliding_window else None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_pipeline_size(args, hf.num_layers),
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        sequence_parallel=args.sequence_parallel and args.tensor_model_parallel_size > 1,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        pipeline_dtype=dtype,
        moe_token_dispatcher_type="alltoall",  # Megatron asks for it even of dense models of varying lengths
        variable_seq_lengths=True,  # packed micro-batches differ in length
        use_cpu_initialization=not device.has_cuda(),
        # Every weight comes from a file. perform_initialization must stay on all the same: it also marks the
        # parameters that are cut over tensor-parallel ranks, and without the marks the gradient norm is wrong.
        init_method=_leave_alone,
        output_layer_init_method=_leave_alone,
        embedding_init_method=_leave_alone,
        attention_backend=AttnBackend[args.attention_backend],
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method,
        recompute_num_layers=args.recompute_num_layers,
        # Micro-batch losses are shares of the step's loss: Megatron and DDP only add them up (see `loss.py`).
        calculate_per_token_loss=True,
        finalize_model_grads_func=_finalize_grads,
        gradient_accumulation_fusion=False,
        # Megatron's hook for an activation module: it leaves the gated product to `rounding.SwiGLU`.
        use_te_activation_func=has_regions(args),
        bias_activation_fusion=te and not has_regions(args),
        bias_dropout_fusion=te,
        masked_softmax_fusion=te,
        apply_rope_fusion=rope_fusion,
        persist_layer_norm=te,
        **settings,
        **expert_settings(hf, te),
    )


def _leave_alone(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _finalize_grads(model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's reductions over data, tensor and pipeline ranks, without its division by the number of tokens."""
    finalize_model_grads(model, None, **kwargs)


def check_layout(args: Any, hf: HFConfig) -> None:
    """Raises ConfigError when the model cannot be cut as the flags say."""
    if faults := list(cut_faults(args, hf)):
        raise ConfigError("\n".join(faults))
    if args.context_parallel_size > 1 and hf.sliding_window and uses_transformer_engine(args):
        raise ConfigError(
            f"--context-parallel-size {args.context_parallel_size}: Transformer Engine has no sliding window "
            f"({hf.sliding_window} in config.json) on packed sequences under it; use --transformer-impl local"
        )


def padded_vocab_size(args: Any, hf: HFConfig) -> int:
    """Rows of the embedding over all tensor-parallel ranks."""
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return math.ceil(hf.vocab_size / multiple) * multiple


def build_model(
    args: Any, hf: HFConfig, config: TransformerConfig | None = None, *, value_head: bool = False
) -> list[GPTModel]:
    """The bare model chunks of this rank (one, or one per virtual pipeline stage), in --params-dtype, on its device.

    Their weights are not initialised: load them from a file. value_head: a critic, with a fresh head of one value per
    token in the place of the output layer.
    """
    if value_head:
        hf = dataclasses.replace(hf, tie_word_embeddings=False)
    config = config or transformer_config(args, hf)
    chunks = []
    for stage in range(config.virtual_pipeline_model_parallel_size or 1):
        vp_stage = stage if config.virtual_pipeline_model_parallel_size else None
        first = mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        model = _provider(args, hf, config)(pre_process=first, post_process=last, vp_stage=vp_stage)
        if hasattr(model, "rotary_pos_emb"):
            model.rotary_pos_emb.inv_freq = rope_frequencies(hf).to(device.current_device())
        if last and value_head:
            install_value_head(model)
        elif last:
            install_head(model, hf.vocab_size)
        chunks.append(model.to(device.current_device()))
    if has_regions(args):
        set_regions(chunks, training_regions(args))
    return chunks


def training_regions(args: Any) -> frozenset[str]:
    """Where the trainer rounds once. Without a profile as much as the layers do that it would have without the probe:
    Transformer Engine's rotary embedding and Megatron's compiled SwiGLU."""
    if args.rounding_profile == "off" and uses_transformer_engine(args):
        return frozenset({"rope", "swiglu"})
    return rounding_regions(args)


def build_structure(args: Any, hf: HFConfig) -> GPTModel:
    """The whole model as one rank would have it, without memory for its weights: names, shapes and how checkpoints keep
    them, also of a model that cannot run here. args: --params-dtype, --make-vocab-size-divisible-by."""
    args = args.replace(
        tensor_model_parallel_size=1, pipeline_model_parallel_size=1, expert_model_parallel_size=1,
        expert_tensor_parallel_size=1, num_layers_per_virtual_pipeline_stage=None, context_parallel_size=1,
        sequence_parallel=False, transformer_impl="local", custom_model_provider_path=None,
        rounding_profile="off", rounding_probe=False,
    )  # fmt: skip
    config = transformer_config(args, hf, structure_only=True)
    config.use_cpu_initialization, config.perform_initialization = True, False
    with torch.device("meta"):
        return _provider(args, hf, config)(pre_process=True, post_process=True)


def _provider(args: Any, hf: HFConfig, config: TransformerConfig) -> Callable[..., GPTModel]:
    if args.custom_model_provider_path:
        return load_function(args.custom_model_provider_path)

    def provide(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> GPTModel:
        return GPTModel(
            config=config,
            transformer_layer_spec=block_spec(args, config, vp_stage, post_norms=hf.model_type == "glm4"),  # type: ignore[arg-type]
            vocab_size=padded_vocab_size(args, hf),
            max_sequence_length=hf.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            parallel_output=True,
            share_embeddings_and_output_weights=hf.tie_word_embeddings,
            position_embedding_type="rope",
            rotary_percent=hf.rotary_fraction,
            rotary_base=int(hf.rope_theta),
            vp_stage=vp_stage,
        )

    return provide


def wrap_model(args: Any, chunks: list[GPTModel]) -> list[DistributedDataParallel]:
    """Adds mixed precision and DDP, whose buffers hold the gradients (and the parameters, when sharded)."""
    config = chunks[0].config
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )
    wrapped = []
    for index, chunk in enumerate(chunks):
        with _expert_biases_in_float32(chunk):
            module = Float16Module(config, chunk) if config.fp16 or config.bf16 else chunk
        ddp = DistributedDataParallel(config, ddp_config, module, disable_bucketing=index > 0)
        ddp.broadcast_params()
        wrapped.append(ddp)
    if args.overlap_grad_reduce:
        config.no_sync_func = _one_or_list([ddp.no_sync for ddp in wrapped])
    if args.overlap_param_gather:
        config.param_sync_func = _one_or_list([ddp.start_param_sync for ddp in wrapped])
    return wrapped


@contextlib.contextmanager
def _expert_biases_in_float32(chunk: torch.nn.Module) -> Iterator[None]:
    """Float16Module rounds buffers too; a bias that chooses experts must stay what the file says."""
    biases = [(router, router.expert_bias) for router in biased_routers(chunk)]
    yield
    for router, bias in biases:
        router.expert_bias = bias


def biased_routers(chunk: torch.nn.Module) -> Iterator[Any]:
    """Routers whose `expert_bias` chooses experts: a weight of the model's file, to Megatron a buffer."""
    return (module for module in chunk.modules() if getattr(module, "expert_bias", None) is not None)


def _one_or_list(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions


def build_optimizer(args: Any, model: list[DistributedDataParallel], lr: float | None = None) -> Any:
    """Megatron's Adam over float32 main parameters: the fused one of TE or apex where installed, else torch's."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=lr if lr is not None else args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_eps,
        clip_grad=args.clip_grad,
        bf16=args.params_dtype == "bfloat16",
        fp16=args.params_dtype == "float16",
        params_dtype=_DTYPES[args.params_dtype],
        use_distributed_optimizer=args.use_distributed_optimizer,
        overlap_param_gather=args.overlap_param_gather,
    )
    optimizer = get_megatron_optimizer(config, model)
    use_fused_adam(optimizer)
    model[0].config.grad_scale_func = optimizer.scale_loss if args.params_dtype == "float16" else None
    return optimizer


def inner_optimizers(optimizer: Any) -> Iterator[Any]:
    """The plain optimizers inside Megatron's chained one; a rank without parameters of a kind has none for it."""
    inner = (getattr(part, "optimizer", None) for part in optimizer.chained_optimizers)
    return (plain for plain in inner if plain is not None)


def torch_adams(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """Those that are torch's Adam, which Megatron takes where no fused one is installed."""
    return (o for o in inner_optimizers(optimizer) if isinstance(o, (torch.optim.AdamW, torch.optim.Adam)))


def use_fused_adam(optimizer: Any) -> None:
    """Lets torch's Adam, where Megatron took it, make one pass over memory instead of one per operation."""
    for adam in torch_adams(optimizer):
        for group in adam.param_groups:
            group["fused"] = True


def build_scheduler(args: Any, optimizer: Any, total_steps: int, lr: float | None = None) -> OptimizerParamScheduler:
    """Learning rate by optimizer step. Warm-up over W steps gives lr * (k + 1) / (W + 1) at step k < W: never zero.

    total_steps: optimizer steps of the whole run, the default of --lr-decay-iters. WSD decays over the last tenth.
    """
    lr = lr if lr is not None else args.lr
    decay = args.lr_decay_iters or max(1, total_steps)
    warmup = args.lr_warmup_iters
    if args.lr_warmup_fraction is not None:
        warmup = int(args.lr_warmup_fraction * decay)
    if warmup >= decay:
        if args.lr_decay_style != "constant":
            raise ConfigError(
                f"warm-up of {warmup} steps does not end before the decay's {decay}: lower --lr-warmup-iters"
            )
        decay = warmup + 1
    return OptimizerParamScheduler(
        optimizer,
        init_lr=lr / (warmup + 1),
        max_lr=lr,
        min_lr=min(args.min_lr, lr),
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=decay,
        wd_incr_style="constant",
        wsd_decay_steps=max(1, decay // 10),
        lr_wsd_decay_style="exponential",
    )


def unwrap(chunk: torch.nn.Module) -> GPTModel:
    """The GPTModel inside DDP and Float16Module."""
    while hasattr(chunk, "module"):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk  # type: ignore[return-value]
