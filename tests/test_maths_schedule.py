"""The schedule's invariants, against random batches."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.config import Args
from slime.data.schedule import first_fit, make_schedule, split_for_ranks


@st.composite
def batches(draw):
    n = draw(st.integers(1, 40))
    lengths = draw(st.lists(st.integers(1, 120), min_size=n, max_size=n))
    trained = [draw(st.integers(0, length)) for length in lengths]
    fan_out = draw(st.booleans())
    rollouts = [i // 3 if fan_out else i for i in range(n)]
    args = Args(
        global_batch_size=draw(st.one_of(st.none(), st.integers(1, 20))),
        balance_data=draw(st.booleans()),
        use_dynamic_batch_size=draw(st.booleans()),
        micro_batch_size=draw(st.integers(1, 5)),
        max_tokens_per_gpu=draw(st.integers(10, 150)),
        context_parallel_size=draw(st.sampled_from([1, 2])),
    )
    return args, lengths, trained, rollouts, draw(st.integers(1, 5))


@settings(max_examples=100, deadline=None)
@given(batches())
def test_invariants(batch):
    args, lengths, trained, rollouts, dp_size = batch
    schedule = make_schedule(args, lengths, trained, rollouts, dp_size)
    assert schedule == make_schedule(args, list(lengths), list(trained), list(rollouts), dp_size)

    seen = [i for step in schedule.steps for rank in step.ranks for bin_ in rank for i in bin_]
    assert sorted(seen) == list(range(len(lengths)))
    distinct = list(dict.fromkeys(rollouts))
    size = args.global_batch_size or len(distinct)
    for number, step in enumerate(schedule.steps):
        assert len(step.ranks) == dp_size
        assert len({len(rank) for rank in step.ranks}) == 1
        members = [i for rank in step.ranks for bin_ in rank for i in bin_]
        of_step = distinct[number * size : (number + 1) * size]
        assert {rollouts[i] for i in members} == set(of_step)
        assert step.num_tokens == sum(trained[i] for i in members)
        assert step.num_samples == sum(any(trained[i] for i in members if rollouts[i] == r) for r in of_step)
        for rank in step.ranks:
            for bin_ in rank:
                assert bin_ == sorted(bin_)
                if args.use_dynamic_batch_size:
                    limit = args.max_tokens_per_gpu * args.context_parallel_size
                    assert len(bin_) <= 1 or sum(lengths[i] for i in bin_) <= limit
                else:
                    assert len(bin_) <= args.micro_batch_size
            # An empty micro-batch only where no other could have been split.
            assert [] not in rank or all(len(bin_) <= 1 for bin_ in rank)
        counts = [sum(map(len, rank)) for rank in step.ranks]
        assert max(counts) - min(counts) <= 1
    for i, denominator in enumerate(schedule.sample_denominators):
        assert denominator == max(1, sum(t for t, r in zip(trained, rollouts, strict=True) if r == rollouts[i]))


@settings(max_examples=60, deadline=None)
@given(batches())
def test_split_for_ranks_keeps_rows_together(batch):
    args, lengths, trained, rollouts, dp_size = batch
    columns = {"total_lengths": lengths, "trained": trained, "row": list(range(len(lengths)))}
    schedule = make_schedule(args, lengths, trained, rollouts, dp_size)
    parts = split_for_ranks(columns, schedule)
    for rank, part in enumerate(parts):
        for step, whole in zip(part.steps, schedule.steps, strict=True):
            assert [[part.columns["row"][i] for i in b] for b in step.micro_batches] == whole.ranks[rank]
            assert (step.num_samples, step.num_tokens) == (whole.num_samples, whole.num_tokens)
        for row, length, mine in zip(
            part.columns["row"], part.columns["total_lengths"], part.sample_denominators, strict=True
        ):
            assert length == lengths[row] and mine == schedule.sample_denominators[row]
    assert sorted(r for part in parts for r in part.columns["row"]) == columns["row"]


def test_balanced_by_tokens():
    lengths = [100, 90, 10, 20, 50, 50, 5, 75]
    args = Args(global_batch_size=8, balance_data=True, max_tokens_per_gpu=1000)
    (step,) = make_schedule(args, lengths, lengths, list(range(8)), 2).steps
    tokens = [sum(lengths[i] for b in rank for i in b) for rank in step.ranks]
    assert tokens == [205, 195]


def test_a_sample_over_the_limit_is_alone():
    args = Args(global_batch_size=4, max_tokens_per_gpu=10)
    (step,) = make_schedule(args, [25, 4, 3, 3], [1, 1, 1, 1], [0, 1, 2, 3], 1).steps
    assert sorted(step.ranks[0]) == [[0], [1, 2, 3]]


def test_context_parallel_ranks_share_a_micro_batch():
    args = Args(global_batch_size=2, max_tokens_per_gpu=10, context_parallel_size=2)
    (step,) = make_schedule(args, [10, 10], [1, 1], [0, 1], 1).steps
    assert step.ranks == [[[0, 1]]]


def test_last_step_takes_the_rest_and_nothing_trained_gives_zero_denominators():
    schedule = make_schedule(Args(global_batch_size=3), [5] * 4, [2, 0, 1, 0], [0, 1, 2, 3], 2)
    assert [(s.num_samples, s.num_tokens) for s in schedule.steps] == [(2, 3), (0, 0)]
    assert schedule.sample_denominators == [2.0, 1.0, 1.0, 1.0]


def test_fan_out_pieces_share_one_denominator_and_one_step():
    schedule = make_schedule(Args(global_batch_size=2), [9] * 5, [2, 3, 4, 0, 1], ["a", "a", "b", "b", "c"], 1)
    assert [(s.num_samples, s.num_tokens) for s in schedule.steps] == [(2, 9), (1, 1)]
    assert schedule.sample_denominators == [5.0, 5.0, 4.0, 4.0, 1.0]


def test_first_fit_decreasing():
    assert first_fit(range(5), [6, 4, 5, 3, 2], 10) == [[0, 1], [2, 3, 4]]
    assert first_fit(range(4), [5, 5, 5, 5], 10) == [[0, 1], [2, 3]]  # equal lengths in order


def test_ties_go_to_the_first():
    """Every machine makes the same schedule, so it is pinned where nothing but a rule decides."""
    args = Args(global_batch_size=7, balance_data=True, use_dynamic_batch_size=False, micro_batch_size=9)
    (step,) = make_schedule(args, [5] * 7, [1] * 7, list(range(7)), 3).steps
    assert step.ranks == [[[0, 3, 6]], [[1, 4]], [[2, 5]]]
    for lengths, first, second in (
        ([4, 4, 4, 4, 9, 9, 9], [[0], [1], [2], []], [[4], [5], [6], [3]]),
        ([3, 3, 3, 3, 3, 3, 9, 9, 9], [[0], [2], [1], [3]], [[6], [7], [8], [4, 5]]),
    ):
        args = Args(global_batch_size=len(lengths), balance_data=False, max_tokens_per_gpu=10)
        (step,) = make_schedule(args, lengths, [1] * len(lengths), list(range(len(lengths))), 2).steps
        assert step.ranks == [first, second]


def test_the_heaviest_micro_batch_is_halved():
    args = Args(global_batch_size=9, balance_data=False, use_dynamic_batch_size=False, micro_batch_size=2)
    for lengths, grown in (([1, 1, 5, 5], [[0, 1], [2], [3]]), ([3, 3, 3, 3], [[0], [1], [2, 3]])):
        (step,) = make_schedule(args, lengths + [1] * 5, [1] * 9, list(range(9)), 2).steps
        assert step.ranks == [grown, [[4, 5], [6, 7], [8]]]


def test_no_samples_no_steps():
    assert make_schedule(Args(global_batch_size=None), [], [], [], 2).steps == []


def test_columns_that_disagree_are_named():
    with pytest.raises(ValueError, match="2 total_lengths, 1 trained_tokens"):
        make_schedule(Args(), [1, 2], [1], [0, 1], 1)
    schedule = make_schedule(Args(), [1, 2], [1, 1], [0, 1], 1)
    with pytest.raises(ValueError, match="odd.*3"):
        split_for_ranks({"odd": [1, 2, 3]}, schedule)
