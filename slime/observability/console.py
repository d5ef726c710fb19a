"""What a person sees in the terminal: one line per step, and a moving bar while a phase is under way."""

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from slime.observability.timers import PHASES

# The rollout and the evaluation draw their own bars, with the number of prompts done.
_OWN_BAR = ("rollout", "eval")


class Console:
    """progress: auto (a bar on a terminal only), on, off. Step lines are plain text, so that logs stay readable."""

    def __init__(self, progress: str = "auto", num_steps: int | None = None) -> None:
        self._rich = RichConsole(stderr=True)
        self._bars = progress == "on" or (progress == "auto" and sys.stderr.isatty())
        self._num_steps = num_steps

    def say(self, text: str) -> None:
        print(text, flush=True)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.say(format_step(step, metrics, self._num_steps))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Shows the phase with its elapsed seconds; the bar goes away when the phase is over."""
        if not self._bars or name in _OWN_BAR:
            yield
            return
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
        with Progress(*columns, console=self._rich, transient=True) as progress:
            progress.add_task(name, total=None)
            yield


def format_step(step: int, metrics: Mapping[str, float], num_steps: int | None = None) -> str:
    """The line of one step; what was not measured is left out."""

    def get(key: str) -> float | None:
        return metrics.get(key)

    parts = [f"step {step + 1}" + (f"/{num_steps}" if num_steps else "")]
    for label, key in (
        ("reward", "rollout/raw_reward"),
        ("loss", "train/loss"),
        ("len", "rollout/response_len_mean"),
        ("entropy", "train/entropy"),
    ):
        if (value := get(key)) is not None and not (label == "loss" and "rollout/raw_reward" in metrics):
            parts.append(f"{label} {_short(value)}")
    low, high = get("train/pg_clipfrac_low"), get("train/pg_clipfrac_high")
    if low is not None and high is not None:
        parts.append(f"clip {_short(low)}/{_short(high)}")
    for label, key in (
        ("ppo_kl", "train/ppo_kl"),
        ("kl", "train/kl_loss"),
        ("grad", "train/grad_norm"),
        ("gap", "train/logprob_gap_max"),
    ):
        if (value := get(key)) is not None:
            parts.append(f"{label} {_short(value)}")
    speeds = [
        f"{_count(value)} {name}"
        for name, key in (("gen", "perf/rollout_tokens_per_s"), ("train", "perf/train_tokens_per_s"))
        if (value := get(key)) is not None and math.isfinite(value)
    ]
    if speeds:
        parts.append("tok/s " + " ".join(speeds))
    times = [f"{p} {s:.1f}" for p in PHASES if (s := metrics.get(f"perf/{p}_time", 0.0)) >= 0.05]
    if (total := get("perf/step_time")) is not None:
        parts.append(f"{total:.1f} s" + (f" ({', '.join(times)})" if times else ""))
    return " | ".join(parts)


def _short(value: float) -> str:
    """Three digits that mean something; small numbers as powers of ten."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    return f"{value:.3f}" if 0.001 <= abs(value) < 10 else f"{value:.1f}" if 10 <= abs(value) < 1e5 else f"{value:.0e}"


def _count(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"
