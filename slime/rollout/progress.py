"""Progress bars that also show when they are drawn inside a Ray actor."""

import sys
from typing import Any


def progress_bar(args: Any, total: int, description: str) -> Any:
    """A bar with `update(n)` and `close()`; --progress says whether it is shown (auto: on a terminal)."""
    on = args.progress == "on" or (args.progress == "auto" and sys.stderr.isatty())
    if on and _in_ray_actor():
        from ray.experimental import tqdm_ray  # drawn by the driver

        return tqdm_ray.tqdm(total=total, desc=description)
    from tqdm import tqdm

    return tqdm(total=total, desc=description, disable=not on, dynamic_ncols=True)


def _in_ray_actor() -> bool:
    ray = sys.modules.get("ray")
    return bool(ray and ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE)
