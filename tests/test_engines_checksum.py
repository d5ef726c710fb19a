"""Digests without an engine: cutting, order, completeness, and the CUDA engines' hash against SGLang's own kernel."""

import hashlib
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from slime.backends.sglang_utils.checksum import EngineDigests, compare_digests
from slime.backends.sglang_utils.tile_hash import TILE_WORDS, tile_hash
from slime.config.hf_config import parse_hf_config

LAYER = "model.layers.0"


def config(**changes):
    sizes = dict(model_type="qwen2", num_hidden_layers=1, hidden_size=12, num_attention_heads=4, num_key_value_heads=2)
    return parse_hf_config({**sizes, "head_dim": 3, "intermediate_size": 40, "vocab_size": 70, **changes})


def tensors(hf):
    """Full tensors of one layer, all different."""
    torch.manual_seed(0)
    q, kv, h, m = (
        hf.num_attention_heads * hf.head_dim,
        hf.num_key_value_heads * hf.head_dim,
        hf.hidden_size,
        hf.intermediate_size,
    )
    shapes = {
        "model.embed_tokens.weight": (hf.vocab_size, h),
        "lm_head.weight": (hf.vocab_size, h),
        "model.norm.weight": (h,),
        f"{LAYER}.self_attn.q_proj.weight": (q, h),
        f"{LAYER}.self_attn.k_proj.weight": (kv, h),
        f"{LAYER}.self_attn.v_proj.weight": (kv, h),
        f"{LAYER}.self_attn.q_proj.bias": (q,),
        f"{LAYER}.self_attn.k_proj.bias": (kv,),
        f"{LAYER}.self_attn.v_proj.bias": (kv,),
        f"{LAYER}.self_attn.o_proj.weight": (h, q),
        f"{LAYER}.mlp.gate_proj.weight": (m, h),
        f"{LAYER}.mlp.up_proj.weight": (m, h),
        f"{LAYER}.mlp.down_proj.weight": (h, m),
    }
    return {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}


def sha(*parts):
    return hashlib.sha256(b"".join(p.contiguous().view(torch.uint8).numpy().tobytes() for p in parts)).hexdigest()[:16]


def digests(hf, named, tp=1, **options):
    engine = EngineDigests(hf, tp, **options)
    for name, tensor in named.items():
        engine.add(name, tensor)
    return engine.finish()


def test_fusing_padding_and_cutting():
    hf = config()
    t = tensors(hf)
    first, second = digests(hf, t, tp=2)
    q, k, v = (t[f"{LAYER}.self_attn.{n}_proj.weight"] for n in "qkv")
    assert first[f"{LAYER}.self_attn.qkv_proj.weight"] == sha(q[:6], k[:3], v[:3])
    assert second[f"{LAYER}.self_attn.qkv_proj.weight"] == sha(q[6:], k[3:], v[3:])
    assert second[f"{LAYER}.self_attn.o_proj.weight"] == sha(t[f"{LAYER}.self_attn.o_proj.weight"][:, 6:])
    # The MLP of 40 is padded to 2 x 32, the vocabulary of 70 to 2 x 64.
    gate, up = (t[f"{LAYER}.mlp.{n}_proj.weight"] for n in ("gate", "up"))
    pad = torch.zeros(24, 12).bfloat16()
    assert first[f"{LAYER}.mlp.gate_up_proj.weight"] == sha(gate[:32], up[:32])
    assert second[f"{LAYER}.mlp.gate_up_proj.weight"] == sha(gate[32:], pad, up[32:], pad)
    assert second["model.embed_tokens.weight"] == sha(
        t["model.embed_tokens.weight"][64:], torch.zeros(58, 12).bfloat16()
    )
    assert first["model.norm.weight"] == second["model.norm.weight"] == sha(t["model.norm.weight"])
    assert set(first) == set(second) and len(first) == 8


def test_key_value_heads_are_shared_on_cuda_and_padded_on_cpu():
    hf = config()
    t = {n: x for n, x in tensors(hf).items() if "self_attn" in n and "o_proj" not in n}
    q, k, v = (t[f"{LAYER}.self_attn.{n}_proj.weight"] for n in "qkv")
    cpu = digests(hf, t, tp=4)
    zero = torch.zeros(3, 12).bfloat16()
    # On CPU 2 key/value heads become 4, and with them 4 query heads become 8.
    assert cpu[1][f"{LAYER}.self_attn.qkv_proj.weight"] == sha(q[6:], k[3:], v[3:])
    assert cpu[3][f"{LAYER}.self_attn.qkv_proj.weight"] == sha(zero, zero, zero, zero)
    cuda = digests(hf, t, tp=4, device="cuda")
    whole = torch.cat([q[3:6], k[:3], v[:3]]).contiguous().view(torch.uint8).reshape(-1)
    assert cuda[1][f"{LAYER}.self_attn.qkv_proj.weight"] == f"{tile_hash(whole):016x}"


@pytest.mark.parametrize("background", [False, True])
def test_order_does_not_matter_and_parts_may_be_reused_buffers(background):
    hf = config()
    t = tensors(hf)
    assert digests(hf, dict(reversed(t.items())), tp=2, background=background) == digests(hf, t, tp=2)
    engine = EngineDigests(hf)
    for name in reversed(list(t)):
        buffer = t[name].clone()
        engine.add(name, buffer)
        buffer.fill_(0)
    assert engine.finish() == digests(hf, t)


def test_tied_head_is_left_out_and_dtype_is_cast():
    t = tensors(config())
    tied = digests(config(tie_word_embeddings=True), t)
    assert "lm_head.weight" not in tied[0]
    assert digests(config(), {n: x.float() for n, x in t.items()}, dtype=torch.bfloat16) == digests(config(), t)


def test_what_is_missing_or_wrong_is_named():
    hf = config()
    t = tensors(hf)
    del t[f"{LAYER}.self_attn.k_proj.weight"]
    with pytest.raises(ValueError, match="qkv_proj.weight got 1 of its 3 parts"):
        digests(hf, t)
    with pytest.raises(ValueError, match="72 rows, config.json says 70"):
        digests(hf, {"lm_head.weight": torch.zeros(72, 12)})
    for name in ("model.norm.weight", f"{LAYER}.self_attn.q_proj.weight", f"{LAYER}.self_attn.v_proj.weight"):
        engine = EngineDigests(hf)
        engine.add(name, t[name])
        with pytest.raises(ValueError, match=f"{name} came twice"):
            engine.add(name, t[name])
    with pytest.raises(ValueError, match="gpt_oss.*--check-weights-interval 0"):
        EngineDigests(config(model_type="gpt_oss"))


def test_one_flipped_bit_is_found():
    hf = config()
    t = tensors(hf)
    expected = digests(hf, t)
    t[f"{LAYER}.self_attn.v_proj.bias"].view(torch.int16)[5] ^= 1
    checked, wrong = compare_digests(expected, digests(hf, t))
    assert checked == 8 and len(wrong) == 1 and "qkv_proj.bias" in wrong[0]


def test_compare_reports_both_sides():
    checked, wrong = compare_digests([{"a": "1", "b": "2"}], [{"a": "1", "c": "3"}])
    assert checked == 3 and [w.split(":")[0] for w in wrong] == ["rank 0 b", "rank 0 c"]
    assert compare_digests([{"a": "1", "b": "2"}], [{"a": "1"}], skip_names=["b"]) == (1, [])
    assert compare_digests([{}], [{}, {}])[1] == ["1 ranks expected, 2 found"]


# SGLang's kernel file needs only torch and triton; triton's interpreter runs it on CPU tensors.
KERNEL = """
import importlib.util, pathlib, sys, torch
folder = pathlib.Path(next(iter(importlib.util.find_spec("sglang").submodule_search_locations)))
file = next((f for f in folder.rglob("*.py") if "def hash_tiles32_kernel_blocked" in f.read_text()), None)
if file is None:
    sys.exit("no kernel")
spec = importlib.util.spec_from_file_location("kernel", file)
kernel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
from slime.backends.sglang_utils.tile_hash import tile_hash, _SEEDS

def by_kernel(data):
    words = data.view(torch.uint32)
    tiles = -(-words.numel() // 8192)
    partials = torch.empty(tiles, dtype=torch.uint64)
    kernel.hash_tiles32_kernel_blocked[(tiles,)](
        words, partials, words.numel(), seed1=_SEEDS[0], seed2=_SEEDS[1],
        FM_C1=kernel.FMIX32_C1,
        FM_C2=kernel.FMIX32_C2, POS_A=kernel.POS_C1, POS_B=kernel.POS_C2, TILE=8192, BLOCK=256, USE_CG=False)
    return kernel._final_splitmix64(sum(int(x) for x in partials.tolist()))

torch.manual_seed(0)
for size in (4, 400, 8192 * 4, 8192 * 4 * 2 + 12):
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    assert by_kernel(data) == tile_hash(data), size
print("equal")
"""


def test_tile_hash_is_sglangs_kernel():
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    shown = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KERNEL)], capture_output=True, text=True, env=env, timeout=300
    )
    assert shown.stdout.strip() == "equal", shown.stderr[-2000:]


def test_tile_hash_chunks_and_odd_sizes():
    torch.manual_seed(1)
    data = torch.randint(0, 256, (4 * TILE_WORDS * 3 + 5,), dtype=torch.uint8)
    whole = tile_hash(data)
    assert whole == tile_hash(torch.cat([data, torch.zeros(3, dtype=torch.uint8)]))  # words are padded with zeros
    assert tile_hash(torch.cat([torch.zeros(1, dtype=torch.uint8), data])[1:]) == whole  # an unaligned view
    import slime.backends.sglang_utils.tile_hash as module

    chunks = module._CHUNK_TILES
    try:
        module._CHUNK_TILES = 1
        assert tile_hash(data) == whole
    finally:
        module._CHUNK_TILES = chunks
    assert tile_hash(data[:0]) == 0
