"""The plan that --dry-run prints: resolved flags, ranks, engines and the arithmetic of a batch. Text only."""

import dataclasses

from slime.config.args import Args
from slime.config.fields import default_of, flag_of
from slime.config.groups import GROUPS
from slime.config.hf_config import HFConfig
from slime.config.layout import Layout


def format_plan(args: Args, layout: Layout, hf: HFConfig) -> str:
    """The whole plan as text; the launcher's DRY_RUN=1 and `train.py --dry-run` print it."""
    return "\n\n".join(
        [_flags(args), _model(args, layout, hf), _ranks(args, layout), _engines(args, layout), _batch(args, layout)]
    )


def _flags(args: Args) -> str:
    lines = ["Flags that differ from their defaults (derived ones included)"]
    for cls in GROUPS:
        shown = []
        for f in dataclasses.fields(cls):
            value = getattr(args, f.name)
            if value != default_of(f):
                shown.append(f"    {flag_of(f.name)} {value}")
        if shown:
            lines += [f"  {cls.group_title}", *shown]
    for prefix, options in (("sglang", args.sglang), ("router", args.router)):
        lines += [f"    {flag_of(f'{prefix}_{k}')} {v}" for k, v in options.items()]
    return "\n".join(lines)


def _model(args: Args, layout: Layout, hf: HFConfig) -> str:
    total = hf.num_parameters
    per_rank = total / (layout.tp * layout.pp)
    experts = f", {hf.num_experts} experts" if hf.num_experts else ""
    return (
        f"Model ({args.hf_checkpoint}/config.json): {hf.model_type}, {hf.num_layers} layers, hidden {hf.hidden_size}, "
        f"{hf.num_attention_heads}/{hf.num_key_value_heads} heads of {hf.head_dim}, MLP {hf.intermediate_size}{experts}, "
        f"vocabulary {hf.vocab_size}\n"
        f"  about {_human(total)} parameters, {_human(per_rank)} on each trainer rank "
        f"({hf.num_layers // layout.pp} layers a stage), {_human(total / layout.engine_tp)} on each engine rank"
    )


def rank_coordinates(layout: Layout, rank: int) -> tuple[int, int, int, int]:
    """(tp, cp, dp, pp) of a trainer rank, in Megatron's default order tp-cp-ep-dp-pp (fastest first)."""
    tp, rest = rank % layout.tp, rank // layout.tp
    cp, rest = rest % layout.cp, rest // layout.cp
    return tp, cp, rest % layout.dp, rest // layout.dp


def _ranks(args: Args, layout: Layout) -> str:
    per_node = args.actor_num_gpus_per_node
    lines = [
        f"Trainer: {layout.world_size} ranks on {args.actor_num_nodes} node(s), TP {layout.tp} x CP {layout.cp} x DP {layout.dp} "
        f"x PP {layout.pp}" + (f", EP {layout.ep}" if layout.ep > 1 else "")
    ]
    for node in range(args.actor_num_nodes):
        cells = []
        for local in range(per_node):
            tp, cp, dp, pp = rank_coordinates(layout, node * per_node + local)
            cells.append(f"{node * per_node + local}:t{tp}" + (f"c{cp}" if layout.cp > 1 else "") + f"d{dp}p{pp}")
        lines.append(f"  node {node}: " + "  ".join(cells))
    if layout.critic_world_size:
        where = "on the actor's devices" if layout.colocate_critic else "on devices of its own"
        lines.append(
            f"Critic: {layout.critic_world_size} ranks {where}, the actor's layout x DP {layout.critic_dp}, "
            f"lr {args.critic_lr:g}"
            + (f", alone in the first {args.num_critic_only_steps} rollouts" if args.num_critic_only_steps else "")
        )
    if layout.tp > per_node:
        lines.append(f"  note: TP {layout.tp} is wider than a node of {per_node}: its collectives cross the network")
    return "\n".join(lines)


def _engines(args: Args, layout: Layout) -> str:
    if not layout.num_engines:
        return "Engines: none (this run does not generate)"
    where = "on the trainer's devices (--colocate)" if layout.colocate else "on devices of their own"
    lines = [f"Engines: {layout.num_engines} x TP {layout.engine_tp} {where}, {layout.total_ranks} devices in all"]
    if args.device == "cuda":
        first = 0 if layout.colocate else layout.trained_devices
        for i in range(layout.num_engines):
            start = first + i * layout.engine_tp
            end = start + layout.engine_tp - 1
            nodes = sorted({start // args.num_gpus_per_node, end // args.num_gpus_per_node})
            lines.append(f"  engine {i}: devices {start}..{end}, node {'-'.join(map(str, nodes))}")
    return "\n".join(lines)


def _batch(args: Args, layout: Layout) -> str:
    lines = [
        f"Batch: {args.rollout_batch_size} prompts x {args.n_samples_per_prompt} samples = {layout.samples_per_rollout} samples a rollout",
        f"  {layout.steps_per_rollout} optimizer step(s) of {layout.global_batch_size} samples"
        + (f", the last of {layout.last_step_samples}" if layout.last_step_samples != layout.global_batch_size else ""),
        f"  {layout.global_batch_size / layout.dp:g} samples per data-parallel rank and step (uneven shares weigh the same per sample)",
    ]
    if args.use_dynamic_batch_size:
        lines.append(
            f"  micro-batches of up to {args.max_tokens_per_gpu * layout.cp} tokens; with responses of {args.rollout_max_response_len} "
            f"tokens at most {_tokens(args, layout)} tokens per rank and step"
        )
    else:
        lines.append(f"  micro-batches of {args.micro_batch_size} sample(s)")
    if args.num_rollout:
        lines.append(
            f"  {args.num_rollout} rollouts, {args.num_rollout * layout.steps_per_rollout} optimizer steps in all"
        )
    return "\n".join(lines)


def _tokens(args: Args, layout: Layout) -> str:
    longest = min(args.rollout_max_context_len, (args.rollout_max_prompt_len or 0) + args.rollout_max_response_len)
    return _human(layout.global_batch_size / layout.dp * longest)


def _human(n: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.3g}{unit}"
    return f"{n:g}"
