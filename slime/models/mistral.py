"""Mistral: Llama's weights; its sliding window is a matter of attention, not of weights."""

from slime.models.llama import declare

__all__ = ["declare"]
