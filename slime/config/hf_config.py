"""The sizes of a model, read from its Hugging Face `config.json`. Needs neither torch nor transformers."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from slime.config.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class LatentAttention:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). q_rank None: queries are not compressed.

    nope_dim, rope_dim: channels per head of queries and keys without and with rotary embedding; value_dim: of values.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim


@dataclasses.dataclass(frozen=True)
class HFConfig:
    """Sizes are counts; `head_dim` is per head. `raw` is the whole file, for what only one family knows.

    attention_bias: of queries, keys and values; out_bias: of the output projection. moe_layers: which layers have
    experts (indices from 0). shared_intermediate_size: of the experts that every token passes. rotary_fraction: share
    of a head's channels that rotary embedding turns. rope_scaling: its scaling with the kind as "rope_type"; None where
    there is none. latent: sizes of latent attention, where a model has it. windowed_layers: which layers have the
    sliding window. norm_topk_prob: the chosen experts' weights are made to add up to 1; expert_groups: (groups, how
    many of them a token may choose from).
    """

    model_type: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    tie_word_embeddings: bool
    attention_bias: bool
    out_bias: bool
    qk_norm: bool
    sliding_window: int | None
    windowed_layers: frozenset[int]
    hidden_act: str
    num_experts: int | None
    num_experts_per_tok: int | None
    moe_intermediate_size: int | None
    moe_layers: frozenset[int]
    shared_intermediate_size: int | None
    norm_topk_prob: bool
    routed_scaling_factor: float
    expert_groups: tuple[int, int]
    rotary_fraction: float
    latent: LatentAttention | None
    torch_dtype: str
    raw: dict[str, Any]

    @property
    def dense_layers(self) -> frozenset[int]:
        return frozenset(range(self.num_layers)) - self.moe_layers

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's attention (biases and norms left out)."""
        h, heads, latent = self.hidden_size, self.num_attention_heads, self.latent
        if latent is None:
            return h * self.head_dim * (2 * heads + 2 * self.num_key_value_heads)
        query = heads * latent.query_dim
        q = h * query if latent.q_rank is None else latent.q_rank * (h + query)
        kv = h * (latent.kv_rank + latent.rope_dim) + latent.kv_rank * heads * (latent.nope_dim + latent.value_dim)
        return q + kv + h * heads * latent.value_dim

    def mlp_parameters(self, experts: int) -> int:
        """Weights of all layers' MLPs when each layer with experts counts `experts` of them, the shared ones and its
        router."""
        dense = 3 * self.hidden_size * self.intermediate_size
        moe = (
            3 * self.hidden_size * ((self.moe_intermediate_size or 0) * experts + (self.shared_intermediate_size or 0))
        )
        router = self.hidden_size * (self.num_experts or 0)
        return len(self.dense_layers) * dense + len(self.moe_layers) * (moe + router)

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, for the plan's arithmetic (biases and norms left out)."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        layers = self.num_layers * self.attention_parameters + self.mlp_parameters(self.num_experts or 0)
        return layers + embeddings


# Families whose attention has biases or q/k norms by construction rather than by a key of the config.
_ALWAYS_QKV_BIAS = {"qwen2"}
_ALWAYS_QK_NORM = {"qwen3", "qwen3_moe"}
_BIAS_ON_OUTPUT_TOO = {"llama", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3"}
# The default of `transformers` where a family's config leaves the key out.
_TIED_BY_DEFAULT = {"gemma", "gemma2"}
_BIASED_BY_DEFAULT = {"glm4", "gpt_oss"}
_HALF_ROTARY_BY_DEFAULT = {"glm4", "glm4_moe"}
_THETA_BY_DEFAULT = {"mixtral": 1e6, "gpt_oss": 150000.0}
_EXPERT_WEIGHTS_AS_THEY_ARE = {"qwen2_moe", "qwen3_moe"}
_NORM_EPS_BY_DEFAULT = {"mixtral": 1e-5, "glm4": 1.5625e-07, "glm4_moe": 1e-5, "gpt_oss": 1e-5}
_WINDOW_BY_DEFAULT = {"mistral": 4096, "gpt_oss": 128}
_EXPERTS_OF_FULL_SIZE = {"mixtral", "gpt_oss"}  # intermediate_size is an expert's


def load_hf_config(folder: str | Path, flag: str = "--hf-checkpoint") -> HFConfig:
    """Reads `folder/config.json`; `flag` is the one that names the folder.

    Raises ConfigError when the folder, the file or a needed key is missing.
    """
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise ConfigError(
            f"{flag} {folder}: no such folder; give a Hugging Face folder with config.json and *.safetensors"
        )
    if not path.is_file():
        raise ConfigError(f"{flag} {folder}: there is no config.json in it, so it is not a Hugging Face model folder")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # bad UTF-8 too
        raise ConfigError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: it holds a {type(raw).__name__}, not an object; is it a model's config.json?")
    return parse_hf_config(raw, str(path))


def parse_hf_config(raw: dict[str, Any], where: str = "config.json") -> HFConfig:
    """The dict of a config.json as HFConfig; `where` names it in errors."""

    def need(key: str) -> Any:
        if raw.get(key) is None:
            raise ConfigError(f"{where}: the key {key!r} is missing; is this a decoder language model?")
        if key != "model_type" and not (isinstance(raw[key], int) and raw[key] > 0):
            raise ConfigError(f"{where}: {key} is {raw[key]!r}; it must be a whole number above 0")
        return raw[key]

    model_type = need("model_type")
    heads = need("num_attention_heads")
    hidden = need("hidden_size")
    if raw.get("head_dim") is None and hidden % heads:
        raise ConfigError(
            f"{where}: hidden_size {hidden} is no multiple of num_attention_heads {heads} and head_dim is not given"
        )
    # transformers 5 moved rope_theta and the scaling into one dict; older files have two keys.
    rope = raw.get("rope_parameters") or {}
    use_window = raw.get("use_sliding_window", model_type in {"mistral", "mixtral", "gpt_oss"})
    bias = bool(raw.get("attention_bias", model_type in _BIASED_BY_DEFAULT))
    experts = raw.get("num_experts") or raw.get("num_local_experts") or raw.get("n_routed_experts")
    moe_size = raw.get("moe_intermediate_size")
    window = raw.get("sliding_window", _WINDOW_BY_DEFAULT.get(model_type)) if use_window else None
    partial = raw.get("partial_rotary_factor") or rope.get("partial_rotary_factor")
    return HFConfig(
        model_type=model_type,
        num_layers=need("num_hidden_layers"),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or hidden // heads,
        intermediate_size=need("intermediate_size"),
        vocab_size=need("vocab_size"),
        max_position_embeddings=raw.get("max_position_embeddings") or 2048,
        rms_norm_eps=raw.get("rms_norm_eps", _NORM_EPS_BY_DEFAULT.get(model_type, 1e-6)),
        rope_theta=float(raw.get("rope_theta") or rope.get("rope_theta") or _THETA_BY_DEFAULT.get(model_type, 1e4)),
        rope_scaling=_rope_scaling(raw.get("rope_scaling") or rope),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", model_type in _TIED_BY_DEFAULT)),
        attention_bias=raw.get("qkv_bias", True)
        if model_type == "qwen2_moe"
        else bias or model_type in _ALWAYS_QKV_BIAS,
        out_bias=bias and model_type in _BIAS_ON_OUTPUT_TOO,
        qk_norm=model_type in _ALWAYS_QK_NORM or bool(model_type == "glm4_moe" and raw.get("use_qk_norm")),
        sliding_window=window,
        windowed_layers=_windowed_layers(raw, where) if window else frozenset(),
        hidden_act=raw.get("hidden_act") or "silu",
        num_experts=experts,
        num_experts_per_tok=raw.get("num_experts_per_tok"),
        moe_intermediate_size=raw["intermediate_size"] if model_type in _EXPERTS_OF_FULL_SIZE else moe_size,
        moe_layers=_moe_layers(raw, where) if experts else frozenset(),
        shared_intermediate_size=(
            raw.get("shared_expert_intermediate_size") or (raw.get("n_shared_experts") or 0) * (moe_size or 0) or None
        ),
        # DeepSeek-V2's own configs may say true, and its code never divides.
        norm_topk_prob=bool(raw.get("norm_topk_prob", model_type not in _EXPERT_WEIGHTS_AS_THEY_ARE))
        and model_type != "deepseek_v2",
        routed_scaling_factor=float(raw.get("routed_scaling_factor") or 1.0),
        expert_groups=(raw.get("n_group") or 1, raw.get("topk_group") or 1),
        rotary_fraction=float(partial or (0.5 if model_type in _HALF_ROTARY_BY_DEFAULT else 1.0)),
        latent=_latent(need, raw.get("q_lora_rank")) if raw.get("kv_lora_rank") else None,
        torch_dtype=raw.get("dtype") or raw.get("torch_dtype") or "bfloat16",
        raw=raw,
    )


def _moe_layers(raw: dict[str, Any], where: str) -> frozenset[int]:
    """Layers with experts: all but the first ones (DeepSeek, GLM), or every few but the listed ones (Qwen)."""
    if raw.get("moe_layer_freq", 1) != 1:
        raise ConfigError(f"{where}: moe_layer_freq {raw['moe_layer_freq']} is not known, only 1")
    first, step = raw.get("first_k_dense_replace") or 0, raw.get("decoder_sparse_step") or 1
    dense = set(raw.get("mlp_only_layers") or ())
    layers = range(first, raw["num_hidden_layers"])
    return frozenset(layer for layer in layers if (layer + 1) % step == 0 and layer not in dense)


def _windowed_layers(raw: dict[str, Any], where: str) -> frozenset[int]:
    """Layers with the sliding window: as layer_types says, else from max_window_layers on, else all. gpt-oss: every
    other one. Qwen3-MoE: all, whatever those keys say, as in transformers."""
    layers, types = range(raw["num_hidden_layers"]), raw.get("layer_types")
    if raw["model_type"] == "qwen3_moe":
        return frozenset(layers)
    if types is not None:
        if len(types) != len(layers):
            raise ConfigError(f"{where}: layer_types has {len(types)} entries, num_hidden_layers is {len(layers)}")
        return frozenset(layer for layer in layers if types[layer] == "sliding_attention")
    if raw["model_type"] == "gpt_oss":
        return frozenset(layers[::2])
    return frozenset(layers[raw.get("max_window_layers") or 0 :])


def _rope_scaling(rope: dict[str, Any]) -> dict[str, Any] | None:
    """One form for those of old and new files, so that equal ones are equal."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    return {"rope_type": kind} | {
        key: value for key, value in rope.items() if key not in ("type", "rope_theta", "partial_rotary_factor")
    }


def _latent(need: Any, q_rank: int | None) -> LatentAttention:
    nope, rope, value = need("qk_nope_head_dim"), need("qk_rope_head_dim"), need("v_head_dim")
    return LatentAttention(q_rank, need("kv_lora_rank"), nope, rope, value)


def check_same_model(own: HFConfig, other: HFConfig, folder: str | Path) -> None:
    """Raises ConfigError unless `other`, read from `folder`, computes the same function of its weights as `own`."""
    free = {"raw", "torch_dtype", "max_position_embeddings"}
    names = [f.name for f in dataclasses.fields(HFConfig) if f.name not in free]
    wrong = [
        f"{n} {_shown(getattr(other, n))} instead of {_shown(getattr(own, n))}"
        for n in names
        if getattr(own, n) != getattr(other, n)
    ]
    if wrong:
        raise ConfigError(f"{folder} is another model than --hf-checkpoint: {', '.join(wrong)}")


def _shown(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else value
