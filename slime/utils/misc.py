"""Small helpers that plug-ins import."""

import threading
from typing import Any

from slime.config.hooks import load_by_path

load_function = load_by_path

__all__ = ["SingletonMeta", "load_function"]


class SingletonMeta(type):
    """Metaclass: one instance per class, and per `singleton_key(*args)` where the class defines that.

    The first call makes the instance, later ones return it and ignore their arguments; so whatever would make
    an old instance wrong belongs into the key.
    """

    _instances: dict[tuple[type, Any], Any] = {}
    _lock = threading.RLock()

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        make_key = getattr(cls, "singleton_key", None)
        key = (cls, make_key(*args, **kwargs) if make_key else None)
        with SingletonMeta._lock:
            if key not in SingletonMeta._instances:
                SingletonMeta._instances[key] = super().__call__(*args, **kwargs)
            return SingletonMeta._instances[key]

    def clear_instances(cls) -> None:
        """Forgets this class's instances (tests)."""
        with SingletonMeta._lock:
            for key in [k for k in SingletonMeta._instances if k[0] is cls]:
                del SingletonMeta._instances[key]
