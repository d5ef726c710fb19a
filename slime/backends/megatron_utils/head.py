"""The output layer. It can hand on hidden states, so that log-probs are computed for response rows only, in chunks."""

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor

from slime.utils.vocab_parallel import linear_log_probs_and_entropy
from slime.utils.vocab_topk import linear_topk_log_probs

_ABSENT = -1e30  # logit of a padded vocabulary column: its probability is exactly zero, and 0 * logit is finite


class OutputHead(ColumnParallelLinear):
    """Megatron's output layer; with `deferred` its result is the hidden states themselves, whole on every TP rank.

    vocab_size: the model's own, without the columns that pad it for tensor parallelism.
    """

    deferred: bool
    vocab_size: int

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.deferred:
            return super().forward(input_, *args, **kwargs)
        if self.sequence_parallel:
            # The gradient of the whole sequence comes back complete on every rank: each keeps its rows.
            input_ = gather_from_sequence_parallel_region(
                input_, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return input_, None


def install_head(model: Any, vocab_size: int) -> None:
    """Turns the output layer of a model's last stage into an OutputHead, in place; its weight and name stay."""
    head = model.output_layer
    if not isinstance(head, ColumnParallelLinear):
        raise TypeError(f"the model's output_layer is {type(head).__name__}, not Megatron's ColumnParallelLinear")
    head.__class__ = OutputHead
    head.vocab_size, head.deferred = vocab_size, True


class DeferredLogits:
    """Stands for logits [1, T, V] of one packed micro-batch that are never built as a whole."""

    def __init__(self, hidden: Tensor, model: Any, *, temperature: float, chunk_size: int) -> None:
        """hidden: [1, T, H], what `model` (a GPTModel with an OutputHead) returned in deferred mode."""
        head: OutputHead = model.output_layer
        self.hidden = hidden.squeeze(0)
        self.weight = head.weight if head.weight is not None else model.shared_embedding_or_output_weight()
        self.tp_group, self.vocab_size = head.tp_group, head.vocab_size
        self.temperature, self.chunk_size = temperature, chunk_size
        self._last: tuple[Tensor, Tensor, Tensor, Tensor | None] | None = None

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    def log_probs_and_entropy(
        self, rows: Tensor, targets: Tensor, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """log softmax(logits[rows] / temperature) at `targets`, and its entropy in nats, float32.

        rows: int64 [N]; targets and their log-probs: [N] or [N, K]. Asking again for the same costs nothing.
        """
        if self._last is not None:
            old_rows, old_targets, log_probs, entropy = self._last
            same = torch.equal(old_rows, rows) and torch.equal(old_targets, targets)
            if same and (entropy is not None or not with_entropy):
                return log_probs, entropy if with_entropy else None
        log_probs, entropy = linear_log_probs_and_entropy(
            self.hidden[rows],
            self.weight,
            targets,
            tp_group=self.tp_group,
            temperature=self.temperature,
            chunk_size=self.chunk_size,
            with_entropy=with_entropy,
            vocab_size=self.vocab_size,
        )
        self._last = (rows, targets, log_probs, entropy)
        return log_probs, entropy

    def topk_log_probs(self, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k largest of log softmax(logits[rows] / temperature) and their ids: float32 and int64 [N, k]."""
        return linear_topk_log_probs(
            self.hidden[rows],
            self.weight,
            k,
            tp_group=self.tp_group,
            temperature=self.temperature,
            chunk_size=self.chunk_size,
            vocab_size=self.vocab_size,
        )


def full_logits(logits: Tensor, model: Any, *, temperature: float) -> Tensor:
    """What a custom loss sees: float32 logits [1, T, V / tp] divided by the temperature, padded columns at -1e30."""
    head: OutputHead = model.output_layer
    out = logits.float() / temperature
    columns = out.size(-1)
    absent = head.tp_group.rank() * columns + columns - head.vocab_size
    if absent > 0:
        keep = max(0, columns - absent)
        out = torch.cat([out[..., :keep], torch.full_like(out[..., keep:], _ABSENT)], dim=-1)
    return out
