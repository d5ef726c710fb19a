"""What a run finds out about its checkpoint before it starts anything: is it whole, and is it of this run?"""

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.config.args import Args
from slime.config.derive import KEPT_PATHS
from slime.config.errors import ConfigError
from slime.config.fields import flag_of
from slime.config.hf_config import HFConfig, check_same_model, load_hf_config, parse_hf_config
from slime.utils.checkpoint_folder import (
    check_sizes,
    holds_weights_only,
    is_hf_folder,
    latest_checkpoint,
    read_manifest,
)
from slime.utils.weight_files import locate_tensors

# Where a run reads, writes and computes; none of it changes what it computes.
_ELSEWHERE = {
    "config", "load", "save", "save_interval", "keep_last", "async_save", "on_save_error", "save_hf", "finetune",
    "allow_config_change", "start_rollout_id", "run_dir", "use_tensorboard", "progress", "save_samples", "dry_run",
    "ray_address", "placement_timeout", "distributed_timeout_minutes", "hf_checkpoint", "prompt_data", "num_rollout",
    "num_epoch", "sglang_router_ip", "sglang_router_port", "sglang_start_timeout", "skip_eval_before_train",
    "save_debug_rollout_data", "rollout_request_timeout", "rollout_max_retries", "rollout_health_check_interval",
    "rollout_health_check_timeout", "rollout_health_check_failures", "rollout_max_engine_restarts",
    "update_weight_timeout", "check_weights_interval", "router", "rounding_probe",
}  # fmt: skip
# A run that goes on with another value of these is another run: its data order, its loss or its schedule break off.
_DANGEROUS = (
    "input_key", "label_key", "tool_key", "apply_chat_template", "apply_chat_template_kwargs", "rollout_shuffle",
    "rollout_seed", "rollout_max_prompt_len", "data_source_path", "rollout_batch_size", "n_samples_per_prompt",
    "loss_type", "custom_loss_path", "advantage_estimator", "params_dtype", "adam_beta1",
    "adam_beta2", "adam_eps", "lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "lr_warmup_fraction",
)  # fmt: skip
# Keys of config.json that say which weights a model has.
_MODEL_KEYS = (
    "model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size", "tie_word_embeddings", "num_experts", "num_local_experts", "n_routed_experts",
)  # fmt: skip


def describe_run(args: Args, model: Mapping[str, Any], extra_state: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a checkpoint's manifest says of its run: flags, model (a config.json), and fingerprint of its prompts."""
    data = (extra_state or {}).get("data") or {}
    return {
        "flags": _plain(args.to_dict()),
        "model": dict(model),
        "prompts": data.get("fingerprint"),
    }


def resumed_checkpoint(args: Args) -> tuple[Path, int] | None:
    """(path, rollout id) of the checkpoint in --load that the run goes on from. None: it starts at step 0, maybe with
    weights from there."""
    found = latest_checkpoint(args.load)
    return None if found is None or args.finetune or holds_weights_only(found[0]) else found


def check_start(args: Args) -> list[str]:
    """Everything about --load, --save and --run-dir that can be known before a process starts.

    Returns lines for the user (what a resumed run changes). Raises ConfigError with one line per problem: a damaged
    or newer checkpoint, one of another model, weights that are cut off or missing, flags that must not change, folders
    that cannot be written.
    """
    for flag, folder in (("--run-dir", args.run_dir), ("--save", args.save), ("--save-hf", args.save_hf)):
        if folder is not None:
            _check_writable(flag, Path(folder).parent if flag == "--save-hf" else Path(folder))
    if args.save_hf is not None:
        _check_replaceable(args)
    for name, dump in (("save", args.save_debug_rollout_data), ("load", args.load_debug_rollout_data)):
        if dump is not None:
            _check_dump(f"--{name}-debug-rollout-data", dump, args)
    for name in ("load", "ref_load", "critic_load", "opd_teacher_load"):
        if (folder := getattr(args, name)) is not None:
            _check_source(flag_of(name), Path(folder), args)
    _check_weights(args)
    found = resumed_checkpoint(args)
    manifest = read_manifest(found[0]) if found else None
    if found is None or manifest is None:
        return []
    changes = changed_flags(manifest.run.get("flags", {}), args)
    length = "num_epoch" if args.num_rollout is None else "num_rollout"
    before = manifest.run.get("flags", {}).get(length)
    if _decays_over_the_run(args) and before != getattr(args, length):
        changes[length] = (before, getattr(args, length))
    dangerous = {name: changes[name] for name in changes if name in _DANGEROUS}
    if _decays_over_the_run(args):  # they say how many optimizer steps the decay takes
        dangerous |= {name: changes[name] for name in (length, "global_batch_size") if name in changes}
    if dangerous and not args.allow_config_change:
        raise ConfigError(
            "\n".join(
                f"{flag_of(name)} was {old!r} and is {new!r}: the run in {found[0]} cannot go on like that; give it as "
                "it was, start anew with --finetune, or give --allow-config-change"
                for name, (old, new) in dangerous.items()
            )
        )
    return [f"going on from {found[0]}; changed since: {flag_of(name)} {old} -> {new}"
            for name, (old, new) in changes.items()]  # fmt: skip


def changed_flags(before: Mapping[str, Any], args: Args) -> dict[str, tuple[Any, Any]]:
    """{flag: (old, new)} of flags that may change what a run computes; those that one side does not know are no
    change."""
    now = _plain(args.to_dict())
    return {
        name: (before[name], value)
        for name, value in now.items()
        if name not in _ELSEWHERE and name in before and before[name] != value
    }


def _decays_over_the_run(args: Args) -> bool:
    return args.lr_decay_style != "constant" and args.lr_decay_iters is None


def _check_source(flag: str, folder: Path, args: Args) -> None:
    if folder.is_file():
        raise ConfigError(f"{flag} {folder}: a checkpoint is a folder, this is a file")
    found = latest_checkpoint(folder)
    if found is not None:
        manifest = read_manifest(found[0])
        if manifest is not None:
            check_sizes(found[0], manifest)
            _check_model(found[0], manifest.run.get("model") or {}, load_hf_config(args.hf_checkpoint), args)
        return
    if is_hf_folder(folder):
        if folder.resolve() != Path(args.hf_checkpoint).resolve():
            check_same_model(load_hf_config(args.hf_checkpoint), load_hf_config(folder), folder)
            locate_tensors(folder)
        return
    files = sorted(p.name for p in folder.iterdir() if p.is_file()) if folder.is_dir() else []
    if files or (flag != "--load" and folder.resolve() != Path(args.hf_checkpoint).resolve()):
        raise ConfigError(
            f"{flag} {folder}: neither a checkpoint of slime or Megatron nor a Hugging Face folder "
            f"({'it holds ' + ', '.join(files[:3]) if files else 'no such folder, or it is empty'})"
        )


def _check_weights(args: Args) -> None:
    """Of --hf-checkpoint, whose heads are read. Where the trainer's first weights are from elsewhere it may be a folder
    without any: engines and reference models say if they need them."""
    folder = Path(args.hf_checkpoint)
    elsewhere = args.debug_rollout_only or is_hf_folder(args.load) or latest_checkpoint(args.load) is not None
    if not elsewhere or next(folder.glob("*.safetensors*"), None):
        locate_tensors(folder)


def _check_model(path: Path, before: Mapping[str, Any], now: HFConfig, args: Args) -> None:
    for key in _MODEL_KEYS:
        if key in before and before.get(key) != now.raw.get(key):
            raise ConfigError(
                f"checkpoint {path} is of another model: its {key} is {before[key]!r}, that of {args.hf_checkpoint} is "
                f"{now.raw.get(key)!r}"
            )
    if before:  # what else its weights were made for: positions, windows, experts per token
        check_same_model(now, parse_hf_config(dict(before), f"{path}/manifest.json"), path)


def _check_writable(flag: str, folder: Path) -> None:
    """Tries it: permissions, read-only mounts and full disks all show only when a file is written."""
    place = folder
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise ConfigError(f"{flag} {folder}: {place} is a file, not a folder")
    try:
        descriptor, name = tempfile.mkstemp(prefix=".slime_probe_", dir=place)
        os.write(descriptor, b"x")
        os.close(descriptor)
        os.unlink(name)
    except OSError as error:
        raise ConfigError(f"{flag} {folder}: {place} cannot be written ({error.strerror}); choose another") from None


def _check_replaceable(args: Args) -> None:
    """--save-hf replaces a folder as a whole: it may be an earlier result, but nothing else that a user has."""
    target = Path(args.save_hf)
    if target.is_file():
        raise ConfigError(f"--save-hf {target}: it is a file, not a folder")
    for name in KEPT_PATHS:
        other = getattr(args, name)
        if other is not None and Path(other).resolve().is_relative_to(target.resolve()):
            raise ConfigError(f"--save-hf {target} would replace {flag_of(name)} {other}; choose another folder")
    if target.is_dir() and any(target.iterdir()) and not is_hf_folder(target):
        raise ConfigError(f"--save-hf {target}: the folder holds other files, which would be lost; choose another")


def _check_dump(flag: str, path: str, args: Args) -> None:
    try:
        first = Path(path.format(rollout_id=args.start_rollout_id or 0))
    except (KeyError, IndexError, ValueError):
        raise ConfigError(f"{flag} {path}: only {{rollout_id}} is filled in") from None
    if flag.startswith("--save"):
        if "{rollout_id" not in path and args.num_rollout not in (None, 1):
            raise ConfigError(f"{flag} {path}: each rollout would replace the one before; put {{rollout_id}} into it")
        _check_writable(flag, first.parent)
    elif "{rollout_id" not in path and not first.is_file():
        raise ConfigError(f"{flag} {path}: no such file")
    elif resumed_checkpoint(args) is None and not first.is_file():
        raise ConfigError(f"{flag} {path}: there is no {first}")


def _plain(values: Any) -> Any:
    """As JSON gives it back, so that what was saved compares equal to what is."""
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        values = dataclasses.asdict(values)
    return json.loads(json.dumps(values, default=str))
