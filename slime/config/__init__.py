"""Flags, their derivation and their checks. Nothing heavy is imported here."""

from slime.config.args import Args

__all__ = ["Args"]
