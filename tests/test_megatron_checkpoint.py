"""Checkpoints: a resumed run goes on exactly, also in another layout; what is half-written is never chosen."""

import numpy as np
import pytest
from megatron_runs import make_args, rollout, tiny_model, train

from slime.config.errors import ConfigError

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
    from slime.backends.megatron_utils.checkpoint import latest_checkpoint

    assert latest_checkpoint(None) is None and latest_checkpoint(tmp_path / "absent") is None
    (tmp_path / ".partial_iter_0000003").mkdir()
    assert latest_checkpoint(tmp_path) is None
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(ConfigError, match="iter_0000003"):
        latest_checkpoint(tmp_path)
    (tmp_path / "iter_0000003").mkdir()
    (tmp_path / "iter_0000003" / "metadata.json").write_text("{}")
    assert latest_checkpoint(tmp_path) == (tmp_path / "iter_0000003", 3)
    assert latest_checkpoint(tmp_path / "iter_0000003") == (tmp_path / "iter_0000003", 3)
