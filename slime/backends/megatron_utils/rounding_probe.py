"""--rounding-probe: how far trainer and engine are apart before the first update, by where the trainer rounds.

Both have the same weights then, so what is left is arithmetic. For each subset of the rounding regions the trainer's
own log-prob pass runs once over the first rollout's samples.
"""

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from slime.backends.megatron_utils.metrics import gap_between
from slime.backends.megatron_utils.rounding import set_regions
from slime.config.rounding import REGIONS

PREFIX = "rounding_probe"


def subsets() -> list[tuple[str, ...]]:
    """All subsets of the regions, the small ones first."""
    return [s for n in range(len(REGIONS) + 1) for s in itertools.combinations(REGIONS, n)]


def probe_rounding(
    model: Sequence[torch.nn.Module],
    training: Collection[str],
    columns: dict[str, Any],
    log_probs: Callable[[], dict[str, Any]],
) -> dict[str, float]:
    """{"rounding_probe/<regions>/<number>": value} over trained tokens of all ranks; empty before the last stage.

    log_probs: one pass without gradient; the rank's "log_probs", as `compute_log_probs` gives them. training: the
    regions that the model has before and afterwards. Numbers: `metrics.Gap`'s. Collective. Raises ValueError where
    the samples have no log-probs of an engine.
    """
    if "rollout_log_probs" not in columns:
        raise ValueError("--rounding-probe needs the engine's log-probs, and these samples have no rollout_log_probs")
    out: dict[str, float] = {}
    try:
        for regions in subsets():
            set_regions(model, regions)
            found = log_probs()
            if not found:
                continue
            gap = gap_between(columns["rollout_log_probs"], found["log_probs"], columns["loss_masks"])
            for name, value in gap.as_dict().items():
                out[f"{PREFIX}/{'+'.join(regions) or 'none'}/{name}"] = value
    finally:
        set_regions(model, training)
    if out:
        out |= {f"{PREFIX}/training/{region}": float(region in training) for region in REGIONS}
    return out
