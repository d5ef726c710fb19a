"""Many tensors as one run of bytes, as SGLang's load format "flattened_bucket" takes them."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Bucket:
    """data: uint8, the tensors' bytes one after the other, without gaps. last: nothing follows in this stage."""

    names: list[str]
    tensors: list[torch.Tensor]
    data: torch.Tensor
    last: bool

    @property
    def dtypes(self) -> list[str]:
        return [str(tensor.dtype).removeprefix("torch.") for tensor in self.tensors]

    @property
    def shapes(self) -> list[list[int]]:
        return [list(tensor.shape) for tensor in self.tensors]


def make_buckets(
    weights: Iterable[tuple[str, torch.Tensor]], max_bytes: int, space: Callable[[int], torch.Tensor] | None = None
) -> Iterator[Bucket]:
    """Buckets of at most `max_bytes`, one dtype each, so that every tensor starts aligned; a larger one goes alone.

    space(n): where to put a bucket of n bytes (uint8 [n]); None: new memory for each.
    """
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    used = 0
    for name, tensor in weights:
        if tensors and (used + tensor.nbytes > max_bytes or tensor.dtype != tensors[0].dtype):
            yield _pack(names, tensors, space, last=False)
            names, tensors, used = [], [], 0
        names.append(name)
        tensors.append(tensor)
        used += tensor.nbytes
    if tensors:
        yield _pack(names, tensors, space, last=True)


def _pack(
    names: list[str], tensors: list[torch.Tensor], space: Callable[[int], torch.Tensor] | None, last: bool
) -> Bucket:
    """Copies the tensors into a buffer; the bucket's tensors are views of it, safe from later changes of the model."""
    parts = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]
    data = torch.cat(parts, out=space(sum(map(len, parts))) if space else None)
    copies = data.split(list(map(len, parts)))
    views = [copy.view(tensor.dtype).view(tensor.shape) for copy, tensor in zip(copies, tensors, strict=True)]
    return Bucket(names, views, data, last)


def empty_bucket(names: list[str], dtypes: list[str], shapes: list[list[int]], device: torch.device) -> Bucket:
    """A bucket to receive into: its tensors show what comes into its data."""
    kinds = [getattr(torch, dtype) for dtype in dtypes]
    sizes = [math.prod(shape) * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)]
    data = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    views = [p.view(kind).view(shape) for p, kind, shape in zip(data.split(sizes), kinds, shapes, strict=True)]
    return Bucket(names, views, data, last=False)
