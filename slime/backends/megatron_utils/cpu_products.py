"""bf16 matrix products and attention on a CPU without instructions for them.

torch has no fast kernel there (`cpu_has_bf16`). So they are computed in float32 from the same bf16 numbers, and rounded
to bf16 once, at the end: what a kernel that accumulates in float32 means to give.
"""

import contextlib
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slime.backends.megatron_utils.device import has_cuda
from slime.utils.cpu_bf16 import cpu_has_bf16

_aten = torch.ops.aten
# How many of an operation's results are rounded; the others, as attention's log-sum-exp, are float32 by contract.
_ROUNDED = {
    _aten.mm.default: 1,
    _aten.addmm.default: 1,
    _aten.bmm.default: 1,
    _aten.baddbmm.default: 1,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 1,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 3,
}


class Float32Products(TorchDispatchMode):
    """Inside, on the thread that entered it, these operations on bf16 tensors compute in float32; forward and
    backward alike. Results keep their dtypes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rounded = _ROUNDED.get(func)
        if rounded is None or args[0].dtype != torch.bfloat16:
            return func(*args, **(kwargs or {}))
        widened = {name: _widened(value) for name, value in (kwargs or {}).items()}
        out = func(*map(_widened, args), **widened)
        if isinstance(out, torch.Tensor):
            return out.bfloat16()
        return tuple(value.bfloat16() if i < rounded else value for i, value in enumerate(out))


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value


def fast_products() -> contextlib.AbstractContextManager[Any]:
    """Float32Products where they are faster, nothing elsewhere."""
    if has_cuda() or cpu_has_bf16():
        return contextlib.nullcontext()
    return Float32Products()
