"""Conversion of every model family in every layout: there and back byte by byte, and logits as transformers'.

    python benchmarks/convert_grid.py --table benchmarks/results/convert_grid.md
    python benchmarks/convert_grid.py --families llama gpt_oss --quick

Each family is a small random model of transformers, tied and untied, whose sizes differ pairwise, so that no
transpose hides. A case is one layout (tensor, pipeline and expert parallel sizes, padding of the vocabulary): the
folder becomes a checkpoint cut for that layout and a folder again, which must have the same bytes; and what each rank
would load from the folder must be what the checkpoint holds for it. Once per model the checkpoint is loaded by Megatron
in one process and its logits are compared with transformers' in float32; every family is also loaded by four real ranks
that talk over gloo.
The last line is JSON.
"""

import argparse
import contextlib
import dataclasses
import io
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

import torch  # noqa: E402
from ranks import run_ranks  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from slime.backends.megatron_utils import checkpoint  # noqa: E402
from slime.backends.megatron_utils.convert.reader import CheckpointReader  # noqa: E402
from slime.backends.megatron_utils.convert.run import Job, convert_to_hf, convert_to_megatron, one_rank  # noqa: E402
from slime.backends.megatron_utils.convert.stored import checkpoint_structure  # noqa: E402
from slime.backends.megatron_utils.convert.to_megatron import cut  # noqa: E402
from slime.backends.megatron_utils.convert.verify import compare_logits, same_bytes  # noqa: E402
from slime.backends.megatron_utils.model import build_model  # noqa: E402
from slime.config import Args  # noqa: E402
from slime.config.hf_config import HFConfig, load_hf_config  # noqa: E402
from slime.models import HFFolder, model_table  # noqa: E402
from slime.models.hf_files import row_reader  # noqa: E402
from tools.make_tiny_model import ARCHS, TinyModel, make_tiny_model  # noqa: E402

SIZES = dict(
    num_layers=4, hidden_size=72, num_attention_heads=8, num_key_value_heads=4, head_dim=6, intermediate_size=208,
    vocab_size=331, num_experts=4, num_experts_per_tok=2,
)  # fmt: skip
LOGITS_TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Layout:
    tp: int
    pp: int
    ep: int
    vocab_multiple: int

    def __str__(self) -> str:
        return f"TP {self.tp} PP {self.pp} EP {self.ep} vocabulary x{self.vocab_multiple}"


def layouts(experts: bool, quick: bool) -> list[Layout]:
    if quick:
        return [Layout(1, 1, 1, 1), Layout(2, 2, 2 if experts else 1, 8)]
    sizes = itertools.product((1, 2, 4), (1, 2), (1, 2) if experts else (1,), (1, 8))
    return [Layout(*size) for size in sizes]


def make_model(folder: Path, family: str, tied: bool) -> Path:
    make_tiny_model(folder, TinyModel(arch=family, tie_word_embeddings=tied, **SIZES))
    return folder


def run_case(model: Path, layout: Layout, scratch: Path) -> list[str]:
    """What goes wrong in one layout."""
    there, back = scratch / "there", scratch / "back"
    etp = 1 if layout.ep > 1 else layout.tp
    job = Job(model, there, model, layout.tp, layout.pp, layout.ep, etp, layout.vocab_multiple)
    convert_to_megatron(job, lambda text: None)
    convert_to_hf(Job(there, back, model), lambda text: None)
    faults = [f"{name} came back changed" for name in different_tensors(model, back)]
    return faults + ranks_that_would_differ(model, there / "iter_0000000", job)


def different_tensors(a: Path, b: Path) -> list[str]:
    mine, theirs = ({n: t for f in sorted(x.glob("*.safetensors")) for n, t in load_file(f).items()} for x in (a, b))
    if mine.keys() != theirs.keys():
        return sorted(mine.keys() ^ theirs.keys())
    return [n for n, t in mine.items() if t.dtype != theirs[n].dtype or not same_bytes(t, theirs[n])]


def ranks_that_would_differ(model: Path, folder: Path, job: Job) -> list[str]:
    """The shard that each rank computes from the folder against the boxes of the checkpoint that are its."""
    hf = load_hf_config(model)
    padded = model_table(hf, Args(make_vocab_size_divisible_by=job.vocab_multiple))
    files, reader, faults = HFFolder(model), CheckpointReader(folder), []
    with one_rank(job, hf, "float32") as args:
        structure = checkpoint_structure(args, hf)
    for param in structure.params:
        bound = padded.find(param.bound.name)
        ranks = job.etp if bound.param.expert else job.tp
        for shard in cut(param, job.tp, job.etp, job.vocab_multiple):
            rank = shard.rank or 0
            want = torch.empty(bound.param.shard_shape(ranks, rank), dtype=param.dtype)
            bound.param.load(want, ranks, rank, row_reader(files, bound))
            stored = dataclasses.replace(param, shape=shard.shape, regions=shard.regions)
            if not same_bytes(want, reader.read(stored)):
                faults.append(f"{param.bound.name}, rank {rank} of {ranks}: not what the checkpoint holds")
    return faults


def logits_difference(model: Path, ckpt: Path) -> float:
    hf = load_hf_config(model)
    with one_rank(Job(model, None, model), hf, "float32") as args:
        (chunk,) = build_model(args, hf)
        _spoil(chunk)
        checkpoint.load_checkpoint(ckpt, [chunk])
        return compare_logits(chunk, hf, model)


def _spoil(chunk: torch.nn.Module) -> None:
    for tensor in chunk.parameters():
        tensor.data.fill_(float("nan"))  # what is not loaded shows


def load_as_rank(rank: int, world: int, port: int, cases: Sequence[tuple[str, str, str, Args]]) -> None:
    """One real rank: loads a checkpoint and saves it as a folder, in each case."""
    from megatron.core.parallel_state import destroy_model_parallel

    from slime.backends.megatron_utils.parallel import init_parallel
    from slime.models import save_hf

    for ckpt, target, model, args in cases:
        hf: HFConfig = load_hf_config(model)
        init_parallel(args, rank, world, "127.0.0.1", port, num_layers=hf.num_layers)
        chunks = build_model(args, hf)
        for chunk in chunks:
            _spoil(chunk)
        checkpoint.load_checkpoint(Path(ckpt), chunks)
        save_hf(chunks, target, hf, args)
        destroy_model_parallel()


def real_ranks(models: dict[str, Path], checkpoints: dict[str, Path], scratch: Path) -> dict[str, list[str]]:
    """Faults by family of four ranks (TP 2 x PP 2; experts over two) that load what one process wrote."""
    cases, targets = [], {}
    for family, model in models.items():
        experts = bool(load_hf_config(model).moe_layers)
        args = Args(
            hf_checkpoint=str(model), actor_num_gpus_per_node=4, params_dtype="float32", device="cpu",
            tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True,
            expert_model_parallel_size=2 if experts else 1, expert_tensor_parallel_size=1 if experts else 2,
            make_vocab_size_divisible_by=8,
        )  # fmt: skip
        targets[family] = scratch / f"ranks-{family}"
        cases.append((str(checkpoints[family]), str(targets[family]), str(model), args))
    run_ranks(4, load_as_rank, cases, timeout=1200.0)
    return {family: different_tensors(models[family], target) for family, target in targets.items()}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=ARCHS, default=list(ARCHS), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="two layouts of each model")
    parser.add_argument("--table", type=Path, help="also write the result to a Markdown file")
    options = parser.parse_args()
    begun, cases, failed = time.monotonic(), 0, 0
    lines = ["| family | head | layouts | changed bytes | logits against transformers |", "|---|---|---|---|---|"]
    print("\n".join(lines))
    with tempfile.TemporaryDirectory() as folder:
        root, models, checkpoints = Path(folder), {}, {}
        for family, tied in itertools.product(options.families, (False, True)):
            model = make_model(root / f"{family}-{tied}", family, tied)
            grid = layouts(bool(load_hf_config(model).moe_layers), options.quick)
            faults: list[str] = []
            for layout in grid:
                with tempfile.TemporaryDirectory(dir=root) as scratch, quiet():
                    found = run_case(model, layout, Path(scratch))
                faults += [f"{family}, {'tied' if tied else 'untied'}, {layout}: {fault}" for fault in found]
                cases, failed = cases + 1, failed + bool(found)
            with quiet():
                kept = root / f"{family}-{tied}-checkpoint"
                convert_to_megatron(Job(model, kept, model), lambda text: None)
                difference = logits_difference(model, kept / "iter_0000000")
            cases, failed = cases + 1, failed + (not difference <= LOGITS_TOLERANCE)
            if not tied:
                models[family], checkpoints[family] = model, kept / "iter_0000000"
            head = "tied" if tied else "untied"
            lines.append(f"| {family} | {head} | {len(grid)} | {len(faults)} | {difference:.1e} |")
            print(lines[-1], *faults, sep="\n", flush=True)
        for family, changed in real_ranks(models, checkpoints, root).items():
            cases, failed = cases + 1, failed + bool(changed)
            if changed:
                print(f"{family}, loaded by real ranks: {', '.join(changed[:5])} came back changed")
    print(f"loaded by four real ranks (TP 2 x PP 2, experts over two) and saved: {len(models)} families")
    if options.table:
        options.table.write_text("\n".join(lines) + "\n")
    summary = {"cases": cases, "failed": failed, "families": len(options.families)}
    print(json.dumps({**summary, "seconds": round(time.monotonic() - begun)}))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
