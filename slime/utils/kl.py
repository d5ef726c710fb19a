"""Estimators of KL(policy || base) from log-probs of sampled tokens."""

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # exp(20) is 5e8: beyond it a ratio says "far away" and nothing more
LOW_VAR_LIMIT = 10.0


def compute_approx_kl(
    log_probs: Tensor,
    base_log_probs: Tensor,
    kl_loss_type: str = "k3",
    importance_ratio: Tensor | None = None,
) -> Tensor:
    """Per-token estimate of KL(policy || base), elementwise, d = log_probs - base_log_probs, in nats.

    k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d with d clamped to +-20; low_var_kl = k3 clamped to +-10 (Schulman,
    "Approximating KL divergence", 2020). importance_ratio: pi / pi_old of the same tokens, multiplied in: unbiased
    under the current policy when tokens came from an older one (DeepSeek-V3.2, arXiv 2512.02556).
    Pass masked positions through `slime.utils.masked.select` first. Raises ValueError for an unknown type.
    """
    d = log_probs - base_log_probs
    if kl_loss_type == "k1":
        kl = d
    elif kl_loss_type == "k2":
        kl = d.square() / 2
    elif kl_loss_type in ("k3", "low_var_kl"):
        d = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        kl = torch.expm1(-d) + d
        if kl_loss_type == "low_var_kl":
            kl = kl.clamp(-LOW_VAR_LIMIT, LOW_VAR_LIMIT)
    else:
        raise ValueError(f"KL type {kl_loss_type!r}: use k1, k2, k3 or low_var_kl")
    return kl if importance_ratio is None else importance_ratio * kl
