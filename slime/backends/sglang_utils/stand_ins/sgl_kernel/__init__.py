"""Names that SGLang binds while it is imported on a CPU whose kernels are not compiled. Nothing here computes.

They belong to speculative decoding, which the CPU engine does not offer: reaching one is an error, never a fallback.
"""

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0.0.0+slime.standin"


def _missing_kernel(name: str) -> Callable[..., NoReturn]:
    def kernel(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} was called, but slime's CPU engine has no compiled SGLang kernels; "
            "turn off the feature that needs it (speculative decoding), or run on a GPU"
        )

    kernel.__name__ = kernel.__qualname__ = name
    return kernel


assign_req_to_token_pool_cpu = _missing_kernel("assign_req_to_token_pool_cpu")
assign_extend_cache_locs_cpu = _missing_kernel("assign_extend_cache_locs_cpu")
assign_draft_cache_locs_contiguous_cpu = _missing_kernel("assign_draft_cache_locs_contiguous_cpu")
build_tree_kernel_efficient_cpu = _missing_kernel("build_tree_kernel_efficient_cpu")
copy_all_layer_kv_cache_cpu = _missing_kernel("copy_all_layer_kv_cache_cpu")
fill_accept_out_cache_loc_cpu = _missing_kernel("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _missing_kernel("fill_bonus_tokens_cpu")
rotate_input_ids_cpu = _missing_kernel("rotate_input_ids_cpu")
verify_tree_greedy_cpu = _missing_kernel("verify_tree_greedy_cpu")
