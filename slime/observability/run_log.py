"""`RunLog`: what a run leaves in its folder and shows in the terminal, driven by train.py step by step."""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slime.config import Args
from slime.observability.config import write_config
from slime.observability.console import Console
from slime.observability.gap_alarm import GapAlarm
from slime.observability.metrics import MetricsWriter, read_metrics
from slime.observability.plots import plot_run
from slime.observability.rounding import format_probe, take_probe, write_probe
from slime.observability.samples import drop_samples
from slime.observability.summary import FILE as SUMMARY_FILE
from slime.observability.summary import summarize
from slime.observability.timers import PhaseTimer
from slime.observability.trackers import TensorBoardTracker
from slime.utils.sync_receipt import SyncReceipt


class RunLog:
    """Collects the numbers of a step between `begin` and `end`.

    start: the first rollout of this process; what an earlier process left of this and later ones is dropped.
    before: numbers of the step before as its checkpoint has them, for a process that died between checkpoint and line.
    """

    def __init__(
        self, args: Args, layout: Any = None, start: int = 0, before: Mapping[str, float] | None = None
    ) -> None:
        self._folder = Path(args.run_dir)
        self._started = time.monotonic()
        self._timer = PhaseTimer()
        self._console = Console(args.progress, args.num_rollout)
        self._alarm = GapAlarm()
        self._step: int | None = None
        self._metrics: dict[str, float] = {}
        self._early: dict[str, float] = {}
        write_config(self._folder, args, layout)
        self._writer = MetricsWriter(self._folder, start)
        self._trackers = [TensorBoardTracker(self._folder, start)] if args.use_tensorboard else []
        if start:
            drop_samples(self._folder, start)
        if before is not None and self._writer.last_step != start - 1:
            self._write(start - 1, before)

    def say(self, text: str) -> None:
        """A line for the user, outside of steps."""
        self._console.say(text)

    def begin(self, rollout_id: int) -> None:
        """Starts a step. What came before the first one (the first sync) is logged with it, but not in its time."""
        self._step = rollout_id
        self._metrics, self._early = self._early, {}
        self._timer.begin()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a phase: rollout, train, save, sync or eval."""
        with self._console.phase(name), self._timer.phase(name):
            yield

    def add(self, metrics: Mapping[str, float] | None) -> None:
        """Numbers for the current step. Those of --rounding-probe get a table and a file of their own."""
        self._metrics.update(metrics or {})
        if (probe := take_probe(self._metrics, self._step or 0)) is not None:
            write_probe(self._folder, probe)
            self.say(format_probe(probe))

    def receipt(self, receipt: SyncReceipt | None) -> None:
        """Takes what a weight sync left (None: there is no engine). Raises RuntimeError when weights did not arrive."""
        if receipt is None:
            return
        metrics = {
            "sync/tensors": float(receipt.tensors),
            "sync/bytes": float(receipt.bytes),
            "sync/gb_per_s": float(receipt.gb_per_s),
            "sync/check_time": float(receipt.check_seconds),
        }
        if receipt.digests_checked:
            if not receipt.digests_ok:
                raise RuntimeError(f"the engines do not hold the weights that were sent to them: {receipt}")
            metrics["sync/verified"] = 1.0
        if receipt.changed is not None:
            metrics["sync/changed_tensors"] = float(receipt.changed)
        if self._step is None:
            self._early |= metrics
            self.say(f"first sync: {receipt}")
        else:
            self._metrics |= metrics

    def so_far(self) -> dict[str, float]:
        """The numbers of the step that is under way, for its checkpoint."""
        return self._metrics | self._timer.metrics(self._metrics)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation before `step` is trained; a line of its own in metrics.jsonl, as step - 1."""
        self._write(step - 1, dict(metrics))
        shown = ", ".join(f"{k} {v:.3f}" for k, v in metrics.items() if k.count("/") == 1)
        self.say(f"before step {step + 1}: {shown}")

    def end(self) -> None:
        """Ends the step: writes metrics.jsonl and the trackers, prints the step's line."""
        assert self._step is not None, "RunLog.end without begin"
        self._metrics |= self._timer.metrics(self._metrics)
        values = self._write(self._step, self._metrics)
        self._console.step(self._step, values)
        if (warning := self._alarm.check(values)) is not None:
            self.say(warning)
        self._step, self._metrics = None, {}

    def finish(self) -> dict[str, Any]:
        """Closes the files, draws the picture, writes and returns the summary."""
        self.close()
        summary = summarize(read_metrics(self._folder), time.monotonic() - self._started)
        (self._folder / SUMMARY_FILE).write_text(json.dumps(summary) + "\n")
        picture = plot_run(self._folder) if summary["steps"] else None
        first, last = summary["reward_first"], summary["reward_last"]
        reward = "" if first is None else f"reward {first:.3f} -> {last:.3f} (first and last 5 steps), "
        self.say(f"done: {reward}{summary['steps']} steps, {summary['wall_s']:.0f} s; see {picture or self._folder}")
        return summary

    def close(self) -> None:
        """Closes the files; safe to call twice."""
        self._writer.close()
        for tracker in self._trackers:
            tracker.close()
        self._trackers = []

    def _write(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        values = self._writer.write(step, metrics)
        for tracker in self._trackers:
            tracker.log(step, values)
        return values
