"""Binary rewards and a teacher's hints in one loss (OpenClaw-RL), through the public hooks only.

    python train.py ... --custom-loss-path slime_plugins.openclaw.combine_loss.combine_loss_function \
        --advantage-estimator grpo --disable-rewards-normalization

A_t = w_opd (log pi_teacher - log pi_old)_t + w_rl A^grpo_t, in PPO's clipped loss. `Sample.teacher_log_probs` come from
a rollout function, --opd-teacher-url or --opd-teacher-load. The weights are `w_opd` and `w_rl` in the YAML file of
--custom-config-path, else OPENCLAW_COMBINE_W_OPD and OPENCLAW_COMBINE_W_RL in the environment, else 1.

A turn without a hint has no teacher and learns from its reward alone. Either its `train_metadata["has_teacher"]` is 0
(all samples then have the key), or its teacher_log_probs are the engine's own rollout_log_probs, number by number:
public rollouts of this method fill the gap so. Their difference to the trainer's is rounding, not a lesson.
"""

import os
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils.loss import get_log_probs_and_entropy
from slime.utils.ppo_utils import compute_approx_kl, compute_policy_loss, select


def combine_loss_function(
    args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns (loss, metrics); logits float32 [1, T, V / tp], already divided by the rollout temperature.

    Raises ValueError when the samples have no teacher_log_probs.
    """
    of_tokens = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
    _, out = get_log_probs_and_entropy(logits, args=args, with_entropy=True, **of_tokens)
    mask = torch.cat(batch["loss_masks"])
    log_probs, entropy = (select(torch.cat(out[name]), mask) for name in ("log_probs", "entropy"))
    old_log_probs = select(torch.cat(_old_log_probs(args, batch)), mask)
    w_opd, w_rl = combine_weights(args)
    distilled = select(torch.cat(opd_advantages(args, batch)), mask)
    rewarded = select(torch.cat(batch["advantages"]), mask)
    advantages = w_opd * distilled + w_rl * rewarded

    ppo_kl = old_log_probs - log_probs
    token_loss, clipped = compute_policy_loss(ppo_kl, advantages, args.eps_clip, args.eps_clip_high, args.eps_clip_c)
    pg_loss = sum_of_sample_mean(token_loss)
    entropy_mean = sum_of_sample_mean(entropy)
    loss = pg_loss - args.entropy_coef * entropy_mean
    metrics = {
        "pg_loss": pg_loss,
        "entropy": entropy_mean,
        "ppo_kl": sum_of_sample_mean(ppo_kl),
        "pg_clipfrac": sum_of_sample_mean(clipped),
        "opd_advantage": sum_of_sample_mean(distilled),
        "rl_advantage": sum_of_sample_mean(rewarded),
    }
    if args.use_kl_loss:
        reference = select(torch.cat(batch["ref_log_probs"]), mask)
        metrics["kl_loss"] = sum_of_sample_mean(compute_approx_kl(log_probs, reference, args.kl_loss_type))
        loss = loss + args.kl_loss_coef * metrics["kl_loss"]
    return loss, metrics


def combine_weights(args: Any) -> tuple[float, float]:
    """(w_opd, w_rl)."""

    def weight(name: str) -> float:
        default = os.environ.get(f"OPENCLAW_COMBINE_{name.upper()}", "1.0")
        return float(getattr(args, name, default))

    return weight("w_opd"), weight("w_rl")


def opd_advantages(args: Any, batch: dict[str, Any]) -> list[Tensor]:
    """log pi_teacher - log pi_old per token, float32 [R] per sample; zeros for a sample without a teacher."""
    if "teacher_log_probs" not in batch:
        raise ValueError(
            "the combined loss needs teacher_log_probs on all samples: set Sample.teacher_log_probs in the rollout, or "
            "give --opd-teacher-url or --opd-teacher-load"
        )
    out = []
    for i, (teacher, old) in enumerate(zip(batch["teacher_log_probs"], _old_log_probs(args, batch), strict=True)):
        out.append(teacher.to(old) - old if _has_teacher(batch, i) else torch.zeros_like(old))
    return out


def _has_teacher(batch: dict[str, Any], i: int) -> bool:
    if "has_teacher" in batch:
        return bool(batch["has_teacher"][i])
    rollout = batch.get("rollout_log_probs")
    return rollout is None or not torch.equal(batch["teacher_log_probs"][i], rollout[i])


def _old_log_probs(args: Any, batch: dict[str, Any]) -> list[Tensor]:
    return batch["rollout_log_probs" if args.use_rollout_logprobs else "log_probs"]
