"""Failing together: what one rank meets, all ranks raise, so that none waits in a collective for one that left."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


class WeightSyncError(RuntimeError):
    """The engines did not take the weights. Raised with the same message on every trainer rank."""


def together(group: Any, work: Callable[[], Any] | None, what: str) -> Any:
    """Runs `work` on the ranks that have some, then waits for all ranks of `group` (gloo).

    Returns what `work` returned here. Raises WeightSyncError on every rank when it failed on any.
    """
    result, fault = None, None
    if work is not None:
        try:
            result = work()
        except Exception as error:
            fault = error
    told: list[Any] = [None] * dist.get_world_size(group)
    text = f"{what}: {fault if isinstance(fault, WeightSyncError) else _words(fault)}" if fault else None
    dist.all_gather_object(told, text, group=group)
    first = next((t for t in told if t), None)
    if first is not None:
        raise WeightSyncError(first) from fault
    return result


def _words(fault: Exception | None) -> str:
    """EngineErrors speak for themselves; others need their kind to be understood."""
    from slime.backends.sglang_utils.client import EngineError

    return str(fault) if isinstance(fault, EngineError) else f"{type(fault).__name__}: {fault}"
