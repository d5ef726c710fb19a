"""Processes that leave nothing behind, ports, start failures: with cheap commands in place of an engine."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from slime.backends.sglang_utils.process import ManagedProcess, StartError, free_port, port_is_free

# A main process, a child in a session of its own, and an orphan of that child; none of them heeds SIGTERM.
FAMILY = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
depth = int(sys.argv[1])
if depth:
    subprocess.Popen([sys.executable, __file__, str(depth - 1), sys.argv[2]], start_new_session=True)
open(os.path.join(sys.argv[2], f"{depth}.{os.getpid()}"), "w").close()
if depth != 1:  # the middle one ends, so that the last one is an orphan
    time.sleep(600)
"""


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true"
        time.sleep(0.05)


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def family(tmp_path):
    """(command, function that waits for all three processes and returns their ids)"""
    script = tmp_path / "family.py"
    script.write_text(FAMILY)
    marks = tmp_path / "marks"
    marks.mkdir()

    def pids():
        wait_for(lambda: len(list(marks.iterdir())) == 3)
        return [int(mark.name.split(".")[1]) for mark in marks.iterdir()]

    return [sys.executable, str(script), "2", str(marks)], pids


def test_stop_ends_the_whole_tree(family, tmp_path):
    command, pids = family
    process = ManagedProcess("family", command, tmp_path / "log", grace=0.2)
    process.start()
    members = pids()
    assert {process.pid, *members} <= set(process.pids())
    process.stop()
    assert not process.is_alive() and not any(map(alive, members))
    process.stop()  # again: nothing to do


def test_nothing_survives_an_owner_that_is_killed(family, tmp_path):
    command, pids = family
    owner_code = textwrap.dedent(f"""
        import time
        from slime.backends.sglang_utils.process import ManagedProcess
        process = ManagedProcess("family", {command!r}, {str(tmp_path / "log")!r}, grace=0.2)
        process.start()
        print(process.pid, flush=True)
        time.sleep(600)
    """)
    owner = subprocess.Popen([sys.executable, "-c", owner_code], stdout=subprocess.PIPE, text=True)
    reaper = int(owner.stdout.readline())
    members = [reaper, *pids()]
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_for(lambda: not any(map(alive, members)))


def test_the_command_dies_with_a_reaper_that_is_killed(tmp_path):
    process = ManagedProcess("sleeper", ["sleep", "600"], tmp_path / "log")
    process.start()
    wait_for(lambda: len(process.pids()) == 2)
    child = process.pids()[1]
    os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: not alive(child))


def test_private_temporary_folder_and_shared_memory_are_removed(tmp_path):
    shared = f"/dev/shm/sglang_test_{os.getpid()}"
    code = textwrap.dedent(f"""
        import mmap, tempfile, time
        handle, path = tempfile.mkstemp()
        with open({shared!r}, "wb+") as file:
            file.write(b"x" * 4096)
            file.flush()
            mapped = mmap.mmap(file.fileno(), 4096)
        from multiprocessing import get_context
        lock = get_context("spawn").Lock()  # a named semaphore
        with open({str(tmp_path / "semaphore")!r}, "w") as file:
            file.write(lock._semlock.name)
        open({str(tmp_path / "where")!r}, "w").write(path)
        time.sleep(600)
    """)
    process = ManagedProcess("writer", [sys.executable, "-c", code], tmp_path / "log", grace=0.0)
    process.start()
    where = tmp_path / "where"
    wait_for(lambda: where.exists() and where.read_text())
    path = where.read_text()
    assert os.path.exists(path) and os.path.exists(shared)
    semaphore = "/dev/shm/sem." + (tmp_path / "semaphore").read_text().strip("/")
    assert os.path.exists(semaphore)
    tracker = [pid for pid in process.pids() if "resource_tracker" in " ".join(psutil.Process(pid).cmdline())]
    os.kill(tracker[0], signal.SIGKILL)  # the helper that would remove it
    process.stop()
    assert not os.path.exists(os.path.dirname(path)) and not os.path.exists(shared) and not os.path.exists(semaphore)


def test_early_end_is_one_clear_error_with_the_log(tmp_path):
    code = "import sys; print('loading'); raise OSError('weights.safetensors is cut short')"
    process = ManagedProcess("engine 3", [sys.executable, "-c", code], tmp_path / "engine_3.log")
    process.start()
    with pytest.raises(StartError) as error:
        process.wait_until(lambda: False, timeout=60)
    first, *rest = str(error.value).splitlines()
    assert first == "engine 3 ended with status 1 before it was ready: OSError: weights.safetensors is cut short"
    assert str(tmp_path / "engine_3.log") in rest[0] and any("loading" in line for line in rest)


def test_log_of_an_earlier_start_is_not_quoted(tmp_path):
    log = tmp_path / "log"
    log.write_text("ValueError: of the run before\n")
    process = ManagedProcess("engine 0", [sys.executable, "-c", "raise SystemExit(3)"], log)
    process.start()
    with pytest.raises(StartError, match="status 3") as error:
        process.wait_until(lambda: False, timeout=60)
    assert "run before" not in str(error.value) and "run before" in log.read_text()


def test_slow_start_is_stopped_and_reported(tmp_path):
    process = ManagedProcess("engine 0", ["sleep", "600"], tmp_path / "log", grace=0.0)
    process.start()
    with pytest.raises(StartError, match="not ready after 0 s"):
        process.wait_until(lambda: False, timeout=0.2)
    assert not process.is_alive()


def test_death_by_signal_is_told(tmp_path):
    process = ManagedProcess("engine 0", [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], tmp_path / "log")
    process.start()
    wait_for(lambda: not process.is_alive())
    assert process.exit_code() == 128 + 9


def test_port_in_use_is_recognised(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not port_is_free(port)
        command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
        process = ManagedProcess("engine 0", command, tmp_path / "log")
        process.start()
        wait_for(lambda: not process.is_alive())
        assert process.port_was_taken()
    free = free_port()
    assert port_is_free(free) and 15000 <= free < 30000
