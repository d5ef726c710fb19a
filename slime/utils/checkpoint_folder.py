"""A folder of checkpoints on disk: which one counts, whether it is complete and untouched, and how one is committed.

    --save FOLDER/
        iter_0000012/                          one per checkpoint, named by rollout id; complete whenever it is there
            manifest.json                      size and digest of every other file, and what the run was
        latest_checkpointed_iteration.txt      the one to go on from
        .partial_iter_0000013/                 being written, or left by a crash; never read

Needs neither torch nor Megatron, so a run looks before it starts anything.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slime.config.errors import ConfigError

LATEST = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
VERSION = 1  # of what a checkpoint holds; raise it when an older slime must not read a newer checkpoint
_READ_BYTES = 1 << 24


class SaveError(RuntimeError):
    """A checkpoint could not be written; the ones before are as they were."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """files: {path within the checkpoint: {"bytes", "blake2b"}}. run: what the writing run was (slime.utils.resume)."""

    version: int
    step: int
    files: dict[str, dict[str, Any]]
    run: dict[str, Any]


def checkpoint_name(step: int) -> str:
    return f"iter_{step:07d}"


def partial_folder(root: Path, step: int) -> Path:
    """Where a checkpoint is written before it is committed."""
    return root / f".partial_{checkpoint_name(step)}"


def latest_checkpoint(folder: str | Path | None) -> tuple[Path, int] | None:
    """(path, rollout id) of the checkpoint that `folder` points to; None when there is no checkpoint.

    `folder` may also be one checkpoint (`.../iter_0000012`). Without a pointer (a crash came between the first
    checkpoint and its pointer) the newest complete one counts. Raises ConfigError when the pointer leads nowhere.
    """
    if folder is None or not Path(folder).is_dir():
        return None
    root = Path(folder)
    if root.name.startswith("iter_") and (root / "metadata.json").is_file():
        return root, int(root.name.removeprefix("iter_"))
    if not (root / LATEST).is_file():
        complete = sorted(path.parent for path in root.glob(f"iter_*/{MANIFEST}"))
        return (complete[-1], int(complete[-1].name.removeprefix("iter_"))) if complete else None
    text = (root / LATEST).read_text().strip()
    if not text.isdigit():
        raise ConfigError(f"--load {folder}: {LATEST} holds {text[:40]!r}, not the number of a checkpoint")
    path = root / checkpoint_name(int(text))
    if not (path / "metadata.json").is_file():
        have = ", ".join(sorted(p.parent.name for p in root.glob("iter_*/metadata.json"))) or "none"
        raise ConfigError(
            f"--load {folder}: {LATEST} names {path.name}, which is missing or incomplete; complete are: {have} "
            "(write the number of one into that file to go on from there)"
        )
    return path, int(text)


def is_hf_folder(folder: str | Path | None) -> bool:
    """Whether weights may be read from here as from --hf-checkpoint."""
    return folder is not None and (Path(folder) / "config.json").is_file()


def read_manifest(path: Path) -> Manifest | None:
    """Of a checkpoint; None where Megatron-LM wrote it, without one. Raises ConfigError for a damaged or newer one."""
    file = path / MANIFEST
    if not file.is_file():
        return None
    try:
        raw = json.loads(file.read_text())
        version = int(raw["version"])
        if version > VERSION:
            raise ConfigError(
                f"checkpoint {path} is of version {version}, written by a newer slime; this one reads up to {VERSION}: "
                "update it, or take an older checkpoint"
            )
        return Manifest(version, int(raw["step"]), dict(raw["files"]), dict(raw["run"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"checkpoint {path}: {MANIFEST} is damaged ({error!r}); take another checkpoint") from None


def holds_weights_only(path: Path) -> bool:
    """Whether a checkpoint is of no run (tools/convert_hf.py made it): a run that loads it starts at step 0."""
    manifest = read_manifest(path)
    return manifest is not None and "flags" not in manifest.run


def check_sizes(path: Path, manifest: Manifest) -> None:
    """Raises ConfigError that names the first file which is missing or has another size."""
    for name, entry in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise ConfigError(f"checkpoint {path}: the file {name} is missing; take another checkpoint")
        if (size := file.stat().st_size) != entry["bytes"]:
            raise ConfigError(
                f"checkpoint {path}: {name} has {size} bytes, {entry['bytes']} were written; take another checkpoint"
            )


def check_digests(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Reads the named files. Raises ConfigError that names the first one whose bytes have changed."""
    for name in names:
        if describe(path / name)["blake2b"] != manifest.files[name]["blake2b"]:
            raise ConfigError(
                f"checkpoint {path}: the bytes of {name} have changed since it was written; take another checkpoint"
            )


def describe(file: Path) -> dict[str, Any]:
    """A file's entry in the manifest."""
    digest, size = hashlib.blake2b(digest_size=16), 0
    with open(file, "rb") as stream:
        while chunk := stream.read(_READ_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return {"bytes": size, "blake2b": digest.hexdigest()}


def files_in(path: Path) -> list[str]:
    """Files of a checkpoint without its manifest, relative, sorted."""
    found = (p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
    return sorted(name for name in found if name != MANIFEST)


def start_partial(root: Path, step: int) -> Path:
    """An empty folder to write a checkpoint into; what crashes left of earlier ones is removed."""
    for left in root.glob(".partial_*"):
        shutil.rmtree(left, ignore_errors=True)
    path = partial_folder(root, step)
    path.mkdir(parents=True)
    return path


def commit(root: Path, step: int, files: Mapping[str, Any], run: Mapping[str, Any], keep_last: int | None) -> Path:
    """Makes a checkpoint that is completely written the one that counts, then removes those beyond `keep_last`.

    A crash at any moment leaves either the one before or this one. Returns its path.
    """
    partial, final = partial_folder(root, step), root / checkpoint_name(step)
    manifest = {"version": VERSION, "step": step, "files": dict(files), "run": dict(run)}
    write_synced(partial / MANIFEST, json.dumps(manifest, indent=1, default=str))
    for path in (partial, *(p for p in partial.rglob("*") if p.is_dir())):
        _sync_folder(path)
    if final.exists():  # the same step again; the pointer names an older one, unless --start-rollout-id was given
        old = root / f".partial_old_{final.name}"
        final.rename(old)
        partial.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        partial.rename(final)
    _sync_folder(root)
    write_synced(root / (LATEST + ".tmp"), str(step))
    os.replace(root / (LATEST + ".tmp"), root / LATEST)
    _sync_folder(root)
    if keep_last is not None:
        older = sorted(p for p in root.glob("iter_*") if p != final)
        for path in older[: len(older) - max(1, keep_last) + 1]:
            # First out of sight, so that one half removed is never taken for a checkpoint.
            gone = root / f".partial_gone_{path.name}"
            path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
    return final


def write_synced(path: Path, content: str | bytes) -> None:
    with open(path, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
