"""Prompt files: .jsonl and .parquet, whole or a slice of rows, as a list of prompt `Sample`s."""

import dataclasses
import hashlib
import itertools
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slime.config.errors import ConfigError
from slime.config.groups import GENERATE
from slime.config.rewards import BUILT_IN_REWARDS, label_fault
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

DEFAULT_LABEL_KEY = "label"  # the flag's default: a file may do without this one, not without one asked for
DEFAULT_METADATA_KEY = "metadata"  # the same
TOKENIZE_AT_ONCE = 1024
_CHECKED = 1000  # rows that are looked at before a run starts


@dataclasses.dataclass(frozen=True)
class PromptFile:
    """A prompt file and the rows taken from it: `data.jsonl@[10:20]`."""

    path: Path
    start: int | None = None
    stop: int | None = None

    @classmethod
    def parse(cls, spec: str) -> "PromptFile":
        match = re.fullmatch(r"(.+?)@\[(.*)\]", spec)
        if match is None:
            return cls(Path(os.path.expanduser(spec)))
        path, bounds = match.groups()
        if not re.fullmatch(r"\s*-?\d*\s*:\s*-?\d*\s*", bounds):
            raise ValueError(
                f"{spec}: the slice [{bounds}] is not understood; write file@[first:last], e.g. file@[0:100]"
            )
        start, stop = (int(b) if b.strip() else None for b in bounds.split(":"))
        return cls(Path(os.path.expanduser(path)), start, stop)

    def read(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The rows, each with its place for error messages ("data.jsonl:12")."""
        readers = {".jsonl": _read_jsonl, ".json": _read_jsonl, ".parquet": _read_parquet}
        reader = readers.get(self.path.suffix)
        try:
            if not self.path.is_file():
                kind = "is a folder, not a file" if self.path.is_dir() else "does not exist"
                raise FileNotFoundError(f"prompt file {self.path} {kind}; give a .jsonl or .parquet file")
            if reader is None:
                raise ValueError(
                    f"prompt file {self.path}: unknown kind {self.path.suffix!r}; use .jsonl or .parquet, unpacked"
                )
            yield from reader(self.path, self.start, self.stop)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise OSError(
                f"prompt file {self.path} cannot be read ({error.strerror or error}); check permissions and disk"
            ) from error

    def fingerprint(self) -> str:
        """sha256 of the file's bytes and of the slice: equal only where all rows are."""
        with open(self.path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        digest.update(f"@[{self.start}:{self.stop}]".encode())
        return digest.hexdigest()


@dataclasses.dataclass
class PromptDataset:
    """The prompts of one file, ready to be copied into groups.

    prompts: samples without index. num_overlong: prompts left out for their length. fingerprint: of file and slice.
    """

    prompts: list[Sample]
    num_overlong: int
    fingerprint: str
    name: str

    def __len__(self) -> int:
        return len(self.prompts)

    @classmethod
    def load(cls, spec: str, args: Any, tokenizer: Any | None) -> "PromptDataset":
        """Reads, renders and measures the prompts of `spec` as the data flags in `args` say.

        tokenizer may be None where prompts are neither rendered nor measured. Raises ValueError or an OSError
        that names file, row and flag.
        """
        places, samples = _read_samples(spec, args, tokenizer)
        kept, overlong = _split_by_length(places, samples, _prompt_limit(args), tokenizer)
        if overlong:
            place, length = overlong[0]
            what = (
                f"{len(overlong)} of {len(samples)} prompts are longer than {_prompt_limit(args)} tokens "
                f"(first: {place}, {length} tokens)"
            )
            if args.overlong_prompt == "error":
                raise ValueError(
                    f"{what}; raise --rollout-max-prompt-len or leave them out with --overlong-prompt skip"
                )
            if not kept:
                raise ValueError(f"{spec}: {what}: nothing is left; raise --rollout-max-prompt-len")
            logger.warning("%s: left out (--overlong-prompt skip)", what)
        return cls(kept, len(overlong), PromptFile.parse(spec).fingerprint(), spec)


def check_prompt_files(args: Any) -> None:
    """Reads the first rows of --prompt-data and --eval-prompt-data as the run will, before anything is started.

    Raises ConfigError with a line for each file that cannot be read, has no rows, or lacks a column. Rows further down
    and chat templates show when the run reads the files. A data source or evaluation of the user's is left to itself.
    """
    specs = [("--prompt-data", args.prompt_data, args.data_source_path, args.rollout_function_path)]
    specs += [
        ("--eval-prompt-data", file, args.eval_function_path, args.eval_function_path)
        for file in (args.eval_prompt_data or [])[1::2]
    ]
    faults = []
    for flag, spec, reader, function in specs:
        if spec is None or not str(reader).startswith("slime."):
            continue
        try:
            places, samples = _read_samples(spec, args.replace(apply_chat_template=False), None, _CHECKED)
            if function == GENERATE and args.loss_type == "policy_loss":
                _check_gradable(places, samples, args)
            if not args.apply_chat_template:
                check_rendered(spec, samples, args, function)
        except (ValueError, OSError) as error:
            faults.append(f"{flag}: {error}")
    if faults:
        raise ConfigError("\n".join(faults))


def _check_gradable(places: Sequence[str], samples: Sequence[Sample], args: Any) -> None:
    """Raises ValueError for a row that its built-in reward cannot grade: of an unknown type, or without a label."""
    if args.custom_rm_path or args.custom_generate_function_path:
        return
    for place, sample in zip(places, samples, strict=True):
        name = sample.metadata.get("rm_type") or args.rm_type or ""
        kind = str(name).strip().removeprefix("boxed_")
        if not kind:
            continue
        if kind not in BUILT_IN_REWARDS:
            raise ValueError(f'{place}: its "rm_type" {name!r} is unknown; built in are {", ".join(BUILT_IN_REWARDS)}')
        if (fault := label_fault(kind, sample.label)) is not None:
            raise ValueError(f"{place}: reward {kind} {fault}")


def check_rendered(spec: str, samples: Sequence[Sample], args: Any, function: str) -> None:
    """Raises ValueError where prompts are chat messages, and `function` (a path) generates from text only."""
    if function == GENERATE and args.custom_generate_function_path is None:
        if any(not isinstance(sample.prompt, str) for sample in samples):
            raise ValueError(f"{spec}: prompts are chat messages: set --apply-chat-template")


def _read_samples(spec: str, args: Any, tokenizer: Any, limit: int | None = None) -> tuple[list[str], list[Sample]]:
    """(place of each row for messages, its sample); of the first `limit` rows."""
    rows = list(itertools.islice(PromptFile.parse(spec).read(), limit))
    if not rows:
        raise ValueError(f"{spec}: no rows to read; give a file, and a slice of it, that has some")
    label_key = _present_label_key(args.label_key, rows)
    if args.metadata_key != DEFAULT_METADATA_KEY and not any(args.metadata_key in row for _, row in rows):
        place, row = rows[0]
        raise ValueError(f"{place}: no key {args.metadata_key!r} (--metadata-key); the keys there are {_keys(row)}")
    return [place for place, _ in rows], [_to_sample(place, row, args, label_key, tokenizer) for place, row in rows]


def _read_jsonl(path: Path, start: int | None, stop: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
    with open(path, "rb") as file:
        lines: Iterator[tuple[int, bytes]] = ((n, line) for n, line in enumerate(file, 1) if line.strip())
        if (start or 0) >= 0 and (stop is None or stop >= 0):
            lines = itertools.islice(lines, start, stop)
        else:
            lines = iter(list(lines)[start:stop])
        for number, line in lines:
            place = f"{path}:{number}"
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, brackets a thousand deep
                raise ValueError(f"{place}: this line is no JSON (each must be one object): {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{place}: each line must be one JSON object, found a {type(row).__name__}")
            yield place, row


def _read_parquet(path: Path, start: int | None, stop: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        first, last, _ = slice(start, stop).indices(file.metadata.num_rows)
        begin = 0
        for batch in file.iter_batches(batch_size=4096):
            lo, hi = max(first - begin, 0), min(last - begin, batch.num_rows)
            if lo < hi:
                for offset, row in enumerate(batch.slice(lo, hi - lo).to_pylist()):
                    yield f"{path} row {begin + lo + offset}", row
            begin += batch.num_rows
            if begin >= last:
                return
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is no readable parquet file: {error}") from error


def _present_label_key(label_key: str | None, rows: Sequence[tuple[str, dict[str, Any]]]) -> str | None:
    """The label's column; None where there is none. A column that only some rows have is an error."""
    if label_key is None:
        return None
    missing = next(((place, row) for place, row in rows if label_key not in row), None)
    if missing is None:
        return label_key
    place, row = missing
    if label_key == DEFAULT_LABEL_KEY and not any(label_key in row for _, row in rows):
        return None
    raise ValueError(f"{place}: no key {label_key!r} (--label-key); the keys there are {_keys(row)}")


def _to_sample(place: str, row: dict[str, Any], args: Any, label_key: str | None, tokenizer: Any) -> Sample:
    if args.input_key not in row:
        raise ValueError(f"{place}: no key {args.input_key!r} (--input-key); the keys there are {_keys(row)}")
    prompt = row[args.input_key]
    is_chat = isinstance(prompt, list) and all(isinstance(m, dict) and "role" in m for m in prompt)
    if not (isinstance(prompt, str) or is_chat) or not prompt:
        raise ValueError(
            f"{place}: {args.input_key!r} must be text or a list of chat messages, both not empty; found {prompt!r:.80}"
        )
    metadata = _parsed(place, args.metadata_key, row.get(args.metadata_key))
    if not isinstance(metadata, dict | None):
        raise ValueError(f"{place}: {args.metadata_key!r} must be an object, found {type(metadata).__name__}")
    metadata = dict(metadata or {})
    tools = row.get(args.tool_key) if args.tool_key else None
    if args.tool_key and args.tool_key not in row:
        raise ValueError(f"{place}: no key {args.tool_key!r} (--tool-key); the keys there are {_keys(row)}")
    if tools := _parsed(place, args.tool_key, tools):
        metadata["tools"] = tools
    if args.apply_chat_template:
        prompt = _render(place, prompt, tools, args.apply_chat_template_kwargs, tokenizer)
    if isinstance(prompt, str) and not _is_unicode(prompt):
        raise ValueError(f"{place}: {args.input_key!r} holds half of a surrogate pair, which is no text")
    return Sample(prompt=prompt, label=row[label_key] if label_key else None, metadata=metadata)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parsed(place: str, key: str, value: Any) -> Any:
    """A column's value, from JSON where it is text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"{place}: {key!r} is text but no JSON: {error}") from error


def _render(place: str, prompt: Any, tools: Any, kwargs: dict[str, Any] | None, tokenizer: Any) -> str:
    if tokenizer is None:
        raise ValueError("--apply-chat-template needs a tokenizer: set --hf-checkpoint")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    options = {"tokenize": False, "add_generation_prompt": True, **(kwargs or {})}
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools or None, **options)
    except Exception as error:
        raise ValueError(f"{place}: --apply-chat-template failed: {error}") from error
    if not isinstance(text, str):
        raise ValueError(f"{place}: --apply-chat-template made a {type(text).__name__}; needed is text")
    return text


def _prompt_limit(args: Any) -> int | None:
    if args.rollout_max_prompt_len is not None:
        return args.rollout_max_prompt_len
    # At least one token of response must fit.
    return None if args.rollout_max_context_len is None else args.rollout_max_context_len - 1


def _split_by_length(
    places: list[str], samples: list[Sample], limit: int | None, tokenizer: Any
) -> tuple[list[Sample], list[tuple[str, int]]]:
    """Samples within the limit, and (place, tokens) of those over it. Unrendered chat messages are not measured."""
    if limit is None or tokenizer is None:
        return samples, []
    texts = [(i, s.prompt) for i, s in enumerate(samples) if isinstance(s.prompt, str)]
    overlong: dict[int, int] = {}
    for first in range(0, len(texts), TOKENIZE_AT_ONCE):
        part = texts[first : first + TOKENIZE_AT_ONCE]
        # verbose: the tokenizer would warn of the length of prompts that are left out here
        encoded = tokenizer([text for _, text in part], add_special_tokens=False, verbose=False)["input_ids"]
        overlong |= {i: len(ids) for (i, _), ids in zip(part, encoded, strict=True) if len(ids) > limit}
    kept = [s for i, s in enumerate(samples) if i not in overlong]
    return kept, [(places[i], length) for i, length in overlong.items()]


def _keys(row: dict[str, Any]) -> str:
    return ", ".join(map(repr, row)) or "none"
