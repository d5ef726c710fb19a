"""Numbers about a rollout's training that a rank reports: seconds per phase, means over steps, gaps between models."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any

import torch

from slime.backends.megatron_utils import device, train_step


class Timers:
    """Seconds per phase, the GPU's work included."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        device.synchronize()
        start = time.perf_counter()
        yield
        device.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def mean_over_steps(results: list[dict[str, float]]) -> dict[str, float]:
    """One value per metric of a rollout: the mean over its steps; largest `*_max`, sum of `*_count`, last lr."""
    out: dict[str, float] = {"train/steps": float(len(results))}
    for name in dict.fromkeys(name for result in results for name in result):
        values = [result[name] for result in results if name in result]
        if name.endswith("_max"):
            out[name] = max(values)
        else:
            out[name] = sum(values) if name.endswith("_count") else sum(values) / len(values)
    if results:
        out["train/lr"] = results[-1]["train/lr"]
    return out


def advantage_metrics(columns: dict[str, Any]) -> dict[str, float]:
    """Mean, standard deviation, least and largest of the advantages of all ranks' trained tokens,
    `train/advantages_...`. Collective over data-parallel ranks. Empty where there are none."""
    if "advantages" not in columns:
        return {}
    pairs = zip(columns["advantages"], columns["loss_masks"], strict=True)
    mine = [a.double()[mask.to(a.device) > 0].cpu() for a, mask in pairs]
    values = torch.cat(mine) if mine else torch.zeros(0, dtype=torch.float64)
    count = train_step.sum_over_data_ranks(float(values.numel()))
    largest = train_step.max_over_data_ranks(float(values.max()) if len(values) else -math.inf)
    least = -train_step.max_over_data_ranks(float((-values).max()) if len(values) else -math.inf)
    mean = train_step.sum_over_data_ranks(float(values.sum())) / max(count, 1.0)
    square = train_step.sum_over_data_ranks(float((values - mean).square().sum())) / max(count, 1.0)
    if not count:
        return {}
    return {
        "train/advantages_mean": mean,
        "train/advantages_std": math.sqrt(square),
        "train/advantages_min": least,
        "train/advantages_max": largest,
    }


def gap_metrics(columns: dict[str, Any]) -> dict[str, float]:
    """How far models that should agree, or shall come to, are apart on trained tokens of all ranks. Collective.

    Between trainer and engine `train/logprob_gap_mean` (of |d|), `..._k3` (of KL(engine || trainer)) and `..._max`; of
    the student to its teacher `train/teacher_kl` (the mean of d) and `train/teacher_k3`. Empty where one is missing.
    """
    out: dict[str, float] = {}
    if (gap := _gap(columns, "rollout_log_probs", "log_probs")) is not None:
        out |= {
            "train/logprob_gap_mean": gap.mean_abs,
            "train/logprob_gap_k3": gap.k3,
            "train/logprob_gap_max": gap.max,
        }
    if (gap := _gap(columns, "log_probs", "teacher_log_probs")) is not None:
        out |= {"train/teacher_kl": gap.k1, "train/teacher_k3": gap.k3}
    return out


LARGE = 0.1  # |d| from which a token is counted as far off
_LONGEST = 20.0  # |d| in exp() and squares; farther tokens count as this far


@dataclasses.dataclass(frozen=True)
class Gap:
    """Of tokens sampled from one model, with d = its log-prob - the other's: means of d, |d|, k2 = d²/2 and k3, the
    largest |d|, the share of |d| over 0.1, and the number of tokens.

    k1 = d, k2 and k3 = exp(-d) - 1 + d estimate KL(sampled || other) (Schulman, "Approximating KL divergence"); k2 and
    k3 with d within ±20.
    """

    k1: float
    mean_abs: float
    k2: float
    k3: float
    max: float
    share_over: float
    tokens: float

    def as_dict(self) -> dict[str, float]:
        return dataclasses.asdict(self)


def gap_between(sampled: Any, other: Any, masks: Any) -> Gap:
    """The gap on tokens with a mask above 0. Each a list of [R] per sample. Collective over data-parallel ranks."""
    sums, largest = torch.zeros(6, dtype=torch.float64), 0.0
    for mine, theirs, mask in zip(sampled, other, masks, strict=True):
        d = (mine.double() - theirs.to(mine.device).double())[mask.to(mine.device) > 0]
        if d.numel():
            near, far = d.clamp(-_LONGEST, _LONGEST), d.abs()
            rows = (d, far, near.square() / 2, torch.expm1(-near) + near, (far > LARGE).double(), torch.ones_like(d))
            sums += torch.stack([row.sum() for row in rows]).cpu()
            largest = max(largest, float(far.max()))
    *totals, count = (train_step.sum_over_data_ranks(float(x)) for x in sums)
    k1, mean_abs, k2, k3, share = (total / max(count, 1.0) for total in totals)
    return Gap(k1, mean_abs, k2, k3, train_step.max_over_data_ranks(largest), share, count)


def _gap(columns: dict[str, Any], sampled: str, other: str) -> Gap | None:
    if sampled not in columns or other not in columns:
        return None
    return gap_between(columns[sampled], columns[other], columns["loss_masks"])
