"""Placement with real Ray: nodes that claim GPUs which this machine does not have (`ray.cluster_utils.Cluster`)."""

import pytest
import ray
from ray.cluster_utils import Cluster

from slime.config import Args, ConfigError, make_layout
from slime.config.derive import derive
from slime.ray.cluster import check_local_cores
from slime.ray.placement import place


def gpu_args(**changes):
    values = dict(
        device="cuda", actor_num_nodes=2, actor_num_gpus_per_node=8, tensor_model_parallel_size=4,
        pipeline_model_parallel_size=2, rollout_num_gpus=16, rollout_num_gpus_per_engine=4, placement_timeout=60.0,
    )  # fmt: skip
    return derive(Args(**{**values, **changes}), None)


@pytest.fixture(scope="module")
def four_nodes():
    cluster = Cluster()
    cluster.add_node(num_cpus=4, num_gpus=0, include_dashboard=False)
    for _ in range(4):
        cluster.add_node(num_cpus=16, num_gpus=8)
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.timeout(240)
def test_disaggregated_four_nodes(four_nodes):
    args = gpu_args()
    placement = place(args, make_layout(args))
    try:
        nodes = ray.util.placement_group_table(placement.group)["bundles_to_node_id"]
        assert len(placement.trainer) == 16 and len(placement.engines) == 16
        assert not {b.index for b in placement.trainer} & {b.index for b in placement.engines}
        for start in range(0, 16, 8):  # a node's ranks are neighbours, in the order of their devices
            part = placement.trainer[start : start + 8]
            assert len({nodes[b.index] for b in part}) == 1
            assert [b.gpu for b in part] == list(range(8))
        for start in range(0, 16, 4):
            assert len({nodes[b.index] for b in placement.engines[start : start + 4]}) == 1
    finally:
        placement.remove()


@pytest.mark.timeout(240)
def test_colocated_engines_share_the_trainers_devices(four_nodes):
    args = gpu_args(actor_num_nodes=4, colocate=True, rollout_num_gpus=32)
    placement = place(args, make_layout(args))
    try:
        assert [b.index for b in placement.trainer] == [b.index for b in placement.engines]
        assert sorted(b.index for b in placement.trainer) == list(range(32))
    finally:
        placement.remove()


@pytest.mark.timeout(240)
def test_a_critic_has_devices_of_its_own_or_the_actors(four_nodes):
    ppo = dict(advantage_estimator="ppo", actor_num_nodes=1, rollout_num_gpus=8)
    for changes, first in ((dict(), 8), (dict(colocate_critic=True), 0)):
        args = gpu_args(**ppo, **changes)
        placement = place(args, make_layout(args))
        try:
            order = placement.trainer + placement.critic * (first > 0) + placement.engines
            assert len({b.index for b in order}) == len(order) == 16 + first
            if first == 0:
                assert placement.critic == placement.trainer
        finally:
            placement.remove()


@pytest.mark.timeout(240)
def test_a_wait_that_can_never_be_met_says_what_is_missing(four_nodes):
    args = gpu_args(actor_num_nodes=4, placement_timeout=2.0)
    with pytest.raises(ConfigError, match=r"needs 48 GPUs; the Ray cluster has 32 on 5 nodes"):
        place(args, make_layout(args))


def test_too_few_cores_is_an_error_before_anything_starts():
    args = derive(Args(device="cpu", tensor_model_parallel_size=8, pipeline_model_parallel_size=4), None)
    with pytest.raises(ConfigError, match="too many for 2 cores"):
        check_local_cores(args, make_layout(args), cores=2)
