"""Finding the final answer in a response, and the cheap comparisons. Pure string work, run inline."""

import re
import string
from collections import Counter
from fractions import Fraction

_PLAIN_NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?")


def last_boxed(text: str) -> str | None:
    r"""Content of the last \boxed{...} (or \fbox, or `\boxed 7`) with balanced braces; None where there is none."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].split("boxed" if text.startswith("\\boxed", start) else "fbox", 1)[1]
    if not rest.startswith("{"):
        bare = re.match(r"\s+([^\s$]+)", rest)
        return bare.group(1) if bare else None
    depth = 0
    for i, char in enumerate(rest):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return rest[1:i].strip()
    return None  # the response ended inside the box


def without_reasoning(text: str) -> str:
    """What follows the last </think>."""
    return text.rpartition("</think>")[2]


def final_answer(response: str) -> str:
    r"""The answer that a response commits to, after its reasoning: the last <answer>...</answer>, else the last
    \boxed{...}, else the rest of the line after the last ####, else all of it. Stripped."""
    text = without_reasoning(response)
    tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    if tagged:
        return tagged[-1].strip()
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0].strip()
    return text.strip()


def exact_match(response: str, label: object) -> float:
    """1.0 when the final answer is the label, character for character up to white space; labels may be a list."""
    answer = _squeeze(final_answer(response))
    return float(any(answer == _squeeze(final_answer(str(x))) for x in as_labels(label)))


def f1_score(prediction: str, ground_truth: str) -> tuple[float, float, float]:
    """(F1, precision, recall) over the words of two texts, without case, punctuation and articles, as SQuAD does
    (Rajpurkar et al. 2016). Yes/no answers must be equal to count."""
    left, right = _normalize_words(prediction), _normalize_words(ground_truth)
    if left != right and ({left, right} & {"yes", "no", "noanswer"}):
        return 0.0, 0.0, 0.0
    left_words, right_words = left.split(), right.split()
    common = sum((Counter(left_words) & Counter(right_words)).values())
    if common == 0:
        return 0.0, 0.0, 0.0
    precision, recall = common / len(left_words), common / len(right_words)
    return 2 * precision * recall / (precision + recall), precision, recall


def plain_number(text: str) -> Fraction | None:
    """The exact value of a plain decimal number ("1,234.50"); None for anything else."""
    text = text.strip()
    return Fraction(text.replace(",", "")) if _PLAIN_NUMBER.fullmatch(text) else None


def as_labels(label: object) -> list[object]:
    """The accepted labels: a list stays one, anything else is the only one."""
    return list(label) if isinstance(label, list | tuple) else [label]


def _squeeze(text: str) -> str:
    return " ".join(text.split())


def _normalize_words(text: str) -> str:
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())
