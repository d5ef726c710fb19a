"""Quantised weights of Hugging Face folders, read as bfloat16: blocks of fp8 (DeepSeek, Qwen) and MXFP4 (gpt-oss).

A quantised tensor is two tensors in the file, numbers and scales; `find` shows them as one. Rows are computed when they
are read, a few at a time.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slime.config.errors import ConfigError

Slice = Callable[[str], Any]  # safetensors' lazy tensor by the name in the file: get_shape, get_dtype, [rows]
_KNOWN = {"fp8", "mxfp4"}
_FLOAT8 = {"F8_E4M3", "F8_E5M2"}
_FACTORS = {"F32", "BF16", "F16", "F8_E8M0", "U8"}
# The sixteen numbers of FP4 E2M1 (OCP Microscaling Formats 1.0, section 5.3.3), sign in the highest of four bits.
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0] + [-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


@dataclass(frozen=True)
class BlockFp8:
    """weight [N, K] in float8 and one factor per block of `block` = (rows, columns): weight * factor. Blocks at the
    ends may be cut off. Factors are floats, or powers of two by their exponent alone (float8_e8m0fnu, or its bytes).
    """

    name: str
    scale: str
    block: tuple[int, int]

    @property
    def sources(self) -> tuple[str, str]:
        return self.name, self.scale

    def shape(self, open_: Slice) -> tuple[int, ...]:
        return tuple(open_(self.name).get_shape())

    def check(self, open_: Slice) -> None:
        """Raises ConfigError for other numbers than float8, and when there are not as many factors as blocks."""
        shape = self.shape(open_)
        for name, known in ((self.name, _FLOAT8), (self.scale, _FACTORS)):
            if open_(name).get_dtype() not in known:
                raise ConfigError(f"{name}: is {open_(name).get_dtype()}, only {', '.join(sorted(known))} are read")
        if len(shape) != 2:
            raise ConfigError(f"{self.name}: has shape {list(shape)}, blocks of float8 are read in matrices only")
        want = [math.ceil(n / b) for n, b in zip(shape, self.block, strict=True)]
        if list(open_(self.scale).get_shape()) != want:
            raise ConfigError(
                f"{self.scale}: has shape {list(open_(self.scale).get_shape())}, blocks of {list(self.block)} in "
                f"{list(shape)} need {want}"
            )

    def read(self, open_: Slice, axis: int, start: int, stop: int, slab: int | None) -> torch.Tensor:
        assert slab is None
        weight, scale = open_(self.name), open_(self.scale)[:]
        scale = torch.exp2(scale.float() - 127) if scale.dtype is torch.uint8 else scale.float()
        (rows, columns), size = self.shape(open_), self.block[0]
        out_rows, out_columns = (range(start, stop), range(columns)) if axis == 0 else (range(rows), range(start, stop))
        out = torch.empty(len(out_rows), len(out_columns), dtype=torch.bfloat16)
        by_column = torch.tensor(out_columns) // self.block[1]
        for first in range(out_rows.start - out_rows.start % size, out_rows.stop, size):
            a, b = max(first, out_rows.start), min(first + size, out_rows.stop)
            part = weight[a:b] if axis == 0 else weight[a:b, start:stop]
            out[a - out_rows.start : b - out_rows.start] = part.float() * scale[first // size][by_column]
        return out


@dataclass(frozen=True)
class Mxfp4:
    """blocks [E, N, K / 32, 16] of two FP4 numbers a byte, low half first, and exponents [E, N, K / 32] (bias 127).

    Read as [E, K, N], as gpt-oss's unquantised files have it.
    """

    name: str
    blocks: str
    scale: str

    @property
    def sources(self) -> tuple[str, str]:
        return self.blocks, self.scale

    def shape(self, open_: Slice) -> tuple[int, ...]:
        experts, rows, groups, each = open_(self.blocks).get_shape()
        return experts, groups * each * 2, rows

    def check(self, open_: Slice) -> None:
        shape = list(open_(self.blocks).get_shape())
        if len(shape) != 4 or shape[-1] != 16 or {open_(n).get_dtype() for n in self.sources} != {"U8"}:
            raise ConfigError(
                f"{self.blocks}: has shape {shape}, blocks of MXFP4 are bytes [experts, rows, groups, 16]"
            )
        if list(open_(self.blocks).get_shape()[:-1]) != list(open_(self.scale).get_shape()):
            raise ConfigError(f"{self.scale}: has shape {list(open_(self.scale).get_shape())}, one per block is needed")

    def read(self, open_: Slice, axis: int, start: int, stop: int, slab: int | None) -> torch.Tensor:
        if slab is None:
            slabs = [self.read(open_, 0, 0, self.shape(open_)[1], e) for e in range(self.shape(open_)[0])]
            return torch.stack(slabs).narrow(axis, start, stop - start)
        blocks, exponents = open_(self.blocks)[slab], open_(self.scale)[slab]
        if axis == 1:
            blocks, exponents = blocks[start:stop], exponents[start:stop]
        numbers = torch.stack([_FP4[(blocks & 15).long()], _FP4[(blocks >> 4).long()]], dim=-1)
        values = torch.ldexp(numbers.flatten(-2), exponents.to(torch.int32).unsqueeze(-1) - 127)
        whole = values.flatten(-2).to(torch.bfloat16).T
        return whole if axis == 1 else whole[start:stop]


Quantised = BlockFp8 | Mxfp4


def find(names: Iterable[str], config: dict[str, Any], where: str) -> dict[str, Quantised]:
    """The quantised tensors among a file's `names`, by the name of the tensor that they stand for.

    config: the folder's config.json. Raises ConfigError for a way of quantising that is not read.
    """
    have, settings = set(names), config.get("quantization_config") or {}
    method = settings.get("quant_method")
    if method is not None and method not in _KNOWN:
        raise ConfigError(f"{where}: weights quantised with {method!r} are not read, only {', '.join(sorted(_KNOWN))}")
    block = tuple(settings.get("weight_block_size") or (128, 128))
    found: dict[str, Quantised] = {}
    for name in have:
        if name.endswith("_scale_inv") and name.removesuffix("_scale_inv") in have:
            found[name.removesuffix("_scale_inv")] = BlockFp8(name.removesuffix("_scale_inv"), name, block)
        elif name.endswith("_blocks") and name.removesuffix("_blocks") + "_scales" in have:
            base = name.removesuffix("_blocks")
            found[base] = Mxfp4(base, name, base + "_scales")
    return found


def check_scaled(found: Mapping[str, Quantised], names: Iterable[str], open_: Slice) -> None:
    """Raises ConfigError when quantised tensors are not as they must be, or one lacks its factors: its numbers alone
    would be read without a word."""
    for view in found.values():
        view.check(open_)
    for name in names:
        if name not in found and open_(name).get_dtype() in _FLOAT8:
            raise ConfigError(f"{name}: is {open_(name).get_dtype()}, and its factors ({name}_scale_inv) are missing")


def without_quantisation(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json for weights that were read through this module and written as they are."""
    return {key: value for key, value in config.items() if key != "quantization_config"}
