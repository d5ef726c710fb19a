"""Lets the real torchvision be imported beside a CPU build of torch, then steps aside for it.

The wheel's compiled library wants CUDA, so it does not load, and the wheel's Python code then trips over operators
that nobody declared. Declaring their schemas, without kernels, is enough; an image operator that is called still fails.
"""

import importlib
import sys
from pathlib import Path

import torch

_SCHEMAS = ("nms", "qnms")


def _declare_operators() -> None:
    # The declarations live as long as the library object does, so it is parked on the module that outlives us.
    if hasattr(torch, "_slime_torchvision_schemas"):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in _SCHEMAS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch._slime_torchvision_schemas = library  # type: ignore[attr-defined]


def _import_the_real_one() -> None:
    here = Path(__file__).resolve().parents[1]
    kept = sys.path[:]
    sys.path[:] = [entry for entry in kept if Path(entry or ".").resolve() != here]
    try:
        del sys.modules["torchvision"]
        importlib.import_module("torchvision")
    finally:
        sys.path[:] = kept


_declare_operators()
_import_the_real_one()
