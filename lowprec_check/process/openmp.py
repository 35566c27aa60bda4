"""Ends the OpenMP threads of the calling thread, which a forked process would wait for forever."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

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
