"""The ledger: every prompt group is accounted for at every step, also over crashes; a violation is an error."""

import json

import pytest

from slime.__main__ import main as slime_main
from slime.config import Args
from slime.data.ledger import FILE, LedgerError, audit, read_ledger
from slime.observability.samples import write_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.utils.types import Sample


@pytest.fixture
def make(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}", "label": i}) + "\n" for i in range(5)))

    def make(**flags):
        args = Args(prompt_data=str(path), n_samples_per_prompt=2, run_dir=str(tmp_path / "run"), **flags)
        return RolloutDataSourceWithBuffer(args)

    return make


def start(source, state=None, step=0):
    if state is not None:
        source.load_state_dict(state)
    source.ledger.open(source.args.run_dir, state and state["ledger"], step)
    return source


def one_step(source, step):
    """Four groups: two trained, one filtered, one back to the buffer. Returns the prompts that were trained."""
    source.ledger.begin(step)
    groups = source.get_samples(4)
    for group in groups[:3]:
        for sample in group:
            sample.append_response_tokens(tokens=[7], log_probs=[-1.0], meta_info={"weight_version": str(step)})
    source.add_samples(groups[3:])
    source.settle(groups[:2], "trained")
    source.settle(groups[2:3], "filtered", "zero_std")
    source.ledger.check()
    return [group[0].prompt for group in groups[:2]], groups


def test_a_crash_loses_and_doubles_nothing(make, tmp_path, capsys):
    """Killed after step 2 with a checkpoint of step 0, in the middle of a line: the same as never killed."""
    source, run = start(make()), tmp_path / "run"
    trained = [one_step(source, step)[0] for step in range(4)]
    expected = source.accounting()
    (run / FILE).rename(tmp_path / "whole.jsonl")

    source = start(make())
    again = [one_step(source, 0)[0]]
    state = source.state_dict()
    one_step(source, 1), one_step(source, 2)
    with open(run / FILE, "ab") as file:
        file.write(b'{"event": "trai')
    source = start(make(), state, 1)
    _, groups = one_step(source, 1)
    again.append([group[0].prompt for group in groups[:2]])
    write_samples(run, 1, groups[0])
    state = source.state_dict()
    source = start(make(), state, 2)  # once more, this time without a step in between
    again += [one_step(source, step)[0] for step in (2, 3)]

    assert again == trained and source.accounting() == expected
    records = read_ledger(run)
    assert sum(r.void for r in records) > 10 and len([r for r in records if r.event == "resumed"]) == 2
    book = audit(records)
    assert book.problems == [] and book.accounting() == expected
    live = [r for r in records if not r.void and r.event == "drawn"]
    assert [r.group for r in live] == list(range(len(live)))

    assert slime_main(["explain", str(run)]) == 0
    out = capsys.readouterr().out
    assert "every group is accounted for" in out and "filtered by zero_std: 4" in out and "2 restarts" in out
    group = groups[0][0].group_index  # returned in step 0, trained in step 1, undone, trained again
    assert slime_main(["explain", str(run), "--sample", str(groups[0][1].index)]) == 0
    out = capsys.readouterr().out
    assert f"number 2 of 2 in group {group}" in out and "put back into the buffer" in out and "undone" in out
    assert "step 1: trained, tokens of weight version 1\n" in out and "reward: None" in out
    assert slime_main(["explain", str(run), "--sample", "999"]) == 2
    assert "it has samples 0 to" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["[1]", "7", '{"event": "gone"}', '{"event": "trained", "step": 1}'])
def test_a_line_that_is_no_record_is_named(tmp_path, capsys, line):
    (tmp_path / FILE).write_text('{"event": "taken", "step": 0, "group": 1}\n' + line + "\n")
    assert slime_main(["explain", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("explain: ") and "ledger.jsonl, line 2: " in error and error.count("\n") == 1


def test_in_flight_groups_survive(make):
    source = start(make())
    groups = source.get_samples(3)
    source.settle(groups[1:2], "trained")
    again = start(make(), source.state_dict(), 1)
    assert [g[0].prompt for g in again.get_samples(2)] == ["p0", "p2"]
    again.ledger.check()
    assert audit(read_ledger(again.args.run_dir)).problems == []


def test_violations_are_errors(make):
    source = start(make())
    (group,) = source.get_samples(1)
    source.settle([group], "trained")
    source.settle([group], "trained")  # told twice in a step: the rollout function and the manager
    source.settle([[Sample(group_index=99)], [Sample()]], "trained")  # a hook's own samples
    source.ledger.check()
    source.ledger.begin(1)
    source.settle([group], "trained")
    with pytest.raises(LedgerError, match="group 0 is trained although it was used up in an earlier step"):
        source.ledger.check()
    assert slime_main(["explain", source.args.run_dir]) == 1


@pytest.mark.parametrize("outcome", ["filtered", "trained"])
def test_one_end_only(make, outcome):
    source = start(make())
    groups = source.get_samples(2)
    source.add_samples(groups[:1])
    source.settle(groups, "filtered")
    source.settle(groups[1:], outcome)
    message = "waits in the buffer" + (r".*group 1 is trained although it is filtered" if outcome == "trained" else "")
    with pytest.raises(LedgerError, match=message):
        source.ledger.check()


def test_hooks_may_replay_and_throw_away(make):
    source = start(make(buffer_filter_path=f"{__name__}.newest_only"))
    groups = source.get_samples(3)
    source.settle(groups, "trained")
    source.add_samples([*groups, [Sample(prompt="my own")]])
    assert [g[0].prompt for g in source.get_samples(2)] == ["my own", "p3"]
    source.ledger.check()
    n = source.accounting()
    assert (n["added"], n["filtered"], n["in_flight"], n["buffered"]) == (4, 3, 2, 0)
    assert audit(read_ledger(source.args.run_dir)).problems == []


def newest_only(args, rollout_id, buffer, num_samples):
    newest = buffer.pop()
    buffer.clear()
    return [newest]


def test_another_run_folder(make, tmp_path, capsys):
    """A checkpoint resumed into a new folder starts that folder's ledger with the balance so far."""
    source = start(make())
    one_step(source, 0)
    state = source.state_dict()
    source = make()
    source.args = source.args.replace(run_dir=str(tmp_path / "other"))
    one_step(start(source, state, 1), 1)
    assert audit(read_ledger(tmp_path / "other")).problems == []
    assert slime_main(["explain", str(tmp_path / "other")]) == 0
    assert slime_main(["explain", str(tmp_path / "nowhere")]) == 2
    assert "no ledger.jsonl" in capsys.readouterr().err


def test_usage(capsys):
    assert slime_main(["--help"]) == 0 and "explain RUN" in capsys.readouterr().out
    assert slime_main(["explian"]) == 2 and "one of view, explain" in capsys.readouterr().err
