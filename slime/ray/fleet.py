"""`EngineFleet`: all engines and the router of a run, owned by the rollout manager."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import ray

from slime.backends.sglang_utils.client import EngineClient, EngineEndpoint
from slime.backends.sglang_utils.engine_actor import SGLangEngineActor
from slime.backends.sglang_utils.monitor import EngineMonitor
from slime.backends.sglang_utils.router import SGLangRouter
from slime.config import Args, Layout
from slime.ray.placement import Bundle

_EngineHost: Any = ray.remote(SGLangEngineActor)


class Engine:
    """One engine through the Ray actors of the nodes that it spans; what `EngineMonitor` watches."""

    def __init__(self, args: Args, layout: Layout, index: int, bundles: list[Bundle]):
        self.index = index
        cuda = args.device == "cuda"
        share = 0.2 if layout.colocate else 1.0  # beside a trainer rank, which takes 0.4
        first_of_node = bundles[:: args.num_gpus_per_node] if cuda else bundles[:1]
        self._hosts = [
            _EngineHost.options(
                num_cpus=share, num_gpus=share if cuda else 0, scheduling_strategy=first.strategy()
            ).remote(
                args,
                index,
                base_gpu_id=first.gpu or 0,
                node_rank=node_rank,
                nnodes=len(first_of_node),
                host=first.node_ip if cuda else None,
            )
            for node_rank, first in enumerate(first_of_node)
        ]
        self._endpoint: EngineEndpoint | None = None

    def launch(self, method: str = "start") -> list[Any]:
        """Starts the processes; the first reference resolves to the endpoint when the engine answers."""
        init_addr = None
        if len(self._hosts) > 1:
            ip, port = ray.get(self._hosts[0].address.remote())
            init_addr = f"{ip}:{port}"
        return [getattr(h, method).remote(init_addr, wait=rank == 0) for rank, h in enumerate(self._hosts)]

    def settle(self, jobs: list[Any]) -> EngineEndpoint:
        self._endpoint = ray.get(jobs)[0]
        return self.endpoint()

    def endpoint(self) -> EngineEndpoint:
        assert self._endpoint is not None, "not started"
        return self._endpoint

    def restart(self) -> EngineEndpoint:
        return self.settle(self.launch("restart"))

    def is_alive(self) -> bool:
        return all(ray.get([h.is_alive.remote() for h in self._hosts]))

    def failure(self) -> str:
        return "\n".join(ray.get([h.failure.remote() for h in self._hosts]))

    def probe(self, timeout: float) -> None:
        with EngineClient(self.endpoint().url) as client:
            client.health_generate(timeout)

    def pids(self) -> list[int]:
        return [pid for pids in ray.get([h.pids.remote() for h in self._hosts]) for pid in pids]

    def stop(self) -> list[Any]:
        return [h.stop.remote() for h in self._hosts]


class EngineFleet:
    """start -> (trainer syncs) -> serve -> ... -> stop. The router gets an engine only once it has the weights."""

    def __init__(self, args: Args, layout: Layout, bundles: list[Bundle]):
        self._args = args
        tp = layout.engine_tp
        self.engines = [Engine(args, layout, i, bundles[i * tp : (i + 1) * tp]) for i in range(layout.num_engines)]
        self._router: SGLangRouter | None = None
        self._monitor: EngineMonitor | None = None
        self._train_ranks: list[Any] = []
        self._ranks_lent = threading.Lock()  # held while the driver may call the trainer's ranks
        self._ranks_lent.acquire()
        self._released: set[str] = set()
        self.version = 0

    def start(self) -> Args:
        """Router and engines, side by side. Returns args with the router's address."""
        jobs = [engine.launch() for engine in self.engines]
        host = "127.0.0.1" if self._args.device == "cpu" else ray.util.get_node_ip_address()
        self._router = SGLangRouter(self._args, host)
        self._router.start()
        for engine, job in zip(self.engines, jobs, strict=True):
            engine.settle(job)
        self._args = self._args.replace(sglang_router_ip=self._router.host, sglang_router_port=self._router.port)
        return self._args

    def endpoints(self) -> list[EngineEndpoint]:
        return [e.endpoint() for e in self.engines]

    @property
    def restarts(self) -> int:
        return self._monitor.restarts if self._monitor is not None else 0

    def serve(self, train_ranks: list[Any]) -> None:
        """Opens the engines to requests and starts to watch them. train_ranks: who can give weights to a new one."""
        assert self._router is not None
        self._train_ranks = train_ranks
        for endpoint in self.endpoints():
            self._router.add(endpoint.url)
        self._monitor = EngineMonitor(self.engines, self._router, self._args, self._give_weights)
        self._monitor.start()

    @contextlib.contextmanager
    def lend_ranks(self) -> Iterator[None]:
        """While the driver waits for us it calls no rank, so the monitor may, for a restarted engine's weights.

        Both at once could reach two ranks in different orders, and each rank would wait in another collective call.
        """
        self._ranks_lent.release()
        try:
            yield
        finally:
            self._ranks_lent.acquire()

    def _give_weights(self, index: int, endpoint: EngineEndpoint) -> bool:
        """A restarted engine holds the model folder's weights: give it the run's before it serves. False: the ranks are
        busy; the weight update after their step, or the next rollout, will do."""
        if not self._train_ranks:
            return True
        if not self._ranks_lent.acquire(blocking=False):
            return False
        try:
            alone = EngineEndpoint(endpoint.url, endpoint.tp_size, 1)
            ray.get([r.call.remote("connect_engines", [alone]) for r in self._train_ranks])
            ray.get([r.call.remote("update_weights", self.version) for r in self._train_ranks])
        finally:
            self._ranks_lent.release()
        return True

    def pause_watch(self) -> None:
        """No restarts from here on, as during a weight update; waits for one under way."""
        if self._monitor is not None:
            self._monitor.raise_if_lost()
            self._monitor.pause()
            self._monitor.raise_if_lost()

    def resume_watch(self, updated: bool = False) -> None:
        if self._monitor is not None:
            self._monitor.resume(updated)

    def repair(self, notice: float = 20.0) -> bool:
        """After a weight update that failed: waits until engines that died are back, for the next try.

        False when none died within `notice` seconds (a server outlives its scheduler by a few): then the failure has
        another cause, and trying again would hide it.
        """
        deadline = time.monotonic() + notice
        while all(engine.is_alive() for engine in self.engines):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.5)
        if self._monitor is None:
            return False
        before = self.restarts
        self.resume_watch()
        while self.restarts == before or not all(engine.is_alive() for engine in self.engines):
            self.raise_if_lost()
            time.sleep(0.5)
        return True

    def raise_if_lost(self) -> None:
        if self._monitor is not None:
            self._monitor.raise_if_lost()

    def release_memory(self) -> None:
        self.pause_watch()
        for endpoint in self.endpoints():
            with EngineClient(endpoint.url) as client:
                client.release_memory_occupation()
        self._released = {"weights", "kv_cache"}

    def resume_memory(self, tags: list[str] | None = None) -> None:
        """Takes back what was released; a second resume of the same memory would kill the engine."""
        wanted = self._released & set(tags or self._released)
        if not wanted:
            return
        for endpoint in self.endpoints():
            with EngineClient(endpoint.url) as client:
                client.resume_memory_occupation(sorted(wanted))
        self._released -= wanted

    def stop(self) -> None:
        if self._monitor is not None:
            self._monitor.stop()
        jobs = [job for engine in self.engines for job in engine.stop()]
        if self._router is not None:
            self._router.stop()
        ray.wait(jobs, num_returns=len(jobs), timeout=30)
