"""What a dynamic sampling filter returns."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass
class DynamicFilterOutput:
    """keep: train on the group. reason: counted in the metrics when it is dropped."""

    keep: bool
    reason: str | None = None


def call_dynamic_filter(
    function: Callable[..., Any] | None, args: Any, samples: list[Any], **kwargs: Any
) -> DynamicFilterOutput:
    """The filter's verdict; without a filter every group is kept. A bare bool is wrapped."""
    if function is None:
        return DynamicFilterOutput(True)
    verdict = function(args, samples, **kwargs)
    if isinstance(verdict, DynamicFilterOutput):
        return verdict
    keep = getattr(verdict, "keep", verdict)  # a plug-in may bring its own result class
    return DynamicFilterOutput(bool(keep), getattr(verdict, "reason", None))
