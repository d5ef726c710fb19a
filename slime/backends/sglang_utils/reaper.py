"""Runs one command so that nothing of it outlives its owner. A script of `ManagedProcess`; standard library only.

    python reaper.py OWNER_PID GRACE_SECONDS command...

It leads the session that the command runs in and adopts every orphan below it (PR_SET_CHILD_SUBREAPER). When the owner
is gone (even by SIGKILL), on SIGTERM, or when the command itself ends, the whole tree gets SIGTERM, then after the
grace period SIGKILL; the exit status is the command's. The command's TMPDIR is private and removed at the end, and so
is the shared memory that it leaves.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# What SGLang and multiprocessing call their files in /dev/shm; a process that is killed cannot remove them itself.
SHARED_MEMORY = ("sgl_", "sglang_", "sem.mp-", "psm_")
SHARED_MEMORY_SCAN_S = 10.0
HANDLED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def before_exec() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the command dies at once should this reaper itself be killed


def descendants() -> set[int]:
    """Process ids below this one, from /proc."""
    parent_of: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    # pid (comm) state ppid ...: comm may hold spaces and parentheses
                    parent_of[int(entry)] = int(file.read().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue  # ended while we looked
    found: set[int] = set()
    level = {os.getpid()}
    while level:
        level = {pid for pid, parent in parent_of.items() if parent in level} - found
        found |= level
    return found


def reap(main: int) -> tuple[bool, int | None]:
    """Collects ended children: (whether any child is left, the main command's status once it ended)."""
    status = None
    while True:
        try:
            pid, raw = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False, status
        if pid == 0:
            return True, status
        if pid == main:
            status = os.waitstatus_to_exitcode(raw)


def is_resource_tracker(pid: int) -> bool:
    """Python's helper that removes a program's semaphores; it ends by itself once nobody is left to serve."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"resource_tracker" in file.read()
    except OSError:
        return False


def send(sig: signal.Signals, spare_trackers: bool) -> None:
    for pid in descendants():
        if not (spare_trackers and is_resource_tracker(pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sig)


def shared_memory() -> set[int]:
    """Inodes in /dev/shm that processes below have mapped. Not names: a semaphore is mapped under another one."""
    found: set[int] = set()
    for pid in descendants():
        try:
            with open(f"/proc/{pid}/maps") as file:
                found.update(int(line.split(maxsplit=5)[4]) for line in file if "/dev/shm/" in line)
        except OSError:
            continue  # ended while we looked
    return found


def remove_shared_memory(inodes: set[int]) -> None:
    """Removes those of the files that SGLang or multiprocessing made; others may belong to the owner."""
    for entry in os.scandir("/dev/shm") if inodes else ():
        if entry.name.startswith(SHARED_MEMORY) and entry.inode() in inodes:
            with contextlib.suppress(OSError):
                os.unlink(entry.path)


def end_all(main: int, grace: float) -> int | None:
    """Ends whatever is left; returns the main command's status if it ended here."""
    status = None
    send(signal.SIGTERM, spare_trackers=True)
    deadline = time.monotonic() + grace
    while True:
        left, ended = reap(main)
        status = ended if ended is not None else status
        if not left:
            return status
        if time.monotonic() > deadline:
            send(signal.SIGKILL, spare_trackers=time.monotonic() < deadline + 1.0)
        time.sleep(0.02)


def main() -> int:
    owner, grace, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    leftovers: set[int] = set()
    scratch = tempfile.mkdtemp(prefix="slime-")
    try:
        child = subprocess.Popen(command, preexec_fn=before_exec, env={**os.environ, "TMPDIR": scratch})
        status, next_scan = None, time.monotonic() + SHARED_MEMORY_SCAN_S
        while status is None and os.getppid() == owner:
            received = signal.sigtimedwait(HANDLED, 0.5)
            if received is not None and received.si_signo != signal.SIGCHLD:
                break
            _, status = reap(child.pid)
            if time.monotonic() > next_scan:
                leftovers |= shared_memory()
                next_scan = time.monotonic() + SHARED_MEMORY_SCAN_S
        leftovers |= shared_memory()
        ended = end_all(child.pid, grace)
        status = ended if status is None else status
        child.returncode = status  # reaped above; keeps Popen from waiting for a process that is gone
        return 1 if status is None else status if status >= 0 else 128 - status
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        remove_shared_memory(leftovers)


if __name__ == "__main__":
    sys.exit(main())
