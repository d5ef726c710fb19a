"""Graders run in processes with a hard deadline, so that none can hang a run or be taken for a zero."""

import asyncio
import functools
import multiprocessing
import os
import queue
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

START_TIMEOUT = 120.0  # seconds for a process to start and to import its grader, on a busy machine
MAX_WORKERS = 16


class GraderError(RuntimeError):
    """The grader itself failed (not: the answer was wrong)."""


class GraderTimeout(GraderError):
    """The grader did not finish in time and its process was killed."""


class GraderPool:
    """Up to `size` grader processes, started when needed and reused. Safe to call from any thread or loop."""

    def __init__(self, size: int) -> None:
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="slime-grader")
        # Last in, first out: only as many processes start as are needed at one time.
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for _ in range(size):
            self._idle.put(_Worker())

    async def call(self, path: str, *args: Any, timeout: float) -> Any:
        """Result of the function `path` for picklable `args`. timeout: seconds of grading, waiting not included.

        Raises GraderTimeout, or GraderError with the grader's traceback.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: self.call_sync(path, *args, timeout=timeout))

    def call_sync(self, path: str, *args: Any, timeout: float) -> Any:
        """As `call`, blocking."""
        worker = self._idle.get()
        try:
            return worker.call(path, args, timeout)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Ends the processes that are idle; busy ones end with their deadline."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        while not self._idle.empty():
            self._idle.get_nowait().stop()


class _Worker:
    """One process and the pipe to it. Used by one thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, path: str, args: tuple[Any, ...], timeout: float) -> Any:
        if self._process is None or self._process.poll() is not None:
            self._start()
        try:
            self._connection.send((path, args, timeout))
            self._receive(path, START_TIMEOUT, "did not start")
            kind, value = self._receive(path, timeout, "did not finish")
        except (EOFError, ConnectionError) as error:
            code = self.stop()
            raise GraderError(f"grader {path}: its process died (exit code {code})") from error
        if kind == "error":
            raise GraderError(f"grader {path} failed:\n{value}")
        return value

    def _receive(self, path: str, timeout: float, what: str) -> tuple[str, Any]:
        if not self._connection.poll(timeout):
            self.stop()
            raise GraderTimeout(f"grader {path} {what} within {timeout:g} s; its process was killed (--rm-timeout)")
        return self._connection.recv()

    def _start(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), IN_WORKER: "1"}
        command = [sys.executable, "-m", "slime.rollout.rm_hub.grader_worker", str(theirs.fileno())]
        with theirs:  # closed here once the child has it, so that its death reads as end of file
            self._process = subprocess.Popen(
                command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )

    def stop(self) -> int | None:
        """Kills the process, if there is one; returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        self._connection.close()
        if process.poll() is None:
            process.kill()
        return process.wait()


IN_WORKER = "SLIME_GRADER_WORKER"


@functools.cache
def grader_pool() -> GraderPool:
    """The process's pool. A process that ends takes its workers along: their pipe closes."""
    return GraderPool(min(os.cpu_count() or 1, MAX_WORKERS))
