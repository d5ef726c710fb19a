"""Checkpoints in Megatron's distributed format (torch_dist): weights, optimizer, schedule, RNG and the driver's dict.

What lies where, and when a checkpoint counts, is in `slime.utils.checkpoint_folder`. This file turns a model into
what is written, and back; `CheckpointWriter` (writer.py) writes it, in the background if asked to.
"""

import contextlib
import random
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint import CheckpointException

from slime.backends.megatron_utils import device
from slime.backends.megatron_utils.checkpoint_check import check_files, check_finite, check_fits
from slime.backends.megatron_utils.freeze import Freezer
from slime.backends.megatron_utils.model import torch_adams, unwrap, use_fused_adam
from slime.backends.megatron_utils.writer import EXTRA, CheckpointWriter, in_one_line
from slime.config.errors import ConfigError
from slime.utils.checkpoint_folder import latest_checkpoint

# Of an optimizer's parameter group: what the flags say.
_OF_FLAGS = ("betas", "eps", "max_lr", "min_lr", "lr_mult", "wd_mult")

__all__ = [
    "checkpoint_state",
    "frozen_state",
    "latest_checkpoint",
    "load_checkpoint",
    "load_extra_state",
    "save_checkpoint",
]


def save_checkpoint(
    folder: str | Path,
    rollout_id: int,
    model: list[Any],
    optimizer: Any,
    scheduler: Any,
    extra_state: dict[str, Any] | None = None,
    keep_last: int | None = None,
    run: dict[str, Any] | None = None,
) -> Path:
    """Writes `folder/iter_<rollout_id>` and returns that path; every rank must call it, with the same arguments.

    extra_state: anything picklable, kept beside the weights. keep_last: older checkpoints beyond it are deleted.
    run: JSON values for the manifest. Raises SaveError on every rank when any rank cannot write.
    """
    writer = CheckpointWriter(folder, keep_last)
    writer.save(rollout_id, checkpoint_state(model, optimizer, scheduler), extra_state, run)
    return writer.folder_of(rollout_id)


def checkpoint_state(model: list[Any], optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Megatron's sharded state dict of all that a run needs to go on. Collective."""
    if optimizer is not None:
        materialise_adam(optimizer)
    return {**_state(model, optimizer, scheduler, with_rng=True), "world_size": dist.get_world_size()}


def frozen_state(freezer: Freezer, model: list[Any], optimizer: Any, scheduler: Any) -> Callable[[], dict[str, Any]]:
    """Of now, what `checkpoint_state` gives: the result makes it, once, in any thread, from copies. Nothing may change
    what is copied before `freezer.wait` is over; training goes on from then."""
    materialise_adam(optimizer)
    state = {**_state(model, None, scheduler, with_rng=True), "world_size": dist.get_world_size()}
    copy_all = freezer.freeze(_by_chunk(state), optimizer)
    # Its groups exist on the host only, so one rank of each data-parallel group gathers, as Megatron can be told.
    metadata = {**_metadata(), "distrib_optim_fully_reshardable_mem_efficient": True}

    def finish() -> dict[str, Any]:
        frozen, put_copies = copy_all()
        optimizer_state = frozen.sharded_state_dict(_chunks(state), is_loading=False, metadata=metadata)
        put_copies()
        return {**state, "optimizer": optimizer_state}

    return finish


def load_checkpoint(
    path: Path, model: list[Any], optimizer: Any | None = None, scheduler: Any | None = None,
    *, skip: Collection[str] = (),
) -> None:  # fmt: skip
    """Loads a checkpoint into model (and optimizer, schedule, RNG when given) in place; every rank must call it.

    The layout may differ from the one that wrote it. RNG states are taken over only when the world size is the same.
    skip: parameters to leave alone, which the checkpoint need not have.
    """
    check_files(path)
    with _readable(path):
        common = dist_checkpointing.load_common_state_dict(str(path))
    same_world = common.get("world_size") == dist.get_world_size()
    if optimizer is not None:
        written = _written_optimizer(path, common, optimizer)
        materialise_adam(optimizer)
    state = _state(model, optimizer, scheduler, with_rng=same_world and optimizer is not None, is_loading=True)
    for name in [name for name in state if name.startswith("model")]:
        state[name] = {key: value for key, value in state[name].items() if key not in skip}
    check_fits(path, _by_chunk(state))
    with _readable(path, "; --finetune takes its weights alone" if optimizer is not None else ""):
        loaded = dist_checkpointing.load(state, str(path))
    for index, chunk in enumerate(model):
        gpt = unwrap(chunk)
        own = {key: value for key, value in gpt.state_dict().items() if key in skip}
        gpt.load_state_dict(loaded[f"model{index}"] | own, strict=True)
    check_finite(path, (named for chunk in model for named in unwrap(chunk).named_parameters()))
    if optimizer is None:
        return
    flags = [{key: group[key] for key in _OF_FLAGS if key in group} for group in optimizer.param_groups]
    _load_optimizer(optimizer, loaded["optimizer"], written)
    for group, values in zip(optimizer.param_groups, flags, strict=True):
        group.update(values)  # flags of this run, not of the one that wrote the checkpoint
    if scheduler is not None:
        # Its position is the checkpoint's, its shape that of this run's flags.
        scheduler.override_opt_param_scheduler, scheduler.use_checkpoint_opt_param_scheduler = True, False
        scheduler.load_state_dict(loaded["scheduler"])
    if "rng" in loaded:
        _set_rng(loaded["rng"])


@contextlib.contextmanager
def _readable(path: Path, advice: str = "") -> Iterator[None]:
    """What Megatron and torch say of a checkpoint that they cannot read, in one line."""
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        raise ConfigError(f"checkpoint {path} cannot be read: {in_one_line(error)}{advice}") from error


def load_extra_state(path: Path) -> dict[str, Any]:
    """The driver's dict of a checkpoint."""
    return torch.load(path / EXTRA, weights_only=False)


def _state(
    model: list[Any], optimizer: Any, scheduler: Any, *, with_rng: bool, is_loading: bool = False
) -> dict[str, Any]:
    metadata = _metadata()
    state: dict[str, Any] = {
        f"model{i}": unwrap(chunk).sharded_state_dict(metadata=metadata) for i, chunk in enumerate(model)
    }
    if optimizer is not None:
        with _whole_buckets(optimizer):
            state["optimizer"] = optimizer.sharded_state_dict(_chunks(state), is_loading=is_loading, metadata=metadata)
    if scheduler is not None:
        state["scheduler"] = scheduler.state_dict()
    if with_rng:
        state["rng"] = ShardedObject("rng", _get_rng(), (dist.get_world_size(),), (dist.get_rank(),))
    return state


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
    }


def _chunks(state: dict[str, Any]) -> dict[str, Any]:
    """The model's part of a state, as optimizers want it."""
    chunks = _by_chunk(state)
    return chunks["model0"] if len(chunks) == 1 else chunks


def _by_chunk(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key.startswith("model")}


@contextlib.contextmanager
def _whole_buckets(optimizer: Any) -> Iterator[None]:
    """Makes the sharded optimizer's buckets end with their padding.

    Megatron gathers buckets without the padding at their ends, and then looks parameters up at their places with it:
    all that follows the first padded bucket (sizes that are no multiples of 128) would be shifted.
    """
    changed = []
    for part in optimizer.chained_optimizers:
        for buffer in getattr(part, "buffers", ()):
            for thing, numel in [(buffer, buffer.numel), *((b, b.grad_data.numel()) for b in buffer.buckets)]:
                changed.append((thing, thing.numel_unpadded))
                thing.numel_unpadded = numel
    try:
        yield
    finally:
        for thing, numel in changed:
            thing.numel_unpadded = numel


def materialise_adam(optimizer: Any) -> None:
    """Gives torch's Adam its zero state. Megatron reads it when saving or loading; torch makes it at the first step.

    Megatron reads the step there too, also of an optimizer without parameters (of experts, on a pipeline stage of
    layers without them): that one gets the step of the others.
    """
    adams = list(torch_adams(optimizer))
    for adam in adams:
        for group in adam.param_groups:
            for param in group["params"]:
                if not adam.state[param]:
                    adam.state[param] = {
                        "step": torch.zeros((), dtype=torch.float32, device=param.device),
                        "exp_avg": torch.zeros_like(param),
                        "exp_avg_sq": torch.zeros_like(param),
                    }
    empty = [adam for adam in adams if not any(group["params"] for group in adam.param_groups)]
    step = next((of["step"] for adam in adams if adam not in empty for of in adam.state.values()), torch.zeros(()))
    for adam in empty:
        adam.state["no parameters"] = {"step": step.clone()}  # type: ignore[index]  # torch's own type allows no name


def _written_optimizer(path: Path, common: dict[str, Any], optimizer: Any) -> list[dict[str, Any]]:
    """What a checkpoint keeps of the parts of its optimizer, without tensors. Raises ConfigError where ours cannot take
    it. Experts over several ranks are a part of their own."""
    state = common.get("optimizer") or {}
    written = [state[key] for key in sorted(state)] if all(isinstance(key, int) for key in state) else [state]
    parts = optimizer.chained_optimizers
    sharded = all(hasattr(part, "_get_main_param_and_optimizer_states") for part in parts)
    was_sharded = any("param_state_sharding_type" in part for part in written)
    if not state:
        fault = "has weights alone"
    elif sharded != was_sharded:
        fault = f"was written {'with' if was_sharded else 'without'} --use-distributed-optimizer"
    elif not sharded and len(written) != len(parts):
        fault = "has experts cut another way (--expert-model-parallel-size), and no --use-distributed-optimizer"
    else:
        return written
    raise ConfigError(
        f"checkpoint {path} {fault}: its optimizer's state does not fit; --finetune takes its weights alone"
    )


def _load_optimizer(optimizer: Any, loaded: dict[Any, Any], written: list[dict[str, Any]]) -> None:
    """Loads each part of Megatron's chained optimizer, around three slips of its loader. written: the checkpoint's.

    The state of parameters goes by their names, and yet the rest must be of as many parts as ours. With torch's Adam it
    looks for a step counter among the sharded tensors, where there is none, and it puts one counter into all
    parameters, which Adam then counts up once per parameter.
    """
    parts = optimizer.chained_optimizers
    for part, state in zip(parts, [loaded] if len(parts) == 1 else [loaded[i] for i in range(len(parts))], strict=True):
        param_state = state.pop("param_state", None)
        if param_state is not None and part.optimizer is not None:
            groups = [_written_group(written, group) for group in part.optimizer.param_groups]
            state = {**written[0], "optimizer": {**written[0]["optimizer"], "param_groups": groups}}
        elif param_state is None:  # not sharded: Megatron leaves a step of zero out, as of a run that has made none
            state.get("optimizer", state)["state"].setdefault("common_step", torch.zeros(()))
        part.load_state_dict(state)
        of_params = list(part.optimizer.state.values()) if part.optimizer is not None else []
        steps = [s.pop("step") if isinstance(s.get("step"), torch.Tensor) else None for s in of_params]
        if param_state is not None:
            part.load_parameter_state_from_fully_reshardable(param_state)
        for of_param, step in zip(of_params, steps, strict=True):
            if step is not None:
                of_param["step"] = step.clone()
    use_fused_adam(optimizer)


def _written_group(written: list[dict[str, Any]], group: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of parameters like those of `group`, be they experts of a part of their own or not."""
    groups = [one for part in written for one in part["optimizer"]["param_groups"]]
    alike = [one for one in groups if all(one[key] == group[key] for key in ("wd_mult", "lr_mult"))]
    same = [one for one in alike if one["is_expert_parallel"] == group["is_expert_parallel"]]
    return {**(same or alike)[0], "is_expert_parallel": group["is_expert_parallel"]}


def _get_rng() -> dict[str, Any]:
    rng = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    if device.has_cuda():
        rng["cuda"] = torch.cuda.get_rng_state()
    return rng


def _set_rng(rng: dict[str, Any]) -> None:
    random.setstate(rng["python"])
    np.random.set_state(rng["numpy"])
    torch.set_rng_state(rng["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(rng["tracker"])
    if device.has_cuda() and "cuda" in rng:
        torch.cuda.set_rng_state(rng["cuda"])
