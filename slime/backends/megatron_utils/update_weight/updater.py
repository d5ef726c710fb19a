"""`WeightUpdater`: pushes the trainer's weights to the engines and proves that they arrived.

One update: pause and flush all engines, open a session, each pipeline stage in turn broadcasts its buckets, close the
session, compare digests, continue. Stages take turns because an engine takes one broadcast at a time: two senders
could each be waited for by one engine and wait for the other.
"""

import contextlib
import datetime
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from slime.backends.megatron_utils import device
from slime.backends.megatron_utils.update_weight.bucket import Bucket, make_buckets
from slime.backends.megatron_utils.update_weight.engine_group import EngineGroup, background, on_all
from slime.backends.megatron_utils.update_weight.errors import WeightSyncError, together
from slime.backends.sglang_utils.checksum import EngineDigests, compare_digests
from slime.backends.sglang_utils.client import EngineClient, EngineEndpoint, EngineError
from slime.config.hf_config import HFConfig
from slime.models import iter_hf_weights
from slime.models.live import model_ranks
from slime.utils.sync_receipt import SyncReceipt

Digests = list[dict[str, str]]  # by engine rank
_SHOWN = 10


class WeightUpdater:
    """Every trainer rank makes one and calls every method; what fails on one rank raises WeightSyncError on all."""

    def __init__(self, args: Any, model_chunks: Sequence[torch.nn.Module], hf_config: HFConfig):
        self._args, self._model, self._hf = args, model_chunks, hf_config
        self._ranks = model_ranks()
        self._stage = mpu.get_pipeline_model_parallel_rank()
        self._stages = mpu.get_pipeline_model_parallel_world_size()
        # Control messages travel over gloo and must outlast the slowest stage's turn.
        wait = datetime.timedelta(minutes=args.distributed_timeout_minutes, seconds=args.update_weight_timeout)
        self._control = dist.new_group(backend="gloo", timeout=wait)
        self._is_leader = self._ranks.is_source and self._stage == 0
        self._engines: list[EngineEndpoint] = []
        self._clients: list[EngineClient] = []
        self._group: EngineGroup | None = None
        self._connections = self._syncs = 0
        self._last_digests: list[Digests] | None = None

    # -- connecting -------------------------------------------------------------------------------------------------

    def connect(self, engines: Sequence[EngineEndpoint]) -> None:
        """Makes one group per pipeline stage with all engines; again after one was restarted. Leaves old groups."""
        together(self._control, self._leave, "leaving the engines' groups")
        self._engines = list(engines)
        self._connections += 1
        self._last_digests, self._syncs = None, 0  # a new engine's first weights are always checked
        if self._is_leader:
            self._clients = [EngineClient(engine.url, timeout=self._args.update_weight_timeout) for engine in engines]
        for stage in range(self._stages):  # in order, each finished before the next begins, on every engine
            mine = self._ranks.is_source and self._stage == stage
            together(self._control, self._join if mine else None, f"connecting pipeline stage {stage} to the engines")

    def _join(self) -> None:
        name = f"slime-stage{self._stage}-{self._connections}-{time.time_ns():x}"
        self._group = EngineGroup(
            self._engines, name, backend=device.backend(), timeout=self._args.update_weight_timeout
        )

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        for client in self._clients:
            client.close()
        self._clients = []

    # -- updating ---------------------------------------------------------------------------------------------------

    def update(self, version: int) -> SyncReceipt | None:
        """Makes every engine hold the trainer's present weights, as weight version str(version).

        Returns the receipt on the rank that leads, None elsewhere. Engines have then continued generation. After a
        WeightSyncError they stay paused, with weights that must not be used; `connect` again before another try.
        """
        started = time.perf_counter()
        if not self._engines:
            raise WeightSyncError("update before connect: there is no engine to send weights to")
        every = self._args.check_weights_interval
        check = bool(every) and self._syncs % every == 0
        try:
            together(self._control, self._open if self._is_leader else None, "opening the weight update")
            sent = _Sent()
            for stage in range(self._stages):
                work = (lambda: self._send(version, check, sent)) if self._stage == stage else None
                together(self._control, work, f"sending pipeline stage {stage}")
            together(self._control, self._close if self._is_leader else None, "closing the weight update")
            all_sent = self._gather(sent)
            check_started = time.perf_counter()
            compare = (lambda: self._compare(all_sent)) if self._is_leader and check else None
            checked = together(self._control, compare, "checking the engines' weights")
            checked_seconds = time.perf_counter() - check_started + sum(s.check_seconds for s in all_sent)
            together(self._control, self._continue if self._is_leader else None, "continuing generation")
        except WeightSyncError:
            self._clean_up()
            raise
        self._syncs += 1
        if not self._is_leader:
            return None
        seconds = time.perf_counter() - started
        total = sum(s.bytes for s in all_sent)
        count, changed = checked or (0, None)
        return SyncReceipt(
            version, sum(s.tensors for s in all_sent), total, seconds, total / 1e9 / seconds,
            digests_checked=count, check_seconds=checked_seconds if check else 0.0, changed=changed,
        )  # fmt: skip

    def _open(self) -> None:
        seconds = self._args.update_weight_timeout
        on_all(self._clients, lambda c: c.pause_generation("retract"), seconds)  # requests in flight go on afterwards
        on_all(self._clients, lambda c: c.flush_cache(seconds), seconds)
        on_all(self._clients, _begin, seconds)

    def _close(self) -> None:
        on_all(self._clients, lambda c: c.end_weight_update(), self._args.update_weight_timeout)

    def _continue(self) -> None:
        on_all(self._clients, lambda c: c.continue_generation(), self._args.update_weight_timeout)

    def _send(self, version: int, check: bool, sent: "_Sent") -> None:
        """This stage's turn. All its ranks take part in gathering, to the end, even when sending has failed."""
        weights = iter_hf_weights(self._model, self._hf, self._args, batch_bytes=self._args.update_weight_buffer_size)
        if not self._ranks.is_source:
            for _ in weights:
                raise AssertionError("only the source of a stage receives weights")
            return
        try:
            self._send_buckets(weights, version, check, sent)
        except BaseException:
            for _ in weights:
                pass
            raise

    def _send_buckets(self, weights: Any, version: int, check: bool, sent: "_Sent") -> None:
        group = self._group
        assert group is not None
        digests = self._new_digests() if check else {}
        requests: list[Any] = []
        for bucket in make_buckets(weights, self._args.update_weight_buffer_size):
            group.finish(requests)  # engines load one bucket while we gather the next
            final = bucket.last and self._stage == self._stages - 1
            requests = [
                background(_receive, client, bucket, group.name, str(version) if final else None, self._args)
                for client in group.clients
            ]
            for digest in digests.values():
                for name, tensor in zip(bucket.names, bucket.tensors, strict=True):
                    digest.add(name, tensor)  # hashed in a thread, beside the broadcast
            group.broadcast(bucket.data, requests)
            sent.tensors += len(bucket.names)
            sent.bytes += bucket.data.nbytes
        group.finish(requests)
        waited = time.perf_counter()
        sent.digests = {tp_size: digest.finish() for tp_size, digest in digests.items()}
        sent.check_seconds = time.perf_counter() - waited

    def _new_digests(self) -> dict[int, EngineDigests]:
        """One prediction per size of engine."""
        on_cpu = device.current_device().type == "cpu"
        sizes = {engine.tp_size for engine in self._engines}
        return {n: EngineDigests(self._hf, n, device="cpu" if on_cpu else "cuda", background=on_cpu) for n in sizes}

    def _gather(self, sent: "_Sent") -> list["_Sent"]:
        everyone: list[Any] = [None] * dist.get_world_size(self._control)
        dist.all_gather_object(everyone, sent, group=self._control)
        return everyone

    def _compare(self, all_sent: list["_Sent"]) -> tuple[int, int | None]:
        """(parameters compared over all engines, how many changed since the last check). Raises WeightSyncError."""
        expected: dict[int, Digests] = {}
        for sent in all_sent:
            for tp_size, ranks in sent.digests.items():
                merged = expected.setdefault(tp_size, [{} for _ in range(tp_size)])
                for into, part in zip(merged, ranks, strict=True):
                    into.update(part)
        found = on_all(self._clients, lambda c: c.weights_checksum(), self._args.update_weight_timeout)
        count, wrong = 0, []
        for engine, digests in zip(self._engines, found, strict=True):
            checked, faults = compare_digests(expected[engine.tp_size], digests)
            count += checked
            wrong += [f"{engine.url} {fault}" for fault in faults]
        if wrong:
            more = f"\n  ... and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise WeightSyncError(
                f"{len(wrong)} of {count} parameters differ between trainer and engines:\n  "
                + "\n  ".join(wrong[:_SHOWN]) + more
            )  # fmt: skip
        changed = None
        if self._last_digests is not None:
            pairs = [(a, b) for x, y in zip(self._last_digests, found, strict=True) for a, b in zip(x, y, strict=True)]
            changed = sum(before.get(name) != digest for before, after in pairs for name, digest in after.items())
        self._last_digests = found
        return count, changed

    def _clean_up(self) -> None:
        """After a failure: no group, no open session, engines paused. Best effort, a few seconds; raises nothing."""
        if self._group is not None:
            self._group.abort()
            self._group = None
        if self._is_leader:
            with contextlib.suppress(Exception):
                on_all(self._clients, _end_quietly, 5.0)
        self._engines = []


class _Sent:
    """What one rank sent in one update: nothing, unless it is the source of a stage."""

    def __init__(self) -> None:
        self.tensors = self.bytes = 0
        self.check_seconds = 0.0
        self.digests: dict[int, Digests] = {}


def _receive(client: EngineClient, bucket: Bucket, group: str, version: str | None, args: Any) -> None:
    client.update_weights_from_distributed(
        bucket.names, bucket.dtypes, bucket.shapes, group, weight_version=version, load_format="flattened_bucket",
        timeout=args.update_weight_timeout,
    )  # fmt: skip


def _begin(client: EngineClient) -> None:
    try:
        client.begin_weight_update()
    except EngineError as error:
        if "already open" not in error.message:
            raise
        client.end_weight_update()  # a session that an update left behind when it failed
        client.begin_weight_update()


def _end_quietly(client: EngineClient) -> None:
    with contextlib.suppress(EngineError):
        client.end_weight_update()
