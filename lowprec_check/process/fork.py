"""Forks a worker from this process: a copy of it that continues in its main thread, without OpenMP's threads."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import util
from pathlib import Path

from lowprec_check.process.guardian import GUARDIAN, announce
from lowprec_check.process.process_group import ProcessGroup

# -- Ends the OpenMP threads of the calling thread, which a forked process would wait for forever

_SOFT = 1
"""``omp_pause_soft``: threads end, settings stay; the next parallel region starts new threads."""


def release_threads() -> bool:
    """End the pool of threads of the calling thread, in every GNU OpenMP runtime that is loaded.

    False if a runtime has no function for this (before GCC 9), or the calling thread is in a parallel region. Runtimes
    of Intel and LLVM handle a fork themselves.
    """
    results = [_pause(path) for path in _loaded_runtimes()]
    return all(results)


def _loaded_runtimes() -> set[str]:
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return set()
    paths = {line[line.index("/") :] for line in lines if "/" in line}
    return {path for path in paths if os.path.basename(path).startswith("libgomp")}


def _pause(path: str) -> bool:
    try:
        return bool(ctypes.CDLL(path).omp_pause_resource_all(_SOFT) == 0)
    except (OSError, AttributeError):
        return False


# -- Forks a worker from this process: a copy of it that continues in its main thread

WHOLE_PROCESS = threading.RLock()
"""Held while a process forks, and while a model is run in this process, with hooks and modes that a fork must not copy."""


def fork(run: Callable[[], object]) -> ProcessGroup:
    """Start a copy of this process that calls ``run`` in its main thread, then exits without the exit handlers.

    OpenMP keeps a pool of threads for each thread that used it, and the copy would wait for the threads of a pool, which
    were not copied. So the pool of this thread is released first; if that is not possible, a new thread forks.
    """
    with WHOLE_PROCESS:
        GUARDIAN.temporary_folder()  # made here, so that the copy uses it too
        lifeline = GUARDIAN.lifeline()
        try:
            if release_threads():
                pid = _fork(run, lifeline)
            else:
                with ThreadPoolExecutor(1) as executor:
                    pid = executor.submit(_fork, run, lifeline).result()
        finally:
            os.close(lifeline)
    return ProcessGroup(pid)


def _fork(run: Callable[[], object], lifeline: int) -> int:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This process .* is multi-threaded", category=DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            announce(os.getpid(), lifeline)
            _close_stdin()
            util._run_after_forkers()  # type: ignore[attr-defined]
            run()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return pid


def _close_stdin() -> None:
    """A worker has no terminal: its standard input is empty."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
