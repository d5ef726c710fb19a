"""Where a distributed checkpoint keeps the parameters of a model. Needs no Megatron itself."""

import math
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from slime.models.table import Bound


@dataclass(frozen=True)
class Region:
    """A box of one of the checkpoint's tensors: `size` from `offset` on, in a tensor of `shape`.

    stacked: how many leading dimensions count layers and experts; the rest are a parameter's own.
    """

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    stacked: int

    @property
    def own_size(self) -> tuple[int, ...]:
        return self.size[self.stacked :]

    @property
    def box(self) -> ChunkStorageMetadata:
        """As torch's metadata says it."""
        return ChunkStorageMetadata(torch.Size(self.offset), torch.Size(self.size))

    def part(self, axis: int, part: int, parts: int) -> "Region":
        """One of `parts` equal cuts along a parameter's `axis`."""
        at, offset, size = self.stacked + axis, list(self.offset), list(self.size)
        size[at] //= parts
        offset[at] += part * size[at]
        return Region(self.key, self.shape, tuple(offset), tuple(size), self.stacked)


@dataclass(frozen=True)
class StoredParam:
    """A parameter of the model, whole, and the boxes that it fills, one after the other along the rows it is cut by.

    shape: the parameter's. dtype: its own, where that is not the checkpoint's.
    """

    bound: Bound
    shape: tuple[int, ...]
    dtype: torch.dtype
    regions: tuple[Region, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Structure:
    """All that a distributed checkpoint of one model's weights holds. objects: pickled bytes of what is no tensor."""

    params: list[StoredParam]
    objects: dict[str, bytes]

    @property
    def exported(self) -> list[StoredParam]:
        """Those that Hugging Face tensors are made of."""
        return [param for param in self.params if param.bound.param.exported]
