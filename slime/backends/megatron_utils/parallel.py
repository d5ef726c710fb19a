"""Process groups of the trainer: torch.distributed, Megatron's parallel state, seeds; and who a rank is in them."""

import dataclasses
import datetime
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel

from slime.backends.megatron_utils import device
from slime.config.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class ParallelRank:
    """Where this process stands. Sizes and ranks of tensor, pipeline, context and data parallelism.

    is_last_stage: holds the head, so it computes log-probs and losses. vp_size: model chunks per pipeline rank.
    is_metrics_rank: exactly one rank of the world; it reports.
    """

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    pp_size: int
    vp_size: int
    cp_rank: int
    cp_size: int
    dp_rank: int
    dp_size: int
    is_last_stage: bool
    is_metrics_rank: bool


def data_parallel_size(args: Any, world_size: int) -> int:
    """Ranks that see different samples. Raises ConfigError when the layout does not divide the world."""
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    if world_size % model:
        raise ConfigError(
            f"{world_size} trainer ranks cannot hold tensor {args.tensor_model_parallel_size} x pipeline "
            f"{args.pipeline_model_parallel_size} x context {args.context_parallel_size} = {model} ranks per replica; "
            "choose --actor-num-nodes x --actor-num-gpus-per-node as a multiple of it"
        )
    return world_size // model


def virtual_pipeline_size(args: Any, num_layers: int) -> int | None:
    """Model chunks per pipeline rank under --num-layers-per-virtual-pipeline-stage; None without it."""
    layers = args.num_layers_per_virtual_pipeline_stage
    pp = args.pipeline_model_parallel_size
    if layers is None:
        return None
    if num_layers % (pp * layers):
        raise ConfigError(
            f"--num-layers-per-virtual-pipeline-stage {layers} must divide {num_layers} layers / {pp} stages"
        )
    if pp < 3:
        # With two stages each is the other's neighbour on both sides, and Megatron's exchange of packed lengths
        # would mix up the two directions.
        raise ConfigError("--num-layers-per-virtual-pipeline-stage needs --pipeline-model-parallel-size of at least 3")
    chunks = num_layers // pp // layers
    return chunks if chunks > 1 else None


def init_parallel(
    args: Any, rank: int, world_size: int, master_addr: str, master_port: int, num_layers: int
) -> ParallelRank:
    """Joins the trainer's process group, builds Megatron's groups and seeds this rank.

    Every rank of the trainer must call it. Raises ConfigError for an impossible layout, before any connection.
    """
    data_parallel_size(args, world_size)
    vp_size = virtual_pipeline_size(args, num_layers)
    ranks_on_node = min(world_size, args.actor_num_gpus_per_node or world_size)
    here = device.bind_rank(rank % ranks_on_node, ranks_on_node)
    minutes = args.distributed_timeout_minutes
    options: dict[str, Any] = {"device_id": here} if here.type == "cuda" else {}
    if not dist.is_initialized():
        dist.init_process_group(
            backend=device.backend(),
            init_method=f"tcp://{master_addr}:{master_port}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(minutes=minutes),
            **options,
        )
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=vp_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        distributed_timeout_minutes=max(1, round(minutes)),
    )
    seed_rank(args.seed)
    return this_rank()


def seed_rank(seed: int) -> None:
    """Seeds python, numpy, torch and Megatron's generators; each pipeline stage gets its own seed."""
    seed += 100 * mpu.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def this_rank() -> ParallelRank:
    """Reads Megatron's parallel state."""
    last = mpu.is_pipeline_last_stage(ignore_virtual=True)
    tp_rank, cp_rank, dp_rank = (
        mpu.get_tensor_model_parallel_rank(), mpu.get_context_parallel_rank(), mpu.get_data_parallel_rank(),
    )  # fmt: skip
    return ParallelRank(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tp_rank=tp_rank,
        tp_size=mpu.get_tensor_model_parallel_world_size(),
        pp_size=mpu.get_pipeline_model_parallel_world_size(),
        vp_size=mpu.get_virtual_pipeline_model_parallel_world_size() or 1,
        cp_rank=cp_rank,
        cp_size=mpu.get_context_parallel_world_size(),
        dp_rank=dp_rank,
        dp_size=mpu.get_data_parallel_world_size(),
        is_last_stage=last,
        is_metrics_rank=last and tp_rank == cp_rank == dp_rank == 0,
    )


def destroy_parallel() -> None:
    """Leaves all process groups; for tests and a clean end."""
    mpu.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
