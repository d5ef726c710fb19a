"""Says what a rollout waits for when scoring takes long; a user's reward that hangs would be silence otherwise."""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from slime.utils.types import Sample

logger = logging.getLogger(__name__)
FIRST_WORD_S = 60.0


class Scoring:
    """The calls for rewards that are under way."""

    def __init__(self) -> None:
        self._since: dict[int, tuple[float, Sample]] = {}  # by number of the call, so the oldest comes first
        self._calls = 0
        self.seconds = 0.0  # of all calls that ended

    @contextlib.contextmanager
    def of(self, sample: Sample) -> Iterator[None]:
        """Around one call, for this sample or its group."""
        self._calls += 1
        number, started = self._calls, time.monotonic()
        self._since[number] = started, sample
        try:
            yield
        finally:
            del self._since[number]
            self.seconds += time.monotonic() - started

    @contextlib.contextmanager
    def watched(self, first: float = FIRST_WORD_S) -> Iterator[None]:
        """Inside, a call that takes longer than `first` seconds is named in a warning, then at twice that time, and so
        on. By a thread: a reward that blocks the event loop would hold back the loop's own timers."""
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(first, ended), name="scoring-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _watch(self, first: float, ended: threading.Event) -> None:
        said, limit = 0, first  # of which call it was said last, and when it is worth saying again
        while not ended.wait(min(1.0, first / 4)):
            calls = list(self._since.copy().items())
            if not calls:
                continue
            number, (started, sample) = calls[0]
            limit = limit if number == said else first
            waited = time.monotonic() - started
            if waited < limit:
                said = number
                continue
            logger.warning(
                "still waiting for rewards: calls under way: %d, the oldest for %.0f s, of sample %s (group %s)",
                len(calls), waited, sample.index, sample.group_index,
            )  # fmt: skip
            said, limit = number, limit * 2
