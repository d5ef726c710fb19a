"""Numbers of one rollout or evaluation, from its samples."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from slime.utils.types import Sample


def rollout_metrics(args: Any, samples: Sequence[Sample], version: int | None = None) -> dict[str, float]:
    """Metrics `rollout/...` of the samples of a step.

    raw_reward: mean over the samples with a finite reward (absent where no sample has a reward, as in fine-tuning);
    raw_reward/<source>: the same per metadata["source"]. response_len_*: tokens, masked ones included.
    truncated: share of samples cut at the length limit. zero_std_groups of groups: prompts whose rewards are all
    equal, groups of one included, which teach nothing. version: the trainer's when the rollout began; with it,
    staleness/<n>: response tokens that weights n versions older than it generated.
    """
    if not samples:
        return {"rollout/samples": 0.0}
    lengths = [s.response_length for s in samples]
    out = {
        "rollout/samples": float(len(samples)),
        "rollout/response_len_mean": _mean(lengths),
        "rollout/response_len_min": float(min(lengths)),
        "rollout/response_len_max": float(max(lengths)),
        "rollout/truncated": _mean([s.status is Sample.Status.TRUNCATED for s in samples]),
        "rollout/removed_samples": float(sum(s.remove_sample for s in samples)),
        "rollout/trained_tokens": float(sum(0 if s.remove_sample else s.effective_response_length for s in samples)),
    }
    return out | _reward_metrics(args, samples) | _version_metrics(samples, version)


def eval_metrics(args: Any, output: Any) -> dict[str, float]:
    """Metrics `eval/<name>...` of a RolloutFnEvalOutput: mean of the finite rewards, truncated share, mean
    length in tokens."""
    out: dict[str, float] = {}
    for name, data in output.data.items():
        rewards = [float(r) for r in data["rewards"]]
        finite = [r for r in rewards if math.isfinite(r)]
        if finite or not rewards:
            out[f"eval/{name}"] = _mean(finite)
        out[f"eval/{name}/count"] = float(len(rewards))
        if len(finite) < len(rewards):
            out[f"eval/{name}/nonfinite_rewards"] = float(len(rewards) - len(finite))
        if data.get("truncated"):
            out[f"eval/{name}/truncated"] = _mean(data["truncated"])
        if data.get("samples"):
            out[f"eval/{name}/response_len_mean"] = _mean([s.response_length for s in data["samples"]])
    return out | dict(output.metrics or {})


def _reward_metrics(args: Any, samples: Sequence[Sample]) -> dict[str, float]:
    # A dict without --reward-key is for the user's own post-processing; no one number of it is the reward.
    has_number = args.reward_key is not None or not any(isinstance(s.reward, dict) for s in samples)
    scored = [(s, s.get_reward_value(args)) for s in samples if s.reward is not None and has_number]
    finite = [(s, r) for s, r in scored if math.isfinite(r)]
    if not finite:
        return {}
    rewards = [r for _, r in finite]
    mean = _mean(rewards)
    out = {
        "rollout/raw_reward": mean,
        "rollout/raw_reward_std": math.sqrt(_mean([(r - mean) ** 2 for r in rewards])),
        "rollout/nonfinite_rewards": float(len(scored) - len(finite)),
    }
    by_source: dict[str, list[float]] = defaultdict(list)
    by_group: dict[Any, set[float]] = defaultdict(set)
    for sample, reward in finite:
        if sample.metadata.get("source") is not None:
            by_source[str(sample.metadata["source"])].append(reward)
        if not sample.remove_sample:
            alone = ("alone", id(sample))
            by_group[alone if sample.group_index is None else sample.group_index].add(reward)
    out |= {f"rollout/raw_reward/{source}": _mean(values) for source, values in by_source.items()}
    out["rollout/groups"] = float(len(by_group))
    out["rollout/zero_std_groups"] = float(sum(len(values) == 1 for values in by_group.values()))
    return out


def _version_metrics(samples: Sequence[Sample], version: int | None) -> dict[str, float]:
    """Of the weight versions that generated the tokens: the oldest and newest, the share of samples that mix them, and
    with the trainer's `version` how many tokens each age has."""
    spans = [[span for span in s.weight_versions if isinstance(span, dict)] for s in samples]
    numbered = [(int(v), span) for of_sample in spans for span in of_sample if _is_number(v := span["version"])]
    if not numbered:
        return {}
    numbers = [number for number, _ in numbered]
    out = {
        "rollout/weight_version_min": float(min(numbers)),
        "rollout/weight_version_max": float(max(numbers)),
        "rollout/mixed_version_samples": _mean([len({span["version"] for span in s}) > 1 for s in spans]),
    }
    if version is None:
        return out
    tokens: dict[int, int] = defaultdict(int)
    for number, span in numbered:
        tokens[version - number] += span["end"] - span["start"]
    return out | {f"rollout/staleness/{age}": float(tokens[age]) for age in sorted(tokens)}


def _is_number(version: Any) -> bool:
    return str(version).removeprefix("-").isdecimal()


def _mean(values: Iterable[float]) -> float:
    values = [float(v) for v in values]
    return math.fsum(values) / len(values) if values else math.nan
