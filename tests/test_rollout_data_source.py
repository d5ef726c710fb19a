"""Order, wrap-around, buffer, accounting and resume of the prompts."""

import json

import pytest

from slime.config import Args
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer, for_buffer
from slime.utils.types import Sample


@pytest.fixture
def make(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"p{i}", "label": i, "metadata": {"deep": [i]}}) + "\n" for i in range(5))
    )

    def make(cls=RolloutDataSourceWithBuffer, **flags):
        return cls(Args(**{"prompt_data": str(path), "n_samples_per_prompt": 2, **flags}))

    return make


def prompts(groups):
    return [group[0].prompt for group in groups]


def test_groups_are_numbered_and_independent(make):
    groups = make().get_samples(3)
    assert [[(s.group_index, s.index, s.rollout_id) for s in g] for g in groups] == [
        [(0, 0, 0), (0, 1, 1)],
        [(1, 2, 2), (1, 3, 3)],
        [(2, 4, 4), (2, 5, 5)],
    ]
    groups[0][0].metadata["deep"].append("changed")
    assert groups[0][1].metadata == {"deep": [0]}


@pytest.mark.parametrize("shuffle", [False, True])
def test_never_fewer_prompts_at_an_epochs_end(make, shuffle):
    source = make(rollout_shuffle=shuffle)
    assert len(source) == 5
    drawn = [prompts(source.get_samples(4)) for _ in range(5)]  # 20 prompts: four epochs
    assert all(len(d) == 4 for d in drawn)
    flat = [p for d in drawn for p in d]
    epochs = [flat[i : i + 5] for i in range(0, 20, 5)]
    assert all(sorted(e) == [f"p{i}" for i in range(5)] for e in epochs)
    assert (len({tuple(e) for e in epochs}) > 1) == shuffle
    assert prompts(make().get_samples(12)) == [f"p{i % 5}" for i in range(12)]  # more than an epoch at once


def test_order_depends_on_seed_only(make):
    a, b, c = (make(rollout_shuffle=True, rollout_seed=s) for s in (1, 1, 2))
    first = prompts(a.get_samples(15))
    assert first == prompts(b.get_samples(15)) != prompts(c.get_samples(15))


def test_buffer_is_served_first_and_accounted(make):
    source = make()
    groups = source.get_samples(4)
    source.add_samples([groups[1], groups[3]])
    source.settle([groups[0]], "trained")
    source.settle([groups[2]], "filtered")
    source.settle([groups[0]], "trained")  # told twice, counted once
    expected = dict(drawn=4, added=0, returned=2, trained=1, filtered=1, lost=0, in_flight=0, buffered=2)
    assert source.accounting() == expected
    again = source.get_samples(3)
    assert prompts(again) == ["p1", "p3", "p4"] and again[0] == groups[1]
    assert source.accounting() == {**expected, "drawn": 5, "in_flight": 3, "buffered": 0}
    with pytest.raises(ValueError, match="outcome"):
        source.settle([], "eaten")
    with pytest.raises(TypeError, match="lists of Sample"):
        source.add_samples([Sample()])


def test_plain_source_takes_nothing_back(make):
    source = make(RolloutDataSource)
    with pytest.raises(TypeError, match="RolloutDataSourceWithBuffer"):
        source.add_samples(source.get_samples(1))


def newest_first(args, rollout_id, buffer, num_samples):
    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]


def too_many(args, rollout_id, buffer, num_samples):
    return list(buffer)


def test_buffer_filter_hook(make):
    source = make(buffer_filter_path=f"{__name__}.newest_first")
    source.add_samples(source.get_samples(3))
    assert prompts(source.get_samples(2)) == ["p2", "p1"]
    source = make(buffer_filter_path=f"{__name__}.too_many")
    source.add_samples(source.get_samples(3))
    with pytest.raises(ValueError, match="3 groups, only 1"):
        source.get_samples(1)


@pytest.mark.parametrize("way", ["state_dict", "files"])
def test_resume_goes_on_with_the_same_prompts(make, tmp_path, way):
    flags = dict(rollout_shuffle=True, save=str(tmp_path / "ckpt"), load=str(tmp_path / "ckpt"))
    source, again = make(**flags), make(**flags)
    groups = source.get_samples(7)
    groups[2][1].append_response_tokens(tokens=[5, 6], log_probs=[-1.0, -2.0], text="x")
    groups[2][1].status = Sample.Status.ABORTED
    source.add_samples([groups[2]])
    source.settle(groups, "trained")
    if way == "files":
        source.save(4)
        again.load(4)
    else:
        again.load_state_dict(source.state_dict())
    assert again.accounting() == source.accounting()
    assert again.get_samples(9) == source.get_samples(9)


def test_state_with_groups_in_flight(make):
    source, again = make(), make()
    groups = source.get_samples(3)
    groups[0][0].append_response_tokens(tokens=[5], log_probs=[-1.0])
    source.settle([groups[1]], "trained")
    again.load_state_dict(source.state_dict())
    resumed = again.get_samples(3)
    assert prompts(resumed) == ["p0", "p2", "p3"]
    assert resumed[0][0].response_length == 0 and resumed[0][0].index == 0


def test_resume_with_other_prompts_is_refused(make, tmp_path):
    source = make()
    state = source.state_dict()
    with pytest.raises(ValueError, match="rollout_seed was 42 when saved and is 7 now"):
        make(rollout_seed=7).load_state_dict(state)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "other"}\n')
    with pytest.raises(ValueError, match="fingerprint was"):
        make().load_state_dict(state)


def test_missing_state_is_an_error_not_a_fresh_start(make, tmp_path):
    with pytest.raises(FileNotFoundError, match="cannot resume"):
        make(load=str(tmp_path)).load(3)
    make(load=str(tmp_path), finetune=True).load(3)
    make(load=str(tmp_path)).load(None)
    make().save(0)  # no --save: nothing to do


def test_unusable_prompts_are_refused_before_anything_starts(make, tmp_path):
    with pytest.raises(ValueError, match="--prompt-data is not set"):
        RolloutDataSource(Args())
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"prompt": [{"role": "user", "content": "x"}]}) + "\n")
    with pytest.raises(ValueError, match="--apply-chat-template"):
        make(prompt_data=str(path))
    make(prompt_data=str(path), custom_generate_function_path="my.generate")


def half_done_group():
    group = [Sample(group_index=3, index=i, rollout_id=i, prompt="p", label="l") for i in (6, 7)]
    group[0].append_response_tokens(tokens=[5], log_probs=[-1.0])
    group[0].status, group[0].reward = Sample.Status.COMPLETED, 1.0
    group[1].status = Sample.Status.ABORTED
    return group


def test_what_goes_back_keeps_its_tokens_only_for_partial_rollout():
    group = half_done_group()
    assert for_buffer(Args(partial_rollout=True), group) is group
    fresh = for_buffer(Args(), group)
    assert [(s.index, s.prompt, s.label, s.response_length, s.reward, s.status) for s in fresh] == [
        (6, "p", "l", 0, None, Sample.Status.PENDING),
        (7, "p", "l", 0, None, Sample.Status.PENDING),
    ]


def test_a_fanned_out_unfinished_group_starts_again():
    group = half_done_group()
    group.insert(1, Sample(group_index=3, index=6, rollout_id=6, prompt="p", status=Sample.Status.COMPLETED))
    assert [s.index for s in for_buffer(Args(partial_rollout=True), group)] == [6, 7]
    group[2].status = Sample.Status.COMPLETED
    assert for_buffer(Args(partial_rollout=True), group) is group
