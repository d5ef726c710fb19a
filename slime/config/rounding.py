"""Where a bf16 trainer rounds: --rounding-profile and --rounding-regions (docs/rounding.md)."""

from collections.abc import Iterator

from slime.config.args import Args
from slime.config.errors import ConfigError
from slime.config.hf_config import HFConfig

REGIONS = ("rope", "swiglu", "norm")


def rounding_regions(args: Args) -> frozenset[str]:
    """Where the trainer rounds once, as --rounding-profile says. Raises ConfigError for unknown names."""
    if args.rounding_profile == "off":
        return frozenset()
    if args.rounding_regions is None:
        return frozenset(REGIONS)
    names = [name.strip() for name in args.rounding_regions.split(",") if name.strip()]
    unknown = [name for name in names if name not in REGIONS]
    if unknown or not names:
        raise ConfigError(
            f"--rounding-regions {args.rounding_regions!r}: "
            + (f"there is no region {unknown[0]!r}" if unknown else "it names no region; use --rounding-profile off")
            + f"; known: {', '.join(REGIONS)} (any of them, with commas)"
        )
    return frozenset(names)


def has_regions(args: Args) -> bool:
    """Whether the model is built of modules that can round once: for a profile, and for the probe."""
    return args.rounding_profile != "off" or args.rounding_probe


def rounding_problems(args: Args, hf: HFConfig | None) -> Iterator[str]:
    """A line per combination of flags that could not do what it says."""
    if args.rounding_regions is not None and args.rounding_profile == "off":
        yield f"--rounding-regions {args.rounding_regions} has no effect without --rounding-profile sglang"
    try:
        rounding_regions(args)
    except ConfigError as error:
        yield str(error)
    if not has_regions(args):
        return
    what = "--rounding-probe" if args.rounding_profile == "off" else f"--rounding-profile {args.rounding_profile}"
    if args.params_dtype != "bfloat16":
        yield (
            f"{what}: it says where a bf16 trainer rounds and has no effect with --params-dtype {args.params_dtype}; "
            "use bfloat16, or leave it out"
        )
    if args.custom_model_provider_path:
        yield f"{what} has no effect on a model of your own (--custom-model-provider-path)"
    if hf is not None and (reason := _unsupported(hf)) is not None:
        yield f"{what}: {hf.model_type} has {reason}, whose rounding in the engine is not known here; leave it out"
    if args.rounding_probe and args.loss_type == "sft_loss":
        yield "--rounding-probe compares with the engine's log-probs, and fine-tuning has none"
    if args.rounding_probe and args.debug_rollout_only:
        yield "--rounding-probe is the trainer's, and --debug-rollout-only starts none"


def _unsupported(hf: HFConfig) -> str | None:
    if hf.latent is not None:
        return "latent attention"
    if hf.model_type == "gpt_oss":
        return "another activation than SwiGLU"
    if hf.model_type == "glm4":
        return "norms between a part and the residual stream"
    return None
