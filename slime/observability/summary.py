"""One JSON line that says how a run went.

python -m slime summary runs/tiny_cpu
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.observability.metrics import read_metrics

FILE = "summary.json"
WINDOW = 5  # steps at either end that are averaged


def summarize(steps: Sequence[dict[str, float]], wall_s: float | None = None) -> dict[str, Any]:
    """{reward_first, reward_last, steps, wall_s, logprob_gap_max, sync_verified} of the lines of a metrics.jsonl.

    Rewards are means of `rollout/raw_reward` over the first and last five steps (fewer in a short run), None without
    rewards. wall_s: seconds, by default the sum over steps. sync_verified: digests were compared at least once, and
    none differed.
    """
    steps = [s for s in steps if "perf/step_time" in s or "rollout/raw_reward" in s]
    rewards = [s["rollout/raw_reward"] for s in steps if math.isfinite(s.get("rollout/raw_reward", math.nan))]
    gaps = [g for s in steps if math.isfinite(g := s.get("train/logprob_gap_max", math.nan))]
    verified = [s["sync/verified"] for s in steps if "sync/verified" in s]
    seconds = math.fsum(s.get("perf/step_time", 0.0) for s in steps) if wall_s is None else wall_s
    return {
        "reward_first": _mean(rewards[:WINDOW]),
        "reward_last": _mean(rewards[-WINDOW:]),
        "steps": len(steps),
        "wall_s": round(seconds, 1),
        "logprob_gap_max": max(gaps, default=None),
        "sync_verified": bool(verified) and all(v == 1 for v in verified),
    }


def _mean(values: Sequence[float]) -> float | None:
    return round(math.fsum(values) / len(values), 4) if values else None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m slime summary", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--wall-s", type=float, help="seconds to report; default: those of the run")
    options = parser.parse_args(argv)
    try:
        steps = read_metrics(options.run)
    except (FileNotFoundError, ValueError) as error:
        print(f"summary: {error}", file=sys.stderr)
        return 2
    out = summarize(steps, options.wall_s)
    if options.wall_s is None:
        out["wall_s"] = _recorded_wall(options.run, out["steps"]) or out["wall_s"]
    print(json.dumps(out))
    return 0


def _recorded_wall(run: Path, steps: int) -> float | None:
    """Seconds from start to end of a run that finished, which include what lies between its steps."""
    try:
        recorded = json.loads((run / FILE).read_text())
    except (OSError, ValueError):
        return None
    return recorded["wall_s"] if recorded["steps"] == steps else None
