"""Tokenizers and processors of a Hugging Face folder."""

import json
import os
from pathlib import Path
from typing import Any


def load_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    """The tokenizer of a Hugging Face folder (or hub name). kwargs go to `AutoTokenizer.from_pretrained`.

    Raises FileNotFoundError for a folder that is not there, ValueError when it holds no usable tokenizer.
    """
    from transformers import AutoTokenizer  # slow import, not needed by those who only name this module

    _check_folder(name_or_path)
    try:
        return AutoTokenizer.from_pretrained(name_or_path, **kwargs)
    except Exception as error:
        raise ValueError(f"no tokenizer could be loaded from {name_or_path!r}: {error}") from error


def end_token_ids(name_or_path: str, tokenizer: Any) -> frozenset[int]:
    """Ids at which an engine ends a response: the tokenizer's, and those of config.json and generation_config.json."""
    found = [tokenizer.eos_token_id]
    for path in (Path(name_or_path) / "config.json", Path(name_or_path) / "generation_config.json"):
        if path.is_file():
            ids = json.loads(path.read_text()).get("eos_token_id")
            found += ids if isinstance(ids, list) else [ids]
    return frozenset(i for i in found if i is not None)


def load_processor(name_or_path: str, **kwargs: Any) -> Any | None:
    """The multimodal processor of a Hugging Face folder; None for a model of text only."""
    _check_folder(name_or_path)
    if os.path.isdir(name_or_path) and not any(
        os.path.exists(os.path.join(name_or_path, n)) for n in ("preprocessor_config.json", "processor_config.json")
    ):
        return None
    from transformers import AutoProcessor, PreTrainedTokenizerBase

    processor = AutoProcessor.from_pretrained(name_or_path, **kwargs)
    return None if isinstance(processor, PreTrainedTokenizerBase) else processor


def _check_folder(name_or_path: str) -> None:
    looks_local = os.path.isabs(name_or_path) or name_or_path.startswith((".", "~")) or name_or_path.count("/") != 1
    if looks_local and not os.path.isdir(os.path.expanduser(name_or_path)):
        raise FileNotFoundError(f"there is no Hugging Face folder {name_or_path!r} (--hf-checkpoint)")
