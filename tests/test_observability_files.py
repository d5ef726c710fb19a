"""What a run leaves: metrics, TensorBoard files, samples, configuration, picture, summary."""

import json
import math

import numpy as np
import pytest
import torch
import yaml

from slime.config import Args
from slime.config.parse import parse_args
from slime.observability import plots, summary, view
from slime.observability.config import write_config
from slime.observability.metrics import MetricsWriter, read_metrics
from slime.observability.rollout_metrics import eval_metrics, rollout_metrics
from slime.observability.samples import load_sample_dump, read_samples, save_sample_dump, write_samples
from slime.observability.trackers import TensorBoardTracker
from slime.rollout.base_types import RolloutFnEvalOutput
from slime.utils.types import Sample


def sample(index, group, reward, length=3, **fields):
    return Sample(
        index=index, group_index=group, prompt="1+1=", tokens=list(range(4 + length)), response="2",
        response_length=length, label="2", reward=reward, status=Sample.Status.COMPLETED, **fields,
    )  # fmt: skip


def write_run(folder, steps=12):
    writer = MetricsWriter(folder)
    for i in range(steps):
        writer.write(
            i,
            {
                "rollout/raw_reward": 0.2 + 0.05 * i, "rollout/response_len_mean": 3.0 + 0.1 * i,
                "rollout/response_len_min": 2, "rollout/response_len_max": 5, "train/logprob_gap_mean": 1e-6,
                "train/logprob_gap_max": [1e-5, 2e-5, 3e-5][i % 3], "perf/step_time": 2.0, "sync/verified": 1.0,
            },
        )  # fmt: skip
    writer.close()


# -- metrics.jsonl ---------------------------------------------------------------------------------------------------


def test_metrics_are_json_numbers_on_disk_at_once(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(0, {"a": np.float32(0.5), "b": torch.tensor([2.0]), "c": True, "bad": math.nan, "inf": -math.inf})
    line = (tmp_path / "metrics.jsonl").read_text()
    strict = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert strict == {"step": 0, "a": 0.5, "b": 2.0, "c": 1.0, "bad": None, "inf": None}
    assert math.isnan(read_metrics(tmp_path)[0]["bad"])


@pytest.mark.parametrize("value", ["0.5", None, [1.0], torch.zeros(2), np.zeros(0)])
def test_what_is_no_number_is_refused_by_name(tmp_path, value):
    with pytest.raises(TypeError, match="'train/loss'"):
        MetricsWriter(tmp_path).write(0, {"train/loss": value})


def test_resume_has_every_step_once(tmp_path):
    write_run(tmp_path, steps=5)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "rollout/raw_rew')  # torn by a crash
    writer = MetricsWriter(tmp_path, start_step=3)
    writer.write(3, {"again": 1})
    writer.write(4, {"again": 1})
    steps = read_metrics(tmp_path)
    assert [s["step"] for s in steps] == [0, 1, 2, 3, 4]
    assert ["again" in s for s in steps] == [False, False, False, True, True]


def test_a_new_run_keeps_the_old_file(tmp_path):
    write_run(tmp_path, steps=5)
    old = (tmp_path / "metrics.jsonl").read_text()
    MetricsWriter(tmp_path).write(0, {"a": 1})
    assert len(read_metrics(tmp_path)) == 1
    assert (tmp_path / "metrics.previous.jsonl").read_text() == old


def test_no_run_folder_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="--run-dir"):
        read_metrics(tmp_path)


def test_tensorboard_reads_what_we_wrote(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoardTracker(tmp_path)
    for i in range(4):
        first.log(i, {"train/loss": float(i), "nan": math.nan})
    first.close()
    resumed = TensorBoardTracker(tmp_path, start_step=2)
    resumed.log(2, {"train/loss": 20.0})
    resumed.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(0, 0.0), (1, 1.0), (2, 20.0)]
    assert "nan" not in events.Tags()["scalars"]


# -- samples ---------------------------------------------------------------------------------------------------------


def test_samples_as_jsonl(tmp_path):
    samples = [
        sample(0, 0, 1.0, weight_versions=[{"version": 3, "start": 0, "end": 2}, {"version": 4, "start": 2, "end": 3}]),
        sample(1, 0, {"acc": 0.0, "len": math.nan}, loss_mask=[1, 0, 1]),
        sample(2, 1, None, remove_sample=True),
    ]
    write_samples(tmp_path, 7, samples)
    rows = read_samples(tmp_path, 7)
    assert [r["versions"] for r in rows] == [[3, 4], [], []]
    assert [r["trained_len"] for r in rows] == [3, 2, 0]
    assert rows[0] | {"metadata": 0} == {
        "index": 0, "group": 0, "prompt": "1+1=", "response": "2", "reward": 1.0, "label": "2", "status": "completed",
        "prompt_len": 4, "response_len": 3, "trained_len": 3, "versions": [3, 4], "metadata": 0,
    }  # fmt: skip
    assert rows[1]["reward"] == {"acc": 0.0, "len": "nan"}
    with pytest.raises(FileNotFoundError, match="steps 7 to 7 are there"):
        read_samples(tmp_path, 8)


def test_samples_with_any_character_are_read_again_and_a_torn_line_is_named(tmp_path, capsys):
    odd = "a\u2028b\x85c\x0bd \U0001f600"
    path = write_samples(tmp_path, 0, [sample(0, 0, 1.0, metadata={"odd": odd, "half": "\ud800"}), sample(1, 0, 0.0)])
    assert [row["metadata"] for row in read_samples(tmp_path, 0)] == [{"odd": odd, "half": "\ud800"}, {}]
    path.write_bytes(path.read_bytes()[:-40])
    assert view.main([str(tmp_path)]) == 2
    assert "step_000000.jsonl:2: this line is no sample" in capsys.readouterr().err


def test_sample_dump_round_trip(tmp_path):
    samples = [sample(0, 0, 1.0, train_metadata={"x": np.arange(3)}), sample(1, 0, {"a": 1.0})]
    samples[1].mine = "kept"
    save_sample_dump(tmp_path / "sub" / "rollout_0.pkl", samples)
    back = load_sample_dump(tmp_path / "sub" / "rollout_0.pkl")
    assert back[0].status is Sample.Status.COMPLETED and back[1].mine == "kept"
    assert np.array_equal(back[0].train_metadata["x"], np.arange(3))
    with pytest.raises(FileNotFoundError, match="--load-debug-rollout-data"):
        load_sample_dump(tmp_path / "rollout_1.pkl")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ValueError, match="no file of --save-debug-rollout-data"):
        load_sample_dump(tmp_path / "text")


def test_viewer_shows_best_and_worst_first(tmp_path, capsys):
    samples = [sample(i, i // 2, r) for i, r in enumerate([0.0, 1.0, 0.25, 0.75, None, 0.5])]
    write_samples(tmp_path, 0, samples)
    rows = read_samples(tmp_path, 0)
    assert [r["reward"] for r in view.choose(rows, 4, "both")] == [1.0, 0.75, 0.0, 0.25]
    assert [r["reward"] for r in view.choose(rows, 2, "worst")] == [0.0, 0.25]
    assert [r["reward"] for r in view.choose(rows, 9, "best")] == [1.0, 0.75, 0.5, 0.25, 0.0, None]
    assert view.main([str(tmp_path), "-n", "2"]) == 0
    shown = capsys.readouterr().out
    assert "step 0: 6 samples, mean reward 0.500" in shown and "reward 1.0" in shown and "reward 0.0" in shown
    assert view.main([str(tmp_path), "--step", "5"]) == 2
    assert "no samples of step 5" in capsys.readouterr().err


# -- metrics of samples ----------------------------------------------------------------------------------------------


def test_rollout_metrics():
    samples = [
        sample(0, 0, 1.0, 2, metadata={"source": "easy"}), sample(1, 0, 0.0, 4, metadata={"source": "easy"}),
        sample(2, 1, 0.7, 3, metadata={"source": "hard"}), sample(3, 1, 0.7, 3, metadata={"source": "hard"}),
        sample(4, 2, math.nan, 3), sample(5, 2, 0.5, 3), sample(6, 3, 9.0, 3, remove_sample=True),
    ]  # fmt: skip
    samples[1].status = Sample.Status.TRUNCATED
    samples[0].weight_versions = [{"version": "4", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 2}]
    out = rollout_metrics(Args(), samples)
    assert out["rollout/raw_reward"] == pytest.approx(11.9 / 6)
    assert out["rollout/raw_reward/easy"] == 0.5 and out["rollout/raw_reward/hard"] == 0.7
    assert out["rollout/zero_std_groups"] == 2 and out["rollout/groups"] == 3  # 0.7 twice, and 0.5 alone
    assert out["rollout/nonfinite_rewards"] == 1 and out["rollout/removed_samples"] == 1
    assert (out["rollout/response_len_min"], out["rollout/response_len_max"]) == (2, 4)
    assert out["rollout/response_len_mean"] == 3 and out["rollout/truncated"] == pytest.approx(1 / 7)
    assert (out["rollout/weight_version_min"], out["rollout/weight_version_max"]) == (4, 5)
    assert out["rollout/mixed_version_samples"] == pytest.approx(1 / 7)
    assert not any("staleness" in name for name in out)
    samples[2].weight_versions = [{"version": "5", "start": 0, "end": 3}]
    old = {name: n for name, n in rollout_metrics(Args(), samples, version=6).items() if "staleness" in name}
    assert old == {"rollout/staleness/1": 4.0, "rollout/staleness/2": 1.0}


def test_rollout_metrics_without_rewards_or_samples():
    out = rollout_metrics(Args(), [sample(0, None, None)])
    assert "rollout/raw_reward" not in out and out["rollout/samples"] == 1
    assert rollout_metrics(Args(), []) == {"rollout/samples": 0.0}


def test_reward_key():
    out = rollout_metrics(Args(reward_key="acc"), [sample(0, 0, {"acc": 1.0}), sample(1, 0, {"acc": 0.0})])
    assert out["rollout/raw_reward"] == 0.5
    out = rollout_metrics(Args(), [sample(0, 0, {"acc": 1.0})])  # the user's own post-processing knows what it means
    assert "rollout/raw_reward" not in out and out["rollout/samples"] == 1


def test_eval_metrics():
    data = {"math": {"rewards": [1.0, 0.0], "truncated": [True, False], "samples": [sample(0, 0, 1.0, 5)]}}
    out = eval_metrics(Args(), RolloutFnEvalOutput(data, {"eval/extra": 1.0}))
    assert out == {
        "eval/math": 0.5, "eval/math/count": 2, "eval/math/truncated": 0.5, "eval/math/response_len_mean": 5,
        "eval/extra": 1.0,
    }  # fmt: skip
    nan = float("nan")
    out = eval_metrics(Args(), RolloutFnEvalOutput({"a": {"rewards": [1.0, nan, 0.0]}, "b": {"rewards": [nan]}}))
    assert out == {
        "eval/a": 0.5, "eval/a/count": 3, "eval/a/nonfinite_rewards": 1, "eval/b/count": 1,
        "eval/b/nonfinite_rewards": 1,
    }  # fmt: skip


# -- configuration, picture, summary ---------------------------------------------------------------------------------


def test_config_is_read_back_by_config_flag(tmp_path):
    args = Args(
        lr=3e-4, rollout_stop=["a", "b"], use_tis=True, use_tensorboard=False, eps_clip_c=None,
        apply_chat_template_kwargs={"enable_thinking": False}, extra={"my_key": 3},
        sglang={"mem_fraction_static": "0.8"}, router={"policy": "random"},
    )  # fmt: skip
    path = write_config(tmp_path / "run", args)
    back = parse_args(["--config", str(path)])
    for name in ("lr", "rollout_stop", "use_tis", "use_tensorboard", "eps_clip_c", "apply_chat_template_kwargs"):
        assert getattr(back, name) == getattr(args, name), name
    assert back.extra == {"my_key": 3} and back.sglang == args.sglang and back.router == args.router
    assert yaml.safe_load(path.read_text())["lr"] == 3e-4


def test_picture_of_a_run(tmp_path):
    assert plots.smooth([0, 0, 5, 0, 0]) == [5 / 3, 5 / 4, 1, 5 / 4, 5 / 3]
    write_run(tmp_path)
    path = plots.plot_run(tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    MetricsWriter(tmp_path / "sft").write(0, {"train/loss": 1.0})
    assert plots.plot_run(tmp_path / "sft").is_file()  # a fine-tuning run has a loss only
    MetricsWriter(tmp_path / "none").write(0, {"other": 1.0})
    assert plots.plot_run(tmp_path / "none") is None


def test_summary(tmp_path, capsys):
    write_run(tmp_path)
    assert summary.main([str(tmp_path), "--wall-s", "61.04"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "reward_first": 0.3, "reward_last": 0.65, "steps": 12, "wall_s": 61.0, "logprob_gap_max": 3e-5,
        "sync_verified": True,
    }  # fmt: skip
    assert summary.summarize([])["sync_verified"] is False
    assert summary.summarize([{"step": 0, "perf/step_time": 1.0, "sync/verified": 0.0}])["sync_verified"] is False
    short = [{"step": 0, "rollout/raw_reward": 0.5, "perf/step_time": 1.5}]
    assert summary.summarize(short) == {
        "reward_first": 0.5, "reward_last": 0.5, "steps": 1, "wall_s": 1.5, "logprob_gap_max": None,
        "sync_verified": False,
    }  # fmt: skip
    assert summary.main([str(tmp_path / "nothing")]) == 2
