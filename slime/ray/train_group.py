"""`TrainGroup`: the trainer's ranks as Ray actors, driven together."""

import dataclasses
import os
import warnings
from collections.abc import Sequence
from typing import Any

import ray

from slime.config import Args, Layout
from slime.ray.placement import Bundle
from slime.utils.threads import cpu_env


@dataclasses.dataclass(frozen=True)
class RankInfo:
    """What the driver needs to know of a rank once it is up."""

    start_rollout_id: int
    dp_rank: int
    is_metrics_rank: bool


class _Rank:
    """One trainer rank. Imports the backend inside the worker, so that the driver stays light."""

    def __init__(self, rank: int, world_size: int):
        self._rank, self._world_size = rank, world_size
        self._actor: Any = None
        # What Megatron and torch say about optional packages and their own deprecations is no user's business.
        for module in (r"megatron\.", r"torch\.distributed\.", r"torch\.autograd\."):
            warnings.filterwarnings("ignore", module=module)

    def address(self) -> tuple[str, int]:
        from slime.utils.net import free_port

        return ray.util.get_node_ip_address(), free_port()

    def init(self, args: Args, master: tuple[str, int], role: str) -> RankInfo:
        from slime.backends.megatron_utils.actor import MegatronTrainActor
        from slime.backends.megatron_utils.critic import MegatronCritic

        kind = MegatronCritic if role == "critic" else MegatronTrainActor
        self._actor = kind(self._rank, self._world_size, *master)
        info = self._actor.init(args)
        # A class of the driver's own: unpickling the backend's would import Megatron there.
        return RankInfo(info.start_rollout_id, info.dp_rank, info.is_metrics_rank)

    def train(self, rollout_id: int, refs: list[Any], dp_rank: int) -> Any:
        # A list of one reference is not resolved by Ray, so each rank fetches only its own share.
        return self._actor.train(rollout_id, ray.get(refs[dp_rank]))

    def prepare(self, rollout_id: int, refs: list[Any], dp_rank: int, given: list[Any]) -> list[Any]:
        """References of what this rank speaks for, none or one; the driver need not see the data itself."""
        out = self._actor.prepare(rollout_id, ray.get(refs[dp_rank]), _join(given))
        return [] if out is None else [ray.put(out)]

    def train_prepared(self, rollout_id: int, given: list[Any]) -> Any:
        return self._actor.train_prepared(rollout_id, _join(given))

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._actor, name)(*args, **kwargs)

    def pid(self) -> int:
        return os.getpid()


_RankActor: Any = ray.remote(_Rank)


def _join(given: list[Any]) -> dict[int, Any] | None:
    """What the ranks of another group computed by sample, in one dict; None where there is none."""
    return {sample: value for part in ray.get(given) for sample, value in part.items()} if given else None


class TrainGroup:
    """All ranks of one model. Each method returns when every rank is done, and raises what any rank raised."""

    def __init__(self, args: Args, layout: Layout, bundles: list[Bundle], role: str = "actor"):
        self._args, self._layout, self._role = args, layout, role
        shared = layout.colocate or (layout.colocate_critic and layout.critic_world_size > 0)
        share = 0.4 if shared else 1.0  # actor, critic and engine (0.2) may meet on one device
        cuda = args.device == "cuda"
        self.ranks = [
            _RankActor.options(
                num_cpus=share,
                num_gpus=share if cuda else 0,
                scheduling_strategy=bundle.strategy(),
                runtime_env={"env_vars": _env(args, layout)},
            ).remote(rank, len(bundles))
            for rank, bundle in enumerate(bundles)
        ]
        self._infos: list[RankInfo] = []
        self._connected: tuple[list[Any], int] | None = None

    def init(self) -> int:
        """Builds and loads the model on every rank; returns the first rollout id (after a resume, the next one)."""
        return init_groups(self) if self.ranks else self._args.start_rollout_id or 0

    def start_init(self) -> list[Any]:
        master = ray.get(self.ranks[0].address.remote())
        return [r.init.remote(self._args, master, self._role) for r in self.ranks]

    def settle_init(self, infos: list[RankInfo]) -> None:
        self._infos = infos

    def train(self, rollout_id: int, rollout: Any) -> dict[str, float]:
        """One rollout's optimizer steps. rollout: RolloutOutput, whose refs are one RankData per data-parallel rank."""
        ranks = zip(self.ranks, self._infos, strict=True)
        jobs = [rank.train.remote(rollout_id, rollout.refs, info.dp_rank) for rank, info in ranks]
        get_all(jobs)
        return self.metrics_of(jobs)

    def prepare(self, rollout_id: int, refs: list[Any], given: Sequence[Any] = ()) -> list[Any]:
        """What comes before a rollout's optimizer steps (values; or advantages and returns).

        given, and what is returned: references of dicts by sample, as `MegatronTrainActor.prepare` says.
        """
        ranks = zip(self.ranks, self._infos, strict=True)
        jobs = [rank.prepare.remote(rollout_id, refs, info.dp_rank, list(given)) for rank, info in ranks]
        return [ref for refs in get_all(jobs) for ref in refs]

    def start_training(self, rollout_id: int, given: list[Any]) -> list[Any]:
        """Starts the optimizer steps of the prepared rollout; the jobs are for `get_all` and `metrics_of`."""
        return [r.train_prepared.remote(rollout_id, given) for r in self.ranks]

    def metrics_of(self, jobs: list[Any]) -> dict[str, float]:
        """The metrics of finished training jobs."""
        return ray.get(next(job for job, info in zip(jobs, self._infos, strict=True) if info.is_metrics_rank))

    def call_all(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        return get_all([r.call.remote(name, *args, **kwargs) for r in self.ranks])

    def connect_engines(self, endpoints: list[Any], restarts: int) -> None:
        """Joins the engines' update groups, unless the same engines, none restarted since, are connected already."""
        if self._connected != (endpoints, restarts):
            self.call_all("connect_engines", endpoints)
            self._connected = (endpoints, restarts)

    def update_weights(self, version: int) -> Any:
        """Pushes the weights to the connected engines; returns the receipt."""
        return next((r for r in self.call_all("update_weights", version) if r is not None), None)

    def save(self, rollout_id: int, extra_state: dict[str, Any]) -> None:
        self.call_all("save", rollout_id, extra_state)

    def finish_save(self) -> None:
        """Waits until no checkpoint is being written (--async-save)."""
        self.call_all("finish_save")

    def save_hf(self, folder: str) -> None:
        self.call_all("save_hf", folder)

    def load_extra_state(self) -> dict[str, Any] | None:
        return ray.get(self.ranks[0].call.remote("load_extra_state")) if self.ranks else None


def init_groups(*groups: TrainGroup) -> int:
    """Starts all ranks of all groups side by side; returns the rollout id that all of them start with."""
    jobs = [group.start_init() for group in groups]
    infos = iter(get_all([job for of_group in jobs for job in of_group]))
    starts = set()
    for group, of_group in zip(groups, jobs, strict=True):
        mine = [next(infos) for _ in of_group]
        group.settle_init(mine)
        starts |= {info.start_rollout_id for info in mine}
    if len(starts) != 1:
        raise RuntimeError(f"ranks disagree about the step to start from: {sorted(starts)}; the checkpoint is damaged")
    return starts.pop()


def get_all(jobs: list[Any]) -> list[Any]:
    """Like ray.get, but raises as soon as any job fails: its siblings may wait for it in a collective for ever."""
    waiting = list(jobs)
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1)
        ray.get(done)
    return ray.get(jobs)


def _env(args: Args, layout: Layout) -> dict[str, str]:
    env = {"TOKENIZERS_PARALLELISM": "false"}
    if args.device == "cpu":
        cores = len(os.sched_getaffinity(0))
        env |= cpu_env(max(1, cores // (layout.world_size + layout.critic_world_size)))
        env["CUDA_VISIBLE_DEVICES"] = ""
        env["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "")
    else:
        env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron overlaps communication by launch order
        env["NCCL_CUMEM_ENABLE"] = "0"
    return {k: v for k, v in env.items() if v or k == "CUDA_VISIBLE_DEVICES"}
