"""`TrainGroup`: the trainer's ranks as Ray actors, driven together."""

import dataclasses
import os
import warnings
from typing import Any

import ray

from slime.config import Args, Layout
from slime.ray.placement import Bundle
from slime.utils.threads import omp_env


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

        self._actor = MegatronTrainActor(self._rank, self._world_size, *master)
        info = self._actor.init(args, role=role)
        # A class of the driver's own: unpickling the backend's would import Megatron there.
        return RankInfo(info.start_rollout_id, info.dp_rank, info.is_metrics_rank)

    def train(self, rollout_id: int, refs: list[Any], dp_rank: int) -> Any:
        # A list of one reference is not resolved by Ray, so each rank fetches only its own share.
        return self._actor.train(rollout_id, ray.get(refs[dp_rank]))

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._actor, name)(*args, **kwargs)

    def pid(self) -> int:
        return os.getpid()


_RankActor: Any = ray.remote(_Rank)


class TrainGroup:
    """All ranks of one model. Each method returns when every rank is done, and raises what any rank raised."""

    def __init__(self, args: Args, layout: Layout, bundles: list[Bundle], role: str = "actor"):
        self._args, self._layout, self._role = args, layout, role
        share = 0.4 if layout.colocate else 1.0  # the engine takes the rest of a colocated device
        cuda = args.device == "cuda"
        self.ranks = [
            _RankActor.options(
                num_cpus=share,
                num_gpus=share if cuda else 0,
                scheduling_strategy=bundle.strategy(),
                runtime_env={"env_vars": _env(args, layout)},
            ).remote(rank, layout.world_size)
            for rank, bundle in enumerate(bundles)
        ]
        self._infos: list[RankInfo] = []
        self._connected: tuple[list[Any], int] | None = None

    def init(self) -> int:
        """Builds and loads the model on every rank; returns the first rollout id (after a resume, the next one)."""
        if not self.ranks:
            return self._args.start_rollout_id or 0
        master = ray.get(self.ranks[0].address.remote())
        self._infos = ray.get([r.init.remote(self._args, master, self._role) for r in self.ranks])
        starts = {info.start_rollout_id for info in self._infos}
        if len(starts) != 1:
            raise RuntimeError(
                f"ranks disagree about the step to start from: {sorted(starts)}; the checkpoint is damaged"
            )
        return starts.pop()

    def train(self, rollout_id: int, refs: list[Any]) -> dict[str, float]:
        """One rollout's optimizer steps. refs: one object reference of RankData per data-parallel rank."""
        jobs = [r.train.remote(rollout_id, refs, i.dp_rank) for r, i in zip(self.ranks, self._infos, strict=True)]
        results = get_all(jobs)
        return next(out for out, info in zip(results, self._infos, strict=True) if info.is_metrics_rank)

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
        env |= omp_env(max(1, cores // layout.world_size))
        env["CUDA_VISIBLE_DEVICES"] = ""
        env["THP_MEM_ALLOC_ENABLE"] = (
            "1"  # torch asks for huge pages: first touches of 4 kB pages cost more than the work
        )
        env["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "")
    else:
        env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron overlaps communication by launch order
        env["NCCL_CUMEM_ENABLE"] = "0"
    return {k: v for k, v in env.items() if v or k == "CUDA_VISIBLE_DEVICES"}
