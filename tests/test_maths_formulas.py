"""KL, policy losses, advantages: worked numbers, and slow float64 references written out token by token."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks

from slime.utils import ppo_utils as pu

OLD = torch.tensor([-1.0, -0.5, -2.0], dtype=torch.float64)
NEW = torch.tensor([-0.7, -0.9, -2.0], dtype=torch.float64)
TEACHER = torch.tensor([-0.4, -1.1, -1.5], dtype=torch.float64)
FLOATS = st.floats(-3, 3, allow_nan=False).map(lambda x: round(x, 3))


def close(got, want, tol=1e-6):
    got = got.detach().numpy() if isinstance(got, torch.Tensor) else got
    np.testing.assert_allclose(got, want, rtol=0, atol=tol)


def t64(x):
    return torch.tensor(x, dtype=torch.float64)


# -- KL -----------------------------------------------------------------------------------------------------------


def test_worked_kl_small():
    d = t64([0.1, 0.0])
    close(pu.compute_approx_kl(d, torch.zeros_like(d), "k1"), [0.1, 0])
    close(pu.compute_approx_kl(d, torch.zeros_like(d), "k2"), [0.005, 0])
    close(pu.compute_approx_kl(d, torch.zeros_like(d), "k3"), [0.00483742, 0], 1e-8)


def test_worked_kl_table():
    d, zero = t64([0.0, 0.5, -0.5, 5.0, -3.0]), torch.zeros(5)
    close(pu.compute_approx_kl(d, zero, "k1"), d)
    close(pu.compute_approx_kl(d, zero, "k2"), [0, 0.125, 0.125, 12.5, 4.5])
    close(pu.compute_approx_kl(d, zero, "k3"), [0, 0.106531, 0.148721, 4.006738, 16.085537])
    close(pu.compute_approx_kl(d, zero, "low_var_kl"), [0, 0.106531, 0.148721, 4.006738, 10.0])


def test_worked_kl_of_the_engine_gap():
    trainer, engine = t64([-0.105, -2.31, -0.693, -5.0]), t64([-0.100, -2.30, -0.700, -4.6])
    close(pu.compute_approx_kl(engine, trainer, "k1").mean(), 0.102)
    close(pu.compute_approx_kl(engine, trainer, "k2").mean(), 0.020022)
    close(pu.compute_approx_kl(engine, trainer, "k3"), [1.2e-05, 5e-05, 2.5e-05, 0.07032])


def test_kl_of_an_outlier_is_finite():
    close(pu.compute_approx_kl(t64([1e4]), t64([0.0]), "k3"), [19.0])
    for kind in ("k1", "k2", "k3", "low_var_kl"):
        lp = torch.tensor([-200.0, 200.0, -1e4], requires_grad=True)
        kl = pu.compute_approx_kl(lp, torch.zeros(3), kind)
        kl.sum().backward()
        assert kl.isfinite().all() and lp.grad.isfinite().all()


def test_unbiased_kl_and_unknown_type():
    d, ratio = t64([0.3, -0.2]), t64([1.5, 0.5])
    close(pu.compute_approx_kl(d, torch.zeros(2), "k3", ratio), ratio * pu.compute_approx_kl(d, torch.zeros(2), "k3"))
    with pytest.raises(ValueError, match="'k4': use k1, k2"):
        pu.compute_approx_kl(d, d, "k4")


def test_unbiased_kl_has_the_gradient_of_the_true_kl():
    """Summed over all tokens of an old policy, ratio * k3 has value and gradient of KL(pi || ref), for any pi."""
    logits = t64([0.3, -0.4, 1.0]).requires_grad_()
    old, ref = torch.softmax(t64([0.1, 0.2, 0.0]), 0), torch.log_softmax(t64([0.5, 0.5, -0.2]), 0)
    lp = torch.log_softmax(logits, 0)
    estimate = (old * pu.compute_approx_kl(lp, ref, "k3", (lp - old.log()).exp())).sum()
    true = (lp.exp() * (lp - ref)).sum()
    close(estimate, true.item(), 1e-12)
    g1, g2 = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (estimate, true))
    close(g1, g2, 1e-12)


# -- policy loss --------------------------------------------------------------------------------------------------


def test_worked_policy_loss():
    kl = t64([-math.log(1.5), -math.log(0.5)])
    loss, clipped = pu.compute_policy_loss(kl, torch.ones(2), 0.2, 0.28)
    close(loss, [-1.28, -0.5]), close(clipped, [1, 0])
    loss, clipped = pu.compute_policy_loss(kl, -torch.ones(2), 0.2, 0.28)
    close(loss, [1.5, 0.8]), close(clipped, [0, 1])


@pytest.mark.parametrize(
    ("reward", "loss", "clip", "grad"),
    [
        (1.0, [-1.28, -0.67032, -1], [1, 0, 0], [0, -0.67032, -1]),
        (-1.0, [1.349859, 0.8, 1], [0, 1, 0], [1.349859, 0, 1]),
        (0.0, [0, 0, 0], [0, 0, 0], [0, 0, 0]),
    ],
)
def test_worked_binary_rl(reward, loss, clip, grad):
    new = NEW.clone().requires_grad_()
    adv = pu.get_grpo_returns(t64([reward]), [torch.zeros_like(OLD)])[0]
    got, clipped = pu.compute_policy_loss(OLD - new, adv, 0.2, 0.28)
    close(got, loss), close(clipped, clip)
    got.sum().backward()
    close(new.grad, grad)


def test_worked_on_policy_distillation():
    (adv,) = pu.get_on_policy_distillation_advantages([TEACHER], [OLD], [torch.ones(3)])
    close(adv, [0.6, -0.6, 0.5])
    loss, clipped = pu.compute_policy_loss(OLD - NEW, adv, 0.2, 0.2)
    close(loss, [-0.72, 0.48, -0.5]), close(clipped, [1, 1, 0]), close(loss.mean(), -0.246667)
    middle = (TEACHER + OLD) / 2  # a group of two, whose members are scored on the same tokens
    close(adv, 2 * (TEACHER - middle))


@pytest.mark.parametrize(
    ("w_opd", "w_rl", "reward", "mean"),
    [(1, 1, 1, -1.272043), (1, 1, -1, 0.773315), (1, 1, 0, -0.262667), (0.5, 2, 1, -2.111181)],
)
def test_worked_combine(w_opd, w_rl, reward, mean):
    adv = w_opd * (TEACHER - OLD) + w_rl * reward
    close(pu.compute_policy_loss(OLD - NEW, adv, 0.2, 0.28)[0].mean(), mean)


def test_worked_dual_clip():
    close(pu.compute_policy_loss(t64([-math.log(4)]), t64([-1.0]), 0.2, 0.28, 3.0)[0], [3.0])
    close(pu.compute_policy_loss(t64([-math.log(4)]), t64([-1.0]), 0.2, 0.28)[0], [4.0])
    close(pu.compute_policy_loss(t64([-math.log(4)]), t64([1.0]), 0.2, 0.28, 3.0)[0], [-1.28])
    with pytest.raises(ValueError, match="above 1"):
        pu.compute_policy_loss(t64([0.0]), t64([1.0]), 0.2, 0.28, 1.0)


def slow_policy_loss(kl, adv, low, high, c):
    ratio = math.exp(max(-20.0, min(20.0, -kl)))
    plain, clipped = -ratio * adv, -min(max(ratio, 1 - low), 1 + high) * adv
    loss = max(plain, clipped)
    if c is not None and adv < 0:
        loss = min(loss, -c * adv)
    return loss, float(clipped > plain)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.one_of(FLOATS, st.sampled_from([-200.0, 200.0])), FLOATS), max_size=12),
    st.sampled_from([0.0, 0.1, 0.2]), st.sampled_from([0.2, 0.28, 5.0]), st.sampled_from([None, 1.5, 3.0]),
)  # fmt: skip
def test_policy_loss_equals_slow_form(pairs, low, high, c):
    kl, adv = t64([p[0] for p in pairs]), t64([p[1] for p in pairs])
    loss, clipped = pu.compute_policy_loss(kl, adv, low, high, c)
    want = [slow_policy_loss(k, a, low, high, c) for k, a in pairs]
    np.testing.assert_allclose(loss.numpy(), [w[0] for w in want], rtol=1e-12)
    close(clipped, [w[1] for w in want])


def test_policy_loss_of_an_outlier_is_finite():
    new = torch.tensor([200.0, -200.0, 0.1], requires_grad=True)
    loss, _ = pu.compute_policy_loss(-new, torch.tensor([-1.0, -1.0, -1.0]), 0.2, 0.28)
    loss.sum().backward()
    assert loss.isfinite().all() and new.grad.isfinite().all()
    assert pu.clamp_log_ratio(new)[1].tolist() == [1.0, 1.0, 0.0]
    assert pu.clamp_log_ratio(t64([20.0, -20.0, 20.01]))[1].tolist() == [0.0, 0.0, 1.0]  # the bound is inside


def test_cispo():
    new = NEW.clone().requires_grad_()
    adv = t64([1.0, -2.0, 0.5])
    loss, clipped = pu.compute_cispo_loss(OLD - new, new, adv, 0.2, 0.28)
    weight = [1.28, 0.8, 1.0]
    close(loss, [-w * a * lp for w, a, lp in zip(weight, adv.tolist(), NEW.tolist(), strict=True)])
    close(clipped, [1, 1, 0])
    loss.sum().backward()
    close(new.grad, [-w * a for w, a in zip(weight, adv.tolist(), strict=True)])  # no token loses its gradient


def test_gspo_is_the_masked_mean_over_the_sequence():
    new = [t64([0.1, 9.0, 0.3]).requires_grad_(), t64([]), t64([float("nan"), 1.0])]
    old = [t64([0.0, float("inf"), 0.1]), t64([]), t64([0.0, 0.0])]
    masks = [t64([1, 0, 1]), t64([]), t64([0, 0])]
    kl = pu.compute_gspo_kl(new, old, masks)
    close(kl[0], [-0.15] * 3), close(kl[2], [0, 0])
    assert kl[1].shape == (0,)
    kl[0].sum().backward()
    close(new[0].grad, [-1.5, 0, -1.5])


def test_value_loss():
    value, old, ret = t64([1.0, 0.0, 2.0]), t64([0.0, 0.1, 2.0]), t64([2.0, 0.0, 2.0])
    loss, clipped = pu.compute_value_loss(value, old, ret, 0.2)
    close(loss, [max(1.0, 1.8**2) / 2, 0.0, 0.0]), close(clipped, [1, 0, 0])
    loss, clipped = pu.compute_value_loss(t64([-1.0]), t64([0.0]), t64([-2.0]), 0.2)  # the bound below
    close(loss, [1.8**2 / 2]), close(clipped, [1])
    value, old = t64([0.1]), t64([0.7])
    assert value != old + (value - old)  # at the bound the value itself counts, not its rounded twin
    loss, clipped = pu.compute_value_loss(value, old, t64([5.0]), (value - old).abs().item())
    assert loss == (value - 5.0).square() / 2 and clipped == 0


def test_opsm_masks_negative_samples_that_drifted():
    new, old = [t64([-2.0, -9.0]), t64([-1.0]), t64([-5.0])], [t64([-1.0, 5.0]), t64([-1.0]), t64([-1.0])]
    adv, masks = [t64([-1.0, -1.0]), t64([-1.0]), t64([1.0])], [t64([1, 0]), t64([1]), t64([1])]
    keep, hit = pu.compute_opsm_mask(new, old, adv, masks, delta=0.5)
    assert [k.tolist() for k in keep] == [[0.0, 1.0], [1.0], [1.0]] and hit == 1
    keep, hit = pu.compute_opsm_mask(new, old, adv, masks, delta=1.0)  # a drift of exactly delta is not above it
    assert all(k.all() for k in keep) and hit == 0


# -- advantages ---------------------------------------------------------------------------------------------------


@st.composite
def episodes(draw):
    n = draw(st.integers(1, 4))
    out = []
    for _ in range(n):
        length = draw(st.integers(0, 9))
        row = lambda values, length=length: draw(st.lists(values, min_size=length, max_size=length))  # noqa: E731
        out.append((row(FLOATS), row(FLOATS), row(st.sampled_from([0.0, 1.0])), draw(FLOATS)))
    return out


def slow_gae(rewards, values, mask, gamma, lambd):
    """Sum over all later trained tokens, straight from the definition."""
    at = [t for t, m in enumerate(mask) if m]
    delta = [rewards[t] + (gamma * values[at[k + 1]] if k + 1 < len(at) else 0.0) - values[t] for k, t in enumerate(at)]
    adv, ret = [0.0] * len(mask), [0.0] * len(mask)
    for k, t in enumerate(at):
        adv[t] = sum((gamma * lambd) ** (j - k) * delta[j] for j in range(k, len(at)))
        ret[t] = adv[t] + values[t]
    return adv, ret


@settings(max_examples=60, deadline=None)
@given(episodes(), st.sampled_from([0.0, 0.9, 1.0]), st.sampled_from([0.0, 0.95, 1.0]))
def test_gae_and_reinforce_plus_plus_equal_slow_forms(batch, gamma, lambd):
    kl, values, masks = ([t64(e[i]) for e in batch] for i in (0, 1, 2))
    rewards = [e[3] for e in batch]
    token_rewards = pu.get_token_rewards(rewards, kl, masks, 0.1)
    for e, got in zip(batch, token_rewards, strict=True):
        want = [-0.1 * k if m else 0.0 for k, m in zip(e[0], e[2], strict=True)]
        if any(e[2]):
            want[max(t for t, m in enumerate(e[2]) if m)] += e[3]
        close(got, want, 1e-12)
    adv, ret = pu.get_advantages_and_returns(values, token_rewards, masks, gamma, lambd)
    rpp = pu.get_reinforce_plus_plus_returns(rewards, kl, masks, 0.1, gamma)
    base = pu.get_reinforce_plus_plus_baseline_advantages(rewards, kl, masks, 0.1)
    for i, e in enumerate(batch):
        want_adv, want_ret = slow_gae(token_rewards[i].tolist(), e[1], e[2], gamma, lambd)
        close(adv[i], want_adv, 1e-9), close(ret[i], want_ret, 1e-9)
        close(rpp[i], slow_gae(token_rewards[i].tolist(), [0.0] * len(e[1]), e[2], gamma, 1.0)[0], 1e-9)
        close(base[i], [e[3] - 0.1 * k if m else 0.0 for k, m in zip(e[0], e[2], strict=True)], 1e-12)


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(0, 40), chunk=st.integers(1, 17), gamma=st.sampled_from([0.0, 0.99, 1.0]),
    lambd=st.sampled_from([0.0, 0.9, 1.0]), seed=st.integers(0, 99),
)  # fmt: skip
def test_chunked_gae_equals_plain(length, chunk, gamma, lambd, seed):
    g = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(3, length, generator=g, dtype=torch.float64) for _ in range(2))
    adv, ret = pu.chunked_gae(rewards, values, gamma, lambd, chunk)
    for i in range(3):
        want_adv, want_ret = pu.vanilla_gae(rewards[i], values[i], gamma, lambd)
        close(adv[i], want_adv, 1e-9), close(ret[i], want_ret, 1e-9)


def test_gae_of_long_rows_stays_finite():
    adv, _ = pu.chunked_gae(torch.ones(1, 5000), torch.zeros(1, 5000), 0.5, 0.5)
    close(adv[0, 0], 1 / (1 - 0.25))
    for rewards, values in ((torch.ones(3), torch.zeros(3)), (torch.ones(1, 3), torch.zeros(1, 2))):
        with pytest.raises(ValueError, match=r"\[B, T\]"):
            pu.chunked_gae(rewards, values, 1.0, 1.0)


def test_masked_garbage_reaches_no_advantage():
    bad = float("nan")
    kl, values, masks = [t64([0.1, bad, 0.2])], [t64([0.5, float("inf"), 0.25])], [t64([1, 0, 1])]
    clean_kl, clean_values = [t64([0.1, 0.0, 0.2])], [t64([0.5, 0.0, 0.25])]
    rewards = pu.get_token_rewards([1.0], kl, masks, 0.1)
    assert torch.equal(rewards[0], pu.get_token_rewards([1.0], clean_kl, masks, 0.1)[0])
    for a, b in zip(
        pu.get_advantages_and_returns(values, rewards, masks, 0.9, 0.9),
        pu.get_advantages_and_returns(clean_values, rewards, masks, 0.9, 0.9),
        strict=True,
    ):
        assert torch.equal(a[0], b[0])
    for teacher, old in ((bad, 0.0), (0.0, bad)):
        (opd,) = pu.get_on_policy_distillation_advantages([t64([teacher, 1.0])], [t64([old, 2.0])], [t64([0, 1])])
        assert opd.tolist() == [0.0, -1.0]
    (base,) = pu.get_reinforce_plus_plus_baseline_advantages([1.0], kl, masks, 0.1)
    close(base, [0.99, 0.0, 0.98])


def test_credit_is_no_path_for_gradients():
    values = [t64([0.5, 0.25]).requires_grad_()]
    adv, ret = pu.get_advantages_and_returns(values, [t64([0.0, 1.0])], [t64([1, 1])], 0.9, 0.9)
    assert not adv[0].requires_grad and not ret[0].requires_grad
    assert pu.get_advantages_and_returns([], [], [], 0.9, 0.9) == ([], [])


def test_grpo_returns_count_and_spans():
    out = pu.get_grpo_returns(torch.tensor([0.5, -1.0]), [torch.zeros(2), torch.zeros(0)])
    assert out[0].tolist() == [0.5, 0.5] and out[1].shape == (0,)
    with pytest.raises(ValueError, match="1 rewards for 2 samples"):
        pu.get_grpo_returns(torch.tensor([1.0]), [torch.zeros(1)] * 2)
    close(pu.add_span_advantages(t64([0.8] * 5), [(1, 2), (3, 4)], [1.2, -0.5]), [0.8, 2.0, 0.8, 0.3, 0.8])
    edges, mask = [(0, 1), (2, 2), (3, 5)], t64([1, 1, 1, 0, 1])
    close(pu.add_span_advantages(t64([0.8] * 5), edges, [1.0, 9.0, 2.0], mask), [1.8, 0.8, 0.8, 0.0, 2.8])
    for start, end in ((1, 4), (-1, 1), (2, 1)):
        with pytest.raises(ValueError, match=rf"span \[{start}, {end}\) is outside a response of 3"):
            pu.add_span_advantages(torch.zeros(3), [(start, end)], [1.0])


# -- whitening ----------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.tuples(FLOATS, st.booleans()), max_size=6), max_size=5))
def test_whiten_equals_numpy(rows):
    values, masks = [t64([v for v, _ in r]) for r in rows], [t64([float(m) for _, m in r]) for r in rows]
    out = pu.whiten(values, masks)
    picked = np.array([v for r in rows for v, m in r if m])
    for got, row in zip(out, rows, strict=True):
        if picked.size and picked.std() > 1e-9:
            close(got, [(v - picked.mean()) / picked.std() if m else 0.0 for v, m in row], 1e-9)
        else:
            assert not got.any()


def test_whiten_keeps_digits_and_zeros():
    g = torch.Generator().manual_seed(0)
    x = 10.0 + 1e-3 * torch.randn(1000, generator=g, dtype=torch.float64)
    (out,) = pu.whiten([x], [torch.ones(1000)])
    assert out.std(unbiased=False) == pytest.approx(1.0, abs=1e-9) and abs(out.mean()) < 1e-9
    (out,) = pu.whiten([torch.full((8,), 0.95)], [torch.ones(8)])
    assert (out == 0.0).all()
    (out,) = pu.whiten([torch.tensor([1.0, float("nan"), 3.0])], [torch.tensor([1.0, 0.0, 1.0])])
    assert out.tolist() == [-1.0, 0.0, 1.0]
    assert pu.whiten([t64([-0.5, 0.5])], [torch.ones(2)])[0].tolist() == [-1.0, 1.0]  # equal sizes, no equal values
    assert pu.whiten([], []) == []
    # The mean's own rounding error is taken out of values that hardly differ; a spread too small to square is none.
    (out,) = pu.whiten([1e12 + t64([1, 0, 0])], [torch.ones(3)])
    close(out, [2**0.5, -(0.5**0.5), -(0.5**0.5)], 1e-9)
    assert pu.whiten([t64([0.0, 1e-200])], [torch.ones(2)])[0].tolist() == [0.0, 0.0]


def _whiten_on_rank(rank, world, port, values, masks):
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    mine = ([0, 1], [2], [])[rank]  # a rank without samples takes part
    levels = [torch.full_like(v, i // 2) for i, v in enumerate(values)]
    fillings = values, [torch.full_like(v, 0.95) for v in values], levels
    out = [pu.whiten([v[i] for i in mine], [masks[i] for i in mine], torch.distributed.group.WORLD) for v in fillings]
    torch.distributed.destroy_process_group()
    return [[x.tolist() for x in rows] for rows in out]


def test_whiten_over_ranks_equals_one_process():
    values, masks = [t64([1.0, 5.0]), t64([2.0]), t64([-3.0, 7.0, 0.5])], [t64([1, 1]), t64([1]), t64([1, 0, 1])]
    results = run_ranks(3, _whiten_on_rank, values, masks)
    spread, equal, apart = ([row for rank in results for row in rank[i]] for i in range(3))
    for got, want in zip(spread, pu.whiten(values, masks), strict=True):
        close(np.array(got), want.numpy(), 1e-12)
    assert equal == [[0.0] * 2, [0.0], [0.0] * 3]
    # Constant on each rank, but not over all: three tokens of 0 and two of 1.
    low, high = -((2 / 3) ** 0.5), (3 / 2) ** 0.5
    for got, want in zip(apart, [[low] * 2, [low], [high, 0.0, high]], strict=True):
        close(np.array(got), want, 1e-12)


# -- log-probs ----------------------------------------------------------------------------------------------------


def test_compute_log_probs_and_entropy():
    logits, tokens = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 0.0]]), torch.tensor([0, 2])
    want = torch.log_softmax(logits, -1)
    close(pu.compute_log_probs(logits, tokens), want.gather(1, tokens[:, None]))
    close(pu.compute_entropy_from_logits(logits), -(want.exp() * want).sum(-1))
    lp, entropy = pu.calculate_log_probs_and_entropy(logits, tokens, with_entropy=True)
    assert lp.shape == (2, 1) and entropy.shape == (2,)
    assert pu.calculate_log_probs_and_entropy(logits, tokens)[1] is None  # not asked for


def test_temperature_must_agree_between_teacher_and_student():
    """What a teacher scored at T=1 and a student at T=0.6 would leave as advantage, for the same logits."""
    logits = torch.tensor([[2.0, 1.0, 0.0]] * 3)
    tokens = torch.arange(3)
    gap = pu.compute_log_probs(logits, tokens) - pu.compute_log_probs(logits / 0.6, tokens)
    close(gap.squeeze(1), [-0.205033, 0.461634, 1.1283])
