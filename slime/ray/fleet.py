"""`EngineFleet`: all engines and the router of a run, owned by the rollout manager."""

import threading
from typing import Any

import ray

from slime.backends.sglang_utils.client import EngineClient, EngineEndpoint
from slime.backends.sglang_utils.router import SGLangRouter
from slime.config import Args, Layout
from slime.ray.placement import Bundle


class _EngineHost:
    """The part of one engine on one node: a server process, beside the devices that it uses."""

    def __init__(self, args: Args, index: int, node_rank: int, nnodes: int, base_gpu_id: int):
        self._args, self._index = args, index
        self._where = {"node_rank": node_rank, "nnodes": nnodes, "base_gpu_id": base_gpu_id}
        self._server: Any = None

    def address(self) -> tuple[str, int]:
        from slime.utils.net import free_port

        return ray.util.get_node_ip_address(), free_port()

    def start(self, dist_init_addr: str | None, wait: bool = True) -> str:
        from slime.backends.sglang_utils.server import EngineSpec, SGLangServer

        if self._server is None:
            host = "127.0.0.1" if self._args.device == "cpu" else ray.util.get_node_ip_address()
            spec = EngineSpec.from_args(
                self._args, self._index, host=host, dist_init_addr=dist_init_addr, **self._where
            )
            self._server = SGLangServer(self._args, spec)
        if wait:
            self._server.start()
        else:
            self._server.launch()
        return self._server.url

    def is_alive(self) -> bool:
        return self._server is not None and self._server.is_alive()

    def failure(self) -> str:
        return self._server.failure() if self._server is not None else "it was never started"

    def pids(self) -> list[int]:
        return self._server.pids() if self._server is not None else []

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()


_EngineHostActor: Any = ray.remote(_EngineHost)


class Engine:
    """One engine: its hosts (one per node it spans), its endpoint."""

    def __init__(self, args: Args, layout: Layout, index: int, bundles: list[Bundle]):
        self.index = index
        cuda = args.device == "cuda"
        share = 0.2 if layout.colocate else 1.0  # beside a trainer rank, which takes 0.4
        step = min(len(bundles), args.num_gpus_per_node) if cuda else len(bundles)
        firsts = bundles[::step]
        self.hosts = [
            _EngineHostActor.options(
                num_cpus=share, num_gpus=share if cuda else 0, scheduling_strategy=first.strategy()
            ).remote(args, index, node_rank, len(firsts), first.gpu or 0)
            for node_rank, first in enumerate(firsts)
        ]
        self.endpoint: EngineEndpoint | None = None
        self._tp, self._rank_offset = layout.engine_tp, 1 + index * layout.engine_tp

    def launch(self) -> list[Any]:
        """Starts the processes; the references resolve when the engine answers."""
        init_addr = None
        if len(self.hosts) > 1:
            ip, port = ray.get(self.hosts[0].address.remote())
            init_addr = f"{ip}:{port}"
        return [h.start.remote(init_addr, wait=rank == 0) for rank, h in enumerate(self.hosts)]

    def settle(self, urls: list[str]) -> None:
        self.endpoint = EngineEndpoint(urls[0], self._tp, self._rank_offset)

    def is_alive(self) -> bool:
        return all(ray.get([h.is_alive.remote() for h in self.hosts]))

    def failure(self) -> str:
        return "; ".join(ray.get([h.failure.remote() for h in self.hosts]))

    def stop(self) -> list[Any]:
        return [h.stop.remote() for h in self.hosts]


class EngineFleet:
    """start -> (trainer syncs) -> serve -> ... -> stop. The router gets an engine only once it has the weights."""

    def __init__(self, args: Args, layout: Layout, bundles: list[Bundle]):
        self._args = args
        tp = layout.engine_tp
        self.engines = [Engine(args, layout, i, bundles[i * tp : (i + 1) * tp]) for i in range(layout.num_engines)]
        self._router: SGLangRouter | None = None
        self._monitor: Any = None
        self._released: set[str] = set()
        self._lock = threading.Lock()
        self.version = 0

    def start(self) -> Args:
        """Router and engines, side by side. Returns args with the router's address."""
        jobs = [engine.launch() for engine in self.engines]
        host = "127.0.0.1" if self._args.device == "cpu" else ray.util.get_node_ip_address()
        self._router = SGLangRouter(self._args, host)
        self._router.start()
        for engine, job in zip(self.engines, jobs, strict=True):
            engine.settle(ray.get(job))
        self._args = self._args.replace(sglang_router_ip=self._router.host, sglang_router_port=self._router.port)
        return self._args

    def endpoints(self) -> list[EngineEndpoint]:
        return [e.endpoint for e in self.engines if e.endpoint is not None]

    def serve(self, train_ranks: list[Any] | None) -> None:
        assert self._router is not None
        with self._router.client() as router:
            for endpoint in self.endpoints():
                router.add(endpoint.url)

    def release_memory(self) -> None:
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
