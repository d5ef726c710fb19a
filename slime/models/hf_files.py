"""Hugging Face folders: reading slices of safetensors, comparing them with a declaration, writing complete folders."""

import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from slime.config.errors import ConfigError
from slime.models import quantised
from slime.models.rows import ReadRows
from slime.models.table import Bound, WeightTable
from slime.utils.misc import batched_by_size
from slime.utils.weight_files import INDEX, locate_tensors

FILE_BYTES = 5 * 1024**3  # of weights in one file
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_COPIED_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".py", ".tiktoken", ".vocab", ".merges"}


class HFFolder:
    """The tensors of a Hugging Face folder. Opens files when they are needed and reads only the rows asked for.

    Quantised weights (fp8 blocks, MXFP4) show as the bfloat16 tensors that they stand for.
    Raises ConfigError for a folder without safetensors, an index that names a missing file, or a damaged file.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ConfigError(f"{folder}: no such folder")
        self._files: dict[str, Any] = {}
        self._where = locate_tensors(self.folder)
        config = self.folder / "config.json"
        try:
            raw = json.loads(config.read_text()) if config.is_file() else {}
        except ValueError as error:
            raise ConfigError(f"{config}: cannot be read as JSON ({error})") from None
        self.quantised = quantised.find(self._where, raw, str(config))
        quantised.check_scaled(self.quantised, self._where, self._slice)
        hidden = {source for name, view in self.quantised.items() for source in view.sources if source != name}
        self.names = [name for name in self._where if name not in hidden] + sorted(self.quantised.keys() - self._where)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(str(self.folder / file), framework="pt")
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{self.folder / file}: damaged or incomplete ({error})") from None
        return self._files[file]

    def _slice(self, name: str) -> Any:
        return self._open(self._where[name]).get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        view = self.quantised.get(name)
        return view.shape(self._slice) if view else tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16 if name in self.quantised else DTYPES[self._slice(name).get_dtype()]

    def read(
        self, name: str, axis: int = 0, start: int = 0, stop: int | None = None, slab: int | None = None
    ) -> torch.Tensor:
        """Rows [start, stop) along `axis`; nothing else is read from the file.

        slab: only this entry of the first dimension; `axis` counts the dimensions behind it.
        """
        shape = self.shape(name) if slab is None else self.shape(name)[1:]
        stop = shape[axis] if stop is None else stop
        if name in self.quantised:
            return self.quantised[name].read(self._slice, axis, start, stop, slab)
        if slab is None and (start, stop) == (0, shape[axis]):
            return self._open(self._where[name]).get_tensor(name)
        rows = (slice(None),) * axis + (slice(start, stop),)
        return self._slice(name)[rows if slab is None else (slab, *rows)]

    def nbytes(self) -> int:
        return sum(math.prod(self.shape(n)) * self.dtype(n).itemsize for n in self.names)


def row_reader(folder: HFFolder, bound: Bound) -> ReadRows:
    """read(source, start, stop) for `Param.load`: rows of a parameter's tensors, output rows first."""

    def read(source: int, start: int, stop: int) -> torch.Tensor:
        tensor, axis = bound.param.hf[source], bound.param.form.axis
        slab = bound.expert if tensor.stacked is not None else None
        rows = folder.read(bound.hf_names[source], 1 - axis if tensor.transposed else axis, start, stop, slab)
        return rows.T if tensor.transposed else rows

    return read


def hf_dtypes(table: WeightTable, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """By tensor: `dtype`, but for those that stay float32."""
    return {name: torch.float32 if tensor.float32 else dtype for name, tensor in table.hf_tensors().items()}


def plan_files(
    shapes: Mapping[str, Sequence[int]], dtypes: Mapping[str, torch.dtype], max_bytes: int
) -> list[list[str]]:
    """Names of tensors per file, in order, each file at most `max_bytes` unless one tensor alone is larger."""
    return list(batched_by_size(shapes, lambda n: math.prod(shapes[n]) * dtypes[n].itemsize, max_bytes))


def file_header(
    shapes: Mapping[str, Sequence[int]], dtypes: Mapping[str, torch.dtype]
) -> tuple[bytes, dict[str, tuple[int, int]], int]:
    """The head of a .safetensors file, where each tensor's bytes start and stop in the file, and the file's size.

    The format: length of the header (8 bytes, little endian), the header as JSON, the bytes (safetensors' README).
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtypes[name].itemsize
        header[name] = {"dtype": _DTYPE_NAMES[dtypes[name]], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned
    head = len(text).to_bytes(8, "little") + text
    del header["__metadata__"]
    offsets = {n: (len(head) + h["data_offsets"][0], len(head) + h["data_offsets"][1]) for n, h in header.items()}
    return head, offsets, len(head) + end


def file_name(number: int, total: int) -> str:
    """Of file `number` (from 1) of a folder's weights."""
    return "model.safetensors" if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"


class SafetensorsWriter:
    """Writes one .safetensors file tensor by tensor, in the order given, so that only one tensor is in memory."""

    def __init__(self, path: Path, shapes: Mapping[str, Sequence[int]], dtypes: Mapping[str, torch.dtype]):
        self._left = [(name, tuple(shape)) for name, shape in reversed(list(shapes.items()))]
        self._dtypes = dtypes
        self._file = open(path, "wb")
        self._file.write(file_header(shapes, dtypes)[0])

    def add(self, name: str, tensor: torch.Tensor) -> bool:
        """Writes the next tensor; True when the file is complete (and closed)."""
        want, shape = self._left.pop()
        if (name, tuple(tensor.shape)) != (want, shape):
            raise ValueError(
                f"{self._file.name}: {name} {list(tensor.shape)} came where {want} {list(shape)} was planned"
            )
        data = tensor.detach().to("cpu", self._dtypes[name]).contiguous()
        self._file.write(data.reshape(-1).view(torch.uint8).numpy().data)
        if self._left:
            return False
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return True


def write_index(folder: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(weight_map)}
    (folder / INDEX).write_text(json.dumps(index, indent=2))


def copy_side_files(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Everything of a Hugging Face folder but its weights: config (with the dtype written), tokenizer, templates."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in _COPIED_SUFFIXES and not path.name.endswith(".index.json"):
            shutil.copyfile(path, target / path.name)
    config_path = target / "config.json"
    config = quantised.without_quantisation(json.loads(config_path.read_text()))
    keys: Iterable[str] = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    config.update({key: str(dtype).removeprefix("torch.") for key in keys})
    config_path.write_text(json.dumps(config, indent=2) + "\n")


def replace_folder(new: Path, target: Path) -> None:
    """Puts a finished folder in the place of `target`, which is complete before and after."""
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)
