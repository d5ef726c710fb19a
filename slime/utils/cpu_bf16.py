"""Whether this machine's CPU computes in bf16. torch only."""

import torch


def cpu_has_bf16() -> bool:
    """Without such instructions torch's products of bf16 numbers take up to thirty times as long as of float32 ones."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()
