"""One rollout of training gives the same loss, gradient norm, metrics and weights in every parallel layout."""

import numpy as np
import pytest
from megatron_runs import make_args, rollout, tiny_model, train

LAYOUTS = {
    "tp2": (2, dict(tensor_model_parallel_size=2)),
    "tp2 sp": (2, dict(tensor_model_parallel_size=2, sequence_parallel=True)),
    "pp2": (2, dict(pipeline_model_parallel_size=2)),
    "dp2": (2, dict()),
    "dp2, whole optimizer, fixed micro-batches": (
        2,
        dict(use_distributed_optimizer=False, use_dynamic_batch_size=False, micro_batch_size=2),
    ),
    "dp2, overlapped": (
        2,
        dict(
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            custom_megatron_before_train_step_hook_path="megatron_runs.same_weights_everywhere",
        ),
    ),
    "tp2 pp2 sp": (4, dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True)),
    "one micro-batch": (1, dict(max_tokens_per_gpu=10_000)),
    "more tokens without gradient": (1, dict(log_probs_max_tokens_per_gpu=100)),
    "dp4": (4, dict()),
    "pp4": (4, dict(pipeline_model_parallel_size=4)),
    "recompute": (1, dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "qwen3", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def reference(model):
    return train(1, make_args(model), [rollout()])


def assert_same_run(run, reference):
    _, (metrics,), weights, _ = run
    _, (expected,), expected_weights, _ = reference
    names = {n for n in expected if not n.startswith("perf/")}
    assert names == {n for n in metrics if not n.startswith("perf/")}
    for name in sorted(names):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5, atol=1e-7, err_msg=name)
    assert weights.keys() == expected_weights.keys()
    for name, tensor in expected_weights.items():
        np.testing.assert_allclose(weights[name], tensor, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_one_process(layout, model, reference):
    world, changes = LAYOUTS[layout]
    assert_same_run(train(world, make_args(model, **changes), [rollout()]), reference)


def test_the_run_trains_and_reports(reference, model):
    info, (metrics,), weights, extra = reference
    assert info.start_rollout_id == 0 and info.loaded_from == model and extra is None
    assert metrics["train/steps"] == 2 and metrics["train/grad_norm"] > 0 and metrics["train/lr"] == 1e-3
    assert metrics["train/empty_step"] == metrics["train/nonfinite_step"] == 0.0
    assert metrics["train/logprob_gap_max"] > metrics["train/logprob_gap_mean"] > 0
    assert metrics["train/advantages_min"] < metrics["train/advantages_mean"] < metrics["train/advantages_max"]
    assert 0 < metrics["train/advantages_std"] < metrics["train/advantages_max"] - metrics["train/advantages_min"]
    assert metrics["perf/train_tokens"] == sum(rollout()["total_lengths"])
    assert {"perf/log_probs_time", "perf/ref_log_probs_time", "perf/train_time"} <= metrics.keys()
    assert all(np.isfinite(tensor).all() for tensor in weights.values())


def test_virtual_pipeline_stages(tmp_path):
    """Four stages: there the second rank only sends while the third already returns gradients to it."""
    model = tiny_model(tmp_path / "eight", "llama", num_layers=8, hidden_size=42)
    reference = train(1, make_args(model), [rollout()])
    changes = dict(pipeline_model_parallel_size=4, num_layers_per_virtual_pipeline_stage=1)
    assert_same_run(train(4, make_args(model, **changes), [rollout()]), reference)


EP2 = dict(expert_model_parallel_size=2)
TP2_EP2 = dict(tensor_model_parallel_size=2, sequence_parallel=True, expert_tensor_parallel_size=1, **EP2)


@pytest.mark.parametrize(
    ("arch", "layouts"),
    [
        ("qwen3_moe", (EP2, TP2_EP2)),
        ("deepseek_v3", (TP2_EP2,)),  # the keys' rotary part is shared by the heads of all ranks
        ("gpt_oss", (TP2_EP2,)),  # experts with biases of their own on each rank
    ],
)
def test_mixture_of_experts(tmp_path, arch, layouts):
    heads = dict(num_key_value_heads=6) if arch == "deepseek_v3" else {}
    model = tiny_model(tmp_path / "moe", arch, num_layers=2, **heads)
    reference = train(1, make_args(model), [rollout()])
    for changes in layouts:
        assert_same_run(train(2, make_args(model, **changes), [rollout()]), reference)


def test_ranks_that_share_a_key_value_head(tmp_path):
    model = tiny_model(tmp_path / "one", num_layers=1, num_attention_heads=4, num_key_value_heads=1)
    reference = train(1, make_args(model), [rollout()])
    assert_same_run(train(2, make_args(model, tensor_model_parallel_size=2), [rollout()]), reference)


def test_a_step_with_nothing_to_train_changes_nothing(model):
    columns = rollout()
    columns["loss_masks"] = [np.zeros_like(mask) for mask in columns["loss_masks"]]
    _, (metrics,), weights, _ = train(2, make_args(model), [columns])
    assert metrics["train/empty_step"] == 1.0
    untouched = train(1, make_args(model), [])[2]
    assert all((weights[name] == untouched[name]).all() for name in untouched)


def test_old_log_probs_of_a_single_step_are_its_own(model, tmp_path):
    """With one step per rollout the extra pass is left out; a hook that reads log-probs early brings it back."""
    one = dict(global_batch_size=8)
    quick = train(1, make_args(model, **one), [rollout()])
    hook = "megatron_runs.look_at_log_probs"
    full = train(1, make_args(model, rollout_data_postprocess_path=hook, **one), [rollout()])
    assert "perf/log_probs_time" not in quick[1][0] and "perf/log_probs_time" in full[1][0]
    assert_same_run(quick, full)
    assert_same_run(train(2, make_args(model, pipeline_model_parallel_size=2, **one), [rollout()]), full)


def test_custom_loss_sees_logits_and_the_users_fields(model):
    changes = dict(loss_type="custom_loss", custom_loss_path="megatron_runs.custom_loss", kl_loss_coef=0.0)
    reference = train(1, make_args(model, **changes), [rollout()])
    assert reference[1][0]["train/turns"] == pytest.approx((4 / 2 + 4 / 4) / 2)  # samples per trained one, of two steps
    run = train(2, make_args(model, tensor_model_parallel_size=2, sequence_parallel=True, **changes), [rollout()])
    assert_same_run(run, reference)


def test_a_gradient_that_is_not_finite_is_not_applied(model):
    changes = dict(loss_type="custom_loss", custom_loss_path="megatron_runs.infinite_loss", global_batch_size=8)
    _, (metrics,), weights, _ = train(2, make_args(model, **changes), [rollout()])
    assert metrics["train/nonfinite_step"] == 1.0
    untouched = train(1, make_args(model), [])[2]
    assert all((weights[name] == untouched[name]).all() for name in untouched)
