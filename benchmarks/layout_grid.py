"""Is a step the same numbers in every parallel layout? One row per (algorithm, layout), each against one process.

    python benchmarks/layout_grid.py             # the whole grid, some ten minutes on two cores
    python benchmarks/layout_grid.py --quick     # a part of it
    python benchmarks/layout_grid.py --layouts cp2 "tp2 sp" --algorithms gspo sft --table out.md

Real trainer ranks (gloo processes, at most 4) train two optimizer steps of one uneven rollout in fp32, from the same
weights. Columns, each the largest over what it names:

- loss, grad norm, metrics: |a - b| / max(|b|, 0.1), of the means over the two steps. The floor is for those that are
  differences of log-probs (ppo_kl, losses near 0): the log-probs are some -6, so fp32 holds them to 5e-7
- weights: |a - b| / largest |b| of the tensor, after both steps
- update: the same for what the steps changed, over the largest change of the tensor (not bounded: rounding of the
  weights themselves is in it)

Last line: JSON; a row fails above 1e-5.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
from ranks import run_ranks  # noqa: E402

from benchmarks.layout_cases import (  # noqa: E402
    ALGORITHMS,
    LAYOUTS,
    MODELS,
    QUICK_ALGORITHMS,
    QUICK_LAYOUTS,
    WINDOW,
    Layout,
    make_samples,
)
from slime.config import Args  # noqa: E402

BOUND = 1e-5
FLOOR = 0.1


@dataclasses.dataclass
class Outcome:
    """What one rollout of training left: metrics of the metrics rank, weights by Hugging Face name."""

    metrics: dict[str, float]
    weights: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Row:
    algorithm: str
    layout: str
    loss: float
    grad_norm: float
    metrics: float
    worst_metric: str
    weights: float
    update: float

    @property
    def worst(self) -> float:
        """The largest of the bounded columns; NaN where any is."""
        return float(np.max([self.loss, self.grad_norm, self.metrics, self.weights]))

    @property
    def failed(self) -> bool:
        return not self.worst <= BOUND


def base_args(folder: str, **flags: Any) -> Args:
    """fp32, steps of 7 samples; Adam's epsilon is far above rounding, so that a tiny gradient has no random sign."""
    defaults: dict[str, Any] = dict(
        hf_checkpoint=folder, device="cpu", params_dtype="float32", lr=1e-2, adam_eps=1e-2, global_batch_size=7,
        rollout_batch_size=4, n_samples_per_prompt=4, num_rollout=3, max_tokens_per_gpu=50, log_probs_chunk_size=7,
        rollout_temperature=0.8, distributed_timeout_minutes=15.0,
    )  # fmt: skip
    return Args(**{**defaults, **flags})


# -- on a trainer rank -------------------------------------------------------------------------------------------------


def run_algorithms(
    rank: int, world: int, port: int, folder: str, flags: dict[str, Any], names: Sequence[str]
) -> tuple[bool, dict[str, Outcome], dict[str, np.ndarray]]:
    """Trains each algorithm from the same weights in one process group.

    Returns (whether this is the metrics rank, outcomes, the weights at the start).
    """
    from slime.backends.megatron_utils.actor import MegatronTrainActor
    from slime.backends.megatron_utils.parallel import destroy_parallel

    actor = MegatronTrainActor(rank, world, "127.0.0.1", port)
    info = actor.init(base_args(folder, use_kl_loss=True, **flags))  # with a reference model
    frozen, start = actor._frozen, _weights(actor)
    outcomes = {}
    for name in names:
        args = base_args(folder, **{**flags, **ALGORITHMS[name]})
        actor._frozen = frozen if args.custom_loss_path is not None or args.use_kl_loss or args.kl_coef else {}
        _restart(actor, args)
        mine = _data(args, info.dp_size)[info.dp_rank]
        actor.prepare(0, mine, _values(mine) if args.advantage_estimator == "ppo" else None)
        metrics = actor.train_prepared(0)
        outcomes[name] = Outcome({n: v for n, v in metrics.items() if not n.startswith("perf/")}, _weights(actor))
    destroy_parallel()
    return info.is_metrics_rank, outcomes, start


def _restart(actor: Any, args: Args) -> None:
    """The first weights again, and an optimizer that has seen nothing."""
    from slime.backends.megatron_utils.model import build_optimizer, build_scheduler, unwrap
    from slime.models import load_hf_into

    actor.args = args
    load_hf_into([unwrap(chunk) for chunk in actor.model], args.hf_checkpoint, actor.hf, args)
    actor.optimizer = build_optimizer(args, actor.model)
    actor.scheduler = build_scheduler(args, actor.optimizer, total_steps=2)


def _data(args: Args, dp_size: int) -> list[Any]:
    from slime.data.batch import samples_to_columns
    from slime.data.schedule import make_schedule, split_for_ranks

    columns = samples_to_columns(args, make_samples(args.extra.get("grid_token_fields", False)))
    trained = [int(mask.sum()) for mask in columns["loss_masks"]]
    schedule = make_schedule(args, columns["total_lengths"], trained, columns["rollout_ids"], dp_size)
    return split_for_ranks(columns, schedule)


def _values(mine: Any) -> dict[int, np.ndarray]:
    """A critic's values by the sample's number in the rollout, as another group of ranks would hand them over."""
    lengths = zip(mine.samples, mine.columns["response_lengths"], strict=True)
    return {i: (0.5 * np.sin(np.arange(n) + i)).astype(np.float32) for i, n in lengths}


def _weights(actor: Any) -> dict[str, np.ndarray]:
    from slime.models import iter_hf_weights

    return {n: t.detach().float().clone().numpy() for n, t in iter_hf_weights(actor.model, actor.hf, actor.args)}


# -- comparing ---------------------------------------------------------------------------------------------------------


def run_layout(
    folder: str, ranks: int, flags: dict[str, Any], names: Sequence[str]
) -> tuple[dict[str, Outcome], dict[str, np.ndarray]]:
    """Outcomes by algorithm, with the whole model's weights; and the weights at the start."""
    results = run_ranks(ranks, run_algorithms, folder, flags, list(names), timeout=3600.0)
    outcomes = {}
    for name in names:
        metrics = next(out[name].metrics for first, out, _ in results if first)
        outcomes[name] = Outcome(metrics, {n: t for _, out, _ in results for n, t in out[name].weights.items()})
    return outcomes, {n: t for _, _, start in results for n, t in start.items()}


def compare(algorithm: str, layout: str, got: Outcome, want: Outcome, start: dict[str, np.ndarray]) -> Row:
    """NaN where something is missing or not finite: a row that fails."""
    names = got.metrics.keys() | want.metrics.keys()

    def metric(name: str) -> float:
        a, b = got.metrics.get(name, np.nan), want.metrics.get(name, np.nan)
        return abs(a - b) / max(abs(b), FLOOR)

    others = {n: metric(n) for n in sorted(names - {"train/loss", "train/grad_norm"})}
    worst = max(others, key=lambda n: np.inf if np.isnan(others[n]) else others[n])
    same = got.weights.keys() == want.weights.keys() == start.keys()
    weights = update = np.nan
    if same and any((t != start[n]).any() for n, t in want.weights.items()):  # else the reference learned nothing
        difference = {n: np.abs(t - got.weights[n]).max() for n, t in want.weights.items()}
        weights = float(np.max([difference[n] / np.abs(t).max() for n, t in want.weights.items()]))
        moved = {n: np.abs(t - start[n]).max() for n, t in want.weights.items()}
        update = float(np.max([difference[n] / moved[n] for n in moved if moved[n] > 0]))
    return Row(
        algorithm, layout, metric("train/loss"), metric("train/grad_norm"), others[worst], worst, weights, update
    )


def make_models(folder: Path, names: set[str]) -> dict[str, str]:
    """Folders of the models by name."""
    from tools.make_tiny_model import TinyModel, make_tiny_model

    out = {}
    for name in sorted(names):
        path = folder / name.replace(" ", "_").replace(",", "")
        make_tiny_model(path, TinyModel(**MODELS[name]))
        if "window" in name:
            config = path / "config.json"
            config.write_text(json.dumps({**json.loads(config.read_text()), "sliding_window": WINDOW}))
        out[name] = str(path)
    return out


def run_grid(folder: Path, layouts: dict[str, Layout], algorithms: Sequence[str], bar: Any = None) -> Iterator[Row]:
    """Rows, layout by layout."""
    models = make_models(folder, {layout.model for layout in layouts.values()})
    references: dict[str, Any] = {}
    for name, layout in layouts.items():
        model = models[layout.model]
        if bar is not None:
            bar(name)
        if layout.model not in references:
            references[layout.model] = run_layout(model, 1, {}, algorithms)
        wanted, start = references[layout.model]
        outcomes, _ = run_layout(model, layout.ranks, layout.flags, algorithms)
        for algorithm in algorithms:
            yield compare(algorithm, name, outcomes[algorithm], wanted[algorithm], start)


HEADER = "| algorithm | layout | loss | grad norm | metrics | weights | update | |\n|---|---|---|---|---|---|---|---|"


def as_line(row: Row) -> str:
    numbers = (row.loss, row.grad_norm, row.metrics, row.weights, row.update)
    verdict = f"FAILED (worst metric {row.worst_metric})" if row.failed else "ok"
    return f"| {row.algorithm} | {row.layout} | " + " | ".join(f"{x:.1e}" for x in numbers) + f" | {verdict} |"


def by_layout(rows: Sequence[Row]) -> list[str]:
    """A table of the largest figures of each layout over all algorithms."""
    lines = ["| layout | algorithms | loss | grad norm | metrics | weights | update |", "|---|---|---|---|---|---|---|"]
    for layout in dict.fromkeys(row.layout for row in rows):
        mine = [row for row in rows if row.layout == layout]
        columns = zip(*((r.loss, r.grad_norm, r.metrics, r.weights, r.update) for r in mine), strict=True)
        lines.append(f"| {layout} | {len(mine)} | " + " | ".join(f"{np.max(c):.1e}" for c in columns) + " |")
    return lines


@contextlib.contextmanager
def progress(total: int) -> Iterator[Any]:
    """A bar on a terminal, a line per layout otherwise; yields what to call with the layout that begins."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task, done = bar.add_task("", total=total), -1

        def begin(name: str) -> None:
            nonlocal done
            done += 1
            bar.update(task, description=name, completed=done)
            if not console.is_terminal:
                console.print(f"{done + 1}/{total} {name}", highlight=False)

        yield begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a part of the grid")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), metavar="NAME", help="these layouts only")
    parser.add_argument("--algorithms", nargs="+", choices=list(ALGORITHMS), metavar="NAME", help="these only")
    parser.add_argument("--table", type=Path, help="also write the rows, and each layout's largest, to a Markdown file")
    options = parser.parse_args()
    layouts = options.layouts or (QUICK_LAYOUTS if options.quick else list(LAYOUTS))
    algorithms = options.algorithms or (QUICK_ALGORITHMS if options.quick else list(ALGORITHMS))
    begun = time.monotonic()
    rows = []
    print(HEADER)
    with tempfile.TemporaryDirectory() as folder, progress(len(layouts)) as bar:
        for row in run_grid(Path(folder), {name: LAYOUTS[name] for name in layouts}, algorithms, bar):
            rows.append(row)
            print(as_line(row), flush=True)
    if options.table:
        options.table.write_text("\n".join([*by_layout(rows), "", HEADER, *map(as_line, rows)]) + "\n")
    summary = {
        "rows": len(rows),
        "algorithms": len(algorithms),
        "layouts": len(layouts),
        "max_rel_fp32": float(np.max([row.worst for row in rows])),
        "max_rel_update": float(np.max([row.update for row in rows])),
        "failed": sum(row.failed for row in rows),
        "seconds": round(time.monotonic() - begun),
    }
    print(json.dumps(summary))
    sys.exit(1 if summary["failed"] else 0)


if __name__ == "__main__":
    main()
