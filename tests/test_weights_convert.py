"""tools/convert_hf.py: there and back through files, in pieces, again after a crash; and what it refuses."""

import json

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from test_weights_megatron import assert_same_tensors, build, make_args, model_folder

from slime.backends.megatron_utils.convert import run, to_hf, to_megatron, units
from slime.config.errors import ConfigError
from slime.models import HFFolder
from tools import convert_hf


def tool(*words):
    return convert_hf.main([str(word) for word in words])


def said(capsys):
    return capsys.readouterr().out


def loaded_by_ranks(rank, world, port, args, ckpt, out):
    from slime.backends.megatron_utils.checkpoint import latest_checkpoint, load_checkpoint
    from slime.models import save_hf

    chunks, hf = build(args, rank, world, port)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(float("nan"))
    load_checkpoint(latest_checkpoint(ckpt)[0], chunks)
    save_hf(chunks, out, hf, args)


def test_there_and_back_over_another_layout(tmp_path, capsys):
    folder = model_folder(tmp_path / "m", "qwen3", tied=True)
    assert tool("--to", "megatron", "--input", folder, "--output", tmp_path / "ck", "--tp", 4, "--pp", 2,
                "--make-vocab-size-divisible-by", 8, "--verify") == 0  # fmt: skip
    text = said(capsys)
    assert "verified: 46 tensors of ck and" in text and "verified: logits within" in text
    run_ranks(2, loaded_by_ranks, make_args(folder, 2, 2, 1), tmp_path / "ck", tmp_path / "by-ranks")
    assert_same_tensors(folder, tmp_path / "by-ranks")
    assert tool("--to", "hf", "--input", tmp_path / "ck", "--hf-checkpoint", folder, "--output", tmp_path / "out",
                "--verify") == 0  # fmt: skip
    assert_same_tensors(folder, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert sorted(path.name for path in tmp_path.iterdir()) == ["by-ranks", "ck", "m", "out"]


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_several_files_processes_and_another_dtype(tmp_path, family, monkeypatch):
    folder = model_folder(tmp_path / "m", family, tied=False, num_layers=2)
    processes = 2 if family == "gpt_oss" else 1
    assert tool("--to", "megatron", "--input", folder, "--output", tmp_path / "ck", "--dtype", "bfloat16",
                "--tp", 2, "--etp", 1, "--ep", 2, "--processes", processes, "--verify") == 0  # fmt: skip
    monkeypatch.setattr(run, "FILE_BYTES", 100_000)
    assert tool("--to", "hf", "--input", tmp_path / "ck", "--hf-checkpoint", folder, "--output", tmp_path / "out",
                "--verify") == 0  # fmt: skip
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    mine, back = HFFolder(folder), HFFolder(tmp_path / "out")
    assert sorted(mine.names) == sorted(back.names)
    for name in mine.names:
        kept = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        assert torch.equal(mine.read(name).to(kept), back.read(name)) and back.dtype(name) is kept, name


@pytest.mark.parametrize("direction", ["megatron", "hf"])
def test_an_interrupted_conversion_goes_on(tmp_path, capsys, monkeypatch, direction):
    folder = model_folder(tmp_path / "m", "llama", tied=False)
    words = ["--to", "megatron", "--input", folder, "--output", tmp_path / "ck"]
    module = to_megatron
    if direction == "hf":
        assert tool(*words) == 0
        words = ["--to", "hf", "--input", tmp_path / "ck", "--hf-checkpoint", folder, "--output", tmp_path / "out"]
        module = to_hf
    plain, calls = module.start_writer, []

    def crash_after_two(*args):
        work = plain(*args)

        def crashing(unit):
            calls.append(unit)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return work(unit)

        return crashing

    monkeypatch.setattr(module, "start_writer", crash_after_two)
    with pytest.raises(KeyboardInterrupt):
        tool(*words)
    assert not (tmp_path / "out").exists() and not list((tmp_path / "ck").glob("iter_*")) or direction == "hf"
    capsys.readouterr()
    assert tool(*words) == 0
    assert "going on with what an interrupted conversion left (2 units are done)" in said(capsys)
    done_twice = calls[2]
    assert calls.count(done_twice) == 2 and all(calls.count(unit) == 1 for unit in calls if unit != done_twice)
    if direction == "megatron":
        assert tool("--to", "hf", "--input", tmp_path / "ck", "--hf-checkpoint", folder, "--output",
                    tmp_path / "out") == 0  # fmt: skip
    assert_same_tensors(folder, tmp_path / "out")
    assert not [path for path in tmp_path.rglob("*") if "partial" in path.name or "journal" in path.name]


def test_changed_input_is_not_mixed_with_an_older_run(tmp_path):
    journal = units.Journal(tmp_path / "j", ("plan", 1))
    journal.add(3, "result")
    assert units.Journal(tmp_path / "j", ("plan", 1)).done() == {3: "result"}
    assert units.Journal(tmp_path / "j", ("plan", 2)).done() == {}


def test_dry_run_shows_every_tensor(tmp_path, capsys):
    folder = model_folder(tmp_path / "m", "llama", tied=False)
    assert tool("--to", "megatron", "--input", folder, "--dry-run", "--tp", 2) == 0
    lines = said(capsys).splitlines()
    gate = "model.layers.3.mlp.gate_proj.weight [104, 72] + model.layers.3.mlp.up_proj.weight [104, 72]"
    assert f"decoder.layers.3.mlp.linear_fc1.weight [104, 72] x 2 = {gate}, 59,904 bytes" in lines
    assert any(line.startswith("decoder.layers.0.self_attention.linear_qkv.weight [48, 72] x 2") for line in lines)
    assert "num_hidden_layers: 4, as the weights say" in lines and "hidden_size: 72, as the weights say" in lines
    assert any("39 tensors" in line for line in lines) and any("agrees with its config.json" in line for line in lines)
    assert lines[-1].startswith("a checkpoint in float32: ") and sorted(p.name for p in tmp_path.iterdir()) == ["m"]


def spoil(folder, name, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = change(tensors[name])
    save_file(tensors, file, {"format": "pt"})


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def nan_in_two(folder):
    for name in "model.layers.0.mlp.up_proj.weight", "model.norm.weight":
        spoil(folder, name, lambda t: t.index_fill(0, torch.tensor([1]), float("nan")))


def truncated(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def index_of_missing_file(folder):
    where = {name: "model-00002-of-00002.safetensors" for name in load_file(folder / "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


BAD = [
    (nan_in_two, ["up_proj.weight: 72 of 7488 are NaN or infinite", "model.norm.weight: 1 of 72 are NaN"]),
    (truncated, ["model.safetensors: damaged or incomplete"]),
    (index_of_missing_file, ["names model-00002-of-00002.safetensors, not in the folder"]),
    (pickled, ["has pytorch_model.bin but no *.safetensors; pickled weights are not read"]),
    (lambda f: change_config(f, model_type="gpt_oss", num_local_experts=4),
     ["these are not the weights of a gpt_oss, as config.json says: they have model.layers.*.mlp.down_proj.weight"]),
    (lambda f: change_config(f, num_hidden_layers=2),
     ["num_hidden_layers: config.json says 2, the weights say 1", "layers.1.input_layernorm.weight [72]: missing"]),
    (lambda f: change_config(f, tie_word_embeddings=True), ["config.json ties the head", "is another tensor than"]),
    (lambda f: change_config(f, quantization_config={"quant_method": "gptq"}), ["quantised with 'gptq' are not read"]),
    (lambda f: change_config(f, model_type="gpt_neox"), ["no declaration in slime/models; known are"]),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "words"), BAD, ids=[words[0][:30] for _, words in BAD])
def test_bad_weights_are_one_clear_message(tmp_path, capsys, damage, words):
    folder = model_folder(tmp_path / "m", "llama", tied=False, num_layers=1)
    damage(folder)
    assert tool("--to", "megatron", "--input", folder, "--output", tmp_path / "ck") == 2
    error = capsys.readouterr().err
    assert "convert_hf: error: " in error and all(word in error for word in words), error
    assert not list((tmp_path / "ck").glob("iter_*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "megatron", "--input", "{tmp}/none", "--output", "{tmp}/o"], "no such folder"),
        (["--to", "megatron", "--input", "{m}", "--output", "{m}"], "is not empty"),
        (["--to", "megatron", "--input", "{m}", "--output", "{m}/config.json"], "is a file"),
        (["--to", "megatron", "--input", "{tmp}", "--output", "{tmp}/o"], "--input {tmp}: there is no config.json"),
        (["--to", "megatron", "--input", "{m}", "--dry-run", "--tp", "3"], "do not divide into 3 equal parts"),
        (["--to", "megatron", "--input", "{m}", "--dry-run", "--pp", "2"], "2 does not divide the model's 1 layers"),
        (["--to", "megatron", "--input", "{m}", "--dry-run", "--ep", "2"], "the model has no experts"),
        (["--to", "hf", "--input", "{m}", "--hf-checkpoint", "{tmp}/none", "--output", "{tmp}/o"], "no such folder"),
        (["--to", "hf", "--input", "{m}", "--hf-checkpoint", "{m}", "--output", "{tmp}/o"], "no Megatron checkpoint"),
    ],
)
def test_bad_arguments_are_one_clear_line(tmp_path, capsys, words, message):
    folder = model_folder(tmp_path / "m", "llama", tied=False, num_layers=1)
    assert tool(*(word.format(tmp=tmp_path, m=folder) for word in words)) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("convert_hf: error: ") and message.format(tmp=tmp_path) in error


def test_a_checkpoint_of_another_model_is_refused(tmp_path, capsys):
    folder = model_folder(tmp_path / "m", "llama", tied=False, num_layers=2)
    other = model_folder(tmp_path / "other", "qwen2", tied=True, num_layers=3)
    assert tool("--to", "megatron", "--input", folder, "--output", tmp_path / "ck") == 0
    assert tool("--to", "hf", "--input", tmp_path / "ck", "--hf-checkpoint", other, "--output", tmp_path / "o") == 2
    error = capsys.readouterr().err
    assert "the checkpoint and config.json of --hf-checkpoint disagree" in error
    assert "linear_qkv.bias [3, 96]: missing" in error and "output_layer.weight [331, 72]: not a parameter" in error
    assert "config.json gives [3, 72, 104], the checkpoint has [2, 72, 104]" in error
    change_config(folder, rms_norm_eps=0.5)
    assert tool("--to", "hf", "--input", tmp_path / "ck", "--hf-checkpoint", folder, "--output", tmp_path / "o") == 2
    assert "another model than --hf-checkpoint: rms_norm_eps" in capsys.readouterr().err


def test_hf_output_needs_a_config(capsys):
    with pytest.raises(SystemExit):
        convert_hf.main(["--to", "hf", "--input", "x", "--output", "y"])
    assert "--hf-checkpoint" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        convert_hf.main(["--to", "hf", "--input", "x", "--output", "y", "--hf-checkpoint", "z", "--tp", "2"])
    assert "--tp: no effect with --to hf" in capsys.readouterr().err


# -- quantised input --------------------------------------------------------------------------------------------------


def test_fp8_blocks_are_multiplied_by_their_factors(tmp_path):
    """weight * factor of its block of 128 x 128, in float32, then bfloat16; any rows or columns of it."""
    torch.manual_seed(0)
    weight, scale = torch.randn(300, 200).to(torch.float8_e4m3fn), torch.rand(3, 2)
    whole = torch.stack([weight[i].float() * scale[i // 128].repeat_interleave(128)[:200] for i in range(300)])
    tensors = {"a.weight": weight, "a.weight_scale_inv": scale, "b.weight": torch.ones(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    folder = HFFolder(tmp_path)
    assert sorted(folder.names) == ["a.weight", "b.weight"] and folder.dtype("a.weight") is torch.bfloat16
    assert torch.equal(folder.read("a.weight"), whole.bfloat16())
    assert torch.equal(folder.read("a.weight", 0, 100, 260), whole[100:260].bfloat16())
    assert torch.equal(folder.read("a.weight", 1, 100, 160), whole[:, 100:160].bfloat16())


@pytest.mark.parametrize("factors", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8])
def test_fp8_blocks_are_read_as_transformers_reads_them(tmp_path, factors):
    from types import SimpleNamespace

    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    torch.manual_seed(0)
    weight = torch.randn(256, 384).to(torch.float8_e4m3fn)
    exponents = torch.randint(120, 132, (2, 3), dtype=torch.uint8)
    scale = exponents if factors is torch.uint8 else torch.exp2(exponents.float() - 127).to(factors)
    save_file({"a.weight": weight, "a.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    want = Fp8Dequantize(SimpleNamespace())._dequantize_one(weight, scale, torch.bfloat16)
    assert torch.equal(HFFolder(tmp_path).read("a.weight"), want)


def test_quantised_tensors_that_are_not_read_are_named(tmp_path):
    fp8, factor = torch.zeros(4, 4).to(torch.float8_e4m3fn), torch.ones(1, 1)
    blocks, scales = torch.zeros(1, 4, 2, 8, dtype=torch.uint8), torch.zeros(1, 4, 2, dtype=torch.uint8)
    for tensors, message in [
        ({"a": fp8}, r"a: is F8_E4M3, and its factors \(a_scale_inv\) are missing"),
        ({"a": torch.zeros(4, 4, dtype=torch.int8), "a_scale_inv": factor}, "a: is I8, only F8_E4M3, F8_E5M2 are read"),
        ({"a": fp8, "a_scale_inv": factor.repeat(2, 1)}, r"a_scale_inv: has shape \[2, 1\], blocks of \[128, 128\]"),
        ({"a": fp8[None], "a_scale_inv": factor}, r"a: has shape \[1, 4, 4\], .* in matrices only"),
        ({"a_blocks": blocks, "a_scales": scales}, r"a_blocks: has shape \[1, 4, 2, 8\]"),
    ]:
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ConfigError, match=message):
            HFFolder(tmp_path)


def test_mxfp4_is_read_as_transformers_reads_it(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8)
    scales = torch.randint(120, 132, (3, 10, 2), dtype=torch.uint8)
    save_file({"x.gate_up_proj_blocks": blocks, "x.gate_up_proj_scales": scales}, tmp_path / "model.safetensors")
    folder = HFFolder(tmp_path)
    want = convert_moe_packed_tensors(blocks, scales)
    assert folder.names == ["x.gate_up_proj"] and folder.shape("x.gate_up_proj") == tuple(want.shape) == (3, 64, 10)
    assert torch.equal(folder.read("x.gate_up_proj"), want)
    assert torch.equal(folder.read("x.gate_up_proj", 1, 2, 7, slab=1), want[1, :, 2:7])
    assert torch.equal(folder.read("x.gate_up_proj", 0, 5, 50, slab=2), want[2, 5:50])


def test_an_fp8_folder_becomes_a_bfloat16_model(tmp_path, capsys):
    folder = model_folder(tmp_path / "m", "qwen3", tied=False, num_layers=1, dtype="bfloat16")
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        tensors[name + "_scale_inv"] = torch.full([-(-n // 128) for n in tensors[name].shape], 0.5)
        tensors[name] = (tensors[name] * 2).to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert tool("--to", "megatron", "--input", folder, "--output", tmp_path / "ck") == 0
    assert "7 quantised tensors are read as bfloat16" in said(capsys)
    assert tool("--to", "hf", "--input", tmp_path / "ck", "--hf-checkpoint", folder, "--output", tmp_path / "out") == 0
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")[name], (tensors[name].float() / 2).bfloat16())
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


def test_counts_are_from_1_on(capsys):
    for flag in ("--tensor-model-parallel-size", "--processes"):
        with pytest.raises(SystemExit):
            convert_hf.main(["--to", "megatron", "--input", "x", flag, "0"])
        assert f"{flag}" in (error := capsys.readouterr().err) and "'0' is no number from 1 on" in error
