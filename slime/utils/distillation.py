"""Distillation over a teacher's most likely tokens instead of over the sampled one."""

import math

import torch
from torch import Tensor

# The K tokens never hold more than this: log of the rest stays finite, and equal on both sides where K is everything.
_LARGEST_LOG_MASS = -1e-7


def with_tail(log_probs: Tensor) -> Tensor:
    """[..., K] log-probs of different tokens to [..., K + 1]: the last is log of what all other tokens have together.

    The rest is at least 1e-7: a row whose K tokens are the whole vocabulary has that.
    """
    mass = log_probs.logsumexp(-1, keepdim=True).clamp(max=_LARGEST_LOG_MASS)
    return torch.cat([log_probs, torch.log(-torch.expm1(mass))], dim=-1)


def compute_topk_kl(log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
    """KL(student || teacher) over K tokens and one bin for all the others, in nats (SDFT, SDPO: top-K distillation).

    log_probs, teacher_log_probs: [..., K], of student and teacher at the same K ids, the teacher's most likely ones.
    Returns [...]. At least 0, and with K the whole vocabulary the full KL: without the bin it would be neither. The
    gradient of row logits z is p_v (log p_b(v) - log q_b(v) - KL), b(v) the bin of v: it reaches all tokens.
    Masked rows must hold log-probs of something already (`select_rows`): K times 0.0 has mass K and is none.
    """
    student, teacher = with_tail(log_probs), with_tail(teacher_log_probs.detach())
    return (student.exp() * (student - teacher)).sum(-1)


def select_rows(log_probs: Tensor, mask: Tensor) -> Tensor:
    """[N, K] log-probs where mask [N] > 0; elsewhere K equal ones of mass 1/2, with gradient exactly 0."""
    harmless = torch.full_like(log_probs, -math.log(2.0 * max(1, log_probs.size(-1))))
    return torch.where(mask.unsqueeze(-1) > 0, log_probs, harmless)
