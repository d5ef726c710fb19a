"""A Hugging Face folder into a distributed checkpoint, written file by file in the format of torch and Megatron."""

import dataclasses
import io
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from slime.backends.megatron_utils.convert.regions import Region, StoredParam, Structure
from slime.models.check import count_non_finite
from slime.models.hf_files import HFFolder, row_reader
from slime.models.rows import PADDING, Pad, Rows, Run, fill, join, size, split
from slime.models.table import Bound
from slime.utils.checkpoint_folder import describe


@dataclasses.dataclass(frozen=True)
class Shard:
    """What one rank of the layout holds of a parameter. regions: the boxes it fills, one after the other; rows: where
    the rows of each come from. rank: None when every rank holds it."""

    bound: Bound
    rank: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: tuple[Rows, ...]
    regions: tuple[Region, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def cut(param: StoredParam, tp: int, etp: int, vocab_multiple: int) -> list[Shard]:
    """The shards of a parameter; one when it is on every rank. Raises ValueError when it does not divide.

    vocab_multiple: the vocabulary is padded to a multiple of it times `tp`.
    """
    declared, regions = param.bound.param, param.regions
    axis, rows = declared.form.axis, declared.shards(1)[0]
    if any(isinstance(step, Pad) for step in declared.form.steps):
        (region,), step = regions, vocab_multiple * tp
        missing = -size(rows) % step
        rows = join([rows, (Run(PADDING, 0, missing),)])
        grown = (size(rows), *region.own_size[1:])
        regions = (dataclasses.replace(region, shape=grown, size=grown),)
    parts = (etp if declared.expert else tp) if declared.form.cut else 1
    try:
        cuts = [split(of_region, parts) for of_region in split(rows, len(regions))]
    except ValueError as error:
        raise ValueError(f"{param.bound.name} over {parts} tensor-parallel ranks: {error}") from None
    out = []
    for rank in range(parts):
        mine = tuple(of_region[rank] for of_region in cuts)
        shape = (*param.shape[:axis], sum(map(size, mine)), *param.shape[axis + 1 :])
        boxes = tuple(region.part(axis, rank, parts) for region in regions)
        out.append(Shard(param.bound, rank if parts > 1 else None, shape, param.dtype, mine, boxes))
    return out


@dataclasses.dataclass(frozen=True)
class Written:
    """results: where torch's writer put each item. faults: what is wrong with the numbers, one line per tensor."""

    results: list[Any]
    faults: list[str]


@dataclasses.dataclass(frozen=True)
class FileUnit:
    """One file of the checkpoint. objects: bytes by key, for what is no tensor."""

    number: int
    shards: tuple[Shard, ...]
    objects: dict[str, bytes] = dataclasses.field(default_factory=dict)

    @property
    def file(self) -> str:
        """As torch's writer names it."""
        return f"__{self.number}_0.distcp"


def seal(target: Path, unit: FileUnit) -> dict[str, Any]:
    """Flushes a unit's file to the disk; its size and digest, for the manifest."""
    with open(target / unit.file, "rb") as file:
        os.fsync(file.fileno())
    return describe(target / unit.file)


def start_writer(source: str, target: str) -> Callable[[FileUnit], Written]:
    """The work of one process: writes files of the checkpoint in `target` from the folder `source`."""

    def work(unit: FileUnit) -> Written:
        folder = HFFolder(source)
        planner = _LazyPlanner(folder, unit)
        items = [_item(shard, region) for shard in unit.shards for region in shard.regions]
        items += [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in unit.objects]
        writer = FileSystemWriter(target, thread_count=1, sync_files=False)  # `seal` does
        # The number of a plan among all plans makes its file's name.
        plan = writer.prepare_global_plan([SavePlan([])] * unit.number + [SavePlan(items)])[-1]
        results = writer.write_data(plan, planner).wait()
        return Written(results, planner.faults)

    return work


class _LazyPlanner(DefaultSavePlanner):
    """Reads what is to be written when torch's writer wants it."""

    def __init__(self, folder: HFFolder, unit: FileUnit):
        super().__init__()
        self.folder, self.unit = folder, unit
        self.where = {
            MetadataIndex(region.key, region.offset): (shard, region, rows)
            for shard in unit.shards
            for region, rows in zip(shard.regions, shard.rows, strict=True)
        }
        self.faults: list[str] = []

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO(self.unit.objects[write_item.index.fqn])
        shard, region, rows = self.where[write_item.index]
        tensor = self._read(shard, region, rows).contiguous()
        if bad := count_non_finite(tensor):
            names = {shard.bound.hf_names[run.source] for run in rows if run.source != PADDING}
            where = "" if shard.rank is None else f", the part of rank {shard.rank}"
            self.faults.append(f"{' + '.join(sorted(names))}{where}: {bad} of {tensor.numel()} are NaN or infinite")
        return tensor.view(region.size)

    def _read(self, shard: Shard, region: Region, rows: Rows) -> torch.Tensor:
        """The rows as the file has them where they lie together in it, else put together in new memory."""
        axis, read = shard.bound.param.form.axis, row_reader(self.folder, shard.bound)
        if len(rows) == 1 and rows[0].source != PADDING and rows[0].step == 1:
            tensor = read(rows[0].source, rows[0].start, rows[0].stop)
            if tensor.dtype is shard.dtype:
                return tensor
        out = torch.empty(region.own_size, dtype=shard.dtype)
        fill(out, rows, axis, read)
        return out


def _item(shard: Shard, region: Region) -> WriteItem:
    data = TensorWriteData(region.box, TensorProperties(dtype=shard.dtype), torch.Size(region.shape))
    return WriteItem(MetadataIndex(region.key, region.offset), WriteItemType.SHARD, tensor_data=data)


def finish(target: Path, structure: Structure, units: list[FileUnit], written: list[Written]) -> None:
    """Writes what makes the files one checkpoint: torch's metadata, Megatron's, and the state that is no tensor."""
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

    from slime.backends.megatron_utils.writer import EXTRA

    entries: dict[str, Any] = {key: BytesStorageMetadata() for key in structure.objects}
    for unit in units:
        for shard in unit.shards:
            for region in shard.regions:
                new = TensorStorageMetadata(TensorProperties(dtype=shard.dtype), torch.Size(region.shape), [])
                entries.setdefault(region.key, new).chunks.append(region.box)
    writer = FileSystemWriter(target, thread_count=1)
    writer.set_up_storage_writer(True)
    writer.finish(Metadata(entries), [unit.results for unit in written])
    torch.save({"world_size": 0}, target / "common.pt")
    torch.save({}, target / EXTRA)
    save_config(CheckpointingConfig("torch_dist", 1), str(target))
