"""The combined loss of slime_plugins.openclaw, against its worked numbers (C1 to C5, C7 and C10 of our collection)."""

import math

import pytest
import torch

from slime.config import Args
from slime.utils.masked import SumOfSampleMean
from slime_plugins.openclaw.combine_loss import combine_loss_function, opd_advantages

OLD, NEW, TEACHER, ROLLOUT = [-1.0, -0.5, -2.0], [-0.7, -0.9, -2.0], [-0.4, -1.1, -1.5], [-1.05, -0.45, -2.2]


def logits_of(log_probs):
    """Logits [R + 1, 2] under which token 0 has these log-probs, row by row; the last row predicts nothing."""
    rows = [[lp, math.log(-math.expm1(lp))] for lp in log_probs] + [[0.0, 0.0]]
    return torch.tensor(rows, dtype=torch.float64).float()


def make_batch(reward, teacher=TEACHER, old=OLD, new=NEW, n=1, **more):
    size = len(new)
    batch = {
        "unconcat_tokens": [torch.zeros(size + 1, dtype=torch.long)] * n,
        "total_lengths": [size + 1] * n,
        "response_lengths": [size] * n,
        "loss_masks": [torch.ones(size)] * n,
        "log_probs": [torch.tensor(old)] * n,
        "rollout_log_probs": [torch.tensor(ROLLOUT[:size])] * n,
        "teacher_log_probs": [torch.tensor(teacher)] * n,
        "advantages": [torch.full((size,), float(reward))] * n,
    }
    logits = torch.cat([logits_of(new)] * n).unsqueeze(0).requires_grad_()
    return {**batch, **more}, logits


def run(batch, logits, **flags):
    args = Args(**{"eps_clip": 0.2, "eps_clip_high": 0.28, **flags})
    loss, metrics = combine_loss_function(args, batch, logits, SumOfSampleMean(batch["loss_masks"]))
    return loss, metrics


@pytest.mark.parametrize(
    ("w_opd", "w_rl", "reward", "mean"),
    [(1, 1, 1, -1.272043), (1, 1, -1, 0.773315), (1, 1, 0, -0.262667), (0.5, 2, 1, -2.111181)],
)
def test_c3_combine(w_opd, w_rl, reward, mean, monkeypatch):
    loss, metrics = run(*make_batch(reward), extra={"w_opd": w_opd, "w_rl": w_rl})
    assert loss.item() == pytest.approx(mean, abs=2e-6) == metrics["pg_loss"].item()
    monkeypatch.setenv("OPENCLAW_COMBINE_W_OPD", str(w_opd))
    monkeypatch.setenv("OPENCLAW_COMBINE_W_RL", str(w_rl))
    assert run(*make_batch(reward))[0].item() == pytest.approx(mean, abs=2e-6)


@pytest.mark.parametrize(("reward", "mean"), [(1, (-1.28 - 0.67032 - 1) / 3), (-1, (1.349859 + 0.8 + 1) / 3)])
def test_c1_binary_reward_alone(reward, mean):
    batch, logits = make_batch(reward, teacher=ROLLOUT)
    assert run(batch, logits)[0].item() == pytest.approx(mean, abs=2e-6)


def test_c2_distillation_alone():
    batch, logits = make_batch(0)
    torch.testing.assert_close(opd_advantages(Args(), batch)[0], torch.tensor([0.6, -0.6, 0.5]))
    loss, metrics = run(batch, logits, eps_clip_high=0.2)
    assert loss.item() == pytest.approx((-0.72 + 0.48 - 0.5) / 3, abs=2e-6)
    assert metrics["opd_advantage"].item() == pytest.approx(0.5 / 3, abs=1e-6)


def test_c4_a_turn_without_a_hint_learns_its_reward_only():
    """The gap filled with the engine's log-probs would leak (0.95, 1.05, 0.8) instead of 1 into the advantages."""
    batch, _ = make_batch(1, teacher=ROLLOUT)
    assert (opd_advantages(Args(), batch)[0] == 0).all()
    marked, _ = make_batch(1, has_teacher=[0])
    assert (opd_advantages(Args(), marked)[0] == 0).all()
    leak = torch.tensor(ROLLOUT) - torch.tensor(OLD) + 1
    torch.testing.assert_close(leak, torch.tensor([0.95, 1.05, 0.8]))
    engine, _ = make_batch(1)  # old log-probs are the engine's
    found = opd_advantages(Args(use_rollout_logprobs=True), engine)[0]
    torch.testing.assert_close(found, torch.tensor(TEACHER) - torch.tensor(ROLLOUT))


def test_c5_masked_samples_and_garbage():
    batch, logits = make_batch(1, n=2)
    batch["loss_masks"] = [torch.ones(3), torch.zeros(3)]
    for name in ("log_probs", "rollout_log_probs", "teacher_log_probs", "advantages"):
        batch[name] = [batch[name][0], torch.tensor([float("nan"), float("inf"), -300.0])]
    loss, metrics = run(batch, logits)
    assert loss.item() == pytest.approx(-1.272043, abs=2e-6)
    loss.backward()
    assert torch.isfinite(logits.grad).all() and (logits.grad[0, 4:] == 0).all() and logits.grad[0, :3].abs().sum() > 0
    assert all(torch.isfinite(value) for value in metrics.values())


def test_c7_dual_clip_kl_and_entropy():
    batch, logits = make_batch(-1, teacher=[-3.0], old=[-3.0], new=[-3.0 + math.log(4)])
    loss, _ = run(batch, logits, eps_clip_c=3.0)
    assert loss.item() == pytest.approx(3.0, abs=1e-5)
    batch, logits = make_batch(0, teacher=OLD, ref_log_probs=[torch.tensor(NEW) - 0.1])
    loss, metrics = run(batch, logits, use_kl_loss=True, kl_loss_coef=2.0, kl_loss_type="k3", entropy_coef=0.5)
    assert metrics["kl_loss"].item() == pytest.approx(0.00483742, rel=1e-3)
    assert loss.item() == pytest.approx(2 * metrics["kl_loss"].item() - 0.5 * metrics["entropy"].item(), abs=1e-6)


@pytest.mark.parametrize(
    ("kl", "want"), [(0.0, [1.0, 1.0]), (0.02, [1.012, 0.988]), (1.0, [1.6, 0.4])], ids=["0", "0.02", "1"]
)
def test_c10_a_kl_to_the_teacher_is_the_weight_of_the_distillation(kl, want):
    """r - kl (log pi - log pi_teacher) with r = 1. Of a hint alone (no reward) there is no constant 1 beside it."""
    for reward, advantages in ((1, want), (0, [x - 1 for x in want])):
        batch, logits = make_batch(reward, teacher=[-0.4, -1.1], old=[-1.0, -0.5], new=[-1.0, -0.5])
        loss, metrics = run(batch, logits, extra={"w_opd": kl, "w_rl": 1})
        found = kl * opd_advantages(Args(), batch)[0] + batch["advantages"][0]
        torch.testing.assert_close(found, torch.tensor(advantages), rtol=0, atol=1e-6)
        assert loss.item() == pytest.approx(-sum(advantages) / 2, abs=2e-6)


def test_without_teachers_it_says_so():
    batch, logits = make_batch(1)
    del batch["teacher_log_probs"]
    with pytest.raises(ValueError, match="needs teacher_log_probs on all samples"):
        run(batch, logits)
