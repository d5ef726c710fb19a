"""The one place that knows whether Megatron-Core runs on GPUs or on CPU cores.

Megatron names CUDA in some 240 places. On a machine without CUDA each imported `megatron.core.*` module gets its
own view of the name `torch`, in which "cuda" means the CPU; torch itself stays as it is for everybody else. With
CUDA nothing here does anything.
"""

import collections
import contextlib
import functools
import importlib.machinery
import os
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from slime.config.errors import ConfigError

_FACTORIES = (
    "tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "eye", "linspace", "rand", "randn", "randint",
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
)  # fmt: skip


def has_cuda() -> bool:
    return torch.cuda.is_available()


def is_cpu(args: Any) -> bool:
    """Whether the trainer runs on CPU cores: `--device cpu`, or `auto` without CUDA. Raises ConfigError on a clash."""
    device = getattr(args, "device", "auto")
    if device == "cuda" and not has_cuda():
        raise ConfigError("--device cuda: torch sees no CUDA device in the trainer; use --device auto or cpu")
    if device == "cpu" and has_cuda():
        raise ConfigError("--device cpu: hide the GPUs from the trainer's processes (CUDA_VISIBLE_DEVICES='')")
    return not has_cuda()


def backend() -> str:
    """torch.distributed's backend for the trainer."""
    return "nccl" if has_cuda() else "gloo"


def current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


def bind_rank(local_rank: int, ranks_on_node: int) -> torch.device:
    """Gives this process its GPU (Ray shows an actor only its own: then cuda:0), or its share of the cores."""
    if has_cuda():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    else:
        torch.set_num_threads(threads_per_rank(ranks_on_node))
    return current_device()


def threads_per_rank(ranks_on_node: int) -> int:
    """Cores this process may use, divided by the ranks that share them; at least one."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, ranks_on_node))


def synchronize() -> None:
    """Waits for the GPU, so that a timer around a phase measures it."""
    if has_cuda():
        torch.cuda.synchronize()


class _NullStream:
    """A CUDA stream or event on a machine that runs everything in order."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: _NullStream() if name == "record_event" else None

    def query(self) -> bool:
        return True


class _CpuCuda(types.ModuleType):
    """`torch.cuda` as Megatron's modules see it on CPU; what is not named here is torch.cuda's own."""

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        self.get_rng_state = lambda device=None: torch.get_rng_state()
        self.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
        self.manual_seed = self.manual_seed_all = torch.manual_seed
        self.current_device = lambda: torch.device("cpu")
        self.current_stream = self.default_stream = lambda *args: _NullStream()
        self.Stream = self.Event = lambda *args, **kwargs: _NullStream()
        self.stream = lambda *args: contextlib.nullcontext()
        self.synchronize = self.empty_cache = lambda *args: None
        self.is_initialized = lambda: True

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _CpuTorch(types.ModuleType):
    """`torch` as Megatron's modules see it on CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _CpuCuda()
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _EagerSends(types.ModuleType):
    """`torch.distributed` as Megatron's pipeline sees it on CPU: a send does not wait for the receiver.

    The interleaved schedule sends a shape, then the data, and counts on NCCL's buffer for small messages: with gloo,
    whose sends end when they are received, two neighbours can wait for each other's shape for ever.
    """

    IN_FLIGHT = 64  # sends that a rank may be ahead of its neighbours

    def __init__(self) -> None:
        super().__init__("torch.distributed")
        self._sent: collections.deque[tuple[Any, torch.Tensor]] = collections.deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)

    def batch_isend_irecv(self, ops: list[torch.distributed.P2POp]) -> list[Any]:
        """Starts all; returns the handles of what is received."""
        receives = []
        for op in ops:
            tensor = op.tensor.detach()  # keeps the data of an output that Megatron empties once it is "sent"
            work = op.op(tensor, op.peer, op.group, op.tag)
            if op.op is torch.distributed.isend:
                self._sent.append((work, tensor))
            else:
                receives.append(work)
        while len(self._sent) > self.IN_FLIGHT:
            self._sent.popleft()[0].wait()
        return receives


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def _called_by_megatron() -> bool:
    return sys._getframe(2).f_globals.get("__name__", "").startswith("megatron.core")


def _adapt_tensor_methods() -> None:
    """`x.cuda()` and `x.type() == 'torch.cuda.FloatTensor'` are methods of tensors, which no module-level view reaches.

    They answer for CUDA only when the caller is a Megatron module; everybody else gets torch's own answer.
    """
    if getattr(torch.Tensor.cuda, "adapted_for_megatron", False):
        return
    plain_cuda, plain_type = torch.Tensor.cuda, torch.Tensor.type

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if _called_by_megatron() else plain_cuda(self, *args, **kwargs)

    def type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = plain_type(self, *args, **kwargs)
        if isinstance(answer, str) and _called_by_megatron():
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    cuda.adapted_for_megatron = True  # type: ignore[attr-defined]
    torch.Tensor.cuda, torch.Tensor.type = cuda, type  # type: ignore[method-assign,assignment]


def _move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron converts only tensors that are on a GPU; gloo's all-to-all wants its splits as numpy all the same."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
    """gloo copies whole buffers even where a group has one rank and the result is already in place."""

    def call(output: torch.Tensor, source: torch.Tensor, *args: Any, group: Any, **kwargs: Any) -> Any:
        if group.size() == 1 and output.data_ptr() == source.data_ptr():
            return None
        return collective(output, source, *args, group=group, **kwargs)

    return call


def _adapt_module(module: Any, view: _CpuTorch) -> None:
    name = module.__name__
    if module.__dict__.get("torch") is torch:
        module.torch = view  # type: ignore[attr-defined]
    if name == "megatron.core.jit":
        module.disable_jit_fuser()  # torch.compile of tiny elementwise functions costs more than it gives here
    elif name == "megatron.core.tensor_parallel.random":
        module._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()  # type: ignore[attr-defined]
        module._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)  # type: ignore[attr-defined]
    elif name == "megatron.core.distributed.param_and_grad_buffer":
        module.dist_reduce_scatter_func = _unless_alone(module.dist_reduce_scatter_func)
        module.dist_all_gather_func = _unless_alone(module.dist_all_gather_func)
    elif name == "megatron.core.pipeline_parallel.p2p_communication":
        module.torch = _CpuTorch()  # type: ignore[attr-defined]
        module.torch.distributed = _EagerSends()
    elif name == "megatron.core.transformer.multi_latent_attention" and not isinstance(module.TELinear, type):
        module.HAVE_TE = False  # type: ignore[attr-defined]  # Megatron's stand-in for Transformer Engine imports too
    elif name.startswith("megatron.core.transformer.moe"):
        if hasattr(module, "maybe_move_tensor_to_cpu"):
            module.maybe_move_tensor_to_cpu = _move_to_cpu
        if name.endswith("moe_utils") and not hasattr(module, "te_general_gemm"):
            module.te_general_gemm = None  # type: ignore[attr-defined]  # undefined there without Transformer Engine


class _MegatronFinder:
    """Import hook: lets the normal finders work, then adapts each `megatron.core` module right after it ran."""

    def __init__(self, view: _CpuTorch) -> None:
        self.view = view

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("megatron.core"):
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None and finder is not self else None
            if spec is not None and spec.loader is not None:
                self._adapt_after(spec.loader)
                return spec
        return None

    def _adapt_after(self, loader: Any) -> None:
        run = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that Transformer Engine and apex are absent is no news on CPU
                run(module)
            _adapt_module(module, self.view)

        loader.exec_module = exec_module


def adapt_megatron() -> None:
    """Makes Megatron-Core run on CPU; nothing with CUDA or when called again. Call it before importing megatron."""
    if has_cuda() or any(isinstance(finder, _MegatronFinder) for finder in sys.meta_path):
        return
    view = _CpuTorch()
    sys.meta_path.insert(0, _MegatronFinder(view))  # type: ignore[arg-type]
    _adapt_tensor_methods()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core"):
            _adapt_module(module, view)
