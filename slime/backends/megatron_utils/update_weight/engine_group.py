"""One process group between a trainer rank (rank 0) and all ranks of all engines, and broadcasts that cannot hang."""

import contextlib
import datetime
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.update_weight.errors import WeightSyncError
from slime.backends.sglang_utils.client import EngineClient, EngineEndpoint

CONNECT_SECONDS = 120.0
_CLEANUP_SECONDS = 5.0
# Groups whose broadcast never ended. Freeing one would wait for the broadcast, so it is kept until the process ends.
_stuck: list[Any] = []


class EngineGroup:
    """The trainer's end of a weight-update group. Engine ranks follow the trainer's rank 0 in the engines' order."""

    def __init__(self, engines: Sequence[EngineEndpoint], name: str, *, backend: str, timeout: float):
        """Connects; blocks until all engines have joined. name: unique in the life of the engines. timeout: seconds for
        one broadcast. Raises EngineError when an engine refuses, WeightSyncError when they do not meet in time."""
        self.name, self._timeout = name, timeout
        self.clients = [EngineClient(engine.url, timeout=min(timeout, 60.0)) for engine in engines]
        self._work: Any = None
        size = 1 + sum(engine.tp_size for engine in engines)
        host = address_towards(engines[0].url)
        wait = datetime.timedelta(seconds=min(timeout, CONNECT_SECONDS))
        self._store = dist.TCPStore(host, 0, size, is_master=True, timeout=wait, wait_for_workers=False)
        joins = []
        offset = 1
        for client, engine in zip(self.clients, engines, strict=True):
            joins.append(background(self._join, client, host, self._store.port, offset, size, backend))
            offset += engine.tp_size
        ours = background(_backend, self._store, name, size, backend, timeout)
        try:
            _wait_all([ours, *joins], min(timeout, CONNECT_SECONDS), f"connecting to {len(engines)} engines")
            self._group = ours.result()
        except BaseException:
            self._end_on_engines()
            raise

    def _join(self, client: EngineClient, host: str, port: int, offset: int, size: int, backend: str) -> None:
        client.init_weights_update_group(host, port, offset, size, self.name, backend, timeout=CONNECT_SECONDS)

    def broadcast(self, data: torch.Tensor, requests: Sequence["Future[Any]"], meanwhile: Callable[[], None]) -> None:
        """Sends `data` to all engine ranks. requests: the HTTP calls that make the engines receive it. meanwhile: work
        that is done while it is sent.

        Raises what a request raises, at once, or WeightSyncError when the broadcast fails or takes too long. The group
        is of no use after that: `abort` it.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        if hasattr(options, "asyncOp"):
            options.asyncOp = True
        self._work = self._group.broadcast([data], options)
        started, pause = time.monotonic(), 1e-4
        meanwhile()
        while not self._work.is_completed():
            _raise_first(requests)
            if time.monotonic() - started > self._timeout:
                raise WeightSyncError(f"engines did not receive a bucket within {self._timeout:g} s")
            time.sleep(pause)
            pause = min(pause * 1.2, 1e-3)
        try:
            self._work.wait()
        except RuntimeError as error:
            # A closed connection is what an engine's end looks like from here; its HTTP call knows the reason.
            with contextlib.suppress(WeightSyncError):
                _wait_all(requests, _CLEANUP_SECONDS, "")
            raise WeightSyncError(f"the broadcast to the engines failed: {str(error).splitlines()[0]}") from None
        self._work = None

    def finish(self, requests: Sequence["Future[Any]"]) -> None:
        """Waits until the engines have loaded what they received. Raises what a request raises."""
        _wait_all(requests, self._timeout, "engines loading a bucket")

    def close(self) -> None:
        """Leaves the group after a good end; engines that are gone are no matter."""
        self._end_on_engines()
        self._free()

    def abort(self) -> None:
        """Leaves the group after a failure, in a few seconds, whatever state it is in.

        The engines close their ends first: that ends our broadcast with an error, and then ours ends theirs.
        """
        self._end_on_engines()
        if self._work is not None:
            if hasattr(self._group, "abort"):
                with contextlib.suppress(RuntimeError):
                    self._group.abort()
            deadline = time.monotonic() + _CLEANUP_SECONDS
            while not self._work.is_completed() and time.monotonic() < deadline:
                time.sleep(0.01)
            if not self._work.is_completed():
                _stuck.append((self._group, self._work, self._store))
        self._free()

    def _end_on_engines(self) -> None:
        ends = [background(client.destroy_weights_update_group, self.name) for client in self.clients]
        for end in ends:
            with contextlib.suppress(Exception):
                end.result(timeout=_CLEANUP_SECONDS)

    def _free(self) -> None:
        self._group = self._work = None
        self._store = None  # type: ignore[assignment]
        for client in self.clients:
            client.close()


def background(work: Callable[..., Any], *args: Any, **kwargs: Any) -> "Future[Any]":
    """Runs in a daemon thread: unlike a pool's, it does not keep a failing process from ending."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def on_all(clients: Sequence[EngineClient], call: Callable[[EngineClient], Any], timeout: float) -> list[Any]:
    """The same call on all engines at once; their results in order. Raises the first error."""
    calls = [background(call, client) for client in clients]
    _wait_all(calls, timeout, "a call to the engines")
    return [call.result() for call in calls]


def _raise_first(futures: Sequence["Future[Any]"]) -> None:
    for future in futures:
        if future.done():
            future.result()


def _wait_all(futures: Sequence["Future[Any]"], timeout: float, what: str) -> None:
    """Until all are done; raises as soon as one fails, and WeightSyncError after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not all(future.done() for future in futures):
        _raise_first(futures)
        if time.monotonic() > deadline:
            raise WeightSyncError(f"{what}: not done within {timeout:g} s")
        time.sleep(1e-3)
    _raise_first(futures)


def address_towards(url: str) -> str:
    """This machine's address as the host of `url` sees it. Sends nothing."""
    parts = urlsplit(url)
    family, kind, _, _, target = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def _backend(store: Any, name: str, size: int, backend: str, timeout: float) -> Any:
    """Rank 0 of the group, meeting the engines where `torch.distributed.init_process_group` in a world of theirs looks.

    SGLang builds its end with torch's `_new_process_group_helper`, whose store prefixes are these. Ours is not
    registered in torch's global table: the trainer's own world must neither own nor split this group.
    """
    seconds = datetime.timedelta(seconds=timeout)
    prefix = dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store))
    if backend == "gloo":
        group: Any = dist.ProcessGroupGloo(dist.PrefixStore("cpu/", prefix), 0, size, seconds)
    else:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = seconds
        group = dist.ProcessGroupNCCL(dist.PrefixStore("cuda/", prefix), 0, size, options)
    group._set_sequence_number_for_group()
    return group
