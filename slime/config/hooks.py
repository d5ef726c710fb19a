"""User functions given by dotted path: loaded, and checked against the call that we will make, before a run starts.

What a hook must accept is written once, in the flag's `hook` text (`slime.config.groups`), as the parameter
list of a Python function:

- a parameter without a default is passed by position;
- one with a default (`evaluation=False`), or after `*`, is passed by that name;
- `**kwargs` means that the hook may take more, and need not.
"""

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from slime.config.errors import ConfigError
from slime.config.fields import flag_of

# Objects given by path that are classes with a contract beyond their constructor.
REQUIRED_METHODS = {"data_source_path": ("get_samples", "add_samples", "save", "load", "__len__")}


def load_by_path(path: str) -> Any:
    """The object named `package.module.name` (or `package.module:name`).

    Raises ConfigError that says which part of the path does not exist. An exception inside the user's module
    while it is imported passes through as it is: its traceback is what the user needs.
    """
    module_name, _, name = path.replace(":", ".").rpartition(".")
    if not module_name or not name:
        raise ConfigError(f"{path!r} is no dotted path: expected package.module.name")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A missing import inside the user's module is the user's error, not a wrong path.
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ConfigError(
                f"{path!r}: there is no module {error.name!r}; run from the folder that holds it, "
                "or put that folder on PYTHONPATH"
            ) from error
        raise
    try:
        return getattr(module, name)
    except AttributeError:
        have = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ConfigError(
            f"{path!r}: module {module_name!r} has no {name!r}; it has {', '.join(have) or 'none'}"
        ) from None


def check_hook(flag: str, path: str, function: Any, hook: str) -> None:
    """Raises ConfigError unless `function` can be called as the `hook` text says."""
    if not callable(function):
        raise ConfigError(f"{flag} {path}: a {type(function).__name__} is no function; needed: fn({hook})")
    positional, keywords = _parse_hook(hook)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # builtins without a signature cannot be checked
    try:
        signature.bind(*positional, **{k: None for k in keywords})
    except TypeError as error:
        call = ", ".join([*positional, *(f"{k}=..." for k in keywords)])
        raise ConfigError(
            f"{flag} {path}: it is called as fn({call}), but found {_name(function)}{signature} ({error})"
        ) from None


def load_hook(args: Any, field_name: str) -> Callable[..., Any] | None:
    """The function that a `*_path` flag names, checked; None when the flag is unset."""
    path = getattr(args, field_name, None)
    if path is None:
        return None
    flag = flag_of(field_name)
    try:
        function = load_by_path(path)
    except ConfigError as error:
        raise ConfigError(f"{flag} {error}") from error
    except (Exception, SystemExit) as error:  # a script without a __main__ guard exits
        raise ConfigError(f"{flag} {path}: importing it failed with {type(error).__name__}: {error}") from error
    hook = _hook_texts().get(field_name)
    if hook is not None:
        check_hook(flag, path, function, hook)
    missing = [m for m in REQUIRED_METHODS.get(field_name, ()) if not callable(getattr(function, m, None))]
    if missing:
        raise ConfigError(f"{flag} {path}: class {_name(function)} lacks {', '.join(missing)}")
    return function


def check_hooks(args: Any) -> None:
    """Loads and checks every hook that is set. Raises ConfigError with one line per faulty hook."""
    faults = []
    for field_name in _hook_texts():
        try:
            load_hook(args, field_name)
        except ConfigError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError("\n".join(faults))


def _hook_texts() -> dict[str, str]:
    from slime.config.args import Args  # late: args imports groups, which must not need this module

    return {f.name: f.metadata["hook"] for f in dataclasses.fields(Args) if f.metadata.get("hook")}


def _parse_hook(hook: str) -> tuple[list[str], list[str]]:
    """Names passed by position and names passed by keyword."""
    function = ast.parse(f"def f({hook}): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    names = [a.arg for a in function.args.args]
    required = len(names) - len(function.args.defaults)
    return names[:required], names[required:] + [a.arg for a in function.args.kwonlyargs]


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__
