"""The ledger: what became of every prompt group of a run, written down as it happens and checked at every step.

`ledger.jsonl` in the run folder is only ever appended to. A group is drawn from the prompts, waits in the buffer
(`returned`, `taken`), and ends as trained, filtered (by a named rule) or lost. A run that goes on from a checkpoint
appends `resumed` with the file's length at that checkpoint: what lies between is void, because the run does it again.
"""

import contextlib
import dataclasses
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

FILE = "ledger.jsonl"
OUTCOMES = ("trained", "filtered", "lost")
COUNTED = ("drawn", "added", "returned", *OUTCOMES)
# What readers need of each event; whole numbers where the second table says nothing else.
_FIELDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("taken", "returned", "added", *OUTCOMES), ("step", "group")),
    "drawn": ("step", "group", "first_sample", "samples"),
    "resumed": ("step", "position", "counts", "next", "waiting"),
    "violation": ("step", "text"),
}
_FIELD_TYPES: dict[str, Any] = {"position": (int, type(None)), "counts": dict, "waiting": list, "text": str}


class LedgerError(RuntimeError):
    """Prompt groups do not add up: some were lost or used twice without a word."""


class Book:
    """Which group is where; the rules of how it may move. Memory is that of the groups which are under way.

    drawn + added = trained + filtered + lost + in flight + buffered. `added` are groups that a user's hook put into
    the buffer without having taken them out of flight (a replay of trained ones, or prompts of its own).
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.in_flight: set[int] = set()
        self.buffered: set[int] = set()
        self.problems: list[str] = []
        self._next = 0  # groups below were drawn
        self._settled: dict[int, str] = {}  # in the current step
        self._step: int | None = None

    def take(self, event: str, group: int, step: int) -> str | None:
        """Moves one group. Returns the event by its name in the file ("added" for a group returned from nowhere), None
        where it is no news (told twice, or a group that did not come from the prompts).

        Moves that cannot be are kept in `problems`.
        """
        if step != self._step:
            self._step, self._settled = step, {}
        if event == "drawn":
            self._must(group >= self._next, f"group {group} was drawn twice")
            self._next = max(self._next, group + 1)
            self.in_flight.add(group)
        elif event == "taken":
            self._must(group in self.buffered, f"group {group} was taken from the buffer without being there")
            self.buffered.discard(group)
            self.in_flight.add(group)
        elif event == "returned":
            self._must(group not in self.buffered, f"group {group} was put into the buffer twice")
            event = "returned" if group in self.in_flight else "added"
            self.in_flight.discard(group)
            self.buffered.add(group)
        elif event in OUTCOMES:
            before = self._settled.get(group)
            if group not in self.in_flight:
                if before is None and group not in self.buffered and group >= self._next:
                    return None
                self._must(before == event, f"group {group} is {event} although it {self._where(group)}")
                return None
            self.in_flight.discard(group)
            self._settled[group] = event
        else:
            raise ValueError(f"ledger event {event!r} is unknown")
        self.counts[event] += 1
        return event

    def accounting(self) -> dict[str, int]:
        """Groups by state since the start of the run."""
        counts = {name: self.counts[name] for name in COUNTED}
        return {**counts, "in_flight": len(self.in_flight), "buffered": len(self.buffered)}

    def check(self) -> None:
        """Raises LedgerError when groups moved in a way that cannot be, or do not add up."""
        n = self.accounting()
        left = n["drawn"] + n["added"] - sum(n[outcome] for outcome in OUTCOMES) - n["in_flight"] - n["buffered"]
        problems = self.problems + ([f"{left} groups are nowhere: {n}"] if left else [])
        if problems:
            raise LedgerError(f"prompt groups do not add up: {'; '.join(problems[:5])}")

    def state_dict(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "next": self._next}

    def load_state_dict(self, state: Mapping[str, Any], waiting: Iterable[int]) -> None:
        """waiting: groups that wait to be handed out (again)."""
        self.__init__()  # type: ignore[misc]
        self.counts, self._next = Counter(state["counts"]), state["next"]
        self.buffered = set(waiting)

    def _must(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(f"{problem} (step {self._step})")

    def _where(self, group: int) -> str:
        if group in self._settled:
            return f"is {self._settled[group]} already"
        return "waits in the buffer" if group in self.buffered else "was used up in an earlier step"


class Ledger:
    """A `Book` that is written to a file, once `open` has been called; before, it only counts."""

    def __init__(self) -> None:
        self.book = Book()
        self.step = 0
        self._file: BinaryIO | None = None

    def open(self, run_dir: str | Path, resumed: Mapping[str, Any] | None = None, step: int = 0) -> None:
        """Goes on with the run folder's file. resumed: the `state_dict` that this run continues from, at `step`."""
        path = Path(run_dir) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab")
        self.step = step
        if self._file.tell() and not path.read_bytes().endswith(b"\n"):
            self._file.write(b"\n")  # a crash tore the last line; readers pass over it
            self._file.flush()
        if resumed is not None:
            found = 0 <= resumed["position"] <= self._file.tell()
            state = {**self.book.state_dict(), "waiting": sorted(self.book.buffered)}
            self._write(
                [{"event": "resumed", "step": step, "position": resumed["position"] if found else None, **state}]
            )

    def begin(self, step: int) -> None:
        """Events from now on belong to this step."""
        self.step = step

    def drawn(self, group: int, *, epoch: int, row: int, first_sample: int, samples: int) -> None:
        """A fresh group: prompt `row` of the (kept) prompts, `samples` samples numbered from `first_sample`."""
        if self.book.take("drawn", group, self.step):
            place = {"epoch": epoch, "row": row, "first_sample": first_sample, "samples": samples}
            self._write([{"event": "drawn", "step": self.step, "group": group, **place}])

    def moved(self, event: str, groups: Iterable[int], details: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """`taken`, `returned` or an outcome, for each group, with what else is to be kept of it. Returns those that
        it was news for."""
        rows, news = [], []
        for i, group in enumerate(groups):
            if (name := self.book.take(event, group, self.step)) is not None:
                rows.append({"event": name, "step": self.step, "group": group, **(details[i] if details else {})})
                news.append(group)
        self._write(rows)
        return news

    def check(self) -> None:
        """End of a step. Raises LedgerError, which the file keeps as well."""
        try:
            self.book.check()
        except LedgerError as error:
            self._write([{"event": "violation", "step": self.step, "text": str(error)}])
            raise

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: the counts, and the length of the file that they come from (-1: there is no file)."""
        return {**self.book.state_dict(), "position": self._file.tell() if self._file is not None else -1}

    def sync(self) -> None:
        """What was written is safe from a power failure afterwards."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def _write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if self._file is not None and rows:
            self._file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
            self._file.flush()


@dataclasses.dataclass(frozen=True)
class Record:
    """One line. void: undone by a restart from an earlier checkpoint."""

    event: str
    step: int
    group: int | None
    fields: dict[str, Any]
    void: bool = False


def read_ledger(run_dir: str | Path) -> list[Record]:
    """All records in order; a line that a crash tore is passed over.

    Raises FileNotFoundError where there is no ledger, ValueError for a line that is JSON and no record.
    """
    path = Path(run_dir) / FILE
    if not path.is_file():
        raise FileNotFoundError(f"there is no {FILE} in {run_dir}: is it the folder of a run (--run-dir)?")
    records: list[tuple[int, Record]] = []
    start = 0
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if (record := _record(line, f"{path}, line {number}")) is not None:
            if record.event == "resumed" and (position := record.fields["position"]) is not None:
                records = [(at, dataclasses.replace(r, void=r.void or at >= position)) for at, r in records]
            records.append((start, record))
        start += len(line) + 1
    return [record for _, record in records]


def _record(line: bytes, where: str) -> Record | None:
    try:
        row = json.loads(line)
    except ValueError:  # torn, or empty
        return None
    needed = _FIELDS.get(str(row.get("event"))) if isinstance(row, dict) else None
    if needed is None:
        raise ValueError(f"{where}: {line[:80].decode(errors='replace')} is no record of a ledger")
    wrong = [name for name in needed if not isinstance(row.get(name), _FIELD_TYPES.get(name, int))]
    if wrong:
        raise ValueError(f"{where}: {', '.join(wrong)} of the event {row['event']!r} missing or not as they should be")
    return Record(row.pop("event"), row.pop("step"), row.pop("group", None), row)


def audit(records: Iterable[Record]) -> Book:
    """The book that the records (those not void) lead to; its `problems` hold what was lost or doubled."""
    book = Book()
    for record in records:
        if record.void or record.event == "violation":
            continue
        if record.event == "resumed":
            waiting = set(record.fields["waiting"])
            expected, counts = book.in_flight | book.buffered, {k: v for k, v in record.fields["counts"].items() if v}
            if record.fields["position"] is not None:
                if waiting != expected:
                    missing, extra = sorted(expected - waiting), sorted(waiting - expected)
                    book.problems.append(
                        f"at the restart of step {record.step} groups {missing} were lost, {extra} new"
                    )
                if counts != {k: v for k, v in book.counts.items() if v}:
                    book.problems.append(f"at the restart of step {record.step} counts {counts} became {book.counts}")
            problems = book.problems
            book.load_state_dict(record.fields, waiting)
            book.problems = problems
            continue
        assert record.group is not None
        book.take("returned" if record.event == "added" else record.event, record.group, record.step)
    with contextlib.suppress(LedgerError):
        book.check()
    return book
