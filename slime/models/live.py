"""A running Megatron model as Hugging Face tensors: loading a folder into it, reading tensors out of it.

Every rank handles only what it holds. Layouts need no arithmetic here: a layer knows its global number, and the rest
follows from the declaration (`slime/models/<family>.py`).
"""

import itertools
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.config.errors import raise_faults
from slime.config.hf_config import HFConfig
from slime.models.check import check_folder, count_non_finite
from slime.models.families import model_table
from slime.models.hf_files import HFFolder, row_reader
from slime.models.rows import Pieces, Stack
from slime.models.table import Bound, WeightTable
from slime.utils.misc import batched_by_size


@dataclass(frozen=True)
class Ranks:
    """This rank in its pipeline stage. tp: tensor, etp: expert tensor, ep: expert parallel.

    is_source: the one rank of the stage that receives whole tensors. in_dense, in_expert: whether this rank takes part
    in gathering dense, or expert, parameters (one replica of each does).
    """

    tp: int
    tp_rank: int
    etp: int
    etp_rank: int
    ep: int
    ep_rank: int
    in_dense: bool
    in_expert: bool
    dense_group: Any
    expert_group: Any

    @property
    def is_source(self) -> bool:
        return self.in_dense and self.tp_rank == 0


def model_ranks() -> Ranks:
    """From Megatron's parallel state."""
    from megatron.core import parallel_state as mpu  # the model exists, so Megatron is loaded and adapted

    return Ranks(
        tp=mpu.get_tensor_model_parallel_world_size(),
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        etp=mpu.get_expert_tensor_parallel_world_size(),
        etp_rank=mpu.get_expert_tensor_parallel_rank(),
        ep=mpu.get_expert_model_parallel_world_size(),
        ep_rank=mpu.get_expert_model_parallel_rank(),
        in_dense=mpu.get_data_parallel_rank(with_context_parallel=True) == 0,
        in_expert=mpu.get_expert_data_parallel_rank() == 0,
        dense_group=mpu.get_tensor_model_parallel_group(),
        expert_group=mpu.get_expert_tensor_and_model_parallel_group(),
    )


def pipeline_stage() -> tuple[int, int]:
    """(this rank's pipeline stage, how many there are)."""
    from megatron.core import parallel_state as mpu

    return mpu.get_pipeline_model_parallel_rank(), mpu.get_pipeline_model_parallel_world_size()


_BUFFERS = ("router.expert_bias",)  # what is no parameter and yet comes from the file


@dataclass(frozen=True)
class LiveParam:
    """A parameter of the running model and its declaration. tensor: this rank's shard."""

    bound: Bound
    tensor: torch.Tensor


def live_params(
    model_chunks: Sequence[torch.nn.Module], table: WeightTable, ranks: Ranks, skip: Container[str] = ()
) -> list[LiveParam]:
    """All parameters of this rank, and buffers that are part of the model (the router's expert bias).

    skip: Megatron names that the declaration does not know (a value head).

    Raises KeyError for a parameter without declaration, ValueError for a declared one that a layer lacks.
    """
    out = []
    for chunk in model_chunks:
        model = unwrap(chunk)
        numbers = _layer_numbers(model)
        names: dict[int, set[str]] = {layer: set() for layer in numbers.values()}
        buffers = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(_BUFFERS)]
        for local_name, tensor in itertools.chain(model.named_parameters(), buffers):
            if local_name in skip:
                continue
            bound = _global(local_name, numbers, table, ranks)
            tp = ranks.etp if bound.param.expert else ranks.tp
            out.append(LiveParam(bound.fitting(tensor.shape) if tp > 1 else bound, tensor.data))
            if bound.layer is not None:
                names[bound.layer].add(bound.name)
        for layer, have in names.items():
            want = {e.name for e in table.layer_entries(layer) if e.expert is None or _is_mine(e.expert, table, ranks)}
            if want - have:
                raise ValueError(f"the model's layer {layer} lacks {', '.join(sorted(want - have))}")
    return out


def unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    while isinstance(getattr(chunk, "module", None), torch.nn.Module):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


def _layer_numbers(model: torch.nn.Module) -> dict[str, int]:
    """Global layer number (from 0) by the module's name, as "decoder.layers.0"."""
    found = {}
    for name, module in model.named_modules():
        if name.startswith("decoder.layers.") and name.count(".") == 2:
            found[name] = int(module.layer_number) - 1  # type: ignore[arg-type]
    return found


def _experts_per_rank(table: WeightTable, ranks: Ranks) -> int:
    return (table.config.num_experts or 0) // ranks.ep


def _is_mine(expert: int, table: WeightTable, ranks: Ranks) -> bool:
    return expert // _experts_per_rank(table, ranks) == ranks.ep_rank


def _global(local_name: str, numbers: dict[str, int], table: WeightTable, ranks: Ranks) -> Bound:
    """The declaration of a parameter, from its name with local numbers of layer and expert."""
    parts = local_name.split(".")
    layer = numbers.get(".".join(parts[:3]))
    if layer is not None:
        parts[2] = str(layer)
    bound = table.find(".".join(parts))
    if bound.expert is not None:
        bound = bound.with_expert(bound.expert + ranks.ep_rank * _experts_per_rank(table, ranks))
    return bound


def load_hf_into(
    model_chunks: Sequence[torch.nn.Module], hf_folder: str | Path, hf_config: HFConfig, args: Any,
    *, skip: Container[str] = (),
) -> None:  # fmt: skip
    """Fills the model from a Hugging Face folder, whatever the layout; each rank reads only the rows it holds.

    model_chunks: of this rank, bare or wrapped. Tensors are cast to the parameters' dtype. skip: Megatron names to
    leave alone (a value head). No communication. An optimizer that already holds float32 copies must reload them.
    Raises ConfigError, listing every difference, when folder and config.json disagree.
    """
    table = model_table(hf_config, args)
    folder = HFFolder(hf_folder)
    check_folder(table, folder)
    ranks, faults = model_ranks(), []
    for live in live_params(model_chunks, table, ranks, skip):
        bound, param = live.bound, live.bound.param
        tp, rank = (ranks.etp, ranks.etp_rank) if param.expert else (ranks.tp, ranks.tp_rank)
        param.load(live.tensor, tp, rank, row_reader(folder, bound))
        if bad := count_non_finite(live.tensor):
            faults.append(f"{' + '.join(bound.hf_names)}: {bad} of {live.tensor.numel()} numbers are NaN or infinite")
    raise_faults(faults, f"{hf_folder}: broken weights")


def exported_shapes(
    model_chunks: Sequence[torch.nn.Module], table: WeightTable, ranks: Ranks
) -> dict[str, tuple[int, ...]]:
    """Name and shape of what `iter_hf_weights` yields on this stage's source, in its order."""
    shapes: dict[str, tuple[int, ...]] = {}
    for live in live_params(model_chunks, table, ranks):
        if live.bound.param.exported:
            for bound in _siblings(live.bound, table, ranks):
                for name, tensor in zip(bound.hf_names, bound.param.hf, strict=True):
                    shapes.pop(name, None)  # a stack of experts comes when its last one does
                    shapes[name] = tensor.file_shape
    return shapes


def _siblings(bound: Bound, table: WeightTable, ranks: Ranks) -> list[Bound]:
    """The same parameter of every expert-parallel rank; itself alone for a dense one."""
    if bound.expert is None:
        return [bound]
    each = _experts_per_rank(table, ranks)
    return [bound.with_expert(bound.expert % each + ep_rank * each) for ep_rank in range(ranks.ep)]


def iter_hf_weights(
    model_chunks: Sequence[torch.nn.Module], hf_config: HFConfig, args: Any, *, dtype: torch.dtype | None = None,
    batch_bytes: int = 256 * 1024**2,
) -> Iterator[tuple[str, torch.Tensor]]:  # fmt: skip
    """(Hugging Face name, full tensor) of this pipeline stage, on the stage's source rank; other ranks get nothing.

    Collective over the stage: every rank must run it to the end. Tensors are without vocabulary padding, in `dtype`
    (None: the model's own), on the model's device; they may be views of the parameters, so do not keep or change them.
    batch_bytes: size of one gather; bounds the extra memory to that times the tensor-parallel size.
    """
    for batch in iter_hf_batches(model_chunks, hf_config, args, batch_bytes=batch_bytes):
        for name, pieces in batch:
            yield name, pieces.whole() if dtype is None else pieces.whole().to(dtype)


def iter_hf_batches(
    model_chunks: Sequence[torch.nn.Module], hf_config: HFConfig, args: Any, *, batch_bytes: int
) -> Iterator[list[tuple[str, Pieces | Stack]]]:
    """The same in pieces, one gather at a time: all ranks of the stage step together, all but its source with []."""
    table, ranks = model_table(hf_config, args), model_ranks()
    params = [live for live in live_params(model_chunks, table, ranks) if live.bound.param.exported]
    stacks = Stacks()
    for batch in _batches(params, batch_bytes):
        expert = batch[0].bound.param.expert
        if not (ranks.in_expert if expert else ranks.in_dense):
            yield []
            continue
        group, size = (ranks.expert_group, ranks.etp * ranks.ep) if expert else (ranks.dense_group, ranks.tp)
        gathered = iter(_gather([live.tensor for live in batch if live.bound.param.form.cut or expert], group, size))
        out: list[tuple[str, Pieces | Stack]] = []
        for live in batch if ranks.is_source else []:
            shards = next(gathered) if live.bound.param.form.cut or expert else [live.tensor] * size
            tp = ranks.etp if expert else ranks.tp
            for number, bound in enumerate(_siblings(live.bound, table, ranks)):
                out += stacks.add(bound, bound.param.unload(shards[number * tp : (number + 1) * tp]))
        yield out


class Stacks:
    """Collects the experts of tensors that the file keeps in one piece."""

    def __init__(self) -> None:
        self._found: dict[str, dict[int, Pieces]] = {}

    def add(self, bound: Bound, sources: Sequence[Pieces]) -> list[tuple[str, Pieces | Stack]]:
        """What a parameter was made of; of stacked tensors those that are complete with it."""
        out: list[tuple[str, Pieces | Stack]] = []
        for name, tensor, pieces in zip(bound.hf_names, bound.param.hf, sources, strict=True):
            if tensor.stacked is None:
                out.append((name, pieces))
                continue
            assert bound.expert is not None
            found = self._found.setdefault(name, {})
            found[bound.expert] = pieces
            if len(found) == tensor.stacked:
                del self._found[name]
                out.append((name, Stack(tuple(found[e] for e in range(tensor.stacked)), tensor.transposed)))
        return out


def _batches(params: Sequence[LiveParam], batch_bytes: int) -> Iterator[list[LiveParam]]:
    """Runs of parameters of one dtype and kind, up to `batch_bytes`; the same on every rank of the stage."""
    kind = lambda live: (live.bound.param.expert, live.tensor.dtype)  # noqa: E731
    for _, run in itertools.groupby(params, kind):
        yield from batched_by_size(run, lambda live: live.tensor.nbytes, batch_bytes)


def _gather(tensors: list[torch.Tensor], group: Any, size: int) -> list[list[torch.Tensor]]:
    """Each tensor's shards of all ranks of the group, on its first rank; nothing elsewhere. One collective for all."""
    if size == 1 or not tensors:
        return [[tensor] for tensor in tensors]
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    root = dist.get_process_group_ranks(group)[0]
    buffers = [torch.empty_like(flat) for _ in range(size)] if dist.get_rank() == root else None
    dist.gather(flat, buffers, dst=root, group=group)
    if buffers is None:
        return []
    sizes = [tensor.numel() for tensor in tensors]
    pieces = [buffer.split(sizes) for buffer in buffers]
    return [[rank[i].view(tensor.shape) for rank in pieces] for i, tensor in enumerate(tensors)]
