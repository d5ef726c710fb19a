"""Checkpoints: a resumed run goes on exactly, also in another layout; what is half-written is never chosen."""

import errno
import json
import os
import resource
import shutil
import signal

import numpy as np
import pytest
from megatron_runs import make_args, rollout, tiny_model, train
from ranks import run_ranks

from slime.config.errors import ConfigError
from slime.utils.checkpoint_folder import SaveError, commit, latest_checkpoint, start_partial
from slime.utils.resume import check_start

ROLLOUTS = [rollout(seed) for seed in range(3)]
SCHEDULE = dict(lr_decay_style="cosine", lr_warmup_iters=1, weight_decay=0.1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "qwen3", tie_word_embeddings=True)


def resumed(world, tmp_path, args, then_world=None, then=None):
    """(the second part of a run that stopped after two rollouts and was started again, the same run in one go)"""
    whole = train(world, args, ROLLOUTS)
    saving = args.replace(save=str(tmp_path / "ckpt"), load=str(tmp_path / "ckpt"))
    train(world, saving, ROLLOUTS[:2])
    again = (then or saving).replace(load=str(tmp_path / "ckpt"), save=None)
    return train(then_world or world, again, ROLLOUTS[2:]), whole


def assert_same_end(run, whole, rtol):
    info, metrics, weights, extra = run
    assert info.start_rollout_id == 2 and info.loaded_from.endswith("iter_0000001") and extra == {"cursor": 1}
    for name, value in whole[1][-1].items():
        if not name.startswith("perf/"):
            np.testing.assert_allclose(metrics[-1][name], value, rtol=rtol, atol=rtol / 100, err_msg=name)
    for name, tensor in whole[2].items():
        np.testing.assert_allclose(weights[name], tensor, rtol=rtol, atol=rtol / 10, err_msg=name)


@pytest.mark.parametrize(
    ("world", "changes"),
    [
        (1, dict(params_dtype="bfloat16")),
        (2, dict(tensor_model_parallel_size=2, sequence_parallel=True)),
        (2, dict(use_distributed_optimizer=False)),
        (2, dict(params_dtype="bfloat16", pipeline_model_parallel_size=2)),
    ],
    ids=str,
)
def test_resume_is_exact(model, tmp_path, world, changes):
    args = make_args(model, **SCHEDULE, **changes)
    assert_same_end(*resumed(world, tmp_path, args), rtol=0.0)


@pytest.mark.parametrize("then", [dict(), dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)], ids=str)
def test_resume_in_another_layout(model, tmp_path, then):
    """Two data-parallel ranks write, two or four ranks of other layouts read, optimizer state included."""
    args = make_args(model, **SCHEDULE)
    world = 4 if then else 1
    assert_same_end(*resumed(2, tmp_path, args, world, make_args(model, **SCHEDULE, **then)), rtol=1e-5)


def test_resume_from_a_background_save(model, tmp_path):
    """Training changes the weights while they are being written; the checkpoint has those of its step."""
    args = make_args(model, **SCHEDULE, async_save=True, params_dtype="bfloat16")
    run, whole = resumed(2, tmp_path, args)
    assert_same_end(run, whole, rtol=0.0)


def test_weights_only_and_what_lies_on_disk(model, tmp_path):
    saving = make_args(model, save=str(tmp_path / "ckpt"), keep_last=2)
    _, _, weights, _ = train(1, saving, ROLLOUTS)
    assert sorted(p.name for p in (tmp_path / "ckpt").iterdir()) == [
        "iter_0000001", "iter_0000002", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip
    info, _, loaded, extra = train(1, make_args(model, load=str(tmp_path / "ckpt"), finetune=True), [])
    assert info.start_rollout_id == 0 and extra is None
    assert all((loaded[name] == weights[name]).all() for name in weights)
    # the reference model may be a checkpoint as well
    _, metrics, _, _ = train(1, make_args(model, ref_load=str(tmp_path / "ckpt")), ROLLOUTS[:1])
    assert metrics[0]["train/kl_loss"] > 1e-9


def test_only_complete_checkpoints_are_found(tmp_path):
    assert latest_checkpoint(None) is None and latest_checkpoint(tmp_path / "absent") is None
    (tmp_path / ".partial_iter_0000003").mkdir()
    assert latest_checkpoint(tmp_path) is None
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(ConfigError, match="iter_0000003"):
        latest_checkpoint(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("three")
    with pytest.raises(ConfigError, match="not the number"):
        latest_checkpoint(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    (tmp_path / "iter_0000003").mkdir()
    (tmp_path / "iter_0000003" / "metadata.json").write_text("{}")
    assert latest_checkpoint(tmp_path) == (tmp_path / "iter_0000003", 3)
    assert latest_checkpoint(tmp_path / "iter_0000003") == (tmp_path / "iter_0000003", 3)


@pytest.fixture(scope="module")
def written(model, tmp_path_factory):
    """A checkpoint of step 1 and the args that wrote it."""
    folder = tmp_path_factory.mktemp("written")
    args = make_args(model, save=str(folder / "ckpt"), load=str(folder / "ckpt"), run_dir=str(folder / "run"))
    train(1, args, ROLLOUTS[:2])
    return args


@pytest.fixture
def copy(written, tmp_path):
    """A copy of it that a test may damage: (args, path of the checkpoint)."""
    shutil.copytree(written.load, tmp_path / "ckpt")
    args = written.replace(save=str(tmp_path / "ckpt"), load=str(tmp_path / "ckpt"), run_dir=str(tmp_path / "run"))
    return args, tmp_path / "ckpt" / "iter_0000001"


def test_flags_win_over_the_schedule_of_the_checkpoint(written):
    _, metrics, _, _ = train(1, written.replace(lr=1e-4, save=None), ROLLOUTS[2:])
    assert metrics[0]["train/lr"] == pytest.approx(1e-4)


def edit(path, **changes):
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, **changes}))


def test_what_can_be_known_is_known_before_anything_starts(copy, model, tmp_path):
    args, path = copy
    assert check_start(args) == [] and check_start(args.replace(finetune=True, rollout_seed=7)) == []
    (note,) = check_start(args.replace(lr=2e-3))
    assert "changed since: --lr 0.001 -> 0.002" in note
    with pytest.raises(ConfigError, match="--rollout-seed was 42 and is 7.*\n.*|--loss-type was") as error:
        check_start(args.replace(rollout_seed=7, loss_type="sft_loss"))
    assert len(str(error.value).splitlines()) == 2
    assert len(check_start(args.replace(rollout_seed=7, loss_type="sft_loss", allow_config_change=True))) == 2
    assert len(check_start(args.replace(global_batch_size=8))) == 1
    with pytest.raises(ConfigError, match="--global-batch-size was 4 and is 8"):
        check_start(args.replace(global_batch_size=8, lr_decay_style="cosine", allow_config_change=False))
    with pytest.raises(ConfigError, match="--num-rollout was 3 and is 9"):
        edit(path / "manifest.json", run={"flags": {"num_rollout": 3}})
        check_start(args.replace(lr_decay_style="cosine", num_rollout=9))
    edit(path / "manifest.json", run={})  # weights of no run: nothing goes on
    assert check_start(args.replace(lr_decay_style="cosine", num_rollout=9)) == []

    other = tiny_model(tmp_path / "other", num_layers=2)
    edit(path / "manifest.json", run={"model": json.loads(open(f"{model}/config.json").read())})
    with pytest.raises(ConfigError, match="of another model: its num_hidden_layers is 4, that of .* is 2"):
        check_start(args.replace(hf_checkpoint=other))
    assert check_start(args.replace(load=model)) == []
    (tmp_path / "junk").mkdir()
    assert check_start(args.replace(load=str(tmp_path / "junk"))) == []  # empty: a fresh start
    (tmp_path / "junk" / "model.bin").write_text("x")
    with pytest.raises(ConfigError, match="neither a checkpoint .*it holds model.bin"):
        check_start(args.replace(load=str(tmp_path / "junk")))
    for changes in (dict(save=f"{model}/config.json/x"), dict(run_dir="/proc/x"), dict(save_hf="/proc/self/hf")):
        with pytest.raises(ConfigError, match="is a file, not a folder|cannot be written"):
            check_start(args.replace(**changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: os.truncate(p / "common.pt", 100), "common.pt has 100 bytes, .* were written"),
        (lambda p: (p / "__0_0.distcp").unlink(), "the file __0_0.distcp is missing"),
        (lambda p: (p / "manifest.json").write_text("{"), "manifest.json is damaged"),
        (lambda p: edit(p / "manifest.json", version=99), "of version 99, written by a newer slime"),
    ],
)
def test_a_damaged_checkpoint_is_one_line(copy, damage, message):
    args, path = copy
    damage(path)
    with pytest.raises(ConfigError, match=message) as error:
        check_start(args)
    assert "\n" not in str(error.value)


def test_an_altered_byte_is_found_on_load(copy):
    args, path = copy
    with open(path / "__0_0.distcp", "r+b") as file:
        file.seek(-1000, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1000, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    assert check_start(args) == []  # sizes are right
    with pytest.raises(AssertionError, match="the bytes of __0_0.distcp have changed since"):
        train(1, args, [])


def _save_with_little_room(rank, world, port, args):
    from slime.backends.megatron_utils.actor import MegatronTrainActor

    actor = MegatronTrainActor(rank, world, "127.0.0.1", port)
    actor.init(args)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))  # one rank cannot write its share
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    said = []
    for save in (lambda: actor.save(5, {"cursor": 5}), actor.finish_save):
        try:
            save()
        except SaveError as error:
            said.append(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    left = sorted(os.listdir(args.save))
    actor.save(6, {"cursor": 6})  # the run goes on, and the disk has room again
    actor.finish_save()
    return said, left


def test_a_full_disk_leaves_the_old_checkpoint_and_a_run_that_can_go_on(copy):
    args, path = copy
    results = run_ranks(2, _save_with_little_room, args.replace(async_save=True))
    for said, _ in results:
        assert len(said) == 1 and "checkpoint of step 5" in said[0] and f"Errno {errno.EFBIG}" in said[0]
    assert results[0][1] == ["iter_0000000", "iter_0000001", "latest_checkpointed_iteration.txt"]
    assert latest_checkpoint(args.save)[1] == 6


def test_a_commit_is_all_or_nothing(tmp_path, monkeypatch):
    """A crash at any system call of a commit leaves the checkpoint before or the new one, complete."""

    class Crash(BaseException):
        pass

    def make(root, step):
        path = start_partial(root, step)
        (path / "metadata.json").write_text(str(step))

    class Countdown:
        def __init__(self, n):
            self.n = n

        def __call__(self, real):
            def call(*args, **kwargs):
                self.n -= 1
                if self.n < 0:
                    raise Crash
                return real(*args, **kwargs)

            return call

    seen = set()
    for calls in range(40):
        root = tmp_path / str(calls)
        root.mkdir()
        for step in (1, 2):
            make(root, step)
            commit(root, step, {}, {}, keep_last=1)
        make(root, 3)
        with monkeypatch.context() as patch:
            crash = Countdown(calls)
            for name in ("rename", "replace", "rmdir", "unlink", "fsync", "open"):
                patch.setattr(os, name, crash(getattr(os, name)))
            try:
                commit(root, 3, {}, {}, keep_last=1)
                done = True
            except Crash:
                done = False
        path, step = latest_checkpoint(root)
        assert (path / "metadata.json").read_text() == str(step) and (path / "manifest.json").is_file()
        seen.add((step, done))
        make(root, 4)  # and the next one goes through, whatever was left
        commit(root, 4, {}, {}, keep_last=1)
        assert [p.name for p in sorted(root.iterdir())] == ["iter_0000004", "latest_checkpointed_iteration.txt"]
        if done:
            break
    assert seen == {(2, False), (3, False), (3, True)}


def test_without_pointer_the_newest_complete_one_counts(copy):
    args, path = copy
    (path.parent / "latest_checkpointed_iteration.txt").unlink()
    assert latest_checkpoint(args.load) == (path, 1)
