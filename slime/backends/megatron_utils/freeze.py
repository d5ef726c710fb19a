"""A model's state as it is now, copied to the host, for a thread to save while the original trains on.

Megatron makes the optimizer's part of a checkpoint by gathering its shards over the data-parallel ranks into fresh
memory: many times the work of one copy. Here each rank's own shards are copied, and the gathering is done by the same
Megatron code, on a frozen stand-in for the optimizer, in the thread. The copy is made there too: weights are sent and
engines generate meanwhile, and only who is about to change what is copied waits for it (`Freezer.wait`).
"""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, is_main_replica

_GAP = 4096  # numbers between two tensors of one buffer (padding) that are copied along, for the sake of one copy


class HostCopies:
    """Copies of tensors in host memory that is kept: first touches of new pages cost more than the copy."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Their copies, in order, in the same memory every time. What lies together (parameters in a flat buffer) is
        copied in one piece, and what several show (a float32 parameter and the optimizer's view of it) once."""
        copies: list[torch.Tensor] = [torch.empty(0)] * len(tensors)
        for number, run in enumerate(_runs(tensors)):
            kept = self._kept.get(number)
            if kept is None or kept.shape != run.live.shape or kept.dtype != run.live.dtype:
                kept = torch.empty(run.live.shape, dtype=run.live.dtype, pin_memory=run.live.is_cuda)
                self._kept[number] = kept
            kept.copy_(run.live, non_blocking=True)
            for index, start in run.places:
                shape = tensors[index].shape
                copies[index] = kept if start is None else kept[start : start + shape.numel()].view(shape)
        return copies


@dataclasses.dataclass(frozen=True)
class _Run:
    """live: memory to copy, flat. places: (which tensor, its first number in it; None: it is the whole, as it is)."""

    live: torch.Tensor
    places: list[tuple[int, int | None]]


def _runs(tensors: Sequence[torch.Tensor]) -> list[_Run]:
    """The tensors' memory in few pieces, none of it twice; the same ones whenever the tensors lie the same way."""
    runs: list[_Run] = []
    memory: dict[tuple[int, torch.dtype], list[tuple[int, int, int]]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.is_contiguous() and tensor.numel():
            start, where = int(tensor.storage_offset()), (tensor.untyped_storage().data_ptr(), tensor.dtype)
            memory.setdefault(where, []).append((start, start + tensor.numel(), index))
        else:
            runs.append(_Run(tensor.detach(), [(index, None)]))
    for spans in memory.values():
        members: list[tuple[int, int]] = []
        end = 0
        for start, stop, index in sorted(spans):
            if members and start > end + _GAP:
                runs.append(_run(tensors, members, end))
                members, end = [], 0
            members.append((start, index))
            end = max(end, stop)
        runs.append(_run(tensors, members, end))
    return runs


def _run(tensors: Sequence[torch.Tensor], members: list[tuple[int, int]], end: int) -> _Run:
    first, index = members[0]
    live = tensors[index].detach().as_strided((end - first,), (1,), first)
    return _Run(live, [(index, start - first) for start, index in members])


class Freezer:
    """Freezes a model and its optimizer again and again. Collective when made: the gathering has groups of its own."""

    def __init__(self, optimizer: Any) -> None:
        self._host = HostCopies()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="freeze")
        self._copies: Future[list[torch.Tensor]] | None = None
        self._groups: dict[tuple[int, ...], Any] = {}
        parts = optimizer.chained_optimizers
        # Optimizers without sharded state have nothing to gather; Megatron hands out their tensors as they are.
        self.works = all(hasattr(part, "_get_main_param_and_optimizer_states") for part in parts)
        everyone: list[Any] = [None] * dist.get_world_size()
        mine = [tuple(dist.get_process_group_ranks(part.data_parallel_group)) for part in parts] if self.works else []
        dist.all_gather_object(everyone, mine)
        for ranks in sorted({ranks for of_rank in everyone for ranks in of_rank}):
            self._groups[ranks] = dist.new_group(list(ranks), backend="gloo")

    def wait(self) -> None:
        """Returns when the copies are made, or have failed: tensors that were frozen may change from here on."""
        if self._copies is not None:
            wait([self._copies])

    def freeze(self, state: dict[str, Any], optimizer: Any) -> Callable[[], tuple[Any, Callable[[], None]]]:
        """Begins to copy. Nothing of it may change before `wait` is over. state: a model's sharded state dict.

        The result, to be called once, in any thread, waits for the copies, and returns a stand-in whose
        `sharded_state_dict` gives what the optimizer's would give now, and what puts copies of the model's tensors into
        `state`, instead of the live ones (which Megatron needs until then, to tell parameters apart).
        """
        if len(optimizer.chained_optimizers) > 1:
            optimizer._synchronize_steps()
        bases = [b for b in nested_values(state) if isinstance(b, ShardedBase) and not isinstance(b, ShardedObject)]
        bases = [b for b in bases if is_main_replica(b.replica_id)]  # others write nothing
        shards = [_shards(part) for part in optimizer.chained_optimizers]
        of_parts = [tensor for of_part in shards for of_param in of_part.values() for tensor in of_param.values()]
        everything = [*(base.data for base in bases), *of_parts]
        beside = _beside(everything)

        def copy_all() -> list[torch.Tensor]:
            with beside:
                return self._host.copy(everything)

        copying = self._copies = self._thread.submit(copy_all)
        plain = [copy.deepcopy(part.state_dict()) for part in optimizer.chained_optimizers]

        def finish() -> tuple[Any, Callable[[], None]]:
            copies = iter(copying.result())
            of_model = [next(copies) for _ in bases]

            def put() -> None:
                for base, data in zip(bases, of_model, strict=True):
                    base.data = data

            frozen = copy.copy(optimizer)
            frozen.chained_optimizers = [
                self._part(part, rest, {param: {name: next(copies) for name in live} for param, live in own.items()})
                for part, rest, own in zip(optimizer.chained_optimizers, plain, shards, strict=True)
            ]
            frozen._synchronize_steps = lambda: None
            return frozen, put

        return finish

    def _part(self, part: Any, plain: dict[str, Any], tensors: dict[Any, dict[str, torch.Tensor]]) -> Any:
        frozen = copy.copy(part)
        frozen._get_main_param_and_optimizer_states = tensors.__getitem__
        frozen.state_dict = lambda: plain
        frozen.buffers = [_whole(buffer) for buffer in part.buffers]
        ranks = tuple(dist.get_process_group_ranks(part.data_parallel_group))
        frozen.data_parallel_group = frozen.data_parallel_group_gloo = self._groups[ranks]
        return frozen


def _beside(tensors: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    """For work on GPU tensors in another thread: after what is queued now, on a stream of its own, done at the end."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    queued = None if device is None else torch.cuda.current_stream(device).record_event()

    @contextlib.contextmanager
    def beside() -> Iterator[None]:
        if queued is None:
            yield
            return
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            torch.cuda.current_stream().wait_event(queued)
            yield
            torch.cuda.current_stream().synchronize()

    return beside()


def _shards(part: Any) -> dict[Any, dict[str, torch.Tensor]]:
    """What this rank keeps of each parameter, by name: the shard that is trained, and Adam's moments of it."""
    params = (
        param
        for of_dtype in part.gbuf_ranges
        for buckets in of_dtype.values()
        for bucket in buckets
        for param in bucket["param_map"]
    )
    return {
        param: {
            name: tensor
            for name, tensor in part._get_main_param_and_optimizer_states(param).items()
            if isinstance(tensor, torch.Tensor)
        }
        for param in params
    }


def _whole(buffer: Any) -> Any:
    """A buffer, and its buckets, that end with their padding (see `checkpoint._whole_buckets`)."""
    buffer = copy.copy(buffer)
    buffer.buckets = [copy.copy(bucket) for bucket in buffer.buckets]
    buffer.numel_unpadded = buffer.numel
    for bucket in buffer.buckets:
        bucket.numel_unpadded = bucket.grad_data.numel()
    return buffer
