"""Compares two implementations of one model: output of each layer, logits, loss and gradients, on the same tokens.

  python -m slime compare-specs --hf-checkpoint FOLDER                    our torch layers with Transformer Engine's
  python -m slime compare-specs --hf-checkpoint FOLDER --against transformers    ... with the model of transformers
  python -m slime compare-specs --hf-checkpoint FOLDER --against rounding        ... with rounding regions on

Other flags are train.py's (--params-dtype, --attention-backend, --rounding-profile ...). Differences are relative:
the Euclidean norm of the difference over that of the second one. Exit code 0: all within the tolerance, 1: not, 2: it
cannot be done here.
"""

import argparse
import dataclasses
import gc
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from slime.config import Args, ConfigError, HFConfig, load_hf_config
from slime.config.derive import derive
from slime.config.parse import parse_args
from slime.config.rounding import rounding_problems

# Relative differences that other orders of the same sums make, by dtype; for gradients of single tensors.
TOLERANCE = {"float32": (1e-4, 1e-3), "float16": (1e-2, 3e-2), "bfloat16": (5e-2, 1.5e-1)}


@dataclasses.dataclass
class Trace:
    """What one implementation computed, float32 on the host.

    layers: output of each layer, [T, H] (the residual stream). logits: [T, V]. loss: mean of -log p of each next token
    of its own sequence. gradients: of the loss, by Hugging Face name.
    """

    layers: list[Tensor]
    logits: Tensor
    loss: float
    gradients: dict[str, Tensor]


def megatron_trace(args: Args, hf: HFConfig, sequences: Sequence[Tensor]) -> Trace:
    """Our model, as the trainer builds and runs it: packed sequences in one micro-batch."""
    from slime.backends.megatron_utils import data, device
    from slime.backends.megatron_utils.cpu_products import fast_products
    from slime.backends.megatron_utils.model import build_model
    from slime.backends.megatron_utils.train_step import forward_logits
    from slime.models import iter_hf_weights, load_hf_into

    chunks = build_model(args, hf)
    load_hf_into(chunks, str(args.hf_checkpoint), hf, args)
    tokens, positions, packed = data.pack([s.to(device.current_device()) for s in sequences])
    layers = _record(chunks[0].decoder.layers)
    batch = data.MicroBatch([], tokens, positions, packed, {})
    with fast_products():
        logits = forward_logits(args, chunks[0], batch, deferred=False).squeeze(0)
        loss = _loss(logits, sequences)
        loss.backward()
    for param in chunks[0].parameters():
        param.data = param.grad if param.grad is not None else torch.zeros_like(param)
    gradients = {name: _keep(tensor) for name, tensor in iter_hf_weights(chunks, hf, args)}
    return Trace(layers, _keep(logits), loss.item(), gradients)


def transformers_trace(args: Args, hf: HFConfig, sequences: Sequence[Tensor]) -> Trace:
    """The model of the package transformers, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    from slime.backends.megatron_utils import device

    dtype = getattr(torch, args.params_dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(args.hf_checkpoint, dtype=dtype, attn_implementation="eager")
    model = model.to(device.current_device()).eval()
    layers, logits = [], []
    for sequence in sequences:
        layers.append(_record(model.model.layers))
        logits.append(model(sequence[None].to(model.device), use_cache=False).logits.float().squeeze(0))
    rows = torch.cat(logits)
    loss = _loss(rows, sequences)
    loss.backward()
    gradients = {name: _keep(param.grad) for name, param in model.named_parameters() if param.grad is not None}
    joined = [torch.cat(parts) for parts in zip(*layers, strict=True)]
    return Trace(joined, _keep(rows), loss.item(), gradients)


def _record(modules: Any) -> list[Tensor]:
    """Fills the list that it returns with each module's next output, once."""
    out: list[Tensor] = []
    handles: list[Any] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        out.append(_keep(output).reshape(-1, output.size(-1)))
        if len(out) == len(handles):
            for handle in handles:
                handle.remove()

    handles += [module.register_forward_hook(keep) for module in modules]
    return out


def _keep(tensor: Tensor) -> Tensor:
    return tensor.detach().float().cpu()


def _loss(logits: Tensor, sequences: Sequence[Tensor]) -> Tensor:
    parts = []
    for rows, sequence in zip(logits.split([len(s) for s in sequences]), sequences, strict=True):
        parts.append(torch.nn.functional.cross_entropy(rows[:-1], sequence[1:].to(rows.device), reduction="none"))
    return torch.cat(parts).mean()


def relative(ours: Tensor, other: Tensor) -> float:
    """|ours - other| / |other|, Euclidean; infinite where a number is not finite or nothing is there to divide by."""
    distance, size = (ours.double() - other.double()).norm(), other.double().norm()
    if not torch.isfinite(distance) or (size == 0 and distance > 0):
        return float("inf")
    return float(distance / size) if size else 0.0


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the report. value: relative difference; limit: its tolerance. note: which tensor is the worst."""

    name: str
    value: float
    limit: float
    note: str = ""

    @property
    def failed(self) -> bool:
        return not self.value <= self.limit


def compare(ours: Trace, other: Trace, limit: float, gradient_limit: float) -> list[Row]:
    """Layer by layer, then logits and loss; of gradients the worst tensor of each layer and of the rest."""
    rows = [Row(f"layer {i}", relative(a, b), limit) for i, (a, b) in enumerate(_pairs(ours.layers, other.layers))]
    rows.append(Row("logits", relative(ours.logits, other.logits), limit))
    rows.append(Row("loss", abs(ours.loss - other.loss) / max(abs(other.loss), 1e-30), limit))
    worst: dict[str, Row] = {}
    for name in ours.gradients:
        if name in other.gradients:
            value = relative(ours.gradients[name], other.gradients[name])
            place = name.split(".")
            where = f"gradients of layer {place[2]}" if "layers" in place else "other gradients"
            if where not in worst or not value <= worst[where].value:
                worst[where] = Row(where, value, gradient_limit, name)
    return rows + list(worst.values())


def _pairs(ours: list[Tensor], other: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(ours, other, strict=True))


def random_sequences(vocab_size: int, tokens: int, seed: int) -> list[Tensor]:
    """Three sequences of different lengths, `tokens` in all; int64."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [tokens // 2, tokens // 3]
    lengths.append(tokens - sum(lengths))
    return [torch.randint(vocab_size, (n,), generator=generator) for n in lengths]


def sides(against: str, args: Args) -> tuple[str, Callable[..., Trace], Args, Args]:
    """(what is compared, how the other side is traced, flags of ours, flags of the other).

    against: auto, transformer_engine, transformers or rounding. Raises ConfigError where this machine lacks it.
    """
    from slime.backends.megatron_utils.spec import has_transformer_engine, uses_transformer_engine

    local = args.replace(transformer_impl="local")
    if against == "auto":
        against = "transformer_engine" if has_transformer_engine() else "transformers"
        if against == "transformers":
            print("no Transformer Engine with CUDA here: our torch layers are compared with transformers instead")
    if against == "transformer_engine":
        other = args.replace(transformer_impl="transformer_engine")
        uses_transformer_engine(other)
        return "our torch layers with Transformer Engine's", megatron_trace, local, other
    if against == "transformers":
        return "our torch layers with transformers", transformers_trace, local, local
    on = args if args.rounding_profile != "off" else args.replace(rounding_profile="sglang")
    off = on.replace(rounding_profile="off", rounding_regions=None)
    what = f"rounded after each operation with rounded once in {on.rounding_regions or 'all regions'}"
    return what, megatron_trace, off, on


def run(options: argparse.Namespace, args: Args) -> int:
    from slime.backends.megatron_utils import device

    device.adapt_megatron()
    from slime.backends.megatron_utils.parallel import destroy_parallel, init_parallel
    from slime.utils.net import free_port

    hf = load_hf_config(str(args.hf_checkpoint))
    args = derive(args, hf)
    what, trace_other, mine, theirs = sides(options.against, args)
    if problems := [*rounding_problems(mine, hf), *rounding_problems(theirs, hf)]:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    defaults = TOLERANCE[args.params_dtype]
    limit, gradient_limit = (given or default for given, default in zip(
        (options.tolerance, options.gradient_tolerance), defaults, strict=True))  # fmt: skip
    sequences = random_sequences(hf.vocab_size, options.tokens, args.seed)
    init_parallel(args, 0, 1, "127.0.0.1", free_port(), num_layers=hf.num_layers)
    try:
        ours = megatron_trace(mine, hf, sequences)
        gc.collect()
        other = trace_other(theirs, hf, sequences)
    finally:
        destroy_parallel()
    rows = compare(ours, other, limit, gradient_limit)
    print(f"{what}: {args.hf_checkpoint}, {args.params_dtype}, {options.tokens} tokens")
    print(f"tolerance {limit:g}, of gradients {gradient_limit:g} (relative, Euclidean)")
    for row in rows:
        print(f"  {row.name:<24} {row.value:>10.3e}  {'OVER' if row.failed else 'ok':<4}  {row.note}".rstrip())
    missing = sorted(ours.gradients.keys() ^ other.gradients.keys())
    if missing:
        print(f"  {len(missing)} gradients have no partner of the same name, as {missing[0]}: not compared")
    failed = sum(row.failed for row in rows)
    worst = max(rows, key=lambda row: row.value / row.limit)
    print(json.dumps({
        "compared": what, "dtype": args.params_dtype, "rows": len(rows), "failed": failed,
        "logits": rows[len(ours.layers)].value, "worst": worst.value, "worst_at": worst.note or worst.name,
        "tolerance": limit, "gradient_tolerance": gradient_limit, "gradients_not_compared": len(missing),
    }))  # fmt: skip
    return 1 if failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m slime compare-specs", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    choices = ["auto", "transformer_engine", "transformers", "rounding"]
    parser.add_argument("--against", choices=choices, default="auto", help="auto: transformer_engine where it is")
    parser.add_argument("--tokens", type=int, default=192, help="tokens of three random sequences (default: 192)")
    parser.add_argument("--tolerance", type=float, help="of layers, logits and loss; default: by --params-dtype")
    parser.add_argument("--gradient-tolerance", type=float, help="of gradients; default: by --params-dtype")
    options, rest = parser.parse_known_args(argv)
    try:
        args = parse_args(rest)
        if args.hf_checkpoint is None:
            raise ConfigError("--hf-checkpoint is needed: a Hugging Face folder")
        if options.tokens < 12:
            raise ConfigError(f"--tokens {options.tokens}: three sequences need at least 12")
        if max(args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size) > 1:
            raise ConfigError("compare-specs runs in one process: leave the parallel sizes out")
        return run(options, args)
    except ConfigError as error:
        for line in str(error).splitlines():
            print(f"slime: error: {line}", file=sys.stderr)
        return 2
