"""Matrix products on a CPU engine with weights packed once, where torch packs them anew for every call.

A decode step multiplies a few rows with every weight of the model, so packing is most of its time. oneDNN keeps packed
weights (as `torch.compile` uses them); they live beside the parameters and are made again after each weight update.
On CPUs without instructions for bf16 they are float32: torch's own products are slow there.
SGLang loads it through its own plug-in seam, as `cpu_attention.py`.
"""

import pkgutil
import weakref
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from slime.utils.cpu_bf16 import cpu_has_bf16

_LINEAR = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply"
_HEAD = "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
# Every way in which SGLang changes the weights of a live engine.
_UPDATES = [
    f"{_UPDATER}.{name}"
    for name in (
        "update_weights_from_disk",
        "load_weights_from_distributed",
        "update_weights_from_tensor",
        "update_weights_from_ipc",
    )
]
_ROWS = 16  # what the blocks of a packed weight are chosen for; other numbers of rows work as well


class PackedWeights:
    """Packed copies of the weights of layers, as long as the layers live and their weights stay the same."""

    def __init__(self) -> None:
        self._packed: weakref.WeakKeyDictionary[torch.nn.Module, torch.Tensor] = weakref.WeakKeyDictionary()

    def forget(self, *args: Any, **kwargs: Any) -> None:
        """The weights are about to change: pack again at the next use."""
        self._packed.clear()

    def product(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., in] times layer.weight [out, in], plus bias [out]: [..., out], all of one dtype.

        bf16 is computed in float32 and rounded once, at the end.
        """
        packed = self._packed.get(layer)
        if packed is None:
            weight: Any = layer.weight
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().float(), _ROWS)
            self._packed[layer] = packed
        wide_bias = None if bias is None else bias.float()
        return torch.ops.mkldnn._linear_pointwise(x.float(), packed, wide_bias, "none", [], "").to(x.dtype)

    def linear(
        self,
        usual: Callable[..., torch.Tensor],
        method: Any,
        layer: torch.nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Around `UnquantizedLinearMethod.apply`."""
        return self.product(layer, x, bias) if _fits(layer.weight, x) else usual(method, layer, x, bias)

    def head(
        self,
        usual: Callable[..., torch.Tensor],
        processor: Any,
        hidden_states: torch.Tensor,
        lm_head: torch.nn.Module,
        embedding_bias: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Around `LogitsProcessor._compute_lm_head`, which leaves the bias to quantized heads."""
        plain = type(getattr(lm_head, "quant_method", None)).__name__ in ("NoneType", "UnquantizedEmbeddingMethod")
        if plain and not hasattr(lm_head, "set_lora") and _fits(getattr(lm_head, "weight", None), hidden_states):
            return self.product(lm_head, hidden_states, None)
        return usual(processor, hidden_states, lm_head, embedding_bias, **kwargs)


def _fits(weight: Any, x: torch.Tensor) -> bool:
    """Whether packing pays: one float32 row alone is as fast without, and bf16 only where the CPU lacks it."""
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2 or weight.dtype != x.dtype:
        return False
    if x.dtype == torch.bfloat16:
        return not cpu_has_bf16()
    return x.dtype == torch.float32 and x.numel() > x.size(-1)


def register() -> None:
    """The plug-in's entry point. Raises before it changes anything if SGLang has moved a place where weights change."""
    for target in (_LINEAR, _HEAD, *_UPDATES):
        pkgutil.resolve_name(target)
    weights = PackedWeights()
    for target in _UPDATES:
        HookRegistry.register(target, weights.forget, HookType.BEFORE)
    HookRegistry.register(_LINEAR, weights.linear, HookType.AROUND)
    HookRegistry.register(_HEAD, weights.head, HookType.AROUND)
