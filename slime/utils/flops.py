"""Arithmetic of a training step, for MFU: the share of the machine's matrix-multiplication speed that training uses."""

import time
from collections.abc import Sequence

import torch

from slime.config.hf_config import HFConfig


def train_flops(hf: HFConfig, total_lengths: Sequence[int], logit_rows: int | None = None) -> float:
    """Floating-point operations of forward and backward over sequences of these lengths (tokens).

    Two per weight and token forward, twice that backward (Kaplan et al. 2020, "Scaling laws for neural language
    models"), plus causal attention at half of the full square. Recomputation is not counted, as MFU wants it (Chowdhery
    et al. 2022, PaLM, appendix B). logit_rows: tokens that go through the output layer; None is all.
    """
    layers = hf.num_layers * hf.attention_parameters + hf.mlp_parameters(hf.num_experts_per_tok or 1)
    tokens = sum(total_lengths)
    rows = tokens if logit_rows is None else logit_rows
    weights = tokens * layers + rows * hf.hidden_size * hf.vocab_size
    # Scores and weighted values: 2 * L^2 * heads * (channels of a key + of a value), halved by causality.
    squares = sum(length * length for length in total_lengths)
    channels = hf.latent.query_dim + hf.latent.value_dim if hf.latent else 2 * hf.head_dim
    return 3 * (2.0 * weights + squares * hf.num_layers * hf.num_attention_heads * channels)


def measure_matmul_peak(device: torch.device | str, dtype: torch.dtype, seconds: float = 0.1) -> float:
    """FLOP/s of a large matrix product here and now, the best of several tries; with all ranks of a machine calling it
    together, each gets its share. Takes about `seconds` (more on a slow machine)."""
    device = torch.device(device)
    cuda = device.type == "cuda"
    size = 8192 if cuda else 768
    a, b = (torch.full((size, size), 0.5, dtype=dtype, device=device) for _ in range(2))
    best, end = float("inf"), time.perf_counter() + seconds
    torch.mm(a, b)  # libraries choose and load their kernels in the first call
    for _ in range(1000):
        if cuda:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        torch.mm(a, b)
        if cuda:
            torch.cuda.synchronize(device)
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            break
    return 2.0 * size**3 / best
