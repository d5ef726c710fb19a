"""`metrics.jsonl`: one JSON object of numbers per step, on disk as soon as the step is over."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FILE = "metrics.jsonl"


class MetricsWriter:
    """Appends steps to `run_dir/metrics.jsonl`.

    start_step: the step that the run continues with. Lines of later steps (which an interrupted run wrote after its
    last checkpoint) and a torn last line are dropped, so every step is there once. A run that starts anew keeps the
    file of the run before as `metrics.previous.jsonl`. last_step: the newest step in the file, None if it is empty.
    """

    def __init__(self, run_dir: str | Path, start_step: int = 0) -> None:
        self.path = Path(run_dir) / FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.last_step: int | None = None
        if self.path.exists():
            self._continue_from(start_step)
        self._file = open(self.path, "a")

    def write(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Writes one step; returns the numbers as floats and ints. NaN and infinities become null, which is JSON."""
        values = {key: as_number(key, value) for key, value in metrics.items()}
        line = {"step": step, **{k: v if math.isfinite(v) else None for k, v in values.items() if k != "step"}}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self.last_step = step
        return values

    def close(self) -> None:
        self._file.close()

    def _continue_from(self, start_step: int) -> None:
        steps = [(step, line) for step, line in _lines(self.path) if step < start_step]
        kept, self.last_step = [line for _, line in steps], max((step for step, _ in steps), default=None)
        if not kept:
            if self.path.stat().st_size:
                os.replace(self.path, self.path.with_name("metrics.previous.jsonl"))
            return
        part = self.path.with_suffix(".part")
        part.write_text("".join(line + "\n" for line in kept))
        os.replace(part, self.path)


def as_number(key: str, value: Any) -> float | int:
    """A plain number of an int, float, bool, or an array or tensor with one element. Raises TypeError for others."""
    if hasattr(value, "item") and getattr(value, "size", 1) != 0:
        try:
            value = value.item()
        except (ValueError, RuntimeError):
            raise TypeError(f"metric {key!r} has {value.shape} values; a metric is one number") from None
    if isinstance(value, bool):
        return float(value)
    if not isinstance(value, int | float):
        raise TypeError(f"metric {key!r} is {value!r:.80} ({type(value).__name__}); a metric is one number")
    return value


def read_metrics(run_dir: str | Path) -> list[dict[str, float]]:
    """The steps in `run_dir/metrics.jsonl`, in order; null becomes NaN. Raises FileNotFoundError when there is none."""
    path = Path(run_dir) / FILE
    if not path.is_file():
        raise FileNotFoundError(f"there is no {FILE} in {run_dir}: is it the folder of a run (--run-dir)?")
    return [{k: math.nan if v is None else v for k, v in json.loads(line).items()} for _, line in _lines(path)]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(step, line) of the whole lines; a last line that a crash tore is passed over."""
    for line in path.read_text(errors="replace").splitlines():
        try:
            yield json.loads(line)["step"], line
        except (ValueError, KeyError, TypeError):
            continue
