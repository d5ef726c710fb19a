"""Rewards to advantages and returns per response token. Lists hold one [R_i] tensor per sample.

Only trained tokens exist for credit: tokens with loss mask 0 (tool output, other masks) carry no reward, are not
valued, and discounting steps over them. Their advantage is 0, except where a formula broadcasts one scalar.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from slime.utils.masked import select


def get_grpo_returns(rewards: Tensor, kl: Sequence[Tensor]) -> list[Tensor]:
    """The sample's scalar on each of its response tokens; no baseline of its own. rewards: [n]; kl: n tensors [R_i]."""
    if len(rewards) != len(kl):
        raise ValueError(f"{len(rewards)} rewards for {len(kl)} samples")
    return [torch.ones_like(k) * rewards[i] for i, k in enumerate(kl)]


def get_token_rewards(
    rewards: Sequence[float] | Tensor, kl: Sequence[Tensor], loss_masks: Sequence[Tensor], kl_coef: float
) -> list[Tensor]:
    """-kl_coef * kl on trained tokens, plus the sample's reward on its last trained token; 0 on the others."""
    out = []
    for reward, k, mask in zip(rewards, kl, loss_masks, strict=True):
        token_rewards = -kl_coef * select(k, mask)
        trained = (mask > 0).nonzero().squeeze(1)
        if trained.numel():
            token_rewards[trained[-1]] += reward
        out.append(token_rewards)
    return out


def vanilla_gae(rewards: Tensor, values: Tensor, gamma: float, lambd: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438) over one finished episode, token by token from its end.

    rewards, values: [T]. delta_t = r_t + gamma V_{t+1} - V_t with V_T = 0; A_t = delta_t + gamma lambd A_{t+1}.
    Returns (advantages, returns = A + V). The slow form; `chunked_gae` is the one in use.
    """
    advantages = torch.zeros_like(rewards)
    following, next_value = rewards.new_zeros(()), values.new_zeros(())
    for t in reversed(range(rewards.numel())):
        delta = rewards[t] + gamma * next_value - values[t]
        following = delta + gamma * lambd * following
        advantages[t], next_value = following, values[t]
    return advantages, advantages + values


def chunked_gae(
    rewards: Tensor, values: Tensor, gamma: float, lambd: float, chunk_size: int = 128
) -> tuple[Tensor, Tensor]:
    """`vanilla_gae` of a batch [B, T], a chunk of tokens at a time.

    Inside a chunk the discounted sum is one product with the matrix of (gamma lambd)^(s - t), s >= t; only one number
    per row passes between chunks. Rows padded with zeros at their end come out right, and 0 there.
    """
    if rewards.dim() != 2 or rewards.shape != values.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and values {tuple(values.shape)} must both be [B, T]")
    delta = rewards + gamma * torch.nn.functional.pad(values[:, 1:], (0, 1)) - values
    decay = gamma * lambd
    steps = torch.arange(chunk_size, device=delta.device, dtype=delta.dtype)
    powers = torch.pow(float(decay), steps[:, None] - steps[None, :]).tril()  # 0 where s < t
    advantages = torch.empty_like(delta)
    carry = delta.new_zeros(delta.size(0))
    for end in range(delta.size(1), 0, -chunk_size):
        start = max(0, end - chunk_size)
        n = end - start
        within = delta[:, start:end] @ powers[:n, :n]
        to_end = torch.pow(float(decay), torch.arange(n, 0, -1, device=delta.device).to(delta.dtype))
        advantages[:, start:end] = within + carry[:, None] * to_end
        carry = advantages[:, start].clone()
    return advantages, advantages + values


def get_advantages_and_returns(
    values: Sequence[Tensor],
    token_rewards: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    gamma: float,
    lambd: float,
) -> tuple[list[Tensor], list[Tensor]]:
    """GAE over each sample's trained tokens, in float32 and one batch. Masked tokens get advantage and return 0."""
    trained = [(m > 0).nonzero().squeeze(1) for m in loss_masks]
    if not trained:
        return [], []

    def compress(columns: Sequence[Tensor]) -> Tensor:
        picked = [c.detach()[t] for c, t in zip(columns, trained, strict=True)]
        return torch.nn.utils.rnn.pad_sequence(picked, batch_first=True)

    batch = chunked_gae(compress(token_rewards), compress(values), gamma, lambd)

    def spread(result: Tensor) -> list[Tensor]:
        out = [torch.zeros_like(r) for r in token_rewards]
        for i, t in enumerate(trained):
            out[i][t] = result[i, : t.numel()]
        return out

    return spread(batch[0]), spread(batch[1])


def get_reinforce_plus_plus_returns(
    rewards: Sequence[float] | Tensor,
    kl: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    kl_coef: float,
    gamma: float,
) -> list[Tensor]:
    """REINFORCE++ (arXiv 2501.03262): G_t = sum_k gamma^k r_{t+k} over trained tokens, the KL inside the reward."""
    token_rewards = get_token_rewards(rewards, kl, loss_masks, kl_coef)
    no_values = [torch.zeros_like(r) for r in token_rewards]
    return get_advantages_and_returns(no_values, token_rewards, loss_masks, gamma, 1.0)[0]


def get_reinforce_plus_plus_baseline_advantages(
    rewards: Sequence[float] | Tensor, kl: Sequence[Tensor], loss_masks: Sequence[Tensor], kl_coef: float
) -> list[Tensor]:
    """REINFORCE++-baseline: the group-centred reward minus kl_coef * kl, per token; 0 on masked tokens."""
    return [select(reward - kl_coef * k, mask) for reward, k, mask in zip(rewards, kl, loss_masks, strict=True)]


def get_on_policy_distillation_advantages(
    teacher_log_probs: Sequence[Tensor], log_probs: Sequence[Tensor], loss_masks: Sequence[Tensor]
) -> list[Tensor]:
    """log pi_teacher - log pi_old of each trained token: minus the sampled reverse KL to the teacher."""
    return [
        select(teacher.to(old.device) - old, mask)
        for teacher, old, mask in zip(teacher_log_probs, log_probs, loss_masks, strict=True)
    ]


def add_span_advantages(
    advantages: Tensor, spans: Sequence[tuple[int, int]], values: Sequence[float] | Tensor, mask: Tensor | None = None
) -> Tensor:
    """advantages [R] plus values[j] on tokens spans[j] = [start, end) of the response; a new tensor.

    For credit that belongs to one turn or one memory (MemPO: final = outcome + memory advantage). mask: trained tokens;
    others are set to 0. Raises ValueError for a span outside the response.
    """
    out = advantages.clone()
    for (start, end), value in zip(spans, values, strict=True):
        if not 0 <= start <= end <= out.numel():
            raise ValueError(f"span [{start}, {end}) is outside a response of {out.numel()} tokens")
        out[start:end] += value
    return out if mask is None else select(out, mask)
