"""Kills a run again and again, starts it with the same command, and compares it with one that nobody disturbed.

python benchmarks/resume_chaos.py --kills 30                     # no engine: samples come from seeds, 20 s a kill
python benchmarks/resume_chaos.py --kills 4 --mode engine        # real engine, greedy

Each kill is a SIGKILL of the driver, of one trainer rank or (--mode engine) of the engine, at a random moment: while
things start, in a step, or while a checkpoint is being written. The last line is JSON:
committed_lost: restarts that did not go on from the last committed checkpoint. prompts_lost, prompts_doubled: prompt
groups, by the ledger and by comparison with the undisturbed run. bit_equal: all weights after the last step.
"""

import argparse
import atexit
import collections
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slime.data.ledger import audit, read_ledger  # noqa: E402
from slime.rollout.base_types import RolloutFnTrainOutput  # noqa: E402
from slime.rollout.data_source import for_buffer  # noqa: E402
from slime.rollout.generation import sampling_seed  # noqa: E402
from slime.utils.checkpoint_folder import latest_checkpoint  # noqa: E402
from slime.utils.types import Sample  # noqa: E402

VOCABULARY = 97
ENDS_WITHIN = 180.0  # seconds for a run to notice that a part of it was killed, and to end


def scripted_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    """Rollout function without an engine: tokens drawn from each sample's sampling seed. Draws two groups more than
    needed, filters one in five, and returns the surplus half done, so that buffer and filters take part."""
    kept: list[list[Sample]] = []
    while len(kept) < args.rollout_batch_size:
        for group in data_source.get_samples(args.rollout_batch_size + 2 - len(kept)):
            if len(kept) == args.rollout_batch_size:
                data_source.add_samples([for_buffer(args, group)])
                continue
            for sample in group:
                _respond(args, sample, rollout_id)
            if random.Random(f"filter-{group[0].group_index}").random() < 0.2:
                data_source.settle([group], "filtered", "one in five")
            else:
                kept.append(group)
    return RolloutFnTrainOutput(samples=kept)


def _respond(args: Any, sample: Sample, rollout_id: int) -> None:
    rng = random.Random(sampling_seed(args, sample, rollout_id, False))
    if not sample.tokens:
        sample.tokens = [rng.randrange(VOCABULARY) for _ in range(5)]
    tokens = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, args.rollout_max_response_len))]
    meta = {"weight_version": str(rollout_id), "finish_reason": {"type": "stop"}}
    sample.append_response_tokens(tokens=tokens, log_probs=[-4.5] * len(tokens), meta_info=meta, text=str(tokens))
    sample.reward = float(sum(tokens) % 5)


async def token_reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    """Reward of the runs with an engine: any function of the tokens will do."""
    return float(sum(sample.tokens) % 7) - 3.0


@dataclasses.dataclass
class Run:
    """The run under test: one command, started as often as it takes."""

    folder: Path
    flags: list[str]
    lives: int = 0
    process: subprocess.Popen | None = None
    mark: str = ""

    def start(self) -> None:
        self.lives += 1
        self.mark = uuid.uuid4().hex
        log = open(self.folder / f"life_{self.lives}.log", "w")
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), *self.flags],
            cwd=self.folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "SLIME_CHAOS_MARK": self.mark, "PYTHONPATH": str(ROOT)},
        )
        log.close()

    def alive(self) -> bool:
        assert self.process is not None
        return self.process.poll() is None

    def wait(self, timeout: float) -> int | None:
        assert self.process is not None
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def processes(self) -> list[psutil.Process]:
        """All that this life started and that still runs."""
        out = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("SLIME_CHAOS_MARK") == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    out.append(process)
            except psutil.Error:
                pass
        return out

    def victim(self, kind: str, rng: random.Random) -> psutil.Process | None:
        names = {"rank": "ray::_Rank", "engine": "sglang::scheduler"}
        if kind == "driver":
            assert self.process is not None
            return psutil.Process(self.process.pid)
        found = []
        for process in self.processes():
            try:
                title = " ".join([process.name(), *process.cmdline()])
            except psutil.Error:
                continue
            if names[kind] in title:
                found.append(process)
        return rng.choice(found) if found else None

    def clean_up(self) -> int:
        """Waits for what a killed life leaves; returns how many processes had to be killed by us."""
        deadline = time.monotonic() + 60.0
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        for process in left:
            print(f"left behind: {process.pid} {' '.join(process.cmdline())[:120]}", flush=True)
            process.kill()
        return len(left)

    def steps(self) -> int:
        """Steps that this life has done."""
        lines = (self.folder / f"life_{self.lives}.log").read_text().splitlines()
        return sum(line.startswith("step ") for line in lines)

    def ray_did_not_start(self) -> bool:
        """Ray gives its own processes 30 seconds to come up, which a busy machine may not manage; no fault of ours."""
        return "timed out during startup" in (self.folder / f"life_{self.lives}.log").read_text()

    def restarts(self) -> list[int]:
        """Steps that this run was resumed at, by its ledger."""
        try:
            return [r.step for r in read_ledger(self.folder / "run") if r.event == "resumed"]
        except FileNotFoundError:
            return []

    def committed(self) -> int | None:
        found = latest_checkpoint(self.folder / "checkpoints")
        return found[1] if found else None

    def saving(self) -> bool:
        return any((self.folder / "checkpoints").glob(".partial_iter_*"))


def wait_for(moment: str, run: Run, rng: random.Random) -> bool:
    """Returns at the moment to kill; False when the run was over before."""

    def until(holds: Callable[[], Any]) -> bool:
        while run.alive():
            if holds():
                return True
            time.sleep(0.004)
        return False

    if moment == "start":
        time.sleep(rng.uniform(0.5, 12.0))
        return run.alive()
    wanted = run.steps() + rng.randint(1, 2)
    if not until(lambda: run.steps() >= wanted):
        return False
    if moment == "save":
        if not until(run.saving):
            return False
        time.sleep(rng.uniform(0.0, 0.05))
    else:
        time.sleep(rng.uniform(0.0, 1.0))
    return run.alive()


def flags(options: argparse.Namespace, model: Path, data: Path) -> list[str]:
    common = [
        "--device", "cpu", "--params-dtype", "float32", "--hf-checkpoint", str(model), "--prompt-data", str(data),
        "--rollout-shuffle", "--num-rollout", str(options.steps), "--rollout-max-response-len", "8",
        "--rollout-max-context-len", "64", "--lr", "1e-3", "--lr-decay-style", "cosine", "--lr-warmup-iters", "3",
        "--run-dir", "run", "--save", "checkpoints", "--load", "checkpoints", "--save-interval", "1",
        "--keep-last", "2", "--save-hf", "hf", "--no-use-tensorboard", "--progress", "off",
    ]  # fmt: skip
    common += ["--async-save"] if options.async_save else []
    if options.mode == "engine":
        # Greedy, so that the engine's answers do not depend on its random state; top-k 1 at temperature 1 leaves its
        # log-probs those of the full softmax, as the trainer computes them. Raw rewards, because samples of a group
        # are equal.
        return [
            *common, "--rollout-batch-size", "6", "--n-samples-per-prompt", "1", "--rollout-top-k", "1",
            "--disable-rewards-normalization", "--custom-rm-path", "benchmarks.resume_chaos.token_reward",
        ]  # fmt: skip
    return [
        *common, "--actor-num-gpus-per-node", str(options.ranks), "--rollout-batch-size", "4",
        "--n-samples-per-prompt", "3", "--partial-rollout", "--over-sampling-batch-size", "6", "--debug-train-only",
        "--rollout-function-path", "benchmarks.resume_chaos.scripted_rollout",
    ]  # fmt: skip


def undisturbed(run: Run) -> None:
    """Makes the run to compare with, unless the same is there already."""
    made_with = run.folder / "flags.json"
    if made_with.is_file() and json.loads(made_with.read_text()) == run.flags:
        return
    shutil.rmtree(run.folder, ignore_errors=True)
    run.folder.mkdir(parents=True)
    run.start()
    for _ in range(3):
        if run.wait(1800.0) == 0 or not run.ray_did_not_start():
            break
        run.start()
    if run.wait(1800.0) != 0:
        raise SystemExit(f"the undisturbed run failed; see {run.folder}/life_{run.lives}.log")
    made_with.write_text(json.dumps(run.flags))


def disturbed(run: Run, kills: int, mode: str, rng: random.Random) -> dict[str, Any]:
    """Kills and restarts until the run is through. Returns counts."""
    done: collections.Counter[str] = collections.Counter()
    out: dict[str, Any] = {"kills": 0, "committed_lost": 0, "left_behind": 0, "slow_starts": 0}
    victims = ["driver", "rank", "engine"] if mode == "engine" else ["driver", "rank"]
    run.start()
    expected, known = None, 0  # the step that this life must resume at; restarts before it

    def check_resumed() -> None:
        """A life that came as far as its data must have gone on from the last committed checkpoint."""
        if expected is not None and len(found := run.restarts()) > known and found[-1] != expected:
            print(f"life {run.lives} resumed at {found[-1]}, committed was {expected - 1}", flush=True)
            out["committed_lost"] += 1

    while out["kills"] < kills:
        moment = rng.choice(["start", "step", "step", "save", "save", "save"])
        kind = victims[out["kills"] % len(victims)]
        if not wait_for(moment, run, rng):
            if run.ray_did_not_start():
                out["slow_starts"] += 1
                run.start()
                continue
            break
        victim = run.victim(kind, rng)
        if victim is None:
            kind, victim = "driver", run.victim("driver", rng)
        assert victim is not None
        try:
            victim.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
        out["kills"] += 1
        done[kind] += 1
        done[f"at {moment}"] += 1
        print(f"kill {out['kills']}: {kind} at {moment}, {run.steps()} steps in this life", flush=True)
        if kind == "engine":
            continue  # the run repairs that itself
        if run.wait(ENDS_WITHIN) is None:
            raise SystemExit(f"{kind} was killed and the run neither ended nor went on: {run.folder}")
        out["left_behind"] += run.clean_up()
        check_resumed()
        committed = run.committed()
        expected, known = None if committed is None else committed + 1, len(run.restarts())
        run.start()
    if run.wait(1800.0) != 0 and run.ray_did_not_start():
        out["slow_starts"] += 1
        run.start()
    if run.wait(1800.0) != 0:
        raise SystemExit(f"the last life failed; see {run.folder}/life_{run.lives}.log")
    check_resumed()
    out["left_behind"] += run.clean_up()
    return {**out, "by": dict(sorted(done.items()))}


def data_order(folder: Path, steps: int, seed: int = 42) -> list[Any]:
    """What was trained at each step: (group, sample, prompt, sampling seed, response)."""
    args = argparse.Namespace(rollout_seed=seed)
    out = []
    for step in range(steps):
        lines = (folder / "run" / "samples" / f"step_{step:06d}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        seeds = [sampling_seed(args, Sample(group_index=r["group"], index=r["index"]), step, False) for r in rows]
        out.append([(r["group"], r["index"], r["prompt"], s, r["response"]) for r, s in zip(rows, seeds, strict=True)])
    return out


def compare(reference: Path, folder: Path, steps: int) -> dict[str, Any]:
    ours, theirs = read_ledger(folder / "run"), read_ledger(reference / "run")
    drawn = [r.group for r in ours if r.event == "drawn" and not r.void]
    expected = [r.group for r in theirs if r.event == "drawn" and not r.void]
    problems = audit(ours).problems
    for problem in problems:
        print(f"ledger: {problem}", flush=True)
    order, wanted = data_order(folder, steps), data_order(reference, steps)
    name = "model.safetensors"
    lines = [json.loads(x) for x in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {
        "prompts_lost": len(set(expected) - set(drawn)) + len(problems),
        "prompts_doubled": len(drawn) - len(set(drawn)),
        "same_data_order": [[r[:4] for r in step] for step in order] == [[r[:4] for r in step] for step in wanted],
        "same_responses": order == wanted,
        "every_step_logged_once": [x["step"] for x in lines] == list(range(steps)),
        "bit_equal": (folder / "hf" / name).read_bytes() == (reference / "hf" / name).read_bytes(),
        "trained": (folder / "hf" / name).read_bytes() != (folder.parent / "model" / name).read_bytes(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--mode", choices=["scripted", "engine"], default="scripted")
    parser.add_argument("--steps", type=int, help="rollouts of the run; default: enough for the kills")
    parser.add_argument("--async-save", action="store_true")
    parser.add_argument("--ranks", type=int, default=1, help="trainer ranks of the scripted mode")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and victims")
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / "runs" / "resume_chaos",
        help="scratch folder; the undisturbed run in it is used again",
    )
    options = parser.parse_args()
    options.steps = options.steps or 3 * options.kills + 4
    from tools.make_tiny_model import TinyModel, make_tiny_model

    work = options.work.resolve()
    make_tiny_model(work / "model", TinyModel(num_layers=2, hidden_size=64, intermediate_size=96))
    rows = [{"prompt": f"{i}+{i + 1}=", "label": str(2 * i + 1)} for i in range(10, 60)]
    (work / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    started = time.monotonic()
    reference, killed = (
        Run(work / name, flags(options, work / "model", work / "prompts.jsonl")) for name in ("reference", "killed")
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    atexit.register(lambda: [process.kill() for run in (reference, killed) for process in run.processes()])
    undisturbed(reference)
    print(f"undisturbed: {options.steps} steps, {time.monotonic() - started:.0f} s", flush=True)
    shutil.rmtree(killed.folder, ignore_errors=True)
    killed.folder.mkdir()
    out = disturbed(killed, options.kills, options.mode, random.Random(options.seed))
    out |= compare(work / "reference", work / "killed", options.steps)
    out |= {"mode": options.mode, "async_save": options.async_save, "seconds": round(time.monotonic() - started)}
    print(json.dumps(out))
    right = out["bit_equal"] and not (out["committed_lost"] or out["prompts_lost"] or out["prompts_doubled"])
    return 0 if right and out["same_data_order"] and out["every_step_logged_once"] else 1


if __name__ == "__main__":
    sys.exit(main())
