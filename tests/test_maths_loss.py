"""The losses: against a slow float64 form, in any cut into micro-batches, and with garbage at masked positions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.backends.megatron_utils import loss as L
from slime.backends.megatron_utils.log_probs import response_rows
from slime.config import Args
from slime.data.schedule import make_schedule, split_for_ranks
from slime.utils.masked import SumOfSampleMean

VOCAB = 11
HERE = __name__


def make_data(seed=0, lengths=((5, 3), (4, 2), (3, 0), (9, 6), (4, 3)), fan_out=False):
    """Columns of samples, (total, response) each: one fully masked, one empty response, one hole in a mask."""
    g = torch.Generator().manual_seed(seed)
    totals, responses = [a for a, _ in lengths], [b for _, b in lengths]
    masks = [torch.ones(r) for r in responses]
    masks[1][:] = 0.0
    masks[3][1] = 0.0

    def noise(scale=0.3, shift=-2.4):
        return [shift + scale * torch.randn(r, generator=g) for r in responses]

    return {
        "unconcat_tokens": [torch.randint(0, VOCAB, (t,), generator=g) for t in totals],
        "total_lengths": totals,
        "response_lengths": responses,
        "loss_masks": masks,
        "rewards": torch.randn(len(lengths), generator=g).tolist(),
        "log_probs": noise(),
        "ref_log_probs": noise(),
        "rollout_log_probs": noise(),
        "teacher_log_probs": noise(),
        "values": noise(1.0, 0.0),
        "token_weights": noise(0.2, 1.0),
        "rollout_ids": [0, 1, 2, 0, 4] if fan_out else list(range(len(lengths))),
        "logits": [torch.randn(t, VOCAB, generator=g) for t in totals],
        "value_head": [torch.randn(t, 1, generator=g) for t in totals],
        "teacher_topk_log_probs": [torch.randn(r, VOCAB, generator=g).log_softmax(1)[:, :3] for r in responses],
        "teacher_topk_indices": [torch.rand(r, VOCAB, generator=g).argsort(1)[:, :3].int() for r in responses],
    }


def run(args, data, dp_size=1):
    """Loss, metrics and gradient of the model's output per sample, as the trainer adds them up over one step."""
    data = dict(data)
    if args.loss_type != "sft_loss":
        L.compute_advantages_and_returns(args, data)
    trained = [int((m > 0).sum()) for m in data["loss_masks"]]
    schedule = make_schedule(args, data["total_lengths"], trained, data["rollout_ids"], dp_size)
    source = "value_head" if args.loss_type == "value_loss" else "logits"
    data["model_output"] = [x.clone().requires_grad_() for x in data[source]]
    total, metrics = 0.0, {}
    for part in split_for_ranks({k: v for k, v in data.items() if len(v) == len(trained)}, schedule):
        (step,) = part.steps
        for samples in step.micro_batches:
            batch = {k: [v[i] for i in samples] for k, v in part.columns.items()}
            batch["sample_denominators"] = [part.sample_denominators[i] for i in samples]
            if not samples:
                continue
            loss, parts = L.loss_function(args, batch, step, torch.cat(batch["model_output"]).unsqueeze(0))
            assert not any(value.requires_grad for value in parts.values())  # or it keeps the graph alive
            loss.backward()
            total += loss.item()
            for name, value in parts.items():
                metrics[name] = metrics.get(name, 0.0) + value.item()
    return total, metrics, [x.grad for x in data["model_output"]]


def base_args(**changes):
    defaults = dict(eps_clip_high=0.28, max_tokens_per_gpu=1000, global_batch_size=100)
    return Args(**{**defaults, **changes})


VARIANTS = {
    "grpo": {},
    "grpo_kl_entropy": dict(use_kl_loss=True, kl_loss_coef=0.2, entropy_coef=0.05),
    "grpo_kl_measured": dict(use_kl_loss=True),
    "grpo_unbiased_kl": dict(use_kl_loss=True, kl_loss_coef=0.2, use_unbiased_kl=True, kl_loss_type="k3"),
    "grpo_tis": dict(use_tis=True, tis_clip=1.1, tis_clip_low=0.9),
    "grpo_rollout_logprobs": dict(use_rollout_logprobs=True),
    "dual_clip": dict(eps_clip_c=1.05),
    "gspo": dict(advantage_estimator="gspo", eps_clip=0.01, eps_clip_high=0.01),
    "cispo": dict(advantage_estimator="cispo"),
    "ppo": dict(advantage_estimator="ppo", gamma=0.9, lambd=0.8, kl_coef=0.1),
    "reinforce_plus_plus": dict(advantage_estimator="reinforce_plus_plus", kl_coef=0.1, normalize_advantages=True),
    "reinforce_plus_plus_baseline": dict(advantage_estimator="reinforce_plus_plus_baseline", kl_coef=0.1),
    "on_policy_distillation": dict(advantage_estimator="on_policy_distillation"),
    "distill_topk": dict(advantage_estimator="on_policy_distillation", distill_topk=3),
    "grpo_distill_topk": dict(opd_kl_coef=0.3, distill_topk=3, calculate_per_token_loss=True),
    "per_token": dict(calculate_per_token_loss=True, entropy_coef=0.05),
    "sft": dict(loss_type="sft_loss"),
    "sft_per_token": dict(loss_type="sft_loss", calculate_per_token_loss=True),
    "value": dict(loss_type="value_loss", advantage_estimator="ppo"),
    "custom": dict(loss_type="custom_loss", custom_loss_path="slime_plugins.examples.custom_loss.loss_function"),
    "mis": dict(use_tis=True, tis_level="geometric", tis_mode="mask", tis_clip=1.2, tis_clip_low=0.8, tis_veto=0.1),
    "opsm": dict(use_opsm=True, opsm_delta=0.05),
    "icepop": dict(use_tis=True, custom_tis_function_path="slime.utils.importance.icepop_function", tis_clip=1.3),
}


# -- against a slow form, token by token in Python floats ---------------------------------------------------------


def slow_loss(args, data):
    """Plain Python: loop over samples and tokens, float64, no tensors but torch's own float64 log_softmax."""
    args_low, args_high = args.eps_clip, args.eps_clip_high
    data = dict(data)
    L.compute_advantages_and_returns(args, data)
    trained = [[t for t, m in enumerate(mask.tolist()) if m] for mask in data["loss_masks"]]
    tokens_of = {}
    for rollout, at in zip(data["rollout_ids"], trained, strict=True):
        tokens_of[rollout] = tokens_of.get(rollout, 0) + len(at)
    samples, tokens = sum(n > 0 for n in tokens_of.values()), sum(map(len, trained))
    total, entropies = 0.0, 0.0
    for i, at in enumerate(trained):
        length, response = data["total_lengths"][i], data["response_lengths"][i]
        rows = torch.log_softmax(data["logits"][i].double(), -1)
        for t in at:
            position = length - response + t
            row = rows[position - 1]
            new = row[data["unconcat_tokens"][i][position]].item()
            entropy = -(row.exp() * row).sum().item()
            old, adv = data["log_probs"][i][t].item(), data["advantages"][i][t].item()
            ratio = math.exp(new - old)
            x = max(-ratio * adv, -min(max(ratio, 1 - args_low), 1 + args_high) * adv)
            if args.eps_clip_c and adv < 0:
                x = min(x, -args.eps_clip_c * adv)
            if args.use_tis:
                w = math.exp(old - data["rollout_log_probs"][i][t].item())
                x *= min(max(w, args.tis_clip_low), args.tis_clip)
            x *= data["token_weights"][i][t].item()
            x -= args.entropy_coef * entropy
            if args.use_kl_loss:
                d = new - data["ref_log_probs"][i][t].item()
                x += args.kl_loss_coef * (math.exp(-d) - 1 + d) * (ratio if args.use_unbiased_kl else 1.0)
            share = 1 / tokens if args.calculate_per_token_loss else 1 / (samples * tokens_of[data["rollout_ids"][i]])
            total += x * share
            entropies += entropy / tokens
    return total, entropies


@pytest.mark.parametrize(
    "name",
    ["grpo", "grpo_kl_entropy", "grpo_unbiased_kl", "grpo_tis", "dual_clip", "per_token", "ppo", "reinforce_plus_plus",
     "reinforce_plus_plus_baseline", "on_policy_distillation"],
)  # fmt: skip
@pytest.mark.parametrize("fan_out", [False, True])
def test_policy_loss_equals_slow_form(name, fan_out):
    args, data = base_args(**VARIANTS[name]), make_data(fan_out=fan_out)
    loss, metrics, _ = run(args, data)
    want, entropy = slow_loss(args, data)
    assert loss == pytest.approx(want, rel=2e-5, abs=1e-6)
    assert metrics["entropy"] == pytest.approx(entropy, rel=1e-5)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("per_token", [False, True])
def test_sft_and_value_loss_equal_slow_forms(per_token):
    args, data = base_args(calculate_per_token_loss=per_token, value_clip=0.5), make_data()
    data["values"] = [v * 2.0 for v in data["values"]]  # so that some moves are clipped, up and down
    (sft, metrics, _) = run(args.replace(loss_type="sft_loss"), data)
    (value, value_metrics, _) = run(args.replace(loss_type="value_loss", advantage_estimator="ppo"), data)
    credit = dict(data)
    L.compute_advantages_and_returns(args.replace(advantage_estimator="ppo"), credit)
    nll, squares, clipped, mean, count, trained = 0.0, 0.0, 0.0, 0.0, 0, [3, 0, 0, 5, 3]
    for i, n in enumerate(trained):
        prompt = data["total_lengths"][i] - data["response_lengths"][i]
        rows = torch.log_softmax(data["logits"][i].double(), -1)
        for t in range(data["response_lengths"][i]):
            if data["loss_masks"][i][t]:
                share = 1 / 11 if per_token else 1 / (3 * n)
                token = data["unconcat_tokens"][i][prompt + t]
                nll -= rows[prompt + t - 1, token].item() * data["token_weights"][i][t].item() * share
                new, old = data["value_head"][i][prompt + t - 1, 0].item(), data["values"][i][t].item()
                target = credit["returns"][i][t].item()
                near = (old + max(-0.5, min(0.5, new - old)) - target) ** 2
                squares += max((new - target) ** 2, near) / 2 * share
                clipped, mean, count = clipped + (near > (new - target) ** 2 + 1e-9), mean + new, count + 1
    assert count == 11 and 0 < clipped < 11
    assert sft == pytest.approx(nll, rel=1e-5) and metrics["loss"] == pytest.approx(sft)
    assert value == pytest.approx(squares, rel=1e-5) and value_metrics["value_loss"] == pytest.approx(value)
    assert value_metrics["value_clipfrac"] == pytest.approx(clipped / 11)
    assert value_metrics["value"] == pytest.approx(mean / 11, rel=1e-4)


def test_a_step_of_one_token():
    """Denominators are at least 1, and 1 is one of them."""
    data = {k: v[:1] for k, v in make_data().items()}
    data["loss_masks"] = [torch.tensor([0.0, 1.0, 0.0])]
    per_sample, *_ = run(base_args(), data)
    assert per_sample == pytest.approx(slow_loss(base_args(), data)[0], rel=2e-5)
    assert run(base_args(calculate_per_token_loss=True), data)[0] == pytest.approx(per_sample, rel=1e-6)


def test_gradient_equals_finite_differences():
    args, data = base_args(**VARIANTS["grpo_kl_entropy"]), make_data()
    _, _, grads = run(args, data)
    for sample, row, column in ((0, 1, 3), (3, 2, 0), (3, 7, 5), (4, 0, 1)):
        moved = []
        for step in (1e-4, -1e-4):
            logits = [x.double() for x in data["logits"]]
            logits[sample] = logits[sample].clone()
            logits[sample][row, column] += step
            moved.append(slow_loss(args, {**data, "logits": logits})[0])
        assert grads[sample][row, column].item() == pytest.approx((moved[0] - moved[1]) / 2e-4, abs=2e-5)
    assert not grads[1].any() and not grads[2].any()  # fully masked, empty response
    assert not grads[0][0].any() and not grads[0][4].any()  # rows that predict no response token


# -- how the step is cut changes nothing --------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_any_cut_gives_the_same_step(name):
    for fan_out in (False, True):
        args, data = base_args(**VARIANTS[name]), make_data(fan_out=fan_out)
        loss, metrics, grads = run(args, data)
        for changes, dp_size in (
            (dict(max_tokens_per_gpu=1), 1), (dict(max_tokens_per_gpu=9), 2), (dict(max_tokens_per_gpu=14), 3),
            (dict(use_dynamic_batch_size=False, micro_batch_size=2, balance_data=False), 2),
        ):  # fmt: skip
            other, other_metrics, other_grads = run(args.replace(**changes), data, dp_size)
            assert other == pytest.approx(loss, rel=1e-5, abs=1e-7)
            assert other_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-6)
            for a, b in zip(grads, other_grads, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


# -- masked means absent ------------------------------------------------------------------------------------------

GARBAGE = [float("nan"), float("inf"), -float("inf"), 300.0, -300.0, 1e4]
COLUMNS = ["log_probs", "ref_log_probs", "rollout_log_probs", "teacher_log_probs", "values", "token_weights"]


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_garbage_at_masked_positions_changes_no_bit(name):
    args, data = base_args(**VARIANTS[name]), make_data()
    loss, metrics, grads = run(args, data)
    assert math.isfinite(loss) and all(math.isfinite(v) for v in metrics.values())
    for garbage in GARBAGE:
        dirty = dict(data)
        for column in COLUMNS:
            dirty[column] = [
                torch.where(m > 0, x, garbage) for x, m in zip(data[column], data["loss_masks"], strict=True)
            ]
        for column, value in (("teacher_topk_log_probs", garbage), ("teacher_topk_indices", -7)):
            rows = zip(data[column], data["loss_masks"], strict=True)
            dirty[column] = [torch.where(m[:, None] > 0, x, value) for x, m in rows]
        # The rows of the model's output that predict masked tokens, too.
        for source in ("logits", "value_head"):
            dirty[source] = [x.clone() for x in data[source]]
            for i, mask in enumerate(data["loss_masks"]):
                start = data["total_lengths"][i] - data["response_lengths"][i] - 1
                for t in (mask == 0).nonzero().squeeze(1).tolist():
                    dirty[source][i][start + t] = garbage
        other, other_metrics, other_grads = run(args, dirty)
        assert other == loss and other_metrics == metrics, garbage
        assert all(torch.equal(a, b) for a, b in zip(grads, other_grads, strict=True)), garbage


def test_garbage_is_gone_before_a_reducer_of_somebody_elses():
    """One that multiplies by the mask, so NaN * 0 would be NaN; it gets every term and every metric."""
    args = base_args(use_kl_loss=True, kl_loss_coef=0.2, entropy_coef=0.05, use_tis=True)
    outcomes = []
    for garbage in (0.0, float("nan")):
        data = make_data()
        L.compute_advantages_and_returns(args, data)
        mask = torch.cat(data["loss_masks"])
        for column in (*COLUMNS, "advantages"):
            rows = zip(data[column], data["loss_masks"], strict=True)
            data[column] = [torch.where(m > 0, x, garbage) for x, m in rows]
        logits = torch.cat(data["logits"])
        logits[response_rows(data["total_lengths"], data["response_lengths"])[mask == 0]] = garbage
        logits = logits.unsqueeze(0).requires_grad_()
        loss, metrics = L.policy_loss_function(args, data, logits, lambda x, mask=mask: (x * mask).sum())
        loss.backward()
        outcomes.append((loss.item(), {k: v.item() for k, v in metrics.items()}, logits.grad))
    (loss, metrics, grad), (other, other_metrics, other_grad) = outcomes
    assert other == loss and other_metrics == metrics and torch.equal(other_grad, grad)


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_a_masked_sample_adds_nothing(name):
    args, data = base_args(**VARIANTS[name]), make_data()
    loss, _, grads = run(args, data)
    keep = [0, 3, 4]
    rest = {k: [v[i] for i in keep] for k, v in data.items()}
    other, _, other_grads = run(args, rest)
    assert other == pytest.approx(loss, rel=1e-6)
    for a, b in zip((grads[i] for i in keep), other_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_a_rank_with_nothing_to_train_stays_in_the_graph(name):
    args, data = base_args(**VARIANTS[name]), make_data(lengths=((4, 2), (3, 1), (3, 0), (4, 3)))
    data["loss_masks"] = [torch.zeros_like(m) for m in data["loss_masks"]]
    loss, metrics, grads = run(args, data)
    assert loss == 0.0 and all(math.isfinite(v) for v in metrics.values())
    assert all(g is not None and not g.any() for g in grads)


def test_an_outlier_is_finite_and_counted():
    args, data = base_args(use_kl_loss=True, kl_loss_coef=0.1, use_tis=True), make_data()
    data["log_probs"][0][1] -= 200.0
    data["log_probs"][3][2] -= 200.0  # behind a masked token
    data["ref_log_probs"][3][2] -= 200.0
    data["rollout_log_probs"][4][0] -= 200.0
    loss, metrics, grads = run(args, data)
    assert math.isfinite(loss) and all(g.isfinite().all() for g in grads)
    assert metrics["log_ratio_clamped_count"] == 2.0


def test_distance_of_engine_and_trainer_is_a_metric():
    data = make_data()
    _, metrics, _ = run(base_args(), data)
    trainer, engine, mask = (torch.cat(data[k]) for k in ("log_probs", "rollout_log_probs", "loss_masks"))
    want = (trainer - engine).abs()[mask > 0].mean().item()
    assert metrics["train_rollout_logprob_abs_diff"] == pytest.approx(want, rel=1e-5)
    for absent in ("rollout_log_probs", "log_probs"):
        without = {k: v for k, v in make_data().items() if k != absent}
        _, metrics, _ = run(base_args(use_rollout_logprobs=absent == "log_probs"), without)
        assert "train_rollout_logprob_abs_diff" not in metrics


# -- metrics ------------------------------------------------------------------------------------------------------


def test_clip_fractions_are_of_tokens_and_apart():
    args, data = base_args(), make_data()
    data["rewards"] = [0.5, 0.5, 0.5, -0.5, 0.5]
    _, out = L.get_log_probs_and_entropy(
        torch.cat(data["logits"]).unsqueeze(0), args=args,
        **{k: data[k] for k in ("unconcat_tokens", "total_lengths", "response_lengths")},
    )  # fmt: skip
    data["log_probs"] = [x.clone() for x in out["log_probs"]]
    data["log_probs"][0][0] -= 1.0  # ratio e, positive advantage: clipped above
    data["log_probs"][3][0] += 1.0  # ratio 1/e, negative advantage: clipped below
    data["log_probs"][3][2] += 1.0
    data["log_probs"][4][0] += 1.0  # ratio 1/e, positive advantage: not clipped
    _, metrics, _ = run(args, data)
    trained = 3 + 5 + 3
    assert metrics["pg_clipfrac_high"] == pytest.approx(1 / trained)
    assert metrics["pg_clipfrac_low"] == pytest.approx(2 / trained)
    assert metrics["pg_clipfrac"] == pytest.approx(3 / trained)
    assert metrics["ppo_kl"] == pytest.approx((-1.0 + 3.0) / trained)


# -- aggregation --------------------------------------------------------------------------------------------------


def test_worked_sum_of_sample_mean():
    masks = [torch.tensor([1.0, 1.0]), torch.tensor([0.0, 1.0, 0.0])]
    x = torch.tensor([2.0, 4.0, 100.0, 9.0, float("nan")])
    assert SumOfSampleMean(masks)(x) == 3.0 + 9.0
    assert SumOfSampleMean(masks, [4.0, 4.0])(x) == 1.5 + 2.25
    assert SumOfSampleMean(masks, per_token=True)(x) == 15.0
    assert SumOfSampleMean(masks, samples_per_token=2 / 3).token_mean(x) == pytest.approx(10.0)
    assert SumOfSampleMean([torch.zeros(2)])(torch.full((2,), float("inf"))) == 0.0
    assert SumOfSampleMean(masks).token_mean(x) == 15.0
    assert SumOfSampleMean(masks, [1.0, 0.0])(x) == 6.0 + 9.0  # a denominator is at least 1
    assert SumOfSampleMean([])(torch.zeros(0)) == SumOfSampleMean([], [])(torch.zeros(0)) == 0.0
    with pytest.raises(ValueError, match=r"got \(2,\), but the micro-batch has 5 response tokens"):
        SumOfSampleMean(masks)(x[:2])


# -- log-probs of responses ---------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=5), st.integers(0, 99))
def test_log_prob_of_a_token_comes_from_the_row_before_it(parts, seed):
    g = torch.Generator().manual_seed(seed)
    totals, responses = [p + r for p, r in parts], [r for _, r in parts]
    tokens = [torch.randint(0, VOCAB, (n,), generator=g) for n in totals]
    logits = torch.randn(1, sum(totals) + 3, VOCAB, generator=g)  # padded at the end
    kwargs = dict(args=base_args(), unconcat_tokens=tokens, total_lengths=totals, response_lengths=responses)
    _, out = L.get_log_probs_and_entropy(logits, with_entropy=True, **kwargs)
    assert list(L.get_log_probs_and_entropy(logits, **kwargs)[1]) == ["log_probs"]  # entropy only where asked for
    assert list(L.log_probs_of(kwargs["args"], kwargs, logits)) == ["log_probs"]
    pieces = list(L.get_responses(logits, **kwargs))
    start = 0
    for i, (prompt, response) in enumerate(parts):
        rows = torch.log_softmax(logits[0, start : start + totals[i]], -1)
        for t in range(response):
            torch.testing.assert_close(out["log_probs"][i][t], rows[prompt + t - 1, tokens[i][prompt + t]])
        assert torch.equal(pieces[i][0], logits[0, start + prompt - 1 : start + totals[i] - 1])
        assert torch.equal(pieces[i][1], tokens[i][prompt:])
        assert out["log_probs"][i].shape == out["entropy"][i].shape == (response,)
        start += totals[i]


def test_a_response_without_prompt_is_named():
    for response in (2, -1):
        with pytest.raises(ValueError, match=f"sample 1 of the micro-batch: {response} response tokens of 2"):
            response_rows([3, 2], [1, response])
    assert response_rows([], []).dtype == torch.int64 and response_rows([], []).shape == (0,)


# -- what is missing or wrong -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "absent", "message"),
    [
        (dict(use_kl_loss=True), "ref_log_probs", "no ref_log_probs.*--use-kl-loss"),
        (dict(use_tis=True), "rollout_log_probs", "no rollout_log_probs.*--use-tis"),
        (dict(kl_coef=0.1, advantage_estimator="ppo"), "ref_log_probs", "no ref_log_probs.*--kl-coef"),
        (dict(advantage_estimator="ppo"), "values", "no values.*a critic"),
        (dict(advantage_estimator="on_policy_distillation"), "teacher_log_probs", "no teacher_log_probs"),
    ],
)
def test_missing_columns_are_named(changes, absent, message):
    data = make_data()
    del data[absent]
    with pytest.raises(ValueError, match=message):
        run(base_args(**changes), data)


def returns_scalar(args, batch, logits, sum_of_sample_mean):
    return logits.sum()


def returns_vector(args, batch, logits, sum_of_sample_mean):
    return logits.sum(-1), {}


def returns_constant(args, batch, logits, sum_of_sample_mean):
    return torch.tensor(1.0), {}


def returns_list(args, batch, logits, sum_of_sample_mean):
    return logits.sum(), [1]


def returns_three(args, batch, logits, sum_of_sample_mean):
    return logits.sum(), {}, {}


def returns_float(args, batch, logits, sum_of_sample_mean):
    return 1.0, {}


def returns_metric_vector(args, batch, logits, sum_of_sample_mean):
    return logits.sum(), {"x": torch.ones(3)}


def returns_good(args, batch, logits, sum_of_sample_mean):
    assert logits.dtype == torch.float32 and logits.shape[0] == 1
    ones = torch.ones_like(torch.cat(batch["loss_masks"]))
    return 0.0 * logits.sum() + sum_of_sample_mean(ones), {"x": 2.0, "n_count": 3, "top_max": torch.tensor([5.0])}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("returns_scalar", r"must return \(loss, metrics\), it returned Tensor"),
        ("returns_vector", r"must be a scalar tensor, it is \(1, \d+\)"),
        ("returns_three", r"must return \(loss, metrics\), it returned tuple"),
        ("returns_float", "must be a scalar tensor, it is float"),
        ("returns_constant", "does not depend on the logits"),
        ("returns_list", "metrics must be a dict"),
        ("returns_metric_vector", r"metric 'x' has shape \(3,\)"),
    ],
)
def test_custom_loss_faults_name_the_path(name, message):
    args = base_args(loss_type="custom_loss", custom_loss_path=f"{HERE}.{name}")
    with pytest.raises(ValueError, match=rf"--custom-loss-path {HERE}.{name}: .*{message}"):
        run(args, make_data())


def test_custom_loss_scale():
    args = base_args(loss_type="custom_loss", custom_loss_path=f"{HERE}.returns_good")
    loss, metrics, _ = run(args, make_data())
    assert loss == pytest.approx(1.0)  # the mean over the three samples with trained tokens
    assert metrics == pytest.approx({"loss": 1.0, "x": 2 / 3, "n_count": 3.0, "top_max": 5.0})


def test_example_equals_the_built_in_loss_without_its_weight():
    data = make_data()
    del data["token_weights"]
    settings_ = dict(use_kl_loss=True, kl_loss_coef=0.2)
    want = run(base_args(**settings_), data)
    got = run(base_args(**settings_, **VARIANTS["custom"]), data)
    assert got[0] == pytest.approx(want[0], rel=1e-6)
    weighted = run(base_args(**settings_, **VARIANTS["custom"], extra={"entropy_power": 1.0}), data)
    assert weighted[0] != pytest.approx(want[0], rel=1e-3)


def sets_advantages(args, rollout_data):
    rollout_data["advantages"] = [2.0 * torch.ones_like(m) for m in rollout_data["loss_masks"]]
    rollout_data["returns"] = list(rollout_data["advantages"])


def sets_nothing(args, rollout_data):
    pass


def sets_wrong_shapes(args, rollout_data):
    rollout_data["advantages"] = rollout_data["returns"] = [torch.ones(1) for _ in rollout_data["loss_masks"]]


def test_custom_advantages():
    data = make_data()
    L.compute_advantages_and_returns(base_args(custom_advantage_function_path=f"{HERE}.sets_advantages"), data)
    assert data["advantages"][0].tolist() == [2.0] * 3
    for name, message in (("sets_nothing", "must set"), ("sets_wrong_shapes", "have shapes")):
        with pytest.raises(ValueError, match=message):
            L.compute_advantages_and_returns(base_args(custom_advantage_function_path=f"{HERE}.{name}"), make_data())


def token_sum_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    mask = torch.cat(loss_masks)
    return lambda x: (x * mask).sum() / 10.0


def test_custom_reducer_takes_the_policy_term():
    data = make_data()
    args = base_args(custom_pg_loss_reducer_function_path=f"{HERE}.token_sum_reducer")
    loss, *_ = run(args, data)
    per_token, *_ = run(base_args(calculate_per_token_loss=True), data)
    assert loss == pytest.approx(per_token * 11 / 10.0 / 3, rel=1e-5)  # Dr.GRPO's constant divisor


def test_user_fields_of_credit():
    """token_advantages are added on trained tokens; token_rewards join REINFORCE++'s rewards."""
    for estimator in ("grpo", "ppo"):
        data, plain = make_data(), make_data()
        data["token_advantages"] = [torch.full((r,), 0.5) for r in data["response_lengths"]]
        for columns in (data, plain):
            L.compute_advantages_and_returns(base_args(advantage_estimator=estimator), columns)
        for a, b, m in zip(data["advantages"], plain["advantages"], data["loss_masks"], strict=True):
            torch.testing.assert_close(a, b + 0.5 * m)
        torch.testing.assert_close(data["returns"], plain["returns"])
    data = make_data()
    data["token_rewards"] = [torch.ones(r) for r in data["response_lengths"]]
    data["token_rewards"][3][1] = float("nan")  # masked
    data["token_advantages"] = [torch.where(m > 0, 0.0, float("nan")) for m in data["loss_masks"]]
    L.compute_advantages_and_returns(base_args(advantage_estimator="reinforce_plus_plus"), data)
    torch.testing.assert_close(data["returns"][0], data["rewards"][0] + torch.tensor([3.0, 2.0, 1.0]))
    want = (data["rewards"][3] + torch.tensor([5.0, 0.0, 4.0, 3.0, 2.0, 1.0])) * data["loss_masks"][3]
    torch.testing.assert_close(data["returns"][3], want)
    torch.testing.assert_close(data["advantages"][3], want)


def test_estimators_take_their_own_flags():
    """compute_advantages_and_returns against the formulas called by hand: nothing swapped, nothing dropped."""
    from slime.utils import ppo_utils as pu

    def estimate(name, **changes):
        data = make_data()
        L.compute_advantages_and_returns(base_args(advantage_estimator=name, **changes), data)
        return data

    data = make_data()
    masks, rewards = data["loss_masks"], data["rewards"]
    kl = [pu.compute_approx_kl(a, b, "k2") for a, b in zip(data["log_probs"], data["ref_log_probs"], strict=True)]
    token_rewards = pu.get_token_rewards(rewards, kl, masks, 0.1)
    kl_flags = dict(kl_coef=0.1, kl_loss_type="k2")
    want = pu.get_advantages_and_returns(data["values"], token_rewards, masks, 0.9, 0.5)
    got = got_ppo = estimate("ppo", gamma=0.9, lambd=0.5, **kl_flags)
    torch.testing.assert_close((got["advantages"], got["returns"]), want)
    want = pu.get_reinforce_plus_plus_returns(rewards, kl, masks, 0.1, 0.9)
    got = estimate("reinforce_plus_plus", gamma=0.9, lambd=0.5, **kl_flags)
    torch.testing.assert_close((got["advantages"], got["returns"]), (want, want))
    whitened = estimate("reinforce_plus_plus", gamma=0.9, normalize_advantages=True, **kl_flags)
    torch.testing.assert_close(whitened["advantages"], pu.whiten(want, masks))
    torch.testing.assert_close(whitened["returns"], want)
    distilled = estimate("on_policy_distillation")["advantages"]
    torch.testing.assert_close(distilled[0], data["teacher_log_probs"][0] - data["log_probs"][0])
    mixed = estimate("grpo", opd_kl_coef=0.3)["advantages"]
    torch.testing.assert_close(mixed[0], rewards[0] + 0.3 * distilled[0])
    mixed = estimate("ppo", gamma=0.9, lambd=0.5, opd_kl_coef=0.3, **kl_flags)  # a term of advantages, not of returns
    torch.testing.assert_close(mixed["advantages"][0], got_ppo["advantages"][0] + 0.3 * distilled[0])
    torch.testing.assert_close(mixed["returns"], got_ppo["returns"])
    listed = estimate("on_policy_distillation", distill_topk=3, **kl_flags)  # a term of the loss instead
    assert not any(x.any() for x in listed["advantages"])
    engine = estimate("on_policy_distillation", use_rollout_logprobs=True)["advantages"]
    torch.testing.assert_close(engine[0], data["teacher_log_probs"][0] - data["rollout_log_probs"][0])


def test_a_teacher_is_read_only_where_asked_for():
    data = make_data()
    del data["teacher_log_probs"]
    for changes in ({}, dict(distill_topk=3, opd_kl_coef=0.3)):
        L.compute_advantages_and_returns(base_args(**changes), data)


def mean_only(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths):
    mask = torch.cat(list(loss_masks))
    gap = torch.cat(list(train_log_probs)) - torch.cat(list(rollout_log_probs))
    return pg_loss, list(loss_masks), {"gap": (gap * mask).sum() / mask.sum()}


def test_a_scalar_metric_of_a_users_importance_function_is_a_mean_over_tokens():
    """However the step is cut into micro-batches, one of which has nothing to train and a mean of 0 / 0."""
    hook, data = f"{__name__}.mean_only", make_data()
    gaps = [
        (new - old)[mask > 0]
        for new, old, mask in zip(data["log_probs"], data["rollout_log_probs"], data["loss_masks"], strict=True)
    ]
    for max_tokens in (1000, 10):
        args = base_args(custom_tis_function_path=hook, max_tokens_per_gpu=max_tokens)
        assert run(args, data)[1]["gap"] == pytest.approx(torch.cat(gaps).mean().item(), abs=1e-6)


def test_opsm_drops_bad_responses_that_drifted():
    data = make_data()
    plain, _, _ = run(base_args(), data)
    none, metrics, _ = run(base_args(use_opsm=True, opsm_delta=100.0), data)
    assert none == plain and metrics["opsm_masked_count"] == 0
    data["log_probs"] = [x + 9.0 for x in data["log_probs"]]  # the policy moved away from all of them
    dropped, metrics, _ = run(base_args(use_opsm=True, opsm_delta=0.5), data)
    assert metrics["opsm_masked_count"] == sum(
        r < 0 and m.sum() > 0 for r, m in zip(data["rewards"], data["loss_masks"], strict=True)
    )
    beside = {**make_data(), "rewards": [1.0, 1.0, 1.0, -1.0, 1.0]}
    beside["log_probs"][3][2] += 50.0  # only the token after a masked one drifted: 10 on average over five
    assert run(base_args(use_opsm=True, opsm_delta=5.0), beside)[1]["opsm_masked_count"] == 1
    good = {**data, "rewards": [max(r, 0.0) for r in data["rewards"]]}
    assert dropped == pytest.approx(run(base_args(), good)[0], rel=1e-6) and dropped != run(base_args(), data)[0]


def test_cispo_clip_fractions_are_of_the_ratio():
    args, data = base_args(advantage_estimator="cispo"), make_data()
    _, out = L.get_log_probs_and_entropy(
        torch.cat(data["logits"]).unsqueeze(0), args=args,
        **{k: data[k] for k in ("unconcat_tokens", "total_lengths", "response_lengths")},
    )  # fmt: skip
    data["log_probs"] = [x.clone() for x in out["log_probs"]]
    data["log_probs"][0][0] -= 0.5  # ratio 1.65
    data["log_probs"][3][0] += 0.5  # ratio 0.61
    data["log_probs"][3][2] += 0.5
    _, metrics, _ = run(args, data)
    assert metrics["pg_clipfrac_high"] == pytest.approx(1 / 11)
    assert metrics["pg_clipfrac_low"] == pytest.approx(2 / 11)
