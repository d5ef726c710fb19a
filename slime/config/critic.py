"""The critic of --advantage-estimator ppo is a trainer like the actor's, with other flags: these."""

from slime.config.args import Args

CRITIC_FOLDER = "critic"  # its checkpoints, in the folder of the actor's


def uses_critic(args: Args) -> bool:
    """Whether the run trains a value model beside the actor."""
    return args.advantage_estimator == "ppo" and args.loss_type in ("policy_loss", "custom_loss")


def critic_args(args: Args) -> Args:
    """The critic's flags, from the run's derived ones: its own ranks, learning rate and loss, none of the policy's."""
    return args.replace(
        actor_num_nodes=args.critic_num_nodes,
        actor_num_gpus_per_node=args.critic_num_gpus_per_node,
        lr=args.critic_lr,
        loss_type="value_loss",
        save=f"{args.save}/{CRITIC_FOLDER}" if args.save else None,
        # Complete before the actor's begins, which is the one that counts; and removed after it (MegatronCritic.save).
        async_save=False,
        keep_last=None,
        num_critic_only_steps=0,
        kl_coef=0.0,
        use_kl_loss=False,
        opd_teacher_load=None,
        opd_kl_coef=0.0,
        distill_topk=None,
        custom_loss_path=None,
        # Hooks into the training are the actor's: they would find no log-probs here.
        custom_megatron_before_log_prob_hook_path=None,
        custom_megatron_before_train_step_hook_path=None,
        rollout_data_postprocess_path=None,
    )
