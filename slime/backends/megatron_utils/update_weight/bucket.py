"""Many tensors as one run of bytes, as SGLang's load format "flattened_bucket" takes them."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from slime.models.rows import Pieces, Stack

# SGLang joins them (DeepSeek's `fused_qkv_a_proj_with_mqa`), and only if both come in one call.
_FIRST_HALF, _SECOND_HALF = "q_a_proj.weight", "kv_a_proj_with_mqa.weight"


@dataclass(frozen=True)
class Bucket:
    """data: uint8, the tensors' bytes one after the other, without gaps. last: nothing follows in this stage."""

    names: list[str]
    tensors: list[torch.Tensor]
    data: torch.Tensor
    last: bool

    @property
    def dtypes(self) -> list[str]:
        return [dtype_name(tensor.dtype) for tensor in self.tensors]

    @property
    def shapes(self) -> list[list[int]]:
        return [list(tensor.shape) for tensor in self.tensors]


Space = Callable[[int], torch.Tensor]


def make_buckets(
    weights: Iterable[tuple[str, Pieces | Stack]], max_bytes: int, space: Space | None = None
) -> Iterator[Bucket]:
    """Buckets of at most `max_bytes`, one dtype each, so that every tensor starts aligned; a larger one goes alone.

    Engines load bucket by bucket, and of two tensors that they load as one (`_FIRST_HALF`) they would drop each that
    comes without the other: the two stay together, if need be in a larger bucket. space(n): where to put a bucket of n
    bytes (uint8 [n]); None: new memory for each.
    """
    batch: list[tuple[str, Pieces | Stack]] = []
    used = 0
    halves: set[str] = set()
    for name, pieces in weights:
        full = used + pieces.nbytes > max_bytes and not halves
        if batch and (full or pieces.dtype != batch[0][1].dtype):
            yield _pack(batch, space, last=False)
            batch, used = [], 0
        batch.append((name, pieces))
        used += pieces.nbytes
        if name.endswith(_FIRST_HALF):
            halves.add(name.removesuffix(_FIRST_HALF))
        halves.discard(name.removesuffix(_SECOND_HALF))
    if batch:
        yield _pack(batch, space, last=True)


def _pack(batch: list[tuple[str, Pieces | Stack]], space: Space | None, last: bool) -> Bucket:
    """Copies the tensors, which are then safe from later changes of the model."""
    first = batch[0][1]
    data = space(sum(p.nbytes for _, p in batch)) if space else None
    names, shapes = [name for name, _ in batch], [list(pieces.shape) for _, pieces in batch]
    bucket = empty_bucket(names, [dtype_name(first.dtype)] * len(batch), shapes, first.device, data, last=last)
    for view, (_, pieces) in zip(bucket.tensors, batch, strict=True):
        pieces.write(view)
    return bucket


def empty_bucket(
    names: list[str], dtypes: list[str], shapes: list[list[int]], device: torch.device,
    data: torch.Tensor | None = None, *, last: bool = False,
) -> Bucket:  # fmt: skip
    """A bucket to receive into: its tensors show what comes into its data. data: its memory; None: new memory."""
    kinds = [getattr(torch, dtype) for dtype in dtypes]
    sizes = [math.prod(shape) * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)]
    if data is None:
        data = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    views = [p.view(kind).view(shape) for p, kind, shape in zip(data.split(sizes), kinds, shapes, strict=True)]
    return Bucket(names, views, data, last)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
