"""Where prompts come from: groups of samples in a reproducible order, with a cursor that can be saved.

Every prompt drawn is accounted for: groups handed out are in flight until they come back (`add_samples`) or are
settled (`settle`: "trained", "filtered", "lost"). `ledger` (slime.data.ledger) keeps the books, `accounting()` says
how many groups are in each state. Saved states hold what is in flight too: a resumed run hands it out again.
"""

import copy
import dataclasses
import functools
import os
import pickle
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from slime.config.hooks import load_hook
from slime.data.dataset import PromptDataset, check_rendered
from slime.data.ledger import OUTCOMES, Ledger
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

Group = list[Sample]
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

    def settle(self, groups: Sequence[Group], outcome: str, rule: str | None = None) -> None:
        """Hears what became of groups that do not come back; see OUTCOMES. rule: why, for those not trained."""

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
        check_rendered(args.prompt_data, self.dataset.prompts, args, args.rollout_function_path)
        self.cursor = Cursor()
        self.ledger = Ledger()
        # As handed out, by group index: plain copies, which the rollout's changes do not reach.
        self._in_flight: dict[int, list[dict[str, Any]]] = {}
        self._again: list[Group] = []  # were in flight when the state was saved that this source was loaded from

    def __len__(self) -> int:
        return len(self.dataset)

    def get_samples(self, num_samples: int) -> list[Group]:
        """`num_samples` groups, never fewer: the next epoch begins where one ends."""
        groups = self._waiting(num_samples)
        return groups + [self._draw() for _ in range(num_samples - len(groups))]

    def add_samples(self, samples: list[Group]) -> None:
        if samples:
            raise TypeError(
                f"{type(self).__name__} cannot take {len(samples)} groups back; "
                "use slime.rollout.data_source.RolloutDataSourceWithBuffer (--data-source-path)"
            )

    def settle(self, groups: Sequence[Group], outcome: str, rule: str | None = None) -> None:
        if outcome not in OUTCOMES:
            raise ValueError(f"outcome {outcome!r} is none of {', '.join(OUTCOMES)}")
        self._land(outcome, groups, {"rule": rule} if rule else {})

    def accounting(self) -> dict[str, int]:
        """Prompt groups by state: drawn + added = trained + filtered + lost + in_flight + buffered."""
        return self.ledger.book.accounting()

    def state_dict(self) -> dict[str, Any]:
        """Plain values. Groups still out are stored as they were handed out: a resumed run gets them again."""
        return {
            "cursor": dataclasses.asdict(self.cursor),
            "fingerprint": self.dataset.fingerprint,
            "num_prompts": len(self.dataset),
            "rollout_seed": self.args.rollout_seed,
            "rollout_shuffle": self.args.rollout_shuffle,
            "n_samples_per_prompt": self.args.n_samples_per_prompt,
            "ledger": self.ledger.state_dict(),
            "again": [*self._in_flight.values(), *map(_plain, self._again)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`. Raises ValueError when the prompts are no longer those of the state."""
        for key, here in (
            ("fingerprint", self.dataset.fingerprint),
            ("num_prompts", len(self.dataset)),
            ("rollout_seed", self.args.rollout_seed),
            ("rollout_shuffle", self.args.rollout_shuffle),
        ):
            if state[key] != here and not self.args.allow_config_change:
                raise ValueError(
                    f"cannot resume the data of {self.dataset.name}: {key} was {state[key]!r} when saved and is "
                    f"{here!r} now; go on with the same prompts, start anew with --finetune, or give "
                    "--allow-config-change to go on at the same place of the new ones"
                )
        self.cursor = Cursor(**state["cursor"])
        self.cursor.position = min(self.cursor.position, len(self.dataset))
        self._in_flight = {}
        self.ledger.book.load_state_dict(state["ledger"], waiting=map(_number, self._load_groups(state)))

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

    def _load_groups(self, state: dict[str, Any]) -> list[Group]:
        """Takes the groups of a state over; returns those that wait to be handed out (again)."""
        self._again = _groups(state["again"])
        return self._again

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
        place = {"epoch": cursor.epoch, "row": row, "first_sample": cursor.next_sample_index, "samples": len(group)}
        self.ledger.drawn(cursor.next_group_index, **place)
        self._in_flight[cursor.next_group_index] = _plain(group)
        cursor.position += 1
        cursor.next_group_index += 1
        cursor.next_sample_index += len(group)
        return group

    def _waiting(self, limit: int) -> list[Group]:
        again, self._again = self._again[:limit], self._again[limit:]
        return self._take_off(again)

    def _take_off(self, groups: list[Group]) -> list[Group]:
        """Groups that waited are in flight (again)."""
        self.ledger.moved("taken", map(_number, groups))
        self._in_flight.update({_number(group): _plain(group) for group in groups})
        return groups

    def _order(self, epoch: int) -> Sequence[int]:
        size = len(self.dataset)
        return _shuffled(size, self.args.rollout_seed, epoch) if self.args.rollout_shuffle else range(size)

    def _land(self, event: str, groups: Iterable[Group], details: dict[str, Any]) -> None:
        """Takes groups out of flight (a group split in two lands once)."""
        parts: dict[int, list[Sample]] = {}
        for group in groups:
            for sample in _flat(group):
                if sample.group_index is not None:
                    parts.setdefault(sample.group_index, []).append(sample)
        versions = ({"versions": _versions(samples)} for samples in parts.values())
        self.ledger.moved(event, parts, [{**details, **v} for v in versions])
        for index in parts:
            self._in_flight.pop(index, None)


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """Also keeps groups that came back, unfinished or surplus, and hands them out before fresh ones.

    --buffer-filter-path chooses which; the default takes the oldest.
    """

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.buffer: list[Group] = []
        self._choose: Callable[..., list[Group]] = load_hook(args, "buffer_filter_path") or pop_first

    def get_samples(self, num_samples: int) -> list[Group]:
        groups = super()._waiting(num_samples)
        wanted = num_samples - len(groups)
        if self.buffer and wanted:
            before = list(self.buffer)
            chosen = self._choose(self.args, None, self.buffer, wanted)
            if len(chosen) > wanted:
                raise ValueError(f"--buffer-filter-path returned {len(chosen)} groups, only {wanted} were asked for")
            self._settle_thrown_away(before, chosen)
            groups += self._take_off(chosen)
        return groups + [self._draw() for _ in range(num_samples - len(groups))]

    def add_samples(self, samples: list[Group]) -> None:
        for group in samples:
            if not isinstance(group, list) or not group or not all(isinstance(s, Sample) for s in group):
                raise TypeError(f"add_samples expects non-empty lists of Sample, found {group!r:.100}")
            self._number_group(group)
        self._land("returned", samples, {})
        self.buffer += [list(group) for group in samples]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "buffer": [*map(_plain, self.buffer)]}

    def _load_groups(self, state: dict[str, Any]) -> list[Group]:
        self.buffer = _groups(state["buffer"])
        return super()._load_groups(state) + self.buffer

    def _number_group(self, group: Group) -> None:
        """A hook's own group, which did not come from the prompts, gets the next number."""
        if group[0].group_index is None:
            for sample in group:
                sample.group_index = self.cursor.next_group_index
            self.cursor.next_group_index += 1

    def _settle_thrown_away(self, before: list[Group], chosen: list[Group]) -> None:
        """A --buffer-filter-path may throw groups away: they are filtered by it."""
        kept = {_number(group) for group in [*self.buffer, *chosen]}
        gone = [group for group in before if _number(group) not in kept]
        if gone:
            self._take_off(gone)
            self.settle(gone, "filtered", self.args.buffer_filter_path)


def pop_first(args: Any, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    """Default buffer filter: removes and returns the oldest groups."""
    groups = buffer[:num_samples]
    del buffer[:num_samples]
    return groups


def for_buffer(args: Any, group: Group, handed_out: Group | None = None) -> Group:
    """A group as it goes back to the data source: with its tokens under --partial-rollout, else as fresh prompts.

    handed_out: the group as the data source gave it (`as_handed_out`), which is what a fresh prompt is: a generate
    function may have changed prompt and metadata since. A sample that a user's function fanned out is kept only when
    the whole group is finished: there is no single response to go on with.
    """
    originals = list({s.rollout_id if s.rollout_id is not None else id(s): s for s in reversed(group)}.values())[::-1]
    finished = all(s.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED) for s in group)
    if args.partial_rollout and (finished or len(originals) == len(group)):
        return group
    return handed_out or [reset_sample(s) for s in originals]


def as_handed_out(group: Group) -> Group:
    """A copy that the rollout's changes do not reach."""
    return _groups([_plain(group)])[0]


def reset_sample(sample: Sample) -> Sample:
    """The prompt of a sample with its numbers and label, without response."""
    return Sample(**{name: getattr(sample, name) for name in PROMPT_FIELDS})


def _number(group: Group) -> int:
    index = _flat(group)[0].group_index
    assert index is not None, "a group of the data source has a number"
    return index


def _plain(group: Group) -> list[dict[str, Any]]:
    """A group as a state holds it, out of reach of later changes; `_groups` is the way back."""
    own = ("prompt", "metadata", "train_metadata")  # what generate functions change inside
    return [{**sample.to_dict(), **{name: copy.deepcopy(getattr(sample, name)) for name in own}} for sample in group]


def _groups(plain: list[list[dict[str, Any]]]) -> list[Group]:
    return [[Sample.from_dict(sample) for sample in group] for group in plain]


def _flat(group: Any) -> list[Sample]:
    """Samples of a group; one that was fanned out may be a list inside."""
    return [group] if isinstance(group, Sample) else [s for part in group for s in _flat(part)]


def _versions(samples: Iterable[Sample]) -> list[str]:
    """Weight versions that generated tokens of these samples, in order."""
    spans = (span for sample in samples for span in sample.weight_versions)
    return list(dict.fromkeys(str(s["version"] if isinstance(s, dict) else s) for s in spans))


@functools.lru_cache(maxsize=2)
def _shuffled(size: int, seed: int, epoch: int) -> list[int]:
    """The order of one epoch."""
    order = list(range(size))
    random.Random(f"prompts-{seed}-{epoch}").shuffle(order)
    return order


def _state_path(folder: str, rollout_id: int) -> Path:
    return Path(folder) / "rollout" / f"data_source_{rollout_id:07d}.pkl"
