"""The background event loop on which rollouts run, and the door to it from ordinary code."""

import asyncio
import functools
import threading
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


class AsyncLoopThread:
    """An event loop in a daemon thread, for the life of the process."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="slime-asyncio", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                return self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                # A task raised it, say a user's function by sys.exit(): those who await the task get it too. A loop
                # that ended here would leave everybody else waiting for ever.
                continue

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs the coroutine on the loop and waits for its result; an interrupt here cancels it there. A sys.exit()
        there is a RuntimeError here: it must not end this process as if it were done."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("run() was called on the event loop itself and would wait for ever: use await")
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        except BaseException as error:
            if isinstance(error, SystemExit) and future.done():
                raise RuntimeError(f"code on the event loop called sys.exit({error.code!r})") from error
            future.cancel()
            raise


@functools.cache
def get_async_loop() -> AsyncLoopThread:
    """The process's one loop: HTTP connections and semaphores belong to a loop, so all work shares it."""
    return AsyncLoopThread()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine from synchronous code and returns its result (or raises its exception)."""
    return get_async_loop().run(coroutine)


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order. When one fails, the others are cancelled and waited for before its exception goes on."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
