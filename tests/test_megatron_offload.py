"""--offload-train: memory that is given up and comes back changes no number."""

import pytest
import torch
from megatron_runs import make_args, rank_data, rollout, tiny_model
from ranks import run_ranks


def _train(rank, world, port, args):
    from slime.backends.megatron_utils.actor import MegatronTrainActor
    from slime.backends.megatron_utils.parallel import destroy_parallel
    from slime.models import iter_hf_weights

    actor = MegatronTrainActor(rank, world, "127.0.0.1", port)
    info = actor.init(args)
    left = []
    for i in range(2):
        actor.train(i, rank_data(args, rollout(i), info.dp_size)[info.dp_rank])
        left.append(sum(b.grad_data.untyped_storage().nbytes() for b in actor.model[0].buffers))
    actor.save(1)
    actor.finish_save()
    with actor._on_device("params"):  # as a weight sync does
        weights = {n: t.detach().float().clone().numpy() for n, t in iter_hf_weights(actor.model, actor.hf, args)}
    left.append(sum(p.untyped_storage().nbytes() for p in actor.model[0].parameters()))
    destroy_parallel()
    return weights, left


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_released_and_restored(tmp_path, dtype):
    folder = tiny_model(tmp_path / "model", num_layers=2)
    args = make_args(folder, params_dtype=dtype, use_kl_loss=False, kl_loss_coef=0.0, save=str(tmp_path / "save"))
    ((plain, there),) = run_ranks(1, _train, args)
    ((moved, left),) = run_ranks(1, _train, args.replace(offload_train=True))
    assert all(there) and left == [0] * 3
    assert plain.keys() == moved.keys()
    assert all(torch.equal(torch.as_tensor(plain[n]), torch.as_tensor(moved[n])) for n in plain)
