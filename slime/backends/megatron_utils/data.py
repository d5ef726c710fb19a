"""A rank's samples as packed micro-batches: sequences back to back in one row (THD).

Only the zigzag cut of context parallelism pads sequences, at their ends, where no real token sees it.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from slime.backends.megatron_utils import device
from slime.backends.megatron_utils.cp_utils import WHOLE, ContextParallel, cut_row, pad_lengths
from slime.utils.misc import batched_by_size

DUMMY_TOKENS = 2  # length of the masked sequence that an empty micro-batch runs, so that no rank skips a collective


@dataclasses.dataclass
class MicroBatch:
    """tokens, position_ids: int64 [1, T / cp]. samples: indices into the rank's columns; empty for a dummy.

    batch: what losses see, one entry per sample (see `slime/backends/megatron_utils/loss.py`).
    """

    samples: list[int]
    tokens: torch.Tensor
    position_ids: torch.Tensor
    packed: PackedSeqParams
    batch: dict[str, Any]


def to_device(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Columns of a RankData as lists of tensors on this rank's device; plain numbers and other objects stay."""
    here = device.current_device()

    def convert(name: str, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value if value.flags.writeable else value.copy())
        if isinstance(value, torch.Tensor):
            return value.to(here, torch.long if name == "tokens" else value.dtype)
        return value

    return {name: [convert(name, value) for value in values] for name, values in columns.items()}


def of_samples(given: dict[int, np.ndarray], samples: Sequence[int]) -> list[torch.Tensor]:
    """A column of this rank from what another group computed by the sample's number in the rollout."""
    here = device.current_device()
    return [torch.tensor(given[sample], device=here) for sample in samples]


def pack(
    sequences: Sequence[torch.Tensor], multiple: int = 1, context: ContextParallel = WHOLE
) -> tuple[torch.Tensor, torch.Tensor, PackedSeqParams]:
    """Token sequences (int64 [L_i]) to (tokens [1, T / cp], position_ids [1, T / cp], Megatron's PackedSeqParams).

    Positions restart at 0 in each sequence. T / cp is padded to `multiple` with a sequence of its own that nobody
    reads. With `context`, tokens and positions are this rank's, and PackedSeqParams describe the whole row, as Megatron
    and Transformer Engine expect it of the zigzag cut.
    """
    lengths = [len(s) for s in sequences]
    if min(lengths, default=0) < 1:
        raise ValueError(f"cannot pack an empty sequence; lengths are {lengths}")
    here = sequences[0].device
    padded = pad_lengths(lengths, context, multiple)
    tokens = _pad_and_join(sequences, padded)
    positions = torch.cat([torch.arange(n, device=here) for n in padded])
    bounds = torch.tensor(np.cumsum([0, *padded]), dtype=torch.int32, device=here)
    part = cut_row(padded, context) if context.size > 1 else None
    if part is not None:
        index = part.index.to(here)
        tokens, positions = tokens[index], positions[index]
        if context.contiguous:  # one run of rows, whose angles `ContiguousSelfAttention` looks up
            bounds = torch.tensor([0, len(tokens)], dtype=torch.int32, device=here)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(padded),
        max_seqlen_kv=max(padded),
    )
    # For our attention: `lengths` saves a read from the device per layer.
    packed.lengths, packed.part, packed.positions = padded, part, positions  # type: ignore[attr-defined]
    return tokens.unsqueeze(0), positions.unsqueeze(0), packed


def _pad_and_join(sequences: Sequence[torch.Tensor], lengths: Sequence[int]) -> torch.Tensor:
    """One row [sum of lengths]: each sequence and the zeros that it lacks; lengths may have one more than sequences."""
    out = torch.zeros(sum(lengths), dtype=torch.long, device=sequences[0].device)
    for place, tokens in zip(out.split(list(lengths)), sequences, strict=False):
        place[: len(tokens)] = tokens
    return out


def make_micro_batch(
    data: dict[str, list[Any]], samples: Sequence[int], multiple: int = 1, context: ContextParallel = WHOLE
) -> MicroBatch:
    """Packs `samples` of the rank's columns (from `to_device`); no samples give a fully masked dummy."""
    batch = {name: [values[i] for i in samples] for name, values in data.items()} if samples else _dummy(data)
    batch["unconcat_tokens"] = batch["tokens"]
    tokens, positions, packed = pack(batch["unconcat_tokens"], multiple, context)
    return MicroBatch(list(samples), tokens, positions, packed, batch)


def _dummy(data: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """One sample of two tokens, the second its masked response, with every column that real samples have."""
    here = device.current_device()
    out: dict[str, list[Any]] = {
        "tokens": [torch.zeros(DUMMY_TOKENS, dtype=torch.long, device=here)],
        "total_lengths": [DUMMY_TOKENS],
        "response_lengths": [1],
        "loss_masks": [torch.zeros(1, device=here)],
        "sample_denominators": [1.0],
    }
    for name, values in data.items():
        if name in out:
            continue
        example = values[0] if values else torch.zeros(1, device=here)
        per_token = isinstance(example, torch.Tensor) and example.dim() > 0
        out[name] = [torch.zeros((1, *example.shape[1:]), dtype=example.dtype, device=here) if per_token else example]
    return out


def repack(lengths: Sequence[int], micro_batches: Sequence[Sequence[int]], max_tokens: int | None) -> list[list[int]]:
    """Joins neighbouring micro-batches up to `max_tokens` for passes without gradient; None leaves them as they are."""
    if max_tokens is None:
        return [list(samples) for samples in micro_batches]
    joined = batched_by_size(micro_batches, lambda samples: sum(lengths[i] for i in samples), max_tokens)
    return [[i for samples in neighbours for i in samples] for neighbours in joined]


def pad_count(micro_batches: list[list[int]], multiple: int) -> list[list[int]]:
    """Adds empty micro-batches until their number is a multiple, as the interleaved pipeline schedule needs."""
    return micro_batches + [[] for _ in range(-len(micro_batches) % multiple)]


class MicroBatches:
    """Builds micro-batches on demand: one pass over them per model chunk of the pipeline rank."""

    def __init__(
        self, data: dict[str, list[Any]], plan: list[list[int]], multiple: int = 1, context: ContextParallel = WHOLE
    ) -> None:
        self.data, self.plan, self.multiple, self.context = data, plan, multiple, context
        self._kept: dict[str, list[Any]] = {}

    def keep(self, name: str, samples: Sequence[int], values: Sequence[Any]) -> None:
        """Stores per-sample values as a new column; it is in the data once every sample has one."""
        column = self._kept.setdefault(name, [None] * len(self.data["tokens"]))
        for sample, value in zip(samples, values, strict=False):  # a dummy has a value but no sample
            column[sample] = value
        if all(value is not None for value in column):
            self.data[name] = column

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[MicroBatch]:
        return (make_micro_batch(self.data, samples, self.multiple, self.context) for samples in self.plan)
