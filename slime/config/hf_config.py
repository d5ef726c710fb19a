"""The sizes of a model, read from its Hugging Face `config.json`. Needs neither torch nor transformers."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from slime.config.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class HFConfig:
    """Sizes are counts; `head_dim` is per head. `raw` is the whole file, for what only one family knows."""

    model_type: str
    architectures: tuple[str, ...]
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
    qk_norm: bool
    sliding_window: int | None
    num_experts: int | None
    num_experts_per_tok: int | None
    moe_intermediate_size: int | None
    torch_dtype: str
    raw: dict[str, Any]

    @property
    def num_parameters(self) -> int:
        """Parameters of a dense or Qwen-MoE-like model, for the plan's arithmetic (biases and norms left out)."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_attention_heads + 2 * self.num_key_value_heads)
        if self.num_experts:
            mlp = 3 * self.hidden_size * (self.moe_intermediate_size or 0) * self.num_experts
        else:
            mlp = 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * (attention + mlp) + embeddings


# Families whose attention has biases or q/k norms by construction rather than by a key of the config.
_ALWAYS_QKV_BIAS = {"qwen2", "qwen2_moe"}
_ALWAYS_QK_NORM = {"qwen3", "qwen3_moe"}
# The default of `transformers` where a family's config leaves the key out.
_TIED_BY_DEFAULT = {"gemma", "gemma2"}


def load_hf_config(folder: str | Path) -> HFConfig:
    """Reads `folder/config.json`. Raises ConfigError when the folder, the file or a needed key is missing."""
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise ConfigError(
            f"--hf-checkpoint {folder}: no such folder; give a Hugging Face folder with config.json and *.safetensors"
        )
    if not path.is_file():
        raise ConfigError(
            f"--hf-checkpoint {folder}: there is no config.json in it, so it is not a Hugging Face model folder"
        )
    try:
        raw = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error})") from None
    return parse_hf_config(raw, str(path))


def parse_hf_config(raw: dict[str, Any], where: str = "config.json") -> HFConfig:
    """The dict of a config.json as HFConfig; `where` names it in errors."""

    def need(key: str) -> Any:
        if raw.get(key) is None:
            raise ConfigError(f"{where}: the key {key!r} is missing; is this a decoder language model?")
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
    scaling = raw.get("rope_scaling") or (rope if rope.get("rope_type", "default") != "default" else None)
    use_window = raw.get("use_sliding_window", model_type in {"mistral", "mixtral"})
    return HFConfig(
        model_type=model_type,
        architectures=tuple(raw.get("architectures") or ()),
        num_layers=need("num_hidden_layers"),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or hidden // heads,
        intermediate_size=need("intermediate_size"),
        vocab_size=need("vocab_size"),
        max_position_embeddings=raw.get("max_position_embeddings") or 2048,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=float(raw.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        rope_scaling=scaling,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", model_type in _TIED_BY_DEFAULT)),
        attention_bias=bool(raw.get("attention_bias", False)) or model_type in _ALWAYS_QKV_BIAS,
        qk_norm=model_type in _ALWAYS_QK_NORM,
        sliding_window=raw.get("sliding_window") if use_window else None,
        num_experts=raw.get("num_experts") or raw.get("num_local_experts") or raw.get("n_routed_experts"),
        num_experts_per_tok=raw.get("num_experts_per_tok"),
        moe_intermediate_size=raw.get("moe_intermediate_size"),
        torch_dtype=raw.get("dtype") or raw.get("torch_dtype") or "bfloat16",
        raw=raw,
    )
