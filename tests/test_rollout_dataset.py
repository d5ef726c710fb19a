"""Prompt files: what is read, and what a user is told when it cannot be."""

import json

import pyarrow
import pyarrow.parquet
import pytest
from rollout_wire import save_tokenizer

from slime.config import Args
from slime.data.dataset import PromptDataset, PromptFile
from slime.utils.processing_utils import load_processor, load_tokenizer

ROWS = [{"prompt": f"{i}+{i}=", "label": str(2 * i), "metadata": {"source": "add"}} for i in range(10)]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder):
    return load_tokenizer(tokenizer_folder)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def load(spec, tokenizer=None, **flags):
    return PromptDataset.load(spec, Args(**flags), tokenizer)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    "bounds, expected",
    [
        ("", range(10)),
        ("@[2:5]", range(2, 5)),
        ("@[7:]", range(7, 10)),
        ("@[:3]", range(3)),
        ("@[-2:]", range(8, 10)),
        ("@[4:99]", range(4, 10)),
    ],
)
def test_slices(tmp_path, suffix, bounds, expected):
    path = tmp_path / f"data.{suffix}"
    if suffix == "jsonl":
        write_jsonl(path, ROWS)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=3)
    data = load(f"{path}{bounds}")
    assert [s.prompt for s in data.prompts] == [f"{i}+{i}=" for i in expected]
    assert [s.label for s in data.prompts] == [str(2 * i) for i in expected]
    assert all(s.metadata == {"source": "add"} for s in data.prompts)


def test_fingerprint_tells_files_and_slices_apart(tmp_path):
    a, b = write_jsonl(tmp_path / "a.jsonl", ROWS), write_jsonl(tmp_path / "b.jsonl", ROWS)
    assert load(a).fingerprint == load(b).fingerprint
    assert load(a).fingerprint != load(f"{a}@[0:9]").fingerprint
    write_jsonl(tmp_path / "b.jsonl", [*ROWS[:-1], {**ROWS[-1], "label": "0"}])
    assert load(a).fingerprint != load(b).fingerprint


@pytest.mark.parametrize(
    "text, flags, words",
    [
        ('{"prompt": "a"}\n\n{"prompt": \n', {}, ["data.jsonl:3", "no JSON"]),
        ('{"prompt": "a"}\n[1]\n', {}, ["data.jsonl:2", "list"]),
        ('{"question": "a", "answer": "b"}\n', {}, ["data.jsonl:1", "'prompt'", "--input-key", "'question', 'answer'"]),
        ('{"prompt": "a"}\n', {"label_key": "gold"}, ["data.jsonl:1", "'gold'", "--label-key"]),
        ('{"prompt": "a", "label": "b"}\n{"prompt": "a"}\n', {}, ["data.jsonl:2", "'label'"]),
        ('{"prompt": ""}\n', {}, ["data.jsonl:1", "not empty"]),
        ('{"prompt": 3}\n', {}, ["data.jsonl:1", "text or a list of chat messages"]),
        ('{"prompt": "a", "metadata": 3}\n', {}, ["data.jsonl:1", "metadata", "int"]),
        ('{"prompt": "a", "metadata": "{"}\n', {}, ["data.jsonl:1", "metadata", "no JSON"]),
        ("\n", {}, ["no rows"]),
        ('{"prompt": "a"}\n', {"apply_chat_template": True}, ["--apply-chat-template", "--hf-checkpoint"]),
    ],
)
def test_bad_rows_are_named(tmp_path, text, flags, words):
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        load(str(path), **flags)
    assert all(w in str(error.value) for w in words), error.value


def test_bad_utf8_is_named(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(ValueError, match="data.jsonl:1"):
        load(str(path))


def test_bad_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.jsonl does not exist"):
        load(str(tmp_path / "nothing.jsonl"))
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(FileNotFoundError, match="is a folder"):
        load(str(tmp_path / "folder.jsonl"))
    (tmp_path / "data.txt").write_text("x")
    with pytest.raises(ValueError, match="unknown kind '.txt'"):
        load(str(tmp_path / "data.txt"))
    (tmp_path / "data.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match="no readable parquet"):
        load(str(tmp_path / "data.parquet"))
    with pytest.raises(ValueError, match=r"slice \[a:3\]"):
        PromptFile.parse("data.jsonl@[a:3]")


def test_missing_label_column_is_fine_by_default(tmp_path):
    assert load(write_jsonl(tmp_path / "d.jsonl", [{"prompt": "a"}])).prompts[0].label is None


def test_chat_template_with_tools(tmp_path, tokenizer):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1"}]
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": messages, "tools": [{"name": "x"}]}])
    data = load(path, tokenizer, apply_chat_template=True, tool_key="tools")
    assert data.prompts[0].prompt == "s:s|u:1+1|t1|a:"
    assert data.prompts[0].metadata["tools"] == [{"name": "x"}]
    assert load(path, tokenizer).prompts[0].prompt == messages
    text = write_jsonl(tmp_path / "t.jsonl", [{"prompt": "1+1"}])
    assert load(text, tokenizer, apply_chat_template=True).prompts[0].prompt == "u:1+1|a:"


def test_overlong_prompts_are_skipped_and_counted_or_an_error(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "1" * n} for n in (3, 9, 4, 8)])
    data = load(path, tokenizer, rollout_max_prompt_len=4)
    assert [len(s.prompt) for s in data.prompts] == [3, 4] and data.num_overlong == 2
    assert len(load(path, tokenizer, rollout_max_context_len=9).prompts) == 3  # one token of response must fit
    with pytest.raises(ValueError, match=r"2 of 4 prompts are longer than 4 tokens \(first: .*:2, 9 tokens\)"):
        load(path, tokenizer, rollout_max_prompt_len=4, overlong_prompt="error")
    with pytest.raises(ValueError, match="nothing is left"):
        load(path, tokenizer, rollout_max_prompt_len=2)


def test_tokenizer_and_processor_errors(tmp_path, tokenizer_folder):
    with pytest.raises(FileNotFoundError, match="--hf-checkpoint"):
        load_tokenizer(str(tmp_path / "missing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no tokenizer"):
        load_tokenizer(str(tmp_path / "empty"))
    assert load_processor(tokenizer_folder) is None
