"""A config.json and a folder's weights compared: field by field, then tensor by tensor."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slime.config.errors import ConfigError, raise_faults
from slime.models.hf_files import HFFolder
from slime.models.table import WeightTable

# Not weights: tables that older checkpoints saved and that the model computes itself.
_COMPUTED = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Field:
    """config: what config.json says; weights: what the tensors say, or None when they do not tell."""

    name: str
    config: Any
    weights: Any

    @property
    def agrees(self) -> bool:
        return self.weights is None or self.weights == self.config

    def __str__(self) -> str:
        return f"{self.name}: config.json says {self.config}, the weights say {self.weights}"


def left_out(table: WeightTable, names: Iterable[str]) -> list[str]:
    """Tensors of a folder that a model of this config.json does not use: computed ones, layers behind the last."""
    behind = table.config.num_layers + int(table.config.raw.get("num_nextn_predict_layers") or 0)
    extra = {str(layer) for layer in range(table.config.num_layers, behind)}
    return [n for n in names if n.endswith(_COMPUTED) or ((m := _LAYER.match(n)) and m[1] in extra)]


def check_folder(table: WeightTable, folder: HFFolder) -> None:
    """Compares the folder with config.json and the declaration. Raises one ConfigError that lists all differences."""
    if fault := other_architecture(table, folder):
        raise ConfigError(fault)
    want = table.hf_shapes()
    optional = {"lm_head.weight"} if table.config.tie_word_embeddings else set()
    faults = []
    have = set(folder.names)
    for name, shape in want.items():
        if name not in have:
            faults.append(f"{name} {list(shape)}: missing")
        elif folder.shape(name) != shape:
            faults.append(f"{name}: config.json gives {list(shape)}, the file has {list(folder.shape(name))}")
    optional.update(left_out(table, folder.names))
    for name in folder.names:
        if name not in want and name not in optional:
            faults.append(
                f"{name} {list(folder.shape(name))}: not a tensor of a {table.config.model_type} with this config.json"
            )
    if faults:
        fields = [str(field) for field in compare_fields(table, folder) if not field.agrees]
        what = f"{folder.folder}: config.json and weights disagree in {len(faults)} tensors"
        raise_faults(fields + faults, what)
    if fault := untied_head(table, folder):
        raise ConfigError(fault)


def compare_fields(table: WeightTable, folder: HFFolder) -> list[Field]:
    """The fields that shapes and names of tensors determine. Reads headers only."""
    return list(_fields(table, folder))


def _fields(table: WeightTable, folder: HFFolder) -> Iterator[Field]:
    c, ignored = table.config, set(left_out(table, folder.names))
    names = [name for name in folder.names if name not in ignored]

    def rows(ending: str, axis: int = 0) -> int | None:
        found = next((n for n in names if n.endswith(ending)), None)
        return None if found is None else folder.shape(found)[axis]

    def numbers(pattern: re.Pattern[str]) -> int | None:
        found = [int(m[1]) for name in names if (m := pattern.search(name))]
        return 1 + max(found) if found else None

    yield Field("num_hidden_layers", c.num_layers, numbers(_LAYER))
    yield Field("vocab_size", c.vocab_size, rows(_EMBEDDING))
    yield Field("hidden_size", c.hidden_size, rows(_EMBEDDING, 1))
    if c.latent is None:
        yield Field("num_attention_heads x head_dim", c.num_attention_heads * c.head_dim, rows(".q_proj.weight"))
        yield Field("num_key_value_heads x head_dim", c.num_key_value_heads * c.head_dim, rows(".k_proj.weight"))
        yield Field("attention_bias", c.attention_bias, any(n.endswith(".q_proj.bias") for n in names))
    else:
        yield Field("q_lora_rank", c.latent.q_rank, rows(".q_a_proj.weight"))
        yield Field("kv_lora_rank", c.latent.kv_rank, rows(".kv_a_layernorm.weight"))
    if c.dense_layers:
        yield Field("intermediate_size", c.intermediate_size, rows(".mlp.down_proj.weight", 1))
    yield Field("number of experts", c.num_experts, numbers(_EXPERT))
    # A tied model may carry its head all the same.
    head = "lm_head.weight" in names
    yield Field("tie_word_embeddings", c.tie_word_embeddings, c.tie_word_embeddings if head else True)


def other_architecture(table: WeightTable, folder: HFFolder) -> str | None:
    """Why the weights cannot be this model's at all, or None. Numbers of layers and experts do not count."""
    want, have = _kinds(table.hf_shapes()), _kinds(folder.names)
    if len(want & have) >= 0.6 * len(want | have):
        return None
    model, other, missing = table.config.model_type, sorted(have - want)[:3], sorted(want - have)[:3]
    return (
        f"{folder.folder}: these are not the weights of a {model}, as config.json says: they have "
        f"{', '.join(other) or 'nothing else'}, and lack {', '.join(missing)}"
    )


def _kinds(names: Iterable[str]) -> set[str]:
    return {re.sub(r"\.\d+\.", ".*.", name) for name in names}


def untied_head(table: WeightTable, folder: HFFolder) -> str | None:
    """Why a tied model's own copy of the head is a fault, or None: it must equal the embedding, which is used."""
    if not table.config.tie_word_embeddings or "lm_head.weight" not in folder.names:
        return None
    if torch.equal(folder.read(_EMBEDDING), folder.read("lm_head.weight")):
        return None
    return (
        f"{folder.folder}: config.json ties the head to the embedding (tie_word_embeddings), but lm_head.weight is "
        f"another tensor than {_EMBEDDING}: one of the two is wrong"
    )


# Bits of an exponent of ones only, which NaN and infinity have, in integers as wide.
_EXPONENTS: dict[torch.dtype, Any] = {
    torch.bfloat16: np.int16(0x7F80),
    torch.float16: np.int16(0x7C00),
    torch.float32: np.int32(0x7F800000),
}
_CACHED = 1 << 16  # numbers at a time


def count_non_finite(tensor: torch.Tensor) -> int:
    """How many numbers are NaN or infinite. By bits and piece by piece, in the cache: a tenth of torch's time."""
    bits = _EXPONENTS.get(tensor.dtype)
    if bits is not None and tensor.is_contiguous() and tensor.device.type == "cpu" and tensor.numel():
        # Not .numpy(), after which a storage can never be resized, as --offload-train does.
        numbers = np.from_dlpack(tensor.detach().reshape(-1).view(torch.uint8)).view(bits.dtype)
        space = np.empty(min(_CACHED, len(numbers)), bits.dtype)
        for start in range(0, len(numbers), _CACHED):
            part = numbers[start : start + _CACHED]
            if np.bitwise_and(part, bits, out=space[: len(part)]).max() == bits:
                break
        else:
            return 0
    return int((~torch.isfinite(tensor)).sum())
