"""Decoding on a CPU engine: one attention call for many sequences, where SGLang 0.5 calls once per sequence and layer.

SGLang loads it through its own plug-in seam: CPU engines find the entry point in `stand_ins/`, GPU engines do not. It
takes the place of the backend `torch_native`, by which name SGLang knows that there are no compiled kernels.
"""

import dataclasses
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from slime.utils.cpu_bf16 import cpu_has_bf16


@dataclasses.dataclass(frozen=True)
class Rows:
    """Sequences that are attended in one call.

    at: int64 [n], their places in the batch. slots: int64 [n * longest], where the cache has their tokens. lengths:
    int64 [n].
    """

    at: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    longest: int

    def seen(self, window: int | None) -> torch.Tensor:
        """bool [n, 1, 1, longest]: the tokens that the newest one sees; SGLang's window leaves out itself."""
        places = torch.arange(self.longest)
        seen = places < self.lengths[:, None]
        if window is not None:
            seen &= places >= self.lengths[:, None] - 1 - window
        return seen[:, None, None]


def plan(req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor) -> list[Rows]:
    """Sequences by length, so that none is padded to more than twice its own (from 128 tokens on).

    req_to_token: int [requests, context], the cache slot of each token; req_pool_indices, seq_lens: int64 [sequences].
    """
    groups: dict[int, list[int]] = {}
    lengths = seq_lens.tolist()
    for i, length in enumerate(lengths):
        groups.setdefault(max(length - 1, 127).bit_length(), []).append(i)
    out = []
    for group in groups.values():
        at = torch.tensor(group)
        longest = max(lengths[i] for i in group)
        mine = seq_lens[at].long()
        slots = req_to_token[req_pool_indices[at], :longest].long()
        slots = torch.where(torch.arange(longest) < mine[:, None], slots, slots[:, :1])  # a real token behind the mask
        out.append(Rows(at, slots.flatten(), mine, longest))
    return out


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Rows, scale: float | None, window: int | None
) -> torch.Tensor:
    """query [n, heads, D] of the newest tokens, caches [slots, groups, D] and [slots, groups, Dv] -> [n, heads, Dv].

    The heads of a group are laid as rows of one query, so that keys and values are not repeated.
    """
    n, heads, _ = query.shape
    shape = (n, rows.longest, *keys.shape[1:])
    dtype = query.dtype if query.dtype != torch.bfloat16 or cpu_has_bf16() else torch.float32
    k = keys.index_select(0, rows.slots).view(shape).transpose(1, 2).to(dtype)
    v = values.index_select(0, rows.slots).view(*shape[:3], values.size(-1)).transpose(1, 2).to(dtype)
    grouped = query.view(n, keys.size(1), heads // keys.size(1), query.size(-1)).to(dtype)
    out = torch.nn.functional.scaled_dot_product_attention(grouped, k, v, attn_mask=rows.seen(window), scale=scale)
    return out.reshape(n, heads, values.size(-1)).to(query.dtype)


class BatchedDecode(TorchNativeAttnBackend):
    """SGLang's attention on plain torch, decoding in few calls."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self._rows: list[Rows] | None = None
        if forward_batch.forward_mode.is_decode() and forward_batch.encoder_lens is None:
            table = self.req_to_token_pool.req_to_token
            self._rows = plan(table, forward_batch.req_pool_indices, forward_batch.seq_lens)

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *args: Any,
        scaling: float | None = None,
        sliding_window_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if self._rows is None:  # encoder and decoder models
            kwargs |= dict(scaling=scaling, sliding_window_size=sliding_window_size)
            return super()._run_sdpa_forward_decode(query, output, k_cache, v_cache, *args, **kwargs)
        window = sliding_window_size if sliding_window_size is not None and sliding_window_size > -1 else None
        for rows in self._rows:
            output[rows.at] = attend(query[rows.at], k_cache, v_cache, rows, scaling, window)
        return output


def register() -> None:
    """The plug-in's entry point, called by SGLang in each of its processes."""
    register_attention_backend("torch_native")(BatchedDecode)
