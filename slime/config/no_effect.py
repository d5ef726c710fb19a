"""Flags that nothing would read beside the others: refused, so that nobody believes in them."""

from collections.abc import Iterator

from slime.config.algorithm import STD_ESTIMATORS
from slime.config.args import Args
from slime.config.fields import flag_of

_POLICY_ONLY = (
    "use_kl_loss", "kl_coef", "entropy_coef", "normalize_advantages", "eps_clip_c", "use_opsm", "use_unbiased_kl",
    "disable_grpo_std_normalization", "disable_rewards_normalization",
)  # fmt: skip
_RETURNS = ("ppo", "reinforce_plus_plus")  # estimators that discount


def flags_without_effect(args: Args) -> Iterator[str]:
    """A line per flag of derived `args` that is given and would not be read. Hooks may read any flag, so flags of the
    algorithm are left alone where a hook that could is given."""
    for name, needed in _needs(args):
        yield f"{flag_of(name)} has no effect without {needed}"
    if args.micro_batch_size > 1 and args.use_dynamic_batch_size:
        yield (
            f"--micro-batch-size {args.micro_batch_size} has no effect: micro-batches are packed by tokens, up to "
            "--max-tokens-per-gpu; for a number of samples give --no-use-dynamic-batch-size"
        )
    if args.lr_warmup_iters and args.lr_warmup_fraction is not None:
        yield "--lr-warmup-iters and --lr-warmup-fraction both say how long the warm-up is; choose one"
    if args.num_epoch is not None and args.num_rollout is not None:
        yield f"--num-epoch {args.num_epoch} has no effect: --num-rollout {args.num_rollout} is given; choose one"
    # On a laptop a script for GPUs should run as it is, so --device cpu may say which of their kernels it would take.
    if args.attention_backend != "auto" and args.device == "cuda" and args.transformer_impl == "local":
        yield f"--attention-backend {args.attention_backend} has no effect with --transformer-impl local; leave it out"
    if args.min_lr > args.lr:
        yield f"--min-lr {args.min_lr} has no effect: it is above --lr {args.lr}"


def _needs(args: Args) -> Iterator[tuple[str, str]]:
    """(flag that is set, what it needs and lacks)."""
    if not args.save:
        for name in ("save_interval", "async_save", "keep_last"):
            if getattr(args, name):
                yield name, "--save"
    if args.lr_decay_style == "constant":
        if args.min_lr:
            yield "min_lr", "--lr-decay-style: a constant learning rate has no decay"
        if args.lr_decay_iters is not None and args.lr_warmup_fraction is None:
            yield "lr_decay_iters", "--lr-decay-style: a constant learning rate has no decay"
    if args.finetune and not args.load:
        yield "finetune", "--load (the first weights are those of --hf-checkpoint anyway)"
    if args.ref_load != args.hf_checkpoint and not (args.use_kl_loss or args.kl_coef):
        yield "ref_load", "--use-kl-loss or --kl-coef; the first weights are those of --load, else of --hf-checkpoint"
    if args.eval_prompt_data and not args.eval_interval:
        yield "eval_prompt_data", "--eval-interval"
    if args.apply_chat_template_kwargs and not args.apply_chat_template and args.loss_type != "sft_loss":
        yield "apply_chat_template_kwargs", "--apply-chat-template"
    if args.group_rm and not args.custom_rm_path:
        yield "group_rm", "--custom-rm-path: built-in rewards see one sample"
    if args.mask_offpolicy_in_partial_rollout and not args.partial_rollout:
        yield "mask_offpolicy_in_partial_rollout", "--partial-rollout"
    if args.recompute_granularity != "full":
        for name in ("recompute_method", "recompute_num_layers"):
            if getattr(args, name):
                yield name, "--recompute-granularity full"
    if args.custom_loss_path or args.custom_advantage_function_path or args.rollout_data_postprocess_path:
        return
    if args.loss_type == "sft_loss":
        for name in _POLICY_ONLY:
            if getattr(args, name):
                yield name, "--loss-type policy_loss: fine-tuning maximises the likelihood of its tokens, nothing else"
        return
    if args.gamma != 1 and args.advantage_estimator not in _RETURNS:
        yield "gamma", f"--advantage-estimator {' or '.join(_RETURNS)}"
    if args.lambd != 1 and args.advantage_estimator != "ppo":
        yield "lambd", "--advantage-estimator ppo"
    by_user = args.custom_reward_post_process_path or args.custom_convert_samples_to_train_data_path
    divides = args.advantage_estimator in STD_ESTIMATORS and not args.disable_rewards_normalization
    if args.disable_grpo_std_normalization and not divides and not by_user:
        names = f"--advantage-estimator {', '.join(STD_ESTIMATORS)}"
        yield "disable_grpo_std_normalization", f"{names}, and not with --disable-rewards-normalization"
    if args.use_unbiased_kl and not args.use_kl_loss:
        yield "use_unbiased_kl", "--use-kl-loss"
    if not (args.use_tis or args.custom_tis_function_path):
        for name, default in (("tis_clip", 2.0), ("tis_clip_low", 0.0)):
            if getattr(args, name) != default:
                yield name, "--use-tis"
