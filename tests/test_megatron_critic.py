"""The critic: the same in every layout, resumed exactly, started from what it is given; its flags."""

import dataclasses

import numpy as np
import pytest
import torch
from megatron_runs import make_args, rank_data, rollout, tiny_model
from ranks import run_ranks

from slime.config.critic import critic_args
from slime.config.derive import derive

ROLLOUTS = [rollout(seed) for seed in range(3)]


def ppo_args(model, world=1, **changes):
    values = dict(
        advantage_estimator="ppo", use_kl_loss=False, kl_loss_coef=0.0, entropy_coef=0.0, critic_lr=3e-3, lr=1e-3,
        critic_num_nodes=1, critic_num_gpus_per_node=world, actor_num_gpus_per_node=world,
    )  # fmt: skip
    return make_args(model, **{**values, **changes})


def returns_of(values, seed):
    """Some returns to learn, the same in every layout: made of the sample's number and its value."""
    return {i: (0.5 * v + np.sin(np.arange(len(v)) + i + seed)).astype(np.float32) for i, v in values.items()}


def _everyone(part):
    import torch.distributed as dist

    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    return {sample: value for one in parts if one for sample, value in one.items()}


def _train_critic(rank, world, port, args, rollouts):
    from slime.backends.megatron_utils import value_head
    from slime.backends.megatron_utils.critic import MegatronCritic
    from slime.backends.megatron_utils.parallel import destroy_parallel

    critic = MegatronCritic(rank, world, "127.0.0.1", port)
    info = critic.init(critic_args(args))
    out, metrics = [], {}
    for rollout_id, columns in enumerate(rollouts, start=info.start_rollout_id):
        values = _everyone(critic.prepare(rollout_id, rank_data(args, columns, info.dp_size)[info.dp_rank]))
        metrics = critic.train_prepared(rollout_id, returns_of(values, rollout_id))
        out.append(values)
        if args.save:
            critic.save(rollout_id)
    state = critic.model[-1].state_dict() if info.is_metrics_rank else {}
    head = {name: state[name].float().numpy() for name in value_head.NAMES if name in state}
    destroy_parallel()
    return info, out, metrics, head


def train_critic(world, args, rollouts):
    """(InitInfo, values of each rollout by sample, last metrics, head) of the metrics rank."""
    results = run_ranks(world, _train_critic, args, rollouts)
    return next(r for r in results if r[0].is_metrics_rank)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "qwen3", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def reference(model):
    return train_critic(1, ppo_args(model), ROLLOUTS)


def assert_same(run, reference, rtol=1e-5):
    _, values, metrics, head = run
    _, expected_values, expected, expected_head = reference
    for of_rollout, expected_of_rollout in zip(values, expected_values, strict=True):
        assert of_rollout.keys() == expected_of_rollout.keys() == set(range(8))
        for sample, value in expected_of_rollout.items():
            np.testing.assert_allclose(of_rollout[sample], value, rtol=rtol, atol=rtol / 10, err_msg=str(sample))
    assert {n for n in metrics if not n.startswith("perf/")} == {n for n in expected if not n.startswith("perf/")}
    for name, value in expected.items():
        if not name.startswith("perf/"):
            np.testing.assert_allclose(metrics[name], value, rtol=rtol, atol=rtol / 100, err_msg=name)
    for name, tensor in expected_head.items():
        np.testing.assert_allclose(head[name], tensor, rtol=rtol, atol=rtol / 10, err_msg=name)


@pytest.mark.parametrize(
    ("world", "changes"),
    [
        (2, dict()),
        (2, dict(tensor_model_parallel_size=2)),
        (2, dict(pipeline_model_parallel_size=2)),
        (2, dict(context_parallel_size=2)),
        (4, dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True)),
    ],
    ids=["dp2", "tp2", "pp2", "cp2", "tp2 sp pp2"],
)
def test_every_layout_is_one_process(model, reference, world, changes):
    assert_same(train_critic(world, ppo_args(model, world, **changes), ROLLOUTS), reference)


def test_it_learns_and_reports(reference):
    info, values, metrics, head = reference
    assert info.start_rollout_id == 0
    assert all((v == 0).all() and v.dtype == np.float32 for v in values[0].values())  # a fresh head values nothing
    assert [len(values[1][i]) for i in range(8)] == ROLLOUTS[1]["response_lengths"]
    assert any(np.abs(v).max() > 1e-3 for v in values[1].values() if len(v))
    assert metrics["critic/lr"] == 3e-3 and metrics["critic/grad_norm"] > 0 and metrics["critic/steps"] == 2
    assert {"critic/value_loss", "critic/value_clipfrac", "critic/explained_variance"} <= metrics.keys()
    assert head.keys() == {"output_layer.weight", "output_layer.bias"} and np.abs(head["output_layer.bias"]).max() > 0


def test_resume_is_exact_at_the_actors_step(model, reference, tmp_path):
    folder = str(tmp_path / "ckpt")
    # Three rollouts, but the run died before the actor's third checkpoint (which is stood for by its name alone).
    (tmp_path / "ckpt" / "iter_0000001").mkdir(parents=True)
    train_critic(2, ppo_args(model, 2, save=folder, keep_last=1), ROLLOUTS)
    assert sorted(p.name for p in (tmp_path / "ckpt" / "critic").glob("iter*")) == ["iter_0000001", "iter_0000002"]
    (tmp_path / "ckpt" / "iter_0000001" / "metadata.json").write_text("{}")
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("1")
    info, values, metrics, head = train_critic(1, ppo_args(model, load=folder), ROLLOUTS[2:])
    assert info.start_rollout_id == 2
    assert_same((info, values, metrics, head), (None, reference[1][2:], *reference[2:]))
    # as first weights of another run: the values of its first rollout are what was learnt
    first = train_critic(1, ppo_args(model, critic_load=folder), ROLLOUTS[2:])
    assert first[0].start_rollout_id == 0
    for sample, value in values[0].items():
        np.testing.assert_allclose(first[1][0][sample], value, rtol=1e-5, atol=1e-6)


def _actor(rank, world, port, args, rollouts, given):
    from slime.backends.megatron_utils.actor import MegatronTrainActor
    from slime.backends.megatron_utils.parallel import destroy_parallel

    actor = MegatronTrainActor(rank, world, "127.0.0.1", port)
    info = actor.init(args)
    returns = _everyone(actor.prepare(0, rank_data(args, rollouts[0], info.dp_size)[info.dp_rank], given))
    metrics = actor.train_prepared(0)
    if args.save:
        actor.save(0, {})
    destroy_parallel()
    return info, returns, metrics


def test_the_actor_makes_returns_of_a_critics_values(model, tmp_path):
    """Against GAE by hand; in another layout the same; and its checkpoint alone starts no critic in silence."""
    from slime.utils.ppo_utils import get_token_rewards, vanilla_gae

    columns = rollout()
    rng = np.random.default_rng(5)
    given = {i: rng.normal(size=r).astype(np.float32) for i, r in enumerate(columns["response_lengths"])}
    args = ppo_args(model, gamma=0.97, lambd=0.9, normalize_advantages=True, save=str(tmp_path / "ckpt"))
    _, returns, metrics = run_ranks(1, _actor, args, [columns], given)[0]
    for i, (mask, reward) in enumerate(zip(columns["loss_masks"], columns["rewards"], strict=True)):
        m = torch.tensor(mask)
        rewards = get_token_rewards([reward], [torch.zeros_like(m).double()], [m], 0.0)[0][m > 0]
        _, expected = vanilla_gae(rewards, torch.tensor(given[i]).double()[m > 0], 0.97, 0.9)
        np.testing.assert_allclose(returns[i][mask > 0], expected, rtol=1e-5, atol=1e-6)
        assert (returns[i][mask == 0] == 0).all()
    two = dict(pipeline_model_parallel_size=2, kl_coef=0.1)
    for world, changes in ((2, dict()), (2, two)):
        results = run_ranks(world, _actor, dataclasses.replace(args, save=None, **changes), [columns], given)
        _, other, other_metrics = next(r for r in results if r[0].is_metrics_rank)
        if not changes:
            np.testing.assert_allclose(other_metrics["train/pg_loss"], metrics["train/pg_loss"], rtol=1e-4, atol=1e-6)
        for i in returns:  # at the first step the reference is the policy: no KL yet
            np.testing.assert_allclose(other[i], returns[i], rtol=1e-5, atol=1e-5)
    load = str(tmp_path / "ckpt")
    with pytest.raises(AssertionError, match="has no critic beside it"):
        train_critic(1, ppo_args(model, load=load), [])
    assert train_critic(1, ppo_args(model, load=load, critic_load=load), [])[0].start_rollout_id == 1


def test_explained_variance_is_numpys():
    from slime.backends.megatron_utils.critic import value_metrics

    g = torch.Generator().manual_seed(0)
    masks = [torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.zeros(2), torch.ones(5)]
    values = [torch.randn(len(m), generator=g) + 1e4 for m in masks]
    returns = [v + 0.3 * torch.randn(len(v), generator=g) for v in values]
    values[0][1], returns[1][0] = torch.nan, torch.inf  # masked
    out = value_metrics(values, returns, masks)
    v, r = (
        np.concatenate([x[m > 0].double().numpy() for x, m in zip(c, masks, strict=True)]) for c in (values, returns)
    )
    assert out["critic/explained_variance"] == pytest.approx(1 - np.var(r - v) / np.var(r), rel=1e-9)
    assert out["critic/return_std"] == pytest.approx(np.std(r), rel=1e-9)
    assert value_metrics([values[1]], [returns[1]], [masks[1]])["critic/explained_variance"] == 0.0


def test_the_critics_flags():
    args = derive(ppo_args("model", kl_coef=0.1, rollout_data_postprocess_path="a.b", hf_checkpoint=None), None)
    own = critic_args(args)
    assert (own.lr, own.loss_type, own.kl_coef, own.rollout_data_postprocess_path) == (3e-3, "value_loss", 0.0, None)
