"""Mutation check: small faults in loss, advantage and scheduling code, one at a time; do the fast tests notice?

    pip install --target /some/folder -r benchmarks/requirements.txt   # or only cosmic-ray; never needed to train
    python benchmarks/mutation.py --tool-path /some/folder --work build/mutation --table benchmarks/results/mutation.md

cosmic-ray finds the places and changes the code (operators: `mutation_rules.py`); its sqlite sessions in --work hold
what is done, so a run that was stopped goes on. The faults are made in a copy of the tree. One process imports torch
and Megatron once; for each mutant it forks a child that imports the product's code from the copy and runs the module's
tests there until the first failure. Examples of property tests are the same for every mutant. Mutants that survive
are run against slower tests of several processes as well. `--retry` runs survivors again, after tests were added.
Last line: JSON; share is killed / (mutants - equivalent).
"""

import argparse
import ast
import collections
import contextlib
import dataclasses
import gc
import hashlib
import importlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WARM = (
    "torch", "numpy", "pytest", "hypothesis", "hypothesis.extra.pytestplugin", "transformers",
    "megatron.core.parallel_state", "megatron.core.models.gpt.gpt_model", "megatron.core.packed_seq_params",
    "megatron.core.distributed", "megatron.core.optimizer", "megatron.core.dist_checkpointing",
)  # fmt: skip
MEMORY = 24 * 1024**3  # of address space, for mutants that would ask for all there is


@dataclasses.dataclass(frozen=True)
class Run:
    """Outcome of some tests in a child. code: pytest's exit status, or minus a signal."""

    code: int
    cpu: float
    last: str


def copy_tree(work: Path) -> Path:
    """The files that git knows, as they are now, with bytecode that is valid for exactly one content."""
    tree = work / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    compile_ = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash"]
    subprocess.run([*compile_, str(tree / "slime"), str(tree / "slime_plugins")], check=True)
    return tree


def in_child(tree: Path, tests: list[str], skip: tuple[str, ...], cpu_limit: float) -> Run:
    """Runs pytest in a forked child, in a process group of its own that is gone when this returns."""
    log = tree.parent / "child.log"
    log.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        code = 70
        os.setsid()
        try:
            code = _pytest(tree, tests, skip, cpu_limit, log)
        finally:
            os._exit(code)
    deadline = time.monotonic() + 30 * cpu_limit  # of a child that waits for something; a busy one has its CPU limit
    while True:
        found, status, usage = os.wait4(pid, os.WNOHANG)
        if found or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):  # its own processes, too: ranks, and their fork server
        os.killpg(pid, signal.SIGKILL)
    if not found:
        _, status, usage = os.wait4(pid, 0)
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))] or lines[-1:]
    return Run(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, failed[0][:200] if failed else "")


def _pytest(tree: Path, tests: list[str], skip: tuple[str, ...], cpu_limit: float, log: Path) -> int:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1), os.dup2(out, 2)
    os.chdir(tree)
    resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_limit), int(cpu_limit)))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:] = [str(tree), *(p for p in sys.path if Path(p or ".").resolve() not in (ROOT, ROOT / "benchmarks"))]
    for name in [n for n in sys.modules if n.partition(".")[0] in ("benchmarks", "tests", "tools", "slime")]:
        del sys.modules[name]
    import pytest
    from hypothesis import HealthCheck, Phase, settings

    settings.register_profile(
        "mutation", derandomize=True, database=None, deadline=None, phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    settings.load_profile("mutation")
    flags = "-x -q --tb=no --assert=plain -p no:xdist -p no:cacheprovider".split()
    code = int(pytest.main([*flags, f"-c{tree / 'pyproject.toml'}", *(f"--deselect={name}" for name in skip), *tests]))
    import slime

    assert slime.__file__ and slime.__file__.startswith(str(tree)), slime.__file__
    return code


def open_session(rules: Any, work: Path, module: str) -> Any:
    """cosmic-ray's session of a module: all mutants; those in places that are noise have the outcome SKIPPED."""
    from cosmic_ray.commands import init
    from cosmic_ray.work_db import WorkDB
    from cosmic_ray.work_item import WorkerOutcome, WorkResult

    source = (ROOT / module).read_text()
    key = hashlib.sha256(f"{source}{sorted(rules.Provider())}".encode()).hexdigest()[:8]
    path = work / f"{module.replace('/', '.')}.{key}.sqlite"
    new = not path.exists()
    db = WorkDB(path, WorkDB.Mode.create)
    if new:
        init([Path(module)], db, {})
    spans = rules.noise(source)
    jobs = [i.job_id for i in db.work_items if rules.is_noise(i.mutations[0].start_pos, spans)]
    db.set_multiple_results(jobs, WorkResult(WorkerOutcome.SKIPPED, output="noise"))
    return db


def draw(db: Any, module: str, per_operator: int) -> set[str]:
    """Jobs that are to be run: of each operator the first of a fixed order, so that a larger sample has a smaller one
    in it."""
    noise = {item.job_id for item, result in db.completed_work_items if result.output == "noise"}
    by_operator: dict[str, list[str]] = collections.defaultdict(list)
    for item in in_order(db.work_items):
        if item.job_id not in noise:
            by_operator[item.mutations[0].operator_name].append(item.job_id)
    drawn: set[str] = set()
    for name, jobs in by_operator.items():
        random.Random(f"{module} {name}").shuffle(jobs)
        drawn.update(jobs[:per_operator])
    return drawn


def in_order(items: Any) -> list[Any]:
    return sorted(
        items, key=lambda i: (i.mutations[0].start_pos, i.mutations[0].operator_name, i.mutations[0].occurrence)
    )


def run_module(rules: Any, db: Any, drawn: set[str], tree: Path, module: str, options: argparse.Namespace) -> None:
    from cosmic_ray.mutating import use_mutation
    from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult

    fast, slow = rules.TESTS[module]
    todo = in_order(i for i in db.pending_work_items if i.job_id in drawn)
    if options.retry:
        todo += in_order(i for i, r in db.completed_work_items if r.test_outcome == TestOutcome.SURVIVED)
    if not todo:
        return
    _wait(options.pause_while)
    plain = [in_child(tree, [file], rules.ON_RANKS, 600.0) for file in fast]
    for run in plain:
        if run.code:
            raise SystemExit(f"{module}: tests fail without any mutant: {run.last}; see {tree.parent / 'child.log'}")
    cost = " + ".join(f"{run.cpu:.1f}" for run in plain)
    print(f"{module}: {len(todo)} mutants, the fast tests take {cost} s of CPU", flush=True)
    plans = [(file, rules.ON_RANKS, 4 * run.cpu + 20) for file, run in zip(fast, plain, strict=True)]
    plans += [(test, (), 600.0) for test in slow if not options.fast]
    seen = {ast.dump(ast.parse((ROOT / module).read_text()))}
    for item in todo:
        (spot,) = item.mutations
        operator = rules.Provider()[spot.operator_name.partition("/")[2]]()
        with use_mutation(tree / module, operator, spot.occurrence) as (before, after):
            why = no_mutant(after, seen)
            if why:
                db.set_result(item.job_id, WorkResult(WorkerOutcome.SKIPPED, output=why))
                continue
            for test, skip, limit in plans:
                _wait(options.pause_while)
                run = in_child(tree, [test], skip, limit)
                if run.code in (3, 4, 5, 70):
                    raise SystemExit(f"{module}, {spot}: pytest could not run ({run.code}): {run.last}")
                if run.code:
                    break
        outcome = TestOutcome.KILLED if run.code else TestOutcome.SURVIVED
        killer = run.last if run.code > 0 else f"signal {-run.code}" if run.code else ""
        changes = "\n".join(changed_lines(before, after))
        db.set_result(item.job_id, WorkResult(WorkerOutcome.NORMAL, killer, outcome, changes))
        if not run.code:
            print(f"survived: {module}:{spot.start_pos[0]} {spot.operator_name}\n{changes}", flush=True)


def _wait(pause: Path | None) -> None:
    while pause is not None and pause.exists():
        time.sleep(5.0)


def no_mutant(code: str, seen: set[str]) -> str | None:
    """Why changed code is not worth a run: it does not compile, or it means the same as what was seen before."""
    try:
        meaning = ast.dump(ast.parse(code))
    except SyntaxError:
        return "no code"
    if meaning in seen:
        return "duplicate"
    seen.add(meaning)
    return None


def changed_lines(before: str, after: str) -> Iterator[str]:
    import difflib

    for line in difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm=""):
        if line[0] in "+-" and not line.startswith(("+++", "---")):
            yield f"{line[0]} {line[1:].strip()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "modules", nargs="*", help="paths of modules, as in mutation_rules.TESTS; all when none is given"
    )
    parser.add_argument("--tool-path", help="folder with cosmic-ray")
    parser.add_argument("--work", type=Path, help="folder of the copy and the sessions; default: a temporary one")
    parser.add_argument("--per-operator", type=int, default=25, help="mutants of one operator in one module, at most")
    parser.add_argument("--retry", action="store_true", help="run mutants that survived again")
    parser.add_argument("--fast", action="store_true", help="no tests of several processes; --retry can run them later")
    parser.add_argument("--report", action="store_true", help="run nothing, only report")
    parser.add_argument("--pause-while", type=Path, help="wait before each mutant while this file exists")
    parser.add_argument("--table", type=Path, help="write the result there, as markdown")
    options = parser.parse_args()
    sys.path += [options.tool_path] if options.tool_path else []
    sys.path.insert(0, str(ROOT))
    from benchmarks import mutation_report
    from benchmarks import mutation_rules as rules

    rules.install()
    os.chdir(ROOT)
    work = (options.work or Path(tempfile.mkdtemp(prefix="mutation-"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    modules = options.modules or list(rules.TESTS)
    unknown = [m for m in modules if m not in rules.TESTS]
    if unknown:
        raise SystemExit(f"no tests are listed for {unknown}: use some of {', '.join(rules.TESTS)}")
    sessions: dict[str, tuple[Any, set[str]]] = {}
    if not options.report:
        tree = copy_tree(work)
        _wait(options.pause_while)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in WARM:
                importlib.import_module(name)
        gc.freeze()
    for module in modules:
        db = open_session(rules, work, module)
        sessions[module] = db, draw(db, module, options.per_operator)
        if not options.report:
            run_module(rules, *sessions[module], tree, module, options)
    text, result = mutation_report.report(rules, sessions, options.per_operator)
    print(text)
    if options.table:
        options.table.write_text(text + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
