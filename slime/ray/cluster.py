"""Connecting to Ray: a running cluster where there is one, a local one otherwise."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

import ray

from slime.config import Args, ConfigError, Layout

# A process that waits in a collective costs no core, so a few per core still make progress; beyond that
# gloo's polling threads starve each other and steps take minutes.
PROCESSES_PER_CORE = 4


def check_local_cores(args: Args, layout: Layout, cores: int | None = None) -> None:
    """Raises ConfigError when a local CPU run would start more processes than this machine can turn over."""
    cores = cores or len(os.sched_getaffinity(0))
    if args.device == "cpu" and layout.processes > cores * PROCESSES_PER_CORE:
        trainers = layout.world_size + layout.critic_world_size
        raise ConfigError(
            f"layout: {trainers} trainer ranks and {layout.num_engines} engines are too many for {cores} cores (at "
            f"most {cores * PROCESSES_PER_CORE} processes); lower TP x PP x CP, --actor-num-gpus-per-node or "
            "--rollout-num-gpus, or give --ray-address of a cluster"
        )


@contextlib.contextmanager
def ray_session(args: Args, layout: Layout) -> Iterator[None]:
    """Ray for the length of the run. A local cluster is stopped at the end; a running one is only left."""
    address = args.ray_address or os.environ.get("RAY_ADDRESS")
    # Workers print what users must see through the driver; Ray's own deduplication would hide ranks.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    # Ray would SIGKILL a dying worker's direct children, and with them the reaper that ends an engine's whole tree.
    os.environ.setdefault("RAY_kill_child_processes_on_worker_exit", "false")
    # Ray starts workers at niceness 15: anything else on the machine would starve the trainer and the engines.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Modules that the driver can import (a user's hooks), its workers can import too.
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p and os.path.isdir(p))}}
    if address:
        ray.init(address=address, log_to_driver=True, logging_level=logging.ERROR, runtime_env=environment)
    else:
        check_local_cores(args, layout)
        ray.init(
            address="local",
            # Ray only counts: on CPU each rank claims one, whatever the cores; two more for the manager.
            num_cpus=max(os.cpu_count() or 1, layout.total_ranks + 2) if args.device == "cpu" else None,
            object_store_memory=512 * 1024**2 if args.device == "cpu" else None,
            include_dashboard=False,
            log_to_driver=True,
            logging_level=logging.ERROR,
            runtime_env=environment,
        )
    try:
        yield
    finally:
        ray.shutdown()
