"""DeepSeek's latent attention on Megatron's own parallel layers, with gradients that do not depend on the layout."""

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention


class LatentAttention(MLASelfAttention):
    """Megatron's, but the keys' rotary part gets the gradients of all heads.

    That part is shared by all heads, and a tensor-parallel rank has some of them. Where the layer that makes it is
    cut over ranks (`ColumnParallelLinear`), Megatron 0.16 gathers its output and each rank then keeps its own heads'
    gradient as if it were the whole. Here the gathered rows are handed on as a layer that is not cut would do, this
    rank's part of the sequence: from those Megatron sums the heads. It needs sequence parallelism, as experts do.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.tp_group.size() > 1:
            self.linear_kv_down_proj.register_forward_hook(self._whole_rows)

    def _whole_rows(
        self, module: torch.nn.Module, inputs: Any, output: tuple[torch.Tensor, Any]
    ) -> tuple[torch.Tensor, Any]:
        """[s, b, (kv_lora_rank + rope) / tp] -> [s / tp, b, kv_lora_rank + rope]."""
        rows = gather_from_tensor_model_parallel_region(output[0], group=self.tp_group)
        return scatter_to_sequence_parallel_region(rows, group=self.tp_group), output[1]
