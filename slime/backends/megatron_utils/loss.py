"""From the model's output to the loss of a micro-batch; `log_probs.py` reads the output.

Scale: a loss is its micro-batch's share of the step's loss, so that Megatron and DDP only add. Denominators belong to
the whole step (`slime.data.schedule`): the number of samples, or of trained tokens with --calculate-per-token-loss.
Masks: every per-token input goes through `select` before it meets exp, so a masked value reaches neither the loss nor
the gradient. Every loss stays connected to the model's output, so a rank whose samples are all masked runs the same
backward pass, and the same collectives, as the others.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils.advantages import compute_advantages_and_returns
from slime.backends.megatron_utils.log_probs import get_log_probs_and_entropy, get_responses, get_values, log_probs_of
from slime.config.errors import ConfigError
from slime.config.hooks import load_hook
from slime.utils.distillation import compute_topk_kl, select_rows
from slime.utils.importance import vanilla_tis_function
from slime.utils.kl import compute_approx_kl
from slime.utils.masked import SumOfSampleMean, masked_sum, select
from slime.utils.policy_loss import (
    clamp_log_ratio,
    compute_cispo_loss,
    compute_gspo_kl,
    compute_opsm_mask,
    compute_policy_loss,
    compute_value_loss,
)

__all__ = [
    "compute_advantages_and_returns",
    "distilled_ids",
    "get_log_probs_and_entropy",
    "get_responses",
    "get_values",
    "loss_function",
    "policy_loss_function",
    "sft_loss_function",
    "value_loss_function",
]

Reducer = Callable[[Tensor], Tensor]
Metrics = dict[str, Tensor]
# Metrics with these endings are not divided by the step's denominator; `_max` is reduced by max, all others by sum.
UNSCALED = ("_max", "_count")


def distilled_ids(args: Any, batch: dict[str, Any]) -> list[Tensor] | None:
    """The token ids [R, K] per sample at which the policy loss distils; None without --distill-topk."""
    if not args.distill_topk:
        return None
    rows = zip(_rows_of_k(args, batch, "teacher_topk_indices"), batch["loss_masks"], strict=True)
    return [torch.where(mask.unsqueeze(1) > 0, ids, 0) for ids, mask in rows]


def policy_loss_function(
    args: Any, batch: dict[str, Any], logits: Any, sum_of_sample_mean: Reducer
) -> tuple[Tensor, Metrics]:
    """PPO-clip, GSPO or CISPO, with importance weights, KL loss and entropy bonus as the flags say.

    batch needs advantages and log_probs (or rollout_log_probs with --use-rollout-logprobs); ref_log_probs for the KL
    loss; rollout_log_probs for TIS; teacher_topk_* for --distill-topk. A user's `token_weights` multiply the policy
    term and the distillation.
    """
    masks: list[Tensor] = batch["loss_masks"]
    mask = torch.cat(masks)
    out = log_probs_of(args, batch, logits, with_entropy=True, token_ids=distilled_ids(args, batch))
    log_probs = select(torch.cat(out["log_probs"]), mask)
    entropy = select(torch.cat(out["entropy"]), mask)
    advantages = _column(batch, "advantages", mask)
    old_name = "rollout_log_probs" if args.use_rollout_logprobs else "log_probs"
    old_log_probs = _column(batch, old_name, mask)

    token_log_ratio, outside = clamp_log_ratio(log_probs - old_log_probs)
    if args.advantage_estimator == "gspo":
        lengths = list(batch["response_lengths"])
        ppo_kl = torch.cat(compute_gspo_kl(log_probs.split(lengths), old_log_probs.split(lengths), masks))
    else:
        ppo_kl = -token_log_ratio
    if args.advantage_estimator == "cispo":
        pg_loss, clipped = compute_cispo_loss(ppo_kl, log_probs, advantages, args.eps_clip, args.eps_clip_high)
        low = clipped * (ppo_kl > 0)
    else:
        pg_loss, clipped = compute_policy_loss(ppo_kl, advantages, args.eps_clip, args.eps_clip_high, args.eps_clip_c)
        low = clipped * (advantages < 0)

    metrics: Metrics = {}
    if args.use_tis or args.custom_tis_function_path:
        pg_loss = _importance_weighted(args, batch, pg_loss, sum_of_sample_mean, metrics)
    if args.use_opsm:
        lengths = list(batch["response_lengths"])
        new, old, adv = (x.split(lengths) for x in (log_probs, old_log_probs, advantages))
        keep, metrics["opsm_masked_count"] = compute_opsm_mask(new, old, adv, masks, args.opsm_delta)
        pg_loss = select(pg_loss, torch.cat(keep))
    if "token_weights" in batch:
        pg_loss = pg_loss * _column(batch, "token_weights", mask)
    loss = pg_mean = _pg_reducer(args, batch, sum_of_sample_mean)(pg_loss)
    token_mean = _token_mean(sum_of_sample_mean)

    if args.distill_topk:
        teacher = select_rows(torch.cat(_rows_of_k(args, batch, "teacher_topk_log_probs")), mask)
        distil = compute_topk_kl(select_rows(torch.cat(out["token_log_probs"]), mask), teacher)
        metrics |= {"distill_kl": token_mean(distil), "distill_teacher_mass": token_mean(teacher.exp().sum(1))}
        if "token_weights" in batch:
            distil = distil * _column(batch, "token_weights", mask)
        only = args.advantage_estimator == "on_policy_distillation"
        loss = loss + (1.0 if only else args.opd_kl_coef) * sum_of_sample_mean(distil)
    if args.entropy_coef:
        loss = loss - args.entropy_coef * sum_of_sample_mean(entropy)
    if args.use_kl_loss:
        ratio = token_log_ratio.exp() if args.use_unbiased_kl else None
        kl = compute_approx_kl(log_probs, _column(batch, "ref_log_probs", mask), args.kl_loss_type, ratio)
        kl_mean = sum_of_sample_mean(kl)
        if args.kl_loss_coef:  # else it is only measured, and 0 x inf would be NaN
            loss = loss + args.kl_loss_coef * kl_mean
        metrics["kl_loss"] = kl_mean

    metrics |= {
        "loss": loss,
        "pg_loss": pg_mean,
        "entropy": token_mean(entropy),
        "ppo_kl": token_mean(ppo_kl),
        "pg_clipfrac": token_mean(clipped),
        "pg_clipfrac_low": token_mean(low),
        "pg_clipfrac_high": token_mean(clipped - low),
        "log_ratio_clamped_count": masked_sum(outside, mask),
    }
    if "rollout_log_probs" in batch and "log_probs" in batch:
        gap = _column(batch, "log_probs", mask) - _column(batch, "rollout_log_probs", mask)
        metrics["train_rollout_logprob_abs_diff"] = token_mean(gap.abs())
    return loss, {name: value.detach() for name, value in metrics.items()}


def value_loss_function(
    args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Reducer
) -> tuple[Tensor, Metrics]:
    """Clipped value loss. logits: the value head's output [1, T / cp, 1]; batch needs values (old) and returns."""
    mask = torch.cat(batch["loss_masks"])
    new = get_values(
        logits, args=args, total_lengths=batch["total_lengths"], response_lengths=batch["response_lengths"]
    )
    values = select(torch.cat(new), mask)
    losses, clipped = compute_value_loss(
        values, _column(batch, "values", mask), _column(batch, "returns", mask), args.value_clip
    )
    loss = sum_of_sample_mean(losses)
    token_mean = _token_mean(sum_of_sample_mean)
    metrics = {"value_loss": loss, "value_clipfrac": token_mean(clipped), "value": token_mean(values)}
    return loss, {name: value.detach() for name, value in metrics.items()}


def sft_loss_function(
    args: Any, batch: dict[str, Any], logits: Any, sum_of_sample_mean: Reducer
) -> tuple[Tensor, Metrics]:
    """Cross-entropy of the trained response tokens; a user's `token_weights` multiply it."""
    mask = torch.cat(batch["loss_masks"])
    out = log_probs_of(args, batch, logits)
    nll = -select(torch.cat(out["log_probs"]), mask)
    if "token_weights" in batch:
        nll = nll * _column(batch, "token_weights", mask)
    loss = sum_of_sample_mean(nll)
    return loss, {"loss": loss.detach()}


def custom_loss_function(
    args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Reducer
) -> tuple[Tensor, Metrics]:
    """The user's loss (--custom-loss-path), with what it returned checked. Raises ConfigError that names the path."""
    function = load_hook(args, "custom_loss_path")
    if function is None:
        raise ConfigError("--loss-type custom_loss needs --custom-loss-path package.module.function")
    result = function(args, batch, logits, sum_of_sample_mean)
    where = f"--custom-loss-path {args.custom_loss_path}"
    if not isinstance(result, tuple) or len(result) != 2:
        raise ConfigError(f"{where}: it must return (loss, metrics), it returned {type(result).__name__}")
    loss, metrics = result
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(f"{where}: the loss must be a scalar tensor, it is {shape}; reduce with sum_of_sample_mean")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ConfigError(f"{where}: the loss does not depend on the logits; add a term such as 0.0 * logits.sum()")
    if not isinstance(metrics, dict):
        raise ConfigError(f"{where}: the metrics must be a dict of name to scalar, they are {type(metrics).__name__}")
    checked: Metrics = {}
    for name, value in metrics.items():
        number = torch.as_tensor(value, dtype=torch.float32, device=loss.device).detach()
        if number.numel() != 1:
            raise ConfigError(f"{where}: metric {name!r} has shape {tuple(number.shape)}; it must be a scalar")
        checked[str(name)] = number.reshape(())
    return loss.reshape(()), {"loss": loss.detach().reshape(()), **checked}


LOSSES: dict[str, Callable[..., tuple[Tensor, Metrics]]] = {
    "policy_loss": policy_loss_function,
    "value_loss": value_loss_function,
    "sft_loss": sft_loss_function,
    "custom_loss": custom_loss_function,
}


def loss_function(args: Any, batch: dict[str, Any], step: Any, logits: Any) -> tuple[Tensor, Metrics]:
    """The micro-batch's share of the step's loss, and of each of its metrics.

    step: RankStep, with num_samples and num_tokens of the whole step. Metrics are sums to be added over micro-batches
    and data-parallel ranks; those that end in `_max` are to be reduced by max.
    """
    per_token = args.calculate_per_token_loss
    samples, tokens = max(step.num_samples, 1), max(step.num_tokens, 1)
    sum_of_sample_mean = SumOfSampleMean(
        batch["loss_masks"],
        batch.get("sample_denominators"),
        per_token=per_token,
        samples_per_token=samples / tokens,
    )
    loss, metrics = LOSSES[args.loss_type](args, batch, logits, sum_of_sample_mean)
    scale = 1.0 / (tokens if per_token else samples)
    return loss * scale, {n: v if n.endswith(UNSCALED) else v * scale for n, v in metrics.items()}


# -- parts ------------------------------------------------------------------------------------------------------------


def _rows_of_k(args: Any, batch: dict[str, Any], name: str) -> list[Tensor]:
    """A column of [R, K]; [1, K] zeros for the dummy of a rank without samples, which does not know K."""
    return [x if x.dim() == 2 else x.new_zeros((x.numel(), args.distill_topk)) for x in _list(batch, name)]


_NEEDED_FOR = {
    "rollout_log_probs": "the engine's log-probs (--use-rollout-logprobs, --use-tis)",
    "ref_log_probs": "the reference model's log-probs (--use-kl-loss)",
    "teacher_log_probs": "a teacher's log-probs (--advantage-estimator on_policy_distillation)",
    "teacher_topk_log_probs": "a teacher's most likely tokens (--distill-topk)",
    "teacher_topk_indices": "a teacher's most likely tokens (--distill-topk)",
    "advantages": "advantages (compute_advantages_and_returns)",
    "values": "a critic's values (--advantage-estimator ppo)",
}


def _list(batch: dict[str, Any], name: str) -> list[Tensor]:
    if name not in batch:
        raise ValueError(
            f"the batch has no {name}: this loss needs {_NEEDED_FOR.get(name, name)}, and not all samples have them"
        )
    return batch[name]


def _column(batch: dict[str, Any], name: str, mask: Tensor) -> Tensor:
    """A per-token column, concatenated and masked."""
    return select(torch.cat(_list(batch, name)).to(mask.device), mask)


def _importance_weighted(
    args: Any, batch: dict[str, Any], pg_loss: Tensor, sum_of_sample_mean: Reducer, metrics: Metrics
) -> Tensor:
    """pg_loss with the weights between engine and trainer; rejected tokens become 0 and stay in the denominators."""
    function = load_hook(args, "custom_tis_function_path") or vanilla_tis_function
    pg_loss, masks, tis_metrics = function(
        args=args,
        pg_loss=pg_loss,
        train_log_probs=_list(batch, "log_probs"),
        rollout_log_probs=_list(batch, "rollout_log_probs"),
        loss_masks=batch["loss_masks"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
    )
    token_mean = _token_mean(sum_of_sample_mean)
    for name, value in tis_metrics.items():
        if name.endswith(UNSCALED) and value.shape != pg_loss.shape:
            metrics[name] = value
        else:  # a scalar is the micro-batch's mean over its trained tokens, and weighs as many in the step's
            metrics[name] = token_mean(value.float().expand_as(pg_loss))
    return select(pg_loss, torch.cat(list(masks)))


def _pg_reducer(args: Any, batch: dict[str, Any], default: Reducer) -> Reducer:
    make = load_hook(args, "custom_pg_loss_reducer_function_path")
    if make is None:
        return default
    return make(batch["total_lengths"], batch["response_lengths"], batch["loss_masks"], args.calculate_per_token_loss)


def _token_mean(reducer: Reducer) -> Reducer:
    """The mean over trained tokens, for metrics; a reducer of somebody else's is used as it is."""
    return reducer.token_mean if isinstance(reducer, SumOfSampleMean) else reducer
