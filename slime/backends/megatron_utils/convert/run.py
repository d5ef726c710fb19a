"""The two conversions from beginning to end: look, plan, write in units, check, and put the result in its place."""

import contextlib
import dataclasses
import functools
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from slime.backends.megatron_utils import checkpoint
from slime.backends.megatron_utils.convert import to_hf, to_megatron, verify
from slime.backends.megatron_utils.convert.reader import CheckpointReader
from slime.backends.megatron_utils.convert.regions import StoredParam, Structure
from slime.backends.megatron_utils.convert.report import check_checkpoint, file_lines, hf_lines, plan_lines
from slime.backends.megatron_utils.convert.stored import checkpoint_structure
from slime.backends.megatron_utils.convert.units import Journal, group, run_units
from slime.backends.megatron_utils.model import build_model
from slime.backends.megatron_utils.parallel import destroy_parallel, init_parallel
from slime.config.args import Args
from slime.config.errors import ConfigError, raise_faults
from slime.config.hf_config import HFConfig, check_same_model, load_hf_config, parse_hf_config
from slime.config.layout import share_faults
from slime.models import HFFolder, check_folder, model_table
from slime.models.hf_files import FILE_BYTES, copy_side_files, hf_dtypes, replace_folder
from slime.models.table import WeightTable
from slime.utils.checkpoint_folder import commit, describe, files_in, latest_checkpoint, partial_folder, read_manifest
from slime.utils.net import free_port


@dataclasses.dataclass(frozen=True)
class Job:
    """What to convert. hf_folder: whose config.json, and tokenizer, count. dtype None: as the input has it.

    tp, pp, ep, etp: the layout that a checkpoint's files are cut for (it loads under any other too); processes: that
    share the work.
    """

    input: Path
    output: Path | None
    hf_folder: Path
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    vocab_multiple: int = 1
    dtype: str | None = None
    verify: bool = False
    dry_run: bool = False
    processes: int = 1

    def args(self, dtype: str) -> Args:
        """Of a trainer with one rank."""
        folder = str(self.hf_folder)
        return Args(hf_checkpoint=folder, params_dtype=dtype, actor_num_gpus_per_node=1, transformer_impl="local")


def convert_to_megatron(job: Job, say: Callable[[str], None]) -> None:
    """Raises ConfigError for input that cannot become a checkpoint, and then leaves nothing that looks like one."""
    hf = load_hf_config(job.hf_folder, "--input")
    if faults := "; ".join(share_faults(hf, job.pp, job.ep)):  # `to_megatron.cut` finds rows that do not divide
        raise ConfigError(faults)
    table, folder = model_table(hf), HFFolder(job.input)
    check_folder(table, folder)
    with one_rank(job, hf, job.dtype or hf.torch_dtype) as args:
        structure = checkpoint_structure(args, hf)
        units = file_units(job, hf, structure)
        lines = plan_lines([shard for unit in units for shard in unit.shards])
        summary = hf_lines(table, folder)
        say("\n".join([*(lines if job.dry_run else ()), *summary]))
        if job.dry_run:
            say(f"a checkpoint in {args.params_dtype}: {len(units)} files, {_bytes(units):,} bytes")
            return
        output = _new_output(job)
        partial = partial_folder(output, 0)
        journal = Journal(output / ".partial_journal", (job.dtype, _fingerprint(job.input), units))
        _start_folder(partial, journal, say)
        nbytes = [sum(shard.nbytes for shard in unit.shards) for unit in units]
        done = run_units(
            to_megatron.start_writer, (str(job.input), str(partial)), units, nbytes, processes=job.processes,
            title="to Megatron", journal=journal, seal=functools.partial(to_megatron.seal, partial),
        )  # fmt: skip
        written = [unit for unit, _ in done]
        raise_faults((line for unit in written for line in unit.faults), f"{job.input}: broken weights, nothing kept")
        to_megatron.finish(partial, structure, units, written)
        files = {unit.file: digest for unit, (_, digest) in zip(units, done, strict=True)}
        files.update({name: describe(partial / name) for name in files_in(partial) if name not in files})
        final = commit(output, 0, files, run={"model": hf.raw}, keep_last=None)
        shutil.rmtree(journal.folder)
        say(f"{output}: written")
        if job.verify:
            _verify(job, args, hf, table, structure, final, job.input, say)


def convert_to_hf(job: Job, say: Callable[[str], None]) -> None:
    """Raises ConfigError for a checkpoint that is not the model's; --output appears only when complete."""
    hf = load_hf_config(job.hf_folder)
    table = model_table(hf)
    found = latest_checkpoint(job.input)
    if found is None:
        raise ConfigError(f"--input {job.input}: there is no Megatron checkpoint in it")
    reader = CheckpointReader(found[0])
    with one_rank(job, hf, hf.torch_dtype) as args:
        structure = checkpoint_structure(args, hf)
        check_checkpoint(structure, reader)
        _check_same_model(hf, found[0])
        stored = reader.tensors[structure.params[0].regions[0].key].properties.dtype
        dtype = getattr(torch, job.dtype) if job.dtype else stored
        layout = to_hf.plan_layout(table, hf_dtypes(table, dtype), FILE_BYTES)
        say("\n".join([*(file_lines(structure, layout) if job.dry_run else ()), *_summary(table, layout)]))
        if job.dry_run:
            return
        output = _new_output(job)
        partial = output.with_name(output.name + ".partial")
        journal = Journal(output.with_name(output.name + ".journal"), (_fingerprint(found[0]), layout))
        _start_folder(partial, journal, say)
        copy_side_files(job.hf_folder, partial, dtype)
        to_hf.prepare(partial, layout)
        faults = _each(
            job,
            structure.exported,
            to_hf.start_writer,
            (str(found[0]), str(partial), layout),
            "to Hugging Face",
            journal,
        )
        raise_faults(faults, f"{found[0]}: broken weights, nothing kept")
        to_hf.finish(partial, layout)
        replace_folder(partial, output)
        shutil.rmtree(journal.folder)
        say(f"{output}: written")
        if job.verify:
            _verify(job, args, hf, table, structure, found[0], output, say)


def _check_same_model(hf: HFConfig, path: Path) -> None:
    """That config.json, which goes with the output, says what the checkpoint's weights were made for."""
    manifest = read_manifest(path)
    if manifest is not None and (model := manifest.run.get("model")):
        check_same_model(hf, parse_hf_config(dict(model), f"{path}/manifest.json"), path)


def file_units(job: Job, hf: HFConfig, structure: Structure) -> list[to_megatron.FileUnit]:
    """Files of the checkpoint: those of a rank of the layout lie together, so that it reads no others."""
    by_rank: dict[tuple[int, int, int], list[to_megatron.Shard]] = {}
    for param in structure.params:
        layer, expert = param.bound.layer, param.bound.expert
        first = "embedding" in param.bound.name
        stage = (0 if first else job.pp - 1) if layer is None else layer * job.pp // hf.num_layers
        ep_rank = 0 if expert is None else expert * job.ep // (hf.num_experts or 1)
        for shard in to_megatron.cut(param, job.tp, job.etp, job.vocab_multiple):
            by_rank.setdefault((stage, shard.rank or 0, ep_rank), []).append(shard)
    groups = [g for _, shards in sorted(by_rank.items()) for g in group(shards, lambda s: s.nbytes, job.processes)]
    return [
        to_megatron.FileUnit(number, tuple(shards), structure.objects if number == 0 else {})
        for number, shards in enumerate(groups)
    ]


def _bytes(units: Sequence[to_megatron.FileUnit]) -> int:
    return sum(shard.nbytes for unit in units for shard in unit.shards)


def _summary(table: WeightTable, layout: to_hf.Layout) -> list[str]:
    size = f"{len(layout.headers)} files, {layout.total_bytes:,} bytes"
    return [f"{table.config.model_type}: {len(layout.places)} tensors in {size}"]


def _new_output(job: Job) -> Path:
    assert job.output is not None
    if job.output.is_file():
        raise ConfigError(f"--output {job.output}: is a file; give a folder to make")
    if job.output.exists() and any(not path.name.startswith(".partial") for path in job.output.iterdir()):
        raise ConfigError(f"--output {job.output}: is not empty; choose another folder or remove it")
    return job.output


def _start_folder(partial: Path, journal: Journal, say: Callable[[str], None]) -> None:
    if journal.resumed and partial.is_dir():
        say(f"{partial}: going on with what an interrupted conversion left ({len(journal.done())} units are done)")
        return
    shutil.rmtree(partial, ignore_errors=True)
    for path in journal.folder.glob("*.pkl"):
        path.unlink()
    partial.mkdir(parents=True)


def _fingerprint(folder: Path) -> list[tuple[str, int, int]]:
    """Files of the input by name, size and time of change: another input starts anew."""
    return sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in folder.iterdir() if p.is_file())


@contextlib.contextmanager
def one_rank(job: Job, hf: HFConfig, dtype: str) -> Iterator[Args]:
    """Megatron's parallel state of one rank; yields its args."""
    args = job.args(dtype)
    init_parallel(args, 0, 1, "127.0.0.1", free_port(), num_layers=hf.num_layers)
    try:
        yield args
    finally:
        destroy_parallel()


def _each(
    job: Job, params: Sequence[StoredParam], start: Callable[..., Any], start_args: tuple[Any, ...], title: str,
    journal: Journal | None = None,
) -> list[str]:  # fmt: skip
    """Does parameters in units; returns what they find wrong."""
    units = group(params, lambda p: p.nbytes, job.processes)
    nbytes = [sum(p.nbytes for p in unit) for unit in units]
    results = run_units(
        start, start_args, units, nbytes, processes=job.processes, title=title, journal=journal
    )  # fmt: skip
    return [line for lines in results for line in lines]


def _verify(
    job: Job, args: Args, hf: HFConfig, table: WeightTable, structure: Structure, ckpt: Path, folder: Path,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Raises ConfigError when a tensor or the logits differ."""
    output_dtype = job.dtype or (hf.torch_dtype if folder == job.input else None)
    if output_dtype is None:
        dtype = HFFolder(folder).dtype(next(iter(table.hf_shapes())))
    else:
        dtype = getattr(torch, output_dtype)
    faults = _each(
        job, structure.exported, verify.start_comparison, (str(ckpt), str(folder), hf_dtypes(table, dtype)), "verify"
    )
    raise_faults(faults, f"--verify: {ckpt} and {folder} differ")
    say(f"verified: {len(table.hf_shapes())} tensors of {ckpt.parent.name} and {folder} are equal, byte by byte")
    try:
        difference = _logits(args.replace(params_dtype="float32"), hf, ckpt, folder, dtype)
    except ConfigError as error:
        say(f"logits not compared: {error}")
        return
    if not difference <= 1e-4:
        raise ConfigError(f"--verify: logits differ from transformers' by {difference:.1e} of the largest")
    say(f"verified: logits within {difference:.1e} of transformers', relative to the largest (float32)")


def _logits(args: Args, hf: HFConfig, ckpt: Path, folder: Path, dtype: torch.dtype) -> float:
    import psutil

    if HFFolder(folder).quantised:
        raise ConfigError("the folder's weights are quantised")
    need, free = 3 * 4 * hf.num_parameters, psutil.virtual_memory().available
    if need > free:
        raise ConfigError(f"two models in float32 need about {need / 1e9:.0f} GB of memory, {free / 1e9:.0f} are free")
    (model,) = build_model(args, hf)
    checkpoint.load_checkpoint(ckpt, [model])
    return verify.compare_logits(model, hf, folder, dtype)
