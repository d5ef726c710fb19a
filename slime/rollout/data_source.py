"""Where prompts come from: groups of samples in a reproducible order, with a cursor that can be saved.

Every prompt drawn is accounted for: groups handed out are in flight until they come back (`add_samples`) or are
settled (`settle`: "trained", "filtered", "lost"). `accounting()` says how many are in each state.
"""

import copy
import dataclasses
import functools
import os
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from slime.config.hooks import load_hook
from slime.data.dataset import PromptDataset
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

Group = list[Sample]
OUTCOMES = ("trained", "filtered", "lost")
# What a sample is before it has a response.
PROMPT_FIELDS = (
    "group_index",
    "index",
    "rollout_id",
    "prompt",
    "label",
    "metadata",
    "multimodal_inputs",
    "session_id",
    "generate_function_path",
    "custom_rm_path",
)


class DataSource:
    """Base of data sources; a class given by --data-source-path need not derive from it, only have its methods."""

    def __init__(self, args: Any) -> None:
        self.args = args

    def get_samples(self, num_samples: int) -> list[Group]:
        """`num_samples` groups of --n-samples-per-prompt samples each."""
        raise NotImplementedError

    def add_samples(self, samples: list[Group]) -> None:
        """Takes groups back that were handed out and not used up."""
        raise NotImplementedError

    def settle(self, groups: Sequence[Group], outcome: str) -> None:
        """Hears what became of groups that do not come back; see OUTCOMES."""

    def save(self, rollout_id: int) -> None:
        """Saves the state after `rollout_id` under --save."""
        raise NotImplementedError

    def load(self, rollout_id: int | None = None) -> None:
        """Restores the state saved after `rollout_id` from --load."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Prompts in one epoch."""
        raise NotImplementedError


@dataclasses.dataclass
class Cursor:
    """position: prompts of `epoch` handed out so far. next_*: the next unused numbers."""

    epoch: int = 0
    position: int = 0
    next_group_index: int = 0
    next_sample_index: int = 0


class RolloutDataSource(DataSource):
    """Prompts of --prompt-data, epoch after epoch, each epoch in its own order with --rollout-shuffle.

    The order depends on --rollout-seed and the epoch only. Keeps no groups: `add_samples` is an error here.
    """

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        if not args.prompt_data:
            raise ValueError("--prompt-data is not set: give a .jsonl or .parquet file of prompts")
        tokenizer = load_tokenizer(args.hf_checkpoint) if args.hf_checkpoint else None
        self.dataset = PromptDataset.load(args.prompt_data, args, tokenizer)
        self._check_prompts_are_usable()
        self.cursor = Cursor()
        # As handed out, by group index: plain copies, which the rollout's changes do not reach.
        self._in_flight: dict[int | None, list[dict[str, Any]]] = {}
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.dataset)

    def get_samples(self, num_samples: int) -> list[Group]:
        """`num_samples` fresh groups, never fewer: the next epoch begins where one ends."""
        return [self._draw() for _ in range(num_samples)]

    def add_samples(self, samples: list[Group]) -> None:
        if samples:
            raise TypeError(
                f"{type(self).__name__} cannot take {len(samples)} groups back; "
                "use slime.rollout.data_source.RolloutDataSourceWithBuffer (--data-source-path)"
            )

    def settle(self, groups: Sequence[Group], outcome: str) -> None:
        if outcome not in OUTCOMES:
            raise ValueError(f"outcome {outcome!r} is none of {', '.join(OUTCOMES)}")
        self._counts[outcome] += self._land(groups)

    def accounting(self) -> dict[str, int]:
        """Prompt groups by state: drawn = trained + filtered + lost + in_flight (+ buffered, if there is a buffer)."""
        return {**{k: self._counts[k] for k in ("drawn", "returned", *OUTCOMES)}, "in_flight": len(self._in_flight)}

    def state_dict(self, include_in_flight: bool = False) -> dict[str, Any]:
        """Plain values. include_in_flight: groups still out are stored as they were when handed out, so that a
        resumed run generates them again; for drivers that save while the next rollout is under way."""
        return {
            "cursor": dataclasses.asdict(self.cursor),
            "fingerprint": self.dataset.fingerprint,
            "num_prompts": len(self.dataset),
            "rollout_seed": self.args.rollout_seed,
            "rollout_shuffle": self.args.rollout_shuffle,
            "n_samples_per_prompt": self.args.n_samples_per_prompt,
            "counts": dict(self._counts),
            "buffer": list(self._in_flight.values()) if include_in_flight else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`. Raises ValueError when the prompts are no longer those of the state."""
        here = self.state_dict()
        for key in ("fingerprint", "num_prompts", "rollout_seed", "rollout_shuffle"):
            if state[key] != here[key]:
                raise ValueError(
                    f"cannot resume the data of {self.dataset.name}: {key} was {state[key]!r} when saved and is "
                    f"{here[key]!r} now; go on with the same prompts, or start anew with --finetune"
                )
        self.cursor = Cursor(**state["cursor"])
        self._counts = Counter(state["counts"])
        self._in_flight = {}

    def save(self, rollout_id: int) -> None:
        if self.args.save is None:
            return
        path = _state_path(self.args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        with open(part, "wb") as file:
            pickle.dump(self.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)  # complete or not there

    def load(self, rollout_id: int | None = None) -> None:
        if self.args.load is None or self.args.finetune or rollout_id is None or rollout_id < 0:
            return
        path = _state_path(self.args.load, rollout_id)
        if not path.is_file():
            raise FileNotFoundError(
                f"cannot resume: {path} (the position in the prompts after rollout {rollout_id}) is missing; "
                "take another checkpoint, or start the data anew with --finetune"
            )
        with open(path, "rb") as file:
            self.load_state_dict(pickle.load(file))

    def _draw(self) -> Group:
        cursor = self.cursor
        if cursor.position >= len(self.dataset):
            cursor.epoch, cursor.position = cursor.epoch + 1, 0
        row = self._order(cursor.epoch)[cursor.position]
        group = []
        for i in range(self.args.n_samples_per_prompt):
            sample = copy.deepcopy(self.dataset.prompts[row])
            sample.group_index, sample.index = cursor.next_group_index, cursor.next_sample_index + i
            sample.rollout_id = sample.index
            group.append(sample)
        cursor.position += 1
        cursor.next_group_index += 1
        cursor.next_sample_index += self.args.n_samples_per_prompt
        self._counts["drawn"] += 1
        return self._take_off(group)

    def _take_off(self, group: Group) -> Group:
        self._in_flight[group[0].group_index] = [s.to_dict() for s in group]
        return group

    def _order(self, epoch: int) -> Sequence[int]:
        size = len(self.dataset)
        return _shuffled(size, self.args.rollout_seed, epoch) if self.args.rollout_shuffle else range(size)

    def _land(self, groups: Iterable[Group]) -> int:
        """Takes groups out of flight; how many were in it (a group split in two lands once)."""
        indices = {group[0].group_index for group in groups if group}
        landed = [self._in_flight.pop(i) for i in indices if i in self._in_flight]
        return len(landed)

    def _check_prompts_are_usable(self) -> None:
        args = self.args
        built_in = args.rollout_function_path == "slime.rollout.sglang_rollout.generate_rollout"
        if built_in and args.custom_generate_function_path is None:
            if any(not isinstance(s.prompt, str) for s in self.dataset.prompts):
                raise ValueError(f"{self.dataset.name}: prompts are chat messages: set --apply-chat-template")


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """Also keeps groups that came back, unfinished or surplus, and hands them out before fresh ones.

    --buffer-filter-path chooses which; the default takes the oldest.
    """

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.buffer: list[Group] = []
        self._choose: Callable[..., list[Group]] = load_hook(args, "buffer_filter_path") or pop_first

    def get_samples(self, num_samples: int) -> list[Group]:
        groups = self._choose(self.args, None, self.buffer, num_samples) if self.buffer and num_samples else []
        if len(groups) > num_samples:
            raise ValueError(f"--buffer-filter-path returned {len(groups)} groups, only {num_samples} were asked for")
        groups = [self._take_off(group) for group in groups]
        return groups + super().get_samples(num_samples - len(groups))

    def add_samples(self, samples: list[Group]) -> None:
        for group in samples:
            if not isinstance(group, list) or not group or not all(isinstance(s, Sample) for s in group):
                raise TypeError(f"add_samples expects non-empty lists of Sample, found {group!r:.100}")
        self._counts["returned"] += self._land(samples)
        self.buffer += [list(group) for group in samples]

    def accounting(self) -> dict[str, int]:
        return {**super().accounting(), "buffered": len(self.buffer)}

    def state_dict(self, include_in_flight: bool = False) -> dict[str, Any]:
        state = super().state_dict(include_in_flight)
        state["buffer"] += [[s.to_dict() for s in group] for group in self.buffer]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.buffer = [[Sample.from_dict(s) for s in group] for group in state["buffer"]]


def pop_first(args: Any, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    """Default buffer filter: removes and returns the oldest groups."""
    groups = buffer[:num_samples]
    del buffer[:num_samples]
    return groups


def for_buffer(args: Any, group: Group) -> Group:
    """A group as it goes back to the data source: with its tokens under --partial-rollout, else as fresh prompts.

    A sample that a user's function fanned out is kept only when the whole group is finished: there is no single
    response to go on with.
    """
    originals = list({s.rollout_id if s.rollout_id is not None else id(s): s for s in reversed(group)}.values())[::-1]
    finished = all(s.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED) for s in group)
    if args.partial_rollout and (finished or len(originals) == len(group)):
        return group
    return [reset_sample(s) for s in originals]


def reset_sample(sample: Sample) -> Sample:
    """The prompt of a sample with its numbers and label, without response."""
    return Sample(**{name: getattr(sample, name) for name in PROMPT_FIELDS})


@functools.lru_cache(maxsize=2)
def _shuffled(size: int, seed: int, epoch: int) -> list[int]:
    """The order of one epoch."""
    order = list(range(size))
    random.Random(f"prompts-{seed}-{epoch}").shuffle(order)
    return order


def _state_path(folder: str, rollout_id: int) -> Path:
    return Path(folder) / "rollout" / f"data_source_{rollout_id:07d}.pkl"
