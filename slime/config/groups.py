"""Every flag of slime, grouped as --help shows them. One default each, here and nowhere else.

Sizes are in samples unless a name says tokens; `*_path` flags take `package.module.name`.
`None` means "derived" or "off", as the help of the flag says; `slime.config.derive` fills the derived ones.
"""

from typing import Any

from slime.config.algorithm import AlgorithmArgs
from slime.config.architecture import ArchitectureArgs
from slime.config.fields import arg, group, json_object

# Our own functions for --rollout-function-path: samples from engines, and rows for --loss-type sft_loss.
GENERATE = "slime.rollout.sglang_rollout.generate_rollout"
FINE_TUNE = "slime.rollout.sft_rollout.generate_rollout"


@group("files of flags")
class FileArgs:
    config: str | None = arg(None, "YAML file with the same names as the flags; flags on the command line win")
    custom_config_path: str | None = arg(None, "YAML file with keys of your own, which hooks read as args.<key>")


@group("cluster and placement")
class ClusterArgs:
    device: str = arg(
        "auto", "where trainer and engines run; auto takes CUDA where there is a GPU", choices=["auto", "cpu", "cuda"]
    )
    actor_num_nodes: int = arg(1, "nodes of the trainer", limits="[1, inf)")
    actor_num_gpus_per_node: int | None = arg(
        None,
        "trainer ranks per node (GPUs, or processes on CPU); unset: just enough for one data-parallel replica",
        limits="[1, inf)",
    )
    critic_num_nodes: int | None = arg(None, "nodes of the critic; unset: as the actor", limits="[1, inf)")
    critic_num_gpus_per_node: int | None = arg(None, "critic ranks per node; unset: as the actor", limits="[1, inf)")
    colocate_critic: bool = arg(False, "the critic runs on the actor's devices, beside it, instead of on its own")
    rollout_num_gpus: int | None = arg(
        None,
        "ranks of all engines together; unset: one engine, or as many as the trainer has when colocated on GPUs",
        limits="[1, inf)",
    )
    rollout_num_gpus_per_engine: int = arg(1, "tensor-parallel size of one SGLang engine", limits="[1, inf)")
    num_gpus_per_node: int = arg(
        8, "GPUs that a node of this cluster has; bounds one engine's share of a node", limits="[1, inf)"
    )
    colocate: bool = arg(False, "trainer and engines take turns on the same devices")
    offload_train: bool | None = arg(
        None, "move the trainer's tensors to the host while engines generate; unset: as --colocate on CUDA"
    )
    offload_rollout: bool | None = arg(
        None, "engines release their memory while the trainer trains; unset: as --colocate on CUDA"
    )
    ray_address: str | None = arg(
        None, "address of a running Ray cluster ('auto' or host:port); unset: RAY_ADDRESS, else a local one"
    )
    placement_timeout: float = arg(
        300.0,
        "seconds to wait for Ray to grant the resources before the run stops with what is missing",
        limits="(0, inf)",
    )
    distributed_timeout_minutes: float = arg(30.0, "timeout of a collective between trainer ranks", limits="(0, inf)")


@group("model and parallel layout (Megatron-Core)")
class ModelArgs:
    hf_checkpoint: str | None = arg(
        None, "Hugging Face folder: config.json, tokenizer and, unless --load says otherwise, weights"
    )
    tensor_model_parallel_size: int = arg(1, "tensor parallel size", aliases=["--tp"], limits="[1, inf)")
    pipeline_model_parallel_size: int = arg(1, "pipeline parallel size", aliases=["--pp"], limits="[1, inf)")
    num_layers_per_virtual_pipeline_stage: int | None = arg(
        None, "layers per virtual pipeline stage (interleaved schedule)", limits="[1, inf)"
    )
    context_parallel_size: int = arg(1, "context parallel size", aliases=["--cp"], limits="[1, inf)")
    allgather_cp: bool = arg(
        False,
        "context parallelism cuts the packed row into equal parts and gathers keys and values (our torch spec only); "
        "off: zigzag, each sequence in 2 * cp chunks",
    )
    expert_model_parallel_size: int = arg(1, "expert parallel size", aliases=["--ep"], limits="[1, inf)")
    expert_tensor_parallel_size: int | None = arg(
        None, "tensor parallel size of experts; unset: as --tensor-model-parallel-size", limits="[1, inf)"
    )
    sequence_parallel: bool = arg(False, "split activations of norms and residuals over the tensor-parallel ranks")
    transformer_impl: str = arg(
        "auto",
        "layer spec: Transformer Engine or our torch modules; auto takes TE where it is installed with CUDA",
        choices=["auto", "transformer_engine", "local"],
    )
    attention_backend: str = arg(
        "auto", "attention kernel that TE uses", choices=["auto", "flash", "fused", "unfused", "local"]
    )
    params_dtype: str = arg(
        "bfloat16", "dtype of weights and activations in the trainer", choices=["bfloat16", "float32", "float16"]
    )
    rounding_profile: str = arg(
        "off",
        "where a bf16 trainer rounds: sglang as SGLang's CUDA kernels do, once per region (docs/rounding.md)",
        choices=["off", "sglang"],
    )
    rounding_regions: str | None = arg(
        None, "regions that --rounding-profile is for: some of rope,swiglu,norm with commas; unset: all"
    )
    rounding_probe: bool = arg(
        False,
        "before the first optimizer step compare log-probs with the engine's for each subset of the regions: a table, "
        "and rounding_probe.json in the run folder; training stays as it is",
    )
    make_vocab_size_divisible_by: int = arg(
        1, "the vocabulary is padded to a multiple of this times the tensor parallel size", limits="[1, inf)"
    )
    recompute_granularity: str | None = arg(None, "recompute activations to save memory", choices=["full", "selective"])
    recompute_method: str | None = arg(None, "which layers full recompute takes", choices=["uniform", "block"])
    recompute_num_layers: int | None = arg(None, "layers per recompute chunk", limits="[1, inf)")
    custom_model_provider_path: str | None = arg(
        None, "function that builds the model in our place", hook="pre_process, post_process, vp_stage=None"
    )
    custom_megatron_init_path: str | None = arg(None, "called after Megatron is initialised", hook="args")


@group("optimizer")
class OptimizerArgs:
    lr: float = arg(1e-6, "peak learning rate", limits="[0, inf)")
    min_lr: float = arg(0.0, "learning rate after decay", limits="[0, inf)")
    lr_decay_style: str = arg(
        "constant", "shape of the decay", choices=["constant", "linear", "cosine", "inverse-square-root", "WSD"]
    )
    lr_decay_iters: int | None = arg(
        None, "optimizer steps until --min-lr; unset: all steps of the run", limits="[1, inf)"
    )
    lr_warmup_iters: int = arg(0, "optimizer steps of linear warm-up", limits="[0, inf)")
    lr_warmup_fraction: float | None = arg(None, "warm-up as a share of --lr-decay-iters", limits="[0, 1)")
    weight_decay: float = arg(0.0, "decoupled weight decay", limits="[0, inf)")
    adam_beta1: float = arg(0.9, "Adam beta 1", limits="[0, 1)")
    adam_beta2: float = arg(0.98, "Adam beta 2", limits="[0, 1)")
    adam_eps: float = arg(1e-8, "Adam epsilon", limits="(0, inf)")
    clip_grad: float = arg(1.0, "largest gradient norm; 0 turns clipping off", limits="[0, inf)")
    use_distributed_optimizer: bool = arg(True, "shard optimizer state over data-parallel ranks")
    accumulate_allreduce_grads_in_fp32: bool = arg(True, "accumulate and reduce gradients in fp32")
    overlap_grad_reduce: bool = arg(False, "overlap gradient reduction with the backward pass")
    overlap_param_gather: bool = arg(False, "overlap parameter gathering with the forward pass")


@group("data")
class DataArgs:
    prompt_data: str | None = arg(None, "prompts: .jsonl or .parquet; `file@[0:100]` takes a slice of rows")
    input_key: str = arg("prompt", "column of the prompt: text, or a list of chat messages")
    label_key: str | None = arg("label", "column of the answer that the reward sees")
    metadata_key: str = arg("metadata", "column of a dict that is passed on in Sample.metadata")
    tool_key: str | None = arg(None, "column of tools for the chat template")
    apply_chat_template: bool = arg(False, "render prompts with the tokenizer's chat template")
    apply_chat_template_kwargs: dict = arg({}, "JSON: further arguments of the chat template", parse=json_object)
    rollout_shuffle: bool = arg(False, "shuffle prompts each epoch (seed: --rollout-seed)")
    rollout_seed: int = arg(42, "seed of prompt order and of sampling", limits="[0, 4294967295]")
    rollout_max_prompt_len: int | None = arg(
        None, "longest prompt in tokens; unset: --rollout-max-context-len minus one", limits="[1, inf)"
    )
    overlong_prompt: str = arg(
        "skip", "a prompt over the limit: leave it out and count it, or stop", choices=["skip", "error"]
    )
    num_epoch: int | None = arg(
        None, "passes over the prompts; sets --num-rollout when that is unset", limits="[1, inf)"
    )
    num_rollout: int | None = arg(None, "rollouts (steps) of the whole run", limits="[1, inf)")
    start_rollout_id: int | None = arg(None, "first rollout id; unset: what --load says, else 0", limits="[0, inf)")
    data_source_path: str = arg(
        "slime.rollout.data_source.RolloutDataSourceWithBuffer", "class that hands out prompts", hook="args"
    )


@group("rollout")
class RolloutArgs:
    rollout_function_path: str = arg(
        GENERATE,
        "function that makes the samples of one step",
        hook="args, rollout_id, data_source, evaluation=False",
    )
    eval_function_path: str | None = arg(
        None,
        "the same for evaluation; unset: --rollout-function-path",
        hook="args, rollout_id, data_source, evaluation=False",
    )
    custom_generate_function_path: str | None = arg(
        None, "async function that generates one sample", hook="args, sample, sampling_params"
    )
    rollout_batch_size: int = arg(32, "prompts per rollout", limits="[1, inf)")
    n_samples_per_prompt: int = arg(8, "samples per prompt: one group", limits="[1, inf)")
    over_sampling_batch_size: int | None = arg(
        None,
        "prompts drawn at a time while a dynamic filter drops groups; unset: --rollout-batch-size",
        limits="[1, inf)",
    )
    dynamic_sampling_filter_path: str | None = arg(
        None, "keeps or drops a finished group", hook="args, samples, **kwargs"
    )
    dynamic_sampling_max_draws: int = arg(
        20, "stop with an error when a filter dropped this many whole batches in one rollout", limits="[1, inf)"
    )
    rollout_sample_filter_path: str | None = arg(None, "marks samples with remove_sample", hook="args, samples")
    rollout_all_samples_process_path: str | None = arg(
        None, "sees all groups of a rollout, also dropped ones", hook="args, all_samples, data_source"
    )
    buffer_filter_path: str | None = arg(
        None, "chooses groups from the buffer", hook="args, rollout_id, buffer, num_samples"
    )
    partial_rollout: bool = arg(False, "keep unfinished samples for the next rollout instead of waiting for them")
    mask_offpolicy_in_partial_rollout: bool = arg(False, "do not train on tokens that an older policy generated")
    rollout_temperature: float = arg(
        1.0, "sampling temperature; log-probs of trainer and engine both use it", limits="[0, inf)"
    )
    rollout_top_p: float = arg(1.0, "nucleus share", limits="(0, 1]")
    rollout_top_k: int = arg(-1, "top-k; -1 is all")
    rollout_max_response_len: int = arg(1024, "longest response in tokens", limits="[1, inf)")
    rollout_max_context_len: int | None = arg(
        None, "longest prompt and response together; unset: the model's limit", limits="[1, inf)"
    )
    rollout_stop: list[str] | None = arg(None, "stop strings")
    rollout_stop_token_ids: list[int] | None = arg(None, "stop token ids")
    rollout_skip_special_tokens: bool = arg(True, "leave special tokens out of the response's text")
    sglang_server_concurrency: int = arg(512, "requests in flight per engine", limits="[1, inf)")
    rollout_request_timeout: float = arg(1800.0, "seconds for one /generate request", limits="(0, inf)")
    rollout_max_retries: int = arg(
        60,
        "tries of a request whose engine is away or busy (refused, reset, 5xx, 429); other 4xx are never retried",
        limits="[1, inf)",
    )
    rollout_health_check_interval: float = arg(
        10.0, "seconds between health checks of an engine; 0 turns them off", limits="[0, inf)"
    )
    rollout_health_check_timeout: float = arg(60.0, "seconds that a health check may take", limits="(0, inf)")
    rollout_health_check_failures: int = arg(
        3, "failed health checks in a row before an engine is restarted", limits="[1, inf)"
    )
    rollout_max_engine_restarts: int = arg(
        10, "restarts of engines in one run before it stops, and as many of the router", limits="[0, inf)"
    )
    use_fault_tolerance: bool = arg(True, "restart an engine that died and give it the current weights; the router too")
    sglang_router_ip: str | None = arg(None, "address of a router that already runs; unset: one is started")
    sglang_router_port: int | None = arg(None, "port of the router; unset: a free one", limits="[1, 65535]")
    sglang_start_timeout: float = arg(600.0, "seconds for an engine to become healthy", limits="(0, inf)")
    sglang_disable_radix_cache: bool = arg(False, "engine without prefix cache")
    save_samples: bool = arg(True, "write the samples of each step as jsonl into the run folder")


@group("reward")
class RewardArgs:
    rm_type: str | None = arg(
        None,
        "built-in reward: math, exact, f1, reasoning_gym, remote_rm, deepscaler, dapo, random (see docs/rewards.md)",
    )
    rm_url: str | None = arg(None, "URL for --rm-type remote_rm")
    rm_timeout: float = arg(
        30.0, "seconds that grading one sample may take; more is an error, not a zero", limits="(0, inf)"
    )
    custom_rm_path: str | None = arg(None, "async reward function", hook="args, sample, **kwargs")
    group_rm: bool = arg(False, "the reward function takes a whole group")
    reward_key: str | None = arg(None, "key of a dict reward that is trained on")
    eval_reward_key: str | None = arg(None, "the same for evaluation")
    custom_reward_post_process_path: str | None = arg(
        None, "replaces group normalisation of rewards", hook="args, samples"
    )
    custom_convert_samples_to_train_data_path: str | None = arg(None, "samples to columns", hook="args, samples")


@group("batch and schedule")
class BatchArgs:
    global_batch_size: int | None = arg(
        None, "samples per optimizer step; unset: all samples of a rollout", limits="[1, inf)"
    )
    num_steps_per_rollout: int | None = arg(
        None, "optimizer steps per rollout; sets --global-batch-size", limits="[1, inf)"
    )
    micro_batch_size: int = arg(1, "samples per micro-batch where --use-dynamic-batch-size is off", limits="[1, inf)")
    use_dynamic_batch_size: bool = arg(True, "pack micro-batches by tokens, up to --max-tokens-per-gpu")
    max_tokens_per_gpu: int = arg(4096, "tokens per micro-batch and context-parallel rank", limits="[1, inf)")
    log_probs_max_tokens_per_gpu: int | None = arg(
        None, "the same for passes without gradient; unset: as --max-tokens-per-gpu", limits="[1, inf)"
    )
    log_probs_chunk_size: int = arg(
        1024,
        "rows of the vocabulary matrix computed at a time; bounds the memory of the log-prob pass",
        limits="[1, inf)",
    )
    balance_data: bool = arg(True, "spread samples over data-parallel ranks by tokens")


@group("weight sync")
class SyncArgs:
    update_weight_buffer_size: int = arg(512 * 1024**2, "bytes per bucket of a weight update", limits="[1, inf)")
    update_weights_interval: int = arg(
        1, "rollouts between weight updates; train.py sends them after each, so only 1", limits="[1, inf)"
    )
    update_weight_timeout: float = arg(600.0, "seconds for one bucket before the run stops", limits="(0, inf)")
    update_weight_mode: str = arg(
        "auto",
        "distributed: NCCL or gloo broadcast; tensor: shared handles for colocated engines on CUDA; auto chooses",
        choices=["auto", "distributed", "tensor"],
    )
    check_weights_interval: int | None = arg(
        None,
        "compare digests of all tensors with the engines at the first and every n-th sync; unset: 1 on CPU, 50 on GPUs; 0: never",
        limits="[0, inf)",
    )


@group("checkpoint")
class CheckpointArgs:
    load: str | None = arg(
        None, "checkpoint folder to resume from, or a Hugging Face folder; a missing or empty one: --hf-checkpoint"
    )
    save: str | None = arg(None, "folder for checkpoints")
    save_interval: int | None = arg(
        None, "rollouts between checkpoints; unset: only at the end when --save is given", limits="[1, inf)"
    )
    async_save: bool = arg(False, "go on while a checkpoint is copied and written; the next step waits for the copy")
    on_save_error: str = arg(
        "stop",
        "a checkpoint cannot be written (disk full): stop the run, or say so and train on",
        choices=["stop", "continue"],
    )
    keep_last: int | None = arg(None, "checkpoints kept; unset: all", limits="[1, inf)")
    save_hf: str | None = arg(
        None, "also write a Hugging Face folder here with each checkpoint and at the end; {rollout_id} is filled in"
    )
    finetune: bool = arg(False, "--load takes weights only: no optimizer, no data cursor, step 0")
    allow_config_change: bool = arg(False, "go on from --load although flags that the run depends on have changed")


@group("evaluation")
class EvalArgs:
    eval_interval: int | None = arg(None, "rollouts between evaluations; unset: never", limits="[1, inf)")
    eval_prompt_data: list[str] | None = arg(None, "name and file, in pairs")
    n_samples_per_eval_prompt: int = arg(1, "samples per prompt", limits="[1, inf)")
    eval_temperature: float | None = arg(None, "temperature; unset: as the rollout", limits="[0, inf)")
    eval_top_p: float | None = arg(None, "nucleus share; unset: as the rollout", limits="(0, 1]")
    eval_max_response_len: int | None = arg(None, "longest response; unset: as the rollout", limits="[1, inf)")
    eval_max_context_len: int | None = arg(
        None, "longest prompt and response together; unset: as the rollout", limits="[1, inf)"
    )
    skip_eval_before_train: bool = arg(False, "no evaluation before the first step")


@group("what a run leaves and shows")
class ObservabilityArgs:
    run_dir: str = arg(
        "runs/default", "folder for metrics.jsonl, samples, logs, TensorBoard files, pictures and the resolved config"
    )
    use_tensorboard: bool = arg(True, "write TensorBoard files")
    progress: str = arg("auto", "progress bars; auto: on a terminal", choices=["auto", "on", "off"])
    custom_rollout_log_function_path: str | None = arg(
        None, "your own rollout log; True skips ours", hook="rollout_id, args, samples, extra_metrics, rollout_time"
    )
    custom_eval_rollout_log_function_path: str | None = arg(
        None, "the same for evaluation", hook="rollout_id, args, data, extra_metrics"
    )


@group("debugging")
class DebugArgs:
    debug_rollout_only: bool = arg(False, "generate and score, never train")
    debug_train_only: bool = arg(False, "train on saved samples, start no engine")
    save_debug_rollout_data: str | None = arg(None, "where to save each rollout's samples; {rollout_id} is filled in")
    load_debug_rollout_data: str | None = arg(
        None, "samples to train on instead of generating; implies --debug-train-only"
    )
    dry_run: bool = arg(False, "print the plan (flags, ranks, engines, batch arithmetic) and stop")


GROUPS: tuple[Any, ...] = (
    FileArgs, ClusterArgs, ModelArgs, ArchitectureArgs, OptimizerArgs, DataArgs, RolloutArgs, RewardArgs, BatchArgs, AlgorithmArgs,
    SyncArgs, CheckpointArgs, EvalArgs, ObservabilityArgs, DebugArgs,
)  # fmt: skip
