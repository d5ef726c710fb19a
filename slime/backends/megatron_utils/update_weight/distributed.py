"""Sending by broadcast: each pipeline stage's source shares a process group with all ranks of all engines."""

import functools
import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch

from slime.backends.megatron_utils import device
from slime.backends.megatron_utils.update_weight.bucket import Bucket, make_buckets
from slime.backends.megatron_utils.update_weight.engine_group import EngineGroup, background
from slime.backends.megatron_utils.update_weight.sent import Sent
from slime.backends.sglang_utils.client import EngineClient, EngineEndpoint
from slime.config.hf_config import HFConfig
from slime.models.live import Ranks, iter_hf_batches


class DistributedSender:
    """NCCL or gloo. A stage's turn concerns its own ranks only."""

    everybody = False

    def __init__(
        self, args: Any, model: Sequence[torch.nn.Module], hf: HFConfig, ranks: Ranks, stage: int, stages: int
    ):
        self._args, self._model, self._hf, self._ranks = args, model, hf, ranks
        self._stage, self._is_last = stage, stage == stages - 1
        self._group: EngineGroup | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._connections = 0

    def connect(self, engines: Sequence[EngineEndpoint], stage: int) -> None:
        """In `stage`'s turn its source joins with the engines; others do nothing."""
        if not self._ranks.is_source or self._stage != stage:
            return
        self._connections += 1
        name = f"slime-stage{stage}-{self._connections}-{time.time_ns():x}"
        self._group = EngineGroup(engines, name, backend=device.backend(), timeout=self._args.update_weight_timeout)

    def leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def abort(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None
            self._buffer = torch.empty(0, dtype=torch.uint8)  # a broadcast that never ended may still read the old one

    def send(self, stage: int, version: int, sent: Sent) -> None:
        """This stage's turn. All its ranks take part in gathering, to the end, even when sending has failed."""
        batch_bytes = self._args.update_weight_buffer_size
        batches = iter_hf_batches(self._model, self._hf, self._args, batch_bytes=batch_bytes)
        weights = itertools.chain.from_iterable(batches)
        try:
            self._send(weights, version, sent)
        finally:
            for _ in weights:
                pass

    def _send(self, weights: Any, version: int, sent: Sent) -> None:
        requests: list[Any] = []
        space = self._space if device.current_device().type == "cpu" else None
        for bucket in make_buckets(weights, self._args.update_weight_buffer_size, space):
            group = self._group
            assert group is not None, "only the source of a stage receives weights, and it has joined a group"
            group.finish(requests)  # engines load one bucket while we gather the next
            final = str(version) if bucket.last and self._is_last else None
            requests = [background(self._receive, client, bucket, group.name, final) for client in group.clients]
            # Digests take a core that is idle then: the broadcast takes one in the engine and half of one here.
            group.broadcast(bucket.data, requests, functools.partial(sent.add, bucket))
        if self._group is not None:
            self._group.finish(requests)

    def _space(self, nbytes: int) -> torch.Tensor:
        """The same memory for every bucket of every update: on CPU, touching new memory costs more than copying."""
        if len(self._buffer) < nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8)
        return self._buffer[:nbytes]

    def _receive(self, client: EngineClient, bucket: Bucket, group: str, version: str | None) -> None:
        client.update_weights_from_distributed(
            bucket.names, bucket.dtypes, bucket.shapes, group, weight_version=version, load_format="flattened_bucket",
            timeout=self._args.update_weight_timeout,
        )  # fmt: skip
