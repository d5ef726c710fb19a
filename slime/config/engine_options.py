"""Options of the installed SGLang server and router, read from their source with `ast`, so that a parser can check
`--sglang-*` and `--router-*` without importing packages that take seconds (and CUDA) to import."""

import ast
import functools
import importlib.util
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.config.errors import ConfigError
from slime.config.fields import flag_of


@dataclass(frozen=True)
class Option:
    """flag: as on the command line. kind: value, switch (no value), toggle (`--x` / `--no-x`), list (several values).
    field: the field that it sets; aliases of one option share it. number: int or float where each value must be one.
    choices: the allowed values, as text; () where there are none, or where a plug-in of SGLang may add some."""

    flag: str
    kind: str
    field: str
    number: type[int] | type[float] | None = None
    choices: tuple[str, ...] = ()


# What slime sets by itself, with the flag that a user should take instead.
RESERVED_SERVER = {
    "model_path": "--hf-checkpoint",
    "tp_size": "--rollout-num-gpus-per-engine",
    "dtype": "--params-dtype",
    "context_length": "--rollout-max-context-len",
    "random_seed": "--rollout-seed",
    "device": "--device",
    "disable_radix_cache": "--sglang-disable-radix-cache",
    "config": "--sglang-<option> for each of its lines (in a --config file too): what it sets could not be checked",
    "pp_size": "--rollout-num-gpus-per-engine: its pipeline stages would take GPUs that other engines have",
    **dict.fromkeys(
        ("host", "port", "nccl_port", "base_gpu_id", "nnodes", "node_rank", "dist_init_addr"), "nothing: slime sets it"
    ),
}
RESERVED_ROUTER = {
    "host": "--sglang-router-ip",
    "port": "--sglang-router-port",
    **dict.fromkeys(("worker_urls", "prometheus_port"), "nothing: slime sets it"),
}


def known_server_options() -> set[str] | None:
    """Names (with underscores) that `--sglang-*` may take; None when SGLang is not installed."""
    return None if (options := server_options()) is None else set(options)


def known_router_options() -> set[str] | None:
    """Names that `--router-*` may take; None when sglang-router is not installed."""
    return None if (options := router_options()) is None else set(options)


@functools.cache
def server_options() -> dict[str, Option] | None:
    """Option by name, fields and aliases alike. Both layouts: fields in server_args.py, or in arg_groups/fields/."""
    root = _package_folder("sglang")
    if root is None:
        return None
    main_file = root / "srt" / "server_args.py"
    options: dict[str, Option] = {}
    for file in [main_file, *sorted((root / "srt" / "arg_groups" / "fields").glob("*.py"))]:
        for node in ast.walk(_parse(file)):
            if isinstance(node, ast.ClassDef) and (node.name == "ServerArgs" or _has_name(node, "_NS_PATH")):
                for option, names in _annotated_fields(node):
                    options.update(dict.fromkeys(names, option))
    options.update(_argparse_options(_parse(main_file)))
    return options


@functools.cache
def router_options() -> dict[str, Option] | None:
    root = _package_folder("sglang_router")
    return None if root is None else _argparse_options(_parse(root / "router_args.py"))


def command_line(options: Mapping[str, Any], known: Mapping[str, Option] | None, prefix: str = "--") -> list[str]:
    """Options as command-line words. With `known` None (package absent) every name becomes `--name value`.

    Raises ConfigError for a value that the option cannot take; `prefix` ("--sglang-") names it in the message.
    """
    words: list[str] = []
    for name, value in options.items():
        option = (known or {}).get(name) or Option(flag_of(name), "value", name)
        try:
            words += _words(option, value)
        except ValueError as error:
            raise ConfigError(f"{prefix}{name.replace('_', '-')} {error}") from None
    return words


def overlay(
    base: Mapping[str, Any],
    user: Mapping[str, Any],
    known: Mapping[str, Option] | None,
    reserved: Mapping[str, str],
    prefix: str,
) -> dict[str, Any]:
    """`base` with the user's options over it, by field, so that an alias replaces the default that it means.

    Raises ConfigError for a reserved or unknown name; `prefix` ("--sglang-") names it in the message.
    """
    by_field = {known[n].field if known and n in known else n: (n, v) for n, v in base.items()}
    for name, value in user.items():
        if known is not None and name not in known:
            raise ConfigError(f"{prefix}{name.replace('_', '-')}: the installed version has no such option")
        field = known[name].field if known else name
        if field in reserved:
            raise ConfigError(f"{prefix}{name.replace('_', '-')} cannot be given; use {reserved[field]}")
        by_field[field] = (name, value)
    return dict(by_field.values())


def _words(option: Option, value: Any) -> list[str]:
    """Raises ValueError with the rest of a sentence that begins with the flag."""
    if option.kind in ("switch", "toggle"):
        text = str(value).lower()
        if value is None or text in ("true", "1", ""):
            return [option.flag]
        if text in ("false", "0"):
            return [option.flag.replace("--", "--no-", 1)] if option.kind == "toggle" else []
        raise ValueError(f"is on or off; it takes no value {value!r}")
    if value is None or value is True:  # as a flag without a value is parsed
        raise ValueError("needs a value")
    if option.kind == "list":
        words = shlex.split(value) if isinstance(value, str) else [str(v) for v in value]
    elif isinstance(value, list):
        raise ValueError(f"takes one value, not {' '.join(map(str, value))}")
    else:
        words = [json.dumps(value) if isinstance(value, dict) else str(value)]
    for word in words:
        _check_word(option, word)
    return [option.flag, *words]


def _check_word(option: Option, word: str) -> None:
    if option.number is not None:
        try:
            option.number(word)
        except ValueError:
            kind = "a whole number" if option.number is int else "a number"
            raise ValueError(f"{word}: it must be {kind}") from None
    if option.choices and word not in option.choices:
        raise ValueError(f"{word}: it must be one of {', '.join(option.choices)}")


def _package_folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)  # a top-level name: finds without importing
    locations = spec.submodule_search_locations if spec else None
    return Path(next(iter(locations))) if locations else None


def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


def _has_name(node: ast.ClassDef, name: str) -> bool:
    return any(
        isinstance(s, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in s.targets)
        for s in node.body
    )


def _annotated_fields(node: ast.ClassDef) -> Iterator[tuple[Option, set[str]]]:
    """Fields `name: A[type, Arg(...)] = default`, or plain `name: type = default` of older versions."""
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name, annotation = statement.target.id, statement.annotation
        keywords: dict[str | None, ast.expr] = {}
        if (
            isinstance(annotation, ast.Subscript)
            and isinstance(annotation.slice, ast.Tuple)
            and ast.unparse(annotation.value) == "A"
        ):
            annotation, *metadata = annotation.slice.elts
            keywords = {k.arg: k.value for m in metadata if isinstance(m, ast.Call) for k in m.keywords}
        if name.startswith("_") or _constant(keywords.get("no_cli")):
            continue
        flag = _constant(keywords.get("cli_name")) or flag_of(name)
        aliases = [_constant(e) for e in getattr(keywords.get("aliases"), "elts", [])]
        option = Option(flag, _kind(annotation, keywords), name, *_value_of(annotation, keywords))
        yield option, {name, *(_name_of(f) for f in (flag, *aliases))}


def _plain_type(annotation: ast.expr) -> str:
    """An annotation's text without what says that it may be None."""
    text = ast.unparse(annotation).replace(" | None", "")
    return text[len("Optional[") : -1] if text.startswith("Optional[") else text


def _value_of(
    annotation: ast.expr, keywords: Mapping[str | None, ast.expr]
) -> tuple[type[int] | type[float] | None, tuple[str, ...]]:
    """(number, choices) of an option, as far as the source says them literally."""
    if "type_parser" in keywords or "action" in keywords:
        return None, ()  # whatever they make of the text
    text = _plain_type(annotation)
    choices = _literals(keywords.get("choices"))
    if text.startswith("Literal["):
        choices = choices or _literals(ast.parse(f"[{text[len('Literal[') : -1]}]", mode="eval").body)
    element = text[len("List[") : -1] if text.lower().startswith("list[") else text
    return {"int": int, "float": float}.get(element), choices


def _literals(node: ast.expr | None) -> tuple[str, ...]:
    """The constants of a list or tuple, as text; () for anything else."""
    if isinstance(node, (ast.List, ast.Tuple)) and all(isinstance(e, ast.Constant) for e in node.elts):
        return tuple(str(_constant(e)) for e in node.elts)
    return ()


def _kind(annotation: ast.expr, keywords: Mapping[str | None, ast.expr]) -> str:
    action = ast.unparse(keywords["action"]) if "action" in keywords else ""
    text = _plain_type(annotation)
    if "BooleanOptionalAction" in action:
        return "toggle"
    if text == "bool" or "StoreTrue" in action or "store_true" in action:
        return "switch"
    if "nargs" in keywords or "nargs" in ast.unparse(keywords.get("action_kwargs", ast.Constant(None))):
        return "list"
    return "list" if text.lower().startswith("list[") and "type_parser" not in keywords else "value"


def _argparse_options(tree: ast.Module) -> dict[str, Option]:
    """Options of every `<parser>.add_argument("--x", ...)`; a prefix inside an f-string counts as empty."""
    options: dict[str, Option] = {}
    for node in ast.walk(tree):
        if not (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"
        ):
            continue
        flags = [flag for a in node.args if (flag := _constant(a)) and flag.startswith("--")]
        if not flags:
            continue
        keywords = {k.arg: k.value for k in node.keywords}
        action = ast.unparse(keywords["action"]) if "action" in keywords else ""
        kind = (
            "toggle" if "BooleanOptionalAction" in action
            else "switch" if ("store_true" in action or "StoreTrue" in action)
            else "list" if _constant(keywords.get("nargs")) in ("*", "+")
            else "value"
        )  # fmt: skip
        number = {"int": int, "float": float}.get(ast.unparse(keywords["type"])) if "type" in keywords else None
        field = _constant(keywords.get("dest")) or _name_of(flags[0])
        option = Option(flags[0], kind, field, number, _literals(keywords.get("choices")))
        options.update(dict.fromkeys((_name_of(f) for f in flags), option))
    return options


def _constant(node: ast.expr | None) -> Any:
    """The constant's value; of an f-string its fixed parts; else None."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
    return None


def _name_of(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")
