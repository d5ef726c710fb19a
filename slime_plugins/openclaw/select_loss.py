"""Hint selection and distillation on a few tokens per place (OpenClaw-RL, Eq. 1), through the public hooks only.

    python train.py ... --custom-loss-path slime_plugins.openclaw.select_loss.select_loss_function \
        --advantage-estimator grpo --disable-rewards-normalization

A rollout function has, per response token, the student's K most likely tokens (the engine's `top_logprobs_num` when it
sampled) and, per accepted hint, the teacher's with the hint in its prompt. `select_hints` chooses the hint whose tokens
overlap most with the student's; `train_fields` makes of the choice what the loss reads: `Sample.train_metadata`
"token_ids", "hint_log_probs" and "token_valid", [R, K] each. For "token_ids" the trainer adds its own log-probs of
before the first step, `batch["token_log_probs"]`.

Per place, over its set S: w = softmax of the old log-probs within S, A = clip(log pi_teacher - log pi_old, +-C) w,
rho = pi / pi_old of the whole vocabulary (a ratio within S could be met by moving mass out of it), and the sum over S
of PPO's clipped loss; L = w_rl L_grpo + w_opd L_opd. Keys of the YAML file of --custom-config-path, else of the
environment, there with OPENCLAW_TOPK_ before the name in capitals: `w_rl`, `w_opd` (1), `adv_diff_clip` (C, 2; 0: no
clip), `ppo_clip_eps_lo` and `ppo_clip_eps_hi` (of L_opd, 0.2 and 0.28).
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime.backends.megatron_utils.loss import get_log_probs_and_entropy
from slime.utils.ppo_utils import clamp_log_ratio, compute_approx_kl, compute_policy_loss, select

SELECTIONS = ("sequence_optimal", "token_optimal", "shortest")
SUBSETS = ("student", "teacher", "overlap")
_DEFAULTS = {"w_rl": 1.0, "w_opd": 1.0, "adv_diff_clip": 2.0, "ppo_clip_eps_lo": 0.2, "ppo_clip_eps_hi": 0.28}


# -- in the rollout ----------------------------------------------------------------------------------------------------


def overlaps(student_ids: np.ndarray, hint_ids: np.ndarray) -> np.ndarray:
    """How many of the student's tokens [R, K] each hint's [H, R, K] have: int [H, R]. Ids of a place differ."""
    return (hint_ids[:, :, :, None] == student_ids[None, :, None, :]).sum((2, 3))


def select_hints(
    student_ids: np.ndarray,
    hint_ids: np.ndarray,
    how: str = "sequence_optimal",
    spans: Sequence[tuple[int, int]] = (),
) -> np.ndarray:
    """The hint of each place, int [R]: of the largest overlap over the whole response, at the place itself, or hint 0.

    spans: [start, end) of steps; sequence_optimal then chooses for each by itself (places outside them: for all).
    Ties take the lowest index, so order hints from short to long. Raises ValueError for another `how`.
    """
    if how not in SELECTIONS:
        raise ValueError(f"hint selection {how!r}: use one of {SELECTIONS}")
    shared = overlaps(student_ids, hint_ids)
    if how == "shortest":
        return np.zeros(shared.shape[1], np.int64)
    if how == "token_optimal":
        return shared.argmax(0)
    out = np.full(shared.shape[1], shared.sum(1).argmax())
    for start, end in spans:
        out[start:end] = shared[:, start:end].sum(1).argmax()
    return out


def train_fields(
    student_ids: np.ndarray,
    hint_ids: np.ndarray,
    at_student: np.ndarray,
    at_hint: np.ndarray,
    chosen: np.ndarray,
    subset: str = "student",
) -> dict[str, list]:
    """What the loss reads, for Sample.train_metadata: the set S of each place, and the chosen hint's teacher on it.

    student_ids [R, K]; hint_ids [H, R, K]; at_student, at_hint [H, R, K]: each hint's teacher log-probs at the
    student's ids and at its own; chosen [R] from `select_hints`. subset: S is the student's tokens, the teacher's, or
    those that both have (token_valid 0 elsewhere; a place may have none). Raises ValueError for another subset.
    """
    if subset not in SUBSETS:
        raise ValueError(f"subset {subset!r}: use one of {SUBSETS}")
    places = np.arange(len(chosen))
    theirs = hint_ids[chosen, places]
    valid = np.ones(student_ids.shape, np.int64)
    if subset == "overlap":
        valid = (student_ids[:, :, None] == theirs[:, None, :]).any(2).astype(np.int64)
    ids, log_probs = (theirs, at_hint) if subset == "teacher" else (student_ids, at_student)
    fields = {"token_ids": ids, "hint_log_probs": log_probs[chosen, places], "token_valid": valid}
    return {name: values.tolist() for name, values in fields.items()}


# -- in the trainer ----------------------------------------------------------------------------------------------------


def select_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    teacher_log_probs: Tensor,
    valid: Tensor,
    *,
    adv_diff_clip: float,
    eps_clip: float,
    eps_clip_high: float,
) -> tuple[Tensor, Tensor]:
    """Eq. 1: (loss [N], clipped share [N]) of N places with K tokens each; all inputs [N, K], valid 0 or 1.

    Entries that are not valid may hold anything. A place without a valid token has loss 0.
    """
    new, old, teacher = (select(x, valid) for x in (log_probs, old_log_probs.detach(), teacher_log_probs))
    weight = select(torch.softmax(old.masked_fill(valid <= 0, -torch.inf), dim=-1), valid)
    gap = teacher - old
    if adv_diff_clip > 0:
        gap = gap.clamp(-adv_diff_clip, adv_diff_clip)
    log_ratio, _ = clamp_log_ratio(new - old)
    loss, clipped = compute_policy_loss(-log_ratio, gap * weight, eps_clip, eps_clip_high)
    share = select(clipped, valid).sum(-1) / (valid > 0).sum(-1).clamp(min=1)
    return select(loss, valid).sum(-1), share


def select_loss_function(
    args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns (loss, metrics); logits float32 [1, T / cp, V / tp]. Raises ValueError for what the batch lacks."""
    if args.use_rollout_logprobs:
        raise ValueError("the select loss needs old log-probs by the trainer: leave --use-rollout-logprobs out")
    names = ("token_ids", "token_log_probs", "hint_log_probs", "token_valid")
    missing = [name for name in names if name not in batch]
    if missing:
        raise ValueError(
            f"the select loss finds no {' and no '.join(missing)} in the batch: set train_metadata of all samples from "
            "slime_plugins.openclaw.select_loss.train_fields"
        )
    mask = torch.cat(batch["loss_masks"])
    # An empty response has an empty list, whose K nobody knows.
    k = max(x.size(1) if x.dim() == 2 else 1 for x in batch["token_ids"])
    ids, old_tokens, teacher, valid = (
        torch.cat([_rows(x, n, k) for x, n in zip(batch[name], batch["response_lengths"], strict=True)])
        for name in names
    )
    valid = valid * mask.unsqueeze(1)
    of_tokens = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
    _, out = get_log_probs_and_entropy(
        logits, args=args, with_entropy=True, token_ids=[torch.where(valid > 0, ids, 0)], **of_tokens
    )
    log_probs, entropy = (select(torch.cat(out[name]), mask) for name in ("log_probs", "entropy"))
    old_log_probs, rewarded = (select(torch.cat(batch[name]), mask) for name in ("log_probs", "advantages"))
    ppo_kl = old_log_probs - log_probs
    rl_loss, rl_clipped = compute_policy_loss(ppo_kl, rewarded, args.eps_clip, args.eps_clip_high, args.eps_clip_c)
    opd_loss, opd_clipped = select_loss(
        torch.cat(out["token_log_probs"]),
        old_tokens,
        teacher,
        valid,
        adv_diff_clip=setting(args, "adv_diff_clip"),
        eps_clip=setting(args, "ppo_clip_eps_lo"),
        eps_clip_high=setting(args, "ppo_clip_eps_hi"),
    )
    metrics = {
        "rl_loss": sum_of_sample_mean(rl_loss),
        "opd_loss": sum_of_sample_mean(opd_loss),
        "pg_clipfrac": sum_of_sample_mean(rl_clipped),
        "opd_clipfrac": sum_of_sample_mean(opd_clipped),
        "entropy": sum_of_sample_mean(entropy),
        "ppo_kl": sum_of_sample_mean(ppo_kl),
    }
    loss = setting(args, "w_rl") * metrics["rl_loss"] + setting(args, "w_opd") * metrics["opd_loss"]
    loss = loss - args.entropy_coef * metrics["entropy"]
    if args.use_kl_loss:
        reference = select(torch.cat(batch["ref_log_probs"]), mask)
        metrics["kl_loss"] = sum_of_sample_mean(compute_approx_kl(log_probs, reference, args.kl_loss_type))
        loss = loss + args.kl_loss_coef * metrics["kl_loss"]
    return loss, metrics


def setting(args: Any, name: str) -> float:
    """A key of --custom-config-path, else OPENCLAW_TOPK_<NAME> of the environment, else the default."""
    return float(getattr(args, name, os.environ.get(f"OPENCLAW_TOPK_{name.upper()}", _DEFAULTS[name])))


def _rows(x: Tensor, response: int, k: int) -> Tensor:
    """[R, K]; zeros where a sample without response, or the dummy of a rank without samples, does not know K."""
    return x if x.dim() == 2 and x.size(0) else x.new_zeros((response, k))
