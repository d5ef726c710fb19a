"""What `layout_grid.py` compares: algorithms, layouts, models and one uneven rollout. Plain data."""

import dataclasses
from typing import Any

import numpy as np
import torch

from slime.utils.types import Sample

HERE = __name__
VOCAB = 331
# Sizes differ pairwise and divide only what they must, so that a transposed or padded axis shows.
_SIZES = dict(
    hidden_size=44, num_attention_heads=6, num_key_value_heads=2, head_dim=10, intermediate_size=52, vocab_size=VOCAB
)
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": dict(arch="qwen3", num_layers=8, tie_word_embeddings=True, **_SIZES),
    "mistral, window of 7": dict(arch="mistral", num_layers=2, **_SIZES),
    "qwen3_moe": dict(arch="qwen3_moe", num_layers=4, **_SIZES),
    "deepseek_v3": dict(arch="deepseek_v3", num_layers=4, **{**_SIZES, "num_key_value_heads": 6}),
    "qwen2_moe": dict(arch="qwen2_moe", num_layers=4, **{**_SIZES, "intermediate_size": 104}),
    "glm4": dict(arch="glm4", num_layers=4, **_SIZES),
    "glm4_moe": dict(arch="glm4_moe", num_layers=4, **_SIZES),
    "gpt_oss": dict(arch="gpt_oss", num_layers=4, **_SIZES),
}
WINDOW = 7
TOPK = 5  # tokens per place of what distils over several


@dataclasses.dataclass(frozen=True)
class Layout:
    """ranks: gloo processes. flags: changes of the args. The reference is one process of the same model."""

    ranks: int
    flags: dict[str, Any]
    model: str = "qwen3"


def _layout(ranks: int, model: str = "qwen3", **flags: Any) -> Layout:
    short = dict(
        tp="tensor_model_parallel_size", pp="pipeline_model_parallel_size", cp="context_parallel_size",
        ep="expert_model_parallel_size", sp="sequence_parallel", mbs="micro_batch_size",
    )  # fmt: skip
    if "mbs" in flags:
        flags["use_dynamic_batch_size"] = False
    return Layout(ranks, {short.get(name, name): value for name, value in flags.items()}, model)


_MOE, _WINDOWED = "qwen3_moe", "mistral, window of 7"
_RECOMPUTE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
_TP2_EP2 = dict(tp=2, sp=True, ep=2, expert_tensor_parallel_size=1)
LAYOUTS: dict[str, Layout] = {
    "one micro-batch": _layout(1, max_tokens_per_gpu=10_000),
    "micro-batches of 1": _layout(1, mbs=1),
    "micro-batches of 3, recompute": _layout(1, mbs=3, **_RECOMPUTE),
    "log-probs packed wider": _layout(1, log_probs_max_tokens_per_gpu=100),
    "tp2": _layout(2, tp=2),
    "tp2 sp": _layout(2, tp=2, sp=True),
    "pp2": _layout(2, pp=2),
    "pp4": _layout(4, pp=4),
    "pp4 vpp2": _layout(4, pp=4, num_layers_per_virtual_pipeline_stage=1),
    "dp2": _layout(2),
    "dp3": _layout(3),
    "dp4": _layout(4),
    "dp2, whole optimizer, micro-batches of 2": _layout(2, use_distributed_optimizer=False, mbs=2),
    "dp3, in order, micro-batches of 1": _layout(3, balance_data=False, mbs=1),
    "tp2 dp2": _layout(4, tp=2),
    "pp2 dp2": _layout(4, pp=2),
    "tp2 pp2 sp": _layout(4, tp=2, pp=2, sp=True),
    "cp2": _layout(2, cp=2),
    "cp4": _layout(4, cp=4),
    "cp2 dp2": _layout(4, cp=2),
    "cp2 tp2 sp": _layout(4, cp=2, tp=2, sp=True),
    "cp2 pp2": _layout(4, cp=2, pp=2),
    "cp2 contiguous": _layout(2, cp=2, allgather_cp=True),
    "cp3 contiguous, micro-batches of 1": _layout(3, cp=3, allgather_cp=True, mbs=1),
    "cp4 contiguous": _layout(4, cp=4, allgather_cp=True),
    "cp2 tp2 sp contiguous": _layout(4, cp=2, tp=2, sp=True, allgather_cp=True),
    "cp2 pp2 contiguous, recompute": _layout(4, cp=2, pp=2, allgather_cp=True, **_RECOMPUTE),
    "windowed cp2": _layout(2, _WINDOWED, cp=2),
    "windowed cp4 contiguous": _layout(4, _WINDOWED, cp=4, allgather_cp=True),
    "windowed tp2 pp2": _layout(4, _WINDOWED, tp=2, pp=2),
    "moe ep2": _layout(2, _MOE, ep=2),
    "moe ep4": _layout(4, _MOE, ep=4),
    "moe tp2 sp ep2": _layout(2, _MOE, **_TP2_EP2),
    "moe pp2 ep2": _layout(4, _MOE, pp=2, ep=2),
    "moe cp2 ep2": _layout(2, _MOE, cp=2, ep=2),
    "moe cp2 ep2 contiguous": _layout(2, _MOE, cp=2, ep=2, allgather_cp=True),
    "latent tp2 sp ep2": _layout(2, "deepseek_v3", **_TP2_EP2),
    "gated shared expert tp2 sp ep2": _layout(2, "qwen2_moe", **_TP2_EP2),
    "norms after tp2 sp": _layout(2, "glm4", tp=2, sp=True),
    "sigmoid router tp2 sp ep2": _layout(2, "glm4_moe", **_TP2_EP2),
    "sinks ep2": _layout(2, "gpt_oss", ep=2),
    "sinks tp2 sp ep2": _layout(2, "gpt_oss", **_TP2_EP2),
    "sinks pp2 cp2": _layout(4, "gpt_oss", pp=2, cp=2),
    "latent cp2": _layout(2, "deepseek_v3", cp=2),
}
QUICK_LAYOUTS = (
    "tp2 sp", "pp2", "dp3", "cp2", "cp2 tp2 sp", "cp4 contiguous", "windowed cp2", "moe cp2 ep2", "micro-batches of 1",
)  # fmt: skip

_KL = dict(use_kl_loss=True, kl_loss_coef=0.1)
_CUSTOM = dict(loss_type="custom_loss")
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo, KL, entropy": dict(entropy_coef=0.01, **_KL),
    "gspo": dict(advantage_estimator="gspo", eps_clip=0.003, eps_clip_high=0.004),
    "cispo": dict(advantage_estimator="cispo", eps_clip_high=0.1),
    "rloo": dict(advantage_estimator="rloo"),
    "maxrl": dict(advantage_estimator="maxrl"),
    "tailrl": dict(advantage_estimator="tailrl"),
    "reinforce++": dict(advantage_estimator="reinforce_plus_plus", kl_coef=0.1, gamma=0.97, normalize_advantages=True),
    "reinforce++ baseline": dict(
        advantage_estimator="reinforce_plus_plus_baseline", kl_coef=0.1, normalize_advantages=True
    ),
    "Dr.GRPO": dict(disable_grpo_std_normalization=True),
    "dual clip": dict(eps_clip=0.05, eps_clip_high=0.05, eps_clip_c=1.1),
    "TIS": dict(use_tis=True, tis_clip=1.3),
    "IcePop": dict(custom_tis_function_path="slime.utils.importance.icepop_function", tis_clip=1.5, tis_clip_low=0.5),
    "MIS geometric": dict(use_tis=True, tis_level="geometric", tis_mode="mask", tis_clip=1.6, tis_clip_low=0.4),
    "per-token loss": dict(calculate_per_token_loss=True, entropy_coef=0.01),
    "KL k1": dict(kl_loss_type="k1", **_KL),
    "KL k2": dict(kl_loss_type="k2", **_KL),
    "KL k3, unbiased": dict(kl_loss_type="k3", use_unbiased_kl=True, **_KL),
    "engine's log-probs as old": dict(use_rollout_logprobs=True),
    "OPSM": dict(use_opsm=True, opsm_delta=0.001),
    "ppo, values given": dict(advantage_estimator="ppo", kl_coef=0.1, gamma=0.98, lambd=0.9),
    "OPD": dict(advantage_estimator="on_policy_distillation"),
    "OPD, top 5": dict(advantage_estimator="on_policy_distillation", distill_topk=5),
    "grpo and OPD, top 5": dict(opd_kl_coef=0.3, distill_topk=5),
    "sft": dict(loss_type="sft_loss"),
    "sft per token": dict(loss_type="sft_loss", calculate_per_token_loss=True),
    "custom loss": dict(
        custom_loss_path="slime_plugins.examples.custom_loss.loss_function", extra=dict(entropy_power=0.5), **_CUSTOM
    ),
    "combined loss": dict(
        custom_loss_path="slime_plugins.openclaw.combine_loss.combine_loss_function",
        extra=dict(w_opd=0.5, w_rl=1.5),
        **_CUSTOM,
    ),
    "select loss": dict(custom_loss_path="slime_plugins.openclaw.select_loss.select_loss_function", **_CUSTOM),
    "custom loss on logits": dict(custom_loss_path=f"{HERE}.loss_on_logits", **_CUSTOM),
    "user's token fields": dict(extra=dict(grid_token_fields=True)),
}
QUICK_ALGORITHMS = (
    "grpo, KL, entropy",
    "gspo",
    "reinforce++",
    "MIS geometric",
    "sft per token",
    "custom loss on logits",
    "OPD, top 5",
)


def loss_on_logits(args: Any, batch: dict[str, Any], logits: Any, sum_of_sample_mean: Any) -> Any:
    """A custom loss that reads rows of logits and works on whole sequences, as one process would see them.

    Its only regard for a layout is the sum over the vocabulary, which tensor-parallel ranks split.
    """
    from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy, get_responses

    lengths = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
    _, out = get_log_probs_and_entropy(logits, args=args, **lengths)
    squares = []
    for rows, _ in get_responses(logits, args=args, **lengths):
        real = torch.where(rows > -1e20, rows, 0.0)  # without the columns that pad the vocabulary
        squares.append(reduce_from_tensor_model_parallel_region(real.square().sum(1)) / VOCAB)
    tokens, means = [], []
    for new, old, mask, square in zip(out["log_probs"], batch["log_probs"], batch["loss_masks"], squares, strict=True):
        drift = (torch.where(mask > 0, new - old, 0.0).sum() / mask.sum().clamp(min=1)).exp()
        tokens.append(-drift * batch["raw_reward"][len(tokens)] * torch.where(mask > 0, new, 0.0) + 0.01 * square)
        means.append(drift.detach().expand_as(new))
    loss = sum_of_sample_mean(torch.cat(tokens))
    trained = sum(int(mask.any()) for mask in batch["loss_masks"])
    return loss, {"drift": sum_of_sample_mean(torch.cat(means)), "trained_count": torch.tensor(float(trained))}


def make_samples(token_fields: bool = False) -> list[Sample]:
    """13 samples in groups of 4, 5, 3 and 1, of 4 to 40 tokens.

    One is fully masked, one removed, one has an empty response, one a response of one token, one a hole in its mask,
    and two are pieces of one rollout. token_fields: with weights and advantages per token.
    """
    rng, more = np.random.default_rng(7), np.random.default_rng(8)
    responses = [17, 1, 0, 23, 9, 5, 31, 12, 3, 19, 8, 14, 6]
    groups = [0] * 4 + [1] * 5 + [2] * 3 + [3]
    samples = []
    for i, response in enumerate(responses):
        prompt = int(rng.integers(2, 10))
        mask = [1] * response
        if i == 4:
            mask = [0] * response
        elif i == 6:
            mask[3:11] = [0] * 8
        ids = more.random((response, VOCAB)).argsort(1)
        teacher = np.sort(more.normal(-3.0, 0.4, (response, TOPK)))[:, ::-1]
        select_fields: dict[str, Any] = {
            "token_ids": ids[:, 1 : TOPK + 1].tolist(),
            "hint_log_probs": more.normal(-5.5, 0.5, (response, TOPK)).tolist(),
            "token_valid": more.integers(0, 2, (response, TOPK)).tolist(),
        }
        samples.append(
            Sample(
                index=i,
                group_index=groups[i],
                rollout_id=9 if i == 10 else i,
                tokens=rng.integers(0, VOCAB, prompt + response).tolist(),
                response_length=response,
                loss_mask=mask,
                reward=0.25 if i in (9, 10) else float(rng.integers(0, 2)),
                rollout_log_probs=rng.normal(-6.3, 0.5, response).tolist(),
                teacher_log_probs=rng.normal(-5.5, 0.3, response).tolist(),
                teacher_topk_log_probs=teacher[:, :TOPK].tolist(),
                teacher_topk_indices=ids[:, :TOPK].tolist(),
                remove_sample=i == 8,
                status=Sample.Status.COMPLETED,
                train_metadata=select_fields
                | (
                    {
                        "token_weights": rng.uniform(0.5, 1.5, response).tolist(),
                        "token_advantages": rng.normal(0.0, 0.3, response).tolist(),
                    }
                    if token_fields
                    else {}
                ),
            )
        )
    return samples
