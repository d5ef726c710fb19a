"""What --rm-type, and "rm_type" in a row's metadata, may name. The rewards themselves are in slime/rollout/rm_hub."""

from typing import Any

# tests/test_config.py holds it to slime.rollout.rm_hub.RM_TYPES.
BUILT_IN_REWARDS = ("math", "exact", "f1", "reasoning_gym", "remote_rm", "deepscaler", "dapo", "random")
WITHOUT_LABEL = ("remote_rm", "reasoning_gym", "random")  # those that can grade a sample that has none


def label_fault(kind: str, label: Any) -> str | None:
    """Why the built-in reward `kind` (without boxed_) cannot grade by this label; None: it can."""
    if kind in WITHOUT_LABEL:
        return None
    if label is None or label in ("", []) or label != label:  # NaN is how tables without a value are read
        return "needs a label, and there is none (--label-key)"
    if isinstance(label, dict):
        return f"needs text, a number or a list of them as label, found an object with {', '.join(map(str, label))}"
    if kind == "dapo" and isinstance(label, (list, tuple)):
        return "takes one label, found a list"
    return None
