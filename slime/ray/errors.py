"""What a user sees when a remote part failed: the original traceback, without Ray's wrapping."""

import traceback

from slime.config import ConfigError
from slime.utils.checkpoint_folder import SaveError


def explain(error: BaseException) -> str:
    """Text for stderr: a ConfigError or SaveError of a worker as it is; anything else with its traceback."""
    cause = getattr(error, "cause", None) or error
    lines = "\n".join(f"slime: error: {line}" for line in str(cause).splitlines() if line.strip())
    if isinstance(cause, ConfigError | SaveError):
        return lines
    remote = getattr(error, "traceback_str", None)
    text = remote if remote else "".join(traceback.format_exception(error))
    return f"{text.rstrip()}\nslime: error: {type(cause).__name__}: {_last_line(cause)}"


def _last_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:2000] if isinstance(error, Exception) else repr(error)
