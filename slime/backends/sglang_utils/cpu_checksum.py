"""Digests of a CPU engine's weights by XXH3, where SGLang takes SHA-256, which costs as much as all else of a sync.

They are computed on all the engine's threads at once, since nobody else works while they are waited for. SGLang loads
it through its own plug-in seam, as `cpu_attention.py`. Should it not, no digest would agree with the trainer's and the
first sync would stop the run.
"""

import pkgutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from slime.backends.sglang_utils.checksum import CpuDigest

_MODULE = "sglang.srt.utils.weight_checker"
_HASH, _ALL = f"{_MODULE}._hash_tensor", f"{_MODULE}.WeightChecker._compute_checksum"


class Digests:
    """Of the tensors that SGLang is about to ask for."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], str] = {}

    def all(self, usual: Callable[..., Any], checker: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `WeightChecker._compute_checksum`, which asks for one tensor after the other."""
        tensors = {_place(tensor): tensor for _, tensor in checker._model_state()}
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            self._known = dict(zip(tensors, pool.map(hash_tensor, tensors.values()), strict=True))
        try:
            return usual(checker, *args, **kwargs)
        finally:
            self._known.clear()

    def one(self, tensor: torch.Tensor) -> str:
        """Instead of `_hash_tensor`. What SGLang made only now, as dequantised weights, is hashed now."""
        return self._known.get(_place(tensor)) or hash_tensor(tensor)


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and size in bytes."""
    return tensor.data_ptr(), tensor.nbytes


def hash_tensor(tensor: torch.Tensor) -> str:
    """What `/weights_checker` reports of a parameter."""
    digest = CpuDigest(1)
    digest.update(0, tensor)
    return digest.hexdigest()


def register() -> None:
    """The plug-in's entry point."""
    for target in (_HASH, _ALL):
        pkgutil.resolve_name(target)
    digests = Digests()
    HookRegistry.register(_HASH, digests.one, HookType.REPLACE)
    HookRegistry.register(_ALL, digests.all, HookType.AROUND)
