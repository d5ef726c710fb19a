"""`CheckpointWriter`: puts a sharded state dict on disk, completely or not at all, in the background if asked to.

In the background training does not wait for it, only for the copies that it is written from (freeze.py); a thread with
a process group of its own writes them. Whatever fails on one rank is raised as SaveError on all of them, and none waits
for another for ever.
"""

import copy
import dataclasses
import io
import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import diff, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import validate_sharding_integrity
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint import save as save_distributed

from slime.utils.checkpoint_folder import (
    SaveError,
    checkpoint_name,
    commit,
    describe,
    files_in,
    partial_folder,
    start_partial,
    write_synced,
)

logger = logging.getLogger(__name__)

EXTRA = "extra_state.pt"


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """tensors: as torch writes them. common: what is no tensor. parts: which ones of which tensors, without data."""

    tensors: Any
    common: Any
    parts: list[Any]


class CheckpointWriter:
    """Writes checkpoints into one folder. Every method is collective over all ranks.

    keep_last: older checkpoints beyond it are deleted. background: `save` returns at once where the state is to be made
    in the thread, else when it has been copied; the checkpoint counts from the moment when it is written, and `wait`
    (or the next `save`) says if it could not be.
    """

    def __init__(self, folder: str | Path, keep_last: int | None = None, background: bool = False):
        self._root, self._keep_last = Path(folder), keep_last
        self._group: Any = dist.new_group(backend="gloo")  # its own: the thread must not mix with training's order
        self._background = background
        self._thread: threading.Thread | None = None
        self._failed: str | None = None
        self._checked = False

    def folder_of(self, step: int) -> Path:
        return self._root / checkpoint_name(step)

    def save(
        self,
        step: int,
        state: dict[str, Any] | Callable[[], dict[str, Any]],
        extra_state: dict[str, Any] | None,
        run: dict[str, Any] | None = None,
    ) -> None:
        """Writes `state` (a sharded state dict; used up) as the checkpoint of `step`.

        state: or, in the background, what makes it from copies (`checkpoint.frozen_state`). extra_state: rank 0's is
        kept, anything picklable. run: JSON values for the manifest.
        """
        self.wait()
        extra = pickled(extra_state or {}) if dist.get_rank() == 0 else b""
        if callable(state):
            make = state

            def prepare() -> _Prepared:
                return self._prepare(make(), frozen=True)
        else:
            ready = self._prepare(state, frozen=not self._background)

            def prepare() -> _Prepared:
                return ready

        def work() -> None:
            try:
                self._write(step, prepare, extra, run or {})
            except SaveError as error:
                self._failed = str(error)

        if not self._background:
            work()
            self.wait()
            return
        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def _prepare(self, state: dict[str, Any], frozen: bool) -> _Prepared:
        """frozen: nobody changes the state while it is written."""
        sharded, common = save_preprocess(state, validate_access_integrity=False)
        parts = [part.without_data() for part in nested_values(sharded)]
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
        if not frozen:
            common = copy.deepcopy(common)
            for found in by_key.values():
                for part in (p for p in found if isinstance(p, ShardedTensor) and p.data is not None):
                    part.data = part.data.detach().to("cpu", copy=True)
        return _Prepared(mcore_to_pyt_state_dict(by_key, False), common, parts)

    def _check(self, prepared: _Prepared) -> None:
        """Once, as who writes what depends on the layout only: that the ranks' parts make up every tensor exactly, and
        that they agree on the rest, which rank 0 writes. Megatron's own check talks in the groups of training."""
        if self._checked:
            return
        parts = self._together(lambda: prepared.parts)
        rest = self._together(lambda: prepared.common)
        self._together(lambda: validate_sharding_integrity(parts))
        for difference in (found for found in diff(rest[0], prepared.common) if found):
            logger.warning("what rank %d would write of the common state differs: %s", dist.get_rank(), difference)
        self._checked = True

    def wait(self) -> None:
        """Returns when nothing is being written any more. Raises SaveError when the last checkpoint failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failed, self._failed = self._failed, None
        if failed is not None:
            raise SaveError(failed)

    def _write(self, step: int, prepare: Callable[[], _Prepared], extra: bytes, run: dict[str, Any]) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        path = partial_folder(self._root, step)

        def begin() -> None:
            if rank == 0:
                start_partial(self._root, step)
                write_synced(path / "common.pt", pickled(prepared.common))
                write_synced(path / EXTRA, extra)
                save_config(CheckpointingConfig("torch_dist", 1), str(path))

        def finish() -> None:
            if rank == 0:
                files = {name: entry for part in described for name, entry in part.items()}
                commit(self._root, step, files, run, self._keep_last)

        try:
            made: list[_Prepared] = []
            self._together(lambda: made.append(prepare()))
            prepared = made.pop()
            self._check(prepared)
            self._together(begin)
            # Megatron's own writer forks, and spawns a manager process that imports the entry module again: both go
            # wrong inside a Ray worker with gloo threads. The files are the same, and Megatron reads them.
            save_distributed(
                prepared.tensors,
                storage_writer=FileSystemWriter(path, thread_count=1),
                planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
                process_group=self._group,
            )
            described = self._together(lambda: {n: describe(path / n) for n in files_in(path)[rank::world]})
            self._together(finish)
        except (Exception, CheckpointException) as error:  # torch's is no Exception
            room = _room(self._root)  # torch hides the system's "no space left" behind an error of its own
            if rank == 0:
                shutil.rmtree(path, ignore_errors=True)  # makes room where the disk is full
            raise SaveError(
                f"checkpoint of step {step} in {self._root} could not be written: {in_one_line(error)}{room}"
            ) from error

    def _together(self, work: Callable[[], Any]) -> list[Any]:
        """Results of all ranks. Raises on all of them what any raised."""
        result, fault = None, None
        try:
            result = work()
        except Exception as error:
            fault = in_one_line(error)
        outcomes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, (result, fault), group=self._group)
        if fault := next((f for _, f in outcomes if f), None):
            raise SaveError(fault)
        return [r for r, _ in outcomes]


def _room(folder: Path) -> str:
    try:
        return f" ({shutil.disk_usage(folder).free / 1e6:.1f} MB are free there)"
    except OSError:
        return ""


def pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def in_one_line(error: BaseException) -> str:
    """The cause as the system says it; distributed checkpointing wraps it in a traceback of each rank."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    text = " ".join(str(error).split())
    return text[:500] if isinstance(error, SaveError) else f"{type(error).__name__}: {text[:500]}"
