"""Filters for --dynamic-sampling-filter-path."""

import math
from typing import Any

from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils.types import Sample

RELATIVE_NOISE = 1e-6  # rewards that went through float32 differ by this much without meaning to


def check_reward_nonzero_std(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Drops groups whose rewards are all the same: their advantages are zero (DAPO's dynamic sampling).

    Compares the largest with the smallest reward, not a standard deviation, whose rounding noise is never zero.
    Removed samples and rewards that are not finite do not count. A group with one sample is kept: it has no
    contrast to judge, and dropping all of them would draw prompts for ever; a group with none left is dropped.
    """
    rewards = [s.get_reward_value(args) for s in samples if not s.remove_sample]
    rewards = [r for r in rewards if math.isfinite(r)]
    if not rewards:
        return DynamicFilterOutput(False, "no_reward")
    low, high = min(rewards), max(rewards)
    if len(samples) == 1 or high - low > RELATIVE_NOISE * max(abs(low), abs(high)):
        return DynamicFilterOutput(True)
    return DynamicFilterOutput(False, f"zero_std_{low:.1f}")
