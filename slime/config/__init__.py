"""Flags, their derivation and their checks. Nothing heavy is imported here."""

from collections.abc import Sequence

from slime.config.args import Args
from slime.config.derive import derive
from slime.config.errors import ConfigError
from slime.config.hf_config import HFConfig, load_hf_config
from slime.config.layout import Layout, due, make_layout
from slime.config.parse import parse_args
from slime.config.validate import check_limits, validate

__all__ = ["Args", "ConfigError", "HFConfig", "Layout", "due", "load_args", "load_hf_config", "make_layout"]


def load_args(argv: Sequence[str]) -> Args:
    """Flags to read-only, derived, validated `Args`. Raises ConfigError before anything is started."""
    args = parse_args(argv)
    check_limits(args)
    hf = load_hf_config(args.hf_checkpoint) if args.hf_checkpoint else None
    args = derive(args, hf)
    validate(args, hf)
    return args.freeze()
