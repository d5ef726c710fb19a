"""Checkpoints: a resumed run goes on exactly, also in another layout; what is half-written is never chosen."""

import errno
import json
import os
import resource
import shutil
import signal
import time

import numpy as np
import pytest
from megatron_runs import _weights, make_args, rank_data, rollout, tiny_model, train
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


def test_resume_with_experts_over_other_ranks(tmp_path):
    """Experts over two ranks are a second optimizer, which the stage of the dense first layer has nothing for."""
    model = tiny_model(tmp_path / "m", "deepseek_v3", num_layers=2, num_key_value_heads=6)
    args, folder = make_args(model, **SCHEDULE), str(tmp_path / "ckpt")
    cut = dict(expert_model_parallel_size=2, expert_tensor_parallel_size=1, pipeline_model_parallel_size=2)
    train(4, args.replace(save=folder, **cut), ROLLOUTS[:2])
    assert_same_end(train(1, args.replace(load=folder), ROLLOUTS[2:]), train(1, args, ROLLOUTS), rtol=1e-5)


def test_resume_before_the_first_update(model, tmp_path):
    """Nothing was trained, so the step is zero; with an optimizer that is not sharded."""
    folder = str(tmp_path / "ckpt")
    args = make_args(model, use_distributed_optimizer=False, load=folder)
    masked = {**ROLLOUTS[0], "loss_masks": [mask * 0 for mask in ROLLOUTS[0]["loss_masks"]]}
    train(1, args.replace(save=folder), [masked])
    run, whole = train(1, args, ROLLOUTS[1:2]), train(1, args.replace(load=None), ROLLOUTS[1:2])
    assert run[0].start_rollout_id == 1
    for name, tensor in whole[2].items():
        np.testing.assert_array_equal(run[2][name], tensor, err_msg=name)


def test_resume_from_a_background_save(model, tmp_path):
    """Training changes the weights while they are being written; the checkpoint has those of its step."""
    args = make_args(model, **SCHEDULE, async_save=True, params_dtype="bfloat16")
    run, whole = resumed(2, tmp_path, args)
    assert_same_end(run, whole, rtol=0.0)


def _spoil_after_saving(rank, world, port, variants):
    """Saves in the background, spoils weights and optimizer at once, and loads what was saved."""
    import torch

    from slime.backends.megatron_utils import checkpoint
    from slime.backends.megatron_utils.actor import MegatronTrainActor
    from slime.backends.megatron_utils.parallel import destroy_parallel

    def tensors(actor):
        yield from actor.model[0].parameters()
        for part in actor.optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                for param in group["params"]:
                    yield param
                    yield part.optimizer.state[param]["exp_avg"]

    for args in variants:
        actor = MegatronTrainActor(rank, world, "127.0.0.1", port)
        actor.init(args)
        for step in range(3):  # the first one is written as it is, the others are frozen where that is possible
            actor.train(step, rank_data(args, ROLLOUTS[step], 1)[0])
            with actor._on_device("optimizer"):
                before = [tensor.detach().clone() for tensor in tensors(actor)]
            actor.save(step)
            if args.offload_train:
                actor._memory.release("params")  # as the weight update does
            actor.finish_copies()  # as who trains does
            with actor._on_device("optimizer"):
                for tensor in tensors(actor):
                    tensor.data.fill_(7.0)
            actor.finish_save()
            with actor._on_device("optimizer", "grads"):
                path = checkpoint.latest_checkpoint(args.save)[0]
                checkpoint.load_checkpoint(path, actor.model, actor.optimizer, actor.scheduler)
                for old, new in zip(before, tensors(actor), strict=True):
                    assert torch.equal(old, new.detach()), (args, step)
        destroy_parallel()


def test_a_background_save_holds_what_was_there_when_it_began(model, tmp_path):
    """Also where memory is given up right after it, and with an optimizer that is not sharded."""
    variants = [dict(), dict(params_dtype="bfloat16", offload_train=True), dict(use_distributed_optimizer=False)]
    all_args = [make_args(model, save=str(tmp_path / str(i)), async_save=True, **v) for i, v in enumerate(variants)]
    run_ranks(1, _spoil_after_saving, all_args)


def _train_after_saving(rank, world, port, args):
    """Saves with a copy that is slow to come, trains at once, and says what was saved and what was trained."""
    from slime.backends.megatron_utils import checkpoint, freeze
    from slime.backends.megatron_utils.actor import MegatronTrainActor
    from slime.backends.megatron_utils.writer import CheckpointWriter

    class SlowCopies(freeze.HostCopies):
        def copy(self, tensors):
            time.sleep(0.5)
            return super().copy(tensors)

    actor = MegatronTrainActor(rank, world, "127.0.0.1", port)
    actor.init(args)
    actor._freezer = freeze.Freezer(actor.optimizer)
    actor._freezer._host = SlowCopies()
    actor._writer = CheckpointWriter(args.save, background=True)
    before = _weights(actor)
    started = time.monotonic()
    actor.save(0)
    returned = time.monotonic() - started
    metrics = actor.train(1, rank_data(args, ROLLOUTS[0], 1)[0])
    actor.finish_save()
    after = _weights(actor)
    checkpoint.load_checkpoint(checkpoint.latest_checkpoint(args.save)[0], actor.model, actor.optimizer)
    return before, after, _weights(actor), metrics["perf/save_wait_time"] + returned


def test_training_waits_for_the_copy_not_for_the_save(model, tmp_path):
    ((before, after, saved, waited),) = run_ranks(
        1, _train_after_saving, make_args(model, save=str(tmp_path), async_save=True)
    )
    for name in before:
        assert (before[name] == saved[name]).all()
    assert any((after[name] != before[name]).any() for name in after) and waited > 0.4


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
    epochs = args.replace(lr_decay_style="cosine", num_rollout=None, num_epoch=2)
    edit(path / "manifest.json", run={"flags": {"num_rollout": 3, "num_epoch": 2}})
    assert check_start(epochs) == []
    with pytest.raises(ConfigError, match="--num-epoch was 2 and is 5"):
        check_start(epochs.replace(num_epoch=5))
    edit(path / "manifest.json", run={})  # weights of no run: nothing goes on
    assert check_start(args.replace(lr_decay_style="cosine", num_rollout=9)) == []

    other = tiny_model(tmp_path / "other", num_layers=2)
    edit(path / "manifest.json", run={"model": json.loads(open(f"{model}/config.json").read())})
    with pytest.raises(ConfigError, match="of another model: its num_hidden_layers is 4, that of .* is 2"):
        check_start(args.replace(hf_checkpoint=other))
    longer = {**json.loads(open(f"{model}/config.json").read()), "rope_theta": 5e6, "rope_parameters": None}
    edit(path / "manifest.json", run={"model": longer})  # the same shapes, and another function of them
    with pytest.raises(ConfigError, match="is another model than --hf-checkpoint: rope_theta 5000000.0 instead of"):
        check_start(args.replace(load=None, opd_teacher_load=args.load))
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


def test_an_optimizer_of_another_kind_is_one_line(copy):
    args, path = copy
    with pytest.raises(AssertionError, match=f"ConfigError: checkpoint {path} was written with --use-distributed-opt"):
        train(1, args.replace(use_distributed_optimizer=False), [])


def _load_bad_ones(rank, world, port, args, path, folder):
    """What each bad checkpoint says on this rank, whose model is another one than `path` is of."""
    import torch

    from slime.backends.megatron_utils import checkpoint
    from slime.backends.megatron_utils.actor import MegatronTrainActor
    from slime.backends.megatron_utils.model import unwrap

    actor = MegatronTrainActor(rank, world, "127.0.0.1", port)
    actor.init(args)
    parts = actor.model, actor.optimizer, actor.scheduler
    said = []

    def load(path):
        with pytest.raises(ConfigError) as error:
            checkpoint.load_checkpoint(path, *parts)
        said.append(str(error.value))
        torch.distributed.barrier()

    load(path)
    parameters = dict(unwrap(actor.model[0]).named_parameters())
    parameters["decoder.final_layernorm.weight"].data[0] = float("inf")
    if rank == 1:
        parameters["decoder.layers.1.mlp.linear_fc2.weight"].data.view(-1)[3] = float("nan")
    broken = checkpoint.save_checkpoint(folder, 0, *parts)
    load(broken)
    for name, damage in [
        ("metadata.json", lambda file: file.write_text(file.read_text().replace("torch_dist", "torch_dist_2"))),
        (".metadata", lambda file: os.truncate(file, 100)),
    ]:
        if rank == 0:
            (broken / "manifest.json").unlink(missing_ok=True)  # as Megatron-LM writes them
            before = (broken / name).read_bytes()
            damage(broken / name)
        torch.distributed.barrier()
        load(broken)
        if rank == 0:
            (broken / name).write_bytes(before)
        torch.distributed.barrier()
    return said


def test_bad_checkpoints_are_named_on_every_rank(copy, tmp_path):
    _, path = copy
    (path / "manifest.json").unlink()  # which would tell before anything starts
    args = make_args(tiny_model(tmp_path / "m", num_layers=2, intermediate_size=60), tensor_model_parallel_size=2)
    both = run_ranks(2, _load_bad_ones, args, path, tmp_path / "ck")
    assert both[0] == both[1]
    other, nan, newer, cut = both[0]
    assert other.startswith(f"checkpoint {path} is of another model than --hf-checkpoint:\n  ")
    assert "mlp.linear_fc2.weight: the model has [2, 44, 60], the checkpoint [4, 44, 52]" in other
    lines = nan.splitlines()
    assert "broken weights" in lines[0] and len(lines) == 3
    assert "  decoder.layers.1.mlp.linear_fc2.weight: 1 of 1320 numbers are NaN or infinite" in lines
    for line, words in ((newer, "torch_dist_2"), (cut, ".metadata cannot be read")):
        assert line.startswith(f"checkpoint {tmp_path}/ck/iter_0000000") and words in line and "\n" not in line


def cut_off(folder):
    os.truncate(folder / "model.safetensors", os.path.getsize(folder / "model.safetensors") - 4)


def without_a_file(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-2.safetensors"}}))


def no_header(folder):
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")


@pytest.mark.parametrize("flag", ["hf_checkpoint", "load", "ref_load"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_off, r"model.safetensors: damaged or incomplete \(\d+ bytes, by its header \d+\)"),
        (without_a_file, r"index.json: names model-2.safetensors, not in the folder"),
        (no_header, r"model.safetensors: damaged or incomplete \(\d+ bytes, too few for its header\)"),
    ],
)
def test_bad_weight_files_are_one_line_before_anything_starts(model, tmp_path, flag, damage, message):
    shutil.copytree(model, tmp_path / "m")
    damage(tmp_path / "m")
    with pytest.raises(ConfigError, match=message) as error:
        check_start(make_args(model).replace(**{flag: str(tmp_path / "m")}))
    assert "\n" not in str(error.value)


def test_first_weights_may_be_a_checkpoint_of_no_run(written, model, tmp_path):
    """tools/convert_hf.py makes them; --hf-checkpoint need then hold config and tokenizer only."""
    shutil.copytree(written.load, tmp_path / "ck")
    edit(
        tmp_path / "ck" / "iter_0000001" / "manifest.json",
        run={"model": json.loads(open(f"{model}/config.json").read())},
    )
    shutil.copytree(model, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    args = written.replace(hf_checkpoint=str(tmp_path / "m"), load=str(tmp_path / "ck"), lr_decay_style="cosine")
    assert check_start(args) == []
    with pytest.raises(ConfigError, match="there are no \\*.safetensors in it"):
        check_start(args.replace(load=None))
    other = tiny_model(tmp_path / "other", num_layers=2)
    with pytest.raises(ConfigError, match="of another model: its num_hidden_layers is 4"):
        check_start(args.replace(hf_checkpoint=other))
    with pytest.raises(ConfigError, match="is another model than --hf-checkpoint: num_layers 2 instead of 4"):
        check_start(written.replace(ref_load=other))


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


def test_a_run_stops_or_says_so_and_goes_on_as_the_flag_says(model):
    from types import SimpleNamespace

    from train import guard

    said = []

    def write(step):
        raise SaveError(f"checkpoint of step {step} in ck could not be written: no space left")

    with pytest.raises(SaveError, match="of step 3"):
        guard(make_args(model), None, write, 3)
    guard(make_args(model, on_save_error="continue"), SimpleNamespace(say=said.append), write, 3)
    assert said == [
        "slime: warning: checkpoint of step 3 in ck could not be written: no space left; training goes on "
        "(--on-save-error continue)"
    ]


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
