"""Per-token policy losses and the clipped value loss. Elementwise on tensors of any one shape.

ppo_kl is the field's name for log pi_old - log pi of the sampled tokens, so ratio = exp(-ppo_kl). Masked positions
must hold harmless values already (`slime.utils.masked.select`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from slime.utils.kl import LOG_RATIO_LIMIT
from slime.utils.masked import masked_mean, select


def clamp_log_ratio(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """(log-ratio within +-20, float 1 where it was outside). Outside, its gradient is 0: one outlier breaks nothing."""
    outside = (log_ratio.detach().abs() > LOG_RATIO_LIMIT).float()
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), outside


def compute_policy_loss(
    ppo_kl: Tensor,
    advantages: Tensor,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate (arXiv 1707.06347) with its own upper bound (DAPO, arXiv 2503.14476), to be minimised.

    max(-ratio A, -clamp(ratio, 1 - eps_clip, 1 + eps_clip_high) A). With eps_clip_c > 1 (dual clip, arXiv 1912.09729)
    the loss of a negative advantage is at most -eps_clip_c A.
    Returns (loss, indicator: 1.0 where the clipped form was the larger). The log-ratio is clamped to +-20.
    """
    ratio = clamp_log_ratio(-ppo_kl)[0].exp()
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    loss = torch.maximum(plain, clipped)
    indicator = (clipped > plain).float()
    if eps_clip_c is not None:
        if eps_clip_c <= 1:
            raise ValueError(f"eps_clip_c is {eps_clip_c}: the dual clip must be above 1")
        bounded = torch.minimum(loss, -eps_clip_c * advantages)
        loss = torch.where(advantages < 0, bounded, loss)
    return loss, indicator


def compute_gspo_kl(
    log_probs: Sequence[Tensor], old_log_probs: Sequence[Tensor], loss_masks: Sequence[Tensor]
) -> list[Tensor]:
    """GSPO (arXiv 2507.18071): per sample, the mean of old - new over its trained tokens, on each of its tokens.

    Lists of [R_i]; whole responses, gathered over context-parallel ranks. A fully masked or empty sample gives zeros.
    """
    return [
        masked_mean(old - new, mask).expand_as(new)
        for new, old, mask in zip(log_probs, old_log_probs, loss_masks, strict=True)
    ]


def compute_cispo_loss(
    ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float
) -> tuple[Tensor, Tensor]:
    """CISPO (MiniMax-M1, arXiv 2506.13585): -stop_gradient(clamp(ratio)) A log pi. No token loses its gradient.

    Returns (loss, indicator: 1.0 where the ratio was clamped).
    """
    ratio = clamp_log_ratio(-ppo_kl.detach())[0].exp()
    weight = ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
    return -weight * advantages * log_probs, (weight != ratio).float()


def compute_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float) -> tuple[Tensor, Tensor]:
    """max((V - ret)^2, (V_old + clip(V - V_old, +-value_clip) - ret)^2) / 2, and where the clipped form was larger."""
    moved = values - old_values
    # Inside the bounds the clipped form is the value itself: old + (new - old) would differ from it by rounding, and
    # the indicator with it.
    clipped = torch.where(moved.abs() <= value_clip, values, old_values + moved.clamp(-value_clip, value_clip))
    plain_loss, clipped_loss = (values - returns).square(), (clipped - returns).square()
    return torch.maximum(plain_loss, clipped_loss) / 2, (clipped_loss > plain_loss).float()


def compute_opsm_mask(
    log_probs: Sequence[Tensor],
    old_log_probs: Sequence[Tensor],
    advantages: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    delta: float,
) -> tuple[list[Tensor], Tensor]:
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556).

    A token with negative advantage is masked when its sample's mean of old - new over trained tokens is above `delta`.
    Lists of [R_i]. Returns (keep: float masks [R_i], number of samples with any token masked).
    """
    keep, hit = [], torch.zeros(())
    for new, old, adv, mask in zip(log_probs, old_log_probs, advantages, loss_masks, strict=True):
        drift = masked_mean(old - new.detach(), mask)
        drop = (select(adv, mask) < 0) & (drift > delta)
        keep.append((~drop).to(new.dtype))
        hit = hit.to(drop.device) + drop.any()
    return keep, hit
