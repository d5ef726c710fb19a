"""The run folder: a fresh run never mixes with, or overwrites, what an earlier one left."""

import itertools
from pathlib import Path

from slime.config import Args
from slime.utils.resume import resumed_checkpoint


def prepare_run_folder(args: Args) -> Path | None:
    """Makes --run-dir. What an earlier run left there moves to `<run-dir>.1`, `.2`, ... unless this run continues it.

    Returns the folder that the earlier run moved to, or None.
    """
    folder = Path(args.run_dir)
    moved = None
    if resumed_checkpoint(args) is None and (folder / "config.yaml").exists():
        moved = next(p for i in itertools.count(1) if not (p := folder.with_name(f"{folder.name}.{i}")).exists())
        folder.rename(moved)
    folder.mkdir(parents=True, exist_ok=True)
    return moved
