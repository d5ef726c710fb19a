"""Where the time of a step went."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

# The phases that a step's time is divided into; the rest is `other`.
PHASES = ("generate", "score", "log_probs", "train", "sync", "save", "eval")
# Passes that count as `log_probs`.
_LOG_PROBS = ("ref_log_probs", "teacher_log_probs", "critic_values")


class PhaseTimer:
    """Seconds per phase of the current step, as the driver sees them. `clock` is for tests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Starts a step."""
        self._started = self._clock()
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time inside to `name`, also when it ends by an exception."""
        start = self._clock()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - start

    def metrics(self, reported: Mapping[str, float]) -> dict[str, float]:
        """`perf/<phase>_time` of all phases, `perf/step_time`, and what is none of them as `perf/other_time` and
        `perf/other_share`.

        reported: metrics of the parts that know better: the rollout says how its time divides into generate and
        score, the trainer its into log_probs and train. Without them `rollout` counts as generate.
        """
        step = self._clock() - self._started
        times: dict[str, float] = {}
        for name in PHASES:
            times[name] = float(reported.get(f"perf/{name}_time", self.seconds.get(name, 0.0)))
        times["log_probs"] += sum(float(reported.get(f"perf/{name}_time", 0.0)) for name in _LOG_PROBS)
        if "perf/generate_time" not in reported and "generate" not in self.seconds:
            times["generate"] = self.seconds.get("rollout", 0.0)
        # Save and sync are the driver's to time: what ranks report leaves out the calls themselves.
        for name in ("sync", "save", "eval"):
            times[name] = self.seconds.get(name, times[name])
        other = max(0.0, step - sum(times.values()))
        return {
            **{f"perf/{name}_time": seconds for name, seconds in times.items()},
            "perf/step_time": step,
            "perf/other_time": other,
            "perf/other_share": other / step if step > 0 else 0.0,
        }
