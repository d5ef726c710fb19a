"""Masked positions are absent: they are replaced before anything can turn them into NaN or inf.

`x * mask` is not enough: NaN * 0 is NaN, and exp(300) * 0 has an infinite gradient. Every formula of the losses takes
its inputs through `select` first.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def select(x: Tensor, mask: Tensor) -> Tensor:
    """x where mask > 0, else 0. The gradient of a masked entry is exactly 0, whatever it held."""
    return torch.where(mask > 0, x, torch.zeros_like(x))


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Scalar sum of x over mask > 0; 0 (still connected to x) when nothing is."""
    return select(x, mask).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Scalar mean of x over mask > 0; 0 when nothing is."""
    return masked_sum(x, mask) / (mask > 0).sum().clamp(min=1)


def whiten(values: Sequence[Tensor], masks: Sequence[Tensor], group: Any = None) -> list[Tensor]:
    """(x - mean) / std over all masked-in entries of all tensors, of all ranks of `group`; 0 where masked.

    Two passes in float64, so a common offset costs no digits; the standard deviation is the population's, so the
    result's is 1. Constant values become exactly 0.0. Collective: every rank calls it, also one without values.
    """
    picked = [v[m > 0].double() for v, m in zip(values, masks, strict=True)]
    flat = torch.cat(picked) if picked else torch.zeros(0, dtype=torch.float64)

    def total(*numbers: Any, op: Any = dist.ReduceOp.SUM) -> list[float]:
        box = torch.tensor([float(x) for x in numbers], dtype=torch.float64, device=_comm_device(group))
        if group is not None:
            dist.all_reduce(box, op=op, group=group)
        return box.tolist()

    count, summed = total(flat.numel(), flat.sum())
    mean = summed / max(count, 1.0)
    squares, residue = total(((flat - mean) ** 2).sum(), (flat - mean).sum())
    low, high = flat.min() if flat.numel() else torch.inf, flat.max() if flat.numel() else -torch.inf
    top, bottom = total(high, -low, op=dist.ReduceOp.MAX)
    rest = residue / max(count, 1.0)  # of the mean, beyond its last digit: apart, where float64 can hold it
    std = max(squares / max(count, 1.0) - rest**2, 0.0) ** 0.5
    if top == -bottom or std == 0.0:
        return [torch.zeros_like(v) for v in values]
    return [select((v.double() - mean - rest) / std, m).to(v.dtype) for v, m in zip(values, masks, strict=True)]


def _comm_device(group: Any) -> torch.device:
    on_gpu = group is not None and dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


class SumOfSampleMean:
    """Aggregates per-token values of a micro-batch: call it with the concatenated per-token tensor, get a scalar.

    Default: the sum over samples of (sum over the sample's trained tokens / the sample's denominator). With
    `per_token`: the sum over trained tokens. The trainer divides a loss by the step's number of samples (tokens), so
    what a micro-batch returns is its share of the step's mean, however the step was cut.
    """

    def __init__(
        self,
        loss_masks: Sequence[Tensor],
        denominators: Sequence[float] | None = None,
        *,
        per_token: bool = False,
        samples_per_token: float | None = None,
    ) -> None:
        """loss_masks: one [R_i] per sample. denominators: one per sample; None: its trained tokens.

        samples_per_token: the step's num_samples / num_tokens, which `token_mean` needs.
        """
        device = loss_masks[0].device if loss_masks else None
        self.mask = torch.cat(list(loss_masks)) if loss_masks else torch.zeros(0)
        lengths = torch.tensor([m.numel() for m in loss_masks], device=device, dtype=torch.long)
        if per_token:
            share = torch.ones(len(loss_masks), device=device)
        elif denominators is None:
            share = torch.stack([1.0 / (m > 0).sum().clamp(min=1) for m in loss_masks]) if loss_masks else lengths
        else:
            share = 1.0 / torch.tensor([max(float(d), 1.0) for d in denominators], device=device)
        self.weights = share.float().repeat_interleave(lengths)
        self.per_token, self.samples_per_token = per_token, samples_per_token

    def __call__(self, x: Tensor) -> Tensor:
        self._check(x)
        return (select(x, self.mask) * self.weights).sum()

    def token_mean(self, x: Tensor) -> Tensor:
        """Like a call, but scaled so that the step's figure is the mean over all trained tokens, in both modes."""
        self._check(x)
        scale = 1.0 if self.per_token or self.samples_per_token is None else self.samples_per_token
        return masked_sum(x, self.mask) * scale

    def _check(self, x: Tensor) -> None:
        if x.shape != self.mask.shape:
            raise ValueError(
                f"sum_of_sample_mean got {tuple(x.shape)}, but the micro-batch has {self.mask.numel()} response "
                "tokens: concatenate the samples' per-token tensors with torch.cat"
            )
