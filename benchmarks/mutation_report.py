"""Table and figures of `benchmarks/mutation.py`, from its sessions."""

import collections
import datetime
import importlib.metadata
import os
import sys
from typing import Any

COMMAND = "python benchmarks/mutation.py --tool-path DIR --work build/mutation --per-operator"


def report(rules: Any, sessions: dict[str, tuple[Any, set[str]]], per_operator: int) -> tuple[str, dict[str, Any]]:
    """(markdown, figures of the last line). Mutants: those that were run; share is of those that are no equivalents."""
    total: collections.Counter[str] = collections.Counter()
    rows, operators, alive, same = [], collections.defaultdict(collections.Counter), [], []
    for module, (db, drawn) in sessions.items():
        count: collections.Counter[str] = collections.Counter()
        for item in db.pending_work_items:
            count["unrun" if item.job_id in drawn else "not in the sample"] += 1
        for item, result in sorted(db.completed_work_items, key=lambda x: x[0].mutations[0].start_pos):
            (spot,) = item.mutations
            name = spot.operator_name.partition("/")[2]
            if result.test_outcome is None:
                count[result.output] += 1
                continue
            if item.job_id not in drawn:
                count["not in the sample"] += 1
                continue
            reason = rules.reason_if_equivalent(module, result.diff) if result.test_outcome == "survived" else None
            kind = "equivalent" if reason else str(result.test_outcome.value)
            count[kind] += 1
            operators[name][kind] += 1
            if kind != "killed":
                changed = " → ".join(line[2:] for line in result.diff.splitlines())
                where = f"`{module}:{spot.start_pos[0]}` {name}: `{changed}`"
                alive.append(where) if reason is None else same.append(f"{where}: {reason}")
        rows.append(_row(f"`{module}`", count))
        total += count
    mutants = total["killed"] + total["survived"] + total["equivalent"]
    figures = {
        "mutants": mutants, "killed": total["killed"], "equivalent": total["equivalent"],
        "survived": total["survived"], "share": round(_share(total), 4),
    }  # fmt: skip
    lines = [
        "# Mutation check: small faults in the formulas, and whether the tests notice",
        "",
        f"`{COMMAND} {per_operator}`, {datetime.date.today()}, {os.cpu_count()} cores, Python "
        f"{sys.version.split()[0]}, torch {importlib.metadata.version('torch')}.",
        f"At most {per_operator} mutants of an operator in a module, drawn with a fixed seed; "
        f"{total['not in the sample']} places were not in the sample. {total['noise']} places that are no numbers "
        "(annotations, texts of errors and logs, assertions, `strict=`) and "
        f"{total['duplicate'] + total['no code']} changes that give the same or no valid program were left out."
        + (f" **{total['unrun']} mutants were not run.**" if total["unrun"] else ""),
        "",
        "| module | mutants | killed | equivalent | survived | share killed |",
        "|---|---|---|---|---|---|",
        *rows,
        _row("all", total),
        "",
        "share = killed / (mutants - equivalent). By operator:",
        "",
        "| operator | mutants | killed | equivalent | survived | share killed |",
        "|---|---|---|---|---|---|",
        *(_row(name, operators[name]) for name in rules.Provider() if name in operators),
        "",
        "## Survivors",
        "",
        *(f"- {line}" for line in alive),
        *(["None."] if not alive else []),
        "",
        "## Equivalent, so not counted",
        "",
        *(f"- {line}" for line in same),
    ]
    return "\n".join(lines).rstrip(), figures


def _share(count: collections.Counter[str]) -> float:
    return count["killed"] / max(1, count["killed"] + count["survived"])


def _row(name: str, count: collections.Counter[str]) -> str:
    mutants = count["killed"] + count["survived"] + count["equivalent"]
    numbers = (mutants, count["killed"], count["equivalent"], count["survived"])
    return f"| {name} | {' | '.join(map(str, numbers))} | {_share(count):.1%} |"
