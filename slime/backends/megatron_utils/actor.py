"""`MegatronTrainActor`: one rank of the trainer, from first weights to last checkpoint. Ray wraps it; tests do not."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime.backends.megatron_utils import checkpoint, data, device, train_step
from slime.backends.megatron_utils.cp_utils import context_parallel
from slime.backends.megatron_utils.cpu_products import fast_products
from slime.backends.megatron_utils.freeze import Freezer
from slime.backends.megatron_utils.loss import compute_advantages_and_returns
from slime.backends.megatron_utils.metrics import Timers, advantage_metrics, gap_metrics, mean_over_steps
from slime.backends.megatron_utils.model import (
    biased_routers,
    build_model,
    build_optimizer,
    build_scheduler,
    training_regions,
    unwrap,
    wrap_model,
)
from slime.backends.megatron_utils.offload import TrainerMemory
from slime.backends.megatron_utils.parallel import init_parallel
from slime.backends.megatron_utils.rounding_probe import probe_rounding
from slime.backends.megatron_utils.update_weight import WeightUpdater
from slime.backends.megatron_utils.writer import CheckpointWriter
from slime.config.hf_config import check_same_model, load_hf_config
from slime.config.hooks import load_hook
from slime.models import load_hf_into, save_hf
from slime.utils.checkpoint_folder import SaveError, is_hf_folder
from slime.utils.flops import measure_matmul_peak, train_flops
from slime.utils.resume import describe_run, resumed_checkpoint


@dataclasses.dataclass(frozen=True)
class InitInfo:
    """What the driver learns of a rank. start_rollout_id: the first rollout to run (after a resume, the next one)."""

    start_rollout_id: int
    dp_rank: int
    dp_size: int
    is_metrics_rank: bool
    rank: int
    loaded_from: str


@dataclasses.dataclass
class Prepared:
    """A rollout between `prepare` and `train_prepared`. plans: micro-batches of each optimizer step."""

    rollout_id: int
    rank_data: Any
    columns: dict[str, Any]
    plans: list[list[list[int]]]
    timers: Timers


class MegatronTrainActor:
    """Every method is collective: all ranks call it, in the same order."""

    def __init__(self, rank: int, world_size: int, master_addr: str, master_port: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._master = (master_addr, master_port)
        self._updater: WeightUpdater | None = None
        self._writer: CheckpointWriter | None = None
        self._freezer: Freezer | None = None
        self._checkpoint: Path | None = None
        self._prepared: Prepared | None = None
        self._probe: dict[str, float] | None = None  # until it has run; then its numbers, until they are reported

    def init(self, args: Any) -> InitInfo:
        """Joins the process groups, builds the model and loads it: from --load if it holds a checkpoint, else from HF.

        Raises ConfigError for what cannot work.
        """
        device.is_cpu(args)  # refuses a --device that this process does not have
        self.args = args
        self.hf = load_hf_config(args.hf_checkpoint)
        self.ranks = init_parallel(args, self.rank, self.world_size, *self._master, num_layers=self.hf.num_layers)
        if (hook := load_hook(args, "custom_megatron_init_path")) is not None:
            hook(args)

        chunks = self._build()
        found = checkpoint.latest_checkpoint(args.load)
        self._frozen = {name: self._load_frozen(chunks, folder) for name, folder in frozen_models(args).items()}
        resumed = resumed_checkpoint(args)
        state = self._resume_path(resumed[0]) if resumed is not None else None
        source = self._load_initial(chunks, found) if state is None else str(state)
        self.model = wrap_model(args, chunks)
        # How a micro-batch's row is padded and cut.
        self._multiple = self.ranks.tp_size if self.model[0].config.sequence_parallel else 1
        self._context = context_parallel(args)
        self.optimizer = build_optimizer(args, self.model)
        self.scheduler = build_scheduler(args, self.optimizer, total_steps=_total_steps(args))
        start = 0
        if resumed is not None:
            start, self._checkpoint = resumed[1] + 1, resumed[0]
        if state is not None:
            checkpoint.load_checkpoint(state, self.model, self.optimizer, self.scheduler)
        if args.start_rollout_id is not None:
            start = args.start_rollout_id
        self._memory = TrainerMemory(self.model, self.optimizer) if args.offload_train else None
        # All ranks measure at the same time, so each gets its share of a machine that they share.
        with fast_products():
            self._matmul_peak = measure_matmul_peak(device.current_device(), self.model[0].config.params_dtype)
        if self._memory is not None:
            self._memory.release("optimizer", "grads")  # the engines' first weights are sent next
        return InitInfo(
            start_rollout_id=start,
            dp_rank=self.ranks.dp_rank,
            dp_size=self.ranks.dp_size,
            is_metrics_rank=self.ranks.is_metrics_rank,
            rank=self.rank,
            loaded_from=source,
        )

    def _build(self) -> list[Any]:
        return build_model(self.args, self.hf)

    def _load_initial(self, chunks: list[Any], found: tuple[Path, int] | None) -> str:
        """Loads weights without optimizer and returns where from. found: the checkpoint of --load, if it is one."""
        if found is not None:
            checkpoint.load_checkpoint(found[0], chunks)
            return str(found[0])
        load_hf_into(chunks, self._hf_folder(), self.hf, self.args)
        return self._hf_folder()

    def _hf_folder(self) -> str:
        """The Hugging Face folder of the first weights."""
        return str(self.args.load if is_hf_folder(self.args.load) else self.args.hf_checkpoint)

    def _resume_path(self, path: Path) -> Path | None:
        """Where in the checkpoint `path` this model's state is; None: nowhere, start from the initial weights."""
        return path

    def _load_frozen(self, chunks: list[Any], folder: str) -> list[torch.Tensor]:
        """The weights of a frozen model (reference, teacher) on the host, in the order of `_weights`.

        folder: a checkpoint or a Hugging Face folder. Raises ConfigError unless it is of the actor's architecture.
        """
        found = checkpoint.latest_checkpoint(folder)
        if found is not None:
            checkpoint.load_checkpoint(found[0], chunks)
        else:
            check_same_model(self.hf, load_hf_config(folder), folder)
            load_hf_into(chunks, folder, self.hf, self.args)
        return [w.detach().to("cpu", copy=True) for w in _weights(chunks)]

    @contextlib.contextmanager
    def _frozen_weights(self, name: str) -> Iterator[None]:
        """Inside, the model computes with a frozen model's weights; the actor's stay where they are, untouched."""
        weights = list(_weights(self.model))
        own = [w.data for w in weights]
        try:
            for weight, frozen in zip(weights, self._frozen[name], strict=True):
                weight.data = frozen.to(weight.device, non_blocking=True)
            yield
        finally:
            for weight, data_ in zip(weights, own, strict=True):
                weight.data = data_

    def train(self, rollout_id: int, rank_data: Any) -> dict[str, float]:
        """`prepare` and `train_prepared` in one, for runs without a critic."""
        self.prepare(rollout_id, rank_data)
        return self.train_prepared(rollout_id)

    def prepare(
        self, rollout_id: int, rank_data: Any, given: dict[int, np.ndarray] | None = None
    ) -> dict[int, np.ndarray] | None:
        """All that comes before the optimizer steps of a rollout: log-probs of each model, advantages and returns.

        rank_data: RankData, this rank's share. given: a critic's values, float32 [R] by the sample's number in the
        rollout. Returns the returns in the same form; None on ranks that others speak for, and without a critic.
        """
        args, timers = self.args, Timers()
        with timers("save_wait_time"):
            self.finish_copies()
        columns, plans = self._columns(rank_data)
        if given is not None and self.ranks.is_last_stage:
            columns["values"] = data.of_samples(given, rank_data.samples)
        if args.loss_type != "sft_loss":
            if "teacher" in self._frozen and columns.keys() & {"teacher_log_probs", "teacher_topk_log_probs"}:
                raise ValueError(
                    "samples carry a teacher's log-probs, and --opd-teacher-load would compute them: choose one"
                )
            with self._on_device():
                passes = self._log_prob_plan(columns, plans)
                for name in self._frozen:
                    with timers(f"{name}_log_probs_time"), self._frozen_weights(name):
                        topk = args.distill_topk if name == "teacher" else None
                        found = self._log_probs(columns, passes, f"{name}_", topk)
                        columns |= {f"{name}_{column}": values for column, values in found.items()}
                if not self._old_log_probs_come_with_the_step(len(plans)):
                    with timers("log_probs_time"):
                        columns |= self._log_probs(columns, passes, "")
                if args.rounding_probe and self._probe is None:
                    with timers("rounding_probe_time"):
                        self._probe = self._probe_rounding(columns, passes)
            if self.ranks.is_last_stage:
                with timers("advantages_time"):
                    compute_advantages_and_returns(args, columns)
        if (hook := load_hook(args, "rollout_data_postprocess_path")) is not None:
            hook(args, rollout_id, columns)
        self._prepared = Prepared(rollout_id, rank_data, columns, plans, timers)
        return self._by_sample("returns") if given is not None else None

    def train_prepared(self, rollout_id: int, given: dict[int, np.ndarray] | None = None) -> dict[str, float]:
        """All optimizer steps of the rollout that `prepare` saw.

        Returns metrics: on the metrics rank the whole run's, elsewhere what that rank knows. Keys: `train/...` (mean
        over the rollout's steps; `train/steps`; the gap between trainer and engine) and `perf/..._time` in seconds.
        """
        now = self._take_prepared(rollout_id)
        with now.timers("train_time"), self._on_device("optimizer", "grads"):
            metrics = self._steps(rollout_id, now.rank_data.steps, now.columns, now.plans)
        if self.ranks.is_last_stage:
            metrics |= gap_metrics(now.columns) | advantage_metrics(now.columns)
        if self._probe:
            metrics, self._probe = metrics | self._probe, {}
        return metrics | self._perf(now.timers, now.columns)

    @contextlib.contextmanager
    def _on_device(self, *parts: str) -> Iterator[None]:
        """With --offload-train: inside, the parameters and `parts` are on the device; afterwards `parts` are not."""
        if self._memory is not None:
            self._memory.restore("params", *parts)
        try:
            yield
        finally:  # also where a checkpoint could not be written and training goes on
            if self._memory is not None:
                self.finish_copies()
                self._memory.release(*parts)

    def _columns(self, rank_data: Any) -> tuple[dict[str, Any], list[list[list[int]]]]:
        """This rank's columns on its device, and the micro-batches of each optimizer step."""
        columns: dict[str, Any] = data.to_device(rank_data.columns)
        columns["sample_denominators"] = list(rank_data.sample_denominators)
        return columns, [self._pad(step.micro_batches) for step in rank_data.steps]

    def _take_prepared(self, rollout_id: int) -> Prepared:
        now, self._prepared = self._prepared, None
        if now is None or now.rollout_id != rollout_id:
            raise RuntimeError(f"rollout {rollout_id} was not prepared: prepare comes before train_prepared")
        return now

    def _by_sample(self, name: str) -> dict[int, np.ndarray] | None:
        """A per-token column by the sample's number, on the one rank of each data-parallel replica that speaks."""
        now = self._prepared
        assert now is not None
        if not self.ranks.is_last_stage or self.ranks.tp_rank or self.ranks.cp_rank:
            return None
        return {
            sample: value.cpu().numpy() for sample, value in zip(now.rank_data.samples, now.columns[name], strict=True)
        }

    def _old_log_probs_come_with_the_step(self, steps: int) -> bool:
        """Whether the pass for the old log-probs can be left out.

        With one optimizer step per rollout the weights that it starts from are the old policy, so the values that its
        own forward pass computes are the old log-probs, exactly. Not where something reads them before the step, or
        the loss is the user's.
        """
        args = self.args
        early = (
            args.kl_coef
            or ((args.advantage_estimator == "on_policy_distillation" or args.opd_kl_coef) and not args.distill_topk)
            or args.custom_advantage_function_path
            or args.rollout_data_postprocess_path
            or args.custom_megatron_before_log_prob_hook_path
            or args.custom_megatron_before_train_step_hook_path
        )
        return steps == 1 and args.loss_type == "policy_loss" and not early

    def _steps(self, rollout_id: int, steps: list[Any], columns: dict[str, Any], plans: list[Any]) -> dict[str, float]:
        args = self.args
        hook = load_hook(args, "custom_megatron_before_train_step_hook_path")
        results = []
        for step_id, (step, plan) in enumerate(zip(steps, plans, strict=True)):
            if hook is not None:
                train_step.finish_parameters(self.model)
                hook(args, rollout_id, step_id, self.model, self.optimizer, self.scheduler)
            batches = data.MicroBatches(columns, plan, self._multiple, self._context)
            results.append(train_step.train_one_step(args, self.model, self.optimizer, self.scheduler, batches, step))
        train_step.finish_parameters(self.model)
        return mean_over_steps(results)

    def _pad(self, micro_batches: list[list[int]]) -> list[list[int]]:
        return data.pad_count(micro_batches, self.ranks.pp_size if self.ranks.vp_size > 1 else 1)

    def _log_prob_plan(self, columns: dict[str, Any], plans: list[Any]) -> list[list[int]]:
        """Micro-batches of the passes without gradient: the training's own, or joined up to their own token limit."""
        args = self.args
        joined = [samples for plan in plans for samples in plan]
        limit = args.log_probs_max_tokens_per_gpu
        if limit is None or limit <= args.max_tokens_per_gpu or not args.use_dynamic_batch_size:
            return joined
        packed = data.repack(columns["total_lengths"], joined, limit * self.ranks.cp_size)
        packed += [[] for _ in range(train_step.max_over_data_ranks(len(packed)) - len(packed))]
        return self._pad(packed)

    def _log_probs(
        self, columns: dict[str, Any], plan: list[list[int]], prefix: str, topk: int | None = None
    ) -> dict[str, list[torch.Tensor]]:
        """`compute_log_probs` with the weights that are in now; the hook hears `prefix`, which says whose they are."""
        if (hook := load_hook(self.args, "custom_megatron_before_log_prob_hook_path")) is not None:
            hook(self.args, self.model, prefix)
        batches = data.MicroBatches(columns, plan, self._multiple, self._context)
        return train_step.compute_log_probs(self.args, self.model, batches, len(columns["tokens"]), topk=topk)

    def _probe_rounding(self, columns: dict[str, Any], plan: list[list[int]]) -> dict[str, float]:
        log_probs = functools.partial(self._log_probs, columns, plan, "rounding_probe_")
        return probe_rounding(self.model, training_regions(self.args), columns, log_probs)

    def _perf(self, timers: Timers, columns: dict[str, Any]) -> dict[str, float]:
        tokens = train_step.sum_over_data_ranks(float(sum(columns["total_lengths"])))
        trained = timers.seconds.get("train_time", 0.0)
        out = {f"perf/{name}": seconds for name, seconds in timers.seconds.items()}
        out["perf/train_tokens"] = tokens
        out["perf/train_tokens_per_s"] = tokens / trained if trained else 0.0
        # The output layer sees the rows of response tokens only (slime.backends.megatron_utils.head).
        flops = train_flops(self.hf, columns["total_lengths"], sum(columns["response_lengths"]))
        flops = train_step.sum_over_data_ranks(flops)
        out["perf/mfu"] = flops / (trained * self.world_size * self._matmul_peak) if trained else 0.0
        return out

    def connect_engines(self, engines: list[Any]) -> None:
        """Joins the engines' weight-update groups. engines: list of EngineEndpoint, the same on all ranks."""
        if self._updater is None:
            self._updater = WeightUpdater(self.args, self.model, self.hf)
        self._updater.connect(engines)

    def update_weights(self, version: int) -> Any:
        """Pushes this version of the weights to the connected engines; the receipt, on the rank that has one."""
        if self._updater is None:
            raise RuntimeError("update_weights before connect_engines")
        with self._on_device("params"):  # the last who needs them before engines generate
            return self._updater.update(version)

    def save(self, rollout_id: int, extra_state: dict[str, Any] | None = None) -> str:
        """Writes a checkpoint under --save; the next start continues with rollout_id + 1. Returns its path.

        With --async-save it counts later, at the latest when `finish_save` returns; the copy that it is written from is
        made while weights are sent and engines generate, and `prepare` waits for it. Raises SaveError on every rank.
        """
        if self._writer is None:
            self._writer = CheckpointWriter(self.args.save, self.args.keep_last, background=self.args.async_save)
            self._freezer = Freezer(self.optimizer) if self.args.async_save else None
        self._writer.wait()  # the copies are still being read
        parts = self.model, self.optimizer, self.scheduler
        with self._on_device("optimizer"):
            if self._freezer is not None and self._freezer.works:
                state: Any = checkpoint.frozen_state(self._freezer, *parts)
            else:
                state = checkpoint.checkpoint_state(*parts)
            self._writer.save(rollout_id, state, extra_state, describe_run(self.args, self.hf.raw, extra_state))
        return str(self._writer.folder_of(rollout_id))

    def finish_copies(self) -> None:
        """Waits until weights and optimizer may change, with --async-save: until what is being saved is copied."""
        if self._freezer is not None:
            self._freezer.wait()

    def finish_save(self) -> None:
        """Waits until no checkpoint is being written. Raises SaveError on every rank when the last one failed."""
        if self._writer is not None:
            self._writer.wait()

    def save_hf(self, folder: str) -> None:
        """Writes the weights as a Hugging Face folder, with the config and tokenizer of --hf-checkpoint.

        Raises SaveError on every rank when it cannot be written.
        """
        try:
            with self._on_device():
                save_hf(self.model, folder, self.hf, self.args)
        except (OSError, RuntimeError) as error:
            raise SaveError(f"--save-hf {folder} could not be written: {error}") from error

    def load_extra_state(self) -> dict[str, Any] | None:
        """The extra_state of the checkpoint this run resumed from; None when it did not resume."""
        return checkpoint.load_extra_state(self._checkpoint) if self._checkpoint else None


def _weights(chunks: list[Any]) -> Iterator[torch.Tensor]:
    """All that a model file sets: parameters, and the biases that choose experts, which Megatron keeps as buffers."""
    for chunk in chunks:
        yield from unwrap(chunk).parameters()
        yield from (router.expert_bias for router in biased_routers(chunk))


def frozen_models(args: Any) -> dict[str, str]:
    """Folders of the models beside the actor whose log-probs the run needs, by the name of their columns."""
    models = {}
    if args.kl_coef or args.use_kl_loss:
        models["ref"] = args.ref_load or args.hf_checkpoint
    if args.opd_teacher_load:
        models["teacher"] = args.opd_teacher_load
    return models


def _total_steps(args: Any) -> int:
    """Optimizer steps of the whole run."""
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    per_rollout = -(-samples // args.global_batch_size) if args.global_batch_size else 1
    return max(1, (args.num_rollout or 1) - args.num_critic_only_steps) * per_rollout
