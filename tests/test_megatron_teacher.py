"""A teacher in the trainer: its log-probs are the model's own, under the student's packing, in every layout."""

import numpy as np
import pytest
import torch
from megatron_runs import SIZES, make_args, rank_data, rollout, tiny_model
from ranks import run_ranks

COLUMNS = rollout()
COLUMNS["token_ids"] = [  # a user's field: other tokens per place; an empty list for an empty response
    np.random.default_rng(r).integers(0, SIZES["vocab_size"], (r, 3)) if r else np.zeros(0, np.float32)
    for r in COLUMNS["response_lengths"]
]
TOPK = ("teacher_topk_log_probs", "teacher_topk_indices", "token_log_probs", "teacher_token_log_probs")


def _prepare(rank, world, port, args):
    from slime.backends.megatron_utils.actor import MegatronTrainActor
    from slime.backends.megatron_utils.parallel import destroy_parallel

    actor = MegatronTrainActor(rank, world, "127.0.0.1", port)
    info = actor.init(args)
    actor.prepare(0, rank_data(args, COLUMNS, info.dp_size)[info.dp_rank])
    now = actor._prepared
    names = ("log_probs", "ref_log_probs", "teacher_log_probs", "advantages", *TOPK)
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
    """[R, V] of all responses, in float64 by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    out = []
    for tokens, response in zip(COLUMNS["tokens"], COLUMNS["response_lengths"], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor(tokens)[None]).logits[0] / temperature
        rows = torch.arange(len(tokens) - response - 1, len(tokens) - 1)
        out.append(logits.log_softmax(-1)[rows])
    return out


def at(log_probs, ids):
    """log_probs [R, V] at ids [R] or [R, K]."""
    ids = torch.as_tensor(np.asarray(ids)).long()
    return log_probs.gather(1, ids if ids.dim() == 2 else ids[:, None]).reshape(ids.shape).numpy()


def responses():
    return [t[len(t) - r :] for t, r in zip(COLUMNS["tokens"], COLUMNS["response_lengths"], strict=True)]


def opd_args(folders, **changes):
    values = dict(
        advantage_estimator="on_policy_distillation", opd_teacher_load=folders[1], use_kl_loss=False, kl_loss_coef=0.0
    )
    return make_args(folders[0], **{**values, **changes})


def test_teacher_log_probs_against_float64(folders):
    columns, metrics = prepare(1, opd_args(folders, global_batch_size=8))
    for name, folder in (("log_probs", folders[0]), ("teacher_log_probs", folders[1])):
        for i, (expected, tokens) in enumerate(zip(reference_log_probs(folder, 0.8), responses(), strict=True)):
            np.testing.assert_allclose(columns[name][i], at(expected, tokens), rtol=1e-4, atol=2e-5)
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


def test_most_likely_tokens_in_another_layout(folders):
    """Of the teacher, and a user's own token ids under each model, over ranks that split vocabulary and context."""
    args = opd_args(folders, distill_topk=5, tensor_model_parallel_size=2, context_parallel_size=2)
    columns, metrics = prepare(4, args)
    student, teacher = (reference_log_probs(folder, 0.8) for folder in folders)
    for i, tokens in enumerate(responses()):
        best, found = teacher[i].topk(5, dim=1), columns["teacher_topk_indices"][i]
        np.testing.assert_allclose(columns["teacher_topk_log_probs"][i], best.values.numpy(), rtol=1e-4, atol=2e-5)
        np.testing.assert_allclose(at(teacher[i], found), best.values.numpy(), rtol=1e-4, atol=2e-5)
        assert all(len(set(row)) == 5 for row in found.tolist()) and not columns["advantages"][i].any()
        np.testing.assert_allclose(columns["teacher_log_probs"][i], at(teacher[i], tokens), rtol=1e-4, atol=2e-5)
        if len(tokens):
            for name, of in (("token_log_probs", student), ("teacher_token_log_probs", teacher)):
                np.testing.assert_allclose(columns[name][i], at(of[i], COLUMNS["token_ids"][i]), rtol=1e-4, atol=2e-5)
    assert metrics["train/distill_kl"] > 0.1 and 0 < metrics["train/distill_teacher_mass"] < 1
    assert metrics["train/pg_loss"] == 0.0 and metrics["train/grad_norm"] > 0


def test_a_teacher_of_another_kind_is_refused(folders, tmp_path):
    other = tiny_model(tmp_path / "other", tie_word_embeddings=True, num_layers=2)
    with pytest.raises(
        AssertionError, match=f"another model than --hf-checkpoint: num_layers 2 instead of {SIZES['num_layers']}"
    ):
        prepare(1, opd_args([folders[0], other]))


def test_a_teacher_chooses_experts_by_its_own_bias(tmp_path):
    """The router's bias is no parameter, and of a teacher's weights all the same."""
    sizes = dict(num_layers=2, num_key_value_heads=6)
    student, teacher = (tiny_model(tmp_path / str(seed), "deepseek_v3", seed=seed, **sizes) for seed in (0, 5))
    columns, _ = prepare(1, opd_args([student, teacher], global_batch_size=8))
    alone, _ = prepare(1, opd_args([teacher, student], global_batch_size=8))
    for i, expected in alone["log_probs"].items():
        np.testing.assert_array_equal(columns["teacher_log_probs"][i], expected)
        np.testing.assert_array_equal(columns["log_probs"][i], alone["teacher_log_probs"][i])
