"""`SGLangEngineActor`: what a Ray actor wraps to host the part of one engine on one node. Also usable without Ray."""

import socket
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils.client import EngineClient, EngineEndpoint
from slime.backends.sglang_utils.process import StartError, free_port
from slime.backends.sglang_utils.server import EngineSpec, SGLangServer
from slime.config.args import Args


class SGLangEngineActor:
    """One server process beside the devices that it uses.

    index: the engine's number. host: address that others reach this node by; None: loopback for an engine on one node
    (its control API unpickles what it gets, so it listens no wider than it must), this machine's address otherwise.
    base_gpu_id, node_rank, nnodes: see `EngineSpec`. model: another folder than --hf-checkpoint.
    """

    def __init__(
        self,
        args: Args,
        index: int = 0,
        *,
        base_gpu_id: int = 0,
        node_rank: int = 0,
        nnodes: int = 1,
        host: str | None = None,
        model: str | Path | None = None,
    ):
        self.args, self.index = args, index
        if host is None:
            host = "127.0.0.1" if nnodes == 1 else socket.gethostbyname(socket.gethostname())
        self._where: dict[str, Any] = {
            "base_gpu_id": base_gpu_id,
            "node_rank": node_rank,
            "nnodes": nnodes,
            "host": host,
            "model": model,
        }
        self._server: SGLangServer | None = None
        self._dist_init_addr: str | None = None
        self.starts = 0

    def address(self) -> tuple[str, int]:
        """(host, free port): of node 0, makes the `dist_init_addr` that all nodes of the engine start with."""
        return self._where["host"], free_port(self._where["host"])

    def start(self, dist_init_addr: str | None = None, wait: bool = True) -> EngineEndpoint:
        """Starts the process; with `wait`, returns once it answers. Nodes after the first are started without waiting:
        they come up together. Raises StartError or ConfigError, with nothing left running."""
        if self._server is not None and self._server.is_alive():
            raise StartError(f"{self._server.name} already runs at {self._server.url}")
        if self._server is None or dist_init_addr != self._dist_init_addr:
            spec = EngineSpec.from_args(self.args, self.index, dist_init_addr=dist_init_addr, **self._where)
            port = self._server.port if self._server is not None else None
            self._server = SGLangServer(self.args, spec)
            self._server.port = port
            self._dist_init_addr = dist_init_addr
        self.starts += 1
        if wait:
            self._server.start()
        else:
            self._server.launch()
        return self.endpoint()

    def restart(self, dist_init_addr: str | None = None, wait: bool = True) -> EngineEndpoint:
        """Ends what is left of the process and starts a new one, on the same port where it is free. The new one serves
        the weights of the model folder until it gets the trainer's."""
        self.stop()
        return self.start(dist_init_addr, wait)

    def endpoint(self) -> EngineEndpoint:
        if self._server is None:
            raise StartError(f"engine {self.index} was never started")
        tp = self.args.rollout_num_gpus_per_engine
        return EngineEndpoint(self._server.url, tp, 1 + self.index * tp)

    def is_alive(self) -> bool:
        """Whether the process runs. Cheap; says nothing about whether it still works."""
        return self._server is not None and self._server.is_alive()

    def probe(self, timeout: float) -> None:
        """Raises EngineError unless the engine produced a token within `timeout` seconds; a busy one passes."""
        with EngineClient(self.endpoint().url) as client:
            client.health_generate(timeout)

    def failure(self) -> str:
        """Why it is not alive, with the log's end."""
        return self._server.failure() if self._server is not None else f"engine {self.index} was never started"

    def info(self) -> dict[str, Any]:
        """For reports: index, url, process ids, log file, number of starts, whether it is alive."""
        server = self._server
        return {
            "index": self.index,
            "url": server.url if server else None,
            "pids": server.pids() if server else [],
            "log": str(server.log_path) if server else None,
            "starts": self.starts,
            "alive": self.is_alive(),
        }

    def pids(self) -> list[int]:
        return self._server.pids() if self._server is not None else []

    def stop(self) -> None:
        """Ends the process and all its children. Safe to call at any time."""
        if self._server is not None:
            self._server.stop()
