"""Weight sync of every model family into a real SGLang engine on CPU: do digests agree, and does the engine compute?

    python benchmarks/sync_families.py [--families qwen3_moe mixtral] [--dtype float32]

For each family a tiny random model is made and an engine started with it; one trainer rank sends its weights, changes
all of them, and sends them again: every digest must agree both times, and all must have changed. Then the engine's
log-probs are compared with transformers' on the sent weights, where its CPU code can run the model. Last line: JSON.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from slime.backends.megatron_utils.model import build_model
from slime.backends.megatron_utils.parallel import destroy_parallel, init_parallel
from slime.backends.megatron_utils.update_weight import WeightSyncError, WeightUpdater
from slime.backends.sglang_utils.client import EngineClient, EngineEndpoint
from slime.backends.sglang_utils.server import EngineSpec, SGLangServer
from slime.config import Args, ConfigError
from slime.config.hf_config import load_hf_config
from slime.models import FAMILIES, load_hf_into, save_hf
from slime.utils.net import free_port
from tools.make_tiny_model import TinyModel, make_tiny_model

# Sizes differ pairwise; inner sizes are multiples of 32, which SGLang's CPU code would pad to.
SIZES = dict(
    num_layers=3, hidden_size=192, num_attention_heads=6, num_key_value_heads=2, head_dim=16, intermediate_size=128,
    vocab_size=331, max_position_embeddings=256,
)  # fmt: skip
TOKENS = [5, 17, 300, 42, 7, 99, 12, 250, 3, 31, 64]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=sorted(FAMILIES), choices=sorted(FAMILIES))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    options = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as scratch:
        for family in options.families:
            started = time.monotonic()
            rows[family] = _family(Path(scratch) / family, family, options.dtype)
            rows[family]["seconds"] = round(time.monotonic() - started)
            print(f"{family}: {rows[family]}", flush=True)
    failed = [family for family, row in rows.items() if not row["synced"]]
    print(json.dumps({"families": len(rows), "failed": failed, "rows": rows}))
    return 1 if failed else 0


def _family(folder: Path, family: str, dtype: str) -> dict[str, Any]:
    # SGLang's Mixtral takes the size of a head from the other sizes, whatever its config says.
    sizes = SIZES | ({"head_dim": 32} if family == "mixtral" else {})
    make_tiny_model(folder / "model", TinyModel(arch=family, dtype=dtype, **sizes))
    if family in ("deepseek_v2", "deepseek_v3"):
        _as_published(folder / "model" / "config.json")
    args = Args(
        hf_checkpoint=str(folder / "model"), device="cpu", params_dtype=dtype, actor_num_gpus_per_node=1,
        rollout_num_gpus=1, rollout_max_context_len=128, sglang_server_concurrency=4, sglang_start_timeout=570.0,
        check_weights_interval=1, run_dir=str(folder), transformer_impl="local", update_weight_timeout=120.0,
    )  # fmt: skip
    server = SGLangServer(args, EngineSpec.from_args(args), log_path=folder / "engine.log")
    row: dict[str, Any] = {"synced": False}
    try:
        server.start()
        hf = load_hf_config(args.hf_checkpoint)
        init_parallel(args, 0, 1, "127.0.0.1", free_port(), num_layers=hf.num_layers)
        chunks = build_model(args, hf)
        load_hf_into(chunks, args.hf_checkpoint, hf, args)
        updater = WeightUpdater(args, chunks, hf)
        updater.connect([EngineEndpoint(server.url)])
        first = updater.update(0)
        _change(chunks)
        second = updater.update(1)
        assert first is not None and second is not None
        row |= {"sent": second.tensors, "compared": second.digests_checked, "changed": second.changed}
        row["synced"] = (
            first.digests_checked == second.digests_checked == second.changed and not second.digests_followed
        )
        save_hf(chunks, folder / "sent", hf, args)
        row |= _log_probs(server, folder / "sent")
    except (WeightSyncError, ConfigError, RuntimeError, OSError) as error:
        row["error"] = str(error)[:600]
        log = folder / "engine.log"
        print(*(log.read_text().splitlines()[-40:] if log.is_file() else ()), sep="\n", file=sys.stderr)
    finally:
        destroy_parallel()
        server.stop()
    return row


def _as_published(config: Path) -> None:
    """Keys of DeepSeek's own files that SGLang reads, and yarn, the only rope of its CPU code."""
    raw = json.loads(config.read_text())
    third = raw["model_type"] == "deepseek_v3"
    raw |= {
        "moe_layer_freq": 1, "topk_method": "noaux_tc" if third else "greedy",
        "scoring_func": "sigmoid" if third else "softmax",
    }  # fmt: skip
    raw["rope_parameters"] = {
        "rope_type": "yarn", "rope_theta": raw["rope_theta"], "factor": 4.0, "original_max_position_embeddings": 64,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    config.write_text(json.dumps(raw, indent=1))


def _change(chunks: list[Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    for chunk in chunks:
        tensors = [*chunk.parameters(), *(b for name, b in chunk.named_buffers() if name.endswith("expert_bias"))]
        for tensor in tensors:
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
            tensor.data.add_(0.05 * noise.to(tensor.dtype))


def _log_probs(server: SGLangServer, folder: Path) -> dict[str, Any]:
    """The largest difference to transformers' log-probs of a prompt's tokens; or why there is none."""
    from transformers import AutoModelForCausalLM

    try:
        with EngineClient(server.url, timeout=60.0) as client:
            reply = client.generate(
                input_ids=TOKENS, sampling_params={"max_new_tokens": 4, "temperature": 0}, return_logprob=True,
                logprob_start_len=0,
            )  # fmt: skip
    except Exception as error:  # the CPU engine lacks a kernel: an answer of this benchmark, not a fault of it
        return {"generates": False, "why": f"{type(error).__name__}: {error}"[:200]}
    theirs = torch.tensor([row[0] for row in reply["meta_info"]["input_token_logprobs"][1:]])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0, :-1].log_softmax(-1)
    ours = logits.gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    return {"generates": True, "log_prob_gap": float(f"{(ours - theirs).abs().max():.1e}")}


if __name__ == "__main__":
    raise SystemExit(main())
