"""A disk that runs full while a run saves: a real small mount, filled to the last byte after the first checkpoint.

    python benchmarks/full_disk.py [--steps 12]

Four runs (fine-tuning of a tiny model, a checkpoint after each step), saving in the foreground and with --async-save,
with --on-save-error stop and continue. Each must say so in one line, keep the checkpoint before, and end by the flag:
stop ends the run (exit code 1), and the same command goes on from that checkpoint when there is room again; continue
trains on and saves again when there is room. The mount lives in a mount namespace of its own (`unshare`), so no rights
are needed. Last line: JSON.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from slime.utils.checkpoint_folder import check_digests, check_sizes, latest_checkpoint, read_manifest
from tools.make_tiny_model import TinyModel, make_tiny_model

ROOT = Path(__file__).resolve().parent.parent
SIZE = "48m"
ROOM = 100_000  # bytes left free: enough for a folder and small files, not for a checkpoint


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:
        again = [sys.executable, str(Path(__file__).resolve()), "--inside", "--steps", str(options.steps)]
        return subprocess.call(["unshare", "--user", "--map-root-user", "--mount", *again], env=_env())
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_tiny_model(folder / "model", TinyModel(num_layers=2, hidden_size=64, intermediate_size=128))
        turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
        (folder / "data.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 8)
        for background in (False, True):
            for on_error in ("stop", "continue"):
                disk = folder / f"disk_{background}_{on_error}"
                disk.mkdir()
                subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(disk)], check=True)
                try:
                    rows.append(_run(folder, disk, options.steps, background, on_error))
                finally:
                    subprocess.run(["umount", str(disk)], check=True)
                print(rows[-1], flush=True)
    print(json.dumps({"failed": sum(not row["ok"] for row in rows), "rows": rows}))
    return 0 if all(row["ok"] for row in rows) else 1


def _run(folder: Path, disk: Path, steps: int, background: bool, on_error: str) -> dict[str, Any]:
    command = [
        sys.executable, str(ROOT / "train.py"), "--device", "cpu", "--params-dtype", "float32",
        "--hf-checkpoint", str(folder / "model"), "--prompt-data", str(folder / "data.jsonl"),
        "--input-key", "messages",
        "--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout", "--loss-type", "sft_loss",
        "--n-samples-per-prompt", "1", "--rollout-batch-size", "4", "--num-rollout", str(steps), "--lr", "1e-3",
        "--run-dir", str(folder / f"run_{disk.name}"), "--save", str(disk / "ck"), "--load", str(disk / "ck"),
        "--save-interval", "1", "--keep-last", "1", "--on-save-error", on_error, "--no-use-tensorboard",
        "--progress", "off", *(["--async-save"] if background else []),
    ]  # fmt: skip
    filler = disk / "filler"
    row: dict[str, Any] = {"async_save": background, "on_save_error": on_error}
    with open(folder / f"{disk.name}.log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=_env(), cwd=folder)

        def said() -> list[str]:
            return [line for line in Path(log.name).read_text().splitlines() if "could not be written" in line]

        try:
            _until(lambda: latest_checkpoint(disk / "ck") is not None, process)
            _until(lambda: _fill(filler) or bool(said()), process)  # again and again: older checkpoints are removed
            kept = _whole(disk / "ck")
            if on_error == "continue":
                filler.unlink()
            row |= {"exit": process.wait(300), "said": said()[0], "kept": kept}
        finally:
            process.kill()
    if on_error == "stop":
        row["kept"] = _whole(disk / "ck")
        filler.unlink()
        with open(folder / f"{disk.name}_again.log", "w") as log:
            again = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=_env(), cwd=folder, timeout=300)
        row["exit_again"] = again.returncode
    row["end"] = _whole(disk / "ck")
    full = re.search(r"\(0\.\d MB are free there\)", row["said"]) is not None
    as_asked = row["exit"] == 0 if on_error == "continue" else row["exit"] == 1 and row["exit_again"] == 0
    row["ok"] = as_asked and full and row["kept"] < row["end"] == steps - 1
    return row


def _fill(filler: Path) -> None:
    """Takes all room of its disk but ROOM."""
    with contextlib.suppress(OSError), open(filler, "ab", buffering=0) as file:
        while (free := shutil.disk_usage(filler.parent).free) > ROOM:
            file.write(b"x" * min(free - ROOM, 1 << 20))


def _whole(folder: Path) -> int:
    """The step of the checkpoint that counts, all of whose bytes are those that were written."""
    found = latest_checkpoint(folder)
    assert found is not None
    manifest = read_manifest(found[0])
    assert manifest is not None
    check_sizes(found[0], manifest)
    check_digests(found[0], manifest, manifest.files)
    return found[1]


def _until(holds: Any, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 300.0
    while not holds() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


if __name__ == "__main__":
    raise SystemExit(main())
