"""The critic's output layer: one value per token, in place of the vocabulary's logits."""

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

# Its parameters by Megatron's names. No Hugging Face folder holds them, and an actor's checkpoint holds others there.
NAMES = ("output_layer.weight", "output_layer.bias")


class ValueHead(torch.nn.Module):
    """Hidden states [T, 1, H] to values [T, 1, 1], in float32 whatever the model's dtype.

    Whole on every tensor-parallel rank, and fed the whole sequence there: all ranks compute the same gradient, so
    nothing has to be reduced and nothing can drift apart. A fresh head is zero: the first values are 0, the first
    advantages the plain returns, and no layout draws other random numbers.
    """

    def __init__(self, config: Any, tp_group: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype))
        self.sequence_parallel, self.tp_group = config.sequence_parallel, tp_group

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        if self.sequence_parallel:
            # The gradient of the whole sequence comes back complete on every rank: each keeps its rows.
            input_ = gather_from_sequence_parallel_region(
                input_, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return torch.nn.functional.linear(input_.float(), self.weight.float(), self.bias.float()), None


def install_value_head(model: Any) -> None:
    """Puts a fresh ValueHead in the place of the output layer of a model's last stage."""
    if model.share_embeddings_and_output_weights:
        raise TypeError("a critic cannot share its output layer with its embeddings: build the model with them untied")
    model.output_layer = ValueHead(model.config, model.output_layer.tp_group)
