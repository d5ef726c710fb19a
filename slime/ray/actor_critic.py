"""`ActorCritic`: the actor and its critic (--advantage-estimator ppo), driven as one trainer."""

from typing import Any

from slime.config import Args, Layout
from slime.config.critic import critic_args
from slime.ray.placement import Placement
from slime.ray.train_group import TrainGroup, get_all, init_groups


class ActorCritic:
    """What `TrainGroup` does, for two groups. Engines, checkpoints and exports are the actor's business.

    The critic values the samples; the actor makes advantages and returns of them, once, because what else they are
    made of (log-probs, the KL to the reference, hooks) is there; the critic learns those returns. Data goes by sample
    through Ray's object store, so the two may have different data-parallel sizes.
    """

    def __init__(self, args: Args, layout: Layout, placement: Placement):
        self._args = args
        self.actor = TrainGroup(args, layout, placement.trainer)
        self.critic = TrainGroup(critic_args(args), layout, placement.critic, role="critic")
        self.ranks = self.actor.ranks

    def init(self) -> int:
        return init_groups(self.actor, self.critic)

    def train(self, rollout_id: int, rollout: Any) -> dict[str, float]:
        """One rollout: values, then advantages and returns, then both models' optimizer steps side by side."""
        values = self.critic.prepare(rollout_id, rollout.critic_refs)
        returns = self.actor.prepare(rollout_id, rollout.refs, values)
        learners = [(self.critic, returns)]
        if rollout_id >= self._args.num_critic_only_steps:
            learners.append((self.actor, []))
        jobs = [group.start_training(rollout_id, given) for group, given in learners]
        get_all([job for of_group in jobs for job in of_group])
        metrics: dict[str, float] = {}
        for (group, _), of_group in zip(learners, jobs, strict=True):
            metrics |= group.metrics_of(of_group)
        metrics["perf/critic_time"] = metrics["perf/critic_values_time"] + metrics["perf/critic_train_time"]
        metrics["perf/train_time"] = max(metrics.get("perf/train_time", 0.0), metrics["perf/critic_train_time"])
        return metrics

    def save(self, rollout_id: int, extra_state: dict[str, Any]) -> None:
        """A checkpoint of both. The actor's is the one that counts and comes last, so it never lacks its critic's."""
        self.critic.save(rollout_id, {})
        self.actor.save(rollout_id, extra_state)

    def finish_save(self) -> None:
        self.actor.finish_save()

    def connect_engines(self, endpoints: list[Any], restarts: int) -> None:
        self.actor.connect_engines(endpoints, restarts)

    def update_weights(self, version: int) -> Any:
        return self.actor.update_weights(version)

    def save_hf(self, folder: str) -> None:
        self.actor.save_hf(folder)

    def load_extra_state(self) -> dict[str, Any] | None:
        return self.actor.load_extra_state()


def make_trainer(args: Args, layout: Layout, placement: Placement) -> TrainGroup | ActorCritic:
    """The trainer of a run: its actor, with a critic beside it where the estimator needs one."""
    if layout.critic_world_size:
        return ActorCritic(args, layout, placement)
    return TrainGroup(args, layout, placement.trainer)
