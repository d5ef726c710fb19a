"""Log-probs and entropy in chunks of rows, against plain log_softmax over the whole matrix: CPU time and peak memory.

    python benchmarks/log_probs.py [--tokens 4096 --vocab 49152 --hidden 576 --chunk 1024 --response-share 1.0]

Each measurement runs in a process of its own, one thread, float32; memory is the peak resident size above that of the
inputs. `forward` is the pass without gradient, `training` a forward and backward pass. With --response-share below 1
ours computes the response rows only, as the trainer does. Last line: JSON with ours divided by plain.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def measure(options: argparse.Namespace) -> dict[str, float]:
    import torch

    from slime.utils.vocab_parallel import linear_log_probs_and_entropy

    torch.set_num_threads(1)
    torch.manual_seed(0)
    n = options.tokens
    hidden = torch.randn(n, options.hidden).requires_grad_(options.what == "training")
    weight = (torch.randn(options.vocab, options.hidden) * 0.05).requires_grad_(options.what == "training")
    targets, rows = torch.randint(0, options.vocab, (n,)), torch.arange(n - int(n * options.response_share), n)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1024
    start = time.process_time()
    if options.how == "ours":
        log_probs, entropy = linear_log_probs_and_entropy(
            hidden[rows], weight, targets[rows], chunk_size=options.chunk, with_entropy=True
        )
    else:
        log_p = torch.log_softmax((hidden @ weight.t()).float(), -1)
        log_probs = log_p.gather(1, targets[:, None]).squeeze(1)[rows]
        entropy = -(log_p.detach().exp() * log_p.detach()).sum(-1)[rows]
    if options.what == "training":
        log_probs.sum().backward()
    assert entropy is not None
    return {
        "seconds": time.process_time() - start,
        "mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
        "check": float(log_probs.detach().double().mean() + entropy.detach().double().mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 4096), ("vocab", 49152), ("hidden", 576), ("chunk", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--response-share", type=float, default=1.0)
    parser.add_argument("--how", choices=["ours", "plain"], help=argparse.SUPPRESS)
    parser.add_argument("--what", choices=["forward", "training"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.how:
        print(json.dumps(measure(options)))
        return
    ratios: dict[str, float] = {}
    print("| pass | how | CPU seconds | peak MiB above the inputs |\n|---|---|---|---|")
    for what in ("forward", "training"):
        found = {}
        for how in ("plain", "ours"):
            command = [sys.executable, __file__, *sys.argv[1:], "--how", how, "--what", what]
            found[how] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print(f"| {what} | {how} | {found[how]['seconds']:.1f} | {found[how]['mib']:.0f} |", flush=True)
        assert abs(found["ours"]["check"] - found["plain"]["check"]) < 1e-4
        ratios[f"{what}_time"] = round(found["ours"]["seconds"] / found["plain"]["seconds"], 3)
        ratios[f"{what}_memory"] = round(found["ours"]["mib"] / found["plain"]["mib"], 3)
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
