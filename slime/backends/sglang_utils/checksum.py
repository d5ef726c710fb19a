"""Predicts the digests that SGLang's `/weights_checker` reports, from full tensors with Hugging Face names.

An engine hashes its own parameters: q, k and v fused, gate and up fused, sizes padded with zeros where they do not
divide, all of it cut over its tensor-parallel ranks. So the trainer cuts what it has sent in the same way and hashes
the same bytes. The two agree only if the engine holds, byte for byte, what the trainer meant to send.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
import xxhash

from slime.backends.sglang_utils.engine_layout import EngineLayout
from slime.backends.sglang_utils.tile_hash import TileHasher, tile_hash


class CpuDigest:
    """Digest of a CPU engine: XXH3 (64 bits) over the parameter's memory, which reads it about as fast as a copy does;
    SGLang's own SHA-256 took as long as the rest of a sync (`cpu_checksum.py`). Parts are hashed in order; those that
    come before their turn are copied."""

    def __init__(self, parts: int) -> None:
        self._hash = xxhash.xxh3_64()
        self._next, self._early = 0, dict[int, torch.Tensor]()

    def update(self, part: int, data: torch.Tensor) -> None:
        if part != self._next:
            self._early[part] = data.clone()
            return
        self._hash.update(data.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._next += 1
        if (early := self._early.pop(self._next, None)) is not None:
            self.update(self._next, early)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


class TileHash:
    """Digest of a CUDA engine; see `tile_hash`. Many equal parts (experts) are hashed as they come: a whole layer would
    not fit beside the model. A few, as q, k and v, are kept, since those before a part say where it starts."""

    def __init__(self, parts: int) -> None:
        self._parts, self._kept = parts, dict[int, torch.Tensor]()
        self._hasher: TileHasher | None = None

    def update(self, part: int, data: torch.Tensor) -> None:
        data = data.detach().reshape(-1).view(torch.uint8)
        if self._parts <= 3 or data.numel() % 4:
            self._kept[part] = data
            return
        self._hasher = self._hasher or TileHasher(self._parts * data.numel(), data.device)
        self._hasher.update(part * data.numel(), data)

    def hexdigest(self) -> str:
        if self._hasher is not None:
            return f"{self._hasher.digest():016x}"
        return f"{tile_hash(torch.cat([self._kept[part] for part in range(self._parts)])):016x}"


@dataclass
class _Pending:
    """A parameter whose parts have not all come. hashers: one per rank; seen: the parts that came."""

    parts: int
    hashers: list[CpuDigest | TileHash]
    seen: set[int] = field(default_factory=set)


class EngineDigests:
    """Collects full tensors in any order, one `add` each, and predicts the digests of every rank.

    layout: of the engine, CPU or CUDA (they hash differently). dtype: of the engine's weights; None: tensors come in it
    already. Raises ValueError for a shape that does not fit.
    """

    def __init__(self, layout: EngineLayout, *, dtype: torch.dtype | None = None):
        self._layout, self._tp, self._dtype = layout, layout.tp, dtype
        self._new_hasher: Callable[[int], CpuDigest | TileHash] = CpuDigest if layout.on_cpu else TileHash
        self._pending: dict[str, _Pending] = {}
        self._digests: list[dict[str, str]] = [{} for _ in range(layout.tp)]

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """One full tensor with its Hugging Face name, as it is sent; on CPU it may change afterwards."""
        placed = self._layout.place(name, tensor if self._dtype is None else tensor.to(self._dtype))
        if placed is None:
            return
        target, parts = placed.target, placed.parts
        new = _Pending(parts, [self._new_hasher(parts) for _ in range(self._tp)])
        pending = self._pending.setdefault(target, new)
        if target in self._digests[0] or placed.part in pending.seen:
            raise ValueError(f"engine digests: {name} came twice")
        pending.seen.add(placed.part)
        for hasher, shard in zip(pending.hashers, placed.shards, strict=True):
            hasher.update(placed.part, shard)
        if len(pending.seen) == parts:
            for digests, hasher in zip(self._digests, pending.hashers, strict=True):
                digests[target] = hasher.hexdigest()
            del self._pending[target]

    def finish(self) -> list[dict[str, str]]:
        """Digest by engine parameter name, one dict per tensor-parallel rank. Raises ValueError when a part of a fused
        parameter never came."""
        if self._pending:
            name, pending = next(iter(self._pending.items()))
            raise ValueError(f"engine digests: {name} got {len(pending.seen)} of its {pending.parts} parts")
        return self._digests


@dataclass(frozen=True)
class Compared:
    """checked: parameters whose digests were compared. followed: those that an engine keeps in an order of its own, of
    which only changes can be compared. wrong: descriptions of disagreements."""

    checked: int
    followed: int
    wrong: list[str]


Ranks = Iterable[Mapping[str, str]]


def compare_digests(
    expected: Ranks, found: Ranks, sure: Callable[[str], bool] = lambda name: True,
    before: tuple[Ranks, Ranks] | None = None,
) -> Compared:  # fmt: skip
    """Compares digests rank by rank; a parameter that only one side has is a disagreement too.

    sure: whether the engine keeps a parameter as the prediction says (`EngineLayout.sure`). Where that is not known and
    digests differ, a change since `before`, an earlier (expected, found), must be one on both sides or on none.
    """
    expected, found = list(expected), list(found)
    if len(expected) != len(found):
        return Compared(0, 0, [f"{len(expected)} ranks expected, {len(found)} found"])
    pairs = list(zip(*before, strict=True)) if before is not None else [({}, {})] * len(found)
    checked, followed, wrong = 0, 0, []
    for rank, (want, have, (old_want, old_have)) in enumerate(zip(expected, found, pairs, strict=True)):
        for name in sorted(want.keys() | have.keys()):
            equal = want.get(name) == have.get(name)
            if equal or sure(name):
                checked += 1
                if not equal:
                    sides = (want.get(name) or "not sent", have.get(name) or "not in the engine")
                    wrong.append(f"rank {rank} {name}: trainer {sides[0]}, engine {sides[1]}")
                continue
            followed += 1
            if {name} <= want.keys() & have.keys() & old_want.keys() & old_have.keys():
                changed = want[name] != old_want[name], have[name] != old_have[name]
                if changed[0] != changed[1]:
                    side = "the trainer" if changed[0] else "the engine"
                    wrong.append(f"rank {rank} {name}: changed in {side} only")
    return Compared(checked, followed, wrong)
