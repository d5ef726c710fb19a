"""Tokens per second of our rollout path (router, parsing, rewards, bookkeeping) against a bare HTTP client.

    python benchmarks/rollout_throughput.py --hf-checkpoint models/tiny-qwen3 [--router-port P --engine-url U]

Both ask the same engine for the same prompts with the same parameters, in turns, with the same number of requests in
flight; the bare client talks to the engine directly and only counts tokens. Last line: JSON with the ratio.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp

from slime.config import Args
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.generation import GenerateState
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.async_utils import run


async def bare(url: str, prompts: list[list[int]], params: dict, concurrency: int) -> tuple[int, float]:
    """(tokens, seconds) of all prompts with nothing around the requests."""
    gate, tokens, started = asyncio.Semaphore(concurrency), 0, time.monotonic()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=concurrency)) as session:

        async def one(ids: list[int]) -> None:
            nonlocal tokens
            payload = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
            async with gate, session.post(f"{url}/generate", json=payload) as response:
                tokens += (await response.json())["meta_info"]["completion_tokens"]

        await asyncio.gather(*(one(ids) for ids in prompts))
    return tokens, time.monotonic() - started


@contextlib.contextmanager
def engine_and_router(args: Args) -> Iterator[tuple[str, int]]:
    from slime.backends.sglang_utils.router import SGLangRouter
    from slime.backends.sglang_utils.server import EngineSpec, SGLangServer

    server, router = SGLangServer(args, EngineSpec.from_args(args)), SGLangRouter(args)
    try:
        server.start()
        router.start()
        with router.client() as client:
            client.add(server.url)
        assert router.port is not None
        yield server.url, router.port
    finally:
        router.stop()
        server.stop()


def measure(args: Args, url: str, repeats: int) -> dict[str, float]:
    """Medians over the repeats; the first of each is thrown away as warm-up."""
    ours, theirs = [], []
    for i in range(repeats + 1):
        source = RolloutDataSourceWithBuffer(args)
        state = GenerateState(args)
        prompts = [state.prompt_ids(s) for g in source.get_samples(args.rollout_batch_size) for s in g]
        params = {k: v for k, v in state.sampling_params.items() if v is not None}
        concurrency = args.sglang_server_concurrency
        tokens, seconds = run(bare(url, prompts, params, concurrency))
        started = time.monotonic()
        output = generate_rollout(args, i, RolloutDataSourceWithBuffer(args))
        elapsed = time.monotonic() - started
        if i:
            theirs.append(tokens / seconds)
            ours.append(sum(s.response_length for g in output.samples for s in g) / elapsed)
            print(f"repeat {i}: bare {theirs[-1]:8.1f} tokens/s   ours {ours[-1]:8.1f} tokens/s", flush=True)
    bare_rate, our_rate = statistics.median(theirs), statistics.median(ours)
    return {"bare_tokens_per_s": bare_rate, "ours_tokens_per_s": our_rate, "ratio": our_rate / bare_rate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-checkpoint", required=True)
    parser.add_argument("--params-dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4, help="per prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engine-url", help="an engine that runs already, with --router-port")
    parser.add_argument("--router-port", type=int)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "prompts.jsonl"
        rows = ({"prompt": f"What is {i} + {i * 7 % 90}? ", "label": str(i)} for i in range(10, 10 + options.prompts))
        data.write_text("".join(json.dumps(r) + "\n" for r in rows))
        args = Args(
            hf_checkpoint=options.hf_checkpoint,
            params_dtype=options.params_dtype,
            prompt_data=str(data),
            rm_type="exact",
            run_dir=folder,
            progress="off",
            rollout_batch_size=options.prompts,
            n_samples_per_prompt=options.samples,
            rollout_max_response_len=options.new_tokens,
            rollout_max_context_len=512,
            sglang_server_concurrency=options.concurrency,
        )
        with contextlib.ExitStack() as stack:
            url, port = options.engine_url, options.router_port
            if url is None:
                url, port = stack.enter_context(engine_and_router(args))
            result = measure(args.replace(sglang_router_ip="127.0.0.1", sglang_router_port=port), url, options.repeats)
    print(json.dumps({k: round(v, 3) for k, v in result.items()}))


if __name__ == "__main__":
    main()
