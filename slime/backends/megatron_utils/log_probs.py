"""What losses read off the model's output: log-probs, entropy, most likely tokens and values of response tokens.

Context parallelism: what comes out are whole responses, on every rank (`cp_utils.py`); only logits are cut.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor

from slime.backends.megatron_utils.cp_utils import ResponsePart, context_parallel, response_part
from slime.utils.vocab_parallel import vocab_parallel_log_probs_and_entropy
from slime.utils.vocab_topk import vocab_parallel_topk_log_probs


def response_rows(total_lengths: Sequence[int], response_lengths: Sequence[int]) -> Tensor:
    """Rows of the packed logits that predict response tokens: int64 [sum R], on the CPU.

    They count in the whole row, before context parallelism cuts it. Row t - 1 predicts token t; the response of a
    sample is its last `response_length` tokens. Raises ValueError where no row can: a response as long as its sample
    has no token before it.
    """
    rows, end = [], 0
    for i, (total, response) in enumerate(zip(total_lengths, response_lengths, strict=True)):
        end += total
        if not 0 <= response < total:
            raise ValueError(
                f"sample {i} of the micro-batch: {response} response tokens of {total}; the first response token needs "
                "a token before it"
            )
        rows.append(torch.arange(end - response - 1, end - 1))
    return torch.cat(rows) if rows else torch.zeros(0, dtype=torch.long)


def get_responses(
    logits: Tensor,
    *,
    args: Any,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    max_seq_lens: Sequence[int] | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Per sample (logits [R, V / tp] that predict its response, response tokens int64 [R]).

    logits: [1, T / cp, V / tp], already divided by the rollout temperature. Context-parallel ranks exchange the rows
    that they lack, so each gets whole responses. max_seq_lens: not used, sequences are packed.
    """
    part = _response_part(args, logits, total_lengths, response_lengths)
    flat, rows, lengths = logits.squeeze(0), part.rows.to(logits.device), list(response_lengths)
    if part.context.size > 1:
        parts: Any = part.whole(flat[rows]).split(lengths)
    else:
        parts = (flat[mine] for mine in rows.split(lengths))  # one sample's copy at a time
    for mine, tokens, response in zip(parts, unconcat_tokens, lengths, strict=True):
        yield mine, tokens[len(tokens) - response :]


def get_log_probs_and_entropy(
    logits: Any,
    *,
    args: Any,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    max_seq_lens: Sequence[int] | None = None,
    token_ids: Sequence[Tensor] | None = None,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Log-probs of the response tokens and, where asked for, the entropy of their distributions.

    logits: a tensor [1, T / cp, V / tp] already divided by the rollout temperature, or a DeferredLogits.
    token_ids: K other tokens per response token, [R, K] integers per sample, whose log-probs are wanted too.
    Returns (an empty tensor, {"log_probs": list, "entropy": list}), float32 [R] per sample; with token_ids also
    "token_log_probs", float32 [R, K]. All carry gradients.
    """
    here = unconcat_tokens[0].device
    part = _response_part(args, logits, total_lengths, response_lengths)
    rows = part.rows.to(here)
    targets = torch.cat(
        [tokens[len(tokens) - n :] for tokens, n in zip(unconcat_tokens, response_lengths, strict=True)]
    )[part.places.to(here)]
    if token_ids is not None:
        others = torch.cat(list(token_ids)).to(here)[part.places.to(here)].long()
        if others.dim() == 1:  # no sample here has a response, or none at all: nothing says what K is
            others = others.unsqueeze(1)
        targets = torch.cat([targets.unsqueeze(1), others], dim=1)
    if isinstance(logits, Tensor):
        log_probs, entropy = vocab_parallel_log_probs_and_entropy(
            logits.squeeze(0)[rows], targets, tp_group=_tensor_parallel_group(), with_entropy=with_entropy
        )
    else:
        log_probs, entropy = logits.log_probs_and_entropy(rows, targets, with_entropy)
    lengths, log_probs = list(response_lengths), part.whole(log_probs)
    if token_ids is None:
        out = {"log_probs": list(log_probs.split(lengths))}
    else:
        out = {
            "log_probs": list(log_probs[:, 0].split(lengths)),
            "token_log_probs": list(log_probs[:, 1:].split(lengths)),
        }
    if entropy is not None:
        out["entropy"] = list(part.whole(entropy).split(lengths))
    return torch.empty(0, device=here), out


def log_probs_of(
    args: Any,
    batch: dict[str, Any],
    logits: Any,
    with_entropy: bool = False,
    token_ids: Sequence[Tensor] | None = None,
) -> dict[str, list[Tensor]]:
    """The dict of `get_log_probs_and_entropy` of a micro-batch's own tokens."""
    return get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=with_entropy,
        token_ids=token_ids,
    )[1]


@torch.no_grad()
def get_topk_log_probs(
    logits: Any, k: int, *, args: Any, total_lengths: Sequence[int], response_lengths: Sequence[int]
) -> dict[str, list[Tensor]]:
    """The k most likely tokens at each response token, most likely first; logits as in `get_log_probs_and_entropy`.

    Returns {"topk_log_probs": float32 [R, k] per sample, "topk_indices": int32 [R, k]}.
    """
    part = _response_part(args, logits, total_lengths, response_lengths)
    rows = part.rows.to(logits.device)
    if isinstance(logits, Tensor):
        log_probs, ids = vocab_parallel_topk_log_probs(logits.squeeze(0)[rows], k, tp_group=_tensor_parallel_group())
    else:
        log_probs, ids = logits.topk_log_probs(rows, k)
    whole = {"topk_log_probs": part.whole(log_probs), "topk_indices": part.whole(ids.int())}
    return {name: list(x.split(list(response_lengths))) for name, x in whole.items()}


def get_values(
    logits: Tensor, *, args: Any, total_lengths: Sequence[int], response_lengths: Sequence[int]
) -> list[Tensor]:
    """A value head's output [1, T / cp, 1] as float32 [R] per sample: the value before each response token."""
    part = _response_part(args, logits, total_lengths, response_lengths)
    values = part.whole(logits.reshape(-1)[part.rows.to(logits.device)].float())
    return list(values.split(list(response_lengths)))


def _response_part(
    args: Any, logits: Any, total_lengths: Sequence[int], response_lengths: Sequence[int]
) -> ResponsePart:
    """Rows of this rank's logits (a tensor [1, T / cp, ...] or a DeferredLogits) and the tokens they predict."""
    rows, context = response_rows(total_lengths, response_lengths), context_parallel(args)
    if context.size == 1:
        return ResponsePart(rows, torch.arange(len(rows)), len(rows), context)
    local_rows = logits.size(1) if isinstance(logits, Tensor) else logits.hidden.size(0)
    return response_part(rows, total_lengths, context, local_rows)


def _tensor_parallel_group() -> Any:
    return mpu.get_tensor_model_parallel_group() if mpu.model_parallel_is_initialized() else None
