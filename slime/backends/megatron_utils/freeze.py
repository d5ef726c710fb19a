"""A model's state as it is now, copied to the host, for a thread to save while the original trains on.

Megatron makes the optimizer's part of a checkpoint by gathering its shards over the data-parallel ranks into fresh
memory: many times the work of one copy. Here training waits for the copy of each rank's own shards only; the gathering
is done by the same Megatron code, on a frozen stand-in for the optimizer, in the thread.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, is_main_replica


class HostCopies:
    """Copies of tensors in host memory that is kept: first touches of new pages cost more than the copy."""

    def __init__(self) -> None:
        self._kept: dict[Any, torch.Tensor] = {}

    def copy(self, key: Any, tensor: torch.Tensor) -> torch.Tensor:
        kept = self._kept.get(key)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._kept[key] = kept
        kept.copy_(tensor.detach())
        return kept


class Freezer:
    """Freezes a model and its optimizer again and again. Collective when made: the gathering has groups of its own."""

    def __init__(self, optimizer: Any) -> None:
        self._host = HostCopies()
        self._groups: dict[tuple[int, ...], Any] = {}
        parts = optimizer.chained_optimizers
        # Optimizers without sharded state have nothing to gather; Megatron hands out their tensors as they are.
        self.works = all(hasattr(part, "_get_main_param_and_optimizer_states") for part in parts)
        everyone: list[Any] = [None] * dist.get_world_size()
        mine = [tuple(dist.get_process_group_ranks(part.data_parallel_group)) for part in parts] if self.works else []
        dist.all_gather_object(everyone, mine)
        for ranks in sorted({ranks for of_rank in everyone for ranks in of_rank}):
            self._groups[ranks] = dist.new_group(list(ranks), backend="gloo")

    def model(self, state: dict[str, Any]) -> Callable[[], None]:
        """Copies the tensors of a model's sharded state dict; calling the result puts them into it, instead of the
        live ones (which Megatron needs until then, to tell parameters apart)."""
        bases = [b for b in nested_values(state) if isinstance(b, ShardedBase) and not isinstance(b, ShardedObject)]
        bases = [b for b in bases if is_main_replica(b.replica_id)]  # others write nothing
        copies = [self._host.copy(("model", i), base.data) for i, base in enumerate(bases)]

        def put() -> None:
            for base, data in zip(bases, copies, strict=True):
                base.data = data

        return put

    def optimizer(self, optimizer: Any) -> Any:
        """A stand-in whose `sharded_state_dict` gives what the optimizer's would give now."""
        if len(optimizer.chained_optimizers) > 1:
            optimizer._synchronize_steps()
        frozen = copy.copy(optimizer)
        frozen.chained_optimizers = [self._part(i, part) for i, part in enumerate(optimizer.chained_optimizers)]
        frozen._synchronize_steps = lambda: None
        return frozen

    def _part(self, number: int, part: Any) -> Any:
        tensors: dict[Any, dict[str, torch.Tensor]] = {}
        for of_dtype in part.gbuf_ranges:
            for buckets in of_dtype.values():
                for param in (p for bucket in buckets for p in bucket["param_map"]):
                    live = part._get_main_param_and_optimizer_states(param)
                    tensors[param] = {
                        name: self._host.copy((number, len(tensors), name), tensor)
                        for name, tensor in live.items()
                        if isinstance(tensor, torch.Tensor)
                    }
        plain = copy.deepcopy(part.state_dict())
        frozen = copy.copy(part)
        frozen._get_main_param_and_optimizer_states = tensors.__getitem__
        frozen.state_dict = lambda: plain
        frozen.buffers = [_whole(buffer) for buffer in part.buffers]
        ranks = tuple(dist.get_process_group_ranks(part.data_parallel_group))
        frozen.data_parallel_group = frozen.data_parallel_group_gloo = self._groups[ranks]
        return frozen


def _whole(buffer: Any) -> Any:
    """A buffer, and its buckets, that end with their padding (see `checkpoint._whole_buckets`)."""
    buffer = copy.copy(buffer)
    buffer.buckets = [copy.copy(bucket) for bucket in buffer.buckets]
    buffer.numel_unpadded = buffer.numel
    for bucket in buffer.buckets:
        bucket.numel_unpadded = bucket.grad_data.numel()
    return buffer
