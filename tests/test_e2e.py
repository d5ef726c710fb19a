"""The whole product as a user starts it: train.py with Ray, Megatron ranks, a real engine and the router."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from tools.make_tiny_model import TinyModel, make_tiny_model

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.e2e, pytest.mark.engine]
REWARDS = """
import pathlib
import time


async def length(args, sample, **kwargs):
    return float(sum(sample.tokens[-sample.response_length:]) % 5)


async def length_until_broken(args, sample, **kwargs):
    if pathlib.Path("break_it").exists():
        raise KeyError("no such answer")
    return await length(args, sample)


def hang_at_2(args, rollout_id, rollout_data):
    if rollout_id == 2:
        pathlib.Path("hangs").touch()
        time.sleep(600)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("e2e")
    make_tiny_model(path / "model", TinyModel(num_layers=2, hidden_size=64, intermediate_size=96))
    rows = [{"prompt": f"{i}+{i + 1}=", "label": str(2 * i + 1)} for i in range(10, 60)]
    (path / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (path / "my_rewards.py").write_text(REWARDS)
    return path


@pytest.fixture(autouse=True)
def nothing_outlives_a_test_that_failed():
    yield
    for run in Run.started:
        if run.process.poll() is None:
            run.process.terminate()
            run.wait(60)
    Run.started.clear()


class Run:
    """train.py in `folder`, with a mark in its environment that all its descendants inherit."""

    started: ClassVar[list["Run"]] = []

    def __init__(self, folder: Path, *flags: str):
        self.mark = f"SLIME_TEST_MARK={uuid.uuid4().hex}"
        name, value = self.mark.split("=")
        command = [
            sys.executable, str(ROOT / "train.py"), "--device", "cpu", "--hf-checkpoint", "model", "--prompt-data",
            "prompts.jsonl", "--params-dtype", "float32", "--rollout-batch-size", "3", "--n-samples-per-prompt", "4",
            "--rollout-max-response-len", "6", "--rollout-max-context-len", "64", "--lr", "1e-3", "--run-dir", "run",
            "--custom-rm-path", "my_rewards.length", *flags,
        ]  # fmt: skip
        Run.started.append(self)
        self.log = folder / "train.log"
        self._file = self.log.open("w")
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env={**os.environ, name: value},
            # A shell that runs the tests in the background makes them ignore Ctrl-C; a user's terminal does not.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def wait_for(self, text: str, timeout: float = 400.0) -> str:
        self.wait_until(lambda: text in self.log.read_text(), repr(text), timeout)
        return self.log.read_text()

    def wait_until(self, condition: Callable[[], bool], what: str, timeout: float = 400.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            seen = self.log.read_text()[-6000:]
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {what}:\n{seen}"
            assert time.monotonic() < deadline, f"no {what} within {timeout} s:\n{seen}"
            time.sleep(0.3)

    def wait(self, timeout: float = 500.0) -> int:
        try:
            return self.process.wait(timeout)
        finally:
            if self.process.poll() is None:
                self.process.kill()
            self._file.close()

    def descendants(self) -> list[psutil.Process]:
        name, value = self.mark.split("=")
        out = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                    out.append(process)
            except psutil.Error:
                pass
        return out

    def shared_memory(self) -> set[str]:
        """The engines' files in /dev/shm; other files there belong to other programs."""
        paths: set[str] = set()
        for process in self.descendants():
            with contextlib.suppress(psutil.Error):  # it may have ended since
                paths |= {entry.path for entry in process.memory_maps()}
        return {path for path in paths if path.startswith("/dev/shm/sglang_")}

    def assert_nothing_left(self, timeout: float = 30.0) -> None:
        deadline = time.monotonic() + timeout
        while left := self.descendants():
            assert time.monotonic() < deadline, f"left behind: {[' '.join(p.cmdline())[:150] for p in left]}"
            time.sleep(0.5)


def lines(folder: Path, run: str = "run") -> list[dict]:
    return [json.loads(x) for x in (folder / run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(900)
def test_tp2_pp2_with_a_real_engine_then_resume_and_interrupt(folder):
    run = Run(
        folder,
        "--num-rollout",
        "2",
        "--tp",
        "2",
        "--pp",
        "2",
        "--sequence-parallel",
        "--save",
        "ck",
        "--num-steps-per-rollout",
        "2",
    )
    assert run.wait() == 0, run.log.read_text()[-6000:]
    run.assert_nothing_left()
    steps = lines(folder)
    assert [s["step"] for s in steps] == [0, 1]
    for step in steps:
        assert step["sync/verified"] == 1
        assert step["train/logprob_gap_max"] < 1e-4  # engine and trainer compute the same model, in fp32
        assert step["rollout/samples"] == 12 and step["train/optimizer_steps"] == 2
        assert step["train/grad_norm"] > 0
        for phase in ("generate", "train", "sync"):
            assert step[f"perf/{phase}_time"] > 0
    for left in ("config.yaml", "reward.png", "summary.json", "samples/step_000001.jsonl", "logs/engine_0.log"):
        assert (folder / "run" / left).exists(), left
    samples = [json.loads(x) for x in (folder / "run" / "samples" / "step_000001.jsonl").read_text().splitlines()]
    assert len(samples) == 12 and {v for s in samples for v in s["versions"]} == {"1"}

    # The same folder again, under another layout: goes on at step 3; a scheduler's SIGTERM leaves nothing.
    run = Run(folder, "--num-rollout", "1000", "--load", "ck", "--save", "ck", "--save-interval", "1000")
    seen = run.wait_for("step 4/1000")
    assert "step 3/1000" in seen and "step 2/1000" not in seen
    assert [s["step"] for s in lines(folder)][:4] == [0, 1, 2, 3]
    shared = run.shared_memory()
    assert shared
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(120) == 130, run.log.read_text()[-3000:]
    run.assert_nothing_left()
    assert not [path for path in shared if os.path.exists(path)]


@pytest.mark.timeout(900)
def test_a_killed_engine_of_two_ranks_and_a_killed_router_come_back_and_a_reward_that_raises_stops_the_run(folder):
    run = Run(
        folder, "--num-rollout", "1000", "--run-dir", "killed", "--rollout-health-check-interval", "2",
        "--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2", "--custom-rm-path",
        "my_rewards.length_until_broken",
    )  # fmt: skip
    run.wait_for("step 2/1000")
    schedulers = [p for p in run.descendants() if "sched" in p.name() or "sglang::sched" in " ".join(p.cmdline())]
    assert len(schedulers) == 2, [p.name() for p in run.descendants()]
    schedulers[1].send_signal(signal.SIGKILL)
    # Whether it died in a rollout or in a sync: its requests are sent again, and training goes on.
    run.wait_for("serves again")
    done = len(lines(folder, "killed"))
    run.wait_for(f"step {done + 4}/1000")
    steps = lines(folder, "killed")
    assert [s["step"] for s in steps] == list(range(len(steps)))
    assert all(s["rollout/samples"] == 12 for s in steps)
    assert all(s["train/logprob_gap_max"] < 1e-4 for s in steps)  # after the restart too: it had the weights
    assert all(s["sync/verified"] == 1 for s in steps)  # digests of both ranks, of an untied model with padding
    (router,) = [p for p in run.descendants() if p.name() == "sglang::router"]
    router.kill()
    run.wait_for("the router takes requests again")
    last = (folder / "killed" / "samples" / f"step_{done + 2:06d}.jsonl").read_text().splitlines()
    assert {v for line in last for v in json.loads(line)["versions"]} == {str(done + 2)}
    shared = run.shared_memory()
    assert shared
    (folder / "break_it").touch()
    assert run.wait() == 1
    text = run.log.read_text()
    assert 'raise KeyError("no such answer")' in text and "sample " in text.splitlines()[-1]
    run.assert_nothing_left()
    assert not [path for path in shared if os.path.exists(path)]


@pytest.mark.timeout(500)
def test_ppo_with_a_critic_of_another_size(folder):
    """One actor rank and two critic ranks, on saved samples: alone at first, then both, in one checkpoint folder. Then
    a rank hangs, and Ctrl-C ends all of them."""
    from slime.observability.samples import save_sample_dump
    from slime.utils.types import Sample

    for rollout_id in range(3):
        samples = [
            Sample(
                index=i, group_index=i // 4, tokens=[5 + i, 6, 7 + rollout_id, *range(8, 9 + i % 5)],
                response_length=1 + i % 5, reward=float(i % 3), status=Sample.Status.COMPLETED,
            )
            for i in range(12)
        ]  # fmt: skip
        save_sample_dump(str(folder / f"dump_{rollout_id}.pt"), samples)
    run = Run(
        folder, "--num-rollout", "3", "--run-dir", "ppo", "--load-debug-rollout-data", "dump_{rollout_id}.pt",
        "--save", "ck_ppo", "--save-interval", "2", "--rollout-data-postprocess-path", "my_rewards.hang_at_2",
        "--advantage-estimator", "ppo", "--critic-num-gpus-per-node", "2", "--critic-lr", "1e-2",
        "--num-critic-only-steps", "1", "--num-steps-per-rollout", "2",
    )  # fmt: skip
    run.wait_until((folder / "hangs").exists, "a trainer rank that hangs")
    run.process.send_signal(signal.SIGINT)
    assert run.wait(120) == 130, run.log.read_text()[-3000:]
    run.assert_nothing_left()
    alone, both = lines(folder, "ppo")
    assert "train/grad_norm" not in alone and both["train/grad_norm"] > 0
    for step in (alone, both):
        assert step["critic/steps"] == 2 and step["critic/grad_norm"] > 0 and step["critic/lr"] == 1e-2
    assert alone["critic/value_mean"] == 0.0 and alone["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert both["critic/value_mean"] != 0.0
    for name in ("iter_0000001/metadata.json", "critic/iter_0000001/metadata.json"):
        assert (folder / "ck_ppo" / name).is_file()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hf-checkpoint", "nowhere"], "--hf-checkpoint nowhere: no such folder"),
        (["--prompt-data", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["--tp", "3"], "does not divide"),
        (["--num-rolout", "3"], "did you mean --num-rollout"),
        (["--custom-rm-path", "my_rewards.lenght"], "has no 'lenght'"),
        (["--tp", "2", "--actor-num-gpus-per-node", "4000"], "too many for"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(folder, flags, message):
    run = Run(folder, "--num-rollout", "1", "--run-dir", "never", *flags)
    assert run.wait(60) == 2
    text = run.log.read_text()
    assert message in text and "Traceback" not in text
    assert all(line.startswith("slime: error: ") for line in text.splitlines())
