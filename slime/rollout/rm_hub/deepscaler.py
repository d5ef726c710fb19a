"""The rule of DeepScaleR (Luo et al. 2025): the boxed answer after the reasoning, against one label or several."""

from slime.rollout.rm_hub.answers import as_labels, last_boxed
from slime.rollout.rm_hub.math_utils import answers_equal


def get_deepscaler_rule_based_reward(response: str, label: object) -> int:
    r"""1 when what follows `</think>` (or `###Response`) has a \boxed answer equal to the label, else 0.

    A response without either mark, without a box, or an empty label gives 0.
    """
    for mark in ("</think>", "###Response"):
        if mark in response:
            solution = response.rpartition(mark)[2]
            break
    else:
        return 0
    answer = last_boxed(solution)
    if answer is None:
        return 0
    labels = [str(x) for x in as_labels(label) if x is not None and str(x) != ""]
    return int(any(answers_equal(answer, x) for x in labels))
