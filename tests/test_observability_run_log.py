"""`RunLog` as train.py drives it, the console line, and where a step's time goes."""

import dataclasses
import json

import pytest

from slime.config import Args
from slime.observability.console import Console, format_step
from slime.observability.metrics import read_metrics
from slime.observability.run_log import RunLog
from slime.observability.timers import PHASES, PhaseTimer
from slime.utils.sync_receipt import SyncReceipt

RECEIPT = SyncReceipt(version=0, tensors=25, bytes=2_000_000, seconds=0.1, gb_per_s=0.02, digests_checked=20)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_time_of_a_step_is_divided_without_rest():
    clock = Clock()
    timer = PhaseTimer(clock)
    for name, seconds in (("rollout", 4.0), ("train", 3.0), ("sync", 1.0), ("save", 0.5), ("sync", 0.5)):
        with timer.phase(name):
            clock.now += seconds
    clock.now += 1.0
    reported = {
        "perf/generate_time": 3.0, "perf/score_time": 0.9, "perf/log_probs_time": 0.5, "perf/ref_log_probs_time": 0.5,
        "perf/train_time": 1.8,
    }  # fmt: skip
    out = timer.metrics(reported)
    assert out["perf/step_time"] == 10.0
    assert [out[f"perf/{p}_time"] for p in PHASES] == [3.0, 0.9, 1.0, 1.8, 1.5, 0.5, 0.0]
    assert out["perf/other_time"] == pytest.approx(10.0 - 8.7) and out["perf/other_share"] == pytest.approx(0.13)
    timer.begin()
    assert timer.metrics({})["perf/step_time"] == 0.0


def test_without_reports_the_rollout_is_generation():
    clock = Clock()
    timer = PhaseTimer(clock)
    with pytest.raises(KeyError), timer.phase("rollout"):
        clock.now += 2.0
        raise KeyError
    assert timer.metrics({})["perf/generate_time"] == 2.0


def test_console_line():
    metrics = {
        "rollout/raw_reward": 0.41234, "rollout/response_len_mean": 3.5, "train/entropy": 0.5, "train/loss": 0.1,
        "train/pg_clipfrac_low": 0.0, "train/pg_clipfrac_high": 0.0125, "train/logprob_gap_max": 1.2e-6,
        "perf/rollout_tokens_per_s": 640.2, "perf/train_tokens_per_s": 12345.0, "perf/generate_time": 1.23,
        "perf/train_time": 0.9, "perf/sync_time": 0.01, "perf/step_time": 3.21, "train/grad_norm": float("nan"),
    }  # fmt: skip
    assert format_step(11, metrics, 50) == (
        "step 12/50 | reward 0.412 | len 3.500 | entropy 0.500 | clip 0/0.013 | grad nan | gap 1e-06 | "
        "tok/s 640 gen 12.3k train | 3.2 s (generate 1.2, train 0.9)"
    )
    assert format_step(0, {"train/loss": 2.5, "rollout/response_len_mean": 3.0}) == "step 1 | loss 2.500 | len 3.000"


@pytest.mark.parametrize("progress", ["off", "on", "auto"])
def test_progress_bar_leaves_stdout_alone(progress, capsys):
    console = Console(progress)
    with console.phase("train"):
        console.say("a line")
    assert capsys.readouterr().out == "a line\n"


def run(args, start=0, stop=2):
    log = RunLog(args, None, start)
    with log.phase("sync"):
        log.receipt(RECEIPT)
    for step in range(start, stop):
        log.begin(step)
        with log.phase("rollout"):
            log.add({"rollout/raw_reward": 0.1 * step, "rollout/response_len_mean": 3.0})
        with log.phase("train"):
            log.add({"train/loss": 0.0, "train/logprob_gap_max": 1e-6})
        with log.phase("sync"):
            log.receipt(RECEIPT)
        log.end()
    return log


def test_a_whole_run(tmp_path, capsys):
    args = Args(run_dir=str(tmp_path / "run"), num_rollout=2)
    result = run(args).finish()
    assert result == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert result["steps"] == 2 and result["sync_verified"] and result["logprob_gap_max"] == 1e-6
    steps = read_metrics(args.run_dir)
    assert [s["step"] for s in steps] == [0, 1]
    assert all(s["sync/bytes"] == 2_000_000 and s["sync/verified"] == 1 for s in steps)
    assert all(s["perf/step_time"] > 0 for s in steps)
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert names == {"config.yaml", "metrics.jsonl", "reward.png", "summary.json", "tensorboard"}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("first sync: weights 0: 25 tensors") and lines[1].startswith("step 1/2 | reward 0 |")
    assert lines[-1].startswith("done: reward 0.050 -> 0.050")


def test_a_resumed_run_continues_the_files(tmp_path):
    args = Args(run_dir=str(tmp_path), num_rollout=4, use_tensorboard=False)
    run(args, stop=3).close()
    assert run(args, start=2, stop=4).finish()["steps"] == 4
    assert [s["step"] for s in read_metrics(tmp_path)] == [0, 1, 2, 3]


def test_evaluation_before_the_first_step_has_its_own_line(tmp_path):
    log = RunLog(Args(run_dir=str(tmp_path)))
    log.evaluation(0, {"eval/add": 0.25, "eval/add/count": 8})
    log.begin(0)
    log.end()
    assert [s["step"] for s in read_metrics(tmp_path)] == [-1, 0]
    assert log.finish()["steps"] == 1


def test_engines_without_the_weights_stop_the_run(tmp_path):
    log = RunLog(Args(run_dir=str(tmp_path), use_tensorboard=False))
    with pytest.raises(RuntimeError, match="do not hold the weights"):
        log.receipt(dataclasses.replace(RECEIPT, digests_ok=False))
    log.receipt(None)  # no engine


def test_flops_are_those_that_torch_counts():
    """A llama-like block forward, counted by torch; training is three times that."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from slime.config.hf_config import parse_hf_config
    from slime.utils.flops import measure_matmul_peak, train_flops

    sizes = dict(hidden_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=4, intermediate_size=12)
    hf = parse_hf_config({"model_type": "llama", "num_hidden_layers": 3, "vocab_size": 20, **sizes})
    length = 16
    with FlopCounterMode(display=False) as counter:
        x = torch.zeros(length, 8)
        for _ in range(3):
            for rows, columns in ((8, 8), (8, 4), (8, 4), (8, 8), (8, 12), (8, 12)):
                torch.zeros(length, rows) @ torch.zeros(rows, columns)
            torch.zeros(length, 12) @ torch.zeros(12, 8)
            for _ in range(2):  # full squares of both heads; causal attention needs half
                torch.zeros(2, length, 4) @ torch.zeros(2, 4, length)
        x @ torch.zeros(8, 20)
    attention = 3 * 2 * (2 * 2 * length * length * 4)
    assert train_flops(hf, [length]) == 3 * (counter.get_total_flops() - attention / 2)
    assert train_flops(hf, [length], logit_rows=1) == train_flops(hf, [length]) - 6 * (length - 1) * 8 * 20
    assert measure_matmul_peak("cpu", torch.float32, seconds=0.01) > 1e8


def test_a_step_that_died_between_checkpoint_and_line_is_logged(tmp_path):
    """The checkpoint has the numbers of its step; every step is logged once, and later samples are gone."""
    args = Args(run_dir=str(tmp_path), use_tensorboard=False, num_rollout=4)
    log = RunLog(args)
    for step in range(2):
        log.begin(step)
        log.add({"rollout/raw_reward": step / 2})
        before = log.so_far()
        if step == 0:
            log.end()
    (tmp_path / "samples").mkdir()
    for step in range(4):
        (tmp_path / "samples" / f"step_{step:06d}.jsonl").touch()
    for _ in range(2):  # and once more, with nothing missing
        log = RunLog(args, start=2, before=before)
        assert [s["step"] for s in read_metrics(tmp_path)] == [0, 1]
    assert read_metrics(tmp_path)[1]["rollout/raw_reward"] == 0.5
    assert [p.name for p in sorted((tmp_path / "samples").iterdir())] == ["step_000000.jsonl", "step_000001.jsonl"]


def test_a_gap_that_grows_tenfold_is_said_once():
    from slime.observability.gap_alarm import GapAlarm

    alarm, key = GapAlarm(), "train/logprob_gap_k3"
    said = [alarm.check({key: k3}) for k3 in (3e-4, 2.9e-3, 3.1e-3, 3.2e-3, float("nan"), 4e-2)] + [alarm.check({})]
    assert [line is not None for line in said] == [False, False, True, False, False, True, False]
    assert "3.10e-03" in said[2] and "3.00e-04" in said[2]
    quiet = GapAlarm()  # in fp32 the gap is noise, whatever its factor
    assert [quiet.check({key: k3}) for k3 in (1e-13, 9e-5)] == [None, None] and quiet.check({key: 2e-4})
