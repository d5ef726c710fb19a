"""Samples of a rollout on disk: readable jsonl for people, complete dumps for debugging."""

import json
import math
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.utils.types import Sample


def samples_path(run_dir: str | Path, rollout_id: int) -> Path:
    return Path(run_dir) / "samples" / f"step_{rollout_id:06d}.jsonl"


def write_samples(run_dir: str | Path, rollout_id: int, samples: Sequence[Sample]) -> Path:
    """Writes one JSON object per sample (keys of `sample_row`); returns the file."""
    path = samples_path(run_dir, rollout_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(_finite(sample_row(s)), ensure_ascii=False, default=str) for s in samples)
    _write_whole(path, "".join(line + "\n" for line in lines).encode(errors="backslashreplace"))
    return path


def sample_row(sample: Sample) -> dict[str, Any]:
    """What a reader wants to know of a sample. Lengths are in tokens; `versions` are the weight versions, in order."""
    return {
        "index": sample.index,
        "group": sample.group_index,
        "prompt": sample.prompt,
        "response": sample.response,
        "reward": sample.reward,
        "label": sample.label,
        "status": sample.status.value,
        "prompt_len": len(sample.tokens) - sample.response_length,
        "response_len": sample.response_length,
        "trained_len": 0 if sample.remove_sample else sample.effective_response_length,
        "versions": list(dict.fromkeys(_version(span) for span in sample.weight_versions)),
        "metadata": sample.metadata,
    }


def read_samples(run_dir: str | Path, rollout_id: int) -> list[dict[str, Any]]:
    """The rows of one step. Raises FileNotFoundError that names the steps which are there."""
    path = samples_path(run_dir, rollout_id)
    if not path.is_file():
        steps = sample_steps(run_dir)
        have = f"steps {steps[0]} to {steps[-1]} are" if steps else "none is"
        raise FileNotFoundError(f"no samples of step {rollout_id} in {path.parent}: {have} there (--save-samples)")
    rows = []
    with open(path, "rb") as file:  # a response may hold U+2028, which str.splitlines takes for a line's end
        for number, line in enumerate(file, 1):
            try:
                rows.append(dict(json.loads(line)))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}:{number}: this line is no sample: {error}") from None
    return rows


def sample_steps(run_dir: str | Path) -> list[int]:
    """Steps of which samples are on disk, ascending."""
    return sorted(int(p.stem.removeprefix("step_")) for p in (Path(run_dir) / "samples").glob("step_*.jsonl"))


def drop_samples(run_dir: str | Path, start_step: int) -> None:
    """Removes what an interrupted run wrote of this step and later ones, which will be made again."""
    for step in sample_steps(run_dir):
        if step >= start_step:
            samples_path(run_dir, step).unlink()


def save_sample_dump(path: str | Path, samples: Sequence[Sample]) -> None:
    """Everything that the samples hold, for `--load-debug-rollout-data`."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_whole(path, pickle.dumps([s.to_dict() for s in samples]))


def load_sample_dump(path: str | Path) -> list[Sample]:
    """Inverse of `save_sample_dump`. The file is a pickle: load only what you wrote yourself."""
    try:
        with open(path, "rb") as file:
            rows = pickle.load(file)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path}: no such file (--load-debug-rollout-data; {{rollout_id}} is filled in per rollout)"
        ) from None
    except (pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise ValueError(f"{path} is no file of --save-debug-rollout-data: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(r, dict) for r in rows):
        raise ValueError(f"{path} is no file of --save-debug-rollout-data: it holds a {type(rows).__name__}")
    return [Sample.from_dict(row) for row in rows]


def _version(span: Any) -> Any:
    return span["version"] if isinstance(span, dict) else span


def _finite(value: Any) -> Any:
    """NaN and infinities as text: they are no JSON, and a reader must see that they were there."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value.item() if hasattr(value, "item") and getattr(value, "size", 0) == 1 else value


def _write_whole(path: Path, data: bytes) -> None:
    """A file of this name is always complete."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    os.replace(part, path)
