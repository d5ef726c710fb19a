"""Command line and YAML to `Args`. An unknown name is an error that tells the nearest known one."""

import argparse
import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from slime.config.args import Args
from slime.config.engine_options import known_router_options, known_server_options
from slime.config.errors import ConfigError
from slime.config.fields import default_of, flag_of
from slime.config.foreign import advice
from slime.config.groups import GROUPS

# Who takes `--<owner>-<option>`, and which options the installed one has.
_PASS_THROUGH = {"sglang": known_server_options, "router": known_router_options}


def _value_type(hint: Any) -> tuple[Any, bool]:
    """(type of one value, is it a list) of a field's annotation; `X | None` counts as X."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if typing.get_origin(hint) is list:
        return typing.get_args(hint)[0], True
    return hint, False


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError(f"{message} (see --help)")


def build_parser() -> argparse.ArgumentParser:
    """The argparse parser of all groups, for parsing and for --help."""
    parser = _Parser(
        prog="train.py",
        description="Reinforcement learning of language models with Megatron-Core and SGLang.",
        epilog="--sglang-<option> and --router-<option> are passed on to the engines and to sglang-router.",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for cls in GROUPS:
        section = parser.add_argument_group(cls.group_title)
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            _add_flag(section, field, hints[field.name])
    return parser


def _add_flag(section: Any, field: dataclasses.Field, hint: Any) -> None:
    kind, is_list = _value_type(hint)
    meta = field.metadata
    default = default_of(field)
    shown = "" if default is None or default == {} else f" (default: {default})"
    options: dict[str, Any] = {
        "dest": field.name,
        "default": argparse.SUPPRESS,
        "help": (meta["help"] + shown).replace("%", "%%"),
    }
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        options["type"] = meta["parse"] or kind
        options["metavar"] = "JSON" if meta["parse"] else kind.__name__.upper()
        if is_list:
            options["nargs"] = "*"
        if meta["choices"]:
            options["choices"] = meta["choices"]
            options["metavar"] = "{" + ",".join(map(str, meta["choices"])) + "}"
    section.add_argument(flag_of(field.name), *meta["aliases"], **options)


def parse_args(argv: Sequence[str]) -> Args:
    """Parses flags (command line over --config over defaults). Raises ConfigError; nothing is derived yet."""
    parser = build_parser()
    mine, passed = _split(argv, parser)
    values, rest = parser.parse_known_args(mine)
    given = vars(values)
    if given.get("config"):
        file_argv = _yaml_to_argv(_read_yaml(given["config"], "--config"), given["config"], parser)
        mine, passed = _split([*file_argv, *argv], parser)
        values, rest = parser.parse_known_args(mine)
        given = vars(values)
    options, problems = _pass_through(passed, parser)
    if faults := [*_unknown_words(rest, parser), *problems]:
        raise ConfigError("\n".join(faults))
    extra = _read_yaml(given["custom_config_path"], "--custom-config-path") if given.get("custom_config_path") else {}
    clash = sorted(set(extra) & set(Args.__dataclass_fields__))
    taken = next((name for name in extra if hasattr(Args, name) and name not in clash), None)
    if taken is not None:
        raise ConfigError(
            f"--custom-config-path {given['custom_config_path']}: args.{taken} is a method; rename the key"
        )
    if clash:
        raise ConfigError(
            f"--custom-config-path {given['custom_config_path']}: {clash[0]!r} is a flag; set {flag_of(clash[0])}"
        )
    return Args(**given, extra=extra, **options)


class _Loader(yaml.SafeLoader):
    """As safe_load, but a key that stands twice is an error instead of the later one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [str(key.value).replace("-", "_") for key, _ in node.value]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _read_yaml(path: str, flag: str) -> dict[str, Any]:
    try:
        data = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{flag} {path}: cannot be read ({' '.join(str(error).split())})") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{flag} {path}: the file must hold `name: value` lines, not a {type(data).__name__}")
    return {str(k).replace("-", "_"): v for k, v in data.items()}


def _yaml_to_argv(data: dict[str, Any], path: str, parser: argparse.ArgumentParser) -> list[str]:
    """YAML keys as flags, so that files and command lines are checked by the same code."""
    actions = {s: action for action in parser._actions for s in action.option_strings}
    out: list[str] = []
    seen: dict[str, str] = {}
    for name, value in data.items():
        flag = flag_of(name)
        passed = flag not in actions and flag.startswith(("--sglang-", "--router-"))
        if flag not in actions and not passed:
            raise ConfigError(f"--config {path}: unknown key {name!r}{_instead(flag, list(actions))}")
        if name == "config":
            raise ConfigError(f"--config {path}: a file of flags cannot name another; put its lines into this one")
        if value is None:
            continue
        if not passed:
            other = seen.setdefault(actions[flag].dest, name)
            if other != name:
                raise ConfigError(f"--config {path}: {other!r} and {name!r} are the same flag; choose one")
            value = _yaml_value(name, value, actions[flag], path)
        if isinstance(value, bool):
            out.append(flag if value else f"{flag}=false" if passed else _negated(flag))
        elif isinstance(value, list):
            out += _yaml_list(flag, name, value, path)
        else:
            out.append(f"{flag}={json.dumps(value) if isinstance(value, dict) else value}")
    return out


def _negated(flag: str) -> str:
    return "--" + flag[5:] if flag.startswith("--no-") else "--no-" + flag[2:]


def _yaml_list(flag: str, name: str, values: list[Any], path: str) -> list[str]:
    """Words of a flag that takes several values."""
    for wrong in (v for v in values if isinstance(v, bool) or not isinstance(v, (str, int, float))):
        raise ConfigError(
            f"--config {path}: {name}: {wrong!r} is a {type(wrong).__name__}; needed are texts or numbers (yes, no, "
            "on, off and null need quotes)"
        )
    words = [str(value) for value in values]
    if any(_is_flag(word) for word in words):
        if len(words) == 1:
            return [f"{flag}={words[0]}"]
        raise ConfigError(f"--config {path}: {name}: a value that begins with a dash can be given alone only")
    return [flag, *words]


def _yaml_value(name: str, value: Any, action: argparse.Action, path: str) -> Any:
    """The value of a flag, if it is of a kind that the flag takes."""
    is_switch = isinstance(action, argparse.BooleanOptionalAction)
    if isinstance(value, bool) and not is_switch and action.choices:
        word = "on" if value else "off"  # YAML reads these words as true and false
        value = word if word in action.choices else value
    fits = {bool: is_switch, list: action.nargs == "*", dict: action.metavar == "JSON"}.get(type(value), not is_switch)
    if not fits:
        wanted = "true or false" if is_switch else "a list" if action.nargs == "*" else f"{action.metavar}"
        raise ConfigError(f"--config {path}: {name}: {value!r} is a {type(value).__name__}; needed: {wanted}")
    return value


def _known_flags(parser: argparse.ArgumentParser) -> list[str]:
    return [s for action in parser._actions for s in action.option_strings]


def _instead(flag: str, known: Sequence[str]) -> str:
    return f": {text}" if (text := advice(flag)) else _nearest(flag, known)


def _nearest(flag: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(flag, known, n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else "; --help lists all flags"


def _split(argv: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[list[str]]]:
    """(words that are ours, [flag, values...] of each `--sglang-x` and `--router-x` that is not)."""
    own = set(_known_flags(parser))
    mine: list[str] = []
    passed: list[list[str]] = []
    taking = mine
    for word in argv:
        flag = word.partition("=")[0]
        if _is_flag(word):
            taking = mine
            if flag not in own and flag.startswith(tuple(f"--{owner}-" for owner in _PASS_THROUGH)):
                taking = []
                passed.append(taking)
        taking.append(word)
    return mine, passed


def _pass_through(
    passed: list[list[str]], parser: argparse.ArgumentParser
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """({owner: options}, a line per flag that the installed package does not have)."""
    out: dict[str, dict[str, Any]] = {name: {} for name in _PASS_THROUGH}
    problems: list[str] = []
    for word, *values in passed:
        flag, equals, value = word.partition("=")
        values = [value, *values] if equals else values
        owner = next(o for o in _PASS_THROUGH if flag.startswith(f"--{o}-"))
        option = flag[len(owner) + 3 :].replace("-", "_")
        known = _PASS_THROUGH[owner]()
        if known is not None and option not in known:
            candidates = [flag_of(f"{owner}_{k}") for k in sorted(known)] + _known_flags(parser)
            other = advice(flag) or f"the installed {owner} has no such option{_nearest(flag, candidates)}"
            problems.append(f"unknown flag {flag}: {other}")
        out[owner][option] = True if not values else values[0] if len(values) == 1 else values
    return out, problems


def _is_flag(word: str) -> bool:
    return word.startswith("--") or (word[:1] == "-" and word[1:2].isalpha())


def _unknown_words(rest: list[str], parser: argparse.ArgumentParser) -> Iterator[str]:
    """A line per word that argparse could not place; what follows an unknown flag are its values."""
    after_flag = False
    for word in rest:
        if _is_flag(word) or not after_flag:
            yield _unknown(word, parser)
        after_flag = after_flag or _is_flag(word)


def _unknown(word: str, parser: argparse.ArgumentParser) -> str:
    """Of a word that argparse could not place."""
    flag = word.partition("=")[0]
    if flag.startswith("--"):
        return f"unknown flag {flag}{_instead(flag, _known_flags(parser))}"
    if _is_flag(flag):
        return f"unknown flag {flag}: flags begin with two dashes{_nearest('-' + flag, _known_flags(parser))}"
    if word.lower() in ("true", "false"):
        return f"{word!r} belongs to no flag: a switch takes no value, --x turns it on and --no-x off"
    if "=" in word:
        return f"{word!r} is no flag: flags are --name value, --help lists them"
    return f"{word!r} belongs to no flag (values with spaces need quotes)"
