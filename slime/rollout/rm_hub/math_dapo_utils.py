"""The answer check of DAPO (Yu et al. 2025, arXiv:2503.14476): `Answer: ...` at the end, +1 or -1."""

import re
from typing import Any

from slime.rollout.rm_hub.answers import last_boxed
from slime.rollout.rm_hub.math_utils import _normalize

TAIL = 300  # characters of the response that may hold the answer
INVALID = "[INVALID]"
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)


def compute_score(
    solution_str: str, ground_truth: str, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> dict[str, Any]:
    r"""{"score": 1.0 or -1.0, "acc": bool, "pred": str} for the end of a response.

    strict_box_verify: the answer is the last \boxed{...} instead of the last "Answer:" line.
    pause_tokens_index: accepted for compatibility; the end of the text is what counts.
    """
    tail = solution_str[-TAIL:]
    if strict_box_verify:
        predicted = last_boxed(tail)
    else:
        found = _ANSWER.findall(tail)
        predicted = found[-1] if found else None
    if predicted is None:
        return {"score": -1.0, "acc": False, "pred": INVALID}
    predicted = normalize_final_answer(predicted)
    correct = predicted == normalize_final_answer(str(ground_truth))
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": predicted}


def normalize_final_answer(text: str) -> str:
    r"""One spelling for an answer: the box, the $...$ and what stands before the last `=` taken off, LaTeX unified."""
    text = text.strip().strip("*").strip()
    boxed = last_boxed(text)
    if boxed is not None:
        text = boxed
    else:
        inline = re.search(r"\$(.+?)\$", text)
        text = inline.group(1) if inline else text
    text = text.rpartition("=")[2]
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt(\d)", r"\\sqrt{\1}", text)
    return _normalize(text)
