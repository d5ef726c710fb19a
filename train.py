"""Synchronous training: generate, train, save, sync, again. Read top to bottom.

python train.py --hf-checkpoint MODEL --prompt-data FILE.jsonl --rm-type math --num-rollout 100
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from slime.config import Args, ConfigError, Layout, due, load_args, load_hf_config, make_layout
from slime.config.hooks import check_hooks
from slime.data.dataset import check_prompt_files


def train(args: Args, layout: Layout) -> None:
    """The whole run, inside a Ray session."""
    import ray

    from slime.observability.run_log import RunLog
    from slime.ray.actor_critic import make_trainer
    from slime.ray.placement import place
    from slime.ray.rollout_manager import RolloutManager

    placement = place(args, layout)
    manager = RolloutManager.remote(args, layout, placement.engines)
    try:
        args = args.replace(num_rollout=ray.get(manager.num_rollout.remote()))
        engines = manager.start.remote()  # engines load while the trainer does
        trainer = make_trainer(args, layout, placement)  # with the critic, if the run has one
        start = trainer.init()
        state = trainer.load_extra_state()
        ray.get(manager.load_state.remote(start, state))
        log = RunLog(args, layout, start, before=state["metrics"] if state and state.get("step") == start - 1 else None)
        ray.get(engines)
        if layout.num_engines:
            with log.phase("sync"):
                log.receipt(sync_weights(trainer, manager, start))
            ray.get(manager.serve.remote(trainer.ranks))
        if args.eval_interval and start == 0 and not args.skip_eval_before_train:
            log.evaluation(start, ray.get(manager.evaluate.remote(start)))
        if start >= args.num_rollout:
            log.say(f"nothing to do: {args.load} is at step {start} of {args.num_rollout}")

        for rollout_id in range(start, args.num_rollout):
            last = rollout_id + 1 == args.num_rollout
            log.begin(rollout_id)
            with log.phase("rollout"):
                rollout = ray.get(manager.generate.remote(rollout_id))
                log.add(rollout.metrics)
            if layout.world_size:
                if args.offload_rollout:
                    ray.get(manager.offload.remote())
                with log.phase("train"):
                    log.add(trainer.train(rollout_id, rollout))
                if due(args.save_interval if args.save else 0, rollout_id, last):
                    with log.phase("save"):
                        save(args, trainer, manager, log, rollout_id)
                if layout.num_engines:
                    with log.phase("sync"):
                        log.receipt(sync_weights(trainer, manager, rollout_id + 1))
            if due(args.eval_interval or 0, rollout_id, last):
                with log.phase("eval"):
                    log.add(ray.get(manager.evaluate.remote(rollout_id)))
            log.end()

        guard(args, log, trainer.finish_save)
        if args.save_hf and not (args.save and start < args.num_rollout):
            guard(args, log, trainer.save_hf, hf_folder(args, args.num_rollout - 1))
        log.finish()
    finally:
        # A manager that is busy or dead must not hide why we are here; its engines end with it in any case.
        with contextlib.suppress(Exception):
            ray.get(manager.stop.remote(), timeout=10)  # schedulers send SIGKILL about 30 s after SIGTERM
            placement.remove()


def save(args: Args, trainer: Any, manager: Any, log: Any, rollout_id: int) -> None:
    """A checkpoint of this step, and the Hugging Face folder of --save-hf."""
    import ray

    guard(args, log, trainer.finish_save)  # of the one before, with --async-save
    state = {**ray.get(manager.save_state.remote(rollout_id)), "step": rollout_id, "metrics": log.so_far()}
    guard(args, log, trainer.save, rollout_id, state)
    if args.save_hf:
        guard(args, log, trainer.save_hf, hf_folder(args, rollout_id))


def hf_folder(args: Args, rollout_id: int) -> str:
    return args.save_hf.replace("{rollout_id}", str(rollout_id))


def guard(args: Args, log: Any, write: Callable[..., Any], *values: Any) -> None:
    """Calls `write`; where it cannot (a full disk), stops or goes on as --on-save-error says."""
    from slime.utils.checkpoint_folder import SaveError

    try:
        write(*values)
    except SaveError as error:
        if args.on_save_error == "stop":
            raise
        log.say(f"slime: warning: {getattr(error, 'cause', error)}; training goes on (--on-save-error continue)")


def sync_weights(trainer: Any, manager: Any, version: int) -> Any:
    """Engines get the trainer's weights, as this version; returns the receipt."""
    import ray

    for tries_left in (2, 1, 0):
        try:
            trainer.connect_engines(*ray.get(manager.begin_sync.remote()))
            receipt = trainer.update_weights(version)
            break
        except Exception:
            # An engine that died meanwhile is restarted, and the update starts again; anything else is an error.
            if not (tries_left and ray.get(manager.repair.remote())):
                raise
    ray.get(manager.end_sync.remote(version))
    return receipt


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 done, 1 failed, 2 the flags cannot work, 130 interrupted."""
    sys.path.insert(0, os.getcwd())  # hooks may live where the user stands
    try:
        args = load_args(argv)
        layout = make_layout(args)
        check_prompt_files(args)
        check_hooks(args)
        if args.dry_run:
            from slime.config.plan import format_plan

            print(format_plan(args, layout, load_hf_config(args.hf_checkpoint)))
            return 0
        from slime.utils.resume import check_start

        for line in check_start(args):
            print(f"slime: {line}", flush=True)
        if args.progress == "auto":  # decided here: the parts of a run have no terminal of their own
            args = args.replace(progress="on" if sys.stderr.isatty() else "off")
        return run(args, layout)
    except ConfigError as error:
        for line in str(error).splitlines():
            print(f"slime: error: {line}", file=sys.stderr)
        return 2


def run(args: Args, layout: Layout) -> int:
    from slime.observability.run_folder import prepare_run_folder
    from slime.ray.cluster import ray_session
    from slime.ray.errors import explain

    def terminate(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt  # a scheduler's SIGTERM cleans up like Ctrl-C

    started = time.monotonic()
    moved = prepare_run_folder(args)
    if moved is not None:
        print(f"slime: an earlier run was in {args.run_dir}; it is now in {moved}")
    try:
        with ray_session(args, layout):
            signal.signal(signal.SIGTERM, terminate)  # after Ray, which installs a handler of its own
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
