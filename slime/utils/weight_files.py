"""Which file of a Hugging Face folder holds which tensor, and whether the files are whole.

Reads the heads of *.safetensors only, and needs neither torch nor the library: a run looks before it starts anything.
The format: length of the header (8 bytes, little endian), the header as JSON, the bytes (safetensors' README).
"""

import json
from pathlib import Path

from slime.config.errors import ConfigError

INDEX = "model.safetensors.index.json"
_LONGEST_HEADER = 100_000_000  # safetensors' own limit
_PICKLED = {".bin", ".pt", ".pth", ".gguf", ".h5"}


def locate_tensors(folder: Path) -> dict[str, str]:
    """File by tensor name. Raises ConfigError for a folder without safetensors, an index that does not fit, and files
    that are cut off or damaged."""
    index = folder / INDEX
    if not index.is_file():
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        if files:
            return {name: file for file in files for name in tensors_in(folder / file)}
        raise ConfigError(f"{folder}: {_what_else(folder)}")
    try:
        where = {str(name): str(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index}: cannot be read as an index of tensors ({error!r})") from None
    missing = sorted({file for file in where.values() if not (folder / file).is_file()})
    if missing:
        raise ConfigError(f"{index}: names {', '.join(missing[:3])}, not in the folder; is the download complete?")
    have = {file: tensors_in(folder / file) for file in sorted(set(where.values()))}
    for name, file in where.items():
        if name not in have[file]:
            raise ConfigError(f"{index}: says that {name} is in {file}, which does not have it")
    return where


def tensors_in(file: Path) -> set[str]:
    """Names of the tensors in a .safetensors file. Raises ConfigError unless it is as long as its header says."""
    try:
        size = file.stat().st_size
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > min(size - 8, _LONGEST_HEADER):
                raise ValueError(f"{size} bytes, too few for its header")
            header = json.loads(stream.read(length))
        tensors = {name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
        want = 8 + length + max(tensors.values(), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(f"{file}: damaged or incomplete ({error})") from None
    if size != want:
        raise ConfigError(f"{file}: damaged or incomplete ({size} bytes, by its header {want}); download it again")
    return set(tensors)


def _what_else(folder: Path) -> str:
    other = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLED) if folder.is_dir() else []
    if not other:
        return "there are no *.safetensors in it" if folder.is_dir() else "no such folder"
    return (
        f"has {other[0]} but no *.safetensors; pickled weights are not read, because they can run code: convert them "
        "with transformers' save_pretrained"
    )
