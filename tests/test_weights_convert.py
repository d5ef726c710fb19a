"""tools/convert_hf.py as a user runs it."""

import subprocess
import sys
from pathlib import Path

import pytest
from test_weights_megatron import assert_same_tensors, model_folder

from tools import convert_hf

TOOL = Path(__file__).parent.parent / "tools" / "convert_hf.py"


def run_tool(*words):
    return subprocess.run(
        [sys.executable, str(TOOL), *map(str, words)], capture_output=True, text=True, timeout=600, check=False
    )


def test_there_and_back_over_another_layout(tmp_path):
    folder = model_folder(tmp_path / "m", "qwen3", tied=True)
    there = run_tool("--to", "megatron", "--input", folder, "--output", tmp_path / "ck", "--verify")
    assert there.returncode == 0, there.stderr
    assert "verified: 46 tensors of rank 0's stage equal" in there.stdout and "verified: logits within" in there.stdout
    back = run_tool("--to", "hf", "--input", tmp_path / "ck", "--hf-checkpoint", folder, "--output", tmp_path / "out",
                    "--tp", 2, "--verify")  # fmt: skip
    assert back.returncode == 0, back.stderr
    assert_same_tensors(folder, tmp_path / "out")


def test_dry_run_shows_every_tensor(tmp_path, capsys):
    folder = model_folder(tmp_path / "m", "llama", tied=False)
    assert convert_hf.main(["--to", "megatron", "--input", str(folder), "--dry-run", "--tp", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    gate = "model.layers.3.mlp.gate_proj.weight [104, 72] + model.layers.3.mlp.up_proj.weight [104, 72]"
    assert f"decoder.layers.3.mlp.linear_fc1.weight [104, 72] x 2 = {gate}" in lines
    assert "decoder.layers.0.self_attention.linear_qkv.weight [48, 72] x 2" in "\n".join(lines)
    assert "agrees with its config.json" in lines[-1] and "39 tensors" in lines[-2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "megatron", "--input", "{tmp}/none", "--output", "{tmp}/o"], "no such folder"),
        (["--to", "megatron", "--input", "{m}", "--output", "{m}"], "is not empty"),
        (["--to", "megatron", "--input", "{m}", "--dry-run", "--tp", "3"], "do not divide into 3 equal parts"),
        (["--to", "hf", "--input", "{m}", "--hf-checkpoint", "{tmp}/none", "--output", "{tmp}/o"], "no such folder"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path, capsys, words, message):
    folder = model_folder(tmp_path / "m", "llama", tied=False, num_layers=1)
    assert convert_hf.main([word.format(tmp=tmp_path, m=folder) for word in words]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("convert_hf: error: ") and message in error


def test_hf_output_needs_a_config(capsys):
    with pytest.raises(SystemExit):
        convert_hf.main(["--to", "hf", "--input", "x", "--output", "y"])
    assert "--hf-checkpoint" in capsys.readouterr().err
