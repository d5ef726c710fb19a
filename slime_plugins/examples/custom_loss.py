"""An example for --custom-loss-path: GRPO's clipped loss with each token weighted by its entropy. docs/custom_loss.md

    bash scripts/run_tiny_cpu.sh --custom-loss-path slime_plugins.examples.custom_loss.loss_function

It uses public names only. `entropy_power` may be set in a YAML file given by --custom-config-path; with 0.0 the loss is
the built-in one.
"""

import torch

from slime.backends.megatron_utils.loss import get_log_probs_and_entropy
from slime.utils.ppo_utils import compute_approx_kl, compute_policy_loss, select


def loss_function(args, batch, logits, sum_of_sample_mean):
    """Returns (loss, metrics); logits are [1, T, V / tp], float32, already divided by the rollout temperature."""
    _, out = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
    )
    # Per-token columns of all samples, one after the other. Masked tokens become 0 before any exp.
    mask = torch.cat(batch["loss_masks"])
    log_probs = select(torch.cat(out["log_probs"]), mask)
    old_log_probs = select(torch.cat(batch["log_probs"]), mask)
    advantages = select(torch.cat(batch["advantages"]), mask)
    entropy = select(torch.cat(out["entropy"]), mask).detach()

    ppo_kl = old_log_probs - log_probs
    token_loss, clipped = compute_policy_loss(ppo_kl, advantages, args.eps_clip, args.eps_clip_high, args.eps_clip_c)
    weight = (1e-6 + entropy) ** getattr(args, "entropy_power", 0.0)
    loss = sum_of_sample_mean(token_loss * weight)

    metrics = {
        "pg_loss": loss,
        "pg_clipfrac": sum_of_sample_mean(clipped),
        "ppo_kl": sum_of_sample_mean(ppo_kl),
        "entropy": sum_of_sample_mean(entropy),
    }
    if args.use_kl_loss:
        ref_log_probs = select(torch.cat(batch["ref_log_probs"]), mask)
        metrics["kl_loss"] = sum_of_sample_mean(compute_approx_kl(log_probs, ref_log_probs, args.kl_loss_type))
        loss = loss + args.kl_loss_coef * metrics["kl_loss"]
    return loss, metrics
