"""Samples to columns: what is checked, what travels, what the statistics count."""

import math

import numpy as np
import pytest

from slime.config import Args, ConfigError
from slime.data.batch import check_log_probs, samples_to_columns
from slime.utils.types import Sample

ARGS = Args(loss_type="policy_loss")


def sample(index=0, reward=0.0, response=3, group=0, **fields):
    out = Sample(
        index=index, group_index=group, rollout_id=index, tokens=list(range(2 + response)), response_length=response,
        reward=reward,
    )  # fmt: skip
    for name, value in fields.items():
        setattr(out, name, value)
    return out


def group(rewards, **fields):
    return [sample(i, r, **fields) for i, r in enumerate(rewards)]


def post_process(args, samples):
    return [float(s.index) for s in samples], [2.0 * s.index for s in samples]


def wrong_post_process(args, samples):
    return [1.0]


def three_lists(args, samples):
    return [1.0], [1.0], [1.0]


def a_list_of_two(args, samples):
    return [[1.0], [1.0]]


def too_short(args, samples):
    return [1.0], []


def not_a_number(args, samples):
    return [1.0, 0.0], [float("nan"), -1.0]


def test_columns_and_types():
    samples = group([1.0, 0.0], rollout_log_probs=[-0.1, -0.2, -0.3])
    samples[1].status = Sample.Status.TRUNCATED
    samples[1].loss_mask = [1, 0, 1]
    columns = samples_to_columns(ARGS, samples)
    assert columns["tokens"][0].dtype == np.int64 and columns["tokens"][0].tolist() == [0, 1, 2, 3, 4]
    assert columns["loss_masks"][1].dtype == np.float32 and columns["loss_masks"][1].tolist() == [1, 0, 1]
    assert columns["rollout_log_probs"][0].dtype == np.float32
    assert columns["total_lengths"] == [5, 5] and columns["response_lengths"] == [3, 3]
    assert columns["truncated"] == [0, 1] and columns["raw_reward"] == [1.0, 0.0]
    assert columns["rewards"] == pytest.approx([1 / math.sqrt(2), -1 / math.sqrt(2)], abs=1e-5)
    assert "teacher_log_probs" not in columns
    assert all(len(values) == 2 for values in columns.values())


def test_removed_and_nan_samples_are_masked_and_not_counted(caplog):
    samples = group([1.0, 0.0, 1.0, 100.0, float("nan")])
    samples[3].remove_sample = True
    columns = samples_to_columns(ARGS, samples)
    alone = samples_to_columns(ARGS, samples[:3])
    assert columns["rewards"] == alone["rewards"] + [0.0, 0.0]
    assert not columns["loss_masks"][3].any() and not columns["loss_masks"][4].any()
    assert "sample 4 is not trained: its reward is nan" in caplog.text and "sample 3" not in caplog.text
    assert columns["raw_reward"][3] == 100.0 and math.isnan(columns["raw_reward"][4])
    samples[3].reward, samples[4].loss_mask = None, [1, 0, 1]  # removed without a reward; partly masked
    columns = samples_to_columns(ARGS, samples)
    assert columns["rewards"] == alone["rewards"] + [0.0, 0.0] and not columns["loss_masks"][4].any()


def test_a_sibling_without_trained_tokens_moves_nobody():
    samples = group([1.0, 0.0, 100.0])
    samples[2].loss_mask = [0, 0, 0]
    assert samples_to_columns(ARGS, samples)["rewards"][:2] == samples_to_columns(ARGS, samples[:2])["rewards"]


def test_pieces_of_one_rollout_count_once():
    samples = group([1.0, 1.0, 1.0, 0.0])
    for piece in samples[:3]:
        piece.rollout_id = 7
    rewards = samples_to_columns(ARGS, samples)["rewards"]
    assert rewards == pytest.approx([1 / math.sqrt(2)] * 3 + [-1 / math.sqrt(2)], abs=1e-5)


def test_ragged_groups_by_id():
    args = Args(disable_grpo_std_normalization=True, n_samples_per_prompt=3)
    samples = [
        sample(i, r, group=g) for i, (g, r) in enumerate(zip([0, 0, 1, 1, 1, 1], [1, 0, 0, 0, 0, 1], strict=True))
    ]
    assert samples_to_columns(args, samples)["rewards"] == [0.5, -0.5, -0.25, -0.25, -0.25, 0.75]


@pytest.mark.parametrize(
    ("estimator", "raw", "expected"),
    [
        ("gspo", False, [0.5**0.5, -(0.5**0.5)]),
        ("cispo", False, [0.5**0.5, -(0.5**0.5)]),
        ("rloo", False, [1.0, -1.0]),
        ("maxrl", False, [1.0, -1.0]),
        ("maxrl", True, [2.0, 0.0]),
        ("tailrl", False, [1.0, -1.0]),
        ("tailrl", True, [2.0, 0.0]),
        ("reinforce_plus_plus_baseline", False, [0.5, -0.5]),
        ("reinforce_plus_plus", False, [1.0, 0.0]),
        ("ppo", False, [1.0, 0.0]),
        ("on_policy_distillation", False, [1.0, 0.0]),
        ("grpo", True, [1.0, 0.0]),
    ],
)
def test_estimators(estimator, raw, expected):
    args = Args(advantage_estimator=estimator, disable_rewards_normalization=raw)
    samples = group([1.0, 0.0], teacher_log_probs=[-1.0] * 3)
    assert samples_to_columns(args, samples)["rewards"] == pytest.approx(expected, abs=1e-5)


def test_raw_streams():
    samples = group([1.0, -1.0], group=None)
    with pytest.raises(ValueError, match="sample 0 has no group_index.*--disable-rewards-normalization"):
        samples_to_columns(ARGS, samples)
    columns = samples_to_columns(ARGS.replace(disable_rewards_normalization=True), samples)
    assert columns["rewards"] == [1.0, -1.0] and len(set(columns["group_ids"])) == 2
    columns = samples_to_columns(ARGS.replace(advantage_estimator="ppo"), samples)
    assert columns["rewards"] == [1.0, -1.0] and columns["group_ids"] == [-1, -2]
    samples[0].group_index, samples[0].remove_sample = None, True  # nothing is trained of it: nobody asks for its group
    samples[1].group_index = 0
    assert samples_to_columns(ARGS, samples)["group_ids"] == [-1, 0]


def test_samples_without_a_number_go_by_their_place():
    samples = group([1.0, 0.0])
    samples[1].index = None
    assert samples_to_columns(ARGS, samples)["sample_indices"] == [0, 1]
    samples[1].loss_mask = [1]
    with pytest.raises(ValueError, match="sample 1: 1 loss_mask"):
        samples_to_columns(ARGS, samples)


def test_rewards_of_sft_and_of_custom_losses_may_be_absent():
    for loss_type in ("sft_loss", "custom_loss"):
        columns = samples_to_columns(Args(loss_type=loss_type), group([None, None], group=None))
        assert columns["rewards"] == columns["raw_reward"] == [0.0, 0.0]
    assert samples_to_columns(Args(loss_type="sft_loss"), group([1.0, 2.0]))["raw_reward"] == [1.0, 2.0]
    custom = Args(loss_type="custom_loss", advantage_estimator="rloo")
    assert samples_to_columns(custom, group([1.0, 0.0]))["rewards"] == [1.0, -1.0]
    for args in (ARGS, custom):
        with pytest.raises(ValueError, match="sample 1 has no reward"):
            samples_to_columns(args, group([1.0, None]))


def test_user_fields_travel():
    samples = group([1.0, 0.0])
    for s in samples:
        s.train_metadata = {
            "turn": s.index, "token_weights": [0.5, 1.0, 1.5], "spans": [(0, 1), (1, 3)], "name": "x",
            "words": ["a", "b"], "ragged": [[1], [2, 3]], "array": np.arange(3.0), "none": [], "flags": [True, False],
        }  # fmt: skip
    columns = samples_to_columns(ARGS, samples)
    assert columns["turn"] == [0, 1] and columns["name"] == ["x", "x"]
    assert columns["token_weights"][0].dtype == np.float32 and columns["spans"][0].tolist() == [[0, 1], [1, 3]]
    assert type(columns["turn"][0]) is int and columns["words"][0] == ["a", "b"]
    assert columns["ragged"][0] == [[1], [2, 3]] and columns["array"][0].dtype == np.float64
    assert columns["none"][0].shape == (0,) and columns["none"][0].dtype == np.float32
    assert columns["flags"][0].dtype == np.int64
    samples[1].train_metadata = None
    with pytest.raises(ValueError, match=r"sample 1 has no train_metadata\['turn'\]"):
        samples_to_columns(ARGS, samples)
    samples[1].train_metadata = {"turn": 1}
    with pytest.raises(ValueError, match=r"sample 1 has no train_metadata\['token_weights'\]"):
        samples_to_columns(ARGS, samples)
    with pytest.raises(ValueError, match=r"train_metadata\['advantages'\]"):
        samples_to_columns(ARGS, group([1.0], train_metadata={"advantages": 1}))


def test_empty_response_is_a_column_of_nothing():
    samples = [sample(0, 1.0, response=0), sample(1, 0.0, rollout_log_probs=[-1.0] * 3)]
    columns = samples_to_columns(ARGS, samples)
    assert columns["loss_masks"][0].shape == (0,) and columns["rollout_log_probs"][0].shape == (0,)
    assert "rollout_log_probs" not in samples_to_columns(ARGS, [sample(0, 1.0, response=0)])


def test_log_probs_only_if_all_have_them(caplog):
    samples = group([1.0, 0.0], rollout_log_probs=[-1.0] * 3)
    samples[1].rollout_log_probs = None
    assert "rollout_log_probs" not in samples_to_columns(ARGS, samples)
    assert "rollout_log_probs is left out" in caplog.text and "sample 1" in caplog.text
    caplog.clear()
    samples_to_columns(ARGS, [sample(0, 1.0, response=0), sample(1, 0.0, response=1)])
    assert not caplog.text  # none has them: nothing is left out
    samples_to_columns(ARGS, [sample(0, 1.0, response=1, rollout_log_probs=[-1.0]), sample(1, 0.0)])
    assert "rollout_log_probs is left out" in caplog.text


def test_a_sample_that_is_not_trained_may_lack_log_probs():
    samples = group([1.0, 0.0, 0.5], rollout_log_probs=[-1.0] * 3)
    samples[1].rollout_log_probs, samples[1].remove_sample = None, True
    columns = samples_to_columns(Args(use_tis=True), samples)
    assert columns["rollout_log_probs"][1].tolist() == [0.0] * 3


OPD = dict(advantage_estimator="on_policy_distillation")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (dict(use_tis=True), "--use-tis needs Sample.rollout_log_probs on every .*, sample 1 has none: .*append_resp"),
        (dict(use_rollout_logprobs=True), "--use-rollout-logprobs needs Sample.rollout_log_probs"),
        (dict(custom_tis_function_path="a.b"), "--custom-tis-function-path needs Sample.rollout_log_probs"),
        (OPD, "distillation needs Sample.teacher_log_probs on every .*, sample 0 has none: .*--opd-teacher-url does"),
        (dict(opd_kl_coef=0.1), "--opd-kl-coef needs Sample.teacher_log_probs"),
        (dict(**OPD, distill_topk=3), "distillation needs Sample.teacher_topk_log_probs and .*, sample 0 has none"),
        (dict(advantage_estimator="maxrl"), r"maxrl needs rewards in \[0, 1\]: sample 2 has -1; rescale"),
        (dict(advantage_estimator="tailrl"), r"tailrl needs rewards in \[0, 1\]: sample 2 has -1; rescale"),
    ],
)
def test_samples_that_the_flags_cannot_work_with(flags, message):
    samples = group([1.0, 0.0, -1.0], rollout_log_probs=[-1.0] * 3)
    samples[1].rollout_log_probs = samples[0].index = None
    with pytest.raises(ConfigError, match=message):
        samples_to_columns(Args(**flags), samples)
    samples_to_columns(Args(**{**flags, "loss_type": "sft_loss"}), samples)  # which reads none of it


def test_one_sample_is_checked_as_it_comes():
    lacks, args = sample(4), Args(use_tis=True)
    with pytest.raises(ConfigError, match="--use-tis needs Sample.rollout_log_probs .* sample 4 has none"):
        check_log_probs(args, lacks)
    check_log_probs(ARGS, lacks)
    for fine in (dict(rollout_log_probs=[-1.0] * 3), dict(remove_sample=True), dict(loss_mask=[0, 0, 0])):
        check_log_probs(args, sample(4, **fine))


def test_a_teachers_most_likely_tokens():
    log_probs, ids = [[-0.5, -1.5]] * 3, [[4, 0]] * 3
    samples = group([1.0, 0.0, 0.5], teacher_topk_log_probs=log_probs, teacher_topk_indices=ids)
    samples[1].remove_sample, samples[1].teacher_topk_indices = True, None
    samples.append(sample(3, 0.0, response=0))
    columns = samples_to_columns(Args(**OPD, distill_topk=2), samples)
    for name, dtype in (("teacher_topk_log_probs", np.float32), ("teacher_topk_indices", np.int32)):
        assert [x.shape for x in columns[name]] == [(3, 2)] * 3 + [(0, 2)] and columns[name][0].dtype == dtype
    assert columns["teacher_topk_indices"][0].tolist() == ids and not columns["teacher_topk_indices"][1].any()
    assert "teacher_topk_indices" in samples_to_columns(Args(loss_type="custom_loss"), samples)

    samples[0].loss_mask = [1, 0, 1]  # what is not trained may hold anything
    samples[0].teacher_topk_log_probs = [[-0.5, -1.5], [0.0, math.nan], [-0.5, -1.5]]
    samples_to_columns(Args(**OPD, distill_topk=2), samples)
    samples[0].loss_mask = None
    with pytest.raises(ValueError, match="sample 0: row 1 of teacher_topk_log_probs.* is not 2 different tokens"):
        samples_to_columns(Args(**OPD, distill_topk=2), samples)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(teacher_topk_indices=[[1, 1]] * 3), "row 0 of .* is not 2 different tokens"),
        (dict(teacher_topk_indices=[[-1, 1]] * 3), "row 0 of .* is not 2 different tokens"),
        (dict(teacher_topk_log_probs=[[0.0, 0.0]] * 3), "1 or less together; mask tokens"),
        (dict(teacher_topk_log_probs=[[-0.5, -math.inf]] * 3), "with finite log-probs"),
        (dict(teacher_topk_log_probs=[[-1.0, -1.0]] * 2), "sample 0: teacher_topk_log_probs must be 3 rows"),
        (dict(teacher_topk_log_probs=[[-1.0, -1.0], [-1.0], [-1.0]]), "must be 3 rows, one per response token, of 2"),
        (dict(teacher_topk_indices=None), "sample 0 has none"),
    ],
)
def test_faulty_most_likely_tokens(fields, message):
    good = dict(teacher_topk_log_probs=[[-0.5, -1.5]] * 3, teacher_topk_indices=[[4, 2]] * 3)
    samples = [sample(0, 1.0, **{**good, **fields}), sample(1, 0.0, **good)]
    with pytest.raises(ValueError, match=message):
        samples_to_columns(Args(opd_kl_coef=0.1, distill_topk=2), samples)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_mask": [1]}, "sample 0: 1 loss_mask for 3 response tokens"),
        ({"rollout_log_probs": [1.0]}, "sample 0: 1 rollout_log_probs for 3"),
        ({"teacher_log_probs": [1.0] * 4}, "sample 0: 4 teacher_log_probs for 3"),
        ({"response_length": 6}, "sample 0: response_length 6 with 5 tokens"),
        ({"response_length": 5}, "sample 0: no prompt token"),
        ({"response_length": -1}, "sample 0: response_length -1"),
        ({"loss_mask": [1, 2, 0]}, "sample 0: loss_mask must hold 0 and 1"),
    ],
)
def test_faults_name_the_sample(fields, message):
    with pytest.raises(ValueError, match=message):
        samples_to_columns(ARGS, [sample(**fields)])


def test_no_samples():
    with pytest.raises(ValueError, match="no samples"):
        samples_to_columns(ARGS, [])


def test_reward_post_process_hook():
    here = "tests.test_maths_batch" if __name__.startswith("tests.") else __name__
    columns = samples_to_columns(
        ARGS.replace(custom_reward_post_process_path=f"{here}.post_process"), group([None, None])
    )
    assert columns["raw_reward"] == [0.0, 1.0] and columns["rewards"] == [0.0, 2.0]
    for name, message in (
        ("wrong_post_process", "must return"), ("three_lists", "must return"), ("a_list_of_two", "must return"),
        ("too_short", "0 rewards for 1 samples"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            samples_to_columns(ARGS.replace(custom_reward_post_process_path=f"{here}.{name}"), group([1.0]))
    args = ARGS.replace(custom_reward_post_process_path=f"{here}.not_a_number")
    columns = samples_to_columns(args, group([None, None]))
    assert columns["rewards"] == [0.0, -1.0]
    assert not columns["loss_masks"][0].any() and columns["loss_masks"][1].all()
