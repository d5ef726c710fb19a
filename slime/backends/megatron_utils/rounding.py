"""Layer modules that round to bf16 either after each operation, as unfused code does, or once per region.

Weights, matrix products and attention are the same both ways; what differs is where intermediates are rounded, and a
trainer that rounds elsewhere than its engine computes other log-probs from the same weights. Regions (R: round to
bf16; all else float32; docs/rounding.md says which engine does what):

| region | stepwise                                | once                                   |
|--------|-----------------------------------------|----------------------------------------|
| rope   | R(R(a R(cos)) + R(-b R(sin)))           | R(a cos - b sin)                       |
| swiglu | R(R(silu(g)) u)                         | R(silu(g) u)                           |
| norm   | h = R(x + res); y = R(h / rms(h) w)     | h = x + res; y = R(h / rms(h) w); res' = R(h) |

In `norm` the unrounded h is what goes from one part to the next, in float32: also between pipeline stages. Gradients
pass a rounding as if it were not there. `set_regions` switches a living model.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.utils import get_model_config
from torch import Tensor
from torch.nn.functional import silu

from slime.backends.megatron_utils.attention_cp import ContiguousSelfAttention


def set_regions(chunks: Sequence[torch.nn.Module], regions: Collection[str]) -> None:
    """From now on the regions named here are rounded once in these model chunks, bare or wrapped, and no others.

    Between a forward pass and its backward pass nothing may change. Does nothing to modules of other specs.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, Region):
                module.one_round = module.region in regions
        config = get_model_config(chunk)
        config.pipeline_dtype = torch.float32 if "norm" in regions else config.params_dtype


class Region:
    """A module with a region: its name, and whether it is rounded once."""

    region: str
    one_round: bool = False


class _FloatRope(Region):
    """Megatron applies rotary embedding in the dtype of queries and keys, cosines and sines included: so they come in
    float32, and the core attention rounds what it is given (`PackedAttention`)."""

    region = "rope"

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        query, key, *rest = super().get_query_key_value_tensors(*args, **kwargs)  # type: ignore[misc]
        return (query.float(), key.float(), *rest) if self.one_round else (query, key, *rest)


class RegionSelfAttention(_FloatRope, SelfAttention):
    """Megatron's self-attention with the region `rope`, for our core attention."""


class RegionContiguousSelfAttention(_FloatRope, ContiguousSelfAttention):
    """The same for the contiguous cut of context parallelism."""


class FusedRopeSelfAttention(Region, SelfAttention):
    """For Transformer Engine, whose fused rotary embedding rounds once; Megatron's own rounds after each operation."""

    region = "rope"

    @property
    def one_round(self) -> bool:  # type: ignore[override]
        return self.config.apply_rope_fusion

    @one_round.setter
    def one_round(self, value: bool) -> None:
        self.config.apply_rope_fusion = value


class _SwiGLU(torch.autograd.Function):
    """silu(g) * u in float32, rounded once (Shazeer 2020, arXiv:2002.05202). Keeps its input only.

    d/dg = u s (1 + g (1 - s)) and d/du = g s with s = sigmoid(g).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.float().chunk(2, dim=-1)
        return (silu(gate) * up).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        gate, up = x.float().chunk(2, dim=-1)
        s, grad = gate.sigmoid(), grad.float()
        return torch.cat([grad * up * s * (1 + gate * (1 - s)), grad * gate * s], dim=-1).to(x.dtype)


class SwiGLU(Region, torch.nn.Module):
    """The gated activation of an MLP: [..., 2 F], gate first, to [..., F]."""

    region = "swiglu"

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        if self.one_round:
            return _SwiGLU.apply(x)
        gate, up = x.chunk(2, dim=-1)
        return silu(gate) * up

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Nothing: it has no weights. Megatron's MLP asks every part."""
        return {}


class _UnroundedSum(torch.autograd.Function):
    """x + R(residual) in float32: bf16 and float32 (or bf16) to float32. The gradient of R is one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor) -> Tensor:
        ctx.dtypes = x.dtype, residual.dtype
        return x.float().add_(residual.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, residual = ctx.dtypes
        return grad.to(x), grad.to(residual)


class ResidualAdd(Region, torch.nn.Module):
    """The sum of a part's output and the residual stream, in the place of Megatron's bias-dropout-add.

    Rounded once, what it hands on is the unrounded sum; the next norm reads it as it is (`RMSNorm` takes float32 and
    returns its weight's dtype), and the next sum rounds it first, as an engine does that stores the stream in bf16.
    """

    region = "norm"

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        return self._add

    def _add(self, output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        output, bias = output_with_bias
        if bias is not None or dropout:
            raise ValueError("rounding regions know neither a bias of the output projection nor dropout")
        return _UnroundedSum.apply(output, residual) if self.one_round else residual + output
