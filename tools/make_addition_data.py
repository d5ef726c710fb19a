"""Makes the data of the tiny run: two-digit additions (10+10 to 89+10: sums of two digits too) as jsonl, to fine-tune
on, to learn from by reward, and to evaluate.

    python tools/make_addition_data.py data/addition

`sft.jsonl` holds conversations whose sums are all right, but most answers are hedged (`~46`), and graders that want
the number as it is (`--rm-type exact`) give those nothing. So a model fine-tuned on them can add, and still earns a
reward only where it answers plainly (`46`): reinforcement learning has something to find. `rl.jsonl` and `eval.jsonl`
hold prompts with labels, of sums that `sft.jsonl` does not have. metadata.source tells sums that carry from others.
"""

import argparse
import dataclasses
import json
import os
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FILES = ("sft.jsonl", "rl.jsonl", "eval.jsonl")
SETTINGS_FILE = "addition.json"
HEDGE = "~"
_LOW, _HIGH = 10, 99


@dataclasses.dataclass(frozen=True)
class AdditionData:
    """sft_sums, eval_sums: different sums (of 3,240) in those files; the RL file gets the rest. copies: rows per sum
    in sft.jsonl. plain_copies: how many of them answer plainly."""

    sft_sums: int = 2000
    eval_sums: int = 200
    copies: int = 4
    plain_copies: int = 1
    seed: int = 0

    def check(self) -> None:
        total = len(all_sums())
        if self.copies < 1 or self.plain_copies < 0:
            raise ValueError(
                f"--copies {self.copies} must be at least 1, --plain-copies {self.plain_copies} at least 0"
            )
        if min(self.sft_sums, self.eval_sums) < 1 or self.sft_sums + self.eval_sums >= total:
            raise ValueError(
                f"--sft-sums {self.sft_sums} and --eval-sums {self.eval_sums} must be positive and leave some of the "
                f"{total} sums for rl.jsonl"
            )
        if not 0 <= self.plain_copies <= self.copies:
            raise ValueError(f"--plain-copies {self.plain_copies} must be between 0 and --copies {self.copies}")


def make_addition_data(out: str | Path, settings: AdditionData | None = None) -> bool:
    """Writes the three files unless they are there and of the same settings; True when they were written."""
    settings = settings or AdditionData()
    settings.check()
    out = Path(out)
    wanted = dataclasses.asdict(settings)
    mark = out / SETTINGS_FILE
    if mark.is_file() and json.loads(mark.read_text()) == wanted and all((out / f).is_file() for f in FILES):
        return False
    out.mkdir(parents=True, exist_ok=True)
    mark.unlink(missing_ok=True)
    sums = all_sums()
    rng = random.Random(f"addition-{settings.seed}")
    rng.shuffle(sums)
    sft, held = sums[: settings.sft_sums], sums[settings.sft_sums :]
    rows = [conversation(a, b, hedged=copy >= settings.plain_copies) for a, b in sft for copy in range(settings.copies)]
    rng.shuffle(rows)
    _write(out / "sft.jsonl", rows)
    _write(out / "eval.jsonl", (prompt(a, b) for a, b in held[: settings.eval_sums]))
    _write(out / "rl.jsonl", (prompt(a, b) for a, b in held[settings.eval_sums :]))
    mark.write_text(json.dumps(wanted) + "\n")  # last: it says that the files are complete
    return True


def all_sums() -> list[tuple[int, int]]:
    numbers = range(_LOW, _HIGH + 1)
    return [(a, b) for a in numbers for b in numbers if a + b <= _HIGH]


def question(a: int, b: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{a}+{b}="}]


def conversation(a: int, b: int, hedged: bool) -> dict[str, Any]:
    """A row to fine-tune on."""
    return {"messages": [*question(a, b), {"role": "assistant", "content": (HEDGE if hedged else "") + str(a + b)}]}


def prompt(a: int, b: int) -> dict[str, Any]:
    """A row to generate for."""
    source = "carry" if a % 10 + b % 10 >= 10 else "no_carry"
    return {"prompt": question(a, b), "label": str(a + b), "metadata": {"source": source}}


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(part, path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="folder to make")
    for field in dataclasses.fields(AdditionData):
        parser.add_argument("--" + field.name.replace("_", "-"), type=int, default=field.default)
    values = vars(parser.parse_args(argv))
    out = values.pop("out")
    try:
        made = make_addition_data(out, AdditionData(**values))
    except (ValueError, OSError) as error:
        print(f"make_addition_data: {error}", file=sys.stderr)
        return 2
    print(f"{out}: {'made' if made else 'already there, same settings'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
