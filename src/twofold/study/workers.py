"""Worker processes that share the cores of this machine."""

import ctypes
import multiprocessing
import os
import signal
import sys
from concurrent.futures import ProcessPoolExecutor

import torch

_PR_SET_PDEATHSIG = 1


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_pool(num_workers: int, *, fresh: bool = False) -> ProcessPoolExecutor:
    """Processes with one torch thread each: small models gain more from running side by side than from threads.

    They ignore Ctrl-C, which the parent handles, and on Linux they end with the parent, however it ends.

    Args:
        num_workers: Processes.
        fresh: A new process for each call.
    """
    return ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(os.getpid(),),
        max_tasks_per_child=1 if fresh else None,
    )


def _start_worker(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we could ask to follow
            os._exit(1)
    torch.set_num_threads(1)
