"""Importance weights between engine and trainer: bounds, levels, veto, masks."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.config import Args
from slime.utils import ppo_utils as pu


def t64(x):
    return torch.tensor(x, dtype=torch.float64)


def test_tis_clamps_on_both_sides():
    weight, clipped = pu.tis_weights(t64([0.0, math.log(3), math.log(0.1)]), t64([0.0, 0.0, 0.0]), 0.5, 2.0)
    np.testing.assert_allclose(weight, [1.0, 2.0, 0.5])
    assert clipped.tolist() == [0.0, 1.0, 1.0]


def test_defaults_and_bounds_of_mis():
    def weights(d, mask, **options):
        return pu.mis_weights([t64(d)], [torch.zeros(len(d))], [t64(mask)], **options)[0][0].tolist()

    for mode in ("truncate", "clip"):  # at 2, and not from below
        assert weights([math.log(3), math.log(0.2)], [1, 1], mode=mode) == pytest.approx([2.0, 0.2])
    assert weights([0.0], [1], mode="mask", lower=1.0, upper=1.0) == [1.0]  # bounds are inside
    assert weights([30.0], [1], upper=1e20) == [pytest.approx(math.exp(20))]
    assert weights([-30.0], [1]) == [pytest.approx(math.exp(-20))]
    assert weights([math.log(0.1)], [1], veto=0.1) == [pytest.approx(0.1)]  # a ratio of exactly veto stays
    assert weights([math.log(2), 9.0], [1, 0], veto=1.5) == pytest.approx([2.0, 0.0])  # a masked token vetoes nothing
    with pytest.raises(ValueError, match="needed 0 <= lower"):
        pu.mis_weights([], [], [], lower=-0.5)


def test_worked_draft_weights():
    p, q = t64([0.5, 0.3, 0.2]), t64([0.2, 0.5, 0.3])
    np.testing.assert_allclose(pu.tis_weights(p.log(), q.log(), 0.0, 2.0)[0], [2, 0.6, 0.666667], atol=1e-6)


def slow(d, mask, level, mode, lower, upper, veto):
    at = [t for t, m in enumerate(mask) if m]
    out = [0.0] * len(d)
    for t in at:
        if level == "token":
            x = d[t]
        else:
            x = sum(d[s] for s in at) / (len(at) if level == "geometric" else 1)
        w = math.exp(max(-20.0, min(20.0, x)))
        inside = lower <= w <= upper
        out[t] = {
            "truncate": min(w, upper),
            "clip": min(max(w, lower), upper),
            "mask": w if inside else 0.0,
            "reject": float(inside),
        }[mode]
    if veto is not None and any(d[t] < math.log(veto) for t in at):
        return [0.0] * len(d)
    return out


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.tuples(st.floats(-4, 4), st.sampled_from([0.0, 1.0])), max_size=7),
    level=st.sampled_from(["token", "sequence", "geometric"]),
    mode=st.sampled_from(["truncate", "clip", "mask", "reject"]),
    veto=st.sampled_from([None, 0.1]),
)
def test_mis_equals_slow_form(rows, level, mode, veto):
    d, mask = [r[0] for r in rows], [r[1] for r in rows]
    (weights,), (keep,) = pu.mis_weights(
        [t64(d)], [torch.zeros(len(d))], [t64(mask)], level=level, mode=mode, lower=0.5, upper=2.0, veto=veto
    )
    np.testing.assert_allclose(weights.numpy(), slow(d, mask, level, mode, 0.5, 2.0, veto), rtol=1e-12)
    assert ((weights != 0) <= (keep != 0)).all() and ((keep != 0) <= (t64(mask) != 0)).all()


@pytest.mark.parametrize("function", [pu.vanilla_tis_function, pu.icepop_function, "sequence mask"])
def test_hooks_ignore_masked_garbage_and_pass_no_gradient(function):
    args = Args(tis_clip=2.0, tis_clip_low=0.5)
    if function == "sequence mask":
        function, args = pu.vanilla_tis_function, args.replace(tis_level="sequence", tis_mode="mask", tis_veto=1e-3)
    masks = [torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1.0])]

    def run(garbage):
        train = [torch.tensor([-1.0, garbage, -1.5], requires_grad=True), torch.tensor([-1.0])]
        rollout = [torch.tensor([-1.1, -garbage, -1.4]), torch.tensor([-5.0])]
        loss = torch.tensor([1.0, garbage, 2.0, 3.0], requires_grad=True)
        out, left, metrics = function(
            args=args, pg_loss=loss, train_log_probs=train, rollout_log_probs=rollout, loss_masks=masks,
            total_lengths=[5, 3], response_lengths=[3, 1],
        )  # fmt: skip
        torch.where(torch.cat(left) > 0, out, 0.0).sum().backward()
        assert train[0].grad is None
        return out.detach(), torch.cat(left), loss.grad, *metrics.values()

    clean = run(0.5)
    for garbage in (float("nan"), float("inf"), -300.0):
        for a, b in zip(run(garbage), clean, strict=True):
            assert torch.equal(a, b)


def test_icepop_drops_what_tis_truncates():
    args = Args(tis_clip=2.0, tis_clip_low=0.5)
    kw = dict(
        args=args, pg_loss=torch.ones(3), train_log_probs=[torch.tensor([0.0, 1.0, -1.0])],
        rollout_log_probs=[torch.zeros(3)], loss_masks=[torch.ones(3)],
    )  # fmt: skip
    tis, tis_masks, _ = pu.vanilla_tis_function(**kw)
    pop, pop_masks, metrics = pu.icepop_function(**kw)
    assert tis.tolist() == [1.0, 2.0, 0.5] and tis_masks[0].tolist() == [1, 1, 1]
    assert pop.tolist() == [1.0, 0.0, 0.0] and pop_masks[0].tolist() == [1, 0, 0]
    assert metrics["tis_rejected"].tolist() == [0, 1, 1]
    half = {**kw, "train_log_probs": [torch.tensor([math.log(1.5), 1.0, math.log(0.6)])]}
    for function, distance in ((pu.vanilla_tis_function, [0.5, 1.0, 0.4]), (pu.icepop_function, [0.5, 0.0, 0.4])):
        assert function(**half)[2]["tis_abs"].tolist() == pytest.approx(distance)  # |weight - 1| of what is left
    by_flags, flag_masks, _ = pu.vanilla_tis_function(**{**kw, "args": args.replace(tis_mode="mask")})
    assert torch.equal(by_flags, pop) and torch.equal(flag_masks[0], pop_masks[0])
    sequence, _, _ = pu.vanilla_tis_function(**{**kw, "args": args.replace(tis_level="sequence", tis_mode="truncate")})
    assert sequence.tolist() == [1.0] * 3  # exp(0 + 1 - 1)
    vetoed, masks, _ = pu.vanilla_tis_function(**{**kw, "args": args.replace(tis_veto=0.4)})
    assert vetoed.tolist() == masks[0].tolist() == [0.0] * 3


def test_a_micro_batch_without_samples():
    nothing = dict(pg_loss=torch.zeros(0), train_log_probs=[], rollout_log_probs=[], loss_masks=[])
    for args in (Args(), Args(tis_mode="mask")):
        loss, masks, metrics = pu.vanilla_tis_function(args=args, **nothing)
        assert loss.shape == (0,) and masks == [] and all(m.shape == (0,) for m in metrics.values())


def test_bad_names_and_bounds():
    with pytest.raises(ValueError, match="level 'word'"):
        pu.mis_weights([], [], [], level="word")
    with pytest.raises(ValueError, match=r"bounds \[3.0, 2.0\]"):
        pu.mis_weights([], [], [], lower=3.0)
