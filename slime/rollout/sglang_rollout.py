"""The default rollout function: groups of samples from SGLang engines behind a router, scored while others generate.

    data source -> groups in flight -> finished -> filter -> kept, until --rollout-batch-size groups are kept

Where no filter drops and no more are drawn than needed, every group drawn is waited for and trained on. Otherwise
the rest is aborted once enough groups are kept, and all that is not trained goes back to the data source: with
--partial-rollout with its tokens (finished groups with their rewards), else as fresh prompts, because tokens of
an older policy are trained on only where that was asked for.
"""

import asyncio
import copy
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from slime.config.hooks import load_hook
from slime.data.dataset import PromptDataset
from slime.rollout.base_types import RolloutError, RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.data_source import Group, as_handed_out, for_buffer
from slime.rollout.filter_hub.base_types import call_dynamic_filter
from slime.rollout.generation import (
    FINISHED,
    GenerateState,
    generate,
    generate_and_rm,
    generate_and_rm_group,
)
from slime.rollout.progress import progress_bar
from slime.utils.async_utils import gather_or_cancel, run
from slime.utils.http_utils import HttpError, get, post
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

__all__ = [
    "GenerateState",
    "eval_rollout",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "generate_rollout_async",
]

ABORT_INTERVAL = 1.0  # a request on its way to an engine escapes an abort, so it is repeated
ABORT_PATIENCE = 120.0  # seconds for user functions to notice; then their tasks are cancelled


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """One rollout (or evaluation), from synchronous code. Raises RolloutError."""
    if evaluation:
        output, _ = run(eval_rollout(args, rollout_id))
        return output
    return run(generate_rollout_async(args, rollout_id, data_source))


async def generate_rollout_async(args: Any, rollout_id: int, data_source: Any) -> RolloutFnTrainOutput:
    """--rollout-batch-size finished groups, ordered by group index, with the metrics of how they came about."""
    state = GenerateState(args)
    state.reset(rollout_id)
    progress = progress_bar(args, args.rollout_batch_size, f"rollout {rollout_id}")
    rollout = _Rollout(args, state, data_source, load_hook(args, "dynamic_sampling_filter_path"))
    try:
        with state.scoring.watched():
            while len(rollout.kept) < args.rollout_batch_size:
                rollout.draw()
                before = len(rollout.kept)
                await rollout.take_finished()
                progress.update(min(len(rollout.kept), args.rollout_batch_size) - before)
            await rollout.wind_down()
    except BaseException:
        await rollout.cancel()
        raise
    finally:
        progress.close()
    groups = rollout.hand_over()
    _call_sample_hooks(args, groups, rollout, data_source)
    return RolloutFnTrainOutput(groups, rollout.metrics())


async def eval_rollout(args: Any, rollout_id: int) -> tuple[RolloutFnEvalOutput, list[Group]]:
    """All data sets of --eval-prompt-data; returns the output and, as slime does, the (always empty) aborted groups.

    Rewards, truncation and samples of each data set are in the order of its file.
    """
    state = GenerateState(args)
    state.reset(rollout_id)
    pairs = args.eval_prompt_data or []
    if not pairs or len(pairs) % 2:
        raise ValueError(f"--eval-prompt-data takes pairs of name and file, found {pairs}")
    names, files = pairs[::2], pairs[1::2]
    with state.scoring.watched():
        results = await gather_or_cancel(_eval_one(args, state, n, f) for n, f in zip(names, files, strict=True))
    return RolloutFnEvalOutput(dict(zip(names, results, strict=True))), []


@dataclasses.dataclass
class _Rollout:
    """One rollout under way: which groups are in flight, kept, dropped or to be returned."""

    args: Any
    state: GenerateState
    data_source: Any
    filter: Callable[..., Any] | None

    def __post_init__(self) -> None:
        self.started = time.monotonic()
        self.in_flight: dict[asyncio.Task[Group], Group] = {}
        self.handed_out: dict[int, Group] = {}  # by group index
        self.kept: list[Group] = []
        self.dropped: list[Group] = []
        self.unfinished: list[Group] = []  # aborted by a generate function, not by us
        self.returned: list[Group] = []
        self.drop_reasons: list[str] = []  # of each dropped group
        self.drawn = 0
        self.generated = self.complete = self.started  # end of the last sample's generation, and of its scoring

    def draw(self) -> None:
        """Puts groups in flight until enough may become of them."""
        size = self.args.over_sampling_batch_size or self.args.rollout_batch_size
        while len(self.kept) + len(self.in_flight) < self.args.rollout_batch_size:
            self._check_patience(size)
            groups = self.data_source.get_samples(size)
            if not groups:
                raise RolloutError(f"the data source {type(self.data_source).__name__} returned no groups")
            self.drawn += len(groups)
            self.handed_out.update({_group_index(group): as_handed_out(group) for group in groups})
            for group in groups:
                # The group given back at an abort is this one, so tasks work on it in place.
                task = asyncio.create_task(generate_and_rm_group(self.args, group, self.state.sampling_params))
                self.in_flight[task] = group

    async def take_finished(self) -> None:
        """Waits for at least one group and sorts it in."""
        done, _ = await asyncio.wait(self.in_flight, return_when=asyncio.FIRST_COMPLETED)
        for task in sorted(done, key=lambda t: _group_index(self.in_flight[t])):
            group = task.result()
            del self.in_flight[task]
            if not _is_finished(group):
                self.unfinished.append(group)
                continue
            try:
                verdict = call_dynamic_filter(self.filter, self.args, group)
            except Exception as error:
                raise RolloutError(
                    f"{self.args.dynamic_sampling_filter_path} failed on group {_group_index(group)}: "
                    f"{type(error).__name__}: {error}"
                ) from error
            if verdict.keep:
                self.kept.append(group)
            else:
                self.dropped.append(group)
                self.drop_reasons.append(verdict.reason or "unnamed")

    async def wind_down(self) -> None:
        """Aborts what is still in flight and returns all that is not trained to the data source."""
        self.complete = time.monotonic()
        self.generated = min(self.state.tally.last_generated or self.started, self.complete)
        surplus = self.kept[self.args.rollout_batch_size :]
        del self.kept[self.args.rollout_batch_size :]
        self.returned = self.unfinished + surplus + await self._abort()
        if self.returned:
            self.data_source.add_samples(
                [for_buffer(self.args, group, self._as_handed_out(group)) for group in self.returned]
            )

    def _as_handed_out(self, group: Group) -> Group | None:
        index = group[0].group_index  # None: of a user's data source that does not number its groups
        return None if index is None else self.handed_out.get(index)

    async def _abort(self) -> list[Group]:
        self.state.aborted = True
        pending, deadline = set(self.in_flight), time.monotonic() + ABORT_PATIENCE
        while pending and time.monotonic() < deadline:
            await _abort_requests(self.args)
            _, pending = await asyncio.wait(pending, timeout=ABORT_INTERVAL)
        for task in pending:
            logger.warning("group %s did not react to the abort; cancelled", _group_index(self.in_flight[task]))
            task.cancel()
        groups = []
        for task, group in self.in_flight.items():
            try:
                groups.append(await task)
            except asyncio.CancelledError:
                groups.append(group)
        self.in_flight = {}
        return groups

    async def cancel(self) -> None:
        """Ends everything after a failure; nobody is left running."""
        self.state.aborted = True
        for task in self.in_flight:
            task.cancel()
        await asyncio.gather(*self.in_flight, return_exceptions=True)

    def hand_over(self) -> list[Group]:
        """The groups to train on, in an order that does not depend on who finished first."""
        settle = getattr(self.data_source, "settle", None)  # a user's data source need not have it
        if settle is not None:
            settle(self.kept, "trained")
            for reason in dict.fromkeys(self.drop_reasons):
                groups = [g for g, why in zip(self.dropped, self.drop_reasons, strict=True) if why == reason]
                settle(groups, "filtered", reason)
        return sorted(self.kept, key=_group_index)

    def metrics(self) -> dict[str, float]:
        """Times in seconds. Scoring overlaps with generation: `score_time` is what came after the last token,
        `score_time_total` the sum over samples. prompts/*: groups by state since the start of the run."""
        tally = self.state.tally
        accounting: dict[str, int] = getattr(self.data_source, "accounting", dict)()
        generate_time = self.generated - self.started
        return {
            "rollout/drawn_groups": self.drawn,
            "rollout/dropped_groups": len(self.dropped),
            "rollout/returned_groups": len(self.returned),
            "rollout/resumed_samples": tally.resumed_samples,
            "rollout/generated_tokens": tally.generated_tokens,
            "perf/generate_time": generate_time,
            "perf/score_time": self.complete - self.generated,
            "perf/abort_time": time.monotonic() - self.complete,
            "perf/score_time_total": self.state.scoring.seconds,
            "perf/rollout_tokens_per_s": tally.generated_tokens / max(generate_time, 1e-9),
            **{f"prompts/{state}": n for state, n in accounting.items()},
            **{f"rollout/dynamic_filter/drop_{reason}": n for reason, n in Counter(self.drop_reasons).items()},
        }

    def _check_patience(self, size: int) -> None:
        wasted = len(self.dropped) + len(self.unfinished)
        if wasted >= self.args.dynamic_sampling_max_draws * size:
            reasons = ", ".join(f"{reason}: {n}" for reason, n in Counter(self.drop_reasons).most_common())
            raise RolloutError(
                f"{self.drawn} prompt groups gave {len(self.kept)} of {self.args.rollout_batch_size} to train on: "
                f"{len(self.dropped)} dropped by {self.args.dynamic_sampling_filter_path} ({reasons or 'none'}), "
                f"{len(self.unfinished)} aborted by their generate function. Are the prompts too easy or too hard, "
                "or is the reward always the same? (--dynamic-sampling-max-draws sets the patience)"
            )


def _call_sample_hooks(args: Any, groups: list[Group], rollout: _Rollout, data_source: Any) -> None:
    sample_filter = load_hook(args, "rollout_sample_filter_path")
    if sample_filter is not None:
        sample_filter(args, groups)
    process_all = load_hook(args, "rollout_all_samples_process_path")
    if process_all is not None:
        process_all(args, sorted([*groups, *rollout.dropped], key=_group_index), data_source)


async def _eval_one(args: Any, state: GenerateState, name: str, file: str) -> dict[str, Any]:
    if file not in state.eval_datasets:
        state.eval_datasets[file] = PromptDataset.load(file, args, state.tokenizer)
    dataset = state.eval_datasets[file]
    params = dict(state.sampling_params)
    for key, value in (
        ("temperature", args.eval_temperature),
        ("top_p", args.eval_top_p),
        ("max_new_tokens", args.eval_max_response_len),
    ):
        if value is not None:
            params[key] = value
    if args.eval_max_context_len is not None:
        args = args.replace(rollout_max_context_len=args.eval_max_context_len)
    count = args.n_samples_per_eval_prompt
    progress = progress_bar(args, len(dataset), f"eval {name}")

    async def one(number: int, prompt: Sample) -> Group:
        group = [copy.deepcopy(prompt) for _ in range(count)]
        for i, sample in enumerate(group):
            sample.group_index, sample.index = number, number * count + i
        samples = await generate_and_rm_group(args, group, params, evaluation=True)
        progress.update(1)
        return samples

    try:
        groups = await gather_or_cancel(one(i, prompt) for i, prompt in enumerate(dataset.prompts))
    finally:
        progress.close()
    samples = [s for group in groups for s in group]
    reward_args = args.replace(reward_key=args.eval_reward_key or args.reward_key)
    return {
        "rewards": [s.get_reward_value(reward_args) for s in samples],
        "truncated": [s.status is Sample.Status.TRUNCATED for s in samples],
        "samples": samples,
    }


async def _abort_requests(args: Any) -> None:
    """Asks every engine to end what it is generating; requests then return with their partial tokens."""

    async def one(url: str) -> None:
        try:
            await post(f"{url}/abort_request", {"rid": "", "abort_all": True}, max_retries=1, timeout=10.0)
        except HttpError as error:  # an engine that is away generates nothing
            logger.warning("abort: %s", error)

    await gather_or_cancel(one(url) for url in await _engine_urls(args))


async def _engine_urls(args: Any) -> list[str]:
    router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    try:
        answer = await get(f"{router}/workers", max_retries=8, timeout=10.0)
    except HttpError as error:
        if error.status != 404:
            raise
        return (await get(f"{router}/list_workers", max_retries=8, timeout=10.0))["urls"]  # routers before 0.3
    return [worker["url"] for worker in answer["workers"]]


def _is_finished(group: Group) -> bool:
    return all(s.status in FINISHED for s in group)


def _group_index(group: Group) -> int:
    index = group[0].group_index
    return -1 if index is None else index
