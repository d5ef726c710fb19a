"""Who runs where, as arithmetic: trainer ranks, engines, and how a rollout's samples become optimizer steps."""

import dataclasses
from collections.abc import Iterator

from slime.config.args import Args
from slime.config.critic import uses_critic
from slime.config.hf_config import HFConfig


@dataclasses.dataclass(frozen=True)
class Layout:
    """Counts only. world_size: trainer ranks, 0 with --debug-rollout-only. engine_tp: ranks of one engine, which are
    its own unless colocated. critic_world_size: ranks of the critic, 0 without one; TP, PP and CP are the actor's."""

    world_size: int
    tp: int
    pp: int
    cp: int
    ep: int
    dp: int
    num_engines: int
    engine_tp: int
    colocate: bool
    samples_per_rollout: int
    global_batch_size: int
    steps_per_rollout: int
    critic_world_size: int
    colocate_critic: bool

    @property
    def critic_dp(self) -> int:
        return self.critic_world_size // (self.tp * self.pp * self.cp)

    @property
    def trained_devices(self) -> int:
        """Devices of actor and critic together."""
        if self.colocate_critic:
            return max(self.world_size, self.critic_world_size)
        return self.world_size + self.critic_world_size

    @property
    def last_step_samples(self) -> int:
        """Samples of the last optimizer step of a rollout; smaller than the others when the division has a rest."""
        return self.samples_per_rollout - (self.steps_per_rollout - 1) * self.global_batch_size

    @property
    def processes(self) -> int:
        """Processes that compute, whatever devices they share."""
        return self.world_size + self.critic_world_size + self.num_engines * self.engine_tp

    @property
    def total_ranks(self) -> int:
        """Devices (GPUs, or CPU processes) that the run claims."""
        engines = self.num_engines * self.engine_tp
        return max(self.trained_devices, engines) if self.colocate else self.trained_devices + engines


def make_layout(args: Args) -> Layout:
    """The layout of derived and validated args."""
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    world = 0 if args.debug_rollout_only else args.actor_num_nodes * args.actor_num_gpus_per_node
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    engines = 0 if args.debug_train_only else args.rollout_num_gpus // args.rollout_num_gpus_per_engine
    return Layout(
        world_size=world,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=args.expert_model_parallel_size,
        dp=max(1, world // (tp * pp * cp)),
        num_engines=engines,
        engine_tp=args.rollout_num_gpus_per_engine,
        colocate=args.colocate,
        samples_per_rollout=samples,
        global_batch_size=args.global_batch_size,
        steps_per_rollout=-(-samples // args.global_batch_size),
        critic_world_size=args.critic_num_nodes * args.critic_num_gpus_per_node if world and uses_critic(args) else 0,
        colocate_critic=args.colocate_critic,
    )


def cut_faults(args: Args, hf: HFConfig) -> Iterator[str]:
    """Why the model cannot be cut over ranks as the flags say, a line each."""
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    of_tp, where = f"--tensor-model-parallel-size {tp}", f"({args.hf_checkpoint}/config.json)"
    groups, etp = hf.num_key_value_heads, args.expert_tensor_parallel_size or tp
    if hf.num_attention_heads % tp:
        yield f"{of_tp} does not divide the model's num_attention_heads {hf.num_attention_heads} {where}"
    elif groups % tp and tp % groups:
        yield f"{of_tp} does not divide the model's num_key_value_heads {groups}, and is no multiple of it {where}"
    if hf.dense_layers and hf.intermediate_size % tp:
        yield f"{of_tp} does not divide the model's intermediate_size {hf.intermediate_size} {where}"
    if hf.moe_layers and (hf.moe_intermediate_size or 0) % etp:
        yield f"--expert-tensor-parallel-size {etp} does not divide the experts' {hf.moe_intermediate_size} {where}"
    if hf.moe_layers and (hf.shared_intermediate_size or 0) % tp:
        yield f"{of_tp} does not divide the {hf.shared_intermediate_size} of the experts of all tokens {where}"
    yield from share_faults(hf, pp, args.expert_model_parallel_size)
    if cp > 1 and args.allgather_cp and hf.latent:
        yield f"--allgather-cp: {hf.model_type} has latent attention, which is built for the zigzag cut only"


def share_faults(hf: HFConfig, pp: int, ep: int) -> Iterator[str]:
    """Why the model's layers and experts cannot be shared out whole, a line each."""
    if hf.num_layers % pp:
        yield f"--pipeline-model-parallel-size {pp} does not divide the model's {hf.num_layers} layers"
    if ep > 1 and not hf.num_experts:
        yield f"--expert-model-parallel-size {ep}: the model has no experts"
    elif hf.num_experts and hf.num_experts % ep:
        yield f"--expert-model-parallel-size {ep} does not divide the model's {hf.num_experts} experts"


def due(interval: int | None, rollout_id: int, last: bool) -> bool:
    """Whether something with this interval happens after this rollout. 0: never; None: after the last one only."""
    if interval == 0:
        return False
    return last or (interval is not None and (rollout_id + 1) % interval == 0)
