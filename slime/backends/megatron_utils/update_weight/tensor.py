"""Sending by shared memory: trainer and engine share devices, and an engine rank maps what its trainer rank holds.

On GPUs the handles are CUDA IPC: no copy leaves the device. On CPU (tests) they are files in shared memory.
"""

import base64
import functools
import io
from collections.abc import Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions, set_sharing_strategy

from slime.backends.megatron_utils import device
from slime.backends.megatron_utils.update_weight.bucket import Bucket, empty_bucket, make_buckets
from slime.backends.megatron_utils.update_weight.errors import WeightSyncError, together
from slime.backends.megatron_utils.update_weight.sent import Sent
from slime.backends.sglang_utils.client import EngineClient, EngineEndpoint
from slime.config.hf_config import HFConfig
from slime.models.live import Ranks, iter_hf_batches
from slime.models.rows import Pieces, Stack

_DEVICE_ARGUMENT = 6  # of torch's rebuild_cuda_tensor; SGLang takes the device's UUID in its place


class TensorSender:
    """Every trainer rank gets every bucket, on its own device, and hands it to the engine rank that lives there.

    Trainer rank r shares its device with the engine rank of number r, counted over all engines.
    """

    everybody = True

    def __init__(
        self, args: Any, model: Sequence[torch.nn.Module], hf: HFConfig, ranks: Ranks, stage: int, stages: int,
        control: Any,
    ):  # fmt: skip
        self._args, self._model, self._hf, self._ranks = args, model, hf, ranks
        self._stage, self._stages, self._control = stage, stages, control
        sources: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(sources, stage if ranks.is_source else None, group=control)
        self._source_of = {source: rank for rank, source in enumerate(sources) if source is not None}
        self._client: EngineClient | None = None  # on the first rank of an engine
        self._group: Any = None  # of the ranks of this rank's engine
        self._lead = 0
        if device.current_device().type == "cpu":
            set_sharing_strategy("file_system")  # the default's file descriptors need a key that engines lack

    def connect(self, engines: Sequence[EngineEndpoint], stage: int) -> None:
        """All at once, in the first stage's turn."""
        if stage != 0:
            return
        first = 0
        for engine in engines:
            ranks = list(range(first, first + engine.tp_size))
            if ranks[-1] >= dist.get_world_size():
                raise WeightSyncError(
                    f"{engine.url}: no trainer rank is on the devices of its ranks {ranks}; "
                    "use --update-weight-mode distributed"
                )
            group = dist.new_group(ranks, backend="gloo")
            if dist.get_rank() in ranks:
                self._group, self._lead = group, first
                if dist.get_rank() == first:
                    self._client = EngineClient(engine.url, timeout=self._args.update_weight_timeout)
            first += engine.tp_size

    def leave(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._client = self._group = None

    abort = leave

    def send(self, stage: int, version: int, sent: Sent) -> None:
        """One stage's weights, from its source to all ranks and their engines. A refusal stops all ranks together."""
        source = self._source_of[stage]
        batches: Iterator[Any] = iter(())
        if self._stage == stage:
            batch_bytes = max(1, self._args.update_weight_buffer_size // self._ranks.tp)
            batches = iter_hf_batches(self._model, self._hf, self._args, batch_bytes=batch_bytes)
        more = True
        while more:
            gather = functools.partial(_gather, batches, sent) if self._stage == stage else None
            found = together(self._control, gather, f"gathering weights of pipeline stage {stage}")
            more, bucket = self._share(found, source)
            if bucket is not None:
                # The version goes with every bucket: nobody generates before the last one is there.
                hand_over = functools.partial(self._hand_over, bucket, str(version))
                together(self._control, hand_over, "handing a bucket to the engines")

    def _share(self, found: tuple[bool, Bucket | None] | None, source: int) -> tuple[bool, Bucket | None]:
        """What `_gather` found on the source, on every rank."""
        more, bucket = found or (False, None)
        meta: list[Any] = [(more, (bucket.names, bucket.dtypes, bucket.shapes) if bucket else None)]
        dist.broadcast_object_list(meta, src=source, group=self._control)
        more, parts = meta[0]
        if parts is None:
            return more, None
        if bucket is None:
            names, dtypes, shapes = parts
            bucket = empty_bucket(names, dtypes, shapes, device.current_device())
        dist.broadcast(bucket.data, src=source)
        return more, bucket

    def _hand_over(self, bucket: Bucket, version: str) -> None:
        if self._group is None:
            return  # no engine lives on this rank's device
        device.synchronize()
        lead = dist.get_rank() == self._lead
        payloads: list[Any] | None = [None] * dist.get_world_size(self._group) if lead else None
        dist.gather_object(serialize(bucket), payloads, dst=self._lead, group=self._group)
        if self._client is not None:
            assert payloads is not None
            self._client.update_weights_from_tensor(
                payloads, weight_version=version, timeout=self._args.update_weight_timeout
            )


def _gather(batches: Iterator[list[tuple[str, Pieces | Stack]]], sent: Sent) -> tuple[bool, Bucket | None]:
    """(whether a batch came, the batch in one bucket). A batch is empty where another rank is the source, and where it
    holds only experts of a tensor whose others come later."""
    batch = next(batches, None)
    if not batch:
        return batch is not None, None
    bucket = next(make_buckets(batch, 1 << 62))
    sent.add(bucket)
    return True, bucket


class _Handle:
    """Pickles a tensor as a handle to its memory, with the device named by UUID, as SGLang expects it."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor

    def __reduce__(self) -> Any:
        rebuild, arguments = reductions.reduce_tensor(self._tensor)
        if self._tensor.is_cuda:
            uuid = str(torch.cuda.get_device_properties(self._tensor.device).uuid)
            arguments = (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])
        return rebuild, arguments


def serialize(bucket: Bucket) -> str:
    """base64 of pickled [(name, handle)]; the engine reads the memory while `bucket` lives."""
    buffer = io.BytesIO()
    pairs = [(name, _Handle(tensor)) for name, tensor in zip(bucket.names, bucket.tensors, strict=True)]
    ForkingPickler(buffer).dump(pairs)
    return base64.b64encode(buffer.getvalue()).decode()
