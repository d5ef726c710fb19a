"""Drawing tokens on a CPU engine: one random number per sequence, where SGLang draws one per sequence and token.

SGLang loads it through its own plug-in seam, as `cpu_attention.py`.
"""

import pkgutil
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

_SAMPLE = "sglang.srt.layers.sampler.sampling_from_probs_torch"


def draw(probs: torch.Tensor) -> torch.Tensor:
    """probs float [sequences, vocabulary], not negative -> int32 [sequences], drawn by inversion of the running sum.

    In float64, so that rare tokens are neither lost nor more likely; one of probability 0 is never drawn. Raises
    ValueError for a row that is no distribution, as `torch.multinomial` does.
    """
    below = probs.cumsum(-1, dtype=torch.float64)
    total = below[:, -1:]
    if not bool((torch.isfinite(total) & (total > 0)).all()):
        raise ValueError(
            "no token can be drawn: the probabilities are not finite, so weights or logits hold NaN or inf"
        )
    point = torch.rand(len(probs), 1, dtype=torch.float64) * total
    point = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))  # the product may round up to it
    return torch.searchsorted(below, point, right=True).view(-1).to(torch.int32)


def sample(
    usual: Callable[..., torch.Tensor],
    probs: torch.Tensor,
    sampling_seed: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Around SGLang's sampling without top-k, top-p or min-p; seeded sampling stays as it is."""
    if sampling_seed is None and not kwargs:
        return draw(probs)
    return usual(probs, sampling_seed, positions, **kwargs)


def register() -> None:
    """The plug-in's entry point."""
    pkgutil.resolve_name(_SAMPLE)
    HookRegistry.register(_SAMPLE, sample, HookType.AROUND)
