"""Weight sync of a real engine: GB/s against a plain memory copy of the same bytes, and what the digests cost.

    python benchmarks/weight_sync.py --hf-checkpoint models/smollm2-135m-instruct [--dtype bfloat16] [--rounds 5]

One trainer rank and one SGLang engine on this machine. Checked and unchecked syncs take turns; the median of each
counts. Last line: JSON.
"""

import argparse
import json
import os
import statistics
import tempfile
import time

from slime.utils.threads import cpu_env

os.environ |= cpu_env(len(os.sched_getaffinity(0)))  # as trainer ranks run on CPU; libraries read it once

import torch  # noqa: E402

from slime.backends.megatron_utils.model import build_model, transformer_config  # noqa: E402
from slime.backends.megatron_utils.parallel import init_parallel  # noqa: E402
from slime.backends.megatron_utils.update_weight import WeightUpdater  # noqa: E402
from slime.backends.sglang_utils.client import EngineEndpoint  # noqa: E402
from slime.backends.sglang_utils.server import EngineSpec, SGLangServer  # noqa: E402
from slime.config.args import Args  # noqa: E402
from slime.config.hf_config import load_hf_config  # noqa: E402
from slime.models import load_hf_into  # noqa: E402
from slime.utils.net import free_port  # noqa: E402


def copy_seconds(nbytes: int, rounds: int) -> float:
    """Of one copy in memory, best of the rounds."""
    source, target = torch.zeros(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    best = float("inf")
    for _ in range(rounds + 1):
        started = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - started)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-checkpoint", required=True)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=5)
    default = Args().update_weight_buffer_size // 1024**2
    parser.add_argument("--buffer-mb", type=int, default=default, help="size of a bucket in MiB")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as logs:
        args = Args(
            hf_checkpoint=options.hf_checkpoint, params_dtype=options.dtype, rollout_max_context_len=256,
            sglang_server_concurrency=4, actor_num_gpus_per_node=1, check_weights_interval=2, run_dir=logs,
            update_weight_buffer_size=options.buffer_mb * 1024**2,
        )  # fmt: skip
        server = SGLangServer(args, EngineSpec.from_args(args))
        server.start()
        try:
            result = measure(args, server.url, options.rounds)
        finally:
            server.stop()
    print(f"{'':24}{'seconds':>9}{'GB/s':>8}")
    for name in "copy", "sync", "sync_checked":
        print(f"{name.replace('_', ', '):24}{result[f'{name}_s']:9.3f}{result['gb'] / result[f'{name}_s']:8.2f}")
    print(json.dumps(result))


def measure(args: Args, url: str, rounds: int) -> dict[str, float]:
    hf = load_hf_config(args.hf_checkpoint)  # type: ignore[arg-type]
    init_parallel(args, 0, 1, "127.0.0.1", free_port(), num_layers=hf.num_layers)
    config = transformer_config(args, hf)
    config.perform_initialization = False
    chunks = build_model(args, hf, config)
    load_hf_into(chunks, args.hf_checkpoint, hf, args)  # type: ignore[arg-type]
    updater = WeightUpdater(args, chunks, hf)
    updater.connect([EngineEndpoint(url)])
    receipts = [updater.update(version) for version in range(2 * rounds + 2)][2:]
    checked, plain = receipts[::2], receipts[1::2]  # check_weights_interval 2, even ones are checked
    assert all(r.digests_checked for r in checked) and not any(r.digests_checked for r in plain)
    sync, sync_checked = (statistics.median(r.seconds for r in group) for group in (plain, checked))
    copy = copy_seconds(plain[0].bytes, rounds)
    return {
        "tensors": plain[0].tensors,
        "gb": plain[0].bytes / 1e9,
        "copy_s": copy,
        "sync_s": sync,
        "sync_checked_s": sync_checked,
        "gb_per_s": plain[0].bytes / 1e9 / sync,
        "of_copy": copy / sync,
        "digest_overhead": sync_checked / sync - 1,
        "digest_wait_s": statistics.median(r.check_seconds for r in checked),
    }


if __name__ == "__main__":
    main()
