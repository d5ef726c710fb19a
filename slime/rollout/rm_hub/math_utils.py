r"""Equality of mathematical answers: cheap checks inline, `math-verify` in a grader process for the rest."""

import functools
import logging
import os
import re

from slime.rollout.rm_hub.answers import as_labels, final_answer, last_boxed, plain_number
from slime.rollout.rm_hub.grader_pool import IN_WORKER, grader_pool

VERIFY = f"{__name__}.verify_response"
CLOSE = 1e-6  # math-verify rounds to 6 digits: nearer numbers are its to judge
SYNC_TIMEOUT = 30.0


def extract_answer(passage: str) -> str | None:
    r"""Content of the last \boxed{...}; None where there is none."""
    return last_boxed(passage)


def grade_answer_verl(solution_str: str, ground_truth: str) -> bool:
    r"""Whether the boxed answer of the solution equals the truth (boxed or bare). No box: False.

    Blocks for the milliseconds that a comparison takes; raises GraderError when the comparison itself fails.
    """
    if ground_truth is None or str(ground_truth) == "":
        return False
    answer = extract_answer(solution_str)
    return answer is not None and answers_equal(answer, str(ground_truth))


def answers_equal(answer: str, truth: str) -> bool:
    """Whether two answers are the same as text, as numbers, or as mathematics."""
    boxed = last_boxed(truth)
    truth = truth if boxed is None else boxed
    if _normalize(answer) == _normalize(truth):
        return True
    if not _normalize(answer) or not _normalize(truth):
        return False
    quick = compare_numbers(answer, truth)
    if quick is not None:
        return quick
    wrapped = f"\\boxed{{{answer}}}"
    if os.environ.get(IN_WORKER):
        return verify_response(wrapped, truth, SYNC_TIMEOUT, False) > 0
    return grader_pool().call_sync(VERIFY, wrapped, truth, SYNC_TIMEOUT, False, timeout=SYNC_TIMEOUT) > 0


def compare_numbers(answer: str, truth: str) -> bool | None:
    """Equality of two plain numbers; None when one is no plain number, or they are too near to say."""
    left, right = plain_number(answer), plain_number(truth)
    if left is None or right is None:
        return None
    if left == right:
        return True
    return False if abs(left - right) > CLOSE * max(1.0, float(abs(right))) else None


async def math_reward(response: str, label: object, timeout: float) -> float:
    r"""1.0 when the response's final answer equals the label (or one of a list of labels), by `math-verify`; else 0.0.

    An answer that cannot be understood is 0.0. Raises GraderError for a label that is no mathematics, and
    GraderTimeout when grading takes longer than `timeout` seconds.
    """
    scores = [await _math_reward_one(response, str(x), timeout) for x in as_labels(label)]
    return max(scores)


async def _math_reward_one(response: str, label: str, timeout: float) -> float:
    label = final_answer(label)
    alone = plain_number(response) is not None
    if alone or response.count("\\boxed") == 1:
        quick = compare_numbers(response if alone else last_boxed(response) or "", label)
        if quick is not None:
            return float(quick)
    return await grader_pool().call(VERIFY, response, label, timeout, True, timeout=timeout)


def verify_response(response: str, label: str, timeout: float, label_must_parse: bool) -> float:
    """The `math-verify` comparison; runs in the main thread of a grader process.

    math-verify gives each step of its work a few seconds by itself: an answer such as 9^9^9^9 is then not
    verifiable, which is 0.0. Work that even this cannot interrupt meets the deadline of the process.
    """
    parse, verify = _math_verify()
    step = max(1, min(5, int(timeout / 4)))
    gold = parse(f"\\boxed{{{label}}}", parsing_timeout=step)
    if not gold:
        if label_must_parse:
            raise ValueError(f"the label {label!r} is no mathematical expression; use --rm-type exact or f1 for text")
        return 0.0
    return float(verify(gold, parse(response, parsing_timeout=step), timeout_seconds=step))


@functools.cache
def _math_verify():
    from math_verify import parse, verify  # 1 s of sympy, only in the processes that grade

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return parse, verify


def _normalize(text: str) -> str:
    """Spellings of the same LaTeX: fractions, spacing, dollar signs, degrees, text units, trailing dots and zeros."""
    text = re.sub(r"\\(d|t|c)frac", r"\\frac", text.strip().rstrip("."))
    text = re.sub(r"\\(left|right|,|;|!|:|quad|qquad|\s)", "", text)
    text = re.sub(r"\\(text|mathrm|textbf|mbox)\{\s*([^{}]*?)\s*\}", r"\2", text)
    text = re.sub(r"\^\{?\\circ\}?|\\%|%|\\\$|\$", "", text)
    text = re.sub(r"\s+", "", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(\D|$))", "", text)
    return re.sub(r"(\.\d*?)0+$", r"\1", text).rstrip(".") if re.fullmatch(r"[+-]?\d+\.\d+", text) else text
