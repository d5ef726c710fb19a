"""Conversion of a real model: bytes, logits, perplexity, throughput and memory.

    python benchmarks/convert_speed.py models/smollm2-135m-instruct

Converts the folder to a checkpoint cut for TP 2 x PP 2 and back, compares every tensor byte by byte, and the logits and
perplexity of a text in float32 with transformers'. Throughput is of the tool's own command, from its first to its last
byte, next to plain safetensors: every tensor of the folder read and written to a new file, and flushed to the disk too.
The last line is JSON.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
TEXT = (
    "The sun is a star at the centre of a system of planets. Light needs eight minutes from there to the earth. "
    "Water covers most of the earth's surface, and most of that water is salt water in the oceans. "
)


def plain_copy(folder: Path, target: Path) -> float:
    """Seconds to read and write all tensors with safetensors itself."""
    import os

    from safetensors.torch import load_file, save_file

    begun = time.monotonic()
    for path in sorted(folder.glob("*.safetensors")):
        save_file({name: tensor.clone() for name, tensor in load_file(path).items()}, target / path.name)
        with open(target / path.name, "rb") as file:
            os.fsync(file.fileno())
    return time.monotonic() - begun


def run_tool(*words: str) -> tuple[float, float]:
    """(seconds of the command, of which its imports took the part before the first unit; peak memory in GB)."""
    begun = time.monotonic()
    done = subprocess.run([sys.executable, str(ROOT / "tools/convert_hf.py"), *words], text=True, capture_output=True)
    seconds = time.monotonic() - begun
    if done.returncode:
        raise SystemExit(done.stderr)
    return seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6


def in_process(folder: Path, scratch: Path, processes: int) -> tuple[float, float]:
    """Seconds of each direction without the start of Python and the imports."""
    from slime.backends.megatron_utils.convert.run import Job, convert_to_hf, convert_to_megatron

    times = []
    for work, job in (
        (convert_to_megatron, Job(folder, scratch / "m", folder, tp=2, pp=2, etp=2, processes=processes)),
        (convert_to_hf, Job(scratch / "m", scratch / "h", folder, processes=processes)),
    ):
        begun = time.monotonic()
        work(job, lambda text: None)
        times.append(time.monotonic() - begun)
    return times[0], times[1]


def compare(folder: Path, ckpt: Path) -> tuple[float, float, float]:
    """(largest logit difference relative to the largest logit, perplexity of Megatron, of transformers)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from slime.backends.megatron_utils import checkpoint
    from slime.backends.megatron_utils.convert.run import Job, one_rank
    from slime.backends.megatron_utils.convert.verify import logits_of
    from slime.backends.megatron_utils.model import build_model
    from slime.config.hf_config import load_hf_config

    hf = load_hf_config(folder)
    ids = AutoTokenizer.from_pretrained(folder)(TEXT * 3, return_tensors="pt").input_ids
    with one_rank(Job(folder, None, folder), hf, "float32") as args, torch.no_grad():
        (model,) = build_model(args, hf)
        checkpoint.load_checkpoint(ckpt, [model])
        ours = logits_of(model, [ids[0]])[: ids.size(1), : hf.vocab_size]
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids).logits[0]
    loss = [torch.nn.functional.cross_entropy(x[:-1].double(), ids[0, 1:]).item() for x in (ours, theirs)]
    difference = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    return difference, math.exp(loss[0]), math.exp(loss[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--scratch", type=Path, help="folder for what is written; unset: a temporary one")
    options = parser.parse_args()
    size = sum(path.stat().st_size for path in options.folder.glob("*.safetensors"))
    with tempfile.TemporaryDirectory(dir=options.scratch) as name:
        scratch = Path(name)
        (scratch / "plain").mkdir()
        plain_copy(options.folder, scratch / "plain")  # warms the page cache
        plain = plain_copy(options.folder, scratch / "plain")
        layout = ["--tp", "2", "--pp", "2", "--processes", str(options.processes)]
        there = run_tool("--to", "megatron", "--input", str(options.folder), "--output", str(scratch / "c"), *layout)
        back = run_tool(
            "--to", "hf", "--input", str(scratch / "c"), "--output", str(scratch / "b"),
            "--hf-checkpoint", str(options.folder), "--processes", str(options.processes),
        )  # fmt: skip
        to_megatron, to_hf = in_process(options.folder, scratch, options.processes)
        from benchmarks.convert_grid import different_tensors

        changed = different_tensors(options.folder, scratch / "b")
        difference, ours, theirs = compare(options.folder, scratch / "c/iter_0000000")
    print(f"{options.folder}: {size / 1e6:.0f} MB, {len(changed)} tensors changed")
    print(f"plain safetensors {plain:.2f} s; to Megatron {to_megatron:.2f} s, to Hugging Face {to_hf:.2f} s")
    print(f"whole commands: {there[0]:.1f} s and {back[0]:.1f} s, at most {max(there[1], back[1]):.2f} GB of memory")
    print(f"logits within {difference:.1e}; perplexity {ours:.6f}, transformers' {theirs:.6f}")
    result = {
        "bytes": size, "changed": len(changed), "logits_rel": difference, "perplexity_rel": abs(ours / theirs - 1),
        "x_plain_to_megatron": round(plain / to_megatron, 2), "x_plain_to_hf": round(plain / to_hf, 2),
        "peak_gb": round(max(there[1], back[1]), 2),
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
