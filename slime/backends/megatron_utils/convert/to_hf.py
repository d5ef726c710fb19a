"""A distributed checkpoint into a complete Hugging Face folder, each tensor written at its place in its file."""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from slime.backends.megatron_utils.convert.reader import CheckpointReader
from slime.backends.megatron_utils.convert.regions import StoredParam
from slime.models.check import count_non_finite
from slime.models.hf_files import file_header, file_name, plan_files, write_index
from slime.models.rows import Pieces
from slime.models.table import WeightTable


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tensor's bytes go: in `file` from `offset` on. slab_bytes: of one expert of a stack."""

    file: str
    offset: int
    dtype: torch.dtype
    slab_bytes: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """The files of the folder: headers by name, whole sizes, and the place of every tensor."""

    headers: dict[str, bytes]
    sizes: dict[str, int]
    places: dict[str, Place]

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes.values()) - sum(map(len, self.headers.values()))


def plan_layout(table: WeightTable, dtypes: dict[str, torch.dtype], max_file_bytes: int) -> Layout:
    shapes, tensors = table.hf_shapes(), table.hf_tensors()
    files = plan_files(shapes, dtypes, max_file_bytes)
    headers, sizes, places = {}, {}, {}
    for number, names in enumerate(files):
        name = file_name(number + 1, len(files))
        headers[name], offsets, sizes[name] = file_header({n: shapes[n] for n in names}, dtypes)
        for tensor_name, (start, stop) in offsets.items():
            slabs = tensors[tensor_name].stacked or 1
            places[tensor_name] = Place(name, start, dtypes[tensor_name], (stop - start) // slabs)
    return Layout(headers, sizes, places)


def prepare(folder: Path, layout: Layout) -> None:
    """Files of their final size, with their headers."""
    for name, header in layout.headers.items():
        with open(folder / name, "r+b" if (folder / name).exists() else "w+b") as file:
            file.write(header)
            file.truncate(layout.sizes[name])


def finish(folder: Path, layout: Layout) -> None:
    if len(layout.headers) > 1:
        write_index(folder, {name: place.file for name, place in layout.places.items()}, layout.total_bytes)


def start_writer(checkpoint: str, target: str, layout: Layout) -> Callable[[Sequence[StoredParam]], list[str]]:
    """The work of one process: puts parameters of the checkpoint into the prepared files; returns faults."""
    reader, files = CheckpointReader(checkpoint), {}
    for name in layout.headers:
        files[name] = os.open(Path(target) / name, os.O_WRONLY)

    def work(params: Sequence[StoredParam]) -> list[str]:
        faults, touched = [], set()
        for param in params:
            bound = param.bound
            for name, declared, pieces in zip(bound.hf_names, bound.param.hf, reader.sources(param), strict=True):
                place = layout.places[name]
                slab = 0 if declared.stacked is None else (bound.expert or 0)
                offset, bad = place.offset + slab * place.slab_bytes, 0
                for data in as_in_file(pieces, declared.transposed, place.dtype):
                    bad += count_non_finite(data)
                    offset = _write(files[place.file], offset, data)
                touched.add(place.file)
                if bad:
                    expert = "" if declared.stacked is None else f" (expert {slab})"
                    faults.append(f"{name}{expert}: {bad} of {math.prod(pieces.shape)} are NaN or infinite")
        for name in touched:
            os.fsync(files[name])
        return faults

    return work


def as_in_file(pieces: Pieces, transposed: bool, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """A tensor (of one expert) as the file has it, in parts that follow each other there."""
    together = transposed or pieces.axis != 0 or pieces.runs is not None
    for part in (pieces.whole(),) if together else pieces.parts:
        yield (part.mT if transposed else part).to(dtype).contiguous()


def _write(descriptor: int, offset: int, tensor: torch.Tensor) -> int:
    """Returns the offset behind what was written."""
    data = tensor.reshape(-1).view(torch.uint8).numpy().data
    while data:
        n = os.pwrite(descriptor, data, offset)
        data, offset = data[n:], offset + n
    return offset
