"""Which share of a training step is loss and advantage code? 512 samples of 8k tokens, model sizes of SmolLM2-135M.

    python benchmarks/loss_share.py              # some five minutes on one core

Measured in full: advantages and returns of all 512 x 8192 tokens, then per sample the loss from given log-probs and
entropies with its gradient back to them (each sample is a micro-batch here, the costliest way to cut them).
Measured in part: forward and backward of the model, with the log-probs over the whole vocabulary, on one sample of that
length and with few layers, at two depths. Extrapolated from that: 30 layers (the cost of a layer is the difference) and
512 samples (micro-batches of equal size, one after the other). The optimizer and other passes (reference, old
log-probs), which would make the share smaller, are left out.

Seconds are CPU time of one thread, so that a busy machine changes them little. Last line: JSON; the bound is 2 %.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from slime.config import Args  # noqa: E402

BOUND = 0.02
LAYERS = 30
SIZES = dict(
    hidden_size=576, num_attention_heads=9, num_key_value_heads=3, head_dim=64, intermediate_size=1536,
    vocab_size=49152, tie_word_embeddings=True,
)  # fmt: skip
PROMPT = 64
_KL = dict(use_kl_loss=True, kl_loss_coef=0.04, kl_loss_type="k3")
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo, KL, TIS, entropy bonus": dict(use_tis=True, entropy_coef=0.01, **_KL),
    "gspo, MIS geometric": dict(
        advantage_estimator="gspo", use_tis=True, tis_level="geometric", tis_mode="mask", tis_clip_low=0.5
    ),
    "reinforce++, KL, whitened": dict(
        advantage_estimator="reinforce_plus_plus", kl_coef=0.1, normalize_advantages=True
    ),
    "ppo (GAE)": dict(advantage_estimator="ppo", kl_coef=0.1, gamma=0.99, lambd=0.95),
}


class Given:
    """Stands for the model's output: log-probs and entropies that are there already, and take a gradient."""

    def __init__(self, log_probs: Tensor, entropy: Tensor) -> None:
        self.log_probs, self.entropy = log_probs, entropy

    def log_probs_and_entropy(self, rows: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor]:
        return self.log_probs, self.entropy


def cpu_seconds(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def loss_seconds(flags: dict[str, Any], samples: int, tokens: int) -> tuple[float, float]:
    """(advantages and returns, losses with their gradients) of the whole batch."""
    from slime.backends.megatron_utils.loss import compute_advantages_and_returns, loss_function
    from slime.data.schedule import RankStep

    args = Args(**flags)
    g = torch.Generator().manual_seed(0)

    def column(shift: float) -> list[Tensor]:
        return list((torch.randn(samples, tokens, generator=g) * 0.2 + shift).unbind(0))

    data: dict[str, list[Any]] = {
        "unconcat_tokens": [torch.zeros(PROMPT + tokens, dtype=torch.long)] * samples,
        "total_lengths": [PROMPT + tokens] * samples,
        "response_lengths": [tokens] * samples,
        "loss_masks": [torch.ones(tokens)] * samples,
        "rewards": torch.randn(samples, generator=g).tolist(),
        **{name: column(-1.5) for name in ("log_probs", "ref_log_probs", "rollout_log_probs")},
        "values": column(0.0),
    }
    advantages = cpu_seconds(lambda: compute_advantages_and_returns(args, data))
    step = RankStep([], samples, samples * tokens)
    new, entropy = (torch.randn(tokens, generator=g) * 0.2 + shift for shift in (-1.5, 2.0))

    def losses() -> None:
        for i in range(samples):
            batch = {name: [values[i]] for name, values in data.items()}
            batch["sample_denominators"] = [float(tokens)]
            output = Given(new.clone().requires_grad_(), entropy.clone().requires_grad_())
            loss, _ = loss_function(args, batch, step, output)
            loss.backward()

    return advantages, cpu_seconds(losses)


def model_seconds(folder: Path, layers: int, tokens: int) -> float:
    """One forward and backward pass of one sample, the log-probs of its response included."""
    from slime.backends.megatron_utils import data, train_step
    from slime.backends.megatron_utils.actor import MegatronTrainActor
    from slime.backends.megatron_utils.parallel import destroy_parallel
    from slime.config import load_hf_config
    from slime.config.derive import derive
    from slime.data.schedule import make_schedule, split_for_ranks
    from slime.utils.net import free_port
    from tools.make_tiny_model import TinyModel, make_tiny_model

    make_tiny_model(folder, TinyModel(arch="llama", num_layers=layers, **SIZES))
    plain = Args(
        device="cpu", hf_checkpoint=str(folder), params_dtype="float32", loss_type="sft_loss", lr=0.0, num_rollout=1,
        rollout_batch_size=1, n_samples_per_prompt=1, max_tokens_per_gpu=1 << 20,
    )  # fmt: skip
    args = derive(plain, load_hf_config(str(folder))).freeze()
    actor = MegatronTrainActor(0, 1, "127.0.0.1", free_port())
    actor.init(args)

    def once(response: int) -> float:
        columns: dict[str, list[Any]] = {
            "tokens": [np.random.default_rng(0).integers(0, SIZES["vocab_size"], PROMPT + response)],
            "total_lengths": [PROMPT + response],
            "response_lengths": [response],
            "loss_masks": [np.ones(response, np.float32)],
            "rollout_ids": [0],
        }
        schedule = make_schedule(args, columns["total_lengths"], [response], [0], 1)
        mine = split_for_ranks(columns, schedule)[0]
        here, plans = actor._columns(mine)
        batches = data.MicroBatches(here, plans[0])
        options = (args, actor.model, actor.optimizer, actor.scheduler, batches, mine.steps[0])
        return cpu_seconds(lambda: train_step.train_one_step(*options))

    once(256)  # allocations, and the optimizer's state
    seconds = once(tokens)
    destroy_parallel()
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, nargs=2, default=[1, 3])
    options = parser.parse_args()
    torch.set_num_threads(1)
    low, high = options.layers
    with tempfile.TemporaryDirectory() as folder:
        at = {n: model_seconds(Path(folder) / str(n), n, options.tokens) for n in (low, high)}
    layer = (at[high] - at[low]) / (high - low)
    sample = at[low] + (LAYERS - low) * layer
    step = sample * options.samples
    print(
        f"model, one sample of {options.tokens} tokens: {at[low]:.1f} s with {low} and {at[high]:.1f} s with {high} "
        f"layers, so {layer:.1f} s a layer, {sample:.0f} s with {LAYERS}; {step:.0f} s for {options.samples} samples\n"
    )
    print("| algorithm | advantages, s | losses and gradients, s | share of the step |\n|---|---|---|---|")
    shares = {}
    for name, flags in ALGORITHMS.items():
        advantages, losses = loss_seconds(flags, options.samples, options.tokens)
        shares[name] = (advantages + losses) / (step + advantages + losses)
        print(f"| {name} | {advantages:.2f} | {losses:.2f} | {100 * shares[name]:.3f} % |", flush=True)
    worst = max(shares.values())
    print(
        json.dumps(
            {
                "benchmark": "loss_share", "samples": options.samples, "tokens": options.tokens,
                "model_s_per_sample": round(sample, 2), "max_share": round(worst, 5), "bound": BOUND,
                "failed": int(worst > BOUND),
            }
        )
    )  # fmt: skip
    return int(worst > BOUND)


if __name__ == "__main__":
    sys.exit(main())
