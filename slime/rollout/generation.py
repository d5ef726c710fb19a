"""One sample and one group: request to an engine, then reward. `slime.rollout.sglang_rollout` is the public door.

Sampled tokens are kept as the engine returned them and never made again from text.
"""

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import logging
import math
import time
from collections.abc import Iterator
from typing import Any

from slime.config.hooks import load_by_path
from slime.data.batch import check_log_probs, check_reward
from slime.rollout.base_types import RolloutError
from slime.rollout.on_policy_distillation import score_with_teacher
from slime.rollout.patience import Scoring
from slime.rollout.rm_hub import async_rm, batched_async_rm, has_reward
from slime.utils.async_utils import gather_or_cancel
from slime.utils.http_utils import FIRST_PAUSE, LONGEST_PAUSE, PAUSE_GROWTH, init_http_client, num_engines, post
from slime.utils.misc import SingletonMeta
from slime.utils.processing_utils import end_token_ids, load_processor, load_tokenizer
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

FINISHED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED, Sample.Status.FAILED)
PROMPTS_REMEMBERED = 4096


@dataclasses.dataclass
class Tally:
    """What one rollout did. last_generated: when its last sample was complete (time.monotonic)."""

    generated_tokens: int = 0
    resumed_samples: int = 0
    last_generated: float = 0.0


class GenerateState(metaclass=SingletonMeta):
    """What all samples of a rollout share; one per model and router.

    sampling_params: SGLang's, from the --rollout-* flags. semaphore: bounds the requests in flight.
    aborted: set while a rollout winds down; generate functions of users look at it between turns.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.tokenizer = load_tokenizer(args.hf_checkpoint)
        self.processor = load_processor(args.hf_checkpoint)
        self.end_ids = end_token_ids(args.hf_checkpoint, self.tokenizer)
        self.semaphore = asyncio.Semaphore(args.sglang_server_concurrency * num_engines(args))
        self.sampling_params: dict[str, Any] = {
            "temperature": args.rollout_temperature,
            "top_p": args.rollout_top_p,
            "top_k": args.rollout_top_k,
            "max_new_tokens": args.rollout_max_response_len,
            "stop": args.rollout_stop,
            "stop_token_ids": args.rollout_stop_token_ids,
            "skip_special_tokens": args.rollout_skip_special_tokens,
            "no_stop_trim": True,  # the text shows what the tokens say
            "spaces_between_special_tokens": False,
        }
        self.eval_datasets: dict[str, Any] = {}
        self._encode = functools.lru_cache(PROMPTS_REMEMBERED)(self._encode_text)  # a group shares its prompt
        init_http_client(args)
        self.reset()

    @staticmethod
    def singleton_key(args: Any) -> tuple[Any, ...]:
        return args.hf_checkpoint, args.sglang_router_ip, args.sglang_router_port

    def reset(self, rollout_id: int = 0) -> None:
        """Ready for the next rollout."""
        self.rollout_id = rollout_id
        self.aborted = False
        self.tally = Tally()
        self.scoring = Scoring()

    def prompt_ids(self, sample: Sample) -> list[int]:
        """Token ids of a text prompt. No special tokens are added: the chat template has put them there."""
        if not isinstance(sample.prompt, str):
            raise ValueError(
                "the prompt is a list of chat messages: set --apply-chat-template, or generate it yourself"
            )
        ids = list(self._encode(sample.prompt))
        if not ids:
            raise ValueError("the prompt has no tokens")
        return ids

    def _encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generates the response of one sample, or goes on where it was interrupted, through the router.

    Fills tokens, response, rollout_log_probs (of the sampling distribution at this temperature), weight_versions
    and status. `max_new_tokens` bounds the whole response, also over interruptions; together with the prompt it is
    bounded by --rollout-max-context-len. No room left: TRUNCATED.
    Raises HttpError when the engine refuses the request or stays away, RolloutError when its answer is no answer.
    """
    state = GenerateState(args)
    if not sample.tokens:
        sample.tokens = state.prompt_ids(sample)
    pieces = int(sample.response_length > 0)
    pause, empty_aborts = FIRST_PAUSE, 0
    while True:
        room = _room(args, sample, sampling_params)
        if room <= 0:
            sample.status = Sample.Status.TRUNCATED
            break
        output = await _ask_engine(args, sample, {**sampling_params, "max_new_tokens": room})
        added = _append_output(args, sample, output)
        pieces += added > 0
        if sample.status is Sample.Status.ABORTED and added and _has_ended(state, sample, sampling_params, output):
            sample.status = Sample.Status.COMPLETED
        if sample.status is not Sample.Status.ABORTED or state.aborted:
            break
        # Aborted by somebody else, such as an engine that pauses for new weights: go on from these tokens.
        empty_aborts = 0 if added else empty_aborts + 1
        if empty_aborts >= args.rollout_max_retries:
            raise RolloutError(f"engines aborted the request {empty_aborts} times in a row without a token")
        pause = FIRST_PAUSE if added else min(pause * PAUSE_GROWTH, LONGEST_PAUSE)
        await asyncio.sleep(pause)
    if pieces > 1:  # a character may have been cut where the pieces meet
        ids = sample.tokens[len(sample.tokens) - sample.response_length :]
        sample.response = state.tokenizer.decode(ids, skip_special_tokens=args.rollout_skip_special_tokens)
    return sample


async def generate_and_rm(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Generates one sample (by the user's function where one is set) and scores it; a finished one is only scored
    where it has no reward. A user's function may return several samples (fan-out).

    With --group-rm scoring is left to the group. Raises RolloutError that names the sample.
    """
    state = GenerateState(args)
    if args.partial_rollout and args.mask_offpolicy_in_partial_rollout and sample.response_length > 0:
        sample.loss_mask = [0] * sample.response_length
    result: Sample | list[Sample] = sample
    if sample.status not in FINISHED:
        async with state.semaphore:
            if state.aborted:
                sample.status = Sample.Status.ABORTED
                return sample
            before = sample.response_length
            state.tally.resumed_samples += before > 0
            with _blame(sample, "generating"):
                result = await _generate_one(args, sample, sampling_params, evaluation)
            state.tally.generated_tokens += sum(s.response_length for s in _as_list(result)) - before
            state.tally.last_generated = time.monotonic()
    if any(s.status is Sample.Status.ABORTED for s in _as_list(result)):
        return result
    if not evaluation:
        for s in _as_list(result):
            check_log_probs(args, s)
    if args.opd_teacher_url and not evaluation:
        wanted = "teacher_topk_indices" if args.distill_topk else "teacher_log_probs"
        untaught = [s for s in _as_list(result) if getattr(s, wanted) is None]
        with _blame(sample, "asking the teacher about"), state.scoring.of(sample):
            await gather_or_cancel(score_with_teacher(args, s, args.opd_teacher_url) for s in untaught)
    if args.group_rm:
        return result
    unscored = [s for s in _as_list(result) if s.reward is None]
    if unscored:
        with _blame(sample, "scoring"), state.scoring.of(sample):
            rewards = await gather_or_cancel(async_rm(args, s) for s in _checked(args, unscored))
            _set_rewards(unscored, rewards)
    _check_rewards(args, _as_list(result), evaluation)
    return result


async def generate_and_rm_group(
    args: Any, group: list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Sample]:
    """All samples of a group, generated side by side and scored; fan-out is flattened, in order.

    Pieces of one sample share its `rollout_id` (and get its indices where they have none of their own).
    """
    state = GenerateState(args)
    if state.aborted:
        return group
    results = await gather_or_cancel(
        generate_and_rm(args, sample, dict(sampling_params), evaluation=evaluation) for sample in group
    )
    samples = [piece for parent, result in zip(group, results, strict=True) for piece in _pieces(parent, result)]
    if args.group_rm and not any(s.status is Sample.Status.ABORTED for s in samples):
        if any(s.reward is None for s in samples):
            with _blame(samples[0], "scoring the group of"), state.scoring.of(samples[0]):
                _set_rewards(samples, await batched_async_rm(args, _checked(args, samples)))
        _check_rewards(args, samples, evaluation)
    return samples


def sampling_seed(args: Any, sample: Sample, rollout_id: int, evaluation: bool) -> int:
    """A seed that depends on --rollout-seed, the sample's numbers and the step only, never on time. A prompt that came
    back unused is sampled anew in its next step; evaluations draw the same numbers in every step, so that they compare.
    Engines that do not sample deterministically ignore it."""
    when = "eval" if evaluation else f"train-{rollout_id}"
    text = f"{args.rollout_seed}-{when}-{sample.group_index}-{sample.index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) >> 1


async def _generate_one(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> Sample | list[Sample]:
    seed = sampling_seed(args, sample, GenerateState(args).rollout_id, evaluation)
    params = {"sampling_seed": seed, **sampling_params}
    sample.status = Sample.Status.PENDING
    path = sample.generate_function_path or args.custom_generate_function_path
    if path is None:
        return await generate(args, sample, params)
    function = load_by_path(path)
    wants_evaluation = "evaluation" in inspect.signature(function).parameters
    result = function(args, sample, params, **({"evaluation": evaluation} if wants_evaluation else {}))
    result = await result if inspect.isawaitable(result) else result
    if not _as_list(result) or not all(isinstance(s, Sample) for s in _as_list(result)):
        raise TypeError(f"{path} must return a Sample or a list of Samples, it returned {result!r:.100}")
    return result


def _room(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> int:
    """Tokens that may still be generated."""
    room = sampling_params["max_new_tokens"] - sample.response_length
    if args.rollout_max_context_len is not None:
        room = min(room, args.rollout_max_context_len - len(sample.tokens))
    return room


async def _ask_engine(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> dict[str, Any]:
    if args.sglang_router_ip is None or args.sglang_router_port is None:
        raise RolloutError("no router: engines are not started, or --sglang-router-ip/-port are not set")
    payload = {
        "input_ids": sample.tokens,
        "sampling_params": {k: v for k, v in sampling_params.items() if v is not None},
        "return_logprob": True,
    }
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    headers = {"x-smg-routing-key": sample.session_id} if sample.session_id else None
    return await post(
        url, payload, max_retries=args.rollout_max_retries, headers=headers, timeout=args.rollout_request_timeout
    )


def _append_output(args: Any, sample: Sample, output: Any) -> int:
    """Takes over one answer of SGLang's /generate; returns the number of tokens it brought."""
    meta = output.get("meta_info") if isinstance(output, dict) else None
    reason = (meta or {}).get("finish_reason")
    if meta is None or reason is None:
        raise RolloutError(f"the engine's answer has no finish reason: {output!r:.300}")
    if reason["type"] == "abort" and (reason.get("status_code") or 0) >= 400:
        raise RolloutError(f"the engine gave the request up: {reason.get('message')} ({reason['status_code']})")
    triples = meta.get("output_token_logprobs") or []  # [log-prob, token id, text or None]
    if len(triples) < len(output.get("output_ids") or []):
        raise RolloutError(f"the engine returned {len(output['output_ids'])} tokens but {len(triples)} log-probs")
    sample.append_response_tokens(
        args,
        tokens=[t[1] for t in triples],
        log_probs=[t[0] for t in triples],
        meta_info=meta,
        text=output.get("text") or "",
    )
    for key in ("prompt_tokens", "cached_tokens"):
        sample.prefix_cache_info[key] = sample.prefix_cache_info.get(key, 0) + (meta.get(key) or 0)
    return len(triples)


def _has_ended(state: GenerateState, sample: Sample, params: dict[str, Any], output: dict[str, Any]) -> bool:
    """Whether a response that the engine aborted is complete nevertheless: SGLang draws one more token after an abort
    and does not look whether it ends the response. Going on would put tokens behind the end."""
    stop = params.get("stop") or []
    if any(text in (output.get("text") or "") for text in ([stop] if isinstance(stop, str) else stop)):
        return True
    last = sample.tokens[-1]
    return not params.get("ignore_eos") and (last in state.end_ids or last in (params.get("stop_token_ids") or ()))


def _checked(args: Any, samples: list[Sample]) -> list[Sample]:
    if not all(has_reward(args, s) for s in samples):
        raise ValueError(
            "it has no reward, and no reward function is set: give --rm-type or --custom-rm-path, "
            "or set sample.reward in the generate function"
        )
    return samples


def _set_rewards(samples: list[Sample], rewards: list[Any]) -> None:
    for sample, reward in zip(samples, rewards, strict=True):
        if not isinstance(reward, dict):
            try:
                reward = float(reward)
            except (TypeError, ValueError):
                raise TypeError(f"the reward must be a number or a dict, it is {reward!r:.200}") from None
        sample.reward = reward


def _check_rewards(args: Any, samples: list[Sample], evaluation: bool) -> None:
    """Every sample has a number to train on, which the estimator has a formula for; one that is not finite must not
    reach its group's statistics.

    Dict rewards that the user's own functions read later are left alone.
    """
    key = (evaluation and args.eval_reward_key) or args.reward_key
    read_by_user = args.custom_reward_post_process_path or args.custom_convert_samples_to_train_data_path
    for sample in samples:
        if isinstance(sample.reward, dict) and key is None and read_by_user:
            continue
        try:
            value = sample.get_reward_value(args.replace(reward_key=key) if key != args.reward_key else args)
        except (TypeError, ValueError, KeyError) as error:
            raise RolloutError(str(error.args[0])) from error
        if not (evaluation or sample.remove_sample or read_by_user):
            check_reward(args, value, f"sample {sample.index}")
        if not math.isfinite(value) and not sample.remove_sample:
            logger.warning("sample %s: its reward is %s; it is not trained on", sample.index, value)
            sample.remove_sample = True


def _pieces(parent: Sample, result: Sample | list[Sample]) -> list[Sample]:
    for piece in _as_list(result):
        piece.group_index = parent.group_index
        piece.rollout_id = parent.rollout_id if parent.rollout_id is not None else parent.index
        piece.index = parent.index if piece.index is None else piece.index
    return _as_list(result)


def _as_list(result: Sample | list[Sample]) -> list[Sample]:
    return result if isinstance(result, list) else [result]


@contextlib.contextmanager
def _blame(sample: Sample, what: str) -> Iterator[None]:
    """Errors inside become a RolloutError that names the sample, with the original (a user's traceback) chained.
    So does sys.exit(), and a cancellation that we did not ask for."""
    try:
        yield
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        prompt = sample.prompt if isinstance(sample.prompt, str) else repr(sample.prompt)
        raise RolloutError(
            f"{what} sample {sample.index} (group {sample.group_index}) failed: {type(error).__name__}: {error}; "
            f"its prompt ends in {prompt[-100:]!r}"
        ) from error
