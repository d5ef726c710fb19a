"""Threads and memory of processes that compute on a few CPU cores."""

import os
from collections.abc import Mapping


def cpu_env(threads: int, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment of a process that computes with torch in `threads` OpenMP threads, on cores that others use too.

    A thread that waits for its siblings spins shortly, then sleeps. libgomp's default spin takes the core from whom it
    waits for: with two processes of two threads on two cores, small operations ran at a tenth of their speed; without
    any spin they ran at half of it when alone. 500 turns cost neither. Torch gets huge pages: first touches of small
    ones cost more than the work on them. Variables that the user has set in `base` stay.
    """
    defaults = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "500", "THP_MEM_ALLOC_ENABLE": "1"}
    return {"OMP_NUM_THREADS": str(threads)} | {k: base.get(k, v) for k, v in defaults.items()}
