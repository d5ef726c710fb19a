"""Runs a function on several trainer ranks: real processes that talk over gloo."""

import multiprocessing
import os
import pickle
import queue
import time
import traceback
from collections.abc import Callable
from typing import Any

from slime.utils.net import free_port


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 240.0) -> list[Any]:
    """Calls `fn(rank, world_size, port, *args)` in `world_size` processes and returns their results by rank.

    `fn` and results must be picklable. Raises AssertionError with the traceback of the first rank that failed, or
    when not all are done after `timeout` seconds; no process outlives the call.
    """
    # A fork server imports Megatron once (seconds of CPU time), and what torch's optimizers import when the first one
    # is made (a second and more), and forks ranks from a process without threads.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["slime.backends.megatron_utils.actor", "torch._dynamo", "numpy.random"])
    results: Any = context.Queue()
    port = free_port()
    ranks = [
        context.Process(target=_rank, args=(fn, rank, world_size, port, args, results), daemon=True)
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    done: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(done) < world_size:
            try:
                rank, error, value = results.get(timeout=1.0)
            except queue.Empty:
                dead = [i for i, p in enumerate(ranks) if i not in done and p.exitcode not in (None, 0)]
                assert not dead, f"ranks {dead} died without a word"
                assert time.monotonic() < deadline, f"only ranks {sorted(done)} were done after {timeout} s"
                continue
            assert error is None, f"rank {rank} failed:\n{error}"
            done[rank] = pickle.loads(value)
    finally:
        for process in ranks:
            process.join(timeout=5.0)
            if process.is_alive():
                process.kill()
                process.join()
    return [done[rank] for rank in range(world_size)]


def _rank(fn: Callable[..., Any], rank: int, world_size: int, port: int, args: tuple[Any, ...], results: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        value = pickle.dumps(fn(rank, world_size, port, *args))  # by value: no tensor handles that die with us
        results.put((rank, None, value))
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
