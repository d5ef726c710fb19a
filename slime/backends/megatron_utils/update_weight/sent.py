"""What one rank sent in one update, counted and digested on the way."""

import time

from slime.backends.megatron_utils.update_weight.bucket import Bucket
from slime.backends.sglang_utils.checksum import EngineDigests

Digests = list[dict[str, str]]  # by engine rank


class Sent:
    """predictions: one per size of engine; none when this update is not checked."""

    def __init__(self, predictions: dict[int, EngineDigests]):
        self._predictions = predictions
        self.tensors = self.bytes = 0

    def add(self, bucket: Bucket) -> None:
        """Digests are computed in a thread on CPU, beside the broadcast."""
        self.tensors += len(bucket.names)
        self.bytes += bucket.data.nbytes
        for prediction in self._predictions.values():
            for name, tensor in zip(bucket.names, bucket.tensors, strict=True):
                prediction.add(name, tensor)

    def wait(self) -> None:
        """Until all that was added is digested, so that its memory may be used again."""
        for prediction in self._predictions.values():
            prediction.wait()

    def finish(self) -> "SentTotals":
        started = time.perf_counter()
        digests = {tp_size: prediction.finish() for tp_size, prediction in self._predictions.items()}
        return SentTotals(self.tensors, self.bytes, digests, time.perf_counter() - started)


class SentTotals:
    """seconds: waited for digests after sending."""

    def __init__(self, tensors: int, nbytes: int, digests: dict[int, Digests], seconds: float):
        self.tensors, self.bytes, self.digests, self.seconds = tensors, nbytes, digests, seconds


def merge_digests(totals: list[SentTotals]) -> dict[int, Digests]:
    """Of all pipeline stages together, by size of engine."""
    merged: dict[int, Digests] = {}
    for total in totals:
        for tp_size, ranks in total.digests.items():
            into = merged.setdefault(tp_size, [{} for _ in range(tp_size)])
            for target, part in zip(into, ranks, strict=True):
                target.update(part)
    return merged
