"""sglang-router: one process in front of all engines, and the client of its worker list."""

import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx

from slime.backends.sglang_utils.process import ManagedProcess, StartError, free_port, port_is_free
from slime.config.args import Args
from slime.config.engine_options import RESERVED_ROUTER, command_line, overlay, router_options

PORT_TRIES = 4
# `python -m sglang_router.launch_router`, but without looking for SGLang first: the router imports all of it (10 CPU
# seconds) for a tracing helper of its debugging balancer, does without when there is none, and recent ones have none.
_LAUNCH = "import sys; sys.modules['sglang'] = None; from sglang_router.launch_router import main; main()"


class RouterError(RuntimeError):
    """A call to the router that failed; says which one and why."""


class RouterClient:
    """Adds, removes and lists the router's workers: by `/workers` (0.3), or `/add_worker` with older routers."""

    def __init__(self, url: str, timeout: float = 30.0):
        self.url = url.rstrip("/")
        self._http = httpx.Client(base_url=self.url, timeout=timeout, trust_env=False)

    def __enter__(self) -> "RouterClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def is_up(self) -> bool:
        """Whether it takes requests. Raises nothing."""
        try:
            # /health of some versions is 503 while there is no worker; any answer of /liveness means that it runs.
            return any(self._http.get(path, timeout=5.0).status_code == 200 for path in ("/liveness", "/health"))
        except httpx.HTTPError:
            return False

    def workers(self) -> dict[str, bool]:
        """URL to whether the router holds it for healthy."""
        reply = self._call("GET", "/workers", missing_ok=True)
        if reply.status_code == 404:
            return dict.fromkeys(self._call("GET", "/list_workers").json()["urls"], True)
        return {w["url"].rstrip("/"): bool(w.get("is_healthy", True)) for w in reply.json()["workers"]}

    def add(self, url: str, timeout: float = 60.0) -> None:
        """Registers an engine and waits until the router really sends to it: the router accepts first and probes later,
        and a URL that it cannot reach just never appears."""
        if self._call("POST", "/workers", missing_ok=True, json={"url": url}).status_code == 404:
            self._call("POST", "/add_worker", params={"url": url})
        self._wait(
            lambda: self.workers().get(url.rstrip("/"), False), timeout, f"{url} did not become a healthy worker"
        )

    def remove(self, url: str, timeout: float = 60.0) -> None:
        """Takes an engine out of rotation; its running requests may finish. Not registered: nothing to do."""
        listed = self._call("GET", "/workers", missing_ok=True)
        if listed.status_code == 404:
            self._call("POST", "/remove_worker", params={"url": url})
        else:
            ids = [w["id"] for w in listed.json()["workers"] if w["url"].rstrip("/") == url.rstrip("/")]
            for worker in ids:
                self._call("DELETE", f"/workers/{quote(worker, safe='')}", missing_ok=True)
        self._wait(lambda: url.rstrip("/") not in self.workers(), timeout, f"{url} is still a worker")

    def _wait(self, done: Any, timeout: float, problem: str) -> None:
        deadline = time.monotonic() + timeout
        while not done():
            if time.monotonic() > deadline:
                raise RouterError(f"router {self.url}: {problem} within {timeout:g} s")
            time.sleep(0.1)

    def _call(self, method: str, path: str, missing_ok: bool = False, **request: Any) -> httpx.Response:
        try:
            reply = self._http.request(method, path, **request)
        except httpx.HTTPError as error:
            raise RouterError(f"router {self.url}{path}: {type(error).__name__}: {error}") from None
        if reply.status_code >= 400 and not (missing_ok and reply.status_code == 404):
            raise RouterError(f"router {self.url}{path}: HTTP {reply.status_code}: {reply.text[:300]}")
        return reply


def router_command(args: Args, host: str, port: int, prometheus_port: int) -> list[str]:
    """The command line of the router, `--router-*` options over our defaults."""
    known = router_options()
    options: dict[str, Any] = {
        "host": host,
        "port": port,
        "prometheus_port": prometheus_port,
        "prometheus_host": "127.0.0.1",
        "log_level": "warn",
        "request_timeout_secs": max(1, int(args.rollout_request_timeout)),
        # Our monitor takes a dead engine out within seconds and decides about restarts. The router must not give up on
        # one that is only slow (a loaded machine, a weight update): with a single engine every request would fail.
        "health_check_interval_secs": 5,
        "health_check_timeout_secs": 30,
        "health_success_threshold": 1,
        "disable_circuit_breaker": True,
    }
    merged = overlay(options, args.router, known, RESERVED_ROUTER, "--router-")
    return [sys.executable, "-c", _LAUNCH, *command_line(merged, known)]


class SGLangRouter:
    """Starts and stops the router process, or stands for one that runs elsewhere (`--sglang-router-ip`)."""

    def __init__(self, args: Args, host: str = "127.0.0.1", log_path: str | Path | None = None):
        self.args = args
        self.external = args.sglang_router_ip is not None
        self.host = args.sglang_router_ip or host
        self.port = args.sglang_router_port
        self.log_path = Path(log_path or Path(args.run_dir) / "logs" / "router.log").absolute()
        self._process: ManagedProcess | None = None
        if self.external and self.port is None:
            raise StartError("--sglang-router-ip needs --sglang-router-port")

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def start(self, timeout: float = 60.0) -> None:
        """Starts it and waits until it takes requests. Raises StartError with the log's end; nothing runs then."""
        if self.external:
            self._check_external(timeout)
            return
        for attempt in range(PORT_TRIES):
            try:
                self._launch(self._choose_port(), timeout)
                return
            except StartError:
                taken = self._process is not None and self._process.port_was_taken()
                if not taken or self.args.sglang_router_port or attempt == PORT_TRIES - 1:
                    raise
                self.port = None

    def restart(self, timeout: float = 60.0) -> None:
        """After it died: again at the address that requests know. It has no workers then. Raises StartError."""
        assert self.port is not None, "not started"
        self.stop()
        self._launch(self.port, timeout)

    def _launch(self, port: int, timeout: float) -> None:
        command = router_command(self.args, self.host, port, free_port("127.0.0.1", taken=[port]))
        env = {**os.environ, "RUST_BACKTRACE": "0"}
        self._process = ManagedProcess("router", command, self.log_path, env, grace=1.0)
        self._process.start()
        self.port = port
        with self.client() as client:
            self._process.wait_until(client.is_up, timeout)

    def _choose_port(self) -> int:
        wanted = self.args.sglang_router_port
        if wanted is not None and not port_is_free(wanted, self.host):
            raise StartError(f"router: --sglang-router-port {wanted} on {self.host} is in use; choose another, or none")
        return wanted or free_port(self.host)

    def _check_external(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with self.client() as client:
            while not client.is_up():
                if time.monotonic() > deadline:
                    raise StartError(f"router {self.url} (--sglang-router-ip) does not answer within {timeout:g} s")
                time.sleep(0.2)

    def client(self) -> RouterClient:
        return RouterClient(self.url)

    def add(self, url: str) -> None:
        """As `RouterClient.add`."""
        with self.client() as client:
            client.add(url)

    def remove(self, url: str) -> None:
        """As `RouterClient.remove`."""
        with self.client() as client:
            client.remove(url)

    def is_alive(self) -> bool:
        return self.external or (self._process is not None and self._process.is_alive())

    def failure(self) -> str:
        assert self._process is not None
        return self._process.describe_failure(f"ended with status {self._process.exit_code()}")

    def pids(self) -> list[int]:
        return self._process.pids() if self._process else []

    def stop(self) -> None:
        """Ends the process; a router that was not started here stays."""
        if self._process is not None:
            self._process.stop()
