"""`Sample`: one prompt with one response, from the prompt file to the loss."""

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """Field names are slime's, so that its users' plug-ins run here.

    tokens: prompt ids followed by response ids. loss_mask, rollout_log_probs, teacher_log_probs: one value per
    response token, or None (loss_mask None means that every response token is trained).
    teacher_topk_log_probs, teacher_topk_indices: a teacher's K most likely tokens per response token, and their ids.
    group_index: the prompt's group; all group statistics go by it. index: unique number of the sample in the run.
    weight_versions: one entry per span of response tokens, {"version", "start", "end"}, relative to the response.
    Grow a response with `append_response_tokens` only: it keeps the per-token columns aligned.
    """

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[Any] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    teacher_topk_log_probs: list[list[float]] | None = None
    teacher_topk_indices: list[list[int]] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    spec_info: dict[str, Any] = field(default_factory=dict)
    prefix_cache_info: dict[str, Any] = field(default_factory=dict)

    Status = Status  # plug-ins say Sample.Status.COMPLETED; no annotation, so it is no field

    def to_dict(self) -> dict[str, Any]:
        """A plain dict (enum as text) that `from_dict` turns back; attributes that users added are kept."""
        out = {f.name: copy.copy(getattr(self, f.name)) for f in dataclasses.fields(self)}
        out.update({k: v for k, v in self.__dict__.items() if k not in out})
        out["status"] = self.status.value
        return out

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Sample":
        """Inverse of `to_dict`; unknown keys become attributes."""
        known = {f.name for f in dataclasses.fields(cls)}
        values = {k: v for k, v in data.items() if k in known}
        if "status" in values:
            values["status"] = Status(values["status"])
        out = cls(**values)
        for key in data.keys() - known:
            setattr(out, key, data[key])
        return out

    def get_reward_value(self, args: Any) -> float:
        """The scalar that is trained on: `reward`, or `reward[args.reward_key]`."""
        key = getattr(args, "reward_key", None)
        if key is None:
            if isinstance(self.reward, dict):
                raise TypeError(
                    f"sample {self.index}: the reward is a dict with keys {sorted(self.reward)}; "
                    "choose one with --reward-key"
                )
            value = self.reward
        elif not isinstance(self.reward, dict) or key not in self.reward:
            raise KeyError(f"sample {self.index}: --reward-key {key!r} is not in the reward {self.reward!r}")
        else:
            value = self.reward[key]
        if value is None:
            raise ValueError(f"sample {self.index} has no reward: the reward function returned None")
        return float(value)

    @property
    def effective_response_length(self) -> int:
        """Number of response tokens that are trained."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str = "",
    ) -> None:
        """Appends response tokens and keeps mask, log-probs and version spans aligned.

        trainable False (tool or environment tokens) masks them out; their log-prob is 0.0. Trainable tokens need
        one log-prob each, unless the sample has none so far (log-probs were not asked for). meta_info is the
        engine's: its weight version and finish reason are taken over. Raises ValueError when lengths disagree.
        """
        n = len(tokens)
        if log_probs is not None and len(log_probs) != n:
            raise ValueError(f"sample {self.index}: {n} tokens but {len(log_probs)} log-probs")
        start = self.response_length
        if log_probs is None and (not trainable) and self.rollout_log_probs is not None:
            log_probs = [0.0] * n
        if log_probs is None and (not trainable) and start == 0:
            log_probs = [0.0] * n
        if log_probs is None and n and self.rollout_log_probs:
            raise ValueError(f"sample {self.index}: trainable tokens without log-probs after tokens with them")
        if (not trainable or self.loss_mask is not None) and n:
            if self.loss_mask is None:
                self.loss_mask = [1] * start
            self.loss_mask += [int(trainable)] * n
        if log_probs is not None:
            if self.rollout_log_probs is None:
                if start:
                    raise ValueError(f"sample {self.index}: log-probs after {start} response tokens without them")
                self.rollout_log_probs = []
            self.rollout_log_probs += [float(x) for x in log_probs]
        self.tokens = list(self.tokens) + [int(t) for t in tokens]
        self.response += text
        self.response_length = start + n
        if meta_info is not None:
            self._take_meta_info(meta_info, start)

    def _take_meta_info(self, meta_info: dict[str, Any], start: int) -> None:
        spans = meta_info.get("weight_versions")
        if spans is None and "weight_version" in meta_info:
            spans = [{"version": meta_info["weight_version"], "start": 0, "end": self.response_length - start}]
        for span in spans or []:
            if span["end"] > span["start"]:
                self.weight_versions.append(
                    {"version": span["version"], "start": start + span["start"], "end": start + span["end"]}
                )
        reason = (meta_info.get("finish_reason") or {}).get("type")
        by_reason = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
        if reason in by_reason:
            self.status = by_reason[reason]
