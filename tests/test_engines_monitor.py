"""The monitor's judgement, order of steps and limits, with engines that this file can break at will."""

import threading
import time
from types import SimpleNamespace

import pytest

from slime.backends.sglang_utils.client import EngineEndpoint, EngineError
from slime.backends.sglang_utils.monitor import EngineLost, EngineMonitor
from slime.backends.sglang_utils.router import RouterError
from slime.config import Args
from slime.ray.fleet import EngineFleet
from slime.ray.rollout_manager import _RolloutManager


class BreakableEngine:
    """`healthy` and `running` are switches of the test; `log` collects what happened, in order."""

    def __init__(self, index, log):
        self.index, self.log = index, log
        self.healthy, self.running, self.probes, self.starts = True, True, 0, 0

    def is_alive(self):
        return self.running

    def failure(self):
        return f"engine {self.index} ended with status 137"

    def probe(self, timeout):
        self.probes += 1
        if not self.healthy:
            raise EngineError("http://engine", "health_generate", 503, "busy or stuck")

    def endpoint(self):
        return EngineEndpoint(f"http://engine{self.index}.{self.starts}")

    def restart(self):
        self.log.append(("restart", self.index))
        self.starts += 1
        self.healthy = self.running = True
        return self.endpoint()


class BreakableRouter:
    def __init__(self, log):
        self.log, self.running = log, True

    def is_alive(self):
        return self.running

    def failure(self):
        return "router ended with status -9"

    def restart(self):
        self.log.append("router")
        self.running = True

    def add(self, url):
        self._call("add", url)

    def remove(self, url):
        self._call("remove", url)

    def _call(self, what, url):
        if not self.running:
            raise RouterError(f"router http://router/workers: {what}: connection refused")
        self.log.append((what, url))


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true"
        time.sleep(0.005)


@pytest.fixture
def watch():
    """Starts a monitor over two engines: returns (engines, log, monitor). on_restarted(index, endpoint): does what the
    monitor asks for; None and True: the engine has the weights then."""
    monitors = []

    def start(on_restarted=None, **flags):
        log = []
        flags = {"rollout_health_check_interval": 0.01, "rollout_health_check_failures": 3, **flags}
        engines = [BreakableEngine(i, log) for i in range(2)]

        def give_weights(index, endpoint):
            log.append(("weights", endpoint.url))
            return on_restarted is None or on_restarted(index, endpoint) in (None, True)

        monitor = EngineMonitor(engines, BreakableRouter(log), Args(**flags), give_weights, alive_interval=0.005)
        monitor.start()
        monitors.append(monitor)
        return engines, log, monitor

    yield start
    for monitor in monitors:
        monitor.stop()


RECOVERY = [
    ("remove", "http://engine1.0"),
    ("restart", 1),
    ("weights", "http://engine1.1"),
    ("add", "http://engine1.1"),
]


def test_dead_process_is_restarted_and_serves_only_with_the_weights(watch):
    engines, log, monitor = watch()
    engines[1].running = False
    wait_for(lambda: len(log) == 4)
    assert log == RECOVERY
    monitor.raise_if_lost()


def test_one_failed_probe_does_not_kill(watch):
    engines, log, _ = watch()
    for _ in range(4):
        engines[0].healthy = False
        seen = engines[0].probes
        wait_for(lambda: engines[0].probes > seen)  # noqa: B023
        engines[0].healthy = True
        seen = engines[0].probes
        wait_for(lambda: engines[0].probes > seen + 1)  # noqa: B023
    assert log == []


def test_probes_failing_in_a_row_do(watch):
    engines, log, _ = watch()
    engines[1].healthy = False
    wait_for(lambda: len(log) == 4)
    assert log == RECOVERY and engines[1].probes >= 3


def test_pause_holds_everything_and_forgets_failures(watch):
    engines, log, monitor = watch()
    monitor.pause()
    engines[0].healthy = engines[1].running = False
    time.sleep(0.1)
    assert log == []
    engines[0].healthy = True
    monitor.resume()
    wait_for(lambda: len(log) == 4)
    assert log == RECOVERY  # the one whose process is gone; not the other


def test_pause_waits_for_a_restart_under_way(watch):
    entered, leave = threading.Event(), threading.Event()

    def slow(index, endpoint):
        entered.set()
        assert leave.wait(30)

    engines, log, monitor = watch(slow)
    engines[1].running = False
    assert entered.wait(30)
    paused = threading.Thread(target=monitor.pause)
    paused.start()
    time.sleep(0.05)
    assert paused.is_alive()
    leave.set()
    paused.join(30)
    assert log == RECOVERY


def test_weights_that_do_not_arrive_stop_the_run_and_the_engine_stays_out(watch):
    def fail(index, endpoint):
        raise RuntimeError("sync refused")

    engines, log, monitor = watch(fail)
    engines[1].running = False
    wait_for(lambda: monitor._lost is not None)
    assert log == RECOVERY[:3]
    with pytest.raises(EngineLost, match="sync refused"):
        monitor.raise_if_lost()


def test_an_engine_waits_for_weights_that_nobody_can_give_now(watch):
    answers = [False, False, True]
    engines, log, _ = watch(lambda index, endpoint: answers.pop(0))
    engines[1].running = False
    wait_for(lambda: ("add", "http://engine1.1") in log)
    assert log == [*RECOVERY[:3], *RECOVERY[2:3] * 2, RECOVERY[3]]


def test_a_weight_update_to_all_engines_is_as_good(watch):
    engines, log, monitor = watch(lambda index, endpoint: False)
    engines[1].running = False
    wait_for(lambda: len(log) >= 3)
    monitor.pause()
    assert ("add", "http://engine1.1") not in log
    monitor.resume()  # an update that failed
    seen = len(log)
    wait_for(lambda: len(log) > seen)
    assert ("add", "http://engine1.1") not in log
    monitor.pause()
    monitor.resume(updated=True)
    wait_for(lambda: ("add", "http://engine1.1") in log)
    assert log == [*RECOVERY[:2], *RECOVERY[2:3] * (len(log) - 3), RECOVERY[3]]


def test_trainer_ranks_are_lent_to_the_monitor_only_while_the_driver_waits():
    fleet = EngineFleet(Args(), SimpleNamespace(engine_tp=1, num_engines=0), [])
    calls = []

    class Rank:
        class call:
            @staticmethod
            def remote(name, value):
                calls.append(name)

    endpoint = EngineEndpoint("http://engine0.1")
    assert fleet._give_weights(0, endpoint)  # a run without a trainer: the folder's weights are right
    fleet._train_ranks = [Rank]
    assert not fleet._give_weights(0, endpoint) and calls == []
    giving = []

    def rollout():
        with fleet.lend_ranks():
            giving.append(fleet._ranks_lent.acquire(blocking=False))  # as the monitor does, to give weights

    driver = threading.Thread(target=rollout, daemon=True)
    driver.start()
    wait_for(lambda: giving)
    time.sleep(0.05)
    assert giving == [True] and driver.is_alive()  # the rollout has ended, and the driver must not go on yet
    fleet._ranks_lent.release()
    driver.join(30)
    assert not driver.is_alive() and not fleet._give_weights(0, endpoint) and calls == []


def test_a_dead_router_comes_back_with_the_engines_that_served(watch):
    engines, log, monitor = watch(lambda index, endpoint: False)
    engines[1].running = False
    wait_for(lambda: len(log) >= 3)
    monitor._router.running = False
    wait_for(lambda: ("add", "http://engine0.0") in log)
    assert log.count("router") == 1 and ("add", "http://engine1.1") not in log
    monitor.raise_if_lost()


def test_router_and_engine_may_die_together(watch):
    engines, log, monitor = watch()
    looked = engines[1].is_alive

    def die():  # after this turn's look at the router
        engines[1].running = monitor._router.running = False
        engines[1].is_alive = looked
        return False

    engines[1].is_alive = die
    wait_for(lambda: ("add", "http://engine1.1") in log)
    assert log == [("restart", 1), ("weights", "http://engine1.1"), "router", ("add", "http://engine0.0"), RECOVERY[3]]
    monitor.raise_if_lost()


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"use_fault_tolerance": False}, "--no-use-fault-tolerance"),
        ({"rollout_max_engine_restarts": 0}, "--rollout-max-engine-restarts"),
    ],
)
def test_a_router_that_may_not_be_restarted_stops_the_run(watch, flags, why):
    _, log, monitor = watch(**flags)
    monitor._router.running = False
    wait_for(lambda: monitor._lost is not None)
    with pytest.raises(EngineLost, match=f"router ended with status -9\n.*{why}"):
        monitor.raise_if_lost()
    assert log == []


def test_restarts_are_bounded(watch):
    engines, log, monitor = watch(rollout_max_engine_restarts=1)
    engines[1].running = False
    wait_for(lambda: len(log) == 4)
    engines[0].running = False
    wait_for(lambda: monitor._lost is not None)
    with pytest.raises(EngineLost, match="engine 0 ended with status 137\n.*--rollout-max-engine-restarts"):
        monitor.raise_if_lost()
    assert log == RECOVERY


def test_without_fault_tolerance_a_death_stops_the_run(watch):
    engines, log, monitor = watch(use_fault_tolerance=False)
    engines[0].running = False
    wait_for(lambda: monitor._lost is not None)
    with pytest.raises(EngineLost, match="status 137"):
        monitor.raise_if_lost()
    assert log == []

    def requests_fail(args, rollout_id, data_source, evaluation=False):
        raise ConnectionError("gave up after 60 tries")

    manager = object.__new__(_RolloutManager)
    manager._args, manager._source = Args(), None
    manager._fleet = EngineFleet(Args(), SimpleNamespace(engine_tp=1, num_engines=0), [])
    manager._fleet._monitor = monitor
    with pytest.raises(EngineLost, match="status 137"):
        manager._call(requests_fail, 0, evaluation=False)
    manager._fleet = None
    with pytest.raises(ConnectionError):
        manager._call(requests_fail, 0, evaluation=True)
