"""The one exception for configuration that cannot work."""

from collections.abc import Iterable

_SHOWN = 20


class ConfigError(ValueError):
    """Says in one line what is wrong, where, and how to fix it. The drivers print it without a traceback and exit 2."""


def raise_faults(faults: Iterable[str], what: str) -> None:
    """Raises ConfigError that lists the first of them, and counts the others, when there are any."""
    found = list(faults)
    if found:
        more = [f"... and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        raise ConfigError(f"{what}:\n  " + "\n  ".join(found[:_SHOWN] + more))
