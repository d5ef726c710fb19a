"""What --rounding-probe found, as a table for the log and as `rounding_probe.json` in the run folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PREFIX = "rounding_probe/"
FILE = "rounding_probe.json"


def take_probe(metrics: dict[str, float], step: int) -> dict[str, Any] | None:
    """Takes the probe's numbers out of a step's metrics, in place; None where there are none.

    {"step", "tokens", "training": regions that the run trains with, "lowest": regions of the smallest k3, "rows": a
    dict per subset: "regions", "k1", "k2", "k3", "mean_abs", "max", "share_over"}. Of equal k3 the fewest regions.
    """
    found = {name.removeprefix(PREFIX): metrics.pop(name) for name in list(metrics) if name.startswith(PREFIX)}
    if not found:
        return None
    subsets: dict[str, dict[str, Any]] = {}
    training = []
    for name, value in found.items():
        subset, key = name.split("/")
        if subset != "training":
            subsets.setdefault(subset, {"regions": _regions(subset)})[key] = value
        elif value:
            training.append(key)
    rows = list(subsets.values())
    tokens = int(rows[0]["tokens"])
    for row in rows:
        del row["tokens"]
    lowest = min(rows, key=lambda row: (row["k3"], len(row["regions"])))["regions"]
    return {"step": step, "tokens": tokens, "training": training, "lowest": lowest, "rows": rows}


def _regions(subset: str) -> list[str]:
    return [] if subset == "none" else subset.split("+")


def write_probe(folder: Path, probe: Mapping[str, Any]) -> None:
    (folder / FILE).write_text(json.dumps(probe, indent=1) + "\n")


def format_probe(probe: Mapping[str, Any]) -> str:
    """The table: a line per subset, and which flags train with the one of the smallest k3."""
    lines = [
        f"rounding probe before step {probe['step'] + 1}: log-probs of engine and trainer on {probe['tokens']} tokens",
        f"  {'rounded once':<20} {'k3':>10} {'mean |d|':>10} {'max |d|':>10} {'|d| > 0.1':>10}",
    ]
    for row in probe["rows"]:
        name = " + ".join(row["regions"]) or "none"
        known = {"trained": probe["training"], "lowest k3": probe["lowest"]}
        marks = [mark for mark, regions in known.items() if row["regions"] == regions]
        lines.append(
            f"  {name:<20} {row['k3']:>10.3e} {row['mean_abs']:>10.3e} {row['max']:>10.3e} {row['share_over']:>10.4%}"
            + (f"  <- {', '.join(marks)}" if marks else "")
        )
    if probe["lowest"] != probe["training"]:
        lines.append(f"  lowest k3 with {_flags(probe['lowest'])}")
    return "\n".join(lines)


def _flags(regions: list[str]) -> str:
    if not regions:
        return (
            "--rounding-profile off --transformer-impl local"  # Transformer Engine's own rotary embedding rounds once
        )
    return f"--rounding-profile sglang --rounding-regions {','.join(regions)}"
