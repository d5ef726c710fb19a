"""`WeightUpdater`: pushes the trainer's weights to the engines and proves that they arrived.

One update: pause and flush all engines, open a session, each pipeline stage in turn broadcasts its buckets, close the
session, compare digests, continue. Stages take turns because an engine takes one broadcast at a time: two senders
could each be waited for by one engine and wait for the other.
"""

import contextlib
import datetime
import functools
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.megatron_utils import device
from slime.backends.megatron_utils.update_weight.distributed import DistributedSender
from slime.backends.megatron_utils.update_weight.engine_group import on_all
from slime.backends.megatron_utils.update_weight.errors import WeightSyncError, together
from slime.backends.megatron_utils.update_weight.sent import Digests, Sent, SentTotals, merge_digests
from slime.backends.megatron_utils.update_weight.tensor import TensorSender
from slime.backends.sglang_utils.checksum import EngineDigests, compare_digests
from slime.backends.sglang_utils.client import EngineClient, EngineEndpoint, EngineError
from slime.backends.sglang_utils.engine_layout import EngineLayout
from slime.config.hf_config import HFConfig
from slime.models.live import model_ranks, pipeline_stage
from slime.utils.sync_receipt import SyncReceipt

_SHOWN = 10


class WeightUpdater:
    """Every trainer rank makes one and calls every method; what fails on one rank raises WeightSyncError on all."""

    def __init__(self, args: Any, model_chunks: Sequence[torch.nn.Module], hf_config: HFConfig):
        self._args, self._hf = args, hf_config
        self._ranks = model_ranks()
        self._stage, self._stages = pipeline_stage()
        # Control messages travel over gloo and must outlast the slowest stage's turn.
        wait = datetime.timedelta(minutes=args.distributed_timeout_minutes, seconds=args.update_weight_timeout)
        self._control = dist.new_group(backend="gloo", timeout=wait)
        self._is_leader = self._ranks.is_source and self._stage == 0
        place = (args, model_chunks, hf_config, self._ranks, self._stage, self._stages)
        self._sender: DistributedSender | TensorSender = (
            TensorSender(*place, self._control) if args.update_weight_mode == "tensor" else DistributedSender(*place)
        )
        self._engines: list[EngineEndpoint] = []
        self._clients: list[EngineClient] = []
        self._syncs = 0
        self._last: tuple[dict[int, Digests], list[Digests]] | None = None  # digests expected, by size, and found

    # -- connecting -------------------------------------------------------------------------------------------------

    def connect(self, engines: Sequence[EngineEndpoint]) -> None:
        """Makes one group per pipeline stage with all engines; again after one was restarted. Leaves old groups."""
        together(self._control, self._leave, "leaving the engines' groups")
        self._engines = list(engines)
        self._last, self._syncs = None, 0  # a new engine's first weights are always checked
        if self._is_leader:
            self._clients = [EngineClient(engine.url, timeout=self._args.update_weight_timeout) for engine in engines]
        for stage in range(self._stages):  # in order, each finished before the next begins, on every engine
            join = functools.partial(self._sender.connect, self._engines, stage)
            together(self._control, join, f"connecting pipeline stage {stage} to the engines")

    def _leave(self) -> None:
        self._sender.leave()
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
            sent = Sent(self._predictions() if check else {})
            for stage in range(self._stages):
                mine = self._sender.everybody or self._stage == stage
                work = functools.partial(self._sender.send, stage, version, sent) if mine else None
                together(self._control, work, f"sending pipeline stage {stage}")
            together(self._control, self._close if self._is_leader else None, "closing the weight update")
            check_started = time.perf_counter()
            totals = self._gather(together(self._control, sent.finish, "computing digests"))
            compare = functools.partial(self._compare, totals) if self._is_leader and check else None
            checked = together(self._control, compare, "checking the engines' weights")
            check_seconds = time.perf_counter() - check_started if check else 0.0
            together(self._control, self._continue if self._is_leader else None, "continuing generation")
        except WeightSyncError:
            self._clean_up()
            raise
        self._syncs += 1
        if not self._is_leader:
            return None
        seconds = time.perf_counter() - started
        nbytes = sum(total.bytes for total in totals)
        count, followed, changed = checked or (0, 0, None)
        return SyncReceipt(
            version, sum(total.tensors for total in totals), nbytes, seconds, nbytes / 1e9 / seconds,
            digests_checked=count, digests_followed=followed, check_seconds=check_seconds, changed=changed,
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

    def _predictions(self) -> dict[int, EngineDigests]:
        """Of the digests that engines should have, one per size of engine."""
        sizes = {engine.tp_size for engine in self._engines}
        return {n: EngineDigests(self._layout(n)) for n in sizes}

    def _layout(self, tp_size: int) -> EngineLayout:
        return EngineLayout(self._hf, tp_size, _on_cpu(), self._args.sglang)

    def _gather(self, totals: SentTotals) -> list[SentTotals]:
        everyone: list[Any] = [None] * dist.get_world_size(self._control)
        dist.all_gather_object(everyone, totals, group=self._control)
        return everyone

    def _compare(self, totals: list[SentTotals]) -> tuple[int, int, int | None]:
        """(parameters compared over all engines, those of which only changes were, how many changed since the last
        check). Raises WeightSyncError."""
        expected = merge_digests(totals)
        found = on_all(self._clients, _checksums, self._args.update_weight_timeout)
        count, followed, wrong = 0, 0, []
        for i, (engine, digests) in enumerate(zip(self._engines, found, strict=True)):
            size = engine.tp_size
            before = (self._last[0][size], self._last[1][i]) if self._last is not None else None
            compared = compare_digests(expected[size], digests, self._layout(size).sure, before)
            count, followed = count + compared.checked, followed + compared.followed
            wrong += [f"{engine.url} {fault}" for fault in compared.wrong]
        if wrong:
            more = f"\n  ... and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise WeightSyncError(
                f"{len(wrong)} of {count} parameters differ between trainer and engines:\n  "
                + "\n  ".join(wrong[:_SHOWN]) + more
            )  # fmt: skip
        changed = None
        if self._last is not None:
            pairs = [(a, b) for x, y in zip(self._last[1], found, strict=True) for a, b in zip(x, y, strict=True)]
            changed = sum(old.get(name) != digest for old, new in pairs for name, digest in new.items())
        self._last = expected, found
        return count, followed, changed

    def _clean_up(self) -> None:
        """After a failure: no group, no open session, engines paused. Best effort, a few seconds; raises nothing."""
        self._sender.abort()
        if self._is_leader:
            with contextlib.suppress(Exception):
                on_all(self._clients, _end_quietly, 5.0)
        self._engines = []


def _on_cpu() -> bool:
    return device.current_device().type == "cpu"


def _begin(client: EngineClient) -> None:
    try:
        client.begin_weight_update()
    except EngineError as error:
        if "already open" not in error.message:
            raise
        client.end_weight_update()  # a session that an update left behind when it failed
        client.begin_weight_update()


def _checksums(client: EngineClient) -> Digests:
    try:
        return client.weights_checksum()
    except EngineError as error:
        if error.status == 404:
            raise WeightSyncError(
                f"{client.url}: this SGLang has no /weights_checker; use a newer one, or --check-weights-interval 0"
            ) from None
        raise


def _end_quietly(client: EngineClient) -> None:
    with contextlib.suppress(EngineError):
        client.end_weight_update()
