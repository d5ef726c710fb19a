"""Memory that the trainer gives up while engines generate on the same device (--offload-train)."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from slime.backends.megatron_utils.model import inner_optimizers, unwrap


class TrainerMemory:
    """Parameters, optimizer state and gradient buffers of a rank, each moved to the host and back as a whole.

    Works on storages, so every view of a buffer (Megatron's parameters are views of DDP's) stays valid. Gradients are
    not kept: a step zeroes them first. What an NCCL group and the CUDA context hold stays on the device.
    """

    def __init__(self, model: Sequence[Any], optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer
        self._gone: dict[str, list[tuple[torch.UntypedStorage, int, torch.UntypedStorage | None]]] = {}

    def release(self, *parts: str) -> None:
        """Gives up the memory of "params", "optimizer" or "grads"; twice is once."""
        for part in parts:
            if part not in self._gone:
                self._gone[part] = [_move_out(s, keep=part != "grads") for s in self._of(part)]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def restore(self, *parts: str) -> None:
        """Undoes `release`, on the same device; nothing for what is there."""
        for part in parts:
            for storage, nbytes, host in self._gone.pop(part, []):
                storage.resize_(nbytes)
                if host is not None:
                    storage.copy_(host)

    def _of(self, part: str) -> list[torch.UntypedStorage]:
        model = _storages(_model_tensors(self._model))
        if part == "params":
            return model
        if part == "grads":
            return _storages(b.grad_data for b in _ddp_buffers(self._model) if b.grad_data is not None)
        # In fp32 the optimizer works on views of the parameters; those move with the parameters.
        shared = {s.data_ptr() for s in model}
        return [s for s in _storages(_optimizer_tensors(self._optimizer)) if s.data_ptr() not in shared]


def _model_tensors(model: Sequence[Any]) -> Iterator[torch.Tensor]:
    for chunk in model:
        yield from (p.data for p in unwrap(chunk).parameters())
    yield from (b.param_data for b in _ddp_buffers(model) if b.param_data is not None)


def _ddp_buffers(model: Sequence[Any]) -> list[Any]:
    """Megatron's flat buffers of dense and of expert parameters. (`buffers` is also a method of every module.)"""
    groups = [getattr(chunk, name, None) for chunk in model for name in ("buffers", "expert_parallel_buffers")]
    return [buffer for group in groups if isinstance(group, list) for buffer in group]


def _optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """State (Adam's moments) and the tensors that are updated: fp32 copies of the parameters, or views of them."""
    for inner in inner_optimizers(optimizer):
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim() > 0)
        for group in inner.param_groups:
            yield from (p.data for p in group["params"])


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Each storage once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.untyped_storage().nbytes()}
    return list(found.values())


def _move_out(
    storage: torch.UntypedStorage, keep: bool
) -> tuple[torch.UntypedStorage, int, torch.UntypedStorage | None]:
    nbytes = storage.nbytes()
    host = None
    if keep:
        host = torch.UntypedStorage(nbytes)
        if storage.device.type == "cuda":
            host = host.pin_memory()
        host.copy_(storage)
    storage.resize_(0)
    return storage, nbytes, host
