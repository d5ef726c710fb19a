"""Frequencies of rotary position embedding, with the scalings that config.json files name."""

import math

import torch

from slime.config.errors import ConfigError
from slime.config.hf_config import HFConfig


def rope_frequencies(hf: HFConfig) -> torch.Tensor:
    """Angle per position of each pair of channels: float32 [rotary_dim / 2], on the CPU.

    RoPE: Su et al. 2021, arXiv:2104.09864. `linear`: Chen et al. 2023, arXiv:2306.15595. `llama3`: long wavelengths
    are divided by the factor, short ones kept, those between blended, as Llama 3.1's reference code does. `yarn`: Peng
    et al. 2023, arXiv:2309.00071. Raises ConfigError for a scaling that is not built.
    """
    dim = int(hf.head_dim * hf.rotary_fraction)
    freqs = 1.0 / (hf.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    scaling = hf.rope_scaling
    if scaling is None:
        return freqs
    kind = scaling_kind(hf)
    if kind == "linear":
        return freqs / scaling["factor"]
    if kind == "llama3":
        return _llama3(freqs, scaling)
    if kind == "yarn":
        return _yarn(
            freqs, dim, hf.rope_theta, {"original_max_position_embeddings": hf.max_position_embeddings, **scaling}
        )
    raise ConfigError(f"config.json: rope scaling {kind!r} is not supported; known: default, linear, llama3, yarn")


def scaling_kind(hf: HFConfig) -> str:
    return "default" if hf.rope_scaling is None else hf.rope_scaling["rope_type"]


def attention_factor(hf: HFConfig) -> float:
    """What YaRN multiplies rotated queries, and rotated keys, by: 0.1 ln(factor) + 1; 1 for other scalings.

    Raises ConfigError where only a part of a head is rotated: it could not go into the scale of the scores.
    """
    scaling = hf.rope_scaling
    if scaling is None or scaling_kind(hf) != "yarn":
        return 1.0
    if hf.rotary_fraction != 1.0 or scaling.get("mscale") or scaling.get("mscale_all_dim"):
        raise ConfigError(
            "config.json: yarn with mscale or partial_rotary_factor is supported in latent attention only"
        )
    factor = scaling["factor"]
    return scaling.get("attention_factor") or (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)


def _llama3(freqs: torch.Tensor, scaling: dict) -> torch.Tensor:
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    context = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / freqs
    blend = ((context / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return torch.where(
        wavelength < context / high,
        freqs,
        torch.where(wavelength > context / low, freqs / factor, (1 - blend) * freqs / factor + blend * freqs),
    )


def _yarn(freqs: torch.Tensor, dim: int, theta: float, scaling: dict) -> torch.Tensor:
    """Frequencies of many turns in the original context are kept, of few turns divided by the factor."""
    context = scaling["original_max_position_embeddings"]

    def pair_of(turns: float) -> float:
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(scaling.get("beta_fast") or 32.0), pair_of(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / (high - low or 0.001)).clamp(0.0, 1.0)
    return freqs * (1 - ramp) + freqs / scaling["factor"] * ramp
