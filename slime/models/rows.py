"""How the rows of Hugging Face tensors become the rows of one Megatron tensor, as an algebra of runs.

Every conversion of a weight is, along one axis, a rearrangement of rows: query, key and value rows of one group lie
together, each rank has its gate rows before its up rows, the vocabulary ends in zero rows. So a conversion is not code
that moves tensors but a list of runs that says where each row comes from. Loading, saving, the shard of any rank and
the inverse all follow from that list, and can be checked without a tensor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

PADDING = -1


@dataclass(frozen=True)
class Run:
    """Rows start, start + step, ... below `stop` of tensor number `source`; zero rows where `source` is PADDING."""

    source: int
    start: int
    stop: int
    step: int = 1

    def __len__(self) -> int:
        return len(range(self.start, self.stop, self.step))

    def part(self, first: int, count: int) -> "Run":
        """`count` of its rows, from its row number `first` on."""
        start = self.start + first * self.step
        return Run(self.source, start, start + count * self.step, self.step)


Rows = tuple[Run, ...]


def size(rows: Rows) -> int:
    return sum(len(run) for run in rows)


def join(parts: Sequence[Rows]) -> Rows:
    """One after the other; runs that continue each other become one."""
    out: list[Run] = []
    for run in (run for part in parts for run in part if len(run)):
        if out and (out[-1].source, out[-1].step, out[-1].stop) == (run.source, run.step, run.start):
            out[-1] = Run(run.source, out[-1].start, run.stop, run.step)
        else:
            out.append(run)
    return tuple(out)


def split(rows: Rows, parts: int) -> list[Rows]:
    """Equal cuts, in order. Raises ValueError when the rows do not divide."""
    total = size(rows)
    if total % parts:
        raise ValueError(f"{total} rows do not divide into {parts} equal parts")
    each = total // parts
    out: list[list[Run]] = [[] for _ in range(parts)]
    at = 0
    for run in rows:
        first = 0
        while first < len(run):
            part, used = divmod(at, each)
            n = min(len(run) - first, each - used)
            out[part].append(run.part(first, n))
            first, at = first + n, at + n
    return [tuple(part) for part in out]


def take(rows: Rows, start: int, count: int) -> Rows:
    """`count` of the rows, from number `start` on."""
    out = []
    for run in rows:
        first, last = max(start, 0), min(start + count, len(run))
        if first < last:
            out.append(run.part(first, last - first))
        start -= len(run)
    return tuple(out)


class Step:
    """One transform of a `Form`: from parts (rows each) to parts, for `tp` ranks."""

    def __call__(self, parts: list[Rows], tp: int) -> list[Rows]:
        raise NotImplementedError


@dataclass(frozen=True)
class Interleave(Step):
    """Cuts each part into `units` equal pieces and lays pieces of the same number side by side: q k v | q k v | ...

    units None: one per rank, so that each rank holds its piece of every part, one part after the other (gate, then up).
    """

    units: int | None

    def __call__(self, parts: list[Rows], tp: int) -> list[Rows]:
        pieces = [split(part, self.units or tp) for part in parts]
        return [join([piece for unit in zip(*pieces, strict=True) for piece in unit])]


@dataclass(frozen=True)
class Halves(Step):
    """Takes each part for two, one after the other: a file's fused gate_up is gate, then up."""

    def __call__(self, parts: list[Rows], tp: int) -> list[Rows]:
        return [half for part in parts for half in split(part, 2)]


@dataclass(frozen=True)
class EveryOther(Step):
    """Takes each source for two whose rows alternate in the file: gate, up, gate, up (gpt-oss). Comes first."""

    def __call__(self, parts: list[Rows], tp: int) -> list[Rows]:
        runs = [run for part in parts for run in part]
        if any(run.step != 1 or len(run) % 2 for run in runs):
            raise ValueError(f"{[len(run) for run in runs]} rows do not alternate between two tensors")
        return [(Run(run.source, run.start + i, run.stop + i, 2),) for run in runs for i in (0, 1)]


@dataclass(frozen=True)
class Pad(Step):
    """Appends zero rows until the size is a multiple of `multiple` times the number of ranks."""

    multiple: int

    def __call__(self, parts: list[Rows], tp: int) -> list[Rows]:
        return [join([part, (Run(PADDING, 0, -size(part) % (self.multiple * tp)),)]) for part in parts]


@dataclass(frozen=True)
class Form:
    """How some tensors become one: `steps` rearrange rows of dimension `axis`, then the ranks get equal cuts of it.

    cut False: every rank holds the whole (norms, routers).
    """

    steps: tuple[Step, ...] = ()
    axis: int = 0
    cut: bool = True

    def shards(self, sizes: Sequence[int], tp: int) -> list[Rows]:
        """Rows that each of `tp` ranks holds. sizes: of the sources along `axis`. ValueError if they do not fit."""
        parts: list[Rows] = [(Run(i, 0, n),) for i, n in enumerate(sizes)]
        for step in self.steps:
            parts = step(parts, tp)
        rows = join(parts)
        return split(rows, tp) if self.cut else [rows] * tp


ReadRows = Callable[[int, int, int], torch.Tensor]


def fill(out: torch.Tensor, rows: Rows, axis: int, read: ReadRows) -> None:
    """Writes `rows` into `out`. read(source, start, stop): rows of a source, in any dtype; padding becomes zero."""
    at = 0
    for run in rows:
        target = out.narrow(axis, at, len(run))
        if run.source == PADDING:
            target.zero_()
        else:
            rows_read = read(run.source, run.start, run.part(len(run) - 1, 1).start + 1)
            target.copy_(rows_read if run.step == 1 else _every(rows_read, axis, run.step))
        at += len(run)


def _every(tensor: torch.Tensor, axis: int, step: int, start: int = 0, stop: int | None = None) -> torch.Tensor:
    return tensor[(slice(None),) * axis + (slice(start, stop, step),)]


@dataclass(frozen=True)
class Pieces:
    """A tensor that lies in pieces along `axis`: it is put together where it is wanted, with one copy or none.

    runs: where each piece's rows belong; None: one piece after the other.
    """

    parts: tuple[torch.Tensor, ...]
    axis: int = 0
    runs: tuple[Run, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.parts[0].shape)
        shape[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        return tuple(shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def whole(self) -> torch.Tensor:
        """A view when there is only one piece, else a new tensor."""
        if self.runs is not None:
            out = self.parts[0].new_empty(self.shape)
            self.write(out)
            return out
        return self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts, self.axis)

    def write(self, out: torch.Tensor) -> None:
        if self.runs is not None:
            for part, run in zip(self.parts, self.runs, strict=True):
                _every(out, self.axis, run.step, run.start, run.stop).copy_(part)
            return
        for part, target in zip(
            self.parts, out.split([part.shape[self.axis] for part in self.parts], self.axis), strict=True
        ):
            target.copy_(part)


@dataclass(frozen=True)
class Stack:
    """A tensor whose first dimension counts `slabs` (experts); transposed: each one's dimensions lie swapped in it."""

    slabs: tuple[Pieces, ...]
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.slabs[0].shape
        return (len(self.slabs), *(shape[::-1] if self.transposed else shape))

    @property
    def dtype(self) -> torch.dtype:
        return self.slabs[0].dtype

    @property
    def device(self) -> torch.device:
        return self.slabs[0].device

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self.slabs)

    def whole(self) -> torch.Tensor:
        out = self.slabs[0].parts[0].new_empty(self.shape)
        self.write(out)
        return out

    def write(self, out: torch.Tensor) -> None:
        for slab, target in zip(self.slabs, out, strict=True):
            slab.write(target.mT if self.transposed else target)


def merge(shards: Sequence[torch.Tensor], rows: Sequence[Rows], axis: int, sizes: Sequence[int]) -> list[Pieces]:
    """The inverse of `fill` over all ranks: the source tensors, as views of the shards. Padding is dropped.

    Raises ValueError when the shards do not hold every row of every source.
    """
    found: list[list[tuple[Run, torch.Tensor]]] = [[] for _ in sizes]
    for shard, shard_rows in zip(shards, rows, strict=True):
        at = 0
        for run in shard_rows:
            if run.source != PADDING:
                found[run.source].append((run, shard.narrow(axis, at, len(run))))
            at += len(run)
    out = []
    for pieces, total in zip(found, sizes, strict=True):
        pieces.sort(key=lambda piece: piece[0].start)
        have = sum(part.shape[axis] for _, part in pieces)
        if have != total:
            raise ValueError(f"{total} rows wanted, {have} rows found in the shards")
        in_order = all(run.step == 1 for run, _ in pieces)
        runs = None if in_order else tuple(run for run, _ in pieces)
        out.append(Pieces(tuple(part for _, part in pieces), axis, runs))
    return out
