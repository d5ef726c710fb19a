"""What a conversion would do and what does not fit, in lines of text. Reads headers only."""

import math
from collections.abc import Iterable, Iterator, Sequence

from slime.backends.megatron_utils.convert.reader import CheckpointReader
from slime.backends.megatron_utils.convert.regions import Structure
from slime.backends.megatron_utils.convert.to_hf import Layout
from slime.backends.megatron_utils.convert.to_megatron import Shard
from slime.config.errors import raise_faults
from slime.models.check import compare_fields, left_out
from slime.models.hf_files import HFFolder
from slime.models.table import Bound, WeightTable

# Of a training checkpoint, what is no weight.
_NOT_WEIGHTS = ("optimizer.", "rng", "chained_")


def plan_lines(shards: Sequence[Shard]) -> Iterable[str]:
    """One line per parameter: its shards and the tensors they come from."""
    counts: dict[str, int] = {}
    for shard in shards:
        counts[shard.bound.name] = counts.get(shard.bound.name, 0) + 1
    for shard in shards:
        if not shard.rank:
            count, total = counts[shard.bound.name], counts[shard.bound.name] * shard.nbytes
            yield f"{shard.bound.name} {list(shard.shape)} x {count} = {_sources(shard.bound)}, {total:,} bytes"


def _sources(bound: Bound) -> str:
    parts = []
    for name, tensor in zip(bound.hf_names, bound.param.hf, strict=True):
        expert = "" if tensor.stacked is None else f"[{bound.expert}]"
        parts.append(f"{name}{expert} {list(tensor.shape)}{' transposed' if tensor.transposed else ''}")
    return " + ".join(parts)


def hf_lines(table: WeightTable, folder: HFFolder) -> Iterator[str]:
    """What a folder that fits holds."""
    for field in compare_fields(table, folder):
        yield f"{field.name}: {field.config}" + ("" if field.weights is None else ", as the weights say")
    ignored = left_out(table, folder.names)
    if ignored:
        yield f"left out, {len(ignored)} tensors that training does not use: {', '.join(ignored[:3])}" + (
            ", ..." if len(ignored) > 3 else ""
        )
    if folder.quantised:
        yield f"{len(folder.quantised)} quantised tensors are read as bfloat16"
    dtypes = {str(folder.dtype(name)).removeprefix("torch.") for name in folder.names}
    tensors = table.hf_tensors().values()
    count = sum(math.prod(tensor.file_shape) for tensor in tensors)
    yield f"{table.config.model_type}: {len(tensors)} tensors, {count:,} parameters ({', '.join(sorted(dtypes))})"
    yield f"{folder.folder}: agrees with its config.json; {folder.nbytes():,} bytes"


def file_lines(structure: Structure, layout: Layout) -> Iterator[str]:
    """One line per tensor of the Hugging Face folder to come."""
    for param in structure.exported:
        for name, tensor in zip(param.bound.hf_names, param.bound.param.hf, strict=True):
            if tensor.stacked is None or param.bound.expert == 0:
                place = layout.places[name]
                nbytes = place.slab_bytes * (tensor.stacked or 1)
                key = param.regions[0].key
                yield f"{name} {list(tensor.file_shape)} = {key}, {nbytes:,} bytes in {place.file}"


def check_checkpoint(structure: Structure, reader: CheckpointReader) -> None:
    """Raises one ConfigError that lists where a checkpoint is not of the model that the structure is of."""
    raise_faults(
        _faults(structure, reader), f"{reader.folder}: the checkpoint and config.json of --hf-checkpoint disagree"
    )


def _faults(structure: Structure, reader: CheckpointReader) -> Iterator[str]:
    have, known = reader.tensors, set()
    padded = {param.regions[0].key for param in structure.params if _is_vocabulary(param.bound)}
    for param in structure.params:
        for region in param.regions:
            if region.key in known:
                continue
            known.add(region.key)
            if region.key not in have:
                yield f"{region.key} {list(region.shape)}: missing"
                continue
            size = tuple(have[region.key].size)
            wide = region.key in padded and size[0] >= region.shape[0] and size[1:] == region.shape[1:]
            if size != region.shape and not wide:
                yield f"{region.key}: config.json gives {list(region.shape)}, the checkpoint has {list(size)}"
    for key in have:
        if key not in known and not key.startswith(_NOT_WEIGHTS):
            yield f"{key} {list(have[key].size)}: not a parameter of this model"


def _is_vocabulary(bound: Bound) -> bool:
    return bound.layer is None and "layernorm" not in bound.name
