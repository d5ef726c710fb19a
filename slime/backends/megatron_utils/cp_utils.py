"""Context parallelism: which part of a sequence a rank holds.

Context parallelism is not built yet (the trainer refuses --context-parallel-size above 1), so a rank holds whole
sequences and both functions hand back what they got. Losses and plug-ins call them where a slice would matter.
"""

from megatron.core import parallel_state as mpu
from torch import Tensor


def _whole(what: str) -> None:
    if mpu.model_parallel_is_initialized() and mpu.get_context_parallel_world_size() > 1:
        raise NotImplementedError(f"{what} under --context-parallel-size above 1 is not built yet")


def slice_log_prob_with_cp(log_prob: Tensor, total_length: int, response_length: int) -> Tensor:
    """This rank's part of a per-token tensor [response_length] of one sample."""
    if log_prob.size(0) != response_length:
        raise ValueError(f"a per-token tensor of {log_prob.size(0)} for a response of {response_length} tokens")
    _whole("slicing a response")
    return log_prob


def all_gather_with_cp(tensor: Tensor, total_length: int, response_length: int) -> Tensor:
    """The whole per-token tensor [response_length] of one sample, from each rank's part; gradients flow back."""
    _whole("gathering a response")
    if tensor.size(0) != response_length:
        raise ValueError(f"a per-token tensor of {tensor.size(0)} for a response of {response_length} tokens")
    return tensor
