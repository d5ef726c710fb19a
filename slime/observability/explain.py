"""Tells the life of one sample, or the balance of all prompts, from a run's ledger.

python -m slime explain runs/tiny_cpu                  # every prompt group accounted for?
python -m slime explain runs/tiny_cpu --sample 50      # what became of sample 50
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.data.ledger import OUTCOMES, Record, audit, read_ledger
from slime.observability.samples import read_samples, sample_steps


def explain_group(records: Sequence[Record], group: int) -> list[str]:
    """Lines in plain words, oldest first; what a restart undid is told as such."""
    lines: list[str] = []
    for record in records:
        if record.event == "resumed":
            if lines:
                lines.append(f"  (the run was started again at step {record.step})")
        elif record.group == group:
            undone = " - undone: the run went on from an earlier checkpoint" if record.void else ""
            lines.append(f"  step {record.step}: {_in_words(record)}{undone}")
    last = next((r for r in reversed(records) if r.group == group and not r.void), None)
    if last is not None and last.event not in OUTCOMES:
        lines.append(f"  now: {'waits in the buffer' if last.event in ('returned', 'added') else 'under way'}")
    elif last is None and lines:
        lines.append("  now: not drawn yet")
    return lines


def _in_words(record: Record) -> str:
    f = record.fields
    by = f", tokens of weight version {', '.join(f['versions'])}" if f.get("versions") else ""
    rule = f" by {f['rule']}" if f.get("rule") else ""
    return {
        "drawn": f"drawn: prompt {f.get('row')} of epoch {f.get('epoch')}",
        "taken": "taken out of the buffer",
        "returned": f"not used, put back into the buffer{by}",
        "added": "put into the buffer by a hook",
        "trained": f"trained{by}",
        "filtered": f"filtered out{rule}{by}",
        "lost": f"lost{rule}{by}",
        "violation": f"VIOLATION: {f.get('text')}",
    }.get(record.event, record.event)


def find_group(records: Sequence[Record], sample: int) -> tuple[int, int, int] | None:
    """(group, place in the group, size of the group) of a sample number; None where no such sample was drawn."""
    for record in records:
        if record.event == "drawn" and 0 <= sample - record.fields["first_sample"] < record.fields["samples"]:
            assert record.group is not None
            return record.group, sample - record.fields["first_sample"], record.fields["samples"]
    return None


def explain_sample(run: Path, sample: int) -> list[str]:
    """The life of a sample in plain words. Raises ValueError where there is no such sample."""
    records = read_ledger(run)
    found = find_group(records, sample)
    if found is None:
        drawn = [r.fields["first_sample"] + r.fields["samples"] for r in records if r.event == "drawn"]
        raise ValueError(f"no sample {sample} was drawn in {run}: it has samples 0 to {max(drawn, default=0) - 1}")
    group, place, size = found
    lines = [f"sample {sample}: number {place + 1} of {size} in group {group}", *explain_group(records, group)]
    steps = [r.step for r in records if r.group == group and not r.void and r.event in OUTCOMES]
    for step in (s for s in steps if s in sample_steps(run)):
        for row in read_samples(run, step):
            if row["index"] == sample:
                lines += [
                    f"  prompt: {_short(row['prompt'])}",
                    f"  response: {_short(row['response'])} ({row['response_len']} tokens, {row['status']})",
                    f"  reward: {row['reward']}; tokens trained on: {row['trained_len']}",
                ]
    return lines


def explain_run(run: Path) -> tuple[list[str], bool]:
    """The balance of all prompt groups, and whether it is right."""
    records = read_ledger(run)
    book = audit(records)
    n = book.accounting()
    steps = [r.step for r in records if not r.void and r.group is not None]
    restarts = sum(r.event == "resumed" for r in records)
    undone = len({(r.event, r.group) for r in records if r.void and r.event == "trained"})
    lines = [
        f"{n['drawn']} prompt groups drawn in {max(steps, default=-1) + 1} steps"
        + (f" and {n['added']} added by hooks" if n["added"] else ""),
        f"  trained {n['trained']}, filtered {n['filtered']}, lost {n['lost']}, "
        f"waiting in the buffer {n['buffered']}, under way {n['in_flight']}; put back {n['returned']} times",
    ]
    rules: dict[str, int] = {}
    for record in records:
        if record.event == "filtered" and not record.void:
            rule = record.fields.get("rule") or "unnamed"
            rules[rule] = rules.get(rule, 0) + 1
    lines += [f"  filtered by {rule}: {count}" for rule, count in sorted(rules.items())]
    if restarts:
        lines.append(f"  {restarts} restarts from a checkpoint; {undone} trained groups of before were done again")
    problems = book.problems + [r.fields["text"] for r in records if r.event == "violation" and not r.void]
    lines += [f"  VIOLATION: {problem}" for problem in problems]
    lines.append("every group is accounted for" if not problems else "prompt groups do NOT add up")
    return lines, not problems


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:200]} ... {text[-90:]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0, 1 when groups do not add up, 2 when there is nothing to explain."""
    parser = argparse.ArgumentParser(
        prog="python -m slime explain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--sample", type=int, metavar="ID", help="number of a sample; default: the balance of all")
    options = parser.parse_args(argv)
    try:
        lines, right = (
            (explain_sample(options.run, options.sample), True)
            if options.sample is not None
            else explain_run(options.run)
        )
    except (FileNotFoundError, ValueError) as error:
        print(f"explain: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0 if right else 1
