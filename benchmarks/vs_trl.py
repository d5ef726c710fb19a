"""A whole GRPO step on the CPU: slime against TRL's GRPOTrainer.

    python benchmarks/vs_trl.py --hf-checkpoint models/smollm2-135m-instruct [--dtype float32]

Same model, prompts, 16 samples (4 prompts x 4) of 64 new tokens, dtype, threads, learning rate and reward, one after
the other on the same cores. The first step of each is warm-up and does not count; the median of the others does.
slime's step counts everything between two steps: generation through router and engine, rewards, training, and the
weight sync with its digests. Needs benchmarks/requirements.txt. Last line: JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROMPTS, GROUP, NEW_TOKENS = 4, 4, 64


def prompts(count: int) -> list[list[dict[str, str]]]:
    return [
        [{"role": "user", "content": f"Tell me a short story about the number {7 * i + 3} and a fox."}]
        for i in range(count)
    ]


def run_slime(model: str, steps: int, threads: int, folder: Path, dtype: str, engines: int = 1) -> list[float]:
    """Seconds of each step."""
    data = folder / "prompts.jsonl"
    rows = [json.dumps({"prompt": p, "label": ""}) for p in prompts(PROMPTS * steps)]
    data.write_text("\n".join(rows) + "\n")
    command = [
        sys.executable, str(ROOT / "train.py"), "--device", "cpu", "--hf-checkpoint", model, "--prompt-data", str(data),
        "--apply-chat-template", "--params-dtype", dtype, "--num-rollout", str(steps),
        "--rollout-batch-size", str(PROMPTS), "--n-samples-per-prompt", str(GROUP), "--rollout-num-gpus", str(engines),
        "--rollout-max-response-len", str(NEW_TOKENS), "--rollout-max-context-len", "512",
        "--custom-rm-path", "benchmarks.vs_trl.slime_reward",
        "--custom-generate-function-path", "benchmarks.vs_trl.generate",
        "--lr", "1e-6", "--max-tokens-per-gpu", "4096", "--run-dir", str(folder / "slime"), "--progress", "off",
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, cwd=ROOT, env=env)
    lines = (folder / "slime" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["perf/step_time"] for line in lines]


async def slime_reward(args, sample, **kwargs) -> float:  # type: ignore[no-untyped-def]
    return reward_of(sample.response)


async def generate(args, sample, sampling_params):  # type: ignore[no-untyped-def]
    """Every sample has exactly NEW_TOKENS tokens on both sides, so that both do the same work."""
    from slime.rollout.sglang_rollout import generate as usual

    return await usual(args, sample, {**sampling_params, "ignore_eos": True})


def reward_of(text: str) -> float:
    return (len(set(text)) % 7) / 7


def run_trl(model: str, steps: int, threads: int, folder: Path, dtype: str) -> list[float]:
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(threads)

    def reward(completions, **kwargs):  # type: ignore[no-untyped-def]
        return [reward_of(c[0]["content"]) for c in completions]

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            self.start = time.perf_counter()

        def on_step_end(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            times.append(time.perf_counter() - self.start)

    config = GRPOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=PROMPTS * GROUP, gradient_accumulation_steps=1,
        num_generations=GROUP, max_completion_length=NEW_TOKENS, learning_rate=1e-6, max_steps=steps,
        bf16=dtype == "bfloat16", use_cpu=True,
        model_init_kwargs={"dtype": dtype}, beta=0.0, epsilon=0.2, epsilon_high=0.28, report_to=[],
        logging_steps=1000,
        save_strategy="no", generation_kwargs={"min_new_tokens": NEW_TOKENS}, shuffle_dataset=False,
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": prompts(PROMPTS * steps)})
    trainer = GRPOTrainer(model=model, reward_funcs=reward, args=config, train_dataset=data, callbacks=[Clock()])
    trainer.train()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-checkpoint", required=True)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--engines", type=int, default=1, help="SGLang engines; they share the threads")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--folder", type=Path, default=Path("runs/vs_trl"))
    parser.add_argument("--only", choices=["slime", "trl"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    model = str(Path(options.hf_checkpoint).resolve())
    if options.only == "trl":  # in a process of its own, so that its memory is gone when slime runs
        print(json.dumps(run_trl(model, options.steps, options.threads, options.folder, options.dtype)))
        return
    command = [sys.executable, __file__, "--hf-checkpoint", model, "--steps", str(options.steps), "--only", "trl",
               "--threads", str(options.threads), "--folder", str(options.folder), "--dtype",
               options.dtype]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout
    trl = json.loads(out.strip().splitlines()[-1])
    slime = run_slime(model, options.steps, options.threads, options.folder.resolve(), options.dtype, options.engines)
    samples = PROMPTS * GROUP
    rate = {"trl": samples / statistics.median(trl[1:]), "slime": samples / statistics.median(slime[1:])}
    print(f"seconds per step: trl {[round(t, 1) for t in trl]}, slime {[round(t, 1) for t in slime]}")
    print(json.dumps({
        "benchmark": "vs_trl", "dtype": options.dtype, "engines": options.engines,
        "samples_per_step": samples, "new_tokens": NEW_TOKENS,
        "slime_samples_per_s": round(rate["slime"], 3), "trl_samples_per_s": round(rate["trl"], 3),
        "ratio": round(rate["slime"] / rate["trl"], 3),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
