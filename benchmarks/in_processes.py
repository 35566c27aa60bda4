"""Runs the independent parts of a benchmark a few at a time, each in a fresh process that a pool keeps."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_processes(
    function: Callable[[Item], Result], items: Iterable[Item], jobs: int, seconds: float, *, cores: int = 0
) -> Iterator[tuple[Item, Result | Exception]]:
    """Each of ``items`` with the result of ``function``, or its exception, as they come; none is started after so many seconds.

    With ``cores``, each process has so many for itself; ``ValueError`` if this one has fewer in all.
    """
    if cores and jobs * cores > (here := len(os.sched_getaffinity(0))):
        raise ValueError(
            f"{jobs} jobs on {cores} cores each need {jobs * cores} cores, and this process has {here}: use fewer jobs or more cores"
        )
    waiting, end, context = list(items), time.monotonic() + seconds, multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _bind, (context.Value("i"), cores)) as pool:
        running: dict[Future[Result], Item] = {}
        while running or (waiting and time.monotonic() < end):
            while waiting and len(running) < jobs and time.monotonic() < end:
                item = waiting.pop(0)
                running[pool.submit(function, item)] = item
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                error = future.exception()
                if error is not None and not isinstance(error, Exception):
                    raise error
                yield running.pop(future), future.result() if error is None else error


def _bind(started: Any, cores: int) -> None:
    """In a process of the pool: bind it to the next cores."""
    if cores:
        with started.get_lock():
            number, started.value = started.value, started.value + 1
        mine = sorted(os.sched_getaffinity(0))[number * cores : (number + 1) * cores]
        os.sched_setaffinity(0, mine)
        os.environ["OMP_NUM_THREADS"] = str(cores)  # which torch reads when it is imported
