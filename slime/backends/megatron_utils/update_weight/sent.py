"""What one rank sent in one update, counted and digested on the way."""

from dataclasses import dataclass

import torch

from slime.backends.sglang_utils.checksum import EngineDigests

Digests = list[dict[str, str]]  # by engine rank


@dataclass(frozen=True)
class SentTotals:
    """digests: of what was sent, by size of engine."""

    tensors: int
    bytes: int
    digests: dict[int, Digests]


class Sent:
    """predictions: one per size of engine; none when this update is not checked."""

    def __init__(self, predictions: dict[int, EngineDigests]):
        self._predictions = predictions
        self._tensors = self._bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """One full tensor, in the memory that it is sent from."""
        self._tensors += 1
        self._bytes += tensor.nbytes
        for prediction in self._predictions.values():
            prediction.add(name, tensor)

    def finish(self) -> SentTotals:
        digests = {tp_size: prediction.finish() for tp_size, prediction in self._predictions.items()}
        return SentTotals(self._tensors, self._bytes, digests)


def merge_digests(totals: list[SentTotals]) -> dict[int, Digests]:
    """Of all pipeline stages together, by size of engine."""
    merged: dict[int, Digests] = {}
    for total in totals:
        for tp_size, ranks in total.digests.items():
            into = merged.setdefault(tp_size, [{} for _ in range(tp_size)])
            for target, part in zip(into, ranks, strict=True):
                target.update(part)
    return merged
