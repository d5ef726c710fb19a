"""A teacher's log-probs from a SGLang engine, for on-policy distillation: `Sample.teacher_log_probs`.

With --distill-topk K also its K most likely tokens at each place: `Sample.teacher_topk_log_probs`, `..._indices`.

`--opd-teacher-url` asks it about every sample that the run trains on, beside whatever reward there is. The two
functions below it are the same for scripts that give the teacher as --custom-rm-path with --rm-url.
"""

from typing import Any

from slime.utils.http_utils import post
from slime.utils.types import Sample


async def score_with_teacher(args: Any, sample: Sample, url: str) -> None:
    """Sets sample.teacher_log_probs: one log-prob per response token, at temperature 1, from `url` (a /generate).

    With --distill-topk also teacher_topk_log_probs and teacher_topk_indices, [R, K], most likely first. Raises
    ValueError when the engine scored other tokens than the sample's, or gave other than K tokens a row.
    """
    k = args.distill_topk
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    if not response:
        sample.teacher_log_probs = []
        if k:
            sample.teacher_topk_log_probs, sample.teacher_topk_indices = [], []
        return
    payload = {
        "input_ids": sample.tokens,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        # The first token that an engine scores has no log-prob there: start one early, and leave that one out.
        "logprob_start_len": len(sample.tokens) - len(response) - 1,
    }
    if k:
        payload["top_logprobs_num"] = k
    reply = await post(url, payload, max_retries=args.rollout_max_retries, timeout=args.rollout_request_timeout)
    scored = reply["meta_info"]["input_token_logprobs"][1:]  # [log-prob, token id, text or None]
    # SGLang reports the vocabulary's last id as 0, as it does with ids that stand for images: nothing else may differ.
    differ = {(item[1], ours) for item, ours in zip(scored, response, strict=False) if item[1] != ours}
    if len(scored) != len(response) or not differ <= {(0, max(sample.tokens))}:
        raise ValueError(
            f"the teacher at {url} scored {len(scored)} tokens, which are not the {len(response)} of the response"
        )
    sample.teacher_log_probs = [float(item[0]) for item in scored]
    if k:
        rows = (reply["meta_info"].get("input_top_logprobs") or [])[1:]
        if len(rows) != len(response) or any(row is None or len(row) != k for row in rows):
            raise ValueError(
                f"the teacher at {url} gave {sorted({len(row or []) for row in rows})} tokens a place at {len(rows)} "
                f"places, not {k} at each of the {len(response)} of the response (--distill-topk {k})"
            )
        sample.teacher_topk_log_probs = [[float(item[0]) for item in row] for row in rows]
        sample.teacher_topk_indices = [[int(item[1]) for item in row] for row in rows]


async def reward_func(args: Any, sample: Sample, **kwargs: Any) -> float:
    """For --custom-rm-path, with --rm-url of the teacher: asks it, and gives a reward of 0."""
    await score_with_teacher(args, sample, args.rm_url)
    return 0.0


def post_process_rewards(args: Any, samples: list[Sample], **kwargs: Any) -> tuple[list[float], list[float]]:
    """For --custom-reward-post-process-path: distillation looks at no reward."""
    return [0.0] * len(samples), [0.0] * len(samples)
