"""Mixtral: Mistral's attention; experts in every layer."""

from slime.config.hf_config import HFConfig
from slime.models import blocks
from slime.models.table import Param

_NAMES = blocks.ExpertNames(
    router="block_sparse_moe.gate", one="block_sparse_moe.experts.{expert}.", gate="w1", up="w3", down="w2"
)


def declare(c: HFConfig, vocab_multiple: int) -> list[Param]:
    return [
        *blocks.embedding(c, vocab_multiple),
        *blocks.grouped_query_attention(c),
        *blocks.experts(c, _NAMES),
        *blocks.head(c, vocab_multiple),
    ]
