"""Shows the samples of a step in the terminal, best and worst first.

python -m slime view runs/tiny_cpu              # the last step
python -m slime view runs/tiny_cpu --step 3 --worst -n 20
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from slime.observability.samples import read_samples, sample_steps


def reward_of(row: dict[str, Any]) -> float:
    """The reward as a number to sort by; of a dict of rewards the first number; NaN if there is none."""
    value = row["reward"]
    if isinstance(value, dict):
        value = next((v for v in value.values() if isinstance(v, int | float)), None)
    return float(value) if isinstance(value, int | float) else math.nan


def choose(rows: Sequence[dict[str, Any]], count: int, order: str) -> list[dict[str, Any]]:
    """At most `count` rows: "best", "worst", or "both", which takes half from either end, best first.

    Rows without a reward come last.
    """
    rows = sorted(rows, key=lambda r: (math.isnan(reward_of(r)), -reward_of(r)))
    scored = [r for r in rows if not math.isnan(reward_of(r))]
    if order == "worst":
        return (scored[::-1] + rows[len(scored) :])[:count]
    if order == "best" or len(rows) <= count or not scored:
        return rows[:count]
    half = (count + 1) // 2
    return scored[:half] + scored[half:][::-1][: count - half]


def render(row: dict[str, Any]) -> Panel:
    """One sample as a panel: prompt, response, and in the title what happened to it."""
    prompt = row["prompt"]
    if isinstance(prompt, list):
        prompt = "\n".join(f"{m.get('role')}: {m.get('content')}" for m in prompt)
    text = Text()
    text.append(str(prompt).rstrip("\n") + "\n", style="dim")
    text.append(str(row["response"]))
    if row["label"] is not None:
        text.append(f"\nlabel: {row['label']}", style="cyan")
    versions = ", ".join(map(str, row["versions"]))
    title = f"sample {row['index']} of group {row['group']} | reward {row['reward']}"
    details = f"{row['status']} | {row['prompt_len']} + {row['response_len']} tokens"
    details += f" | weights {versions}" if versions else ""
    reward = reward_of(row)
    colour = "white" if math.isnan(reward) else "green" if reward > 0 else "red"
    head, foot = Text(title), Text(details)
    return Panel(text, title=head, title_align="left", subtitle=foot, subtitle_align="left", border_style=colour)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m slime view", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--step", type=int, help="number in the file names under samples/; default: the last")
    parser.add_argument("-n", type=int, default=10, help="samples shown (default: 10)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--best", dest="order", action="store_const", const="best", help="highest rewards only")
    which.add_argument("--worst", dest="order", action="store_const", const="worst", help="lowest rewards only")
    options = parser.parse_args(argv)
    try:
        steps = sample_steps(options.run)
        step = options.step if options.step is not None else (steps[-1] if steps else 0)
        rows = read_samples(options.run, step)
    except (FileNotFoundError, ValueError) as error:
        print(f"view: {error}", file=sys.stderr)
        return 2
    console = Console()
    panels = [render(row) for row in choose(rows, options.n, options.order or "both")]
    rewards = [r for row in rows if not math.isnan(r := reward_of(row))]
    mean = f", mean reward {math.fsum(rewards) / len(rewards):.3f}" if rewards else ""
    head = f"step {step}: {len(rows)} samples{mean}; steps {steps[0]} to {steps[-1]} are there"
    if sys.stdout.isatty():
        with console.pager(styles=True):
            console.print(head, *panels, sep="\n")
    else:
        console.print(head, *panels, sep="\n")
    return 0
