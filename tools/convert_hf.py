"""Converts between Hugging Face folders and Megatron's distributed checkpoints.

    python tools/convert_hf.py --to megatron --input models/qwen3 --output ckpt/qwen3 --verify
    python tools/convert_hf.py --to hf --input ckpt/qwen3 --output models/out --hf-checkpoint models/qwen3 --verify
    python tools/convert_hf.py --to megatron --input models/qwen3 --tensor-model-parallel-size 4 --dry-run

A distributed checkpoint loads under any layout, so the layout flags only say how many processes share the work (one per
rank), and what --dry-run shows. A converted checkpoint holds weights only: give it to --ref-load, or to --load with
--finetune. Needs a CUDA device or none: the trainer's own code does the work.
"""

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

from slime.config.args import Args
from slime.config.errors import ConfigError
from slime.config.hf_config import HFConfig, load_hf_config

PROBE = [[3, 14, 15, 9, 26, 5, 35, 8, 97, 93, 23], [2, 71, 82, 81, 82]]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--to", choices=["megatron", "hf"], required=True, help="what to make")
    p.add_argument(
        "--input", required=True, help="Hugging Face folder, or checkpoint folder (--save of a run, or one iter_*)"
    )
    p.add_argument("--output", help="folder to write")
    p.add_argument("--hf-checkpoint", help="with --to hf: folder whose config and tokenizer the output gets")
    p.add_argument("--tensor-model-parallel-size", "--tp", type=int, default=1, help="tensor parallel ranks")
    p.add_argument("--pipeline-model-parallel-size", "--pp", type=int, default=1, help="pipeline stages")
    p.add_argument("--make-vocab-size-divisible-by", type=int, default=1, help="as in training")
    p.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], help="of the output; unset: as the input's config"
    )
    p.add_argument("--verify", action="store_true", help="read the output back and compare every tensor byte by byte")
    p.add_argument("--dry-run", action="store_true", help="print what would become what, and stop")
    options = p.parse_args(argv)
    if not options.dry_run and not options.output:
        p.error("--output is needed")
    if options.to == "hf" and not options.hf_checkpoint:
        p.error("--to hf needs --hf-checkpoint: a checkpoint has no config.json and no tokenizer")
    return options


def make_args(options: argparse.Namespace, hf: HFConfig, hf_folder: str) -> Args:
    world = options.tensor_model_parallel_size * options.pipeline_model_parallel_size
    return Args(
        hf_checkpoint=hf_folder,
        actor_num_gpus_per_node=world,
        tensor_model_parallel_size=options.tensor_model_parallel_size,
        pipeline_model_parallel_size=options.pipeline_model_parallel_size,
        make_vocab_size_divisible_by=options.make_vocab_size_divisible_by,
        params_dtype=options.dtype or hf.torch_dtype,
    )


def plan(options: argparse.Namespace, args: Args, hf: HFConfig, folder: str | None) -> list[str]:
    """One line per Megatron parameter, and the folder's differences from config.json. Reads headers only."""
    from slime.models import HFFolder, check_folder, model_table

    table, tp = model_table(hf, args), options.tensor_model_parallel_size
    lines, total = [], 0
    for entry in table.entries():
        shapes = [list(t.shape) for t in entry.param.hf]
        total += sum(math.prod(s) for s in shapes) if entry.param.exported else 0
        sources = " + ".join(f"{name} {shape}" for name, shape in zip(entry.hf_names, shapes, strict=True))
        note = "" if entry.param.exported else "  (last pipeline stage only, when there are several)"
        shard, count = list(entry.param.shard_shape(tp, 0)), tp if entry.param.form.cut else 1
        lines.append(f"{entry.name} {shard} x {count} = {sources}{note}")
    lines.append(f"{hf.model_type}: {len(table.hf_shapes())} tensors, {total:,} parameters")
    if folder is not None:
        files = HFFolder(folder)
        check_folder(table, files)
        lines.append(f"{folder}: agrees with its config.json; {files.nbytes():,} bytes")
    return lines


def convert(rank: int, world: int, port: int, options: argparse.Namespace, args: Args) -> None:
    """The work of one rank."""
    from slime.backends.megatron_utils import checkpoint
    from slime.backends.megatron_utils.model import build_model, transformer_config
    from slime.backends.megatron_utils.parallel import destroy_parallel, init_parallel
    from slime.models import load_hf_into, save_hf

    hf = load_hf_config(args.hf_checkpoint)  # type: ignore[arg-type]
    init_parallel(args, rank, world, "127.0.0.1", port, num_layers=hf.num_layers)
    config = transformer_config(args, hf)
    config.perform_initialization = False
    chunks = build_model(args, hf, config)
    started = time.monotonic()
    if options.to == "megatron":
        load_hf_into(chunks, options.input, hf, args)
        checkpoint.save_checkpoint(options.output, 0, chunks, None, None)
    else:
        _load(checkpoint, options.input, chunks)
        save_hf(chunks, options.output, hf, args)
    say(rank, f"{options.output}: written in {time.monotonic() - started:.1f} s")
    if options.verify:
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.data.fill_(float("nan"))
        if options.to == "megatron":
            _load(checkpoint, options.output, chunks)
        else:
            load_hf_into(chunks, options.output, hf, args)
            original = build_model(args, hf, config)
            _load(checkpoint, options.input, original)
            _compare_models(chunks, original)
        folder = options.input if options.to == "megatron" else options.output
        say(rank, f"verified: {compare_with_folder(chunks, hf, args, folder)} tensors of rank 0's stage equal {folder}")
        if world == 1 and args.params_dtype == "float32":
            say(rank, f"verified: logits within {compare_logits(chunks[0], hf, folder):.1e} of transformers'")
    destroy_parallel()


def _load(checkpoint: Any, folder: str, chunks: list[Any]) -> None:
    found = checkpoint.latest_checkpoint(folder)
    if found is None:
        raise ConfigError(f"--input {folder}: there is no Megatron checkpoint in it")
    checkpoint.load_checkpoint(found[0], chunks)


def _compare_models(ours: list[Any], theirs: list[Any]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        for (name, x), y in zip(a.named_parameters(), b.parameters(), strict=True):
            if not _same_bytes(x.data, y.data):
                raise ConfigError(f"--verify: {name} came back changed")


def compare_with_folder(chunks: list[Any], hf: HFConfig, args: Args, folder: str) -> int:
    """Compares each tensor of this stage with the folder's, cast to the model's dtype; returns how many there are."""
    from slime.models import HFFolder, iter_hf_weights

    files, count = HFFolder(folder), 0
    for name, tensor in iter_hf_weights(chunks, hf, args):
        if not _same_bytes(tensor.cpu(), files.read(name).to(tensor.dtype)):
            raise ConfigError(f"--verify: {name} differs from {folder}")
        count += 1
    return count


def _same_bytes(a: Any, b: Any) -> bool:
    import torch

    a, b = (x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


def compare_logits(model: Any, hf: HFConfig, folder: str) -> float:
    """Largest difference of float32 logits. Raises ConfigError above 1e-3 of their spread."""
    import torch
    from transformers import AutoModelForCausalLM

    from slime.backends.megatron_utils.data import pack

    device = next(model.parameters()).device
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    probe = [[t % hf.vocab_size for t in tokens] for tokens in PROBE]
    tokens, positions, packed = pack([torch.tensor(t, device=device) for t in probe])
    model.output_layer.deferred = False
    with torch.no_grad():
        ours = model(tokens, positions, None, packed_seq_params=packed)[0, :, : hf.vocab_size].float().cpu()
        theirs = torch.cat([reference(torch.tensor([t])).logits[0] for t in probe])
    difference = (ours - theirs).abs().max().item()
    if not difference <= 1e-3 * theirs.std().item():
        raise ConfigError(f"--verify: logits differ from transformers' by {difference:.2e}")
    return difference


def say(rank: int, text: str) -> None:
    if rank == 0:
        print(text, flush=True)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    hf_folder = options.input if options.to == "megatron" else options.hf_checkpoint
    try:
        hf = load_hf_config(hf_folder)
        args = make_args(options, hf, hf_folder)
        lines = plan(options, args, hf, options.input if options.to == "megatron" else None)
        if options.dry_run:
            print("\n".join(lines))
            return 0
        if options.to == "megatron" and Path(options.output).exists() and any(Path(options.output).iterdir()):
            raise ConfigError(f"--output {options.output}: is not empty; choose another folder or remove it")
        print("\n".join(lines[-2:] if options.to == "megatron" else lines[-1:]), flush=True)
        run(options, args)
    except (ConfigError, ValueError) as error:
        print(f"convert_hf: error: {error}", file=sys.stderr)
        return 2
    return 0


def run(options: argparse.Namespace, args: Args) -> None:
    """One process per rank; this one when there is one rank."""
    from slime.utils.net import free_port

    world = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    if world == 1:
        convert(0, 1, free_port(), options, args)
        return
    import torch.multiprocessing as mp

    mp.spawn(convert, (world, free_port(), options, args), nprocs=world)


if __name__ == "__main__":
    sys.exit(main())
