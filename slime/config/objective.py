"""Checks of what is trained: loss, advantages, importance weights, critic, teacher; part of `slime.config.validate`."""

from collections.abc import Iterator

from slime.config.algorithm import GROUP_ESTIMATORS
from slime.config.args import Args
from slime.config.critic import uses_critic
from slime.config.fields import flag_of
from slime.config.groups import FINE_TUNE
from slime.config.hf_config import HFConfig


def objective_problems(args: Args, hf: HFConfig | None) -> Iterator[str]:
    """A line per flag of the algorithm that cannot work, or contradicts another."""
    yield from _algorithm(args)
    yield from _critic(args)
    yield from _teacher(args, hf)


def _algorithm(args: Args) -> Iterator[str]:
    if args.use_tis and args.use_rollout_logprobs:
        yield (
            "--use-tis corrects the old policy's log-probs for the engine's, --use-rollout-logprobs takes the engine's "
            "as the old policy's: choose one"
        )
    if args.loss_type == "custom_loss" and not args.custom_loss_path:
        yield "--loss-type custom_loss needs --custom-loss-path package.module.function"
    if not 0 <= args.eps_clip < 1:
        yield f"--eps-clip {args.eps_clip} must be in [0, 1): the ratio is clipped to [1 - eps_clip, 1 + eps_clip_high]"
    if args.eps_clip_c is not None and args.eps_clip_c <= 1:
        yield f"--eps-clip-c {args.eps_clip_c} must be above 1: it bounds the loss of negative advantages (dual clip)"
    if args.eps_clip_c is not None and args.loss_type == "policy_loss":
        if args.advantage_estimator == "cispo":
            yield "--eps-clip-c has no effect with --advantage-estimator cispo, which clips a weight and not the loss"
        if args.advantage_estimator == "on_policy_distillation" and args.distill_topk:
            yield "--eps-clip-c has no effect: with --distill-topk distillation has no importance ratio"
    if args.use_kl_loss and args.kl_coef:
        yield "--use-kl-loss and --kl-coef both count the KL to the reference; choose one"
    if args.kl_loss_coef and not args.use_kl_loss:
        yield f"--kl-loss-coef {args.kl_loss_coef} has no effect without --use-kl-loss"
    if args.kl_coef and args.advantage_estimator not in ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        yield (
            f"--kl-coef {args.kl_coef} has no effect with --advantage-estimator {args.advantage_estimator} "
            "(its reward is one scalar per sample); use --use-kl-loss --kl-loss-coef"
        )
    if (
        args.n_samples_per_prompt == 1
        and args.advantage_estimator in GROUP_ESTIMATORS
        and not args.disable_rewards_normalization
        and args.loss_type == "policy_loss"
    ):
        yield (
            f"--advantage-estimator {args.advantage_estimator} compares samples of one prompt: with --n-samples-per-prompt 1 "
            "every advantage is 0; raise it or give --disable-rewards-normalization"
        )
    changed = (args.tis_level, args.tis_mode, args.tis_veto) != ("token", "clip", None)
    if changed and not (args.use_tis and not args.custom_tis_function_path):
        yield "--tis-level, --tis-mode and --tis-veto have no effect without --use-tis, or with a function of your own for it"
    if not 0 <= args.tis_clip_low <= args.tis_clip:
        yield f"--tis-clip-low {args.tis_clip_low} and --tis-clip {args.tis_clip}: needed 0 <= low <= high"
    if args.tis_veto is not None and not 0 < args.tis_veto < 1:
        yield f"--tis-veto {args.tis_veto} must be in (0, 1): it is a ratio that no sound token falls below"
    for name in ("use_tis", "use_rollout_logprobs", "custom_tis_function_path"):
        if getattr(args, name) and args.rollout_function_path == FINE_TUNE:
            flag = name.replace("_", "-")
            yield f"--{flag} needs the engine's log-probs, which the rollout function of fine-tuning does not have"
    one_step = args.global_batch_size >= args.rollout_batch_size * args.n_samples_per_prompt
    if args.use_opsm and one_step and not args.use_rollout_logprobs and args.rollout_function_path.startswith("slime."):
        yield (
            "--use-opsm has no effect with one optimizer step per rollout, whose policy is the old one; give "
            "--num-steps-per-rollout, or --use-rollout-logprobs to measure from the engine"
        )
    if args.advantage_estimator in ("maxrl", "tailrl") and args.rm_type == "dapo" and not args.custom_rm_path:
        yield f"--advantage-estimator {args.advantage_estimator} needs rewards in [0, 1], --rm-type dapo gives -1 and 1; use math"
    if args.loss_type == "value_loss":
        yield "--loss-type value_loss is the critic's own: give --advantage-estimator ppo, which trains one"
    if args.calculate_per_token_loss and args.custom_pg_loss_reducer_function_path:
        yield "--calculate-per-token-loss and --custom-pg-loss-reducer-function-path both define the aggregation; choose one"


def _critic(args: Args) -> Iterator[str]:
    if not uses_critic(args):
        for name in ("critic_load", "num_critic_only_steps", "colocate_critic"):
            if getattr(args, name):
                yield f"{flag_of(name)} has no effect: there is no critic without --advantage-estimator ppo"
        return
    replica = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    world = args.critic_num_nodes * args.critic_num_gpus_per_node
    if world % replica:
        yield (
            f"layout: {world} critic ranks (--critic-num-nodes {args.critic_num_nodes} x --critic-num-gpus-per-node "
            f"{args.critic_num_gpus_per_node}) are no multiple of TP x PP x CP = {replica}, which the critic shares"
        )
    actor = args.actor_num_nodes * args.actor_num_gpus_per_node
    if args.colocate_critic and world > actor:
        yield f"--colocate-critic: the critic has {world} ranks, the actor only {actor} devices to share"
    if args.value_clip <= 0:
        yield f"--value-clip {args.value_clip} must be above 0: at 0 the values could never move"
    if args.num_rollout is not None and args.num_critic_only_steps >= args.num_rollout:
        yield (
            f"--num-critic-only-steps {args.num_critic_only_steps}: the actor would never train in the "
            f"{args.num_rollout} rollouts of --num-rollout"
        )


def _teacher(args: Args, hf: HFConfig | None) -> Iterator[str]:
    distils = args.advantage_estimator == "on_policy_distillation"
    given = args.opd_teacher_load or args.opd_teacher_url
    by_user = (
        args.custom_generate_function_path or args.custom_rm_path or args.load_debug_rollout_data
        or args.custom_advantage_function_path or args.custom_convert_samples_to_train_data_path
        or not args.rollout_function_path.startswith("slime.")
    )  # fmt: skip
    if args.loss_type == "policy_loss" and (distils or args.opd_kl_coef) and not (given or by_user):
        what = "--advantage-estimator on_policy_distillation" if distils else f"--opd-kl-coef {args.opd_kl_coef}"
        yield f"{what} needs a teacher: --opd-teacher-load, --opd-teacher-url, or Sample.teacher_log_probs by your hooks"
    if args.opd_teacher_load and args.opd_teacher_url:
        yield "--opd-teacher-load and --opd-teacher-url are two teachers: choose one"
    if given and args.loss_type == "policy_loss" and not (distils or args.opd_kl_coef or by_user):
        yield "a teacher has no effect without --advantage-estimator on_policy_distillation or --opd-kl-coef"
    if distils and args.opd_kl_coef:
        yield "--opd-kl-coef adds distillation to another estimator; on_policy_distillation is nothing else already"
    k = args.distill_topk
    if k is not None and (k < 1 or (hf is not None and k > hf.vocab_size)):
        yield f"--distill-topk {k} must be from 1 to the vocabulary{'' if hf is None else f' of {hf.vocab_size}'}"
    if k is not None and args.loss_type == "policy_loss" and not (distils or args.opd_kl_coef):
        yield f"--distill-topk {k} has no effect without --advantage-estimator on_policy_distillation or --opd-kl-coef"
    for name in ("use_tis", "use_opsm"):
        if k is not None and distils and getattr(args, name):
            yield f"--{name.replace('_', '-')} has no effect: with --distill-topk distillation has no importance ratio"
    if args.opd_teacher_url and args.rollout_temperature != 1:
        yield (
            f"--opd-teacher-url: engines score at temperature 1, the student at --rollout-temperature "
            f"{args.rollout_temperature}: the difference would be taken for a lesson; use 1, or --opd-teacher-load"
        )
