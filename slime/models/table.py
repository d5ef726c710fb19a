"""`WeightTable`: the declaration of one model, looked up by Megatron's or by Hugging Face's names."""

import dataclasses
import functools
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import torch

from slime.config.hf_config import HFConfig
from slime.models.rows import Form, Pieces, ReadRows, Rows, fill, merge


@dataclass(frozen=True)
class HFTensor:
    """One tensor of a Hugging Face file. name: with {layer} and {expert} where it has them.

    shape: with output rows first, of one expert where the file stacks them. stacked: how many experts lie in the file's
    tensor, along a first dimension of their own; None: it is not stacked. transposed: the file has input rows first.
    float32: stays float32 whatever the model's dtype.
    """

    name: str
    shape: tuple[int, ...]
    stacked: int | None = None
    transposed: bool = False
    float32: bool = False

    @property
    def file_shape(self) -> tuple[int, ...]:
        shape = self.shape[::-1] if self.transposed else self.shape
        return shape if self.stacked is None else (self.stacked, *shape)


@dataclass(frozen=True)
class Param:
    """One Megatron parameter: its names, the Hugging Face tensors it is made of, and how.

    megatron: the local spec's name, then Transformer Engine's where that differs. Numbers of layers and experts in it
    are global. layers: which layers have it; None: all, or no layer at all.
    exported: False for a second copy of a tensor that another parameter already writes (tied head).
    expert: cut over the expert-tensor-parallel ranks instead of the tensor-parallel ones.
    maybe_whole: some specs keep it whole on every rank although `form` cuts it; the shape of a shard says which.
    """

    megatron: tuple[str, ...]
    hf: tuple[HFTensor, ...]
    form: Form
    layers: Container[int] | None = None
    exported: bool = True
    expert: bool = False
    maybe_whole: bool = False

    def fitting(self, shape: Sequence[int]) -> "Param":
        """This parameter as a model has it whose shard is of `shape`."""
        if self.maybe_whole and self.form.cut and tuple(shape) == self.shard_shape(1, 0):
            return dataclasses.replace(self, form=dataclasses.replace(self.form, cut=False))
        return self

    @property
    def sizes(self) -> list[int]:
        return [tensor.shape[self.form.axis] for tensor in self.hf]

    @functools.lru_cache(maxsize=64)  # noqa: B019  the few instances live as long as the process
    def shards(self, tp: int) -> list[Rows]:
        """Rows per rank. Raises ValueError, naming the parameter, when the layout does not fit."""
        try:
            return self.form.shards(self.sizes, tp)
        except ValueError as error:
            raise ValueError(f"{self.megatron[0]} over {tp} tensor-parallel ranks: {error}") from None

    def shard_shape(self, tp: int, rank: int) -> tuple[int, ...]:
        shape, axis = self.hf[0].shape, self.form.axis
        rows = sum(len(run) for run in self.shards(tp)[rank])
        return (*shape[:axis], rows, *shape[axis + 1 :])

    def load(self, out: torch.Tensor, tp: int, rank: int, read: ReadRows) -> None:
        """Fills the shard `out` of `rank`. read(source, start, stop): rows of a source tensor along `form.axis`."""
        want = self.shard_shape(tp, rank)
        if tuple(out.shape) != want:
            have = tuple(out.shape)
            raise ValueError(f"{self.megatron[0]}: rank {rank} of {tp} has shape {have}, config.json gives {want}")
        fill(out, self.shards(tp)[rank], self.form.axis, read)

    def unload(self, shards: Sequence[torch.Tensor]) -> list[Pieces]:
        """The Hugging Face tensors out of all ranks' shards (or any one rank's, when the parameter is not cut)."""
        tp = len(shards)
        if not self.form.cut:
            return merge(shards[:1], self.shards(tp)[:1], self.form.axis, self.sizes)
        return merge(shards, self.shards(tp), self.form.axis, self.sizes)


@dataclass(frozen=True)
class Bound:
    """A parameter of one layer (and expert). name: Megatron's local name; hf_names: of its sources."""

    param: Param
    name: str
    hf_names: tuple[str, ...]
    layer: int | None = None
    expert: int | None = None

    def fitting(self, shape: Sequence[int]) -> "Bound":
        """See `Param.fitting`."""
        return dataclasses.replace(self, param=self.param.fitting(shape)) if self.param.maybe_whole else self

    def with_expert(self, expert: int) -> "Bound":
        """The same parameter of another expert."""
        return _bind(self.param, self.layer, expert)


class WeightTable:
    """All parameters of one model. `params` in the order of the Hugging Face file."""

    def __init__(self, config: HFConfig, params: Sequence[Param]):
        self.config = config
        self.params = tuple(params)
        self._patterns = [(_pattern(name), param) for param in self.params for name in param.megatron]
        self._found: dict[str, Bound] = {}

    def find(self, megatron_name: str) -> Bound:
        """The entry of a parameter by either of its Megatron names, with global numbers. Raises KeyError if unknown."""
        if megatron_name not in self._found:
            self._found[megatron_name] = self._find(megatron_name)
        return self._found[megatron_name]

    def _find(self, megatron_name: str) -> Bound:
        for pattern, param in self._patterns:
            match = pattern.fullmatch(megatron_name)
            if match is None:
                continue
            numbers = {key: int(value) for key, value in match.groupdict().items()}
            if param.layers is None or numbers["layer"] in param.layers:
                return _bind(param, numbers.get("layer"), numbers.get("expert"))
        raise KeyError(
            f"{megatron_name}: the declaration of {self.config.model_type!r} (slime/models) has no such parameter"
        )

    def entries(self) -> Iterator[Bound]:
        """Everything, layer by layer: what comes before the layers, the layers, what comes after them."""
        inside = [param for param in self.params if "{layer}" in param.megatron[0]]
        first = self.params.index(inside[0]) if inside else len(self.params)
        for param in self.params[:first]:
            yield _bind(param, None, None)
        for layer in range(self.config.num_layers):
            yield from self.layer_entries(layer)
        for param in self.params[first:]:
            if param not in inside:
                yield _bind(param, None, None)

    def layer_entries(self, layer: int) -> Iterator[Bound]:
        for param in self.params:
            if "{layer}" not in param.megatron[0] or (param.layers is not None and layer not in param.layers):
                continue
            if "{expert}" in param.megatron[0]:
                yield from (_bind(param, layer, expert) for expert in range(self.config.num_experts or 0))
            else:
                yield _bind(param, layer, None)

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that a Hugging Face folder of this model holds, in file order."""
        return {name: tensor.file_shape for name, tensor in self.hf_tensors().items()}

    def hf_tensors(self) -> dict[str, HFTensor]:
        """The tensors of a Hugging Face folder of this model by their full names, in file order."""
        return {
            name: tensor
            for entry in self.entries()
            if entry.param.exported
            for name, tensor in zip(entry.hf_names, entry.param.hf, strict=True)
        }


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(
        re.escape(template).replace(r"\{layer\}", r"(?P<layer>\d+)").replace(r"\{expert\}", r"(?P<expert>\d+)")
    )


def _bind(param: Param, layer: int | None, expert: int | None) -> Bound:
    def named(template: str) -> str:
        return template.replace("{layer}", str(layer)).replace("{expert}", str(expert))

    return Bound(param, named(param.megatron[0]), tuple(named(tensor.name) for tensor in param.hf), layer, expert)
