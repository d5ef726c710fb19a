"""RMSNorm of the torch layer spec: computed in float32, rounded once, and aware of sequence parallelism."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _RMSNorm(torch.autograd.Function):
    """y = x / sqrt(mean(x^2) + eps) * w (Zhang and Sennrich 2019, arXiv:1910.07467) with a hand-written backward.

    Torch composes its CPU backward from many more passes; on CPU this one takes a tenth of the time.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x32 = x.float()
        mean_square = torch.linalg.vector_norm(x32, dim=-1, keepdim=True).square_().div_(x.size(-1))
        inv_rms = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inv_rms)
        return (x32 * inv_rms).mul_(weight).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        x, weight, inv_rms = ctx.saved_tensors
        normed = x.float() * inv_rms
        grad32 = grad.float()
        grad_weight = (grad32 * normed).flatten(0, -2).sum(0)
        grad32 = grad32 * weight.float()
        share = (grad32 * normed).mean(-1, keepdim=True)
        grad_x = normed.mul_(share).neg_().add_(grad32).mul_(inv_rms)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class RMSNorm(torch.nn.Module):
    """Normalises the last dimension of [..., hidden_size]: in float32, then rounded to the weight's dtype.

    Under sequence parallelism each tensor-parallel rank sees other rows, so the weight's gradient is a part of the
    sum; the mark `sequence_parallel` tells Megatron to add the parts.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda and x.dtype == self.weight.dtype:
            return torch.nn.functional.rms_norm(x, (x.size(-1),), self.weight, self.eps)
        return _RMSNorm.apply(x, self.weight, self.eps)


class LatentNorm(RMSNorm):
    """The norms inside of DeepSeek's latent attention, whose eps is 1e-6 whatever config.json's rms_norm_eps says."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(config, hidden_size, eps=1e-6)


class NormedResidual(torch.nn.Module):
    """residual + RMSNorm(output), in the place where Megatron adds a part's output to the residual stream (GLM-4)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm = RMSNorm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        def add(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_with_bias
            return residual + self.norm(output if bias is None else output + bias)

        return add
