"""The formulas of RL, by theme in the modules below; this is the import path that plug-ins use.

What each name computes, with worked numbers: docs/algorithms.md. All are pure functions on tensors (rewards: numpy
float64); each has a slow float64 reference in tests/test_maths_*.py.
"""

from typing import Any

from torch import Tensor

from slime.utils.advantages import (
    add_span_advantages,
    chunked_gae,
    get_advantages_and_returns,
    get_grpo_returns,
    get_on_policy_distillation_advantages,
    get_reinforce_plus_plus_baseline_advantages,
    get_reinforce_plus_plus_returns,
    get_token_rewards,
    vanilla_gae,
)
from slime.utils.importance import icepop_function, mis_weights, tis_weights, vanilla_tis_function
from slime.utils.kl import compute_approx_kl
from slime.utils.masked import SumOfSampleMean, masked_mean, masked_sum, select, whiten
from slime.utils.policy_loss import (
    clamp_log_ratio,
    compute_cispo_loss,
    compute_gspo_kl,
    compute_opsm_mask,
    compute_policy_loss,
    compute_value_loss,
)
from slime.utils.rewards import (
    count_zero_variance_groups,
    geometric_mean_probability,
    group_norm,
    maxrl,
    memory_advantages,
    rloo,
    session_baseline,
    tailrl,
)
from slime.utils.vocab_parallel import linear_log_probs_and_entropy, vocab_parallel_log_probs_and_entropy

__all__ = [
    "SumOfSampleMean",
    "add_span_advantages",
    "calculate_log_probs_and_entropy",
    "chunked_gae",
    "clamp_log_ratio",
    "compute_approx_kl",
    "compute_cispo_loss",
    "compute_entropy_from_logits",
    "compute_gspo_kl",
    "compute_log_probs",
    "compute_opsm_mask",
    "compute_policy_loss",
    "compute_value_loss",
    "count_zero_variance_groups",
    "geometric_mean_probability",
    "get_advantages_and_returns",
    "get_grpo_returns",
    "get_on_policy_distillation_advantages",
    "get_reinforce_plus_plus_baseline_advantages",
    "get_reinforce_plus_plus_returns",
    "get_token_rewards",
    "group_norm",
    "icepop_function",
    "linear_log_probs_and_entropy",
    "masked_mean",
    "masked_sum",
    "maxrl",
    "memory_advantages",
    "mis_weights",
    "rloo",
    "select",
    "session_baseline",
    "tailrl",
    "tis_weights",
    "vanilla_gae",
    "vanilla_tis_function",
    "vocab_parallel_log_probs_and_entropy",
    "whiten",
]


def compute_log_probs(logits: Tensor, tokens: Tensor, process_group: Any = None) -> Tensor:
    """log softmax(logits) at `tokens`. logits [N, V / tp], tokens int64 [N]; returns float32 [N, 1]."""
    return vocab_parallel_log_probs_and_entropy(logits, tokens, tp_group=process_group)[0].unsqueeze(1)


def compute_entropy_from_logits(logits: Tensor, process_group: Any = None) -> Tensor:
    """Entropy of softmax(logits) in nats. logits [N, V / tp]; returns float32 [N]."""
    anywhere = logits.new_zeros(logits.size(0)).long()
    entropy = vocab_parallel_log_probs_and_entropy(logits, anywhere, tp_group=process_group, with_entropy=True)[1]
    assert entropy is not None
    return entropy


def calculate_log_probs_and_entropy(
    logits: Tensor, tokens: Tensor, process_group: Any = None, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """`compute_log_probs` and, where asked for, the entropy, in one pass: float32 ([N, 1], [N] or None)."""
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(
        logits, tokens, tp_group=process_group, with_entropy=with_entropy
    )
    return log_probs.unsqueeze(1), entropy
