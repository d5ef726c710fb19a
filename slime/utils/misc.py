"""Small helpers, also for plug-ins."""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from slime.config.hooks import load_by_path

load_function = load_by_path

__all__ = ["SingletonMeta", "batched_by_size", "load_function"]

T = TypeVar("T")


def batched_by_size(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Neighbours together, in order: batches whose sizes sum up to at most `limit`; a larger item goes alone."""
    batch: list[T] = []
    used = 0
    for item in items:
        n = size(item)
        if batch and used + n > limit:
            yield batch
            batch, used = [], 0
        batch.append(item)
        used += n
    if batch:
        yield batch


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
