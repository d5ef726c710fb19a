"""The rollout function against a server that speaks SGLang's wire format, with faults."""

import asyncio
import contextlib
import copy
import json
import sys
import traceback

import pytest
from aiohttp import web
from rollout_wire import WireServer, free_port, save_tokenizer

from slime.config import Args, ConfigError
from slime.rollout import generation
from slime.rollout.base_types import RolloutError, RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.sglang_rollout import (
    GenerateState,
    eval_rollout,
    generate,
    generate_and_rm,
    generate_and_rm_group,
    generate_rollout,
)
from slime.utils import http_utils
from slime.utils.async_utils import run
from slime.utils.types import Sample

pytestmark = pytest.mark.timeout(120)
ABORTED, COMPLETED, TRUNCATED = Sample.Status.ABORTED, Sample.Status.COMPLETED, Sample.Status.TRUNCATED


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}+{i % 7}=", "label": str(i)}) + "\n" for i in range(10, 30))
    )
    return folder


@pytest.fixture
def server():
    """The wire server, running on the rollouts' event loop."""
    server = WireServer()
    stack = contextlib.AsyncExitStack()
    run(stack.enter_async_context(server.serving()))
    yield server
    run(stack.aclose())


@pytest.fixture
def make_args(folder, server, monkeypatch):
    monkeypatch.setattr(http_utils, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(generation, "FIRST_PAUSE", 0.01)

    def make(**flags):
        GenerateState.clear_instances()
        defaults = dict(
            hf_checkpoint=str(folder),
            prompt_data=f"{folder}/prompts.jsonl",
            sglang_router_ip="127.0.0.1",
            sglang_router_port=server.port,
            rollout_max_response_len=6,
            rollout_batch_size=4,
            n_samples_per_prompt=2,
            rm_type="exact",
            progress="off",
        )
        return Args(**{**defaults, **flags}).freeze()

    yield make
    GenerateState.clear_instances()


def sampled(args, sample, **params):
    state = GenerateState(args)
    return run(generate(args, sample, {**state.sampling_params, **params}))


def is_aligned(sample):
    n = sample.response_length
    prompt = len(sample.tokens) - n
    expected = [10 + (prompt + i) % 10 for i in range(n)]
    assert sample.tokens[prompt:] == expected
    assert sample.rollout_log_probs == pytest.approx([-0.1 * t for t in expected])
    assert sample.loss_mask is None or len(sample.loss_mask) == n
    assert sample.response == "".join(str(t - 10) for t in expected)
    return True


# -- generate ----------------------------------------------------------------------------------------------------


def test_request_and_answer(make_args, server):
    args = make_args(rollout_temperature=0.7, rollout_stop_token_ids=[3])
    sample = sampled(args, Sample(prompt="12+3="))
    assert sample.tokens[:5] == [11, 12, 9, 13, 40]
    assert is_aligned(sample) and sample.response_length == 6 and sample.status is TRUNCATED
    assert sample.weight_versions == [{"version": "1", "start": 0, "end": 6}]
    assert sample.prefix_cache_info == {"prompt_tokens": 5, "cached_tokens": 0}
    (payload,) = server.requests
    assert payload["input_ids"] == sample.tokens[:5] and payload["return_logprob"] is True
    assert payload["sampling_params"] == {
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 6,
        "stop_token_ids": [3],
        "skip_special_tokens": True,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


def test_stop_is_completed(make_args, server):
    server.finish_early = lambda payload: 2
    sample = sampled(make_args(), Sample(prompt="1+1="))
    assert sample.status is COMPLETED and sample.response_length == 2 and is_aligned(sample)


def test_context_and_zero_budget(make_args, server):
    args = make_args(rollout_max_context_len=7)
    assert sampled(args, Sample(prompt="12+3=")).response_length == 2
    for prompt, new in (("1234+5=", 6), ("12+3=", 0)):
        sample = sampled(args, Sample(prompt=prompt), max_new_tokens=new)
        assert sample.status is TRUNCATED and sample.response_length == 0 and sample.tokens
    assert len(server.requests) == 1


def test_a_partial_sample_goes_on_from_its_tokens(make_args, server):
    args = make_args()
    sample = Sample(prompt="12+3=", tokens=[11, 12, 9, 13, 40])
    sample.append_response_tokens(tokens=[15, 16], log_probs=[-1.5, -1.6], text="56", meta_info={"weight_version": "0"})
    sample.loss_mask = [0, 0]
    sampled(args, sample)
    (payload,) = server.requests
    assert payload["input_ids"] == [11, 12, 9, 13, 40, 15, 16] and payload["sampling_params"]["max_new_tokens"] == 4
    assert is_aligned(sample) and sample.response_length == 6
    assert sample.loss_mask == [0, 0, 1, 1, 1, 1]
    assert sample.weight_versions == [{"version": "0", "start": 0, "end": 2}, {"version": "1", "start": 2, "end": 6}]


def test_an_abort_by_others_is_survived(make_args, server):
    """Engines that pause for new weights abort their requests: no sample comes back half done for that."""
    server.token_seconds = 0.02
    args = make_args(rollout_max_response_len=20)

    async def main():
        state = GenerateState(args)
        task = asyncio.create_task(generate(args, Sample(prompt="1+1="), state.sampling_params))
        await asyncio.sleep(0.15)
        server.version = "2"
        await server.abort(None)
        return await task

    sample = run(main())
    assert sample.status is TRUNCATED and sample.response_length == 20 and is_aligned(sample)
    assert [s["version"] for s in sample.weight_versions] == ["1", "2"] and len(server.requests) == 2


def abort_answer(**reason):
    reason = {"type": "abort", "message": "because", "status_code": None, **reason}
    return web.json_response({"text": "", "output_ids": [], "meta_info": {"finish_reason": reason}})


@pytest.mark.parametrize(
    "params, text, ended",
    [
        ({}, "12", True),  # of generation_config.json
        ({"stop_token_ids": [11, 12]}, "12", True),
        ({"ignore_eos": True}, "12", False),
        ({"ignore_eos": True, "stop": ["1</a>"]}, "1</a>", True),
    ],
)
def test_a_response_that_ended_while_it_was_aborted_is_complete(make_args, server, folder, params, text, ended):
    """SGLang draws one more token after an abort and says "abort", whatever token that was."""
    (folder / "generation_config.json").write_text('{"eos_token_id": [12]}')
    tokens = [[-0.1, 11, None], [-0.1, 12, None]]
    reason = {"type": "abort", "message": "Aborted", "status_code": None}
    body = {
        "text": text,
        "output_ids": [11, 12],
        "meta_info": {"finish_reason": reason, "output_token_logprobs": tokens},
    }
    server.faults = lambda n, _: web.json_response(body) if n == 0 else None
    sample = sampled(make_args(), Sample(prompt="1+1="), **params)
    (folder / "generation_config.json").unlink()
    assert (sample.status, sample.response_length) == ((COMPLETED, 2) if ended else (TRUNCATED, 6))


def test_an_engine_that_only_aborts_is_an_error(make_args, server):
    server.faults = lambda n, _: abort_answer()
    with pytest.raises(RolloutError, match="3 times in a row"):
        sampled(make_args(rollout_max_retries=3), Sample(prompt="1+1="))
    server.faults = lambda n, _: abort_answer(status_code=503)
    with pytest.raises(RolloutError, match=r"gave the request up: because \(503\)"):
        sampled(make_args(), Sample(prompt="1+1="))


@pytest.mark.parametrize(
    "body, words",
    [
        ({"text": "x"}, "no finish reason"),
        ({"output_ids": [1], "meta_info": {"finish_reason": {"type": "stop"}}}, "1 tokens but 0 log-probs"),
    ],
)
def test_answers_that_are_none(make_args, server, body, words):
    server.faults = lambda n, _: web.json_response(body)
    with pytest.raises(RolloutError, match=words):
        sampled(make_args(), Sample(prompt="1+1="))


def test_4xx_names_the_sample_and_the_servers_message(make_args, server):
    server.faults = lambda n, _: web.json_response({"error": {"message": "too long"}}, status=400)
    args = make_args()
    with pytest.raises(RolloutError, match=r"generating sample 5 \(group 2\) failed: HttpError: .*HTTP 400: too long"):
        run(generate_and_rm(args, Sample(prompt="1+1=", index=5, group_index=2), GenerateState(args).sampling_params))
    assert len(server.requests) == 1


def test_no_router_is_said(make_args):
    with pytest.raises(RolloutError, match="no router"):
        sampled(make_args(sglang_router_ip=None), Sample(prompt="1+1="))
    with pytest.raises(ValueError, match="--apply-chat-template"):
        sampled(make_args(), Sample(prompt=[{"role": "user", "content": "x"}]))


# -- one rollout -------------------------------------------------------------------------------------------------


def test_default_rollout(make_args, server):
    args = make_args()
    source = RolloutDataSourceWithBuffer(args)
    output = generate_rollout(args, 0, source)
    assert isinstance(output, RolloutFnTrainOutput)
    assert [g[0].group_index for g in output.samples] == [0, 1, 2, 3]
    assert [len(g) for g in output.samples] == [2] * 4
    assert all(is_aligned(s) and s.reward is not None for g in output.samples for s in g)
    assert source.accounting() == {
        "drawn": 4, "added": 0, "returned": 0, "trained": 4, "filtered": 0, "lost": 0, "in_flight": 0, "buffered": 0
    }  # fmt: skip
    assert server.aborts == 0 and len(server.requests) == 8
    metrics = output.metrics
    assert metrics["prompts/trained"] == 4 and metrics["prompts/in_flight"] == 0
    assert metrics["rollout/generated_tokens"] == 48 and metrics["rollout/drawn_groups"] == 4
    assert metrics["perf/rollout_tokens_per_s"] == pytest.approx(48 / metrics["perf/generate_time"])
    seeds = [r["sampling_params"]["sampling_seed"] for r in server.requests]
    assert len(set(seeds)) == 8 and all(0 <= s < 2**31 for s in seeds)
    server.requests.clear()
    args = make_args()
    generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert sorted(seeds) == sorted(r["sampling_params"]["sampling_seed"] for r in server.requests)
    server.requests.clear()
    generate_rollout(args, 1, RolloutDataSourceWithBuffer(args))  # the same samples in another step: other seeds
    assert not set(seeds) & {r["sampling_params"]["sampling_seed"] for r in server.requests}


def test_requests_in_flight_are_bounded(make_args, server):
    server.token_seconds = 0.003
    args = make_args(sglang_server_concurrency=3)
    generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert server.most_in_flight == 3


def test_engine_restart_loses_nothing(make_args, server):
    """Refused connections and 5xx during a rollout: all requests are made again."""
    server.faults = lambda n, _: web.json_response({"error": "gone"}, status=503) if n % 3 else None
    args = make_args()
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert all(is_aligned(s) and s.response_length == 6 for g in output.samples for s in g)


async def slow_from_group_4(args, sample, sampling_params):
    if sample.group_index >= 4:
        sampling_params["max_new_tokens"] = 10_000
    return await generate(args, sample, sampling_params)


@pytest.mark.parametrize("partial", [False, True])
def test_over_sampling_returns_what_it_does_not_use(make_args, server, partial):
    server.token_seconds = 0.01
    args = make_args(
        over_sampling_batch_size=6,
        partial_rollout=partial,
        custom_generate_function_path=f"{__name__}.slow_from_group_4",
        mask_offpolicy_in_partial_rollout=partial,
    )
    source = RolloutDataSourceWithBuffer(args)
    output = generate_rollout(args, 0, source)
    assert [g[0].group_index for g in output.samples] == [0, 1, 2, 3]
    assert server.aborts >= 1 and server.in_flight == 0
    assert [g[0].group_index for g in source.buffer] == [4, 5]
    kept = [s.response_length for g in source.buffer for s in g]
    assert all(n > 0 for n in kept) if partial else kept == [0] * 4
    if partial:
        assert all(is_aligned(s) and s.status is ABORTED for g in source.buffer for s in g)
    assert source.accounting()["returned"] == 2 and output.metrics["rollout/returned_groups"] == 2

    # The next rollout takes them first, and goes on where they stopped.
    args = make_args(partial_rollout=partial, mask_offpolicy_in_partial_rollout=partial, rollout_max_response_len=1000)
    server.token_seconds = 0.0
    output = generate_rollout(args, 1, source)
    assert [g[0].group_index for g in output.samples] == [4, 5, 6, 7]
    for sample, before in zip([s for g in output.samples[:2] for s in g], kept, strict=True):
        assert is_aligned(sample) and sample.response_length == 1000
        if partial:
            assert sample.loss_mask == [0] * before + [1] * (1000 - before)
    assert output.metrics["rollout/resumed_samples"] == (4 if partial else 0)
    assert source.accounting()["trained"] == 8 and source.accounting()["in_flight"] == 0


async def changes_its_prompt(args, sample, sampling_params):
    """As an agent may: two pieces with prompts of their own, and notes in the metadata."""
    sample.metadata.setdefault("turns", []).append("asked")
    if sample.group_index >= 4:
        sampling_params["max_new_tokens"] = 10_000
    pieces = [copy.deepcopy(sample) for _ in range(2)]
    for piece in pieces:
        piece.prompt, piece.train_metadata = "7+7=", None
    return [await generate(args, piece, sampling_params) for piece in pieces]


class WithFields(RolloutDataSourceWithBuffer):
    def _draw(self):
        group = super()._draw()
        for sample in group:
            sample.metadata, sample.train_metadata, sample.hint = {"turns": []}, {"weight": 2.0}, "carry"
        return group


def test_what_goes_back_fresh_is_what_was_handed_out(make_args, server):
    server.token_seconds = 0.01
    args = make_args(over_sampling_batch_size=6, custom_generate_function_path=f"{__name__}.changes_its_prompt")
    source = WithFields(args)
    generate_rollout(args, 0, source)
    back = [s for g in source.buffer for s in g]
    assert [(s.group_index, s.index) for s in back] == [(4, 8), (4, 9), (5, 10), (5, 11)]
    for sample in back:
        assert sample.prompt == source.dataset.prompts[sample.group_index].prompt and not sample.tokens
        assert (sample.metadata, sample.train_metadata, sample.hint) == ({"turns": []}, {"weight": 2.0}, "carry")


def test_surplus_finished_groups_are_not_generated_again(make_args, server):
    args = make_args(over_sampling_batch_size=7, partial_rollout=True)
    source = RolloutDataSourceWithBuffer(args)
    first = generate_rollout(args, 0, source)
    assert len(first.samples) == 4 and source.accounting()["trained"] == 4
    surplus = [s for g in source.buffer for s in g if s.status is TRUNCATED and s.reward is not None]
    asked = len(server.requests)
    again = generate_rollout(make_args(partial_rollout=True), 1, source)
    assert len(server.requests) == asked + 8 - len(surplus)
    assert all(any(s is t for g in again.samples for t in g) for s in surplus)


READY = []


async def all_at_once(args, sample, sampling_params):
    """Twenty samples are ready in the same moment; the next rollout's are not waited for."""
    sample = await generate(args, sample, sampling_params)
    READY.append(sample.index)
    while len(READY) < 20:
        await asyncio.sleep(0.01)
    return sample


def test_i1_of_20_ready_and_16_wanted_none_is_lost(make_args):
    READY.clear()
    flags = dict(
        rollout_batch_size=16, n_samples_per_prompt=1, custom_generate_function_path=f"{__name__}.all_at_once",
        partial_rollout=True,
    )  # fmt: skip
    source = RolloutDataSourceWithBuffer(args := make_args(over_sampling_batch_size=20, **flags))
    output = generate_rollout(args, 0, source)
    seen = [g[0] for g in [*output.samples, *source.buffer]]
    assert len(output.samples) == 16 and len(source.buffer) == 4
    assert sorted(s.index for s in seen) == sorted(READY) and len(set(READY)) == 20
    assert all(is_aligned(s) and s.reward is not None for s in seen)
    kept = [g[0] for g in source.buffer]
    again = generate_rollout(make_args(**flags), 1, source)
    assert all(any(s is g[0] for g in again.samples) for s in kept) and len(READY) == 20 + 12


def drop_odd(args, samples, **kwargs):
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput

    return DynamicFilterOutput(samples[0].group_index % 2 == 0, "odd")


def drop_all(args, samples, **kwargs):
    return False


SEEN = {}


def mark_first(args, groups):
    groups[0][0].remove_sample = True


def see_all(args, groups, data_source):
    SEEN["all"] = [g[0].group_index for g in groups]


def test_dynamic_filter_and_sample_hooks(make_args, server):
    args = make_args(
        dynamic_sampling_filter_path=f"{__name__}.drop_odd",
        rollout_sample_filter_path=f"{__name__}.mark_first",
        rollout_all_samples_process_path=f"{__name__}.see_all",
    )
    source = RolloutDataSourceWithBuffer(args)
    output = generate_rollout(args, 0, source)
    kept = [g[0].group_index for g in output.samples]
    assert len(kept) == 4 and all(i % 2 == 0 for i in kept) and kept == sorted(kept)
    dropped = output.metrics["rollout/dropped_groups"]
    assert dropped == output.metrics["rollout/dynamic_filter/drop_odd"] >= 2
    assert output.samples[0][0].remove_sample
    assert len(SEEN["all"]) == 4 + dropped
    counts = source.accounting()
    assert counts["trained"] == 4 and counts["filtered"] == dropped and counts["in_flight"] == 0
    assert counts["drawn"] == 4 + dropped + counts["buffered"]


def test_all_groups_filtered_out_ends_with_an_error(make_args, server):
    args = make_args(dynamic_sampling_filter_path=f"{__name__}.drop_all", dynamic_sampling_max_draws=3)
    with pytest.raises(
        RolloutError, match=r"0 of 4 .*12 dropped by .*drop_all \(unnamed: 12\).*reward always the same"
    ):
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert server.in_flight == 0


def broken_filter(args, samples, **kwargs):
    raise KeyError("colour")


async def broken_reward(args, sample, **kwargs):
    if sample.index == 3:
        raise ZeroDivisionError("the user's mistake")
    await asyncio.sleep(30)
    return 1.0


async def broken_generate(args, sample, sampling_params):
    raise LookupError("the environment is gone")


async def exits(args, sample, *rest, **kwargs):
    sys.exit("no environment")


async def is_cancelled(args, sample, *rest, **kwargs):
    task = asyncio.create_task(asyncio.sleep(9))
    task.cancel()
    await task


async def returns_text(args, sample, sampling_params):
    return "text"


async def no_reward(args, sample, **kwargs):
    return None


@pytest.mark.parametrize(
    "flags, words, cause",
    [
        (
            {"custom_rm_path": f"{__name__}.broken_reward"},
            "scoring sample 3 .*ZeroDivisionError: the user",
            "broken_reward",
        ),
        (
            {"custom_generate_function_path": f"{__name__}.broken_generate"},
            r"generating sample \d.*LookupError: the environment",
            "broken_generate",
        ),
        ({"custom_rm_path": f"{__name__}.exits"}, r"scoring sample \d.*SystemExit: no environment", "exits"),
        ({"custom_generate_function_path": f"{__name__}.exits"}, r"generating sample \d.*SystemExit: no env", "exits"),
        ({"custom_rm_path": f"{__name__}.is_cancelled"}, r"scoring sample \d.*CancelledError", "is_cancelled"),
        ({"custom_generate_function_path": f"{__name__}.returns_text"}, "must return a Sample", "generation"),
        ({"custom_rm_path": f"{__name__}.no_reward"}, "must be a number or a dict, it is None", "generation"),
        ({"rm_type": None}, "no reward function is set", "generation"),
        (
            {"dynamic_sampling_filter_path": f"{__name__}.broken_filter"},
            "failed on group 0: KeyError: 'colour'",
            "broken_filter",
        ),
    ],
)
def test_a_users_error_stops_the_run_with_its_traceback(make_args, server, flags, words, cause):
    args = make_args(**flags)
    with pytest.raises(RolloutError, match=words) as error:
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert cause in "".join(traceback.format_exception(error.value))

    async def others():
        return [t for t in asyncio.all_tasks() if "generate_and_rm" in repr(t)]

    assert run(others()) == []


async def nan_for_odd(args, sample, **kwargs):
    return float("nan") if sample.index % 2 else 1.0


def test_rewards_that_are_not_finite_are_removed(make_args, server):
    args = make_args(custom_rm_path=f"{__name__}.nan_for_odd")
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert [[s.remove_sample for s in g] for g in output.samples] == [[False, True]] * 4


async def dict_reward(args, sample, **kwargs):
    return {"score": 1.0, "other": float("inf")}


def test_dict_rewards_need_their_key_at_once(make_args, server):
    for flags, words in (({}, "choose one with --reward-key"), ({"reward_key": "x"}, "'x' is not in the reward")):
        args = make_args(custom_rm_path=f"{__name__}.dict_reward", **flags)
        with pytest.raises(RolloutError, match=words):
            generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    args = make_args(custom_rm_path=f"{__name__}.dict_reward", reward_key="other")
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert [[s.remove_sample for s in g] for g in output.samples] == [[True, True]] * 4
    args = make_args(custom_rm_path=f"{__name__}.dict_reward", custom_reward_post_process_path="my.fn")
    assert len(generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)).samples) == 4


async def without_log_probs(args, sample, sampling_params):
    sample = await generate(args, sample, sampling_params)
    sample.rollout_log_probs = None
    return sample


async def minus_one(args, sample, **kwargs):
    return -1.0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (dict(custom_generate_function_path="without_log_probs", use_tis=True), "--use-tis needs Sample.rollout_log_"),
        (
            dict(custom_rm_path="minus_one", advantage_estimator="maxrl"),
            "maxrl needs rewards in .0, 1.: sample . has -1",
        ),
    ],
)
def test_what_the_algorithm_cannot_use_ends_the_run_at_the_first_sample(make_args, server, flags, message):
    named = {k: f"{__name__}.{v}" if k.endswith("_path") else v for k, v in flags.items()}
    args = make_args(**named)
    with pytest.raises(ConfigError, match=message):
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    easy = args.replace(use_tis=False, advantage_estimator="grpo")
    GenerateState.clear_instances()
    assert len(generate_rollout(easy, 0, RolloutDataSourceWithBuffer(easy)).samples) == 4


async def group_rank(args, samples, **kwargs):
    return [{"score": float(i)} for i in range(len(samples))]


def test_group_rewards(make_args, server):
    args = make_args(custom_rm_path=f"{__name__}.group_rank", group_rm=True, reward_key="score")
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert [[s.get_reward_value(args) for s in g] for g in output.samples] == [[0.0, 1.0]] * 4


async def fan_out(args, sample, sampling_params, evaluation=False):
    pieces = [
        Sample(prompt=sample.prompt, label=sample.label, metadata={"turn": i, "eval": evaluation}) for i in range(3)
    ]
    for piece in pieces:
        await generate(args, piece, sampling_params)
    return pieces


def test_fan_out_is_flattened_and_shares_the_rollout_id(make_args, server):
    args = make_args(custom_generate_function_path=f"{__name__}.fan_out", n_samples_per_prompt=2, rollout_batch_size=1)
    (group,) = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)).samples
    assert [(s.group_index, s.rollout_id, s.metadata["turn"]) for s in group] == [
        (0, i, t) for i in (0, 1) for t in range(3)
    ]
    assert all(s.reward is not None and s.metadata["eval"] is False for s in group)


async def gives_up(args, sample, sampling_params):
    if sample.group_index < 2:
        sample.status = ABORTED
        return sample
    return await generate(args, sample, sampling_params)


async def always_gives_up(args, sample, sampling_params):
    sample.status = ABORTED
    return sample


def test_a_generate_function_may_give_a_sample_up(make_args, server):
    args = make_args(custom_generate_function_path=f"{__name__}.gives_up")
    source = RolloutDataSourceWithBuffer(args)
    output = generate_rollout(args, 0, source)
    assert len(output.samples) == 4 and all(g[0].group_index >= 2 for g in output.samples)
    assert {0, 1} <= {g[0].group_index for g in source.buffer}
    args = make_args(custom_generate_function_path=f"{__name__}.always_gives_up", dynamic_sampling_max_draws=2)
    with pytest.raises(RolloutError, match="8 aborted by their generate function"):
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))


async def deaf(args, sample, sampling_params):
    if sample.group_index >= 4:
        await asyncio.sleep(60)
    return await generate(args, sample, sampling_params)


def test_a_function_that_ignores_the_abort_is_cancelled(make_args, server, monkeypatch):
    monkeypatch.setattr("slime.rollout.sglang_rollout.ABORT_PATIENCE", 0.2)
    monkeypatch.setattr("slime.rollout.sglang_rollout.ABORT_INTERVAL", 0.1)
    args = make_args(custom_generate_function_path=f"{__name__}.deaf", over_sampling_batch_size=6)
    source = RolloutDataSourceWithBuffer(args)
    assert len(generate_rollout(args, 0, source).samples) == 4
    assert [g[0].group_index for g in source.buffer] == [4, 5]


# -- evaluation, and the doors for plug-ins ------------------------------------------------------------------------


def test_evaluation(make_args, server, folder):
    data = [f"{folder}/prompts.jsonl@[0:3]", f"{folder}/prompts.jsonl@[3:5]"]
    args = make_args(
        eval_prompt_data=["a", data[0], "b", data[1]],
        n_samples_per_eval_prompt=2,
        eval_temperature=0.0,
        eval_max_response_len=3,
        custom_generate_function_path=None,
    )
    output = generate_rollout(args, 0, None, evaluation=True)
    assert isinstance(output, RolloutFnEvalOutput) and list(output.data) == ["a", "b"]
    assert [s.label for s in output.data["a"]["samples"]] == ["10", "10", "11", "11", "12", "12"]
    assert output.data["b"]["rewards"] == [0.0] * 4 and output.data["b"]["truncated"] == [True] * 4
    params = [r["sampling_params"] for r in server.requests]
    assert all(p["temperature"] == 0.0 and p["max_new_tokens"] == 3 for p in params) and len(params) == 10
    same, aborted = run(eval_rollout(args, 0))
    assert aborted == [] and same.data["a"]["rewards"] == output.data["a"]["rewards"]
    with pytest.raises(ValueError, match="pairs of name and file"):
        generate_rollout(make_args(eval_prompt_data=["a"]), 0, None, evaluation=True)


def test_evaluation_is_told_to_generate_functions(make_args, server, folder):
    args = make_args(
        eval_prompt_data=["a", f"{folder}/prompts.jsonl@[0:1]"], custom_generate_function_path=f"{__name__}.fan_out"
    )
    output = generate_rollout(args, 0, None, evaluation=True)
    assert [s.metadata["eval"] for s in output.data["a"]["samples"]] == [True] * 3


def test_state_is_one_per_model_and_router(make_args):
    args = make_args()
    state = GenerateState(args)
    assert state is GenerateState(args.replace(rollout_temperature=0.1))
    assert state is not GenerateState(args.replace(sglang_router_port=free_port()))
    assert state.sampling_params["max_new_tokens"] == 6 and state.aborted is False and state.processor is None


def test_group_function_after_an_abort_returns_at_once(make_args, server):
    args = make_args()
    state = GenerateState(args)
    state.aborted = True
    group = [Sample(prompt="1+1=", index=0)]
    assert run(generate_and_rm_group(args, group, state.sampling_params)) is group
    assert run(generate_and_rm(args, group[0], state.sampling_params)).status is ABORTED
    assert server.requests == []


def test_bare_results_of_rollout_functions_are_wrapped():
    groups = [[Sample()]]
    assert call_rollout_fn(lambda *a, evaluation: groups, None, 0, None, evaluation=False).samples is groups
    assert call_rollout_fn(lambda *a, evaluation: {"a": {}}, None, 0, None, evaluation=True).data == {"a": {}}
    with pytest.raises(TypeError, match="returned NoneType with evaluation=False"):
        call_rollout_fn(lambda *a, evaluation: None, None, 0, None, evaluation=False)


@pytest.mark.parametrize(
    ("reported", "fits"),
    [([9, 4, 0], True), ([0, 4, 0], True), ([9, 0, 0], False), ([5, 4, 0], False), ([9, 4], False)],
)
def test_a_teacher_scores_the_very_tokens(monkeypatch, reported, fits):
    """SGLang may report the largest id, the vocabulary's last, as 0; nothing else may differ."""
    from slime.rollout import on_policy_distillation

    async def post(*args, **kwargs):
        return {"meta_info": {"input_token_logprobs": [[None, 3, None], *([-1.0, i, None] for i in reported)]}}

    monkeypatch.setattr(on_policy_distillation, "post", post)
    sample = Sample(tokens=[2, 3, 9, 4, 0], response_length=3)
    scoring = on_policy_distillation.score_with_teacher(Args(), sample, "http://teacher/generate")
    if fits:
        asyncio.run(scoring)
        assert sample.teacher_log_probs == [-1.0] * 3
    else:
        with pytest.raises(ValueError, match="are not the 3 of the response"):
            asyncio.run(scoring)
