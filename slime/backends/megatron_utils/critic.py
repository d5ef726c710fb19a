"""`MegatronCritic`: one rank of the value model of --advantage-estimator ppo, a trainer of its own beside the actor's.

It is the actor's model with a head of one value per token (`value_head.py`), its own learning rate, optimizer and
schedule (`slime.config.critic`). What it gives and takes goes by sample, so its data-parallel size may differ from the
actor's: `prepare` gives the values, the actor makes advantages and returns of them, `train_prepared` takes the returns.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state as mpu

from slime.backends.megatron_utils import checkpoint, data, train_step, value_head
from slime.backends.megatron_utils.actor import InitInfo, MegatronTrainActor, Prepared
from slime.backends.megatron_utils.metrics import Timers
from slime.backends.megatron_utils.model import build_model
from slime.config.critic import CRITIC_FOLDER
from slime.config.errors import ConfigError
from slime.models import load_hf_into


class MegatronCritic(MegatronTrainActor):
    """Every method is collective over the critic's ranks. Its args are those of `slime.config.critic.critic_args`.

    `save` writes to `critic/` in --save, before the actor's: where an actor's checkpoint is, its critic's is too.
    """

    def init(self, args: Any) -> InitInfo:
        info = super().init(args)
        self._leave_device()
        return info

    def _build(self) -> list[Any]:
        return build_model(self.args, self.hf, value_head=True)

    def _load_initial(self, chunks: list[Any], found: tuple[Path, int] | None) -> str:
        """Weights without optimizer: from --critic-load, or where the actor's came from; then often a fresh head."""
        folder = self.args.critic_load
        if folder is not None:
            found = checkpoint.latest_checkpoint(folder)
        if found is None:
            folder = folder or self._hf_folder()
            load_hf_into(chunks, folder, self.hf, self.args, skip=value_head.NAMES)
            return folder
        own = critic_checkpoint(found[0])
        checkpoint.load_checkpoint(own or found[0], chunks, skip=value_head.NAMES if own is None else ())
        return str(own or found[0])

    def _resume_path(self, path: Path) -> Path | None:
        own = critic_checkpoint(path)
        if own is None and self.args.critic_load is None:
            raise ConfigError(
                f"--load {self.args.load}: {path.name} has no critic beside it ({CRITIC_FOLDER}/{path.name}); give "
                "--critic-load for its first weights, or --finetune to start anew from the checkpoint's weights"
            )
        return own

    def save(self, rollout_id: int, extra_state: dict[str, Any] | None = None) -> str:
        """As the actor's. Before it, those whose actor's checkpoint was not written, or is not kept any more, go."""
        if self.rank == 0:
            for own in Path(self.args.save).glob("iter_*"):
                if not (own.parent.parent / own.name).is_dir():
                    shutil.rmtree(own, ignore_errors=True)
        path = super().save(rollout_id, extra_state)
        self._leave_device()
        return path

    def _leave_device(self) -> None:
        """With --offload-train, which for the actor's parameters the weight update does."""
        if self._memory is not None:
            self._memory.release("params")

    def prepare(
        self, rollout_id: int, rank_data: Any, given: dict[int, np.ndarray] | None = None
    ) -> dict[int, np.ndarray] | None:
        """Values of a rollout's samples before its first step: float32 [R] by the sample's number, where they start.

        values[t] is of the state before response token t, which is the row that predicts it. Returns None on ranks
        that others speak for.
        """
        timers = Timers()
        columns, plans = self._columns(rank_data)
        with timers("values_time"), self._on_device():
            plan = self._log_prob_plan(columns, plans)
            batches = data.MicroBatches(columns, plan, self._multiple, self._context)
            columns |= train_step.compute_values(self.args, self.model, batches, len(columns["tokens"]))
        self._prepared = Prepared(rollout_id, rank_data, columns, plans, timers)
        return self._by_sample("values")

    def train_prepared(self, rollout_id: int, given: dict[int, np.ndarray] | None = None) -> dict[str, float]:
        """The optimizer steps of the rollout that `prepare` saw. given: returns, float32 [R] by sample.

        Metrics: `critic/...` as the actor's `train/...`, with explained_variance; `perf/critic_..._time`.
        """
        now = self._take_prepared(rollout_id)
        if self.ranks.is_last_stage:
            assert given is not None
            now.columns["returns"] = data.of_samples(given, now.rank_data.samples)
        with now.timers("train_time"), self._on_device("optimizer", "grads"):
            metrics = self._steps(rollout_id, now.rank_data.steps, now.columns, now.plans)
        metrics = {name.replace("train/", "critic/", 1): value for name, value in metrics.items()}
        self._leave_device()
        if self.ranks.is_last_stage:
            metrics |= value_metrics(now.columns["values"], now.columns["returns"], now.columns["loss_masks"])
        return metrics | {f"perf/critic_{name}": seconds for name, seconds in now.timers.seconds.items()}


def value_metrics(
    values: list[torch.Tensor], returns: list[torch.Tensor], masks: list[torch.Tensor]
) -> dict[str, float]:
    """How good the values were before the step, over trained tokens of all data-parallel ranks; collective.

    explained_variance = 1 - Var(returns - values) / Var(returns): 1 is perfect, 0 no better than a constant, below 0
    worse; 0 where returns do not vary. Two passes in float64.
    """
    picked = [
        torch.stack([v.double()[m > 0], r.double()[m > 0]]).cpu()
        for v, r, m in zip(values, returns, masks, strict=True)
    ]
    value, target = torch.cat([torch.zeros(2, 0, dtype=torch.float64), *picked], dim=1)
    wrong = target - value
    count, *sums = _total(value.numel(), value.sum(), target.sum(), wrong.sum())
    count = max(count, 1.0)
    value_mean, target_mean, wrong_mean = (x / count for x in sums)
    unexplained, variance = _total((wrong - wrong_mean).square().sum(), (target - target_mean).square().sum())
    explained = 1.0 - unexplained / variance if variance > 1e-12 * count else 0.0
    return {
        "critic/explained_variance": explained,
        "critic/value_mean": value_mean,
        "critic/return_mean": target_mean,
        "critic/return_std": (variance / count) ** 0.5,
    }


def _total(*numbers: Any) -> list[float]:
    if not mpu.model_parallel_is_initialized():
        return [float(x) for x in numbers]
    return [train_step.sum_over_data_ranks(float(x)) for x in numbers]


def critic_checkpoint(path: Path) -> Path | None:
    """The critic's checkpoint of the same step as the actor's `path`; `path` itself where it is a critic's.

    Not the critic's latest: a run may have died after the critic's and before the actor's, which is the one that
    counts.
    """
    if path.parent.name == CRITIC_FOLDER:
        return path
    own = path.parent / CRITIC_FOLDER / path.name
    return own if own.is_dir() else None
