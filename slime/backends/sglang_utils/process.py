"""`ManagedProcess`: a command with a log file that leaves nothing behind, however its owner ends."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

REAPER = Path(__file__).with_name("reaper.py")
# "OSError: ..." or "torch.cuda.OutOfMemoryError: ...", possibly behind a log prefix like "[2026-01-01 10:00:00 TP0] ".
_EXCEPTION_LINE = re.compile(
    r"^(?:\[[^]]*\]\s*)?(?:[A-Za-z_][\w.]*)?(?:Error|Exception|Interrupt)\b.*$|^[\w. -]+: error: .*$"
)
_PORT_IN_USE = re.compile(
    r"address already in use|port \d+ is (?:already )?(?:in use|not available|unavailable)", re.IGNORECASE
)


class StartError(RuntimeError):
    """A server that did not come up: what, why, and where its log is."""


class ManagedProcess:
    """Runs `command` under `reaper.py` in its own session, with stdout and stderr appended to `log_path`.

    name: what errors call it ("engine 0"). grace: seconds between SIGTERM and SIGKILL. The process and all its
    descendants end with `stop`, and when the process that called `start` ends, even by SIGKILL.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_path: str | Path,
        env: Mapping[str, str] | None = None,
        grace: float = 2.0,
    ):
        self.name, self.command, self.grace = name, list(command), grace
        self.log_path = Path(log_path)
        self.env = dict(os.environ if env is None else env)
        self._process: subprocess.Popen | None = None
        self._log_start = 0

    def start(self) -> None:
        if self.is_alive():
            raise RuntimeError(f"{self.name} already runs with pid {self.pid}")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log_path, "ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(REAPER), str(os.getpid()), str(self.grace), *self.command],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=self.env, start_new_session=True,
            )  # fmt: skip

    @property
    def pid(self) -> int | None:
        """Process id of the session leader (the reaper), None before `start`."""
        return self._process.pid if self._process else None

    def exit_code(self) -> int | None:
        """None while it runs or before it was started."""
        return self._process.poll() if self._process else None

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def pids(self) -> list[int]:
        """All process ids of the tree, the reaper first."""
        if not self.is_alive():
            return []
        try:
            root = psutil.Process(self.pid)
            return [root.pid, *(child.pid for child in root.children(recursive=True))]
        except psutil.NoSuchProcess:
            return []

    def stop(self) -> None:
        """Ends the whole tree and returns when it is gone. Safe to call twice or before `start`."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(self.grace + 10)
        except subprocess.TimeoutExpired:  # the reaper itself hangs
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def log_tail(self, lines: int = 15) -> list[str]:
        """Last lines that this start wrote, without empty ones."""
        try:
            with open(self.log_path, "rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, log.tell() - 64 * 1024))
                text = log.read().decode(errors="replace")
        except OSError:
            return []
        return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]

    def port_was_taken(self) -> bool:
        return any(_PORT_IN_USE.search(line) for line in self.log_tail(200))

    def wait_until(self, ready: Callable[[], bool], timeout: float, poll: float = 0.1) -> None:
        """Waits for `ready()`. Raises StartError once the process ended, or after `timeout` seconds (and stops it)."""
        deadline = time.monotonic() + timeout
        while not ready():
            if not self.is_alive():
                raise StartError(self.describe_failure(f"ended with status {self.exit_code()} before it was ready"))
            if time.monotonic() > deadline:
                self.stop()
                raise StartError(self.describe_failure(f"was not ready after {timeout:.0f} s and was stopped"))
            time.sleep(poll)

    def describe_failure(self, what: str) -> str:
        """One line with the likely cause, then the log's last lines, indented."""
        lines = self.log_tail(400)
        causes = [line for line in lines if _EXCEPTION_LINE.match(line)]
        cause = f": {causes[-1].strip()}" if causes else ""
        tail = "\n".join(f"    {line}" for line in lines[-15:])
        return f"{self.name} {what}{cause}\n  its log: {self.log_path}\n{tail}"


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could bind it now. SO_REUSEADDR as servers set it, so that closed connections do not count."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def free_port(host: str = "127.0.0.1", taken: Sequence[int] = ()) -> int:
    """A free TCP port below the kernel's ephemeral range, where no outgoing connection can take it meanwhile."""
    rng = random.SystemRandom()
    for _ in range(200):
        port = rng.randrange(15000, 30000)
        if port not in taken and port_is_free(port, host):
            return port
    raise StartError(f"no free port between 15000 and 30000 on {host}")
