"""`RolloutManager`: the Ray actor that owns prompts, engines and router, and turns samples into the trainer's data."""

import contextlib
import dataclasses
import random
import time
from typing import Any

import numpy as np
import ray

from slime.config import Args, Layout, due
from slime.ray.placement import Bundle


@dataclasses.dataclass(frozen=True)
class RolloutOutput:
    """refs: one object reference of RankData per data-parallel rank. metrics: numbers of the step's log.

    critic_refs: the same for the critic's ranks, the very same objects where it has as many; empty without a critic.
    """

    refs: list[Any]
    metrics: dict[str, float]
    critic_refs: list[Any]


class _RolloutManager:
    def __init__(self, args: Args, layout: Layout, bundles: list[Bundle]):
        from slime.config.hooks import load_hook

        self._args, self._layout, self._bundles = args, layout, bundles
        source = load_hook(args, "data_source_path")
        assert source is not None
        self._source = source(args)
        self._fleet: Any = None
        self._states: dict[int, dict[str, Any]] = {}  # after rollouts that get a checkpoint

    def num_rollout(self) -> int:
        """Rollouts of the whole run: --num-rollout, or what --num-epoch makes of the prompts."""
        if self._args.num_rollout is not None:
            return self._args.num_rollout
        return max(1, len(self._source) * self._args.num_epoch // self._args.rollout_batch_size)

    def start(self) -> None:
        """Starts router and engines, if the run has any."""
        from slime.ray.fleet import EngineFleet

        if self._layout.num_engines:
            self._fleet = EngineFleet(self._args, self._layout, self._bundles)
            self._args = self._fleet.start()  # with the router's address, which rollout functions read

    def serve(self, train_ranks: list[Any]) -> None:
        """Engines have the weights now: let the router send requests, and watch over them."""
        if self._fleet is not None:
            self._fleet.serve(train_ranks)

    def begin_sync(self) -> tuple[list[Any], int]:
        """Before a weight update: no engine is restarted meanwhile. Returns all endpoints, and restarts so far."""
        if self._fleet is None:
            return [], 0
        self._fleet.pause_watch()
        self._fleet.resume_memory(["weights"])
        return self._fleet.endpoints(), self._fleet.restarts

    def repair(self) -> bool:
        """After a weight update that failed: True when an engine had died and is back."""
        return self._fleet is not None and self._fleet.repair()

    def end_sync(self, version: int) -> None:
        """After it: the engines hold this version; one that is restarted gets it again."""
        if self._fleet is not None:
            self._fleet.version = version
            self._fleet.resume_memory()
            self._fleet.resume_watch(updated=True)

    def generate(self, rollout_id: int) -> RolloutOutput:
        """One rollout: samples, their rewards, and the data of each data-parallel rank."""
        from slime.config.hooks import load_hook
        from slime.rollout.base_types import RolloutFnTrainOutput

        started = time.monotonic()
        ledger = getattr(self._source, "ledger", None)  # a user's data source need not keep one
        if ledger is not None:
            ledger.begin(rollout_id)
        groups, metrics = self._load_debug(rollout_id), {}
        if groups is None:
            function = load_hook(self._args, "rollout_function_path")
            assert function is not None
            output = self._call(function, rollout_id, evaluation=False)
            assert isinstance(output, RolloutFnTrainOutput)
            groups, metrics = output.samples, dict(output.metrics or {})
            if hasattr(self._source, "settle"):
                self._source.settle(groups, "trained")  # a plug-in's rollout function need not account for prompts
        if ledger is not None:
            ledger.check()
        last = rollout_id + 1 == self.num_rollout()
        if due(self._args.save_interval if self._args.save else 0, rollout_id, last):
            self._states[rollout_id] = self._state(rollout_id)
        samples = flatten(groups)
        metrics.update(self._log_samples(rollout_id, samples, metrics, time.monotonic() - started))
        self._save_debug(rollout_id, samples)
        if self._layout.world_size == 0:
            return RolloutOutput([], metrics, [])
        columns = self._to_columns(samples)
        data, steps = self._to_rank_data(columns, self._layout.dp)
        refs = [ray.put(d) for d in data]
        critic_dp = self._layout.critic_dp
        critic_refs = refs[:critic_dp]
        if critic_dp not in (0, self._layout.dp):
            critic_refs = [ray.put(d) for d in self._to_rank_data(columns, critic_dp)[0]]
        metrics |= {"rollout/samples": float(len(samples)), "train/optimizer_steps": float(steps)}
        metrics["perf/rollout_total_time"] = time.monotonic() - started
        return RolloutOutput(refs, metrics, critic_refs)

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        from slime.config.hooks import load_hook
        from slime.observability.rollout_metrics import eval_metrics
        from slime.rollout.base_types import RolloutFnEvalOutput

        function = load_hook(self._args, "eval_function_path")
        assert function is not None
        output = self._call(function, rollout_id, evaluation=True)
        assert isinstance(output, RolloutFnEvalOutput)
        log = load_hook(self._args, "custom_eval_rollout_log_function_path")
        if log is not None and log(rollout_id, self._args, output.data, output.metrics):
            return {}
        return eval_metrics(self._args, output)

    def save_state(self, rollout_id: int) -> dict[str, Any]:
        """Where the data stood after this rollout, whatever has been generated since; for the checkpoint."""
        state = self._states.pop(rollout_id, None) or self._state(rollout_id)
        self._states = {k: v for k, v in self._states.items() if k > rollout_id}
        if hasattr(self._source, "ledger"):
            self._source.ledger.sync()
        if not hasattr(self._source, "state_dict"):
            self._source.save(rollout_id)  # a user's data source, which saves itself
        return state

    def load_state(self, start_rollout_id: int, state: dict[str, Any] | None) -> None:
        """Continues where the checkpoint of the rollout before `start_rollout_id` stood; state None: a fresh start."""
        if state is not None:
            if "data" in state:
                self._source.load_state_dict(state["data"])
            else:
                self._source.load(start_rollout_id - 1)
            random.setstate(state["random"])
            np.random.set_state(state["numpy"])
        if hasattr(self._source, "ledger"):
            resumed = state["data"]["ledger"] if state is not None else None
            self._source.ledger.open(self._args.run_dir, resumed, start_rollout_id)

    def offload(self) -> None:
        if self._fleet is not None:
            self._fleet.release_memory()

    def stop(self) -> None:
        if self._fleet is not None:
            self._fleet.stop()
            self._fleet = None

    # -- parts of generate --------------------------------------------------------------------------------------

    def _call(self, function: Any, rollout_id: int, *, evaluation: bool) -> Any:
        from slime.rollout.base_types import call_rollout_fn

        lent = self._fleet.lend_ranks() if self._fleet is not None else contextlib.nullcontext()
        try:
            with lent:
                return call_rollout_fn(function, self._args, rollout_id, self._source, evaluation=evaluation)
        except Exception:
            if self._fleet is not None:
                self._fleet.raise_if_lost()  # why requests found no engine
            raise

    def _state(self, rollout_id: int) -> dict[str, Any]:
        """The data cursor, the buffer and the random states that hooks may draw from."""
        state = {"random": random.getstate(), "numpy": np.random.get_state()}
        return {**state, "data": self._source.state_dict()} if hasattr(self._source, "state_dict") else state

    def _to_columns(self, samples: list[Any]) -> dict[str, list[Any]]:
        from slime.config.hooks import load_hook
        from slime.data.batch import samples_to_columns

        convert = load_hook(self._args, "custom_convert_samples_to_train_data_path")
        return convert(self._args, samples) if convert is not None else samples_to_columns(self._args, samples)

    def _to_rank_data(self, columns: dict[str, list[Any]], dp_size: int) -> tuple[list[Any], int]:
        """The share of each of `dp_size` data-parallel ranks, and the number of optimizer steps."""
        from slime.data.schedule import make_schedule, split_for_ranks

        schedule = make_schedule(
            self._args,
            total_lengths=columns["total_lengths"],
            trained_tokens=[int(m.sum()) for m in columns["loss_masks"]],
            rollout_ids=columns["rollout_ids"],
            dp_size=dp_size,
        )
        return split_for_ranks(columns, schedule), len(schedule.steps)

    def _log_samples(self, rollout_id: int, samples: list[Any], metrics: dict, seconds: float) -> dict[str, float]:
        from slime.config.hooks import load_hook
        from slime.observability.rollout_metrics import rollout_metrics
        from slime.observability.samples import write_samples

        if self._args.save_samples:
            write_samples(self._args.run_dir, rollout_id, samples)
        log = load_hook(self._args, "custom_rollout_log_function_path")
        if log is not None and log(rollout_id, self._args, samples, metrics, seconds):
            return {}
        return rollout_metrics(self._args, samples, version=rollout_id)  # of the sync before this rollout

    def _save_debug(self, rollout_id: int, samples: list[Any]) -> None:
        if self._args.save_debug_rollout_data:
            from slime.observability.samples import save_sample_dump

            save_sample_dump(self._args.save_debug_rollout_data.format(rollout_id=rollout_id), samples)

    def _load_debug(self, rollout_id: int) -> list[Any] | None:
        if not self._args.load_debug_rollout_data:
            return None
        from slime.observability.samples import load_sample_dump

        return load_sample_dump(self._args.load_debug_rollout_data.format(rollout_id=rollout_id))


RolloutManager: Any = ray.remote(_RolloutManager)


def flatten(groups: list[Any]) -> list[Any]:
    """Groups (possibly with fan-out lists inside) to one list of samples, order kept."""
    out: list[Any] = []
    for item in groups:
        if isinstance(item, list | tuple):
            out += flatten(list(item))
        else:
            out.append(item)
    return out
