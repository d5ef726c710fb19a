"""Advantages and returns of a rank's samples, from their rewards and log-probs, before the first optimizer step."""

from typing import Any

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor

from slime.config.errors import ConfigError
from slime.config.hooks import load_hook
from slime.utils import advantages as formulas
from slime.utils.kl import compute_approx_kl
from slime.utils.masked import select, whiten

SCALAR_ESTIMATORS = ("grpo", "gspo", "cispo", "rloo", "maxrl", "tailrl")


def compute_advantages_and_returns(args: Any, rollout_data: dict[str, Any]) -> None:
    """Sets `advantages` and `returns` in rollout_data: float32 [R] per sample.

    rollout_data: lists with one entry per sample of this data-parallel rank: rewards (scalars of `slime.data.batch`),
    loss_masks, log_probs; ref_log_probs with --kl-coef, values for ppo, teacher_log_probs for on_policy_distillation.
    A user's per-token `token_rewards` join the rewards of ppo and reinforce_plus_plus; `token_advantages` are added to
    the advantages of any estimator. Collective over the data-parallel ranks with --normalize-advantages.
    Raises ValueError that names what is missing.
    """
    hook = load_hook(args, "custom_advantage_function_path")
    if hook is not None:
        hook(args, rollout_data)
        _check(args, rollout_data)
        return
    masks: list[Tensor] = rollout_data["loss_masks"]
    rewards: list[float] = rollout_data["rewards"]
    estimator = args.advantage_estimator
    kl = _kl(args, rollout_data)
    returns: list[Tensor]
    if estimator in SCALAR_ESTIMATORS:
        returns = formulas.get_grpo_returns(torch.tensor(rewards, dtype=torch.float32), kl)
        advantages = list(returns)
    elif estimator in ("ppo", "reinforce_plus_plus"):
        token_rewards = formulas.get_token_rewards(rewards, kl, masks, args.kl_coef)
        if "token_rewards" in rollout_data:
            extra = rollout_data["token_rewards"]
            token_rewards = [r + select(x.to(r), m) for r, x, m in zip(token_rewards, extra, masks, strict=True)]
        if estimator == "ppo":
            values, lambd = _need(rollout_data, "values", "a critic (--advantage-estimator ppo)"), args.lambd
        else:
            values, lambd = [torch.zeros_like(r) for r in token_rewards], 1.0
        values = [v.float() for v in values]
        advantages, returns = formulas.get_advantages_and_returns(values, token_rewards, masks, args.gamma, lambd)
    elif estimator == "reinforce_plus_plus_baseline":
        advantages = formulas.get_reinforce_plus_plus_baseline_advantages(rewards, kl, masks, args.kl_coef)
        returns = list(advantages)
    elif estimator == "on_policy_distillation":
        # Over the teacher's most likely tokens it is a term of the loss, which no advantage can express.
        advantages = [torch.zeros_like(k) for k in kl] if args.distill_topk else _distillation(args, rollout_data)
        returns = list(advantages)
    else:
        raise ConfigError(f"--advantage-estimator {estimator!r} is unknown")

    if args.opd_kl_coef and not args.distill_topk:
        distilled = _distillation(args, rollout_data)
        advantages = [a + args.opd_kl_coef * d for a, d in zip(advantages, distilled, strict=True)]
    if "token_advantages" in rollout_data:
        extra = rollout_data["token_advantages"]
        advantages = [a + select(x.to(a), m) for a, x, m in zip(advantages, extra, masks, strict=True)]
    if args.normalize_advantages:
        advantages = whiten(advantages, masks, _data_parallel_group())
    rollout_data["advantages"], rollout_data["returns"] = advantages, returns


def _kl(args: Any, data: dict[str, Any]) -> list[Tensor]:
    """Per-token KL to the reference, 0 on masked tokens; zeros when --kl-coef is 0."""
    masks = data["loss_masks"]
    if not args.kl_coef:
        return [torch.zeros_like(m, dtype=torch.float32) for m in masks]
    refs = _need(data, "ref_log_probs", "a reference model (--kl-coef)")
    return [
        compute_approx_kl(select(lp, m), select(ref, m), args.kl_loss_type)
        for lp, ref, m in zip(data["log_probs"], refs, masks, strict=True)
    ]


def _distillation(args: Any, data: dict[str, Any]) -> list[Tensor]:
    teacher = _need(
        data,
        "teacher_log_probs",
        "a teacher (--opd-teacher-load, --opd-teacher-url, or Sample.teacher_log_probs on all samples)",
    )
    old = data["rollout_log_probs" if args.use_rollout_logprobs else "log_probs"]
    return formulas.get_on_policy_distillation_advantages(teacher, old, data["loss_masks"])


def _need(data: dict[str, Any], name: str, source: str) -> list[Tensor]:
    if name not in data:
        raise ValueError(f"the rollout's data has no {name}: it needs {source}")
    return data[name]


def _check(args: Any, data: dict[str, Any]) -> None:
    where = f"--custom-advantage-function-path {args.custom_advantage_function_path}"
    lengths = [m.numel() for m in data["loss_masks"]]
    for name in ("advantages", "returns"):
        if name not in data:
            raise ValueError(f"{where}: it must set rollout_data[{name!r}], a list of one [response_length] per sample")
        found = [tuple(x.shape) for x in data[name]]
        if found != [(n,) for n in lengths]:
            raise ValueError(f"{where}: {name} have shapes {found}, the responses have lengths {lengths}")


def _data_parallel_group() -> Any:
    if not mpu.model_parallel_is_initialized():
        return None
    return mpu.get_data_parallel_group()  # context-parallel ranks hold the same whole responses: they count once
