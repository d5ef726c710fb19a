"""Flags of the loss, of advantages and of what is distilled; part of `slime.config.groups`."""

from slime.config.fields import arg, group

# Advantage estimators that compare a sample with its siblings (the others take the reward as it is), and those of them
# that divide by the standard deviation of the group.
GROUP_ESTIMATORS = ("grpo", "gspo", "cispo", "rloo", "maxrl", "tailrl", "reinforce_plus_plus_baseline")
STD_ESTIMATORS = ("grpo", "gspo", "cispo")


@group("algorithm")
class AlgorithmArgs:
    loss_type: str = arg(
        "policy_loss", "what is trained", choices=["policy_loss", "sft_loss", "custom_loss", "value_loss"]
    )
    custom_loss_path: str | None = arg(
        None,
        "your loss; implies --loss-type custom_loss (docs/custom_loss.md)",
        hook="args, batch, logits, sum_of_sample_mean",
        aliases=["--custom-loss-function-path"],
    )
    custom_advantage_function_path: str | None = arg(
        None, "sets advantages and returns in place", hook="args, rollout_data"
    )
    custom_tis_function_path: str | None = arg(
        None,
        "importance weights between engine and trainer",
        hook="*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths",
    )
    custom_pg_loss_reducer_function_path: str | None = arg(
        None,
        "aggregation of the policy loss",
        hook="total_lengths, response_lengths, loss_masks, calculate_per_token_loss",
    )
    custom_megatron_before_log_prob_hook_path: str | None = arg(
        None, "called before a log-prob pass", hook="args, model, store_prefix"
    )
    custom_megatron_before_train_step_hook_path: str | None = arg(
        None, "called before an optimizer step", hook="args, rollout_id, step_id, model, optimizer, opt_param_scheduler"
    )
    rollout_data_postprocess_path: str | None = arg(
        None, "sees the rank's data after log-probs and advantages", hook="args, rollout_id, rollout_data"
    )
    advantage_estimator: str = arg(
        "grpo",
        "how rewards become advantages",
        choices=[
            "grpo",
            "gspo",
            "cispo",
            "rloo",
            "maxrl",
            "tailrl",
            "ppo",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "on_policy_distillation",
        ],
    )
    eps_clip: float = arg(0.2, "lower clip of the ratio: 1 - eps_clip")
    eps_clip_high: float | None = arg(0.28, "upper clip of the ratio: 1 + eps_clip_high", limits="[0, inf)")
    eps_clip_c: float | None = arg(None, "dual clip for negative advantages, above 1")
    value_clip: float = arg(0.2, "clip of the value loss")
    gamma: float = arg(1.0, "discount", limits="[0, 1]")
    lambd: float = arg(1.0, "lambda of GAE", limits="[0, 1]")
    kl_coef: float = arg(0.0, "KL to the reference inside the reward", limits="[0, inf)")
    use_kl_loss: bool = arg(False, "KL to the reference as a loss term; at --kl-loss-coef 0 only measured")
    kl_loss_coef: float = arg(0.0, "weight of the KL loss", limits="[0, inf)")
    kl_loss_type: str = arg(
        "low_var_kl", "estimator of the KL", choices=["k1", "k2", "k3", "low_var_kl"], aliases=["--kl-type"]
    )
    use_unbiased_kl: bool = arg(False, "weight the KL estimate by the importance ratio")
    entropy_coef: float = arg(0.0, "weight of the entropy bonus")
    normalize_advantages: bool = arg(False, "whiten advantages over all trained tokens")
    disable_grpo_std_normalization: bool = arg(False, "centre rewards of a group only (Dr.GRPO)")
    disable_rewards_normalization: bool = arg(False, "use raw rewards")
    calculate_per_token_loss: bool = arg(False, "average over all trained tokens of the step instead of per sample")
    use_rollout_logprobs: bool = arg(False, "take the engine's log-probs as the old policy's")
    use_tis: bool = arg(False, "weigh tokens by their importance ratio of trainer to engine, within bounds")
    tis_clip: float = arg(2.0, "upper bound of the TIS weight")
    tis_clip_low: float = arg(0.0, "lower bound of the TIS weight")
    tis_level: str = arg(
        "token",
        "ratio of: each token; the whole response; the geometric mean over the response",
        choices=["token", "sequence", "geometric"],
    )
    tis_mode: str = arg(
        "clip",
        "clip into the bounds; truncate at the upper one; mask: 0 outside them; reject: 1 inside, 0 outside",
        choices=["truncate", "clip", "mask", "reject"],
    )
    tis_veto: float | None = arg(None, "drop a response that has a token with a ratio below this")
    use_opsm: bool = arg(False, "off-policy sequence masking: drop bad responses that the policy has moved away from")
    opsm_delta: float = arg(
        1e-4, "mean log-ratio of old to current policy from which --use-opsm drops a response", limits="[0, inf)"
    )
    ref_load: str | None = arg(None, "reference model: Hugging Face folder or checkpoint; unset: --hf-checkpoint")
    opd_teacher_load: str | None = arg(
        None, "teacher of on-policy distillation, of the model's architecture: Hugging Face folder or checkpoint"
    )
    opd_teacher_url: str | None = arg(
        None, "teacher of on-policy distillation of any size: /generate of a SGLang engine with the same tokenizer"
    )
    opd_kl_coef: float = arg(
        0.0, "weight of the distillation term added to the advantages of another estimator", limits="[0, inf)"
    )
    distill_topk: int | None = arg(
        None,
        "distil over so many of the teacher's most likely tokens and one bin for all others, instead of over the "
        "sampled token",
    )
    num_critic_only_steps: int = arg(0, "rollouts at the start that train the critic only", limits="[0, inf)")
    critic_lr: float | None = arg(None, "learning rate of the critic; unset: --lr", limits="[0, inf)")
    critic_load: str | None = arg(
        None,
        "first weights of the critic: a checkpoint (of an actor: with a fresh head) or a Hugging Face folder; "
        "unset: the actor's first weights with a fresh head. A resumed run takes the critic out of --load",
    )
    seed: int = arg(1234, "seed of initialisation and dropout", limits="[0, 4294967295]")
