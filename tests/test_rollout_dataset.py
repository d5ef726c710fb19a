"""Prompt files: what is read, and what a user is told when it cannot be."""

import gzip
import json
import os

import pyarrow
import pyarrow.parquet
import pytest
from rollout_wire import save_tokenizer

from slime.config import Args, ConfigError
from slime.data.dataset import PromptDataset, PromptFile, check_prompt_files
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
        ('{"prompt": "a", "tools": "{"}\n', {"tool_key": "tools"}, ["data.jsonl:1", "tools", "no JSON"]),
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


def gzipped(path):
    path.write_bytes(gzip.compress(b'{"prompt": "a"}\n'))


def unreadable(path):
    os.symlink("/proc/self/mem", path)  # fails on reading, for root too


@pytest.mark.parametrize("flag", ["prompt_data", "eval_prompt_data"])
@pytest.mark.parametrize(
    ("name", "content", "flags", "message"),
    [
        ("d.jsonl", "", {}, "d.jsonl: no rows to read; give"),
        ("d.parquet", [], {}, "d.parquet: no rows to read; give"),
        ("d.jsonl@[5:]", ROWS[:5], {}, r"d.jsonl@\[5:\]: no rows to read; give a file, and a slice"),
        ("d.parquet@[5:7]", ROWS[:5], {}, r"d.parquet@\[5:7\]: no rows"),
        ("d.jsonl@[5]", ROWS, {}, r"the slice \[5\] is not understood; write file@"),
        ("d.jsonl", os.mkdir, {}, "d.jsonl is a folder, not a file; give a .jsonl or .parquet file"),
        ("d.jsonl", None, {}, "d.jsonl does not exist"),
        ("d.jsonl", ROWS, {"input_key": "question"}, "d.jsonl:1: no key 'question' .--input-key.; the keys there"),
        ("d.parquet", ROWS, {"label_key": "gold"}, "d.parquet row 0: no key 'gold' .--label-key.; the keys there are"),
        ("d.jsonl", ROWS, {"tool_key": "tools"}, "d.jsonl:1: no key 'tools' .--tool-key."),
        ("d.jsonl.gz", gzipped, {}, "d.jsonl.gz: unknown kind '.gz'; use .jsonl or .parquet, unpacked"),
        ("d.jsonl", gzipped, {}, "d.jsonl:1: this line is no JSON"),
        ("d.jsonl", unreadable, {}, "d.jsonl cannot be read .Input/output error.; check permissions"),
        ("d.parquet", unreadable, {}, "d.parquet is no readable parquet file"),
        ("d.jsonl", [{"prompt": [{"role": "user", "content": "x"}]}], {}, "chat messages: set --apply-chat-template"),
    ],
)  # fmt: skip
def test_prompt_files_are_looked_at_before_anything_starts(tmp_path, flag, name, content, flags, message):
    path = tmp_path / name.split("@")[0]
    if callable(content):
        content(path)
    elif content is not None and path.suffix == ".parquet":
        schema = pyarrow.schema([("prompt", pyarrow.string()), ("label", pyarrow.string())])
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content, schema=schema), path)
    elif content is not None:
        write_jsonl(path, content)
    good = write_jsonl(tmp_path / "good.jsonl", [{"prompt": "a", **{k: "[]" for k in flags.values()}}])
    files = {"prompt_data": good, "eval_prompt_data": ["g", good, "e", str(tmp_path / name)]}
    if flag == "prompt_data":
        files = {"prompt_data": str(tmp_path / name)}
    args = Args(eval_function_path=Args().rollout_function_path, **files, **flags)
    with pytest.raises(ConfigError, match=f"^--{flag.replace('_', '-')}: .*{message}") as error:
        check_prompt_files(args)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "label": None}, "d.jsonl:1: reward exact needs a label, and there is none"),
        ({"prompt": "a"}, "needs a label"),
        ({"prompt": "a", "label": {"ground_truth": "b"}}, "found an object with ground_truth"),
        ({"prompt": "a", "label": "b", "metadata": {"rm_type": "nope"}}, "\"rm_type\" 'nope' is unknown"),
        ({"prompt": "\ud800", "label": "b"}, "holds half of a surrogate pair"),
    ],
)
def test_rows_that_could_not_be_graded_or_tokenised_are_named_before_anything_starts(tmp_path, row, message):
    path = write_jsonl(tmp_path / "d.jsonl", [row])
    with pytest.raises(ConfigError, match=message):
        check_prompt_files(Args(prompt_data=path, rm_type="exact"))


def test_a_metadata_column_that_was_asked_for_must_be_there(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "a", "label": "b"}])
    with pytest.raises(ConfigError, match="no key 'extra' .--metadata-key"):
        check_prompt_files(Args(prompt_data=path, rm_type="exact", metadata_key="extra"))


def test_brackets_a_thousand_deep_are_a_bad_line(tmp_path):
    (tmp_path / "d.jsonl").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="d.jsonl:1: this line is no JSON"):
        check_prompt_files(Args(prompt_data=str(tmp_path / "d.jsonl"), rm_type="exact"))


def test_good_prompt_files_and_those_of_own_data_sources_pass_the_look(tmp_path):
    check_prompt_files(
        Args(prompt_data=write_jsonl(tmp_path / "d.jsonl", ROWS), apply_chat_template=True, rm_type="exact")
    )
    check_prompt_files(Args(prompt_data="s3://prompts", data_source_path="mine.Source"))
    check_prompt_files(Args(prompt_data=None))


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
