"""Passes through the model: log-probs without gradient, and one optimizer step, by Megatron's pipeline schedules."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func

from slime.backends.megatron_utils.cpu_products import fast_products
from slime.backends.megatron_utils.data import MicroBatch, MicroBatches
from slime.backends.megatron_utils.device import current_device
from slime.backends.megatron_utils.head import DeferredLogits, full_logits
from slime.backends.megatron_utils.log_probs import get_topk_log_probs, get_values, log_probs_of
from slime.backends.megatron_utils.loss import distilled_ids, loss_function
from slime.backends.megatron_utils.model import unwrap
from slime.backends.megatron_utils.value_head import ValueHead


def forward_logits(args: Any, model: Any, micro_batch: MicroBatch, *, deferred: bool) -> Any:
    """One forward pass of a model chunk.

    Returns what the next stage takes, [T / cp, 1, H]; on the last stage a critic's values [1, T / cp, 1], the
    DeferredLogits, or float32 logits [1, T / cp, V / tp] divided by the rollout temperature when not `deferred`.
    """
    gpt = unwrap(model)
    if gpt.post_process:
        gpt.output_layer.deferred = deferred
    options = {} if model is gpt or not _is_half(gpt) else {"fp32_output": False}
    out = model(
        input_ids=micro_batch.tokens,
        position_ids=micro_batch.position_ids,
        attention_mask=None,
        packed_seq_params=micro_batch.packed,
        **options,
    )
    if not gpt.post_process or isinstance(gpt.output_layer, ValueHead):
        return out
    if deferred:
        return DeferredLogits(out, gpt, temperature=args.rollout_temperature, chunk_size=args.log_probs_chunk_size)
    return full_logits(out, gpt, temperature=args.rollout_temperature)


def _is_half(gpt: Any) -> bool:
    return gpt.config.bf16 or gpt.config.fp16


def _run(
    model: list[Any], micro_batches: MicroBatches, step: Callable[[Iterator[MicroBatch], Any], Any], **options: Any
) -> list[Any]:
    """Megatron's schedule over the micro-batches; each model chunk walks through its own iterator over them."""
    iterators: Any = [iter(micro_batches) for _ in model]
    with fast_products():
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if len(model) > 1 else iterators[0],
            model=model,
            num_microbatches=len(micro_batches),
            seq_length=1,  # not used: packed lengths vary and travel along
            micro_batch_size=1,
            **options,
        )


def compute_log_probs(
    args: Any,
    model: list[Any],
    micro_batches: MicroBatches,
    num_samples: int,
    with_entropy: bool = False,
    topk: int | None = None,
) -> dict[str, list[torch.Tensor]]:
    """Log-probs of all responses, on the last pipeline stage (elsewhere an empty dict).

    Returns "log_probs" (and "entropy"): float32 [response_length] per sample, in the order of the rank's columns; with
    `topk` also "topk_log_probs" and "topk_indices", [response_length, topk], of the model's most likely tokens. Where
    samples have `token_ids` (a user's field, [response_length, K]), also "token_log_probs" of the same shape.
    """

    def read(logits: Any, batch: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
        out = log_probs_of(args, batch, logits, with_entropy, batch.get("token_ids"))
        if topk is not None:
            lengths = {name: batch[name] for name in ("total_lengths", "response_lengths")}
            out |= get_topk_log_probs(logits, topk, args=args, **lengths)
        return out

    return _forward_columns(args, model, micro_batches, num_samples, read)


def compute_values(
    args: Any, model: list[Any], micro_batches: MicroBatches, num_samples: int
) -> dict[str, list[torch.Tensor]]:
    """A critic's "values" of all responses, as `compute_log_probs`: float32 [response_length] per sample."""

    def read(output: Any, batch: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
        lengths = {name: batch[name] for name in ("total_lengths", "response_lengths")}
        return {"values": get_values(output, args=args, **lengths)}

    return _forward_columns(args, model, micro_batches, num_samples, read)


@torch.no_grad()
def _forward_columns(
    args: Any, model: list[Any], micro_batches: MicroBatches, num_samples: int, read: Callable[[Any, Any], Any]
) -> dict[str, list[torch.Tensor]]:
    """One pass without gradient. read(output, batch): per-sample lists by name, which become columns of the rank."""

    def step(iterator: Iterator[MicroBatch], chunk: Any) -> Any:
        micro_batch = next(iterator)
        output = forward_logits(args, chunk, micro_batch, deferred=True)

        def collect(output: Any, non_loss_data: bool = True) -> tuple[list[int], dict[str, list[torch.Tensor]]]:
            return micro_batch.samples, read(output, micro_batch.batch)

        return output, collect

    for chunk in model:
        chunk.eval()
    results = _run(model, micro_batches, step, forward_only=True, collect_non_loss_data=True)
    for chunk in model:
        chunk.train()
    columns: dict[str, list[Any]] = {}
    if not mpu.is_pipeline_last_stage(ignore_virtual=True):
        return columns
    for samples, out in results:
        for name, values in out.items():
            column = columns.setdefault(name, [None] * num_samples)
            for sample, value in zip(samples, values, strict=False):  # a dummy has a value but no sample
                column[sample] = value
    return columns


def train_one_step(
    args: Any, model: list[Any], optimizer: Any, scheduler: Any, micro_batches: MicroBatches, step: Any
) -> dict[str, float]:
    """Forward and backward over all micro-batches, then one update. Every rank must call it.

    step: RankStep, with the whole step's denominators. A step without trained tokens does nothing; a gradient that
    is not finite is not applied. Both are reported (`train/empty_step`, `train/nonfinite_step`). Returns metrics:
    the loss's own on the last stage, reduced over micro-batches and data-parallel ranks; `train/grad_norm`,
    `train/lr` on every rank. A policy loss on data without "log_probs" takes the current policy as the old one; its
    log-probs are in the data afterwards.
    """
    if step.num_tokens == 0:
        return {"train/empty_step": 1.0, "train/lr": _lr(optimizer)}
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()

    def forward_step(iterator: Iterator[MicroBatch], chunk: Any) -> Any:
        micro_batch = next(iterator)
        logits = forward_logits(args, chunk, micro_batch, deferred=args.loss_type != "custom_loss")

        def loss_func(logits: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            if args.loss_type == "policy_loss" and "log_probs" not in micro_batch.batch:
                _use_current_as_old(args, micro_batches, micro_batch, logits)
            loss, metrics = loss_function(args, micro_batch.batch, step, logits)
            # Megatron adds up this count, and our gradient hook ignores it: the loss is already its share.
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), metrics

        return logits, loss_func

    parts = _run(model, micro_batches, forward_step, forward_only=False)
    lr = _lr(optimizer)
    applied, grad_norm = apply_gradients(optimizer, args.clip_grad)
    if applied:
        scheduler.step(increment=1)
    out = {
        "train/grad_norm": grad_norm,
        "train/lr": lr,
        "train/empty_step": 0.0,
        "train/nonfinite_step": float(not applied),
    }
    if mpu.is_pipeline_last_stage(ignore_virtual=True):
        out.update({f"train/{name}": value for name, value in reduce_metrics(parts).items()})
    return out


def _use_current_as_old(args: Any, all_: MicroBatches, micro_batch: MicroBatch, logits: Any) -> None:
    """Takes the old log-probs from this very pass and keeps them in the data; the logits remember them for the loss."""
    batch = micro_batch.batch
    out = log_probs_of(args, batch, logits, with_entropy=True, token_ids=distilled_ids(args, batch))
    batch["log_probs"] = [x.detach() for x in out["log_probs"]]
    all_.keep("log_probs", micro_batch.samples, batch["log_probs"])


def _lr(optimizer: Any) -> float:
    return float(optimizer.param_groups[0]["lr"]) if optimizer.param_groups else 0.0


def apply_gradients(optimizer: Any, clip_grad: float) -> tuple[bool, float]:
    """Clips by the global norm (0: no clipping) and updates, unless the norm is not finite.

    Megatron's own step looks for non-finite gradients only under fp16; in bf16 and fp32 it would write NaN weights.
    Returns (whether the weights were updated, the norm before clipping); the same on all ranks.
    """
    overflow = optimizer.prepare_grads()
    grad_norm = math.nan if overflow else float(optimizer.get_grad_norm())
    if not math.isfinite(grad_norm):
        return False, grad_norm
    for part in optimizer.chained_optimizers:
        params = part.get_parameters() if not getattr(part, "is_stub_optimizer", False) else []
        if params and clip_grad > 0:
            clip_grad_by_total_norm_fp32(
                params,
                max_norm=clip_grad,
                total_norm=grad_norm,
                use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )
    optimizer.step_with_ready_grads()
    return True, grad_norm


def finish_parameters(model: list[Any]) -> None:
    """After a step, before hooks see weights, or they are sent or saved: every rank gets what others have updated.

    With --overlap-param-gather Megatron leaves that to the next forward pass. Collective over data-parallel ranks.
    """
    for chunk in model:
        if chunk.use_forward_hook:
            chunk.start_param_sync(force_sync=True)


def reduce_metrics(parts: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Metrics of micro-batches over all data-parallel ranks: sums; maxima where named `*_max`.

    Context-parallel ranks all have the metrics of the whole, which count once. Ranks need not have the same names: a
    name that some lack is reduced over those that have it.
    """
    mine: dict[str, float] = {}
    for part in parts:
        _merge(mine, {name: float(value) for name, value in part.items()})
    group = mpu.get_data_parallel_group()
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    out: dict[str, float] = {}
    for other in everyone:
        _merge(out, other)
    return out


def _merge(into: dict[str, float], more: dict[str, float]) -> None:
    for name, value in more.items():
        if name not in into:
            into[name] = value
        else:
            into[name] = max(into[name], value) if name.endswith("_max") else into[name] + value


def sum_over_data_ranks(value: float) -> float:
    """Sum over the data-parallel ranks of this model-parallel position."""
    return _all_reduce(value, dist.ReduceOp.SUM)


def max_over_data_ranks(value: Any) -> Any:
    """Largest over the data-parallel ranks, in the type of `value` (int or float)."""
    return type(value)(_all_reduce(value, dist.ReduceOp.MAX))


def _all_reduce(value: float, op: Any) -> float:
    box = torch.tensor(float(value), dtype=torch.float64, device=current_device())
    dist.all_reduce(box, op=op, group=mpu.get_data_parallel_group())
    return box.item()
