"""Samples to columns: the typed table that goes from the rollout to the trainer, one entry per sample.

Every field that a user puts into `Sample.train_metadata` becomes a column of that name and reaches the loss as
`batch[name]`. Nothing is left out in silence: what cannot be a column is an error that names the sample.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from slime.config.algorithm import GROUP_ESTIMATORS
from slime.config.errors import ConfigError
from slime.config.hooks import load_hook
from slime.utils import rewards as reward_utils
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

Columns = dict[str, list[Any]]

BOUNDED_ESTIMATORS = ("maxrl", "tailrl")  # rewards in [0, 1]: shares of success
# Names that the trainer fills itself; a user's field must not hide them.
RESERVED = frozenset(
    "tokens unconcat_tokens total_lengths response_lengths loss_masks rewards raw_reward group_ids rollout_ids "
    "sample_indices sample_denominators truncated rollout_log_probs teacher_log_probs teacher_topk_log_probs "
    "teacher_topk_indices token_log_probs log_probs ref_log_probs advantages returns values entropy".split()
)


def samples_to_columns(args: Any, samples: Sequence[Sample]) -> Columns:
    """Checks samples and turns them into columns.

    tokens: int64 [L]. total_lengths, response_lengths: int. loss_masks: float32 [R], all zero for a removed sample and
    for one whose reward is not finite (which is logged). rewards: float, what `--advantage-estimator` makes of the
    reward; raw_reward: float. group_ids, rollout_ids, sample_indices: int. truncated: 0 or 1. rollout_log_probs,
    teacher_log_probs: float32 [R], columns only if all samples have them; so too teacher_topk_log_probs float32 [R, K]
    and teacher_topk_indices int32 [R, K]. Then the user's fields: per-token lists as float32 or int64 arrays,
    everything else as it is.
    Raises ValueError that names the sample and the field, and ConfigError where samples do not fit the flags.
    """
    if not samples:
        raise ValueError("the rollout gave no samples: nothing to train on")
    for i, sample in enumerate(samples):
        _check_lengths(sample, _name(sample, i))
    masks = [_loss_mask(sample, _name(sample, i)) for i, sample in enumerate(samples)]
    raw, scalars = _rewards(args, samples, masks)
    for i, sample in enumerate(samples):
        if masks[i].any() and not (np.isfinite(raw[i]) and np.isfinite(scalars[i])):
            logger.warning(
                "%s is not trained: its reward is %s, trained on as %s", _name(sample, i), raw[i], scalars[i]
            )
            masks[i] = np.zeros_like(masks[i])
    columns: Columns = {
        "tokens": [np.asarray(s.tokens, np.int64) for s in samples],
        "total_lengths": [len(s.tokens) for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "loss_masks": masks,
        "rewards": [float(r) if np.isfinite(r) else 0.0 for r in scalars],
        "raw_reward": [float(r) for r in raw],
        "group_ids": _unique_where_none([s.group_index for s in samples]),
        "rollout_ids": _unique_where_none([s.rollout_id for s in samples]),
        "sample_indices": [i if s.index is None else s.index for i, s in enumerate(samples)],
        "truncated": [int(s.status is Sample.Status.TRUNCATED) for s in samples],
    }
    needed = needed_log_probs(args)
    for name in ("rollout_log_probs", "teacher_log_probs"):
        values = _per_token(samples, masks, name, needed.get(name))
        if values is not None:
            columns[name] = values
    columns.update(_teacher_topk(args, samples, masks, needed.get("teacher_topk_log_probs")))
    columns.update(_user_fields(samples))
    return columns


def needed_log_probs(args: Any) -> dict[str, str]:
    """Log-probs that trained samples must carry for the run's flags: the field, and the flag that asks for it."""
    if args.loss_type != "policy_loss":
        return {}
    out = {}
    for flag in ("use_tis", "use_rollout_logprobs", "custom_tis_function_path"):
        if getattr(args, flag):
            out["rollout_log_probs"] = "--" + flag.replace("_", "-")
    distils = args.advantage_estimator == "on_policy_distillation"
    if (distils or args.opd_kl_coef) and not (args.opd_teacher_load or args.custom_advantage_function_path):
        what = "--advantage-estimator on_policy_distillation" if distils else "--opd-kl-coef"
        out["teacher_topk_log_probs" if args.distill_topk else "teacher_log_probs"] = what
    return out


def check_log_probs(args: Any, sample: Sample) -> None:
    """Raises ConfigError when a trained sample lacks the engine's log-probs and a flag needs them."""
    flag = needed_log_probs(args).get("rollout_log_probs")
    if flag and sample.rollout_log_probs is None and sample.effective_response_length and not sample.remove_sample:
        raise ConfigError(_no_log_probs(_name(sample, 0), "rollout_log_probs", flag))


def check_reward(args: Any, reward: float, name: str) -> None:
    """Raises ConfigError for a reward that `--advantage-estimator` has no formula for; name: of its sample."""
    if args.advantage_estimator in BOUNDED_ESTIMATORS and np.isfinite(reward) and not 0 <= reward <= 1:
        raise ConfigError(
            f"--advantage-estimator {args.advantage_estimator} needs rewards in [0, 1]: {name} has {reward:g}; rescale "
            "them in the reward function or by --custom-reward-post-process-path, or choose another estimator"
        )


def _no_log_probs(name: str, field: str, flag: str) -> str:
    where = "`append_response_tokens` takes log_probs" if field == "rollout_log_probs" else "--opd-teacher-url does it"
    return (
        f"{flag} needs Sample.{field} on every trained sample, {name} has none: set it in the generate or rollout "
        f"function ({where}), or leave {flag} out"
    )


def estimator_rewards(args: Any, rewards: np.ndarray, group_ids: Sequence[Hashable]) -> np.ndarray:
    """The scalar of each rollout that `--advantage-estimator` trains on; float64 [n], all rewards finite.

    With --disable-rewards-normalization it is the reward itself, and for maxrl and tailrl the uncentred weight.
    reinforce_plus_plus_baseline only centres: its scale comes from whitening over the batch.
    """
    plain = args.disable_rewards_normalization
    std = not args.disable_grpo_std_normalization
    estimators: dict[str, Callable[[], np.ndarray]] = {
        "grpo": lambda: reward_utils.group_norm(rewards, group_ids, std=std),
        "gspo": lambda: reward_utils.group_norm(rewards, group_ids, std=std),
        "cispo": lambda: reward_utils.group_norm(rewards, group_ids, std=std),
        "rloo": lambda: reward_utils.rloo(rewards, group_ids),
        "maxrl": lambda: reward_utils.maxrl(rewards, group_ids, centred=not plain),
        "tailrl": lambda: reward_utils.tailrl(rewards, group_ids, centred=not plain),
        "reinforce_plus_plus_baseline": lambda: reward_utils.group_norm(rewards, group_ids, std=False),
    }
    name = args.advantage_estimator
    if name not in estimators or (plain and name not in ("maxrl", "tailrl")):
        return np.asarray(rewards, np.float64)
    return estimators[name]()


def _rewards(args: Any, samples: Sequence[Sample], masks: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(raw, scalar) rewards, float64 [n]. Statistics leave out samples that nothing is trained of, and NaN rewards."""
    if args.loss_type == "sft_loss" or (args.loss_type == "custom_loss" and all(s.reward is None for s in samples)):
        raw = np.array([0.0 if s.reward is None else s.get_reward_value(args) for s in samples])
        return raw, np.zeros(len(samples))
    hook = load_hook(args, "custom_reward_post_process_path")
    if hook is not None:
        return _from_hook(args, samples, hook)
    raw = np.array([np.nan if s.remove_sample and s.reward is None else s.get_reward_value(args) for s in samples])
    counted = [i for i, mask in enumerate(masks) if mask.any() and np.isfinite(raw[i])]
    for i in counted:
        check_reward(args, raw[i], _name(samples[i], i))
    if args.advantage_estimator in GROUP_ESTIMATORS and not args.disable_rewards_normalization:
        loose = next((i for i in counted if samples[i].group_index is None), None)
        if loose is not None:
            raise ValueError(
                f"{_name(samples[loose], loose)} has no group_index, but --advantage-estimator "
                f"{args.advantage_estimator} compares samples of one group: set Sample.group_index, or train on raw "
                "rewards with --disable-rewards-normalization"
            )
    # Pieces of one rollout with one reward are one observation: a rollout cut into many must not count many times.
    groups = _unique_where_none([s.group_index for s in samples])
    rollouts = _unique_where_none([s.rollout_id for s in samples])
    keys = [(groups[i], rollouts[i], raw[i]) for i in counted]
    order = list(dict.fromkeys(keys))
    values = estimator_rewards(args, np.array([reward for _, _, reward in order]), [group for group, _, _ in order])
    by_key = dict(zip(order, values, strict=True))
    scalars = np.zeros(len(samples))
    for i, key in zip(counted, keys, strict=True):
        scalars[i] = by_key[key]
    return raw, scalars


def _from_hook(args: Any, samples: Sequence[Sample], hook: Callable[..., Any]) -> tuple[np.ndarray, np.ndarray]:
    flag = f"--custom-reward-post-process-path {args.custom_reward_post_process_path}"
    result = hook(args, samples)
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(f"{flag}: it must return (raw_rewards, rewards), it returned {type(result).__name__}")
    out = [np.asarray([float(x) for x in column], np.float64) for column in result]
    for name, column in zip(("raw_rewards", "rewards"), out, strict=True):
        if column.size != len(samples):
            raise ValueError(f"{flag}: {column.size} {name} for {len(samples)} samples")
    return out[0], out[1]


def _check_lengths(sample: Sample, name: str) -> None:
    total, response = len(sample.tokens), sample.response_length
    if not 0 <= response <= total:
        raise ValueError(f"{name}: response_length {response} with {total} tokens (prompt and response together)")
    if response == total:
        raise ValueError(
            f"{name}: no prompt token ({total} tokens, all of them response); the first response token would have no "
            "log-prob: start the prompt with at least one token, such as BOS"
        )
    for field in ("loss_mask", "rollout_log_probs", "teacher_log_probs"):
        values = getattr(sample, field)
        if values is not None and len(values) != response:
            raise ValueError(f"{name}: {len(values)} {field} for {response} response tokens")


def _loss_mask(sample: Sample, name: str) -> np.ndarray:
    if sample.remove_sample:
        return np.zeros(sample.response_length, np.float32)
    if sample.loss_mask is None:
        return np.ones(sample.response_length, np.float32)
    mask = np.asarray(sample.loss_mask, np.float32)
    if not np.isin(mask, (0.0, 1.0)).all():
        raise ValueError(f"{name}: loss_mask must hold 0 and 1 only; put weights into train_metadata['token_weights']")
    return mask


def _per_token(
    samples: Sequence[Sample], masks: Sequence[np.ndarray], name: str, needed_for: str | None
) -> list[np.ndarray] | None:
    """float32 [R] arrays, or None unless all trained samples have the field; one that is not trained may lack it."""
    trained = [i for i, mask in enumerate(masks) if mask.any()]
    lacking = [i for i in trained if getattr(samples[i], name) is None]
    if lacking:
        first = _name(samples[lacking[0]], lacking[0])
        if needed_for:
            raise ConfigError(_no_log_probs(first, name, needed_for))
        if len(lacking) < len(trained):
            logger.warning(
                "%s is left out of this rollout: %d samples have none, the first is %s", name, len(lacking), first
            )
        return None
    if needed_for is None and all(getattr(s, name) is None for s in samples):
        return None
    empty = (np.zeros(s.response_length) if getattr(s, name) is None else getattr(s, name) for s in samples)
    return [np.asarray(values, np.float32) for values in empty]


_TOPK = {"teacher_topk_log_probs": np.float32, "teacher_topk_indices": np.int32}


def _teacher_topk(args: Any, samples: Sequence[Sample], masks: Sequence[np.ndarray], needed_for: str | None) -> Columns:
    """A teacher's K most likely tokens, [R, K] each, checked on trained tokens. Empty where no sample has them."""
    trained = [i for i, mask in enumerate(masks) if mask.any()]
    lacking = [i for i in trained if any(getattr(samples[i], name) is None for name in _TOPK)]
    if lacking:
        what = _no_log_probs(
            _name(samples[lacking[0]], lacking[0]), " and ".join(_TOPK), needed_for or "--distill-topk"
        )
        if needed_for or len(lacking) < len(trained):
            raise ConfigError(what)
    if lacking or not trained:
        return {}
    k = args.distill_topk or len(samples[trained[0]].teacher_topk_indices[0])  # type: ignore[index]
    out: Columns = {name: [] for name in _TOPK}
    for i, sample in enumerate(samples):
        shape = (sample.response_length, k)
        for name, dtype in _TOPK.items():
            out[name].append(_rows_of_k(getattr(sample, name), dtype, shape, f"{_name(sample, i)}: {name}"))
        bad = np.flatnonzero((masks[i] > 0) & ~_are_topk(*(out[name][i] for name in _TOPK)))
        if bad.size:
            raise ValueError(
                f"{_name(sample, i)}: row {bad[0]} of {' and '.join(_TOPK)} is not {k} different tokens with finite "
                "log-probs that have 1 or less together; mask tokens that the teacher did not score"
            )
    return out


def _rows_of_k(values: Any, dtype: Any, shape: tuple[int, int], what: str) -> np.ndarray:
    if shape[0] == 0 or values is None:  # not trained
        return np.zeros(shape, dtype)
    try:
        rows = np.asarray(values, dtype)
    except (ValueError, TypeError):  # ragged
        rows = np.zeros(0)
    if rows.shape != shape:
        raise ValueError(f"{what} must be {shape[0]} rows, one per response token, of {shape[1]} numbers")
    return rows


def _are_topk(log_probs: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """bool [R]: rows of different ids whose log-probs are finite and have a mass of at most 1 (and rounding)."""
    with np.errstate(over="ignore", invalid="ignore"):
        mass = np.exp(log_probs.astype(np.float64)).sum(1)
    different = (np.diff(np.sort(ids, axis=1), axis=1) > 0).all(1) & (ids >= 0).all(1)
    return np.isfinite(log_probs).all(1) & (mass <= 1.001) & different


def _user_fields(samples: Sequence[Sample]) -> Columns:
    names = list(dict.fromkeys(key for s in samples for key in s.train_metadata or {}))
    out: Columns = {}
    for key in names:
        if key in RESERVED:
            raise ValueError(f"train_metadata[{key!r}]: the trainer uses this name itself; choose another")
        values = []
        for i, sample in enumerate(samples):
            if key not in (sample.train_metadata or {}):
                raise ValueError(
                    f"{_name(sample, i)} has no train_metadata[{key!r}], but others do: set it on all or on none"
                )
            values.append(_plain(sample.train_metadata[key]))  # type: ignore[index]
        out[key] = values
    return out


def _plain(value: Any) -> Any:
    """Lists of numbers become arrays (float32, int64), so that they reach the loss as tensors."""
    if isinstance(value, np.ndarray) or not isinstance(value, list | tuple):
        return value
    try:
        array = np.asarray(value)
    except ValueError:  # ragged
        return value
    if array.dtype.kind == "f":
        return array.astype(np.float32)
    return array.astype(np.int64) if array.dtype.kind in "biu" else value


def _unique_where_none(ids: Sequence[int | None]) -> list[int]:
    """Missing ids become negative numbers of their own: each such sample is by itself."""
    return [-1 - i if value is None else value for i, value in enumerate(ids)]


def _name(sample: Sample, position: int) -> str:
    return f"sample {position if sample.index is None else sample.index}"
