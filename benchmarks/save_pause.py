"""How long saving stops training: in the foreground, and with --async-save, against one copy in memory.

    python benchmarks/save_pause.py [--hf-checkpoint FOLDER] [--rounds 5]

One trainer rank. Without --hf-checkpoint a random model of 50 million parameters is made. With --async-save training
goes on when `save` returns, and waits before it changes anything until the copies are made, which weight update and
generation leave time for: "stops" is without that time, as if the next step came at once; "stops in a run" is with a
second of it. Medians; last line: JSON.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as trainer ranks run on CPU; torch reads it once

import torch  # noqa: E402

from slime.backends.megatron_utils.actor import MegatronTrainActor  # noqa: E402
from slime.config.args import Args  # noqa: E402
from slime.utils.net import free_port  # noqa: E402
from tools.make_tiny_model import TinyModel, make_tiny_model  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-checkpoint")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.hf_checkpoint
        if folder is None:
            folder = f"{scratch}/model"
            sizes = dict(num_layers=8, hidden_size=640, intermediate_size=1920, vocab_size=8192, head_dim=64)
            make_tiny_model(Path(folder), TinyModel(num_attention_heads=10, num_key_value_heads=5, **sizes))
        args = Args(
            hf_checkpoint=folder, device="cpu", params_dtype="float32", save=f"{scratch}/ck", keep_last=1,
            num_rollout=1, actor_num_gpus_per_node=1, global_batch_size=1, rollout_batch_size=1, n_samples_per_prompt=1,
        )  # fmt: skip
        actor = MegatronTrainActor(0, 1, "127.0.0.1", free_port())
        actor.init(args)
        seconds: dict[str, list[float]] = {
            name: []
            for name in (
                "foreground",
                "first save",
                "save returns",
                "stops",
                "stops in a run",
                "written after",
                "copy of the checkpoint",
                "copy of the weights",
            )
        }
        weights = sum(p.numel() * p.element_size() for chunk in actor.model for p in chunk.parameters())
        nbytes = 0
        for background in (False, True):
            actor.args, actor._writer = args.replace(async_save=background), None
            for step in range(options.rounds + 2):
                if background and step > 1:  # beside each pause, so that both see the same machine
                    for name, size in (("copy of the checkpoint", nbytes), ("copy of the weights", weights)):
                        seconds[name].append(_copy(size))
                started = time.perf_counter()
                actor.save(step)
                returned = time.perf_counter() - started
                in_a_run = background and step % 2 == 1
                if in_a_run:  # generation
                    time.sleep(1.0)
                asked = time.perf_counter()
                actor.finish_copies()
                stopped = returned + time.perf_counter() - asked
                actor.finish_save()
                if background and step == 0:
                    seconds["first save"].append(stopped)
                if step > 1:  # before, all ranks are compared once, and buffers are made
                    if not background:
                        seconds["foreground"].append(stopped)
                        continue
                    seconds["save returns"].append(returned)
                    seconds["stops in a run" if in_a_run else "stops"].append(stopped)
                    seconds["written after"].append(time.perf_counter() - started)
            (checkpoint,) = Path(args.save).glob("iter_*")
            nbytes = sum(file.stat().st_size for file in checkpoint.iterdir())
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"checkpoint of {nbytes / 1e6:.0f} MB (weights {weights / 1e6:.0f} MB)")
    for name, value in medians.items():
        print(f"{name:24}{value:9.3f} s")
    result = {f"{name.replace(' ', '_')}_s": round(value, 4) for name, value in medians.items()}
    for name in ("stops", "stops in a run"):
        result[f"{name.replace(' ', '_')}_to_copy"] = round(medians[name] / medians["copy of the checkpoint"], 2)
    print(json.dumps({"bytes": nbytes, "threads": torch.get_num_threads(), **result}))


def _copy(nbytes: int) -> float:
    """Seconds for a copy between two places in real memory: pages of zeros that nobody wrote would all be one page."""
    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    started = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
