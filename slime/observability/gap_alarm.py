"""A warning when trainer and engine drift apart: wrong weights, another rounding, a changed engine."""

import math
from collections.abc import Mapping

METRIC = "train/logprob_gap_k3"
FACTOR = 10.0
# An estimate of KL(engine || trainer) per token, in nats, below which no factor matters.
FLOOR = 1e-4


class GapAlarm:
    """Compares k3 of each step with that of the first one; warns again only when it has grown tenfold once more."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._limit = math.inf

    def check(self, metrics: Mapping[str, float]) -> str | None:
        """A line for the user, or None. Steps without the metric, or with one that is not finite, say nothing."""
        value = metrics.get(METRIC, math.nan)
        if not math.isfinite(value):
            return None
        if self._first is None:
            self._first, self._limit = value, max(FLOOR, FACTOR * value)
            return None
        if value <= self._limit:
            return None
        self._limit = FACTOR * value
        return (
            f"slime: warning: {METRIC} is {value:.2e}, it was {self._first:.2e} at this run's first step: log-probs of "
            "trainer and engine drift apart (docs/rounding.md)"
        )
