"""Hint selection, the select loss and the judge's votes of slime_plugins.openclaw: worked numbers A, B, E and H3."""

import math

import numpy as np
import pytest
import torch
from test_maths_loss import VOCAB, make_data

from slime.backends.megatron_utils.loss import get_log_probs_and_entropy
from slime.config import Args
from slime.utils.masked import SumOfSampleMean
from slime_plugins.openclaw.judge import (
    accepted_hints,
    longest_hint,
    majority,
    mean_vote,
    parse_hint,
    parse_score,
    parse_sign,
    terminal_reward,
    trained_turns,
)
from slime_plugins.openclaw.select_loss import (
    overlaps,
    select_hints,
    select_loss,
    select_loss_function,
    setting,
    train_fields,
)

STUDENT = np.array([[3, 7, 1, 4], [2, 9, 5, 8]])
HINTS = np.array([[[3, 7, 2, 6], [9, 2, 5, 1]], [[3, 1, 4, 0], [8, 0, 6, 7]]])
OLD = torch.tensor([[0.5, 0.25, 0.125, 0.0625]], dtype=torch.float64).log()
TEACHER = torch.tensor([[0.2, 0.5, 0.2, 0.05]], dtype=torch.float64).log()
CLIPS = dict(adv_diff_clip=1.0, eps_clip=0.2, eps_clip_high=0.28)
ALL = torch.ones(1, 4)


def test_a1_scores():
    cases = {
        r"\boxed{1}": 1, r"\boxed{+1}": 1, r"\boxed{-1}": -1, r"\boxed{0}": 0, r"\boxed{2}": None, r"\boxed{10}": None,
        r"\boxed{ 1 }": None, r"\boxed{1} no, \boxed{-1}": -1, "none": None, r"\boxed{1} then \boxed{7}": None,
    }  # fmt: skip
    assert {text: parse_score(text) for text in cases} == cases


def test_a2_majority_and_a4_mean():
    votes = [
        ([1, 1, -1], 1), ([1, -1, 0], 0), ([1, -1], 0), ([0, 0, 1], 0), ([None, 1, 1], 1), ([None, None, None], 0),
        ([1, None, -1], 0), ([-1, -1, -1], -1), ([1, 1, 0, 0], 0), ([None, None, -1], -1),
    ]  # fmt: skip
    assert [majority(scores) for scores, _ in votes] == [want for _, want in votes]
    assert [mean_vote(s) for s in ([1, 1, -1], [0, 0, 1], [0, 0, 0], [1, -1])] == pytest.approx([1 / 3, 1, 0, 0])
    assert [1 + mean_vote([1, 1, -1]), -1 + mean_vote([1, 1, -1])] == pytest.approx([1.333333, -0.666667], abs=1e-6)


def test_a3_signs():
    cases = {
        r"\boxed{1}": 1, r"\boxed{+1.0}": 1, r"\boxed{0.5}": 0, r"\boxed{ -1 }": -1, r"\boxed{1} \boxed{-1}": 1, "": 0,
        r"\boxed{2}": 0, r"\boxed{\text{1}}": 0, r"\boxed{-1": 0,
    }  # fmt: skip
    assert {text: parse_sign(text) for text in cases} == cases


def test_h3_terminal_reward():
    assert terminal_reward(0.75, -1) == -0.5 and terminal_reward(1, 1) == 2.0 and terminal_reward(1, 1, 0.5) == 1.5


def test_a5_hints():
    assert (
        longest_hint([(1, "short"), (1, "read the file before editing"), (-1, "x" * 40)])
        == "read the file before editing"
    )
    assert longest_hint([(1, "0123456789")]) is None and longest_hint([(1, "01234567890")]) == "01234567890"
    assert longest_hint([(None, "y" * 30), (1, None)]) is None
    votes = [
        (1, "a longer hint than that"),
        (1, "shorter hint"),
        (1, " shorter hint "),
        (1, "the longest of all the hints"),
    ]
    assert accepted_hints(votes, most=2) == ["shorter hint", "a longer hint than that"]
    assert parse_hint("[HINT_START]no[HINT_END] better: [HINT_START]\n look first [HINT_END]") == "look first"
    assert parse_hint("[HINT_START] never ended") is None


def test_b_which_turns_are_trained():
    turns = [(0, True), (0, True), (1, True), (0, True), (-1, True), (0, False)]
    assert trained_turns(turns) == [True, False, True, False, True, False]
    assert trained_turns([(0, False)]) == [False]
    assert trained_turns([(1, True), (0, True)]) == [True, False]
    assert trained_turns([(0, True), (1, True)]) == [True, True]


def test_e1_overlap_and_selection():
    assert overlaps(STUDENT, HINTS).tolist() == [[2, 3], [3, 1]]
    assert select_hints(STUDENT, HINTS, "shortest").tolist() == [0, 0]
    assert select_hints(STUDENT, HINTS, "token_optimal").tolist() == [1, 0]
    assert select_hints(STUDENT, HINTS).tolist() == [0, 0]
    assert select_hints(STUDENT, HINTS, spans=[(0, 1), (1, 2)]).tolist() == [1, 0]
    with pytest.raises(ValueError, match="hint selection 'best'"):
        select_hints(STUDENT, HINTS, "best")


def test_subsets():
    at_student, at_hint = np.arange(16.0).reshape(2, 2, 4), -np.arange(16.0).reshape(2, 2, 4)
    given = STUDENT, HINTS, at_student, at_hint, np.array([1, 0])
    student, teacher, overlap = (train_fields(*given, subset) for subset in ("student", "teacher", "overlap"))
    assert student["token_ids"] == STUDENT.tolist() and student["hint_log_probs"] == [[8, 9, 10, 11], [4, 5, 6, 7]]
    assert teacher["token_ids"] == [[3, 1, 4, 0], [9, 2, 5, 1]] and teacher["hint_log_probs"][0] == [-8, -9, -10, -11]
    assert overlap["token_valid"] == [[1, 0, 1, 1], [1, 1, 1, 0]] and overlap["token_ids"] == STUDENT.tolist()


def test_e2_the_formula():
    new = (OLD + torch.tensor([[0.0, 0.0, 0.3, -0.3]])).requires_grad_()
    loss, clipped = select_loss(new, OLD, TEACHER, ALL, **CLIPS)
    assert loss.item() == pytest.approx(0.235536, abs=1e-6) and clipped.item() == 0.5
    loss.sum().backward()
    # Off the clip each token's slope is -A rho; a clipped one has none.
    torch.testing.assert_close(new.grad, torch.tensor([[0.488688, -0.184839, 0.0, 0.0]]).double(), rtol=0, atol=1e-6)


def test_e3_and_e4_the_first_step_and_the_clip():
    assert select_loss(OLD, OLD, TEACHER, ALL, **CLIPS)[0].item() == pytest.approx(0.256058, abs=1e-6)
    teacher = torch.tensor([[0.01, 0.9, 0.05, 0.04]], dtype=torch.float64).log()
    weight = OLD.exp() / OLD.exp().sum()
    for clip, gaps in ((1.0, (-1, 1, -0.916291, -0.446287)), (2.0, (-2, 1.280934, -0.916291, -0.446287))):
        loss, _ = select_loss(OLD, OLD, teacher, ALL, **{**CLIPS, "adv_diff_clip": clip})
        assert loss.item() == pytest.approx(-(torch.tensor([gaps]) * weight).sum().item(), abs=1e-6)
    free, _ = select_loss(OLD, OLD, teacher, ALL, **{**CLIPS, "adv_diff_clip": 0.0})
    assert free.item() == pytest.approx(-((teacher - OLD) * weight).sum().item())


def test_tokens_that_are_not_valid_do_nothing():
    valid = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    want, _ = select_loss(OLD[:, ::2], OLD[:, ::2], TEACHER[:, ::2], torch.ones(1, 2), **CLIPS)
    for garbage in (math.nan, math.inf, -math.inf, 300.0):
        new, old, teacher = (torch.where(valid > 0, x, garbage) for x in (OLD, OLD, TEACHER))
        new.requires_grad_()
        loss, _ = select_loss(new, old, teacher, valid, **CLIPS)
        assert loss[0].item() == pytest.approx(want.item()) and loss[1].item() == 0.0
        loss.sum().backward()
        assert new.grad.isfinite().all() and not new.grad[valid == 0].any() and new.grad[0, 0] != 0


def batch_of(data, k=3):
    g = torch.Generator().manual_seed(1)
    lengths = data["response_lengths"]
    ids = [torch.rand(r, VOCAB, generator=g).argsort(1)[:, :k] for r in lengths]
    more = {
        "token_ids": [x if len(x) else torch.zeros(0) for x in ids],  # an empty list, as the trainer gets it
        "token_log_probs": [torch.randn(r, k, generator=g) - 2 for r in lengths],
        "hint_log_probs": [torch.randn(r, k, generator=g) - 2 for r in lengths],
        "token_valid": [torch.ones(r, k).long() for r in lengths],
        "advantages": [torch.ones(r) for r in lengths],
    }
    return {**data, **more}, torch.cat(data["logits"]).unsqueeze(0).requires_grad_()


def test_the_custom_loss(monkeypatch):
    batch, logits = batch_of(make_data())
    args = Args(eps_clip=0.2, eps_clip_high=0.28, extra={"w_rl": 0.5, "w_opd": 2.0, "adv_diff_clip": 1.0})
    reduce = SumOfSampleMean(batch["loss_masks"])
    loss, metrics = select_loss_function(args, batch, logits, reduce)
    assert loss.item() == pytest.approx(0.5 * metrics["rl_loss"].item() + 2 * metrics["opd_loss"].item(), rel=1e-6)
    (grad,) = torch.autograd.grad(loss, logits)

    ids = [x.long().reshape(-1, 3) for x in batch["token_ids"]]
    names = ("unconcat_tokens", "total_lengths", "response_lengths")
    _, out = get_log_probs_and_entropy(logits, args=args, token_ids=ids, **{n: batch[n] for n in names})
    columns = (torch.cat(x) for x in (out["token_log_probs"], batch["token_log_probs"], batch["hint_log_probs"]))
    want = select_loss(*columns, torch.cat(batch["token_valid"]), **CLIPS)[0]
    assert metrics["opd_loss"].item() == pytest.approx(reduce(want).item(), rel=1e-6)

    # Garbage at masked positions changes no bit.
    for name in ("token_log_probs", "hint_log_probs", "log_probs", "advantages"):
        masks = [m if x.dim() == 1 else m[:, None] for m, x in zip(batch["loss_masks"], batch[name], strict=True)]
        batch[name] = [torch.where(m > 0, x, math.nan) for x, m in zip(batch[name], masks, strict=True)]
    dirty, _ = select_loss_function(args, batch, logits, reduce)
    assert dirty.item() == loss.item() and torch.equal(torch.autograd.grad(dirty, logits)[0], grad)

    with pytest.raises(ValueError, match="old log-probs by the trainer"):
        select_loss_function(args.replace(use_rollout_logprobs=True), batch, logits, reduce)
    del batch["hint_log_probs"], batch["token_valid"]
    with pytest.raises(ValueError, match="finds no hint_log_probs and no token_valid"):
        select_loss_function(args, batch, logits, reduce)
    monkeypatch.setenv("OPENCLAW_TOPK_ADV_DIFF_CLIP", "1.5")
    assert setting(Args(), "adv_diff_clip") == 1.5 and setting(args, "adv_diff_clip") == 1.0


def test_a_place_with_nothing_in_common():
    """A place where student and teacher share nothing has loss 0 and no weight that is NaN."""
    loss, share = select_loss(OLD, OLD, TEACHER, torch.zeros(1, 4), **CLIPS)
    assert loss.item() == 0.0 == share.item()
