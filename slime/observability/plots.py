"""The reward curve of a run as a picture.

python -m slime plot runs/tiny_cpu
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slime.observability.metrics import read_metrics

FILE = "reward.png"
_BLUE, _ORANGE, _GREY = "#1f5fa8", "#c8641e", "#8a8f98"


def plot_run(run_dir: str | Path) -> Path | None:
    """Draws reward (or the loss, where there are no rewards), response length and log-prob gap over the steps.

    Reads `metrics.jsonl`, writes `reward.png` beside it and returns its path; None when there is nothing to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = read_metrics(run_dir)
    rewarded = _series(steps, "rollout/raw_reward")
    main = rewarded if rewarded[0] else _series(steps, "train/loss")
    panels: list[tuple[float, Callable[[Any], None]]] = []
    if main[0]:
        panels.append((2.2, lambda ax: _draw_main(ax, *main, "mean raw reward" if rewarded[0] else "loss")))
    if _series(steps, "rollout/response_len_mean")[0]:
        panels.append((1.0, lambda ax: _draw_lengths(ax, steps)))
    if _series(steps, "train/logprob_gap_mean")[0]:
        panels.append((1.0, lambda ax: _draw_gap(ax, steps)))
    if not panels:
        return None
    figure = Figure(figsize=(8, 2.2 + 1.9 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=[h for h, _ in panels])[:, 0]
    for ax, (_, draw) in zip(axes, panels, strict=True):
        draw(ax)
        ax.grid(alpha=0.25, linewidth=0.6)
        ax.spines[["top", "right"]].set_visible(False)
        ax.xaxis.get_major_locator().set_params(integer=True)
    axes[-1].set_xlabel("step")
    axes[0].set_title(Path(run_dir).resolve().name, loc="left", fontsize=11)
    path = Path(run_dir) / FILE
    figure.savefig(path, dpi=130)
    return path


def smooth(values: Sequence[float], window: int = 5) -> list[float]:
    """Centred moving average; at the ends over what there is."""
    half = window // 2
    out = []
    for i in range(len(values)):
        part = values[max(0, i - half) : i + half + 1]
        out.append(math.fsum(part) / len(part))
    return out


def _series(steps: Sequence[dict[str, float]], key: str) -> tuple[list[int], list[float]]:
    """Steps (counted from 1, as the console does) and values, where the value is there and finite."""
    points = [(int(s["step"]) + 1, s[key]) for s in steps if math.isfinite(s.get(key, math.nan)) and s["step"] >= 0]
    return [x for x, _ in points], [y for _, y in points]


def _draw_main(ax: Any, x: list[int], y: list[float], name: str) -> None:
    ax.plot(x, y, color=_BLUE, alpha=0.35, marker=".", markersize=5, linewidth=0.8, label="each step")
    ax.plot(x, smooth(y), color=_BLUE, linewidth=2.2, label="mean of 5 steps")
    if len(y) >= 10:
        first, last = math.fsum(y[:5]) / 5, math.fsum(y[-5:]) / 5
        label = f"first 5: {first:.3f}   last 5: {last:.3f}"
        ax.text(0.99, 0.04, label, transform=ax.transAxes, ha="right", va="bottom", color=_GREY, fontsize=9)
    ax.set_ylabel(name)
    _legend(ax)


def _legend(ax: Any) -> None:
    """Above the panel at its right, where no curve runs."""
    ax.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=2, borderaxespad=0)


def _draw_lengths(ax: Any, steps: Sequence[dict[str, float]]) -> None:
    x, mean = _series(steps, "rollout/response_len_mean")
    low, high = (_series(steps, f"rollout/response_len_{end}") for end in ("min", "max"))
    if low[0] == x and high[0] == x:
        ax.fill_between(x, low[1], high[1], color=_ORANGE, alpha=0.15, linewidth=0, label="min to max")
    ax.plot(x, mean, color=_ORANGE, linewidth=1.6, label="mean")
    ax.set_ylabel("response tokens")
    _legend(ax)


def _draw_gap(ax: Any, steps: Sequence[dict[str, float]]) -> None:
    for key, style in (("mean", {"linewidth": 1.6}), ("max", {"linewidth": 1.0, "linestyle": "--"})):
        x, y = _series(steps, f"train/logprob_gap_{key}")
        if any(v > 0 for v in y):
            ax.plot(x, [v if v > 0 else math.nan for v in y], color=_GREY, label=key, **style)
    ax.set_yscale("log")
    ax.set_ylabel("log-prob gap,\nengine to trainer")
    _legend(ax)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m slime plot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="run folder")
    try:
        path = plot_run(parser.parse_args(argv).run)
    except FileNotFoundError as error:
        print(f"plot: {error}", file=sys.stderr)
        return 2
    print(path or "nothing to draw yet")
    return 0
