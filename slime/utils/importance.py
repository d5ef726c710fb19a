"""Importance weights between the engine that sampled and the trainer that learns.

For each trained token the weight starts from exp(log pi_trainer,old - log pi_engine). It is detached: it scales a
loss, and nothing is learned through it. The log-ratio is clamped to +-20 before exp.

The `*_function`s have the signature of `--custom-tis-function-path` and return (pg_loss, masks, metrics): the
weighted per-token loss [sum R], the masks that are left, one [R_i] per sample, and metrics per token. A rejected token
stays in the denominators, which belong to the whole step: it counts as a token whose loss is 0.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slime.utils.kl import LOG_RATIO_LIMIT
from slime.utils.masked import masked_mean, masked_sum, select

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "clip", "mask", "reject")
Hooked = tuple[Tensor, list[Tensor], dict[str, Tensor]]


def tis_weights(train_log_probs: Tensor, rollout_log_probs: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Truncated importance sampling: the ratio clamped to [low, high].

    Elementwise; masked positions selected away before. Returns (weight, 1.0 where it was clamped), detached.
    """
    ratio = _ratio(train_log_probs.detach() - rollout_log_probs)
    weight = ratio.clamp(low, high)
    return weight, (weight != ratio).float()


def mis_weights(
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    *,
    level: str = "token",
    mode: str = "truncate",
    lower: float = 0.0,
    upper: float = 2.0,
    veto: float | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Masked importance sampling at one of three levels. Lists hold one [R_i] per sample, whole responses.

    level: token: its own ratio; sequence: the product over the sample's trained tokens; geometric: their geometric
    mean (both then the same on all its tokens).
    mode: truncate: at most `upper`; clip: into [lower, upper]; mask: unchanged inside [lower, upper], 0 outside;
    reject: 1 inside, 0 outside.
    veto: the whole sample is dropped when a trained token's ratio is below it.
    Returns (weights, keep): weight 0 where not kept; both 0 on masked tokens. Raises ValueError for unknown names.
    """
    if level not in LEVELS or mode not in MODES:
        raise ValueError(f"importance level {level!r}, mode {mode!r}: use one of {LEVELS} and one of {MODES}")
    if not 0 <= lower <= upper:
        raise ValueError(f"importance bounds [{lower}, {upper}]: needed 0 <= lower <= upper")
    weights, kept = [], []
    for new, old, mask in zip(train_log_probs, rollout_log_probs, loss_masks, strict=True):
        log_ratio = select(new.detach(), mask) - select(old, mask)
        if level == "token":
            ratio = _ratio(log_ratio)
        else:
            over_sample = masked_mean if level == "geometric" else masked_sum
            ratio = _ratio(over_sample(log_ratio, mask)).expand_as(log_ratio)
        inside = (ratio >= lower) & (ratio <= upper)
        if mode == "truncate":
            weight, keep = ratio.clamp(max=upper), torch.ones_like(inside)
        elif mode == "clip":
            weight, keep = ratio.clamp(lower, upper), torch.ones_like(inside)
        else:
            weight, keep = (ratio if mode == "mask" else torch.ones_like(ratio)), inside
        if veto is not None:
            keep = keep & ~((log_ratio < math.log(veto)) & (mask > 0)).any()
        keep = keep & (mask > 0)
        weights.append(select(weight, keep))
        kept.append(keep.to(log_ratio.dtype))
    return weights, kept


def vanilla_tis_function(
    *,
    args: Any,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    **kwargs: Any,
) -> Hooked:
    """What --use-tis does: `mis_weights` with --tis-level, --tis-mode, [--tis-clip-low, --tis-clip] and --tis-veto.

    By default the token's ratio clamped to that range.
    """
    if (args.tis_level, args.tis_mode, args.tis_veto) != ("token", "clip", None):
        weights, keep = mis_weights(
            train_log_probs, rollout_log_probs, loss_masks, level=args.tis_level, mode=args.tis_mode,
            lower=args.tis_clip_low, upper=args.tis_clip, veto=args.tis_veto,
        )  # fmt: skip
        return _apply(pg_loss, weights, keep, loss_masks)
    train, rollout, mask = _concat(train_log_probs, rollout_log_probs, loss_masks)
    weight, clipped = tis_weights(train, rollout, args.tis_clip_low, args.tis_clip)
    metrics = {"tis": weight, "tis_clipfrac": clipped, "tis_abs": (weight - 1).abs()}
    return select(pg_loss, mask) * weight, list(loss_masks), metrics


def icepop_function(
    *,
    args: Any,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    **kwargs: Any,
) -> Hooked:
    """IcePop (Ling team, 2025): the token's ratio inside [--tis-clip-low, --tis-clip], 0 outside."""
    weights, keep = mis_weights(
        train_log_probs, rollout_log_probs, loss_masks, mode="mask", lower=args.tis_clip_low, upper=args.tis_clip
    )
    return _apply(pg_loss, weights, keep, loss_masks)


def _apply(pg_loss: Tensor, weights: list[Tensor], keep: list[Tensor], loss_masks: Sequence[Tensor]) -> Hooked:
    weight, mask, left = (torch.cat(x) if x else pg_loss.new_zeros(0) for x in (weights, list(loss_masks), keep))
    masks = [m * k for m, k in zip(loss_masks, keep, strict=True)]
    metrics = {"tis": weight, "tis_rejected": select(1 - left, mask), "tis_abs": select((weight - 1).abs(), left)}
    return select(pg_loss, mask) * weight, masks, metrics


def _concat(*columns: Sequence[Tensor]) -> list[Tensor]:
    """Concatenated columns, the last of which is the mask that the others are selected by."""
    parts = [torch.cat(list(c)) if len(c) else torch.zeros(0) for c in columns]
    return [*(select(p, parts[-1]) for p in parts[:-1]), parts[-1]]


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
