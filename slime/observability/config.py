"""The resolved configuration of a run as a YAML file that `--config` reads again."""

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from slime.config import Args

FILE = "config.yaml"


def write_config(run_dir: str | Path, args: Args, layout: Any = None) -> Path:
    """Writes all flags that are set, derived ones too, to `run_dir/config.yaml`; the layout as a comment.

    Keys of --custom-config-path go beside it, as `custom_config.yaml`: they are no flags.
    """
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    values = args.to_dict()
    extra = values.pop("extra")
    for owner in ("sglang", "router"):
        values |= {f"{owner}_{name}": value for name, value in values.pop(owner).items()}
    flags = {k: v for k, v in values.items() if v is not None and k != "config"}
    if extra:
        custom = folder / "custom_config.yaml"
        custom.write_text(yaml.safe_dump(extra, sort_keys=False))
        flags["custom_config_path"] = str(custom)
    head = "# All flags of this run, derived ones included. Again: python train.py --config THIS_FILE\n"
    if layout is not None:
        head += "# " + ", ".join(f"{k} {v}" for k, v in dataclasses.asdict(layout).items()) + "\n"
    path = folder / FILE
    path.write_text(head + yaml.safe_dump(flags, sort_keys=False))
    return path
