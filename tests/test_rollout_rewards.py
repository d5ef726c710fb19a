"""Built-in rewards: right and wrong answers, graders that fail or hang, the user's functions."""

import asyncio
import os
import signal
import time

import pytest
from aiohttp import web
from rollout_wire import free_port

from slime.config import Args
from slime.rollout.filter_hub.base_types import DynamicFilterOutput, call_dynamic_filter
from slime.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std
from slime.rollout.patience import Scoring
from slime.rollout.rm_hub import (
    async_rm,
    batched_async_rm,
    compute_score,
    extract_answer,
    f1_score,
    get_deepscaler_rule_based_reward,
    grade_answer_verl,
)
from slime.rollout.rm_hub.answers import exact_match, final_answer, last_boxed, plain_number
from slime.rollout.rm_hub.grader_pool import GraderError, GraderPool, GraderTimeout
from slime.rollout.rm_hub.math_utils import compare_numbers
from slime.utils.async_utils import run
from slime.utils.types import Sample

pytestmark = pytest.mark.timeout(120)


def reward(rm_type, response, label, metadata=None, **flags):
    sample = Sample(index=7, response=response, label=label, metadata=metadata or {})
    return run(async_rm(Args(rm_type=rm_type, **flags), sample))


# -- finding answers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, answer",
    [
        (r"so \boxed{7}", "7"),
        (r"\boxed{1} or rather \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{a{b}c} end", "a{b}c"),
        (r"\fbox{3}", "3"),
        (r"\boxed 5 is it", "5"),
        (r"\boxed{cut of", None),
        ("none", None),
        (r"\boxed{}", ""),
    ],
)
def test_boxes(text, answer):
    assert last_boxed(text) == answer == extract_answer(text)


@pytest.mark.parametrize(
    "text, answer",
    [
        ("57", "57"),
        (" 57\n", "57"),
        ("<think>12 <answer>1</answer></think>57", "57"),
        ("<answer>1</answer><answer> 2 </answer>", "2"),
        ("work\n#### 1,234\nmore", "1,234"),
        (r"\boxed{3} #### 4", "3"),
        ("", ""),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text) == answer


def test_numbers():
    assert plain_number("1,234.50") == plain_number("1234.5") != plain_number("-1234.5")
    assert plain_number("12,34") is plain_number("1e5") is plain_number("x") is plain_number("") is None
    assert compare_numbers("2", "2.0") is True and compare_numbers("2", "3") is False
    assert compare_numbers("0.33333333", "0.33333334") is None  # math-verify's to judge


# -- text rewards ------------------------------------------------------------------------------------------------


def test_exact():
    assert reward("exact", " New  York\n", "New York") == 1.0
    assert reward("exact", "new york", "New York") == 0.0
    assert reward("exact", "12", 12) == 1.0
    assert exact_match("b", ["a", "b"]) == 1.0
    assert reward("boxed_exact", r"5 \boxed{6}", "6") == 1.0
    assert reward("boxed_exact", "6", "6") == 0.0


def test_f1():
    assert f1_score("the cat sat", "A cat sat down!") == pytest.approx((0.8, 1.0, 2 / 3))
    assert f1_score("dog", "cat") == (0.0, 0.0, 0.0)
    assert f1_score("yes it is", "yes") == (0.0, 0.0, 0.0)
    assert f1_score("Yes.", "yes")[0] == 1.0
    assert reward("f1", "the cat sat", ["dog", "a cat sat down"]) == pytest.approx(0.8)


def test_dapo():
    assert compute_score("...\nAnswer: 42", "42") == {"score": 1.0, "acc": True, "pred": "42"}
    assert compute_score("Answer: 41\nAnswer: $x = \\boxed{42}$", "42")["acc"]
    assert compute_score("Answer: \\frac12", r"\frac{1}{2}")["acc"]
    assert compute_score("Answer: 1,000.", "1000")["acc"]
    assert compute_score("it is 42", "42") == {"score": -1.0, "acc": False, "pred": "[INVALID]"}
    assert compute_score("Answer: 42" + "x" * 300, "42")["acc"] is False  # only the end counts
    assert compute_score(r"\boxed{42}", "42", strict_box_verify=True)["acc"]
    assert reward("dapo", "Answer: 3", 3) == {"score": 1.0, "acc": True, "pred": "3"}


# -- mathematics -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "response, label, expected",
    [
        ("57", "57", 1.0),
        ("57", 57, 1.0),
        ("58", "57", 0.0),
        ("The answer is 72.", "72", 1.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"first \boxed{1,234}", "#### 1234", 1.0),
        (r"$x^2+2x+1$", r"(x+1)^2", 1.0),
        (r"\boxed{3}", r"\boxed{4}", 0.0),
        ("no idea", "3", 0.0),
        ("", "3", 0.0),
        ("5", ["4", "5"], 1.0),
        (r"\frac{\frac{", "3", 0.0),
    ],
)
def test_math(response, label, expected):
    assert reward("math", response, label) == expected


def test_math_label_that_is_no_mathematics_is_an_error():
    with pytest.raises(GraderError, match="label '' is no mathematical expression"):
        reward("math", "3 apples", " ")


@pytest.mark.parametrize(
    ("kind", "label", "message"),
    [("math", "", "needs a label"), ("exact", [], "needs a label"), ("f1", float("nan"), "needs a label"),
     ("exact", {"ground_truth": "3"}, "found an object with ground_truth"), ("dapo", ["3"], "found a list")],
)  # fmt: skip
def test_a_label_that_would_make_every_answer_wrong_is_an_error(kind, label, message):
    with pytest.raises(ValueError, match=f"--rm-type {kind} .*{message}"):
        reward(kind, "3", label)


def test_an_answer_too_large_to_evaluate_is_wrong_not_a_hang():
    assert reward("math", r"\boxed{9^{9^{9^9}}}", "3", rm_timeout=4.0) == 0.0


def test_verl_and_deepscaler_names():
    assert grade_answer_verl(r"thus \boxed{x+1}", "1+x") is True
    assert grade_answer_verl(r"thus \boxed{0.50}", r"\boxed{\frac12}") is True
    assert grade_answer_verl("thus 3", "3") is False
    assert grade_answer_verl(r"\boxed{3}", "") is False
    assert get_deepscaler_rule_based_reward(r"<think>\boxed{1}</think>\boxed{2}", ["3", "2"]) == 1
    assert get_deepscaler_rule_based_reward(r"<think></think>\boxed{2}", "3") == 0
    assert get_deepscaler_rule_based_reward(r"\boxed{2}", "2") == 0  # no end of the reasoning
    assert reward("deepscaler", r"x</think>\boxed{\frac{4}{2}}", "2") == 1


def test_reasoning_gym():
    import reasoning_gym

    entry = reasoning_gym.create_dataset("basic_arithmetic", size=1, seed=3)[0]
    assert reward("reasoning_gym", entry["answer"], entry["answer"], entry["metadata"]) == 1.0
    assert reward("reasoning_gym", f"<answer>{entry['answer']}</answer>", None, {"entry": entry}) == 1.0
    wrong = {"dataset": "basic_arithmetic", "entry": entry}
    assert reward("reasoning_gym", "1234567", None, wrong) < 0.5
    with pytest.raises(ValueError, match="needs the task's name"):
        reward("reasoning_gym", "1", "1", {"other": 1})


# -- grader processes --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool():
    pool = GraderPool(2)
    yield pool
    pool.close()


def test_a_grader_that_hangs_is_killed_and_the_pool_goes_on(pool):
    started = time.monotonic()
    with pytest.raises(GraderTimeout, match="time.sleep did not finish within 0.3 s"):
        run(pool.call("time.sleep", 60, timeout=0.3))
    assert time.monotonic() - started < 30
    assert run(pool.call("math.sqrt", 4, timeout=10)) == 2.0


def test_a_grader_that_raises_or_dies_is_an_error(pool):
    with pytest.raises(GraderError, match="(?s)math.sqrt failed:.*ValueError"):
        run(pool.call("math.sqrt", -1, timeout=10))
    with pytest.raises(GraderError, match=f"exit code -{signal.SIGKILL}|died"):
        run(pool.call("signal.raise_signal", int(signal.SIGKILL), timeout=10))
    with pytest.raises(GraderError, match="no_such"):
        run(pool.call("math.no_such", timeout=10))
    with pytest.raises(GraderError, match="cannot be sent back"):
        run(pool.call("threading.Lock", timeout=10))
    assert run(pool.call("os.getppid", timeout=10)) == os.getpid()


def test_many_grades_share_few_processes(pool):
    async def main():
        return await asyncio.gather(*(pool.call("os.getpid", timeout=10) for _ in range(40)))

    assert 1 <= len(set(run(main()))) <= 2


# -- the user's and remote rewards -------------------------------------------------------------------------------


async def half(args, sample, **kwargs):
    return 0.5


def plain(args, sample):
    return {"score": 0.25}


async def whole_group(args, samples, **kwargs):
    return [float(i) for i in range(len(samples))]


async def too_short(args, samples, **kwargs):
    return [1.0]


def test_custom_rewards():
    args = Args(custom_rm_path=f"{__name__}.half", rm_type="exact")
    assert run(async_rm(args, Sample())) == 0.5
    assert run(async_rm(args, Sample(custom_rm_path=f"{__name__}.plain"))) == {"score": 0.25}
    assert run(batched_async_rm(args, [Sample(), Sample()])) == [0.5, 0.5]
    group = Args(custom_rm_path=f"{__name__}.whole_group", group_rm=True)
    assert run(batched_async_rm(group, [Sample()] * 3)) == [0.0, 1.0, 2.0]
    with pytest.raises(ValueError, match="1 rewards for 3 samples"):
        run(batched_async_rm(Args(custom_rm_path=f"{__name__}.too_short", group_rm=True), [Sample()] * 3))


def test_metadata_chooses_the_type():
    assert reward("math", "a", "a", {"rm_type": "exact"}) == 1.0


@pytest.mark.parametrize(
    "rm_type, label, words",
    [(None, "1", "--rm-type"), ("nonsense", "1", "built in are math"), ("exact", None, "label")],
)
def test_impossible_rewards(rm_type, label, words):
    with pytest.raises(ValueError, match=words):
        reward(rm_type, "1", label)


def test_random_is_reproducible():
    values = [run(async_rm(Args(rm_type="random"), Sample(index=i))) for i in range(40)]
    assert set(values) == {0.0, 1.0}
    assert values == [run(async_rm(Args(rm_type="random"), Sample(index=i))) for i in range(40)]


def test_remote():
    async def main():
        async def grade(request):
            data = await request.json()
            return web.json_response(float(data["response"] == data["label"]) if data["prompt"] == "p" else None)

        app, port = web.Application(), free_port()
        app.router.add_post("/rm", grade)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            args = Args(rm_type="remote_rm", rm_url=f"http://127.0.0.1:{port}/rm")
            return await async_rm(args, Sample(prompt="p", response="1", label="1"))
        finally:
            await runner.cleanup()

    assert run(main()) == 1.0
    with pytest.raises(ValueError, match="--rm-url"):
        reward("remote_rm", "1", "1")


# -- filters -----------------------------------------------------------------------------------------------------


def rated(*rewards):
    return [Sample(index=i, reward=r) for i, r in enumerate(rewards)]


@pytest.mark.parametrize(
    "rewards, keep",
    [
        ([0.0, 1.0], True),
        ([1.0, 1.0, 1.0], False),
        ([0.1 + 0.2, 0.3], False),  # float noise
        ([100.3] * 7 + [100.30000305], False),  # the same number that went through float32
        ([10000.0, 10001.0], True),
        ([0.0, 1e-8], True),
        ([0.0, 0.0], False),
        ([-1.0, 1.0], True),
        ([1.0], True),
        ([float("nan"), 1.0, 1.0], False),
        ([float("nan"), 0.0, 1.0], True),
        ([float("nan"), float("inf")], False),
    ],
)
def test_nonzero_std_filter(rewards, keep):
    assert check_reward_nonzero_std(Args(), rated(*rewards)).keep is keep


def test_nonzero_std_filter_reads_keys_and_leaves_out_removed_samples():
    group = [Sample(reward={"a": 1, "b": i}) for i in range(2)]
    assert check_reward_nonzero_std(Args(reward_key="b"), group).keep
    verdict = check_reward_nonzero_std(Args(reward_key="a"), group)
    assert verdict == DynamicFilterOutput(False, "zero_std_1.0")
    group = rated(0.0, 1.0)
    group[0].remove_sample = True
    assert not check_reward_nonzero_std(Args(), [*group, *rated(1.0)]).keep


def test_filter_results_of_any_kind():
    assert call_dynamic_filter(None, Args(), []).keep
    assert call_dynamic_filter(lambda a, s: False, Args(), []) == DynamicFilterOutput(False)
    assert call_dynamic_filter(lambda a, s: DynamicFilterOutput(True, "x"), Args(), []).reason == "x"


def test_a_reward_that_takes_long_is_named(caplog):
    scoring = Scoring()
    with scoring.watched(first=0.04), scoring.of(Sample(index=7, group_index=2)):
        time.sleep(0.5)  # on whatever thread: nothing of an event loop runs meanwhile
    lines = [r.getMessage() for r in caplog.records]
    assert lines and all("calls under way: 1" in line and "of sample 7 (group 2)" in line for line in lines)
    assert len(lines) < 10  # at twice the time each
    assert scoring.seconds >= 0.5
    caplog.clear()
    with scoring.watched(first=0.04):
        time.sleep(0.1)  # nothing is being scored
    assert not caplog.records
