"""Frequencies of rotary position embedding, with the scalings that config.json files name."""

import math

import torch

from slime.config.errors import ConfigError
from slime.config.hf_config import HFConfig


def rope_frequencies(hf: HFConfig) -> torch.Tensor:
    """Angle per position of each pair of channels: float32 [rotary_dim / 2], on the CPU.

    RoPE: Su et al. 2021, arXiv:2104.09864. `linear`: Chen et al. 2023, arXiv:2306.15595. `llama3`: long wavelengths
    are divided by the factor, short ones kept, those between blended, as Llama 3.1's reference code does.
    Raises ConfigError for a scaling that is not built.
    """
    dim = int(hf.head_dim * float(hf.raw.get("partial_rotary_factor", 1.0)))
    freqs = 1.0 / (hf.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    scaling = hf.rope_scaling
    if scaling is None:
        return freqs
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return freqs
    if kind == "linear":
        return freqs / scaling["factor"]
    if kind == "llama3":
        return _llama3(freqs, scaling)
    raise ConfigError(f"config.json: rope scaling {kind!r} is not supported; known: default, linear, llama3")


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
