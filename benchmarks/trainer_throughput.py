"""Forward, backward and step of SmolLM2-135M: our Megatron path against plain transformers with torch AdamW.

    python benchmarks/trainer_throughput.py --hf-checkpoint models/smollm2-135m-instruct [--dtype bfloat16]

Same weights, batch, dtype, loss (cross-entropy of the responses), gradient clipping and threads, turn by turn in one
process; the best of the rounds counts, because these machines are noisy. transformers gets the batch padded to its
longest sequence, as its users do; we pack. Last line: JSON.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def batch(
    vocab_size: int, samples: int, prompt: int, response: int, ragged: bool
) -> tuple[list[torch.Tensor], list[int]]:
    """Token sequences, and the length of each one's response."""
    rng = np.random.default_rng(0)
    responses = [int(rng.integers(response // 4, response + 1)) if ragged else response for _ in range(samples)]
    return [torch.from_numpy(rng.integers(0, vocab_size, prompt + r)) for r in responses], responses


def ours(args: Any, tokens: list[torch.Tensor], responses: list[int]) -> Callable[[], float]:
    from slime.backends.megatron_utils.actor import MegatronTrainActor
    from slime.data.schedule import make_schedule, split_for_ranks
    from slime.utils.net import free_port

    actor = MegatronTrainActor(0, 1, "127.0.0.1", free_port())
    actor.init(args)
    columns: dict[str, list[Any]] = {
        "tokens": [t.numpy() for t in tokens],
        "total_lengths": [len(t) for t in tokens],
        "response_lengths": responses,
        "loss_masks": [np.ones(r, np.float32) for r in responses],
        "rollout_ids": list(range(len(tokens))),
        "rewards": [0.0] * len(tokens),
    }
    schedule = make_schedule(args, columns["total_lengths"], responses, columns["rollout_ids"], 1)
    data = split_for_ranks(columns, schedule)[0]

    def step() -> float:
        return actor.train(0, data)["train/loss"]

    return step


def theirs(args: Any, tokens: list[torch.Tensor], responses: list[int]) -> Callable[[], float]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.hf_checkpoint, dtype=getattr(torch, args.params_dtype)
    )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0)
    width = max(map(len, tokens))
    ids = torch.stack([torch.nn.functional.pad(t, (0, width - len(t))) for t in tokens])
    attention = torch.stack([(torch.arange(width) < len(t)).long() for t in tokens])
    labels = ids.masked_fill(attention == 0, -100)
    for row, (t, r) in enumerate(zip(tokens, responses, strict=True)):
        labels[row, : len(t) - r] = -100

    def step() -> float:
        optimizer.zero_grad()
        logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1].float()
        target = labels[:, 1:]
        nll = torch.nn.functional.cross_entropy(logits.transpose(1, 2), target, reduction="none")
        kept = (target != -100).float()
        loss = ((nll * kept).sum(1) / kept.sum(1)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-checkpoint", required=True)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=40)
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--ragged", action="store_true", help="responses of a quarter to the whole of --response")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    from slime.config import load_hf_config
    from slime.config.args import Args
    from slime.config.derive import derive

    hf = load_hf_config(options.hf_checkpoint)
    args = derive(
        Args(
            device="cpu", hf_checkpoint=options.hf_checkpoint, params_dtype=options.dtype, loss_type="sft_loss",
            lr=1e-6,
            rollout_batch_size=options.samples, n_samples_per_prompt=1, num_rollout=1000, max_tokens_per_gpu=1 << 20,
        ),
        hf,
    ).freeze()  # fmt: skip
    tokens, responses = batch(hf.vocab_size, options.samples, options.prompt, options.response, options.ragged)
    count = sum(map(len, tokens))
    steps = {"slime": ours(args, tokens, responses), "transformers": theirs(args, tokens, responses)}
    first = {name: step() for name, step in steps.items()}
    print("loss of the first step:", {k: round(v, 5) for k, v in first.items()}, flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    rate = {name: count / min(times) for name, times in seconds.items()}
    for name in steps:
        print(f"{name:14s} {rate[name]:8.1f} tokens/s   rounds {[round(t, 2) for t in seconds[name]]}")
    print(json.dumps({
        "benchmark": "trainer_throughput", "dtype": options.dtype, "tokens": count, "ragged": options.ragged,
        "slime_tokens_per_s": round(rate["slime"], 1), "transformers_tokens_per_s": round(rate["transformers"], 1),
        "ratio": round(rate["slime"] / rate["transformers"], 3),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
