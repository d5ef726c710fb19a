"""`CheckpointWriter`: puts a sharded state dict on disk, completely or not at all, in the background if asked to.

In the background training stops only while tensors are copied to the host; a thread with a process group of its own
writes them. Whatever fails on one rank is raised as SaveError on all of them, and none waits for another for ever.
"""

import io
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
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

EXTRA = "extra_state.pt"


class CheckpointWriter:
    """Writes checkpoints into one folder. Every method is collective over all ranks.

    keep_last: older checkpoints beyond it are deleted. background: `save` returns when the state has been copied; the
    checkpoint counts from the moment when it is written, and `wait` (or the next `save`) says if it could not be.
    """

    def __init__(self, folder: str | Path, keep_last: int | None = None, background: bool = False):
        self._root, self._keep_last = Path(folder), keep_last
        self._group: Any = dist.new_group(backend="gloo")  # its own: the thread must not mix with training's order
        self._background = background
        self._thread: threading.Thread | None = None
        self._failed: str | None = None
        self._checked = False

    @property
    def checked(self) -> bool:
        """Whether a state was given as it is at least once, which is when Megatron checks that all ranks agree."""
        return self._checked

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
        # Who writes what depends on the layout only: it is checked once, and here, because Megatron's check talks in
        # the groups that training uses.
        if isinstance(state, dict):
            ready = self._prepare(state, check=not self._checked, copy=True)
            self._checked = True

        def prepare() -> tuple[Any, bytes]:
            return ready if isinstance(state, dict) else self._prepare(state(), check=False, copy=False)

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

    def _prepare(self, state: dict[str, Any], check: bool, copy: bool) -> tuple[Any, bytes]:
        """(tensors as torch writes them, the pickled rest on rank 0). copy: training goes on with these tensors."""
        sharded, common = save_preprocess(state, check)
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
        if self._background and copy:
            for parts in by_key.values():
                for part in (p for p in parts if isinstance(p, ShardedTensor) and p.data is not None):
                    part.data = part.data.detach().to("cpu", copy=True)
        return mcore_to_pyt_state_dict(by_key, False), pickled(common) if dist.get_rank() == 0 else b""

    def wait(self) -> None:
        """Returns when nothing is being written any more. Raises SaveError when the last checkpoint failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failed, self._failed = self._failed, None
        if failed is not None:
            raise SaveError(failed)

    def _write(self, step: int, prepare: Callable[[], tuple[Any, bytes]], extra: bytes, run: dict[str, Any]) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        path = partial_folder(self._root, step)

        def begin() -> None:
            if rank == 0:
                start_partial(self._root, step)
                write_synced(path / "common.pt", common)
                write_synced(path / EXTRA, extra)
                save_config(CheckpointingConfig("torch_dist", 1), str(path))

        def finish() -> None:
            if rank == 0:
                files = {name: entry for part in described for name, entry in part.items()}
                commit(self._root, step, files, run, self._keep_last)

        try:
            prepared: list[tuple[Any, bytes]] = []
            self._together(lambda: prepared.append(prepare()))
            tensors, common = prepared.pop()
            self._together(begin)
            # Megatron's own writer forks, and spawns a manager process that imports the entry module again: both go
            # wrong inside a Ray worker with gloo threads. The files are the same, and Megatron reads them.
            save_distributed(
                tensors,
                storage_writer=FileSystemWriter(path, thread_count=1),
                planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
                process_group=self._group,
            )
            described = self._together(lambda: {n: describe(path / n) for n in files_in(path)[rank::world]})
            self._together(finish)
        except (Exception, CheckpointException) as error:  # torch's is no Exception
            if rank == 0:
                shutil.rmtree(path, ignore_errors=True)  # makes room where the disk is full
            raise SaveError(
                f"checkpoint of step {step} in {self._root} could not be written: {in_one_line(error)}"
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
