"""A teacher in the trainer: its log-probs are the model's own, under the student's packing, in every layout."""

import numpy as np
import pytest
import torch
from megatron_runs import SIZES, make_args, rank_data, rollout, tiny_model
from ranks import run_ranks

COLUMNS = rollout()


def _prepare(rank, world, port, args):
    from slime.backends.megatron_utils.actor import MegatronTrainActor
    from slime.backends.megatron_utils.parallel import destroy_parallel

    actor = MegatronTrainActor(rank, world, "127.0.0.1", port)
    info = actor.init(args)
    actor.prepare(0, rank_data(args, COLUMNS, info.dp_size)[info.dp_rank])
    now = actor._prepared
    names = ("log_probs", "ref_log_probs", "teacher_log_probs", "advantages")
    out = {
        name: {i: x.cpu().numpy() for i, x in zip(now.rank_data.samples, now.columns[name], strict=True)}
        for name in names
        if name in now.columns
    }
    metrics = actor.train_prepared(0)
    destroy_parallel()
    return info, out, metrics


def prepare(world, args):
    """(columns by name and sample, metrics of the metrics rank)."""
    results = run_ranks(world, _prepare, args)
    columns: dict = {}
    for _, out, _ in results:
        for name, values in out.items():
            columns.setdefault(name, {}).update(values)
    return columns, next(r[2] for r in results if r[0].is_metrics_rank)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    return [
        tiny_model(path / name, tie_word_embeddings=True, seed=seed) for name, seed in (("student", 0), ("teacher", 5))
    ]


def reference_log_probs(folder, temperature):
    """Of all responses, in float64 by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    out = []
    for tokens, response in zip(COLUMNS["tokens"], COLUMNS["response_lengths"], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor(tokens)[None]).logits[0] / temperature
        rows = torch.arange(len(tokens) - response - 1, len(tokens) - 1)
        out.append(logits.log_softmax(-1)[rows, torch.tensor(tokens)[rows + 1]].numpy())
    return out


def opd_args(folders, **changes):
    values = dict(
        advantage_estimator="on_policy_distillation", opd_teacher_load=folders[1], use_kl_loss=False, kl_loss_coef=0.0
    )
    return make_args(folders[0], **{**values, **changes})


def test_teacher_log_probs_against_float64(folders):
    columns, metrics = prepare(1, opd_args(folders, global_batch_size=8))
    for name, folder in (("log_probs", folders[0]), ("teacher_log_probs", folders[1])):
        for i, expected in enumerate(reference_log_probs(folder, 0.8)):
            np.testing.assert_allclose(columns[name][i], expected, rtol=1e-4, atol=2e-5)
    for i, mask in enumerate(COLUMNS["loss_masks"]):
        lesson = (columns["teacher_log_probs"][i] - columns["log_probs"][i]) * mask
        np.testing.assert_allclose(columns["advantages"][i], lesson, atol=1e-6)
    assert {"perf/teacher_log_probs_time", "perf/log_probs_time"} <= metrics.keys()
    assert "perf/ref_log_probs_time" not in metrics

    # A teacher and a reference side by side, added to another estimator, on four ranks of another layout.
    both = dict(advantage_estimator="grpo", opd_kl_coef=0.3, use_kl_loss=True, kl_loss_coef=0.1)
    layout = dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True)
    other, _ = prepare(4, opd_args(folders, **both, **layout))
    for i, mask in enumerate(COLUMNS["loss_masks"]):
        for name, same_as in (("teacher_log_probs",) * 2, ("ref_log_probs", "log_probs")):
            np.testing.assert_allclose(other[name][i], columns[same_as][i], rtol=1e-5, atol=1e-5)
        mixed = COLUMNS["rewards"][i] + 0.3 * columns["advantages"][i]
        np.testing.assert_allclose(other["advantages"][i][mask > 0], mixed[mask > 0], rtol=1e-5, atol=1e-5)


def test_a_teacher_of_another_kind_is_refused(folders, tmp_path):
    other = tiny_model(tmp_path / "other", tie_word_embeddings=True, num_layers=2)
    with pytest.raises(
        AssertionError, match=f"another model than --hf-checkpoint: num_layers 2 instead of {SIZES['num_layers']}"
    ):
        prepare(1, opd_args([folders[0], other]))
