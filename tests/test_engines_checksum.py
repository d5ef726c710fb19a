"""Digests without an engine: cutting, order, completeness, and the CUDA engines' hash against SGLang's own kernel."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
import xxhash

from slime.backends.sglang_utils.checksum import EngineDigests, compare_digests
from slime.backends.sglang_utils.engine_layout import EngineLayout
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


def xxh3(*parts):
    return xxhash.xxh3_64_hexdigest(b"".join(p.contiguous().view(torch.uint8).numpy().tobytes() for p in parts))


def digests(hf, named, tp=1, device="cpu", **options):
    engine = EngineDigests(EngineLayout(hf, tp, device == "cpu"), **options)
    for name, tensor in named.items():
        engine.add(name, tensor)
    return engine.finish()


def test_fusing_padding_and_cutting():
    hf = config()
    t = tensors(hf)
    first, second = digests(hf, t, tp=2)
    q, k, v = (t[f"{LAYER}.self_attn.{n}_proj.weight"] for n in "qkv")
    assert first[f"{LAYER}.self_attn.qkv_proj.weight"] == xxh3(q[:6], k[:3], v[:3])
    assert second[f"{LAYER}.self_attn.qkv_proj.weight"] == xxh3(q[6:], k[3:], v[3:])
    assert second[f"{LAYER}.self_attn.o_proj.weight"] == xxh3(t[f"{LAYER}.self_attn.o_proj.weight"][:, 6:])
    # The MLP of 40 is padded to 2 x 32, the vocabulary of 70 to 2 x 64.
    gate, up = (t[f"{LAYER}.mlp.{n}_proj.weight"] for n in ("gate", "up"))
    pad = torch.zeros(24, 12).bfloat16()
    assert first[f"{LAYER}.mlp.gate_up_proj.weight"] == xxh3(gate[:32], up[:32])
    assert second[f"{LAYER}.mlp.gate_up_proj.weight"] == xxh3(gate[32:], pad, up[32:], pad)
    assert second["model.embed_tokens.weight"] == xxh3(
        t["model.embed_tokens.weight"][64:], torch.zeros(58, 12).bfloat16()
    )
    assert first["model.norm.weight"] == second["model.norm.weight"] == xxh3(t["model.norm.weight"])
    assert set(first) == set(second) and len(first) == 8


def test_key_value_heads_are_shared_on_cuda_and_padded_on_cpu():
    hf = config()
    t = {n: x for n, x in tensors(hf).items() if "self_attn" in n and "o_proj" not in n}
    q, k, v = (t[f"{LAYER}.self_attn.{n}_proj.weight"] for n in "qkv")
    cpu = digests(hf, t, tp=4)
    zero = torch.zeros(3, 12).bfloat16()
    # On CPU 2 key/value heads become 4, and with them 4 query heads become 8.
    assert cpu[1][f"{LAYER}.self_attn.qkv_proj.weight"] == xxh3(q[6:], k[3:], v[3:])
    assert cpu[3][f"{LAYER}.self_attn.qkv_proj.weight"] == xxh3(zero, zero, zero, zero)
    cuda = digests(hf, t, tp=4, device="cuda")
    whole = torch.cat([q[3:6], k[:3], v[:3]]).contiguous().view(torch.uint8).reshape(-1)
    assert cuda[1][f"{LAYER}.self_attn.qkv_proj.weight"] == f"{tile_hash(whole):016x}"


def test_order_does_not_matter_and_parts_may_be_reused_buffers():
    hf = config()
    t = tensors(hf)
    assert digests(hf, dict(reversed(t.items())), tp=2) == digests(hf, t, tp=2)
    engine = EngineDigests(EngineLayout(hf, 1, True))
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
    with pytest.raises(ValueError, match="qkv_proj.weight got 2 of its 3 parts"):
        digests(hf, t)
    with pytest.raises(ValueError, match="72 rows, config.json says 70"):
        digests(hf, {"lm_head.weight": torch.zeros(72, 12)})
    for name in ("model.norm.weight", f"{LAYER}.self_attn.q_proj.weight", f"{LAYER}.self_attn.v_proj.weight"):
        engine = EngineDigests(EngineLayout(hf, 1, True))
        engine.add(name, t[name])
        with pytest.raises(ValueError, match=f"{name} came twice"):
            engine.add(name, t[name])
    with pytest.raises(ValueError, match="gemma2.*--check-weights-interval 0"):
        EngineLayout(config(model_type="gemma2"), 1, True)


def test_one_flipped_bit_is_found():
    hf = config()
    t = tensors(hf)
    expected = digests(hf, t)
    t[f"{LAYER}.self_attn.v_proj.bias"].view(torch.int16)[5] ^= 1
    out = compare_digests(expected, digests(hf, t))
    assert (out.checked, out.followed) == (8, 0) and len(out.wrong) == 1 and "qkv_proj.bias" in out.wrong[0]


def test_compare_reports_both_sides():
    out = compare_digests([{"a": "1", "b": "2"}], [{"a": "1", "c": "3"}])
    assert out.checked == 3 and [w.split(":")[0] for w in out.wrong] == ["rank 0 b", "rank 0 c"]
    assert compare_digests([{}], [{}, {}]).wrong == ["1 ranks expected, 2 found"]


def test_what_a_gpu_kernel_lays_out_in_its_own_way_is_followed():
    """Never a false alarm; but weights that stand still in the engine while the trainer's change are found."""
    layout = EngineLayout(config(model_type="qwen3_moe", num_experts=4, moe_intermediate_size=8), 1, on_cpu=False)
    name = f"{LAYER}.mlp.experts.w13_weight"
    assert layout.sure("model.norm.weight") and not layout.sure(name)

    def compare(want, have, before=None):
        return compare_digests([{name: want, "n": "5"}], [{name: have, "n": "5"}], layout.sure, before)

    before = [{name: "1"}], [{name: "a"}]
    for out in compare("1", "a"), compare("1", "a", before), compare("2", "b", before):
        assert (out.checked, out.followed, out.wrong) == (1, 1, [])
    assert compare("1", "1").followed == 0  # laid out as predicted after all
    assert compare("2", "a", before).wrong == [f"rank 0 {name}: changed in the trainer only"]
    assert compare("1", "b", before).wrong == [f"rank 0 {name}: changed in the engine only"]
    fused = compare_digests([{f"{LAYER}.mlp.shared_experts.down_proj.weight": "1"}], [{}], layout.sure)
    assert (fused.followed, fused.wrong) == (1, [])
    cut_otherwise = EngineLayout(config(), 1, True, {"enable_dp_attention": True})
    assert not cut_otherwise.sure("model.norm.weight")


def test_experts_are_hashed_in_any_order_and_cut_for_each_rank():
    hf = config(model_type="qwen3_moe", num_experts=6, moe_intermediate_size=16, hidden_size=64)
    torch.manual_seed(0)
    rows = {"gate_proj": (16, 64), "up_proj": (16, 64), "down_proj": (64, 16)}
    t = {
        f"{LAYER}.mlp.experts.{e}.{name}.weight": torch.randn(shape).bfloat16()
        for e in range(6)
        for name, shape in rows.items()
    }
    both = {
        "w13_weight": [
            torch.stack(
                [
                    torch.cat(
                        [t[f"{LAYER}.mlp.experts.{e}.{n}.weight"][8 * r : 8 * r + 8] for n in ("gate_proj", "up_proj")]
                    )
                    for e in range(6)
                ]
            )
            for r in range(2)
        ],
        "w2_weight": [
            torch.stack([t[f"{LAYER}.mlp.experts.{e}.down_proj.weight"][:, 8 * r : 8 * r + 8] for e in range(6)])
            for r in range(2)
        ],
    }
    scattered = dict(sorted(t.items(), key=lambda item: xxh3(item[1])))
    found = digests(hf, scattered, tp=2, device="cuda")
    for name, ranks in both.items():
        for r, whole in enumerate(ranks):
            want = f"{tile_hash(whole.contiguous().view(torch.uint8).reshape(-1)):016x}"
            assert found[r][f"{LAYER}.mlp.experts.{name}"] == want
    whole = digests(hf, scattered)[0][f"{LAYER}.mlp.experts.w2_weight"]
    padded = torch.cat([torch.cat(both["w2_weight"], 2), torch.zeros(6, 64, 16).bfloat16()], 2)
    assert whole == xxh3(padded)  # each rank's inner size is a multiple of 32 on CPU


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
