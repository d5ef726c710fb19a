"""Rewards to scalars: worked numbers, and slow references on exact fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.utils import ppo_utils as pu

BINARY = [1, 0, 0, 1, 0, 0, 0, 0]
ONE_GROUP = [0] * 8


def close(got, want, tol=1e-6):
    np.testing.assert_allclose(got, want, rtol=0, atol=tol)


# -- worked numbers -----------------------------------------------------------------------------------------------


def test_worked_binary_group():
    close(pu.maxrl(BINARY, ONE_GROUP, centred=False), [4, 0, 0, 4, 0, 0, 0, 0])
    close(pu.maxrl(BINARY, ONE_GROUP), [3, -1, -1, 3, -1, -1, -1, -1])
    close(pu.tailrl(BINARY, ONE_GROUP), [3, -1, -1, 3, -1, -1, -1, -1])
    close(pu.group_norm(BINARY, ONE_GROUP), [1.620182 if r else -0.540061 for r in BINARY])
    close(pu.group_norm(BINARY, ONE_GROUP, ddof=0), [1.732047 if r else -0.577349 for r in BINARY])
    close(pu.rloo(BINARY, ONE_GROUP), [0.857143 if r else -0.285714 for r in BINARY])
    close(pu.group_norm(BINARY, ONE_GROUP, std=False), [0.75 if r else -0.25 for r in BINARY])
    root = math.sqrt((1 - 0.25) / 0.25)
    close(pu.maxrl(BINARY, ONE_GROUP), pu.group_norm(BINARY, ONE_GROUP, ddof=0) * root, 1e-5)


def test_worked_tailrl():
    r, ids = [0.2, 0.9, 0.5, 0.5], [7] * 4
    close(pu.tailrl(r, ids, centred=False), [0.2, 2.2, 0.6, 0.6])
    close(pu.tailrl(r, ids), [-0.7, 1.3, -0.3, -0.3])
    close(pu.tailrl(np.array(r) + 0.05, ids), [-0.7, 1.3, -0.3, -0.3])
    close(pu.tailrl([0.7], [0]), [0.0])
    assert (pu.tailrl([0.4] * 4, ids) == 0.0).all()
    close(pu.tailrl([-1.0, 1.0], [0, 0], low=-1.0, high=1.0), [-1.0, 1.0])
    close(pu.tailrl([-1.0, 0.0, 1.0], [0] * 3, centred=False, low=-1.0, high=1.0), [0.0, 0.75, 2.25])


def test_worked_ragged_groups():
    got = pu.group_norm([1, 0, 0, 0, 0, 1], [0, 0, 1, 1, 1, 1], std=False)
    close(got, [0.5, -0.5, -0.25, -0.25, -0.25, 0.75])


def test_worked_best_of_n():
    r, ids = [1, -1, 0, 1], [0] * 4
    close(pu.group_norm(r, ids, std=False), [0.75, -1.25, -0.25, 0.75])
    close(pu.group_norm(r, ids), [0.783349, -1.305581, -0.261116, 0.783349])
    close(pu.group_norm(r, ids, ddof=0), [0.904533, -1.507555, -0.301511, 0.904533])
    close(pu.rloo(r, ids), [1, -1.666667, -0.333333, 1])
    close(pu.group_norm([1, -1, 1], [0] * 3, std=False), [0.666667, -1.333333, 0.666667])
    close(pu.group_norm([1, -1, 1, 1, 0, -1, 1, 1], [0] * 8)[[0, 1, 4]], [0.68222, -1.500885, -0.409332])


def test_worked_steps_and_late_rewards():
    """A value per (group, step) over trajectories; and a reward that a later turn corrects by half."""
    got = pu.group_norm([1, -1, 1, 1, -1], [(0, 0), (0, 0), (0, 1), (0, 1), (0, 2)], ddof=0)
    close(got, [0.999999, -0.999999, 0, 0, 0])
    close(pu.group_norm([0.5 * 1 + 0.5 * -1, -1, 0, 1], [0] * 4, std=False), [0, -1, 0, 1])


def test_worked_memory_advantage():
    """MemPO: outcome and memory advantages of one trajectory, token by token."""
    log_p = np.log([0.5, 0.4, 0.4])
    assert pu.geometric_mean_probability(log_p) == pytest.approx(0.08 ** (1 / 3), abs=1e-9)
    close(0.08 ** (1 / 3) - 0.6, -0.169113)
    outcome = pu.group_norm([1, 0, 0, 1], [0] * 4)
    close(outcome, [0.866024, -0.866024, -0.866024, 0.866024])
    pool = [0.30, -0.10, -0.20, 0.05, 0.15, -0.25, 0.0]
    memory = pu.memory_advantages(pool, ["question"] * 7)
    close(memory, [1.578572, -0.477243, -0.991196, 0.293688, 0.807641, -1.248173, 0.036711])
    assert (pu.memory_advantages([0.1] * 3, [0] * 3) == 0.0).all()
    import torch

    mask = torch.tensor([1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1.0])
    base = pu.get_grpo_returns(torch.tensor(outcome[:1]), [torch.zeros(14, dtype=torch.float64)])[0]
    got = pu.add_span_advantages(base, [(5, 7), (10, 11)], memory[:2], mask)
    want = [0.866024] * 3 + [0, 0] + [2.444595] * 2 + [0.866024] * 2 + [0, 0.388781] + [0.866024] * 3
    close(got.numpy(), want)


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({"mode": "prior"}, [1, -2, 1, 0.666667, -0.5, -1.4]),
        ({"mode": "inclusive"}, [0, -1, 0.666667, 0.5, -0.4, -1.166667]),
        ({"mode": "prior", "b0": 0.2, "k0": 2.0}, [0.8, -1.466667, 0.9, 0.72, -0.4, -1.342857]),
        ({"mode": "ema", "alpha": 0.3}, [1, -1.3, 1.09, 0.763, -0.4659, -1.32613]),
        ({"mode": "ema"}, [1, -1.1, 1.01, 0.909, -0.1819, -1.16371]),
    ],
)
def test_worked_session_baseline(options, want):
    rewards = [1, -1, 1, 1, 0, -1]
    close(pu.session_baseline(rewards, ["s"] * 6, **options), want)
    # Another session in between, and a turn that nobody judged, change nothing.
    mixed = [1, 5, -1, None, 1, 1, 0, -1]
    ids = ["s", "t", "s", "s", "s", "s", "s", "s"]
    got = pu.session_baseline(mixed, ids, **options)
    close(got[[0, 2, 4, 5, 6, 7]], want)
    assert got[3] == 0.0


def test_worked_session_that_always_wins_or_loses():
    close(pu.session_baseline([1] * 4, [0] * 4), [1, 0, 0, 0])
    close(pu.session_baseline([-1] * 3, [0] * 3), [-1, 0, 0])


# -- faults of the field ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.95, 100.3, 0.1, -7.7, 1e-9, 1e9, 0.0])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 64])
def test_equal_rewards_are_exactly_zero(value, size):
    r, ids = [value] * size, [3] * size
    for result in (pu.group_norm(r, ids), pu.group_norm(r, ids, std=False), pu.rloo(r, ids)):
        assert (result == 0.0).all()
    if 0 <= value <= 1:
        assert (pu.maxrl(r, ids) == 0.0).all() and (pu.tailrl(r, ids) == 0.0).all()


def test_large_offset_keeps_its_digits():
    r = np.array([1, 0, 0, 1.0])
    close(pu.group_norm(r + 1e4, [0] * 4), [0.866024, -0.866024, -0.866024, 0.866024])
    close(pu.group_norm(r + 1e12, [0] * 4), [0.866024, -0.866024, -0.866024, 0.866024])
    # A mean that float64 cannot hold: its rounding error does not stay in the result.
    assert pu.group_norm(np.array([1, 0, 0]) + 1e12, [0] * 3, std=False).sum() == pytest.approx(0.0, abs=1e-12)


def test_group_of_one_and_failed_groups():
    assert pu.group_norm([0.7], [0])[0] == 0.0 and pu.rloo([0.7], [0])[0] == 0.0
    assert pu.maxrl([1.0], [0])[0] == 0.0 and pu.maxrl([1.0], [0], centred=False)[0] == 1.0
    assert (pu.maxrl([0, 0, 0], [0] * 3) == 0).all() and (pu.maxrl([0, 0], [0] * 2, centred=False) == 0).all()
    assert (pu.maxrl([1, 1], [0] * 2, centred=False) == 1).all()


def test_zero_variance_groups_are_counted():
    assert pu.count_zero_variance_groups([1, 1, 0, 1, 5], [0, 0, 1, 1, 2]) == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pu.maxrl([1, -1], [0, 0]), r"maxrl needs rewards in \[0, 1\]; reward 1 is -1"),
        (lambda: pu.tailrl([0.5, 2.0], [0, 0]), r"tailrl needs rewards in \[0, 1\]; reward 1 is 2"),
        (lambda: pu.tailrl([float("nan")], [0]), "reward 0 is nan"),
        (lambda: pu.group_norm([1.0, float("inf")], [0, 0]), r"rewards at \[1\] are not finite"),
        (lambda: pu.group_norm([1.0, 2.0], [0]), "one group id per reward"),
        (lambda: pu.session_baseline([1.0], [0], mode="other"), "mode 'other'"),
        (lambda: pu.geometric_mean_probability([]), "without tokens"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# -- properties against exact arithmetic --------------------------------------------------------------------------

rewards_01 = st.lists(st.sampled_from([i / 16 for i in range(17)]), min_size=1, max_size=24)


@st.composite
def ragged(draw):
    r = draw(rewards_01)
    return r, [draw(st.integers(0, 4)) for _ in r]


def exact(rewards, ids, one):
    """Applies `one(list of Fractions) -> list` per group, in plain Python."""
    out = [None] * len(rewards)
    for g in set(ids):
        rows = [i for i, x in enumerate(ids) if x == g]
        for i, value in zip(rows, one([Fraction(rewards[i]) for i in rows]), strict=True):
            out[i] = float(value)
    return out


def ref_norm(std):
    def one(r):
        mean = sum(r) / len(r)
        if len(set(r)) == 1:
            return [0] * len(r)
        variance = sum((x - mean) ** 2 for x in r) / (len(r) - 1)
        scale = math.sqrt(variance) + 1e-6 if std else 1.0
        return [float(x - mean) / scale for x in r]

    return one


def ref_rloo(r):
    return [x - (sum(r) - x) / (len(r) - 1) if len(r) > 1 else 0 for x in r]


def ref_maxrl(r):
    p = sum(r) / len(r)
    return [(x - p) / p if p and len(r) > 1 else 0 for x in r]


def ref_tail(r):
    """The integral of N * 1[r_i > tau] / #{r > tau} over tau, minus its mean; by exact steps."""
    edges = sorted({Fraction(0), *r})
    weights = []
    for x in r:
        total = Fraction(0)
        for low, high in zip(edges, edges[1:], strict=False):
            if x >= high:
                total += (high - low) * len(r) / sum(y >= high for y in r)
        weights.append(total)
    mean = sum(weights) / len(weights)
    return [w - mean for w in weights]


@settings(max_examples=80, deadline=None)
@given(ragged())
def test_estimators_equal_exact_references(batch):
    rewards, ids = batch
    close(pu.group_norm(rewards, ids), exact(rewards, ids, ref_norm(True)), 1e-9)
    close(pu.group_norm(rewards, ids, std=False), exact(rewards, ids, ref_norm(False)), 1e-12)
    close(pu.rloo(rewards, ids), exact(rewards, ids, ref_rloo), 1e-12)
    close(pu.maxrl(rewards, ids), exact(rewards, ids, ref_maxrl), 1e-10)
    close(pu.tailrl(rewards, ids), exact(rewards, ids, ref_tail), 1e-12)


@settings(max_examples=40, deadline=None)
@given(ragged(), st.randoms(use_true_random=False))
def test_order_of_samples_does_not_matter(batch, random):
    rewards, ids = batch
    order = list(range(len(rewards)))
    random.shuffle(order)
    for estimator in (pu.group_norm, pu.rloo, pu.maxrl, pu.tailrl):
        plain = estimator(rewards, ids)
        shuffled = estimator([rewards[i] for i in order], [ids[i] for i in order])
        close(shuffled, plain[order], 1e-12)


@settings(max_examples=40, deadline=None)
@given(rewards_01)
def test_mean_of_uncentred_weights(rewards):
    ids = [0] * len(rewards)
    assert pu.tailrl(rewards, ids, centred=False).mean() == pytest.approx(max(rewards), abs=1e-12)
    solved = any(rewards)
    assert pu.maxrl(rewards, ids, centred=False).mean() == pytest.approx(1.0 if solved else 0.0, abs=1e-12)
