"""Saving a running Megatron model as a complete Hugging Face folder."""

import itertools
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.config.hf_config import HFConfig
from slime.models.families import model_table
from slime.models.hf_files import (
    FILE_BYTES,
    SafetensorsWriter,
    copy_side_files,
    file_name,
    hf_dtypes,
    plan_files,
    replace_folder,
    write_index,
)
from slime.models.live import exported_shapes, iter_hf_weights, model_ranks, unwrap


def save_hf(
    model_chunks: Sequence[torch.nn.Module], folder: str | Path, hf_config: HFConfig, args: Any,
    *, dtype: torch.dtype | None = None, max_file_bytes: int = FILE_BYTES,
) -> None:  # fmt: skip
    """Writes a complete Hugging Face folder: weights, index, and config and tokenizer files of --hf-checkpoint.

    Collective over all ranks. Each pipeline stage writes files of its own (the folder must be visible to all nodes),
    one tensor in memory at a time. `folder` appears only when complete; an existing one is replaced. dtype None: the
    model's. Raises on every rank when any rank fails.
    """
    table, ranks = model_table(hf_config, args), model_ranks()
    dtype = dtype or next(unwrap(model_chunks[0]).parameters()).dtype
    target = Path(folder)
    partial = target.with_name(target.name + ".partial")
    first = dist.get_rank() == 0

    def prepare() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        copy_side_files(Path(args.hf_checkpoint), partial, dtype)

    _together(prepare if first else None)
    shapes = exported_shapes(model_chunks, table, ranks) if ranks.is_source else {}
    dtypes = hf_dtypes(table, dtype)
    mine = plan_files(shapes, dtypes, max_file_bytes)
    plans: list[Any] = [None] * dist.get_world_size()
    nbytes = sum(math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items())
    dist.all_gather_object(plans, (len(mine), nbytes))
    total = sum(count for count, _ in plans)
    number = sum(count for count, _ in plans[: dist.get_rank()])
    files = [file_name(number + i + 1, total) for i in range(len(mine))]

    def write() -> None:
        weights = iter_hf_weights(model_chunks, hf_config, args)
        fault: Exception | None = None
        for file, names in zip(files, mine, strict=True):
            writer = None
            for name, tensor in itertools.islice(weights, len(names)):
                try:
                    writer = writer or SafetensorsWriter(partial / file, {n: shapes[n] for n in names}, dtypes)
                    fault or writer.add(name, tensor)
                except (OSError, ValueError) as error:
                    fault = fault or error  # keep taking part in the gathers, so that nobody waits for ever
        for _ in weights:
            pass
        if fault:
            raise fault

    try:
        _together(write)
    except Exception:
        if first:
            shutil.rmtree(partial, ignore_errors=True)  # makes room where the disk is full
        raise
    maps: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(maps, {name: file for file, names in zip(files, mine, strict=True) for name in names})

    def finish() -> None:
        where = {name: file for part in maps for name, file in part.items()}
        missing = table.hf_shapes().keys() - where.keys()
        if missing:
            raise ValueError(f"{folder}: no rank wrote {', '.join(sorted(missing)[:5])}")
        if total > 1:
            write_index(partial, where, sum(nbytes for _, nbytes in plans))
        replace_folder(partial, target)

    _together(finish if first else None)


def _together(work: Callable[[], None] | None) -> None:
    """Runs `work` here, waits for all ranks, and raises on all of them what any raised."""
    fault: Exception | None = None
    if work is not None:
        try:
            work()
        except Exception as error:
            fault = error
    faults: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, repr(fault) if fault else None)
    if fault:
        raise fault
    other = next((f"rank {rank}: {text}" for rank, text in enumerate(faults) if text), None)
    if other:
        raise RuntimeError(other)
