"""Predicts the digests that SGLang's `/weights_checker` reports, from full tensors with Hugging Face names.

An engine hashes its own parameters: q, k and v fused, gate and up fused, sizes padded with zeros where they do not
divide, all of it cut over its tensor-parallel ranks. So the trainer cuts what it has sent in the same way and hashes
the same bytes. The two agree only if the engine holds, byte for byte, what the trainer meant to send.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from slime.backends.sglang_utils.tile_hash import tile_hash
from slime.config.hf_config import HFConfig

VOCAB_MULTIPLE = 64  # SGLang pads the vocabulary to a multiple of this
CPU_INTERMEDIATE_MULTIPLE = 32  # and, on CPU only, each rank's share of the MLP's inner size
_FUSED = {
    "q_proj": ("qkv_proj", 0, 3),
    "k_proj": ("qkv_proj", 1, 3),
    "v_proj": ("qkv_proj", 2, 3),
    "gate_proj": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
}
FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}


class Sha256:
    """Digest of a CPU engine: the first 8 bytes of SHA-256 over the parameter's memory."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def update(self, part: torch.Tensor) -> None:
        self._hash.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()[:16]


class TileHash:
    """Digest of a CUDA engine; see `tile_hash`. Needs the parameter in one piece, so parts are kept until the last."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []

    def update(self, part: torch.Tensor) -> None:
        self._parts.append(part.detach().reshape(-1).view(torch.uint8))

    def hexdigest(self) -> str:
        return f"{tile_hash(torch.cat(self._parts)):016x}"


@dataclass
class _Pending:
    """A parameter of one rank whose parts have not all come: `early` holds the ones that came before their turn."""

    hasher: Sha256 | TileHash
    parts: int
    next_part: int = 0
    early: dict[int, torch.Tensor] = field(default_factory=dict)


class EngineDigests:
    """Collects full tensors in any order, one `add` each, and predicts the digests of every rank.

    hf_config: sizes of the model. tp_size: ranks of the engine. device: "cpu" or "cuda", where the engine runs (they
    hash differently). dtype: of the engine's weights; None: tensors come in it already. background: hash in a thread,
    so that it overlaps with the broadcast (for CPU engines: hashlib leaves the interpreter lock alone); tensors must
    then stay unchanged until `finish`. Raises ValueError for a family or shape it does not know.
    """

    def __init__(
        self, hf_config: HFConfig, tp_size: int = 1, *, device: str = "cpu", dtype: torch.dtype | None = None,
        background: bool = False,
    ):  # fmt: skip
        if hf_config.model_type not in FAMILIES:
            raise ValueError(
                f"engine digests: model_type {hf_config.model_type!r} is not one of {', '.join(sorted(FAMILIES))}; "
                "set --check-weights-interval 0"
            )
        self._hf, self._tp, self._dtype, self._on_cpu = hf_config, tp_size, dtype, device == "cpu"
        self._new_hasher: Callable[[], Sha256 | TileHash] = Sha256 if self._on_cpu else TileHash
        self._pending: dict[str, list[_Pending]] = {}
        self._digests: list[dict[str, str]] = [{} for _ in range(tp_size)]
        self._pool = ThreadPoolExecutor(1) if background else None
        self._jobs: list = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """One full tensor with its Hugging Face name, as it was sent."""
        if self._pool is not None:
            self._jobs.append(self._pool.submit(self._add, name, tensor))
        else:
            self._add(name, tensor)

    def wait(self) -> None:
        """Until all that was added is hashed: then the tensors may change."""
        for job in self._jobs:
            job.result()
        self._jobs.clear()

    def finish(self) -> list[dict[str, str]]:
        """Digest by engine parameter name, one dict per tensor-parallel rank. Raises ValueError when a part of a fused
        parameter never came."""
        if self._pool is not None:
            self.wait()
            self._pool.shutdown()
        if self._pending:
            name, ranks = next(iter(self._pending.items()))
            raise ValueError(f"engine digests: {name} got {ranks[0].next_part} of its {ranks[0].parts} parts in order")
        return self._digests

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        if name == "lm_head.weight" and self._hf.tie_word_embeddings:
            return  # the engine skips it: its head is the embedding
        if self._dtype is not None:
            tensor = tensor.to(self._dtype)
        module, _, leaf = name.rpartition(".")
        parent, _, layer = module.rpartition(".")
        engine_layer, part, parts = _FUSED.get(layer, (layer, 0, 1))
        target = f"{parent}.{engine_layer}.{leaf}" if parent else f"{engine_layer}.{leaf}"
        shards = self._shards(layer, leaf, tensor)
        if target in self._digests[0]:
            raise ValueError(f"engine digests: {name} came twice")
        ranks = self._pending.setdefault(target, [_Pending(self._new_hasher(), parts) for _ in range(self._tp)])
        for rank, (pending, shard) in enumerate(zip(ranks, shards, strict=True)):
            if part < pending.next_part or part in pending.early:
                raise ValueError(f"engine digests: {name} came twice")
            if part != pending.next_part:
                pending.early[part] = shard.clone()
                continue
            pending.hasher.update(shard)
            pending.next_part += 1
            while (early := pending.early.pop(pending.next_part, None)) is not None:
                pending.hasher.update(early)
                pending.next_part += 1
            if pending.next_part == parts:
                self._digests[rank][target] = pending.hasher.hexdigest()
        if ranks[0].next_part == parts:
            del self._pending[target]

    def _shards(self, layer: str, leaf: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The pieces of one tensor that the ranks hold, in rank order."""
        hf, tp = self._hf, self._tp
        if layer in ("embed_tokens", "lm_head"):
            if tensor.shape[0] != hf.vocab_size:
                raise ValueError(
                    f"engine digests: {layer} has {tensor.shape[0]} rows, config.json says {hf.vocab_size}"
                )
            multiple = VOCAB_MULTIPLE if _round_up(hf.vocab_size, VOCAB_MULTIPLE) % tp == 0 else VOCAB_MULTIPLE * tp
            return _cut(tensor, tp, 0, _round_up(hf.vocab_size, multiple))
        if layer in ("gate_proj", "up_proj"):
            return _cut(tensor, tp, 0, self._intermediate_size)
        if layer == "down_proj" and leaf == "weight":
            return _cut(tensor, tp, 1, self._intermediate_size)
        if layer == "q_proj":
            return _cut(tensor, tp, 0, self._heads[0] * hf.head_dim)
        if layer == "o_proj" and leaf == "weight":
            return _cut(tensor, tp, 1, self._heads[0] * hf.head_dim)
        if layer in ("k_proj", "v_proj"):
            if self._heads[1] >= tp:
                return _cut(tensor, tp, 0, self._heads[1] * hf.head_dim)
            heads = tensor.chunk(self._heads[1], 0)  # fewer than ranks: neighbouring ranks hold the same head
            return [heads[rank * self._heads[1] // tp] for rank in range(tp)]
        return [tensor] * tp  # norms, and the biases of row-parallel layers

    @property
    def _intermediate_size(self) -> int:
        multiple = self._tp * CPU_INTERMEDIATE_MULTIPLE if self._on_cpu else 1
        return _round_up(self._hf.intermediate_size, multiple)

    @property
    def _heads(self) -> tuple[int, int]:
        """Query and key/value heads, with the zero heads that a CPU engine adds where they do not divide."""
        query, kv = self._hf.num_attention_heads, self._hf.num_key_value_heads
        if not self._on_cpu or (query % self._tp == 0 and kv % self._tp == 0):
            return query, kv
        padded = _round_up(kv, self._tp)
        return padded * (query // kv), padded


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _cut(tensor: torch.Tensor, tp: int, dim: int, size: int) -> list[torch.Tensor]:
    """`tp` equal pieces along `dim` of the tensor extended with zeros to `size`."""
    if size % tp or tensor.shape[dim] > size:
        raise ValueError(f"engine digests: size {tensor.shape[dim]} does not divide over {tp} engine ranks")
    width = size // tp
    pieces = []
    for rank in range(tp):
        start = min(rank * width, tensor.shape[dim])
        piece = tensor.narrow(dim, start, min(width, tensor.shape[dim] - start))
        if (missing := width - piece.shape[dim]) > 0:
            shape = list(piece.shape)
            shape[dim] = missing
            piece = torch.cat([piece, piece.new_zeros(shape)], dim)
        pieces.append(piece)
    return pieces


def compare_digests(
    expected: Iterable[Mapping[str, str]], found: Iterable[Mapping[str, str]], skip_names: Iterable[str] = ()
) -> tuple[int, list[str]]:
    """(number of digests compared, descriptions of those that disagree), rank by rank.

    A parameter that only one side has is a disagreement too, unless one of `skip_names` is part of its name.
    """
    expected, found, skip = list(expected), list(found), tuple(skip_names)
    if len(expected) != len(found):
        return 0, [f"{len(expected)} ranks expected, {len(found)} found"]
    checked, wrong = 0, []
    for rank, (want, have) in enumerate(zip(expected, found, strict=True)):
        for name in sorted(want.keys() | have.keys()):
            if any(part in name for part in skip):
                continue
            checked += 1
            if want.get(name) != have.get(name):
                sides = (want.get(name) or "not sent", have.get(name) or "not in the engine")
                wrong.append(f"rank {rank} {name}: trainer {sides[0]}, engine {sides[1]}")
    return checked, wrong
