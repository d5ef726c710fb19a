"""A tiny model and one rollout of training on it, for the tests of the trainer in any layout."""

import numpy as np
import torch
from ranks import run_ranks

from slime.config import Args
from slime.data.schedule import make_schedule, split_for_ranks
from tools.make_tiny_model import TinyModel, make_tiny_model

# Sizes differ pairwise and the vocabulary is odd, so that transposes and padding show.
SIZES = dict(
    num_layers=4, hidden_size=44, num_attention_heads=6, num_key_value_heads=2, head_dim=10, intermediate_size=52,
    vocab_size=331,
)  # fmt: skip


def tiny_model(path, arch="qwen3", **changes):
    make_tiny_model(path, TinyModel(arch=arch, **{**SIZES, **changes}))
    return str(path)


def make_args(folder, **changes):
    """fp32, two optimizer steps of four samples in several micro-batches, KL loss; Adam without flips of sign."""
    defaults = dict(
        hf_checkpoint=folder, device="cpu", params_dtype="float32", lr=1e-3, global_batch_size=4, rollout_batch_size=4,
        n_samples_per_prompt=2, num_rollout=3, max_tokens_per_gpu=40, log_probs_chunk_size=7, use_kl_loss=True,
        kl_loss_coef=0.1, entropy_coef=0.01, rollout_temperature=0.8, adam_eps=1e-3, distributed_timeout_minutes=2.0,
    )  # fmt: skip
    return Args(**{**defaults, **changes})


def rollout(seed=0, n=8):
    """Columns of n samples of uneven length; one is fully masked, one has an empty response, one a hole in its mask."""
    rng = np.random.default_rng(seed)
    prompts, responses = rng.integers(2, 9, n), rng.integers(3, 25, n)
    responses[2] = 0
    tokens = [rng.integers(0, SIZES["vocab_size"], p + r) for p, r in zip(prompts, responses, strict=True)]
    masks = [np.ones(r, np.float32) for r in responses]
    masks[1][:] = 0.0
    masks[3][1] = 0.0
    rewards = [float(x) for x in rng.normal(size=n)]
    return {
        "tokens": tokens,
        "total_lengths": [len(t) for t in tokens],
        "response_lengths": [int(r) for r in responses],
        "loss_masks": masks,
        "rewards": rewards,
        "raw_reward": rewards,
        "group_ids": [i // 2 for i in range(n)],
        "rollout_ids": list(range(n)),
        "sample_indices": list(range(n)),
        "truncated": [0] * n,
        "rollout_log_probs": [rng.normal(-3.0, 1.0, r).astype(np.float32) for r in responses],
        "turn": [f"word {i}" for i in range(n)],  # a user's field
    }


def rank_data(args, columns, dp_size):
    trained = [int(mask.sum()) for mask in columns["loss_masks"]]
    schedule = make_schedule(args, columns["total_lengths"], trained, columns["rollout_ids"], dp_size)
    return split_for_ranks(columns, schedule)


def _weights(actor):
    from slime.models import iter_hf_weights

    return {n: t.detach().float().clone().numpy() for n, t in iter_hf_weights(actor.model, actor.hf, actor.args)}


def _train(rank, world, port, args, rollouts, start):
    from slime.backends.megatron_utils.actor import MegatronTrainActor
    from slime.backends.megatron_utils.parallel import destroy_parallel

    actor = MegatronTrainActor(rank, world, "127.0.0.1", port)
    info = actor.init(args)
    metrics = []
    for rollout_id, columns in enumerate(rollouts, start=info.start_rollout_id if start is None else start):
        metrics.append(actor.train(rollout_id, rank_data(args, columns, info.dp_size)[info.dp_rank]))
        if args.save:
            actor.save(rollout_id, {"cursor": rollout_id})
    actor.finish_save()
    out = (info, metrics, _weights(actor), actor.load_extra_state())
    destroy_parallel()
    return out


def train(world, args, rollouts, start=None):
    """(InitInfo and metrics of the metrics rank, all weights by Hugging Face name, extra state) after the rollouts."""
    results = run_ranks(world, _train, args, rollouts, start)
    info, metrics, _, extra = next(r for r in results if r[0].is_metrics_rank)
    weights = {name: tensor for r in results for name, tensor in r[2].items()}
    return info, metrics, weights, extra


def look_at_log_probs(args, rollout_id, rollout_data):
    assert len(rollout_data["log_probs"]) == len(rollout_data["tokens"]) == len(rollout_data["turn"])


def same_weights_everywhere(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    """A hook before each step: data-parallel ranks see the same weights, whole."""
    import torch.distributed as dist

    mine = [parameter.detach().clone() for parameter in model[0].parameters()]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for other in everyone:
        assert all(map(torch.equal, mine, other)), f"step {step_id}"


def custom_loss(args, batch, logits, sum_of_sample_mean):
    """Plain policy gradient from logits by the public function; counts samples whose user field came along."""
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy

    assert logits.dim() == 3 and str(logits.dtype) == "torch.float32"
    names = ("unconcat_tokens", "total_lengths", "response_lengths")
    _, out = get_log_probs_and_entropy(logits, args=args, **{name: batch[name] for name in names})
    log_probs = torch.cat(out["log_probs"])
    turns = sum(str(word).startswith("word") for word in batch["turn"])
    return -sum_of_sample_mean(log_probs * torch.cat(batch["advantages"])), {"turns": torch.tensor(float(turns))}


def infinite_loss(args, batch, logits, sum_of_sample_mean):
    return logits.sum() * float("inf"), {}
