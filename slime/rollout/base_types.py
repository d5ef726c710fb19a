"""What a rollout function returns, and how a rollout fails."""

import dataclasses
from collections.abc import Callable
from typing import Any

from slime.utils.types import Sample


@dataclasses.dataclass
class RolloutFnTrainOutput:
    """samples: groups of samples of the same prompt. metrics: further numbers for the step's log."""

    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


@dataclasses.dataclass
class RolloutFnEvalOutput:
    """data: per data set {"rewards": list, "truncated": list[bool], "samples": list[Sample]}."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


class RolloutError(RuntimeError):
    """A rollout cannot go on: says which sample and why; the cause (with the user's traceback) is chained."""


def call_rollout_fn(
    function: Callable[..., Any], args: Any, rollout_id: int, data_source: Any, *, evaluation: bool
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Calls a rollout function; a bare list of groups, or a bare dict of evaluation data, is wrapped."""
    output = function(args, rollout_id, data_source, evaluation=evaluation)
    expected = RolloutFnEvalOutput if evaluation else RolloutFnTrainOutput
    if isinstance(output, expected):
        return output
    if isinstance(output, dict if evaluation else list):
        return expected(output)  # type: ignore[arg-type]
    name = getattr(function, "__qualname__", function)
    raise TypeError(
        f"rollout function {name} returned {type(output).__name__} with evaluation={evaluation}; "
        f"expected {expected.__name__} or a {'dict' if evaluation else 'list of groups'}"
    )
