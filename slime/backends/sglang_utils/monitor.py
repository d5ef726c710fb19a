"""`EngineMonitor`: restarts engines and a router that died; engines serve again only when they have the weights."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from slime.backends.sglang_utils.client import EngineEndpoint
from slime.backends.sglang_utils.router import RouterError
from slime.config.args import Args

logger = logging.getLogger(__name__)
ALIVE_INTERVAL_S = 1.0


class EngineHandle(Protocol):
    """What the monitor needs of an engine: `SGLangEngineActor`, or a wrapper around its Ray handle."""

    index: int

    def is_alive(self) -> bool: ...
    def failure(self) -> str: ...
    def probe(self, timeout: float) -> None: ...
    def endpoint(self) -> EngineEndpoint: ...
    def restart(self) -> EngineEndpoint: ...


class Router(Protocol):
    """What the monitor needs of the router (`SGLangRouter`): its process, and its list of workers."""

    def is_alive(self) -> bool: ...
    def failure(self) -> str: ...
    def restart(self) -> None: ...
    def add(self, url: str) -> None: ...
    def remove(self, url: str) -> None: ...


class EngineLost(RuntimeError):
    """The monitor gave up: what died would not come back, or more restarts than --rollout-max-engine-restarts."""


@dataclass
class _State:
    """Of one engine. failures: failed probes in a row. probing: a probe is under way. next_probe: clock time.
    has_weights: the run's, not the model folder's. serves: the router sends to it."""

    failures: int = 0
    probing: bool = False
    next_probe: float = 0.0
    has_weights: bool = True
    serves: bool = True


class EngineMonitor:
    """Watches engines from a thread of its own.

    An engine is dead as soon as its process has ended, or after --rollout-health-check-failures failed probes in a row;
    a probe passes while the engine produces tokens for anybody, so busy engines are left alone. A dead engine leaves
    the router, is restarted, is given the weights by `give_weights(index, endpoint)`, and only then enters the router
    again. Where `give_weights` returns False it cannot now: it is asked again every `alive_interval` seconds, unless a
    weight update comes first. It runs in the monitor's thread; when it raises, the monitor gives up. A dead router is
    restarted, at its old address, with the engines that served.

    pause() during weight syncs and while memory is released, when no engine can answer a probe (ended processes
    are noticed and restarted after `resume`). raise_if_lost() tells in the caller's thread why the monitor gave up.
    """

    def __init__(
        self,
        engines: Sequence[EngineHandle],
        router: Router,
        args: Args,
        give_weights: Callable[[int, EngineEndpoint], bool],
        alive_interval: float = ALIVE_INTERVAL_S,
    ):
        self._engines, self._router, self._give_weights = list(engines), router, give_weights
        self._interval, self._timeout = args.rollout_health_check_interval, args.rollout_health_check_timeout
        self._max_failures, self._max_restarts = args.rollout_health_check_failures, args.rollout_max_engine_restarts
        self._restart_allowed, self._alive_interval = args.use_fault_tolerance, alive_interval
        self._states = [_State() for _ in self._engines]
        self._lock = threading.Lock()  # held while an engine is judged or restarted; pause() waits for it
        self._paused, self._stopped = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._lost: BaseException | None = None
        self.restarts = 0  # of engines
        self._router_restarts = 0

    def start(self) -> None:
        now = time.monotonic()
        for state in self._states:
            state.next_probe = now + self._interval
        self._pool = ThreadPoolExecutor(len(self._engines), thread_name_prefix="probe")
        self._thread = threading.Thread(target=self._run, name="engine-monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; a restart under way is finished first. Engines are left as they are."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._pool.shutdown(wait=False, cancel_futures=True)

    def pause(self) -> None:
        """Returns once no restart is under way; none begins until `resume`."""
        self._paused.set()
        with self._lock:
            pass

    def resume(self, updated: bool = False) -> None:
        """Probing goes on; failures from before the pause are forgotten. updated: every engine got the run's weights
        in the pause, restarted ones too."""
        with self._lock:
            for state in self._states:
                state.failures, state.next_probe = 0, time.monotonic() + self._interval
                state.has_weights = state.has_weights or updated
        self._paused.clear()

    def raise_if_lost(self) -> None:
        if self._lost is not None:
            raise EngineLost(str(self._lost)) from self._lost

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self._alive_interval):
                with self._lock:
                    if not self._paused.is_set() and not self._router.is_alive():
                        self._restart_router()
                for engine, state in zip(self._engines, self._states, strict=True):
                    with self._lock:
                        if self._paused.is_set() or self._stopped.is_set():
                            break
                        self._look_at(engine, state)
        except BaseException as error:
            logger.error("engine monitor stopped: %s", error)
            self._lost = error

    def _look_at(self, engine: EngineHandle, state: _State) -> None:
        if not engine.is_alive():
            self._recover(engine, state, engine.failure())
        elif state.failures >= self._max_failures:
            self._recover(engine, state, f"engine {engine.index} failed {state.failures} health checks in a row")
        elif not state.serves:
            self._open(engine, state)
        elif self._interval > 0 and not state.probing and time.monotonic() >= state.next_probe:
            state.probing = True
            self._pool.submit(self._probe, engine, state)

    def _probe(self, engine: EngineHandle, state: _State) -> None:
        try:
            engine.probe(self._timeout)
            failed = None
        except Exception as error:
            failed = error
        if failed is not None and not self._paused.is_set():
            state.failures += 1
            logger.warning("engine %d: failed health check %d: %s", engine.index, state.failures, failed)
        elif failed is None:
            state.failures = 0
        state.next_probe = time.monotonic() + self._interval
        state.probing = False

    def _recover(self, engine: EngineHandle, state: _State, why: str) -> None:
        self._check_allowed(why, self.restarts)
        self.restarts += 1
        logger.warning("%s\n  restarting engine %d (restart %d)", why, engine.index, self.restarts)
        self._tell_router(self._router.remove, engine)
        state.serves = state.has_weights = False
        engine.restart()
        self._open(engine, state)

    def _open(self, engine: EngineHandle, state: _State) -> None:
        """Lets a restarted engine serve, once it has the weights."""
        endpoint = engine.endpoint()
        state.has_weights = state.has_weights or self._give_weights(engine.index, endpoint)
        state.failures, state.next_probe = 0, time.monotonic() + self._interval
        if not state.has_weights:
            return
        if not self._tell_router(self._router.add, engine):
            return
        state.serves = True
        logger.warning("engine %d serves again at %s", engine.index, endpoint.url)

    def _restart_router(self) -> None:
        why = self._router.failure()
        self._check_allowed(why, self._router_restarts)
        self._router_restarts += 1
        logger.warning("%s\n  restarting the router (restart %d)", why, self._router_restarts)
        self._router.restart()
        for engine, state in zip(self._engines, self._states, strict=True):
            if state.serves and engine.is_alive():
                try:
                    state.serves = self._tell_router(self._router.add, engine)
                except RouterError as error:  # alive, but it does not answer: as after failed probes
                    logger.warning("engine %d: %s", engine.index, error)
                    state.failures = self._max_failures
        logger.warning("the router takes requests again")

    def _tell_router(self, call: Callable[[str], None], engine: EngineHandle) -> bool:
        """False: the router died meanwhile. It is restarted next, without workers, and an engine not serving is added
        then."""
        try:
            call(engine.endpoint().url)
        except RouterError:
            if self._router.is_alive():
                raise
            return False
        return True

    def _check_allowed(self, why: str, restarts: int) -> None:
        """Whether what died may be started again, after so many restarts."""
        if not self._restart_allowed:
            raise EngineLost(f"{why}\n  not restarted: --no-use-fault-tolerance")
        if restarts >= self._max_restarts:
            raise EngineLost(f"{why}\n  {restarts} restarts were used up (--rollout-max-engine-restarts)")
