"""Synchronous training: generate, train, save, sync, again. Read top to bottom.

python train.py --hf-checkpoint MODEL --prompt-data FILE.jsonl --rm-type math --num-rollout 100
"""

import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from slime.config import Args, ConfigError, Layout, load_args, load_hf_config, make_layout


def train(args: Args, layout: Layout) -> None:
    """The whole run, inside a Ray session."""
    import ray
    from slime.observability.run_log import RunLog

    from slime.ray.placement import place
    from slime.ray.rollout_manager import RolloutManager
    from slime.ray.train_group import TrainGroup

    placement = place(args, layout)
    manager = RolloutManager.remote(args, layout, placement.engines)
    try:
        args = args.replace(num_rollout=ray.get(manager.num_rollout.remote()))
        engines = manager.start.remote()  # engines load while the trainer does
        trainer = TrainGroup(args, layout, placement.trainer)
        start = trainer.init()
        state = trainer.load_extra_state()
        if state:
            ray.get(manager.load_state.remote(state["data"]))
        log = RunLog(args, layout, start)

        def sync(version: int) -> Any:
            """Engines get the trainer's weights; a receipt that does not match stops the run."""
            trainer.connect_engines(ray.get(manager.endpoints.remote()))
            ray.get(manager.onload.remote(["weights"]))
            receipt = trainer.update_weights(version)
            ray.get(manager.set_version.remote(version))
            ray.get(manager.onload.remote(["kv_cache"]))
            return receipt

        if ray.get(engines):
            with log.phase("sync"):
                log.receipt(sync(start))
            ray.get(manager.serve.remote(trainer.ranks))
        if args.eval_interval and start == 0 and not args.skip_eval_before_train:
            log.evaluation(start, ray.get(manager.evaluate.remote(start)))
        if start >= args.num_rollout:
            log.say(f"nothing to do: {args.load} is at step {start} of {args.num_rollout}")

        for rollout_id in range(start, args.num_rollout):
            log.begin(rollout_id)
            with log.phase("rollout"):
                rollout = ray.get(manager.generate.remote(rollout_id))
                log.add(rollout.metrics)
            if args.debug_rollout_only:
                log.end()
                continue
            if args.offload_rollout:
                ray.get(manager.offload.remote())
            with log.phase("train"):
                log.add(trainer.train(rollout_id, rollout.refs))
            last = rollout_id + 1 == args.num_rollout
            if args.save and (last or (args.save_interval and (rollout_id + 1) % args.save_interval == 0)):
                with log.phase("save"):
                    trainer.save(rollout_id, {"data": ray.get(manager.state.remote())})
            if layout.num_engines:
                with log.phase("sync"):
                    log.receipt(sync(rollout_id + 1))
            if args.eval_interval and (last or (rollout_id + 1) % args.eval_interval == 0):
                with log.phase("eval"):
                    log.add(ray.get(manager.evaluate.remote(rollout_id)))
            log.end()

        if args.save_hf:
            trainer.save_hf(args.save_hf)
        log.finish()
    finally:
        ray.get(manager.stop.remote(), timeout=60)
        placement.remove()


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 done, 1 failed, 2 the flags cannot work, 130 interrupted."""
    try:
        args = load_args(argv)
        layout = make_layout(args)
        if args.dry_run:
            from slime.config.plan import format_plan

            print(format_plan(args, layout, load_hf_config(args.hf_checkpoint)))
            return 0
        from slime.config.hooks import check_hooks

        check_hooks(args)
        return run(args, layout)
    except ConfigError as error:
        for line in str(error).splitlines():
            print(f"slime: error: {line}", file=sys.stderr)
        return 2


def run(args: Args, layout: Layout) -> int:
    from slime.ray.cluster import ray_session
    from slime.ray.errors import explain

    def terminate(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt  # a scheduler's SIGTERM cleans up like Ctrl-C

    signal.signal(signal.SIGTERM, terminate)
    started = time.monotonic()
    try:
        with ray_session(args, layout):
            train(args, layout)
    except KeyboardInterrupt:
        print(f"slime: interrupted after {time.monotonic() - started:.0f} s; all processes stopped", file=sys.stderr)
        return 130
    except Exception as error:
        print(explain(error), file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
