"""Rewards: the built-in types of --rm-type, and the user's function.

Which reward a sample gets: its own `custom_rm_path`, else --custom-rm-path, else metadata["rm_type"], else --rm-type.
A type with the prefix `boxed_` sees only the content of the response's last box.
"""

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable
from typing import Any

from slime.config.hooks import load_by_path
from slime.config.rewards import label_fault
from slime.rollout.rm_hub.answers import as_labels, exact_match, f1_score, final_answer
from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.math_dapo_utils import compute_score
from slime.rollout.rm_hub.math_utils import extract_answer, grade_answer_verl, math_reward
from slime.rollout.rm_hub.reasoning_gym_rm import reasoning_gym_reward
from slime.utils.http_utils import post
from slime.utils.types import Sample

Reward = float | dict[str, Any]

__all__ = [
    "RM_TYPES",
    "async_rm",
    "batched_async_rm",
    "compute_score",
    "extract_answer",
    "f1_score",
    "get_deepscaler_rule_based_reward",
    "grade_answer_verl",
    "has_reward",
]


async def async_rm(args: Any, sample: Sample, **kwargs: Any) -> Reward:
    """The reward of one sample. kwargs go to a custom reward function."""
    path = sample.custom_rm_path or args.custom_rm_path
    if path is not None:
        return await _call(load_by_path(path), args, sample, **kwargs)
    rm_type = _rm_type(args, sample)
    response = sample.response
    if rm_type.startswith("boxed_"):
        response, rm_type = extract_answer(response) or "", rm_type.removeprefix("boxed_")
    if rm_type not in RM_TYPES:
        raise ValueError(f"--rm-type {rm_type!r} is unknown; built in are {', '.join(RM_TYPES)}")
    if (fault := label_fault(rm_type, sample.label)) is not None:
        raise ValueError(f"--rm-type {rm_type} {fault}: sample {sample.index}")
    return await RM_TYPES[rm_type](args, sample, response)


async def batched_async_rm(args: Any, samples: list[Sample], **kwargs: Any) -> list[Reward]:
    """Rewards of several samples; with --group-rm the custom function gets the whole list at once."""
    if args.group_rm and args.custom_rm_path is not None:
        rewards = await _call(load_by_path(args.custom_rm_path), args, samples, **kwargs)
        if rewards is None or len(rewards) != len(samples):
            found = "None" if rewards is None else f"{len(rewards)} rewards"
            raise ValueError(f"--group-rm: {args.custom_rm_path} returned {found} for {len(samples)} samples")
        return list(rewards)
    return list(await asyncio.gather(*(async_rm(args, s, **kwargs) for s in samples)))


def has_reward(args: Any, sample: Sample) -> bool:
    """Whether a reward function is set for this sample."""
    return bool(sample.custom_rm_path or args.custom_rm_path or sample.metadata.get("rm_type") or args.rm_type)


async def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = function(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result


def _rm_type(args: Any, sample: Sample) -> str:
    rm_type = (sample.metadata.get("rm_type") or args.rm_type or "").strip()
    if not rm_type:
        raise ValueError("no reward is set: give --rm-type or --custom-rm-path")
    return rm_type


async def _math(args: Any, sample: Sample, response: str) -> Reward:
    return await math_reward(response, sample.label, args.rm_timeout)


async def _exact(args: Any, sample: Sample, response: str) -> Reward:
    return exact_match(response, sample.label)


async def _f1(args: Any, sample: Sample, response: str) -> Reward:
    return max(f1_score(final_answer(response), str(x))[0] for x in as_labels(sample.label))


async def _reasoning_gym(args: Any, sample: Sample, response: str) -> Reward:
    return await reasoning_gym_reward(response, sample.label, sample.metadata, args.rm_timeout)


async def _remote(args: Any, sample: Sample, response: str) -> Reward:
    if not args.rm_url:
        raise ValueError("--rm-type remote_rm needs --rm-url")
    payload = {"prompt": sample.prompt, "response": response, "label": sample.label}
    return await post(args.rm_url, payload, timeout=args.rm_timeout)


async def _deepscaler(args: Any, sample: Sample, response: str) -> Reward:
    return await asyncio.to_thread(get_deepscaler_rule_based_reward, response, sample.label)


async def _dapo(args: Any, sample: Sample, response: str) -> Reward:
    return compute_score(response, str(sample.label))


async def _random(args: Any, sample: Sample, response: str) -> Reward:
    return float(random.Random(f"{args.rollout_seed}-{sample.index}").random() < 0.5)


RM_TYPES: dict[str, Callable[[Any, Sample, str], Awaitable[Reward]]] = {
    "math": _math,
    "exact": _exact,
    "f1": _f1,
    "reasoning_gym": _reasoning_gym,
    "remote_rm": _remote,
    "deepscaler": _deepscaler,
    "dapo": _dapo,
    "random": _random,
}
