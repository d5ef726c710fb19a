"""How one flag is declared: a dataclass field with its default, its help and its limits in one place."""

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any


def arg(
    default: Any,
    help: str,
    *,
    choices: Sequence[Any] | None = None,
    limits: str | None = None,
    aliases: Sequence[str] = (),
    parse: Callable[[str], Any] | None = None,
    hook: str | None = None,
) -> Any:
    """Declares a flag. `--some-name` is derived from the field's name.

    choices: allowed values. limits: the interval of allowed numbers, "[0, 1)". aliases: further spellings,
    with their dashes. parse: text to value, where the field's type is not enough (JSON). hook: the parameters
    that a user's function must accept, as a signature in words such as "args, sample, **kwargs";
    `slime.config.hooks` checks it before start.
    """
    meta = {"help": help, "choices": choices, "limits": limits, "aliases": tuple(aliases), "parse": parse, "hook": hook}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=meta)
    return dataclasses.field(default=default, metadata=meta)


def group(title: str) -> Callable[[type], type]:
    """Class decorator: a dataclass of flags shown under `title` in --help."""

    def wrap(cls: type) -> type:
        out: Any = dataclasses.dataclass(kw_only=True)(cls)
        out.group_title = title
        return out

    return wrap


def flag_of(name: str) -> str:
    """A field's name as on the command line."""
    return "--" + name.replace("_", "-")


def default_of(field: dataclasses.Field) -> Any:
    """The default of a field, whether given as a value or as a factory."""
    factory: Any = field.default_factory
    return field.default if field.default is not dataclasses.MISSING else factory()


def json_object(text: str) -> dict[str, Any]:
    """The value of a flag that takes a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is no JSON object: expected {{"name": value}}')
    return value


def limit_fault(value: float, limits: str | None) -> str | None:
    """What is wrong with a number that is not finite, or outside of an interval such as "[1, inf)" or "(0, 1]"."""
    if not math.isfinite(value):
        return "it must be a finite number"
    if limits is None:
        return None
    low, high = (float(bound) for bound in limits[1:-1].split(","))
    above = value > low or (value == low and limits[0] == "[")
    below = value < high or (value == high and limits[-1] == "]")
    if above and below:
        return None
    if math.isfinite(high):
        return f"it must be in {limits}"
    return f"it must be {'at least' if limits[0] == '[' else 'above'} {low:g}"
