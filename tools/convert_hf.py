"""Converts between Hugging Face folders and Megatron's distributed checkpoints, tensor by tensor.

    python tools/convert_hf.py --to megatron --input models/qwen3 --output ckpt/qwen3 --verify
    python tools/convert_hf.py --to hf --input ckpt/qwen3 --output models/out --hf-checkpoint models/qwen3 --verify
    python tools/convert_hf.py --to megatron --input models/qwen3 --tensor-model-parallel-size 4 --dry-run

A distributed checkpoint loads under any layout; the layout flags only cut its files so that each rank of that layout
reads no more than its own. No model is built in memory: what a process holds is bounded by the largest tensor. The
same command again goes on where an interrupted one stopped. A converted checkpoint holds weights only: give it to
--ref-load, or to --load with --finetune. Weights quantised in fp8 blocks or MXFP4 are read as bfloat16.
"""

import argparse
import os
import sys
from pathlib import Path


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--to", choices=["megatron", "hf"], required=True, help="what to make")
    p.add_argument(
        "--input", required=True, help="Hugging Face folder, or checkpoint folder (--save of a run, or one iter_*)"
    )
    p.add_argument("--output", help="folder to write")
    p.add_argument("--hf-checkpoint", help="with --to hf: folder whose config and tokenizer the output gets")
    for flag, short, help_text in (
        ("tensor-model", "tp", "tensor parallel ranks"),
        ("pipeline-model", "pp", "pipeline stages"),
        ("expert-model", "ep", "expert parallel ranks"),
    ):
        p.add_argument(f"--{flag}-parallel-size", f"--{short}", type=_count, default=1, dest=short, help=help_text)
    p.add_argument("--expert-tensor-parallel-size", "--etp", type=_count, dest="etp", help="unset: as --tp")
    p.add_argument("--make-vocab-size-divisible-by", type=_count, default=1, help="as in training")
    p.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], help="of the output; unset: as the input has it"
    )
    p.add_argument("--processes", type=_count, help="that share the work; unset: as many as there are cores, up to 8")
    p.add_argument(
        "--verify", action="store_true",
        help="read the output back, compare every tensor byte by byte, and logits with transformers'",
    )  # fmt: skip
    p.add_argument("--dry-run", action="store_true", help="print what would become what, and stop")
    options = p.parse_args(argv)
    if not options.dry_run and not options.output:
        p.error("--output is needed")
    if options.to == "hf" and not options.hf_checkpoint:
        p.error("--to hf needs --hf-checkpoint: a checkpoint has no config.json and no tokenizer")
    if options.to == "megatron" and options.hf_checkpoint:
        p.error("--hf-checkpoint has no effect with --to megatron: config and tokenizer are those of --input")
    if options.to == "hf":
        given = [f"--{d}" for d in ("tp", "pp", "ep", "etp") if getattr(options, d) not in (None, 1)]
        if options.make_vocab_size_divisible_by != 1:
            given.append("--make-vocab-size-divisible-by")
        if given:
            p.error(f"{', '.join(given)}: no effect with --to hf, whose files are not cut for a layout")
    return options


def main(argv: list[str] | None = None) -> int:
    from slime.config.errors import ConfigError

    options = parse(argv)
    try:
        for path in (options.input, options.hf_checkpoint):
            if path is not None and not Path(path).is_dir():
                raise ConfigError(f"{path}: no such folder")
        # Seconds of imports, only now.
        from slime.backends.megatron_utils.convert.run import Job, convert_to_hf, convert_to_megatron

        job = Job(
            input=Path(options.input),
            output=Path(options.output) if options.output else None,
            hf_folder=Path(options.input if options.to == "megatron" else options.hf_checkpoint),
            tp=options.tp, pp=options.pp, ep=options.ep, etp=options.etp or options.tp,
            vocab_multiple=options.make_vocab_size_divisible_by,
            dtype=options.dtype, verify=options.verify, dry_run=options.dry_run,
            processes=options.processes or default_processes(options.input),
        )  # fmt: skip
        (convert_to_megatron if options.to == "megatron" else convert_to_hf)(job, say)
    except (ConfigError, ValueError, OSError) as error:
        print(f"convert_hf: error: {error}", file=sys.stderr)
        return 2
    return 0


def default_processes(folder: str) -> int:
    """One for what is written sooner than a process has started."""
    size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    return 1 if size < 512 * 1024**2 else min(8, os.cpu_count() or 1)


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
