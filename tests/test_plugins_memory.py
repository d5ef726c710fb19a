"""MemPO's parts and drafts that are verified, of slime_plugins.openclaw: worked numbers F8 to F11 and G4."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.utils.ppo_utils import group_norm, memory_advantages
from slime_plugins.openclaw.memory import Round, memory_reward, objective_scores, probes, token_use
from slime_plugins.openclaw.speculative import (
    draft_weights,
    expected_verification,
    residual,
    tokens_per_verification,
    verify,
)

P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])


def test_f8_the_history_changes_which_memory_is_better():
    """P_full is no common offset of a trajectory's rounds: by P_mem alone the second memory would win."""
    p_mem, p_full = (0.5, 0.7), (0.2, 0.6)
    rewards = [memory_reward(np.log([m] * 3), np.log([f] * 3)) for m, f in zip(p_mem, p_full, strict=True)]
    assert rewards == pytest.approx([0.3, 0.1])
    advantages = memory_advantages(rewards, ["question"] * 2)
    assert np.argsort(p_mem).tolist() == [0, 1] and np.argsort(advantages).tolist() == [1, 0]
    assert memory_reward(np.log([0.5, 0.8, 0.2]), np.log([0.6, 0.9, 0.4])) == pytest.approx(-0.169113, abs=1e-6)


def test_f9_two_sequences_per_memory():
    question, answer, opening = [1, 2], [8, 9], [7]
    rounds = [Round(None, [3], [4]), Round([10, 11], [5], [6]), Round([12], [5]), Round([13], [5])]
    many = [probe for _ in range(4 * 16) for probe in probes(question, rounds, answer, opening)]
    assert 2 * len(many) == 2 * 4 * (4 - 1) * 16 == 384
    first, second, _ = probes(question, rounds, answer, opening)
    assert first.round == 1 and first.after_memory == [1, 2, 10, 11, 7, 8, 9]
    assert first.after_all == [1, 2, 3, 4, 7, 8, 9]  # the first round has no memory
    assert second.after_memory == [1, 2, 12, 7, 8, 9]
    assert second.after_all == [1, 2, 3, 4, 10, 11, 5, 6, 7, 8, 9]
    broken = [rounds[0], Round(None, [5], [6]), rounds[2]]
    assert [probe.round for probe in probes(question, broken, answer)] == [2]  # no well-formed memory, no reward
    with pytest.raises(ValueError, match="answer without tokens"):
        probes(question, rounds, [])


def test_f10_tokens_saved():
    question, step, memory, rounds = 300, 700, 120, 6
    react = token_use([question + step * t for t in range(rounds)])
    short = token_use([question] + [question + step + memory] * (rounds - 1))
    assert (react.total, react.peak, short.total, short.peak) == (12300, 3800, 5900, 1120)
    assert 1 - short.total / react.total == pytest.approx(0.520325, abs=1e-6)
    assert token_use([]).peak == 0


def test_f11_several_questions_in_one():
    scores = objective_scores("paris; the blue whale", ["paris", "blue whale"])
    assert scores.f1 == pytest.approx(1.8) and scores.exact == 1.0
    for answer in ("paris", "paris; the blue whale; 7", ""):
        assert objective_scores(answer, ["paris", "blue whale"]).f1 == 0.0
    assert objective_scores("rome; shark", ["paris", "blue whale"]).f1 == 0.0


def test_g4_drafts():
    one = expected_verification(P, Q, 1)
    assert one.accepted == pytest.approx([0.7]) and residual(P, Q).tolist() == [1.0, 0.0, 0.0]
    two = expected_verification(P, Q, 2)
    assert two.accepted == pytest.approx([0.7, 0.06]) and two.rest == pytest.approx(0.24)
    other = np.array([0.4, 0.35, 0.25])
    three = expected_verification(other, np.array([0.6, 0.1, 0.3]), 3)
    assert three.accepted == pytest.approx([0.75, 0.025, 0.0225]) and three.rest == pytest.approx(0.2025)
    for found, want in ((one, P), (two, P), (three, other)):
        np.testing.assert_allclose(found.output, want, atol=1e-12)
    same = expected_verification(P, P, 4)
    assert same.accepted == pytest.approx([1.0]) and same.rest == pytest.approx(0.0) and residual(P, P) is None
    assert expected_verification(P, Q, 0).output.tolist() == P.tolist()
    assert tokens_per_verification(0.7, 4) == pytest.approx(2.7731) and tokens_per_verification(1.0, 4) == 5.0
    np.testing.assert_allclose(draft_weights(np.log(P), np.log(Q)), [2.0, 0.6, 0.666667], atol=1e-6)


def test_g4_candidates_by_their_own_likelihood():
    score = np.log([[0.5, 0.4], [0.2, 0.3], [0.3, 0.3], [0.1, 0.6]]).mean(1)
    np.testing.assert_allclose(score, [-0.804719, -1.406705, -1.203973, -1.406705], atol=1e-6)
    advantages = group_norm(score, [0] * 4, std=False)
    np.testing.assert_allclose(advantages, [0.400807, -0.20118, 0.001553, -0.20118], atol=1e-6)
    assert score.argmax() == 0


WEIGHTS = st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any).map(lambda w: np.array(w) / sum(w))


@settings(max_examples=60, deadline=None)
@given(WEIGHTS, WEIGHTS, st.integers(0, 4))
def test_any_number_of_drafts_is_exact(p, q, n):
    found = expected_verification(p, q, n)
    np.testing.assert_allclose(found.output, p, atol=1e-12)
    assert sum(found.accepted) + found.rest == pytest.approx(1.0)


def test_verify_draws_what_is_expected():
    rng, n = np.random.default_rng(0), 8_000
    taken = [verify(P, Q, drafts, rng) for drafts in rng.choice(3, size=(n, 2), p=Q).tolist()]
    error = 5 * 0.5 / n**0.5  # five standard deviations at most
    np.testing.assert_allclose(np.bincount([token for token, _ in taken], minlength=3) / n, P, atol=error)
    for draft, share in ((0, 0.7), (1, 0.06), (None, 0.24)):
        assert sum(which == draft for _, which in taken) / n == pytest.approx(share, abs=error)
    naive = 0.35  # holding the second draft against the policy itself would give the first token so often
    assert abs(sum(token == 0 for token, _ in taken) / n - naive) > 3 * error
