"""Checkpoints in Megatron's distributed format (torch_dist): weights, optimizer, schedule, RNG and the driver's dict.

Layout of a --save folder: `iter_0000012/` per checkpoint (named by rollout id), and
`latest_checkpointed_iteration.txt`, written last. A checkpoint is written under a temporary name and renamed when all
ranks are done, so that a folder of the final name is always complete.
"""

import contextlib
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as torch_save_distributed

from slime.backends.megatron_utils import device
from slime.backends.megatron_utils.model import unwrap, use_fused_adam
from slime.config.errors import ConfigError

LATEST = "latest_checkpointed_iteration.txt"
_EXTRA = "extra_state.pt"


class InProcessSave(TorchDistSaveShardedStrategy):
    """Megatron's torch_dist format, written by this process itself.

    Megatron's writer forks, and spawns a manager process that imports the entry module again: both go wrong inside
    a Ray worker with gloo threads. The files are the same, and Megatron reads them.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        torch_save_distributed(
            mcore_to_pyt_state_dict(flat, False),
            storage_writer=FileSystemWriter(checkpoint_dir, thread_count=1),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
        )


def save_checkpoint(
    folder: str | Path,
    rollout_id: int,
    model: list[Any],
    optimizer: Any,
    scheduler: Any,
    extra_state: dict[str, Any] | None = None,
    keep_last: int | None = None,
) -> Path:
    """Writes `folder/iter_<rollout_id>`; every rank must call it, with the same arguments. Returns that path.

    extra_state: anything picklable, kept beside the weights. keep_last: older checkpoints beyond it are deleted.
    """
    root = Path(folder)
    final, partial = root / f"iter_{rollout_id:07d}", root / f".partial_iter_{rollout_id:07d}"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    if optimizer is not None:
        materialise_adam(optimizer)
    state = _state(model, optimizer, scheduler, with_rng=True)
    state["world_size"] = dist.get_world_size()
    dist_checkpointing.save(state, str(partial), sharded_strategy=InProcessSave())
    if dist.get_rank() == 0:
        torch.save(extra_state or {}, partial / _EXTRA)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        _write_text(root / LATEST, str(rollout_id))
        _prune(root, keep_last)
    dist.barrier()
    return final


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def _prune(root: Path, keep_last: int | None) -> None:
    if keep_last is not None:
        for old in sorted(root.glob("iter_*"))[: -max(1, keep_last)]:
            shutil.rmtree(old, ignore_errors=True)


def latest_checkpoint(folder: str | Path | None) -> tuple[Path, int] | None:
    """(path, rollout id) of the checkpoint that `folder` points to; None when there is no checkpoint.

    `folder` may also be one checkpoint (`.../iter_0000012`). Raises ConfigError when the pointer leads nowhere.
    """
    if folder is None or not Path(folder).is_dir():
        return None
    root = Path(folder)
    if root.name.startswith("iter_") and (root / "metadata.json").is_file():
        return root, int(root.name.removeprefix("iter_"))
    if not (root / LATEST).is_file():
        return None
    text = (root / LATEST).read_text().strip()
    path = root / f"iter_{int(text):07d}" if text.isdigit() else root / text
    if not (path / "metadata.json").is_file():
        raise ConfigError(f"--load {folder}: {LATEST} names {path.name}, which is missing or incomplete")
    return path, int(text)


def load_checkpoint(path: Path, model: list[Any], optimizer: Any | None = None, scheduler: Any | None = None) -> None:
    """Loads a checkpoint into model (and optimizer, schedule, RNG when given) in place; every rank must call it.

    The layout may differ from the one that wrote it. RNG states are taken over only when the world size is the same.
    """
    world_size = dist_checkpointing.load_common_state_dict(str(path)).get("world_size")
    same_world = world_size == dist.get_world_size()
    if optimizer is not None:
        materialise_adam(optimizer)
    state = _state(model, optimizer, scheduler, with_rng=same_world and optimizer is not None, is_loading=True)
    loaded = dist_checkpointing.load(state, str(path))
    for index, chunk in enumerate(model):
        unwrap(chunk).load_state_dict(loaded[f"model{index}"], strict=True)
    if optimizer is None:
        return
    _load_optimizer(optimizer, loaded["optimizer"])
    if scheduler is not None:
        scheduler.load_state_dict(loaded["scheduler"])
    if "rng" in loaded:
        _set_rng(loaded["rng"])


def load_extra_state(path: Path) -> dict[str, Any]:
    """The driver's dict of a checkpoint."""
    return torch.load(path / _EXTRA, weights_only=False)


def _state(
    model: list[Any], optimizer: Any, scheduler: Any, *, with_rng: bool, is_loading: bool = False
) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
    }
    state: dict[str, Any] = {
        f"model{i}": unwrap(chunk).sharded_state_dict(metadata=metadata) for i, chunk in enumerate(model)
    }
    if optimizer is not None:
        chunks = state["model0"] if len(model) == 1 else {k: v for k, v in state.items() if k.startswith("model")}
        with _whole_buckets(optimizer):
            state["optimizer"] = optimizer.sharded_state_dict(chunks, is_loading=is_loading, metadata=metadata)
    if scheduler is not None:
        state["scheduler"] = scheduler.state_dict()
    if with_rng:
        state["rng"] = ShardedObject("rng", _get_rng(), (dist.get_world_size(),), (dist.get_rank(),))
    return state


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
    """Gives torch's Adam its zero state. Megatron reads it when saving or loading; torch makes it at the first step."""
    for part in optimizer.chained_optimizers:
        adam = part.optimizer
        if not isinstance(adam, (torch.optim.AdamW, torch.optim.Adam)):
            continue
        for group in adam.param_groups:
            for param in group["params"]:
                if not adam.state[param]:
                    adam.state[param] = {
                        "step": torch.zeros((), dtype=torch.float32, device=param.device),
                        "exp_avg": torch.zeros_like(param),
                        "exp_avg_sq": torch.zeros_like(param),
                    }


def _load_optimizer(optimizer: Any, loaded: dict[Any, Any]) -> None:
    """Loads each part of Megatron's chained optimizer, around two slips of its loader with torch's Adam.

    It looks for a step counter among the sharded tensors, where there is none, and it puts one counter into all
    parameters, which Adam then counts up once per parameter.
    """
    parts = optimizer.chained_optimizers
    for part, state in zip(parts, [loaded] if len(parts) == 1 else [loaded[i] for i in range(len(parts))], strict=True):
        param_state = state.pop("param_state", None)
        part.load_state_dict(state)
        of_params = list(part.optimizer.state.values()) if part.optimizer is not None else []
        steps = [s.pop("step") if isinstance(s.get("step"), torch.Tensor) else None for s in of_params]
        if param_state is not None:
            part.load_parameter_state_from_fully_reshardable(param_state)
        for of_param, step in zip(of_params, steps, strict=True):
            if step is not None:
                of_param["step"] = step.clone()
    use_fused_adam(optimizer)


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
