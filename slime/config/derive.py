"""Fills the flags whose help says "unset: ...". Pure: returns a changed copy."""

import os
from pathlib import Path
from typing import Any

from slime.config.args import Args
from slime.config.errors import ConfigError
from slime.config.hf_config import HFConfig

# Flags that name what a user has or wants to keep, and that no other flag's output may replace.
KEPT_PATHS = ("hf_checkpoint", "ref_load", "load", "save", "critic_load", "opd_teacher_load", "run_dir", "prompt_data")
_PATHS = (*KEPT_PATHS, "save_hf", "save_debug_rollout_data", "load_debug_rollout_data")


def resolve_device(device: str) -> str:
    """'auto' becomes 'cuda' where the NVIDIA driver has a device; decided without torch, which is slow to import."""
    if device != "auto":
        return device
    return "cuda" if Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists() else "cpu"


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))  # no shell expands ~ in a YAML file


def derive(args: Args, hf: HFConfig | None) -> Args:
    """All derived flags of `args`; `hf` is None only where no model is needed."""
    device = resolve_device(args.device)
    cuda = device == "cuda"
    out: dict[str, Any] = {"device": device}

    def fill(name: str, value: Any) -> None:
        if getattr(args, name) is None:
            out[name] = value

    if args.custom_loss_path:
        if args.loss_type not in ("policy_loss", "custom_loss"):
            raise ConfigError(f"--custom-loss-path and --loss-type {args.loss_type} are two losses; choose one")
        out["loss_type"] = "custom_loss"
    if args.load_debug_rollout_data or args.loss_type == "sft_loss":
        out["debug_train_only"] = True  # neither needs an engine

    replica = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    fill("actor_num_gpus_per_node", -(-replica // args.actor_num_nodes))
    per_node = args.actor_num_gpus_per_node or out["actor_num_gpus_per_node"]
    fill("critic_num_nodes", args.actor_num_nodes)
    fill("critic_num_gpus_per_node", per_node)
    if args.rollout_num_gpus is None:
        world = args.actor_num_nodes * per_node
        out["rollout_num_gpus"] = world if args.colocate and cuda else args.rollout_num_gpus_per_engine
    fill("offload_train", args.colocate and cuda)
    fill("offload_rollout", args.colocate and cuda)

    samples = args.rollout_batch_size * args.n_samples_per_prompt
    if args.global_batch_size is None:
        out["global_batch_size"] = max(1, -(-samples // max(args.num_steps_per_rollout or 1, 1)))
    fill("over_sampling_batch_size", args.rollout_batch_size)
    fill("log_probs_max_tokens_per_gpu", args.max_tokens_per_gpu)
    if args.rollout_max_context_len is None and hf is not None:
        out["rollout_max_context_len"] = hf.max_position_embeddings
    context = args.rollout_max_context_len or out.get("rollout_max_context_len")
    if context is not None:
        fill("eval_max_context_len", context)
        fill("rollout_max_prompt_len", context - 1)
    fill("eps_clip_high", args.eps_clip)
    fill("expert_tensor_parallel_size", args.tensor_model_parallel_size)
    fill("ref_load", args.hf_checkpoint)
    fill("critic_lr", args.lr)
    fill("eval_function_path", args.rollout_function_path)
    fill("eval_temperature", args.rollout_temperature)
    fill("eval_top_p", args.rollout_top_p)
    fill("eval_max_response_len", args.rollout_max_response_len)
    fill("check_weights_interval", 50 if cuda else 1)
    if args.update_weight_mode == "auto":
        # NCCL has no group with two ranks on one GPU, so colocated engines get shared handles instead.
        out["update_weight_mode"] = "tensor" if args.colocate and cuda else "distributed"
    if args.tensor_model_parallel_size == 1:
        out["sequence_parallel"] = False  # nothing to split; scripts give it whatever their TP is
    if hf is not None and (hf.num_experts or hf.latent) and args.tensor_model_parallel_size > 1:
        out["sequence_parallel"] = True  # experts and latent attention need it under tensor parallelism
    for name in _PATHS:
        # Ray's workers may run in another folder.
        value = out.get(name, getattr(args, name))
        if value is not None:
            out[name] = _absolute(value)
    if args.eval_prompt_data:
        out["eval_prompt_data"] = [_absolute(v) if i % 2 else v for i, v in enumerate(args.eval_prompt_data)]
    return args.replace(**out)
