"""Trackers beside metrics.jsonl: each has `log(step, metrics)` and `close()`."""

import math
import time
from collections.abc import Mapping
from pathlib import Path


class TensorBoardTracker:
    """Scalars as TensorBoard event files in `run_dir/tensorboard`. Needs tensorboard only, not torch.

    start_step: TensorBoard forgets what an earlier process logged for this step and later ones.
    """

    def __init__(self, run_dir: str | Path, start_step: int = 0) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(Path(run_dir) / "tensorboard"))
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(step=max(start_step, 0), wall_time=time.time(), session_log=start))
        self._writer.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the finite numbers and flushes; TensorBoard has no place for NaN."""
        values = [
            self._summary.Value(tag=key, simple_value=float(value))
            for key, value in metrics.items()
            if math.isfinite(value)
        ]
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
