"""Worker processes that share the cores of this machine."""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from twofold.spec import TwofoldError

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.5


class WorkerError(TwofoldError):
    """A call whose process does not live to its end."""


def run_side_by_side(
    calls: Mapping[str, Callable[[], Any]], num_workers: int, on_wait: Callable[[], None] | None = None
) -> dict[str, BaseException]:
    """Makes calls in worker processes, each to its end whatever becomes of the others, and returns errors by name.

    Each call has a process to itself. Where that dies (killed from outside, mostly because memory ran out), the call
    is made once more, alone after all others; where it dies again, its error is a `WorkerError`.

    Args:
        calls: What to call, by name; it is pickled.
        num_workers: Processes.
        on_wait: Called about twice a second.
    """
    errors, died = _run_round(calls, num_workers, on_wait)
    if died:
        again, dead = _run_round({name: calls[name] for name in died}, 1, on_wait)
        errors |= again
        errors |= {name: WorkerError("its process died twice: killed, most likely for lack of memory") for name in dead}
    return {name: errors[name] for name in calls if name in errors}


@contextmanager
def worker_pool(num_workers: int, *, fresh: bool = False) -> Iterator[ProcessPoolExecutor]:
    """Processes with one torch thread each: small models gain more from running side by side than from threads.

    They ignore Ctrl-C, which the parent handles, and on Linux they end with the parent, however it ends. An exception
    in the block, Ctrl-C too, ends them at once.

    Args:
        num_workers: Processes.
        fresh: A new process for each call.
    """
    pool = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(os.getpid(),),
        max_tasks_per_child=1 if fresh else None,
    )
    try:
        yield pool
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _run_round(
    calls: Mapping[str, Callable[[], Any]], num_workers: int, on_wait: Callable[[], None] | None
) -> tuple[dict[str, BaseException], list[str]]:
    """Errors by name, and names of the calls whose process died."""
    errors: dict[str, BaseException] = {}
    died: list[str] = []
    waiting = list(calls)
    with ExitStack() as stack:
        # A pool for each process: one that breaks takes no neighbour with it, and says whose process died.
        idle = [stack.enter_context(worker_pool(1)) for _ in range(min(num_workers, len(calls)))]
        running: dict[Future[Any], tuple[str, ProcessPoolExecutor]] = {}
        while waiting or running:
            while waiting and idle:
                name, pool = waiting.pop(0), idle.pop()
                running[pool.submit(calls[name])] = (name, pool)
            for future in wait(running, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED).done:
                name, pool = running.pop(future)
                error = future.exception()
                if isinstance(error, BrokenProcessPool):
                    died.append(name)
                    pool = stack.enter_context(worker_pool(1))
                elif error is not None:
                    errors[name] = error
                idle.append(pool)
            if on_wait is not None:
                on_wait()
    return errors, died


def _start_worker(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we could ask to follow
            os._exit(1)
    torch.set_num_threads(1)
