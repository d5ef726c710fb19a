"""Tensors of a distributed checkpoint, read one at a time, under whatever layout it was written."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from slime.backends.megatron_utils.convert.regions import Region, StoredParam
from slime.config.errors import ConfigError
from slime.models.rows import Pieces, merge, split, take


class CheckpointReader:
    """The parameters in a checkpoint's folder (one iter_*). Raises ConfigError when it cannot be read as one."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._reader = FileSystemReader(self.folder)
        try:
            self.metadata = self._reader.read_metadata()
        except Exception as error:  # what pickle raises of a damaged file can be anything
            raise ConfigError(f"{self.folder}/.metadata: cannot be read ({error!r})") from None
        self._reader.set_up_storage_reader(self.metadata, True)
        entries = self.metadata.state_dict_metadata
        self.tensors = {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
        self._chunks: dict[tuple[str, int], dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}

    def _candidates(self, region: Region) -> TensorStorageMetadata:
        """The entry of a region's tensor with the chunks of its layer and expert only: there can be thousands."""
        entry, count = self.tensors[region.key], region.stacked
        if (region.key, count) not in self._chunks:
            found = self._chunks[region.key, count] = {}
            for chunk in entry.chunks:
                found.setdefault(tuple(chunk.offsets[:count]), []).append(chunk)
        if any(n != 1 for chunk in entry.chunks[:1] for n in chunk.sizes[:count]):
            return entry  # written by something else than Megatron
        chunks = self._chunks[region.key, count].get(region.offset[:count], [])
        return TensorStorageMetadata(entry.properties, entry.size, chunks)

    def sources(self, param: StoredParam) -> list[Pieces]:
        """The Hugging Face tensors that a parameter holds, in the checkpoint's dtype, as pieces of what was stored."""
        declared = param.bound.param
        axis, tensors, rows = declared.form.axis, [], []
        by_region = split(declared.shards(1)[0], len(param.regions))
        for region, of_region in zip(param.regions, by_region, strict=True):
            for start, tensor in self._stored(region, axis):
                tensors.append(tensor)
                rows.append(take(of_region, start, tensor.size(axis)))
        return merge(tensors, rows, axis, declared.sizes)

    def _stored(self, region: Region, axis: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, tensor) of a box: the stored chunks themselves where they are cut along `axis` only."""
        at = region.stacked + axis
        first, end = region.offset[at], region.offset[at] + region.size[at]
        chunks = [c for c in self._candidates(region).chunks if first <= c.offsets[at] < end]
        across = [i for i in range(len(region.size)) if i != at]
        if any(c.offsets[i] != region.offset[i] or c.sizes[i] != region.size[i] for c in chunks for i in across):
            out = torch.empty(region.own_size, dtype=self.tensors[region.key].properties.dtype)
            self._fill(region, _with_leading(out, region.stacked))
            yield 0, out
            return
        for chunk in sorted(chunks, key=lambda c: c.offsets[at]):
            tensor = self._load(region.key, chunk).view(tuple(chunk.sizes[region.stacked :]))
            start = chunk.offsets[at] - first
            yield start, tensor.narrow(axis, 0, min(tensor.size(axis), region.size[at] - start))

    def _load(self, key: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        info = self.metadata.storage_data[MetadataIndex(key, chunk.offsets)]
        try:
            with open(self.folder / info.relative_path, "rb") as stream:
                return torch.load(self._reader._slice_file(stream, info), map_location="cpu", weights_only=True)
        except Exception as error:
            raise ConfigError(f"{self.folder / info.relative_path}: {key} cannot be read ({error!r})") from None

    def read(self, param: StoredParam) -> torch.Tensor:
        """The whole parameter, in the checkpoint's dtype. Raises ConfigError for a file that is missing or damaged."""
        axis = param.bound.param.form.axis
        out = torch.empty(param.shape, dtype=self.tensors[param.regions[0].key].properties.dtype)
        start = 0
        for region in param.regions:
            rows = region.own_size[axis]
            self._fill(region, _with_leading(out.narrow(axis, start, rows), region.stacked))
            start += rows
        return out

    def _fill(self, region: Region, out: torch.Tensor) -> None:
        items = create_read_items_for_chunk_list(region.key, self._candidates(region), [region.box])
        if sum(math.prod(item.lengths) for item in items) != math.prod(region.size):
            raise ConfigError(f"{self.folder}: does not hold all of {region.key} {list(region.shape)}")
        try:
            self._reader.read_data(LoadPlan(items), _Into(out)).wait()
        except Exception as error:
            raise ConfigError(f"{self.folder}: {region.key} cannot be read ({error!r})") from None


def _with_leading(tensor: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        tensor = tensor.unsqueeze(0)
    return tensor


class _Into(DefaultLoadPlanner):
    """Puts what is read into one tensor."""

    def __init__(self, out: torch.Tensor):
        super().__init__()
        self.out = out

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self.out
        for axis, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(axis, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Any) -> None:
        pass
