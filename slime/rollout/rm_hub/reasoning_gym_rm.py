"""Scores of `reasoning-gym` tasks, by the task's own scorer in a grader process."""

import functools
from collections.abc import Callable
from typing import Any

from slime.rollout.rm_hub.answers import final_answer
from slime.rollout.rm_hub.grader_pool import grader_pool

SCORE = f"{__name__}.score"


async def reasoning_gym_reward(response: str, label: Any, metadata: dict[str, Any], timeout: float) -> float:
    """Score in [0, 1] of the final answer.

    metadata["entry"]: the entry as reasoning-gym made it; without it, the label is the answer and metadata is the
    entry's metadata. metadata["dataset"]: the task's name, else the entry's own `source_dataset`.
    Raises ValueError when no task is named, GraderError when the scorer fails.
    """
    entry = metadata.get("entry") or {"question": "", "answer": label, "metadata": metadata}
    dataset = metadata.get("dataset") or (entry.get("metadata") or {}).get("source_dataset")
    if not dataset:
        raise ValueError(
            "--rm-type reasoning_gym needs the task's name in the prompt's metadata: "
            f'"dataset" or "source_dataset"; its keys are {sorted(metadata)}'
        )
    return await grader_pool().call(SCORE, dataset, final_answer(response), entry, timeout=timeout)


def score(dataset: str, answer: str, entry: dict[str, Any]) -> float:
    """Runs in a grader process."""
    return float(_scorer(dataset)(answer, entry))


@functools.cache
def _scorer(dataset: str) -> Callable[[str, dict[str, Any]], float]:
    import reasoning_gym  # 3 s, only in the processes that grade

    return reasoning_gym.get_score_answer_fn(dataset)
