"""Checks of derived flags, before anything is started. Every message says what, where and how to fix it."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from slime.config.architecture import disagreements
from slime.config.args import Args
from slime.config.critic import uses_critic
from slime.config.engine_options import (
    RESERVED_ROUTER,
    RESERVED_SERVER,
    command_line,
    overlay,
    router_options,
    server_options,
)
from slime.config.errors import ConfigError
from slime.config.fields import flag_of, limit_fault
from slime.config.groups import FINE_TUNE, GENERATE
from slime.config.hf_config import HFConfig
from slime.config.layout import cut_faults
from slime.config.no_effect import flags_without_effect
from slime.config.objective import objective_problems
from slime.config.rewards import BUILT_IN_REWARDS
from slime.config.rounding import rounding_problems


def check_limits(args: Args) -> None:
    """Raises one ConfigError that lists each text that is empty, and each number outside of the limits that its flag is
    declared with; NaN and infinity are outside of all. To be called before `derive`, which calculates with them."""
    problems = []
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if value == "":
            problems.append(
                f"{flag_of(field.name)} is empty: leave it out, or give a value (a variable that is not set?)"
            )
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            fault = limit_fault(value, field.metadata.get("limits"))
            if fault is not None:
                hint = " (leave it out to turn it off)" if field.name.endswith(("_interval", "keep_last")) else ""
                problems.append(f"{flag_of(field.name)} is {value}: {fault}{hint}")
    if problems:
        raise ConfigError("\n".join(problems))


def validate(args: Args, hf: HFConfig | None) -> None:
    """Raises one ConfigError that lists every problem, a line each."""
    checks = (
        _layout(args, hf),
        rounding_problems(args, hf),
        _batch(args),
        _schedule(args),
        objective_problems(args, hf),
        _rollout(args),
        _files(args),
        flags_without_effect(args),
    )
    problems = [problem for check in checks for problem in check]
    if problems:
        raise ConfigError("\n".join(problems))


def _layout(args: Args, hf: HFConfig | None) -> Iterator[str]:
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    ep = args.expert_model_parallel_size
    world = args.actor_num_nodes * args.actor_num_gpus_per_node
    if world % (tp * pp * cp):
        yield (
            f"layout: {world} trainer ranks (--actor-num-nodes {args.actor_num_nodes} x --actor-num-gpus-per-node "
            f"{args.actor_num_gpus_per_node}) are no multiple of TP {tp} x PP {pp} x CP {cp} = {tp * pp * cp}"
        )
    elif ep > 1 and (world // pp) % (ep * (args.expert_tensor_parallel_size or 1)):
        yield f"layout: {world // pp} ranks of a pipeline stage are no multiple of EP {ep} x expert TP {args.expert_tensor_parallel_size}"
    if not args.debug_train_only and args.rollout_num_gpus % args.rollout_num_gpus_per_engine:
        yield (
            f"--rollout-num-gpus {args.rollout_num_gpus} is no multiple of --rollout-num-gpus-per-engine "
            f"{args.rollout_num_gpus_per_engine}: some ranks would idle"
        )
    engine_tp = args.rollout_num_gpus_per_engine
    if args.device == "cuda" and engine_tp > args.num_gpus_per_node and engine_tp % args.num_gpus_per_node:
        yield f"--rollout-num-gpus-per-engine {engine_tp} spans nodes but is no multiple of --num-gpus-per-node {args.num_gpus_per_node}"
    if args.colocate and args.device == "cuda" and args.rollout_num_gpus > world:
        yield f"--colocate: engines claim {args.rollout_num_gpus} GPUs, the trainer has {world}; lower --rollout-num-gpus"
    if args.update_weight_mode == "tensor" and not args.colocate:
        yield "--update-weight-mode tensor hands over memory of one device: it needs --colocate; leave it out"
    if args.overlap_param_gather and not (args.use_distributed_optimizer and args.overlap_grad_reduce):
        yield "--overlap-param-gather needs --overlap-grad-reduce and --use-distributed-optimizer"
    for name in ("actor_num_gpus_per_node", "critic_num_gpus_per_node"):
        used = name.startswith("actor") or uses_critic(args)
        if args.device == "cuda" and used and getattr(args, name) > args.num_gpus_per_node:
            yield (
                f"{flag_of(name)} {getattr(args, name)} is more than a node has (--num-gpus-per-node {args.num_gpus_per_node}); "
                "give more nodes, or what yours have"
            )
    if args.device == "cpu" and args.transformer_impl == "transformer_engine":
        yield "--transformer-impl transformer_engine runs on CUDA only, and the trainer is on CPU cores here; use auto or local"
    if args.allgather_cp and cp == 1:
        yield "--allgather-cp says how context parallelism cuts a row: it needs --context-parallel-size of 2 or more"
    if args.allgather_cp and args.transformer_impl == "transformer_engine":
        yield "--allgather-cp: Transformer Engine's attention knows the zigzag cut only; use --transformer-impl local"
    if hf is not None:
        yield from _layout_of_model(args, hf)


def _engines_of_model(args: Args, hf: HFConfig) -> Iterator[str]:
    where = f"--hf-checkpoint {args.hf_checkpoint}"
    if hf.raw.get("quantization_config") and not args.debug_rollout_only:
        yield (
            f"{where} is quantised: engines would keep quantised weights, which the trainer's do not fit; write it in "
            "bfloat16 once with tools/convert_hf.py (--to megatron, then --to hf)"
        )
    engine_tp = args.rollout_num_gpus_per_engine
    # SGLang pads the heads of engines on CPU.
    if args.device == "cuda" and hf.num_attention_heads % engine_tp and "enable_dp_attention" not in args.sglang:
        yield (
            f"--rollout-num-gpus-per-engine {engine_tp} does not divide the model's num_attention_heads "
            f"{hf.num_attention_heads} ({args.hf_checkpoint}/config.json)"
        )
    if hf.model_type in ("qwen2_moe", "qwen3_moe") and hf.dense_layers:
        yield (
            f"{where}: layers {', '.join(map(str, sorted(hf.dense_layers)[:5]))} have no experts, but SGLang gives "
            f"every layer of a {hf.model_type} experts (it does not read mlp_only_layers and decoder_sparse_step)"
        )


def _layout_of_model(args: Args, hf: HFConfig) -> Iterator[str]:
    yield from disagreements(args, hf)
    if not args.debug_train_only:
        yield from _engines_of_model(args, hf)
    yield from cut_faults(args, hf)
    pp, vpp = args.pipeline_model_parallel_size, args.num_layers_per_virtual_pipeline_stage
    if vpp is not None and (pp == 1 or (hf.num_layers // pp) % vpp):
        yield f"--num-layers-per-virtual-pipeline-stage {vpp} needs PP above 1 and must divide the {hf.num_layers // pp} layers of a stage"
    if args.rollout_max_context_len and args.rollout_max_context_len > hf.max_position_embeddings:
        yield (
            f"--rollout-max-context-len {args.rollout_max_context_len} is over the model's max_position_embeddings "
            f"{hf.max_position_embeddings}"
        )
    unknown = [i for i in args.rollout_stop_token_ids or () if not 0 <= i < hf.vocab_size]
    if unknown:
        yield (
            f"--rollout-stop-token-ids {' '.join(map(str, unknown))}: no token of the model, whose vocabulary is 0 to "
            f"{hf.vocab_size - 1}"
        )
    if not args.debug_train_only and args.rollout_max_response_len >= (
        args.rollout_max_context_len or hf.max_position_embeddings
    ):
        yield (
            f"--rollout-max-response-len {args.rollout_max_response_len} leaves no room for a prompt in a context of "
            f"{args.rollout_max_context_len} tokens"
        )


def _batch(args: Args) -> Iterator[str]:
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    if args.num_steps_per_rollout is not None and args.num_steps_per_rollout > samples:
        yield f"--num-steps-per-rollout {args.num_steps_per_rollout} is more than the {samples} samples of a rollout"
    if args.global_batch_size > samples:
        yield (
            f"--global-batch-size {args.global_batch_size} is more than a rollout yields: --rollout-batch-size "
            f"{args.rollout_batch_size} x --n-samples-per-prompt {args.n_samples_per_prompt} = {samples}"
        )
    steps = args.num_steps_per_rollout
    if steps is not None and args.global_batch_size != -(-samples // steps) and steps <= samples:
        yield (
            f"--num-steps-per-rollout {steps} makes {-(-samples // steps)} of {samples} samples a step, "
            f"--global-batch-size says {args.global_batch_size}; give one of them"
        )
    if args.over_sampling_batch_size < args.rollout_batch_size:
        yield (
            f"--over-sampling-batch-size {args.over_sampling_batch_size} is below --rollout-batch-size "
            f"{args.rollout_batch_size}: it counts prompts drawn at a time"
        )
    if args.num_rollout is None and args.num_epoch is None and not args.dry_run:
        yield "give --num-rollout (steps) or --num-epoch (passes over the prompts)"


def _schedule(args: Args) -> Iterator[str]:
    full = args.recompute_granularity == "full"
    if full and not (args.recompute_method and args.recompute_num_layers):
        yield "--recompute-granularity full needs --recompute-method and --recompute-num-layers (uniform and 1: every layer)"
    steps = args.lr_decay_iters
    if steps is None and args.num_rollout is not None:
        steps_per_rollout = -(-args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size)
        steps = max(1, args.num_rollout - args.num_critic_only_steps) * steps_per_rollout
    if args.lr_decay_style != "constant" and steps is not None and 0 < args.lr_warmup_iters >= steps:
        yield (
            f"--lr-warmup-iters {args.lr_warmup_iters} does not end before the {steps} steps of the decay do "
            "(--lr-decay-iters, else all steps of the run)"
        )


def _rollout(args: Args) -> Iterator[str]:
    if args.loss_type == "sft_loss" and args.n_samples_per_prompt != 1:
        yield f"--n-samples-per-prompt {args.n_samples_per_prompt}: fine-tuning trains each row once, set it to 1"
    generates = args.rollout_function_path == GENERATE
    if args.debug_train_only and generates and not args.load_debug_rollout_data and args.loss_type != "sft_loss":
        yield "--debug-train-only starts no engine to generate with: give --load-debug-rollout-data file_{rollout_id}.pt"
    if args.start_rollout_id is not None and args.num_rollout is not None and args.start_rollout_id >= args.num_rollout:
        yield (
            f"--start-rollout-id {args.start_rollout_id} leaves nothing to do: rollouts are 0 to {args.num_rollout - 1} "
            "(--num-rollout)"
        )
    if args.debug_train_only and args.debug_rollout_only:
        yield "--debug-train-only and --debug-rollout-only exclude each other"
    needs_reward = args.loss_type == "policy_loss" and not args.debug_train_only
    if needs_reward and not args.rm_type and not args.custom_rm_path and not args.custom_generate_function_path:
        yield "no reward: give --rm-type (math, exact, f1, reasoning_gym, remote_rm) or --custom-rm-path"
    if args.rm_type and args.rm_type.removeprefix("boxed_") not in BUILT_IN_REWARDS:
        yield f"--rm-type {args.rm_type} is unknown; built in are {', '.join(BUILT_IN_REWARDS)}, also with boxed_ before it"
    by_user = (
        args.custom_rm_path or args.custom_reward_post_process_path or args.custom_convert_samples_to_train_data_path
    )
    if args.rm_type == "dapo" and not args.reward_key and not by_user and needs_reward:
        yield "--rm-type dapo gives a dict: give --reward-key score (or acc)"
    for name in ("rm_url", "opd_teacher_url"):
        url = getattr(args, name)
        if url and not url.startswith(("http://", "https://")):
            yield f"{flag_of(name)} {url}: a URL begins with http:// or https://"
    if args.rm_type == "remote_rm" and not args.rm_url:
        yield "--rm-type remote_rm needs --rm-url"
    if (
        args.partial_rollout
        and args.dynamic_sampling_filter_path is None
        and args.over_sampling_batch_size == args.rollout_batch_size
    ):
        yield "--partial-rollout has no effect without --over-sampling-batch-size above --rollout-batch-size"
    sft = args.rollout_function_path == FINE_TUNE
    if args.loss_type == "sft_loss" and generates and not args.load_debug_rollout_data:
        yield f"--loss-type sft_loss starts no engine: give --rollout-function-path {FINE_TUNE}"
    if args.loss_type == "policy_loss" and sft and args.advantage_estimator != "on_policy_distillation":
        yield f"--rollout-function-path {args.rollout_function_path} is for --loss-type sft_loss: its samples have no reward"
    if args.eval_interval and args.eval_function_path == FINE_TUNE:
        yield "--eval-interval: fine-tuning has no engine to evaluate with; give --eval-function-path, or leave it out"
    if args.sglang_router_ip and not args.sglang_router_port:
        yield "--sglang-router-ip needs --sglang-router-port"
    if args.rollout_top_k < 1 and args.rollout_top_k != -1:
        yield f"--rollout-top-k {args.rollout_top_k}: it must be at least 1, or -1 for all tokens"
    if "" in (args.rollout_stop or ()):
        yield "--rollout-stop has an empty string, which is in every response: each would end at once"
    if args.rollout_max_context_len and (args.rollout_max_prompt_len or 0) >= args.rollout_max_context_len:
        yield (
            f"--rollout-max-prompt-len {args.rollout_max_prompt_len} leaves no room for a response in a context of "
            f"{args.rollout_max_context_len} tokens"
        )
    if args.rollout_temperature <= 0 and args.loss_type == "policy_loss":
        yield f"--rollout-temperature {args.rollout_temperature}: policy gradients need samples, so it must be above 0"
    for given, known, reserved, prefix in (
        (args.sglang, server_options, RESERVED_SERVER, "--sglang-"),
        (args.router, router_options, RESERVED_ROUTER, "--router-"),
    ):
        for name, value in given.items():
            try:
                command_line(overlay({}, {name: value}, known(), reserved, prefix), known(), prefix)
            except ConfigError as error:
                yield str(error)
    by_field = {
        option.field: args.sglang[name] for name in args.sglang if (option := (server_options() or {}).get(name))
    }
    if str(by_field.get("dp_size", 1)) != "1" and "enable_dp_attention" not in by_field:
        yield (
            f"--sglang-dp-size {by_field['dp_size']} without --sglang-enable-dp-attention starts copies of the engine on "
            "GPUs that others have; give --rollout-num-gpus and --rollout-num-gpus-per-engine"
        )
    if args.update_weights_interval > 1:
        yield (
            f"--update-weights-interval {args.update_weights_interval} has no effect: train.py sends the weights after "
            "every rollout; leave it out"
        )
    if args.eval_prompt_data is not None and len(args.eval_prompt_data) % 2:
        yield "--eval-prompt-data takes pairs: name file [name file ...]"
    names = (args.eval_prompt_data or [])[::2]
    if len(set(names)) < len(names):
        yield f"--eval-prompt-data: names must differ, found {', '.join(names)}"
    context, eval_context = args.rollout_max_context_len, args.eval_max_context_len
    if context and eval_context and eval_context > context:
        yield f"--eval-max-context-len {eval_context} is over --rollout-max-context-len {context}, which engines are started with"
    if args.eval_interval and args.eval_prompt_data and eval_context and args.eval_max_response_len >= eval_context:
        yield (
            f"--eval-max-response-len {args.eval_max_response_len} leaves no room for a prompt in a context of {eval_context} "
            "tokens (--eval-max-context-len)"
        )
    if args.eval_interval and not args.eval_prompt_data:
        yield "--eval-interval needs --eval-prompt-data name file"


def _files(args: Args) -> Iterator[str]:
    if args.hf_checkpoint is None:
        yield "--hf-checkpoint is needed: a Hugging Face folder with config.json, tokenizer and weights"
    no_prompts = args.prompt_data is None and not args.load_debug_rollout_data
    if no_prompts and not args.dry_run and args.data_source_path.startswith("slime."):
        yield "--prompt-data is needed: a .jsonl or .parquet file of prompts"
    if args.load and args.save is None and Path(args.load).is_file():
        yield f"--load {args.load}: a checkpoint is a folder, this is a file"
