"""What one rank sent in one update, counted and digested on the way."""

from dataclasses import dataclass

from slime.backends.megatron_utils.update_weight.bucket import Bucket
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

    def add(self, bucket: Bucket) -> None:
        """Its full tensors, in the memory that they are sent from. On CPU it may change afterwards."""
        self._tensors += len(bucket.tensors)
        self._bytes += bucket.data.nbytes
        for prediction in self._predictions.values():
            for name, tensor in zip(bucket.names, bucket.tensors, strict=True):
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
