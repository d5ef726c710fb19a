"""Digests of a CPU engine's weights by XXH3, where SGLang takes SHA-256, which costs as much as all else of a sync.

SGLang loads it through its own plug-in seam, as `cpu_attention.py`. Should it not, no digest would agree with the
trainer's and the first sync would stop the run.
"""

import pkgutil

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from slime.backends.sglang_utils.checksum import CpuDigest

_HASH = "sglang.srt.utils.weight_checker._hash_tensor"


def hash_tensor(tensor: torch.Tensor) -> str:
    """What `/weights_checker` reports of a parameter."""
    digest = CpuDigest(1)
    digest.update(0, tensor)
    return digest.hexdigest()


def register() -> None:
    """The plug-in's entry point."""
    pkgutil.resolve_name(_HASH)
    HookRegistry.register(_HASH, hash_tensor, HookType.REPLACE)
