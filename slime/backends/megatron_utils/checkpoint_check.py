"""Whether a checkpoint is whole, of this model, and made of numbers: asked on every rank before and after it is read.

What can be known without a model is asked earlier, before anything starts (`slime.utils.resume`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from slime.config.errors import ConfigError
from slime.models.check import count_non_finite
from slime.utils.checkpoint_folder import check_digests, check_sizes, read_manifest

_SHOWN = 20


def check_files(path: Path) -> None:
    """Compares all files with the manifest, each rank a share. Raises ConfigError on every rank. Collective."""
    manifest = read_manifest(path)
    if manifest is None:
        return  # Megatron-LM's own

    def faults() -> Iterator[str]:
        check_sizes(path, manifest)
        check_digests(path, manifest, sorted(manifest.files)[dist.get_rank() :: dist.get_world_size()])
        return iter(())

    on_all_ranks(faults)


def check_fits(path: Path, model: Mapping[str, Any]) -> None:
    """Compares names and shapes of a checkpoint with those of this rank's model, before anything is read.

    model: its sharded state dicts by chunk. Raises ConfigError on every rank. Collective.
    """

    def faults() -> Iterator[str]:
        try:
            entries = FileSystemReader(path).read_metadata().state_dict_metadata
        except Exception as error:  # what pickle raises of a damaged file can be anything
            raise ConfigError(f"checkpoint {path}: .metadata cannot be read ({error!r}); take another") from None
        for part in _tensors(value for state in model.values() for value in state.values()):
            entry = entries.get(part.key)
            if not isinstance(entry, TensorStorageMetadata):
                yield f"{part.key} {list(part.global_shape)}: missing"
            elif tuple(entry.size) != tuple(part.global_shape) and not part.allow_shape_mismatch:
                yield f"{part.key}: the model has {list(part.global_shape)}, the checkpoint {list(entry.size)}"

    on_all_ranks(faults, f"checkpoint {path} is of another model than --hf-checkpoint:")


def check_finite(path: Path, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ConfigError on every rank when a tensor holds NaN or infinity, one line per tensor. Collective.

    named: (name, what this rank holds of it).
    """

    def faults() -> Iterator[str]:
        for name, tensor in named:
            if bad := count_non_finite(tensor):
                yield f"{name}: {bad} of {tensor.numel()} numbers are NaN or infinite"

    on_all_ranks(faults, f"checkpoint {path}: broken weights, take another checkpoint:")


def on_all_ranks(faults: Callable[[], Iterable[str]], title: str = "") -> None:
    """Raises the same ConfigError on all ranks when any has faults, or raises one itself. Collective."""
    try:
        mine = (title, list(faults()))
    except (ConfigError, OSError) as error:
        mine = ("", [str(error)])
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    title = next((of_rank[0] for of_rank in everyone if of_rank[1]), "")
    lines = list(dict.fromkeys(line for _, of_rank in everyone for line in of_rank))
    if lines:
        more = [f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        raise ConfigError("\n  ".join([*([title] if title else []), *lines[:_SHOWN], *more]))


def _tensors(values: Iterable[Any]) -> Iterator[ShardedTensor]:
    for value in values:
        if isinstance(value, ShardedTensorFactory):
            yield from _tensors(value.build())
        elif isinstance(value, ShardedTensor):
            yield value
