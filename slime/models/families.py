"""Which declaration belongs to which `model_type` of a config.json."""

from collections.abc import Callable
from typing import Any

from slime.config.errors import ConfigError
from slime.config.hf_config import HFConfig
from slime.models import deepseek, glm4, glm4_moe, gpt_oss, llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe
from slime.models.table import Param, WeightTable

Declare = Callable[[HFConfig, int], list[Param]]

FAMILIES: dict[str, Declare] = {
    "llama": llama.declare,
    "mistral": mistral.declare,
    "mixtral": mixtral.declare,
    "qwen2": qwen2.declare,
    "qwen2_moe": qwen2_moe.declare,
    "qwen3": qwen3.declare,
    "qwen3_moe": qwen3_moe.declare,
    "glm4": glm4.declare,
    "glm4_moe": glm4_moe.declare,
    "deepseek_v2": deepseek.declare_v2,
    "deepseek_v3": deepseek.declare_v3,
    "gpt_oss": gpt_oss.declare,
}


def model_table(config: HFConfig, args: Any = None) -> WeightTable:
    """The declaration of the model in `config`; args: for --make-vocab-size-divisible-by. Raises ConfigError."""
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"model_type {config.model_type!r}: no declaration in slime/models; known are {', '.join(sorted(FAMILIES))}"
        )
    multiple = args.make_vocab_size_divisible_by if args is not None else 1
    return WeightTable(config, FAMILIES[config.model_type](config, multiple))
