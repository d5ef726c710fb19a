"""Placement groups: one bundle per device, in an order that keeps neighbours on one node."""

import dataclasses
import time
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.config import Args, ConfigError, Layout


@dataclasses.dataclass(frozen=True)
class Bundle:
    """One device: `index` is the bundle's number in its group, `gpu` the device id on its node (None on CPU)."""

    group: PlacementGroup
    index: int
    node_ip: str
    gpu: int | None

    def strategy(self) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(
            placement_group=self.group,
            placement_group_bundle_index=self.index,
            placement_group_capture_child_tasks=True,
        )


@dataclasses.dataclass(frozen=True)
class Placement:
    """Bundles of trainer ranks and critic ranks (in rank order) and of engine ranks (engine by engine); the same ones
    when colocated."""

    group: PlacementGroup
    trainer: list[Bundle]
    critic: list[Bundle]
    engines: list[Bundle]

    def remove(self) -> None:
        remove_placement_group(self.group)


def place(args: Args, layout: Layout) -> Placement:
    """Claims the run's devices from Ray. Raises ConfigError, after --placement-timeout, that says what is missing."""
    kind = "GPU" if args.device == "cuda" else "CPU"
    bundle = {"GPU": 1, "CPU": 1} if kind == "GPU" else {"CPU": 1}
    group = placement_group([bundle] * layout.total_ranks, strategy="PACK")
    _wait(group, layout.total_ranks, kind, args.placement_timeout)
    bundles = _sorted_bundles(group, layout.total_ranks, kind)
    trainer = bundles[: layout.world_size]
    start = 0 if layout.colocate_critic else layout.world_size
    critic = bundles[start : start + layout.critic_world_size]
    start = 0 if layout.colocate else layout.trained_devices
    engines = bundles[start : start + layout.num_engines * layout.engine_tp]
    if kind == "GPU":
        _check_nodes(args, layout, trainer + critic, engines)
    return Placement(group, trainer, critic, engines)


def _wait(group: PlacementGroup, count: int, kind: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not group.wait(timeout_seconds=min(5.0, max(0.1, deadline - time.monotonic()))):
        have = ray.cluster_resources().get(kind, 0)
        if time.monotonic() >= deadline:
            free = ray.available_resources().get(kind, 0)
            remove_placement_group(group)
            raise ConfigError(
                f"placement: the run needs {count} {kind}s; the Ray cluster has {have:g} on {len(alive_nodes())} "
                f"nodes, {free:g} of them free, and {count - free:g} did not come within {timeout:g} s "
                "(--placement-timeout). Add nodes, stop other jobs, or lower the layout"
            )


def alive_nodes() -> list[dict[str, Any]]:
    return [n for n in ray.nodes() if n["Alive"]]


@ray.remote
def _where() -> tuple[str, int | None]:
    gpus = ray.get_gpu_ids()
    return ray.util.get_node_ip_address(), int(gpus[0]) if gpus else None


def _sorted_bundles(group: PlacementGroup, count: int, kind: str) -> list[Bundle]:
    """Ray promises no order: sort by node and device, so that ranks of one node are neighbours."""
    asks = [
        _where.options(
            num_cpus=0 if kind == "GPU" else 1,
            num_gpus=1 if kind == "GPU" else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i),
        ).remote()
        for i in range(count)
    ]
    nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
    order = sorted(
        (Bundle(group, i, ip, gpu) for i, (ip, gpu) in enumerate(ray.get(asks))),
        key=lambda b: (_ip_key(b.node_ip), nodes[b.index], -1 if b.gpu is None else b.gpu, b.index),
    )
    return order


def _ip_key(ip: str) -> tuple[int, ...] | tuple[str]:
    parts = ip.split(".")
    return tuple(int(p) for p in parts) if all(p.isdigit() for p in parts) else (ip,)  # type: ignore[return-value]


def _check_nodes(args: Args, layout: Layout, trainer: list[Bundle], engines: list[Bundle]) -> None:
    """A tensor-parallel group or an engine that straddles nodes by accident would crawl over the network."""
    nodes = ray.util.placement_group_table(trainer[0].group)["bundles_to_node_id"]

    def straddles(part: list[Bundle]) -> bool:
        return len({nodes[b.index] for b in part}) > -(-len(part) // args.num_gpus_per_node)

    for what, size, bundles in (("tensor-parallel group", layout.tp, trainer), ("engine", layout.engine_tp, engines)):
        for start in range(0, len(bundles), size):
            if straddles(bundles[start : start + size]):
                ips = sorted({b.node_ip for b in bundles[start : start + size]})
                raise ConfigError(
                    f"placement: {what} of ranks {start}..{start + size - 1} is spread over nodes {', '.join(ips)}; "
                    f"free whole nodes of {args.num_gpus_per_node} GPUs, or set --num-gpus-per-node to what nodes have"
                )
