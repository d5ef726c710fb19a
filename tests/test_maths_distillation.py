"""Distillation over a teacher's K most likely tokens: worked numbers (D1 to D3 of our collection), float64, layouts."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_maths_loss import VOCAB, base_args, make_data, run

from slime.utils.distillation import compute_topk_kl, select_rows, with_tail


def log(*probabilities):
    return torch.tensor([probabilities], dtype=torch.float64).log()


def test_d1_topk_with_a_tail():
    student, teacher = log(0.5, 0.3), log(0.6, 0.1)
    torch.testing.assert_close(with_tail(student).exp(), log(0.5, 0.3, 0.2).exp())
    torch.testing.assert_close(with_tail(teacher).exp(), log(0.6, 0.1, 0.3).exp())
    assert compute_topk_kl(student, teacher).item() == pytest.approx(0.15733, abs=1e-6)


def test_d1b_without_the_tail_it_would_be_no_kl():
    def bare(student, teacher):
        return (student.exp() * (student - teacher)).sum().item()

    assert bare(log(0.5, 0.3), log(0.6, 0.1)) == pytest.approx(0.238423, abs=1e-6)
    assert bare(log(0.2, 0.1), log(0.6, 0.3)) == pytest.approx(-0.3296, abs=1e-4)
    assert compute_topk_kl(log(0.2, 0.1), log(0.6, 0.3)).item() > 0


def test_d2_a_student_with_all_its_mass_on_k_tokens():
    student, teacher = log(0.7, 0.3), log(0.7, 0.2)
    assert with_tail(student).exp()[0, 2].item() == pytest.approx(1e-7, rel=1e-3)
    assert compute_topk_kl(student, teacher).item() == pytest.approx(0.121638, abs=1e-6)


def test_d3_rows_of_zeros_are_no_log_probs():
    """Padding of 0.0 has mass K and the smallest tail: it is taken out before, and does nothing."""
    padding = torch.zeros(1, 2, dtype=torch.float64)
    tail = with_tail(padding)
    assert tail[0, 2].item() == pytest.approx(-16.118096, abs=1e-6) and tail.exp().sum().item() == pytest.approx(2.0)
    student = log(0.5, 0.3).requires_grad_()
    masked = torch.zeros(1)
    kl = compute_topk_kl(select_rows(student, masked), select_rows(padding, masked))
    assert kl.item() == 0.0
    kl.sum().backward()
    assert not student.grad.any()


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 4),
    vocab=st.integers(2, 9),
    spread=st.sampled_from([0.1, 1.0, 8.0]),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_against_float64(n, vocab, spread, seed, data):
    """Value and gradient of row logits; 0 for equal models; never negative, and never above the full KL."""
    k = data.draw(st.integers(1, vocab))
    g = torch.Generator().manual_seed(seed)
    z, q = (spread * torch.randn(n, vocab, generator=g, dtype=torch.float64) for _ in range(2))
    ids = q.topk(k, dim=1).indices
    z.requires_grad_()
    p, teacher = z.log_softmax(1), q.log_softmax(1)
    kl = compute_topk_kl(p.gather(1, ids), teacher.gather(1, ids))
    (grad,) = torch.autograd.grad(kl.sum(), z)
    p, kl = p.detach(), kl.detach()
    for row in range(n):
        bins = [[i] for i in ids[row].tolist()]
        bins += [[i for i in range(vocab) if [i] not in bins]]
        ps, qs = ([sum(math.exp(x[row, i]) for i in b) for b in bins] for x in (p, teacher))
        ps[-1], qs[-1] = max(ps[-1], 1e-7), max(qs[-1], 1e-7)
        # A tail that is really there, but below the bound, is only known to be small.
        loose = 1e-5 if min(ps[-1], qs[-1]) < 1e-6 else 1e-9
        want = sum(a * math.log(a / b) for a, b in zip(ps, qs, strict=True))
        assert kl[row].item() == pytest.approx(want, rel=1e-6, abs=loose)
        full = (p[row].exp() * (p[row] - teacher[row])).sum().item()
        assert -loose <= kl[row].item() <= full + loose
        if k == vocab:
            assert kl[row].item() == pytest.approx(full, rel=1e-6, abs=1e-9)
        for b, a, c in zip(bins, ps, qs, strict=True):
            for v in b:
                slope = math.exp(p[row, v]) * (math.log(a / c) - want)
                assert grad[row, v].item() == pytest.approx(slope, rel=1e-5, abs=10 * loose)
    same = teacher.gather(1, ids)
    assert compute_topk_kl(same, same).abs().max().item() == 0.0


@pytest.mark.parametrize("k", [1, 3, VOCAB])
def test_the_loss_is_the_mean_of_samples_means(k):
    data = make_data()
    g = torch.Generator().manual_seed(3)
    teacher = [2 * torch.randn(r, VOCAB, generator=g) for r in data["response_lengths"]]
    best = [q.log_softmax(1).topk(k, dim=1) for q in teacher]
    data["teacher_topk_log_probs"] = [b.values for b in best]
    data["teacher_topk_indices"] = [b.indices.int() for b in best]
    del data["token_weights"], data["teacher_log_probs"]
    args = base_args(advantage_estimator="on_policy_distillation", distill_topk=k)
    loss, metrics, grads = run(args, data)

    leaves = [x.double().requires_grad_() for x in data["logits"]]
    total, tokens = 0.0, 0.0
    for i, (mask, b) in enumerate(zip(data["loss_masks"], best, strict=True)):
        start = data["total_lengths"][i] - data["response_lengths"][i] - 1
        p = leaves[i][start:-1].log_softmax(1).gather(1, b.indices)
        kl = compute_topk_kl(p, b.values.double())[mask > 0]
        total, tokens = total + (kl.mean() if len(kl) else 0.0) / 3, tokens + kl.sum().item()
    total.backward()
    assert loss == pytest.approx(total.item(), rel=1e-5)
    trained = sum(int(m.sum()) for m in data["loss_masks"])
    assert metrics["distill_kl"] == pytest.approx(tokens / trained, rel=1e-5) and metrics["pg_loss"] == 0.0
    for a, b, mask in zip(grads, leaves, data["loss_masks"], strict=True):
        want = b.grad if mask.any() else torch.zeros_like(b)
        torch.testing.assert_close(a.double(), want, rtol=1e-4, atol=1e-6)


def test_added_to_another_estimator():
    data = make_data()
    pure = run(base_args(advantage_estimator="on_policy_distillation", distill_topk=3), data)[0]
    alone = run(base_args(), data)[0]
    twice = {**data, "token_weights": [2 * w for w in data["token_weights"]]}
    heavy = run(base_args(advantage_estimator="on_policy_distillation", distill_topk=3), twice)[0]
    assert heavy == pytest.approx(2 * pure, rel=1e-6)
    both, metrics, _ = run(base_args(opd_kl_coef=0.3, distill_topk=3), data)
    assert both == pytest.approx(alone + 0.3 * pure, rel=1e-5) and 0 < metrics["distill_teacher_mass"] < 1


def test_what_is_missing_is_named():
    data = make_data()
    del data["teacher_topk_indices"]
    with pytest.raises(ValueError, match="the batch has no teacher_topk_indices.*--distill-topk"):
        run(base_args(opd_kl_coef=0.3, distill_topk=3), data)


@pytest.mark.parametrize("k", [1, 3])
def test_a_row_that_is_not_trained_becomes_k_equal_tokens_of_half_the_mass(k):
    rows = torch.full((2, k), -7.0, requires_grad=True)
    chosen = select_rows(rows, torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(chosen.exp().sum(1), torch.tensor([k * math.exp(-7.0), 0.5]))
    chosen.sum().backward()
    assert rows.grad.tolist() == [[1.0] * k, [0.0] * k]
