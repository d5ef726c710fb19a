"""How an SGLang engine keeps a model's weights: under which names, fused with what, and cut over its ranks.

Read from SGLang 0.5.23's models and seen on CPU for every family (docs/models.md). Quantised engines are not known.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from slime.config.hf_config import HFConfig

VOCAB_MULTIPLE = 64  # SGLang pads the vocabulary to a multiple of this
CPU_INTERMEDIATE_MULTIPLE = 32  # and, on CPU only, each rank's share of an MLP's inner size
FAMILIES = {
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "glm4", "glm4_moe", "deepseek_v2",
    "deepseek_v3", "gpt_oss",
}  # fmt: skip
_FUSED = {
    "q_proj": ("qkv_proj", 0, 3),
    "k_proj": ("qkv_proj", 1, 3),
    "v_proj": ("qkv_proj", 2, 3),
    "gate_proj": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
}
_FUSED_LATENT = {
    "q_a_proj": ("fused_qkv_a_proj_with_mqa", 0, 2),
    "kv_a_proj_with_mqa": ("fused_qkv_a_proj_with_mqa", 1, 2),
}
_FLOAT32 = "e_score_correction_bias"  # whatever the engine's dtype
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
_OF_EXPERT = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}  # rows of w13_weight; the other one is w2_weight
_STACKED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)(_bias)?")

_KERNELS_OWN = re.compile(r"\.(experts|shared_experts?)\.|e_score_correction_bias")
# Options with which ranks hold other parts, or other numbers, than `place` says.
_RESHARDING = {
    "ep_size", "expert_parallel_size", "dp_size", "data_parallel_size", "enable_dp_attention", "enable_dp_lm_head",
    "moe_dense_tp_size", "moe_a2a_backend", "enable_eplb", "pp_size", "pipeline_parallel_size", "attn_cp_size",
    "quantization", "enable_lora", "torchao_config",
}  # fmt: skip


@dataclass(frozen=True)
class Placed:
    """A tensor in an engine. target: the engine's parameter. part, parts: its place among those that are fused there.
    shards: what each rank holds of it, in rank order."""

    target: str
    part: int
    parts: int
    shards: list[torch.Tensor]


class EngineLayout:
    """hf: sizes of the model. tp: ranks of the engine. options: its --sglang-* ones, by name.

    Raises ValueError for a family that it does not know.
    """

    def __init__(self, hf: HFConfig, tp: int, on_cpu: bool, options: Iterable[str] = ()):
        if hf.model_type not in FAMILIES:
            raise ValueError(
                f"engine digests: model_type {hf.model_type!r} is not one of {', '.join(sorted(FAMILIES))}; "
                "set --check-weights-interval 0"
            )
        self._hf, self.tp, self.on_cpu = hf, tp, on_cpu
        self._resharded = not _RESHARDING.isdisjoint(options)

    def place(self, name: str, tensor: torch.Tensor) -> Placed | None:
        """name: Hugging Face's; tensor: whole. None: an engine has no such parameter. Raises ValueError for a size
        that does not fit."""
        if name == "lm_head.weight" and self._hf.tie_word_embeddings:
            return None  # its head is the embedding
        if found := _EXPERT.fullmatch(name):
            return self._expert(found[1], int(found[2]), found[3], tensor)
        if found := _STACKED.fullmatch(name):
            return self._stack(found[1], found[2], bool(found[3]), tensor)
        if name.endswith(_FLOAT32) or (self._hf.model_type == "glm4_moe" and name.endswith(".mlp.gate.weight")):
            tensor = tensor.float()
        module, _, leaf = name.rpartition(".")
        parent, _, layer = module.rpartition(".")
        engine_layer, part, parts = self._fused().get(layer, (layer, 0, 1))
        target = f"{parent}.{engine_layer}.{leaf}" if parent else f"{engine_layer}.{leaf}"
        return Placed(target, part, parts, self._shards(parent, layer, leaf, tensor))

    def sure(self, target: str) -> bool:
        """Whether an engine surely keeps this parameter as `place` says. On GPUs its kernels may want experts in
        another order, or shared experts among the others, and some options cut everything in other ways."""
        return not self._resharded and (self.on_cpu or not _KERNELS_OWN.search(target))

    def _fused(self) -> dict[str, tuple[str, int, int]]:
        if self._hf.latent is None:
            return _FUSED
        mlp = {name: _FUSED[name] for name in ("gate_proj", "up_proj")}
        return mlp if self._hf.latent.q_rank is None else mlp | _FUSED_LATENT

    def _expert(self, experts: str, number: int, layer: str, tensor: torch.Tensor) -> Placed:
        assert self._hf.num_experts and self._hf.moe_intermediate_size
        count, size = self._hf.num_experts, self._inner(self._hf.moe_intermediate_size)
        if (row := _OF_EXPERT.get(layer)) is None:
            return Placed(f"{experts}.w2_weight", number, count, _cut(tensor, self.tp, 1, size))
        return Placed(f"{experts}.w13_weight", 2 * number + row, 2 * count, _cut(tensor, self.tp, 0, size))

    def _stack(self, experts: str, layer: str, bias: bool, tensor: torch.Tensor) -> Placed:
        """All experts of a layer in one tensor (gpt-oss), with input rows first; gate and up stay as they alternate."""
        assert self._hf.moe_intermediate_size
        size, wide = self._inner(self._hf.moe_intermediate_size), layer == "gate_up_proj"
        target = f"{experts}.{'w13' if wide else 'w2'}_weight{'_bias' if bias else ''}"
        if not bias:
            shards = _cut(tensor.mT, self.tp, 1 if wide else 2, 2 * size if wide else size)
        elif wide:
            shards = _cut(tensor.float(), self.tp, 1, 2 * size)
        else:  # added once, by the first rank
            shards = [tensor.float(), *[torch.zeros_like(tensor, dtype=torch.float32)] * (self.tp - 1)]
        return Placed(target, 0, 1, shards)

    def _shards(self, parent: str, layer: str, leaf: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The pieces of one tensor that the ranks hold, in rank order."""
        hf, tp, latent = self._hf, self.tp, self._hf.latent
        query, kv = self._heads
        if layer in ("embed_tokens", "lm_head"):
            if tensor.shape[0] != hf.vocab_size:
                raise ValueError(
                    f"engine digests: {layer} has {tensor.shape[0]} rows, config.json says {hf.vocab_size}"
                )
            multiple = VOCAB_MULTIPLE if _round_up(hf.vocab_size, VOCAB_MULTIPLE) % tp == 0 else VOCAB_MULTIPLE * tp
            return _cut(tensor, tp, 0, _round_up(hf.vocab_size, multiple))
        shared = parent.rpartition(".")[2] in ("shared_expert", "shared_experts") and hf.shared_intermediate_size
        inner = self._inner(shared or hf.intermediate_size)
        if layer in ("gate_proj", "up_proj"):
            return _cut(tensor, tp, 0, inner)
        if layer == "gate_up_proj":  # GLM-4's file has them in one
            gate, up = (_cut(half, tp, 0, inner) for half in tensor.chunk(2))
            return [torch.cat(pair) for pair in zip(gate, up, strict=True)]
        if layer == "down_proj" and leaf == "weight":
            return _cut(tensor, tp, 1, inner)
        if layer in ("q_proj", "q_b_proj"):
            return _cut(tensor, tp, 0, query * (latent.query_dim if latent else hf.head_dim))
        if layer == "kv_b_proj" and latent is not None:
            return _cut(tensor, tp, 0, query * (latent.nope_dim + latent.value_dim))
        if layer == "o_proj" and leaf == "weight":
            return _cut(tensor, tp, 1, query * (latent.value_dim if latent else hf.head_dim))
        if leaf == "sinks":
            return _cut(tensor, tp, 0, query)
        if layer in ("k_proj", "v_proj"):
            if kv >= tp:
                return _cut(tensor, tp, 0, kv * hf.head_dim)
            heads = tensor.chunk(kv, 0)  # fewer than ranks: neighbouring ranks hold the same head
            return [heads[rank * kv // tp] for rank in range(tp)]
        return [tensor] * tp  # norms, routers, what latent attention shares, and the biases of row-parallel layers

    def _inner(self, size: int) -> int:
        return _round_up(size, self.tp * CPU_INTERMEDIATE_MULTIPLE if self.on_cpu else 1)

    @property
    def _heads(self) -> tuple[int, int]:
        """Query and key/value heads, with the zero heads that a CPU engine adds where they do not divide."""
        query, kv = self._hf.num_attention_heads, self._hf.num_key_value_heads
        if not self.on_cpu or (query % self.tp == 0 and kv % self.tp == 0):
            return query, kv
        padded = _round_up(kv, self.tp)
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
