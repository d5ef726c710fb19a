"""Digests of a CPU engine's weights by XXH3, where SGLang takes SHA-256, which costs as much as all else of a sync.

They are computed on all the engine's threads at once, since nobody else works while they are waited for. SGLang loads
it through its own plug-in seam, as `cpu_attention.py`. Should it not, no digest would agree with the trainer's and the
first sync would stop the run.
"""

import pkgutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from slime.backends.sglang_utils.checksum import CpuDigest

_MODULE = "sglang.srt.utils.weight_checker"
_HASH, _ALL = f"{_MODULE}._hash_tensor", f"{_MODULE}.WeightChecker._compute_checksum"


class Digests:
    """Of the tensors that SGLang is about to ask for."""

    def __init__(self) -> None:
        self._begun: dict[tuple[int, int], Future[str]] = {}  # by address and size

    def all(self, usual: Callable[..., Any], checker: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `WeightChecker._compute_checksum`, which asks for one tensor after the other."""
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for _, tensor in checker._model_state():
                key = tensor.data_ptr(), tensor.nbytes
                if key not in self._begun:
                    self._begun[key] = pool.submit(hash_tensor, tensor)
            try:
                return usual(checker, *args, **kwargs)
            finally:
                self._begun.clear()

    def one(self, tensor: torch.Tensor) -> str:
        """Instead of `_hash_tensor`. What SGLang made only now, as dequantised weights, is hashed now."""
        begun = self._begun.get((tensor.data_ptr(), tensor.nbytes))
        return hash_tensor(tensor) if begun is None else begun.result()


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
