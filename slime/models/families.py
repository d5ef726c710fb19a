"""Which declaration belongs to which `model_type` of a config.json."""

from collections.abc import Callable
from typing import Any

from slime.config.errors import ConfigError
from slime.config.hf_config import HFConfig
from slime.models import llama, mistral, qwen2, qwen3, qwen3_moe
from slime.models.table import Param, WeightTable

Declare = Callable[[HFConfig, int], list[Param]]

FAMILIES: dict[str, Declare] = {
    "llama": llama.declare,
    "mistral": mistral.declare,
    "qwen2": qwen2.declare,
    "qwen3": qwen3.declare,
    "qwen3_moe": qwen3_moe.declare,
}


def model_table(config: HFConfig, args: Any = None) -> WeightTable:
    """The declaration of the model in `config`; args: for --make-vocab-size-divisible-by. Raises ConfigError."""
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"model_type {config.model_type!r}: no declaration in slime/models; known are {', '.join(sorted(FAMILIES))}"
        )
    multiple = args.make_vocab_size_divisible_by if args is not None else 1
    return WeightTable(config, FAMILIES[config.model_type](config, multiple))
