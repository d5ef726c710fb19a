"""Work cut into units that run in any order, in several processes, once: what is done is not done again."""

import hashlib
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from slime.utils.misc import batched_by_size

T = TypeVar("T")
_UNIT_BYTES = 256 * 1024**2  # work lost by a crash, and what a process holds at a time, unless one tensor is larger


def group(items: Sequence[T], nbytes: Callable[[T], int], processes: int) -> list[list[T]]:
    """Runs of items of up to 256 MiB each, in order; less where that would leave processes idle."""
    total = sum(nbytes(item) for item in items)
    limit = min(_UNIT_BYTES, max(1, total // (4 * processes)))
    return list(batched_by_size(items, nbytes, limit))


class Journal:
    """Remembers in a folder the results of finished units. plan: all that they depend on; another plan starts anew.

    A unit counts when its result is written; its output must have been flushed to the disk before.
    """

    def __init__(self, folder: Path, plan: Any):
        self.folder = folder
        digest = hashlib.blake2b(repr(plan).encode(), digest_size=16).hexdigest()
        file = folder / "plan"
        if not file.is_file() or file.read_text() != digest:
            for left in folder.glob("*"):
                left.unlink()
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(digest)
            self.resumed = False
        else:
            self.resumed = True

    def done(self) -> dict[int, Any]:
        return {int(path.stem): pickle.loads(path.read_bytes()) for path in self.folder.glob("*.pkl")}

    def add(self, number: int, result: Any) -> None:
        temporary = self.folder / f"{number}.tmp"
        temporary.write_bytes(pickle.dumps(result))
        os.replace(temporary, self.folder / f"{number}.pkl")


def run_units(
    start: Callable[..., Any], start_args: tuple[Any, ...], units: Sequence[Any], nbytes: Sequence[int],
    *, processes: int, title: str, journal: Journal | None = None, seal: Callable[[Any], Any] | None = None,
) -> list[Any]:  # fmt: skip
    """Results of all units, in order. `start(*start_args)` makes, in each process, the function that does a unit.

    nbytes: of each unit, for the progress bar. With one process everything happens in this one. seal(unit): what is
    still to be done with a unit's output, in threads of this process while others go on; the results are then pairs.
    """
    done = journal.done() if journal else {}
    todo = [number for number in range(len(units)) if number not in done]
    bar = tqdm(total=sum(nbytes), unit="B", unit_scale=True, desc=title, initial=sum(nbytes[i] for i in done))
    sealing: dict[Future[Any], tuple[int, Any]] = {}

    def finish(number: int, result: Any) -> None:
        if journal:
            journal.add(number, result)
        done[number] = result
        bar.update(nbytes[number])

    def finish_sealed(futures: Iterable[Future[Any]]) -> None:
        for future in futures:
            number, result = sealing.pop(future)
            finish(number, (result, future.result()))

    with bar, ThreadPoolExecutor(2) as threads:
        try:
            for number, result in _run(start, start_args, units, todo, min(processes, len(todo))):
                if seal is None:
                    finish(number, result)
                    continue
                sealing[threads.submit(seal, units[number])] = number, result
                finish_sealed([future for future in sealing if future.done()])
        finally:
            finish_sealed(list(sealing))
    return [done[number] for number in range(len(units))]


def _run(
    start: Callable[..., Any], start_args: tuple[Any, ...], units: Sequence[Any], todo: Iterable[int], processes: int
) -> Iterator[tuple[int, Any]]:
    if processes <= 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # thousands of small copies: handing them to threads costs more than they do
        try:
            work = start(*start_args)
            for number in todo:
                yield number, work(units[number])
        finally:
            torch.set_num_threads(threads)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _begin, (start, start_args)) as pool:
        pending = {pool.submit(_do, units[number]): number for number in todo}
        try:
            while pending:
                finished, _ = wait(pending, return_when=FIRST_COMPLETED)
                for future in finished:
                    yield pending.pop(future), future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


_work: Callable[[Any], Any] | None = None  # of a worker process


def _begin(start: Callable[..., Any], start_args: tuple[Any, ...]) -> None:
    global _work
    torch.set_num_threads(1)
    _work = start(*start_args)


def _do(unit: Any) -> Any:
    assert _work is not None
    return _work(unit)
