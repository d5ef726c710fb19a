"""How long saving stops training: in the foreground, and with --async-save, against one copy in memory.

    python benchmarks/save_pause.py [--hf-checkpoint FOLDER] [--rounds 5]

One trainer rank. Without --hf-checkpoint a random model of 50 million parameters is made. Medians; last line: JSON.
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
    parser.add_argument("--rounds", type=int, default=5)
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
            for name in ("foreground", "pause", "written after", "copy of the checkpoint", "copy of the weights")
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
                paused = time.perf_counter()
                actor.finish_save()
                if step > 1:  # before, all ranks are compared once, and buffers are made
                    seconds["pause" if background else "foreground"].append(paused - started)
                    if background:
                        seconds["written after"].append(time.perf_counter() - started)
            (checkpoint,) = Path(args.save).glob("iter_*")
            nbytes = sum(file.stat().st_size for file in checkpoint.iterdir())
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"checkpoint of {nbytes / 1e6:.0f} MB (weights {weights / 1e6:.0f} MB)")
    for name, value in medians.items():
        print(f"{name:24}{value:9.3f} s")
    result = {f"{name.replace(' ', '_')}_s": round(value, 4) for name, value in medians.items()}
    pairs = zip(seconds["pause"], seconds["copy of the checkpoint"], strict=True)
    result["pause_to_copy"] = round(statistics.median(pause / copy for pause, copy in pairs), 2)
    print(json.dumps({"bytes": nbytes, "threads": torch.get_num_threads(), **result}))


def _copy(nbytes: int) -> float:
    """Seconds for a copy between two places in real memory: pages of zeros that nobody wrote would all be one page."""
    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    started = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
