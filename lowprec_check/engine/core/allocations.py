"""Counts what torch allocates on the CPU, by its profiler, which also sees compiled code and memory inside kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd as profiler

_OPTIONS = (False, True, False, False, False)
"""Shapes, memory, stacks, FLOPs, modules."""


def peak_allocated(work: Callable[[], Any]) -> int:
    """Peak bytes that ``work`` allocates on the CPU, beyond what was allocated before.

    Raises ``RuntimeError`` if this process is being profiled already.
    """
    # The profiler without Kineto, which prints a line to stderr whenever it starts.
    api: Any = profiler
    settings = torch._C._profiler._ExperimentalConfig()
    api._enable_profiler_legacy(api.ProfilerConfig(api.ProfilerState.CPU, *_OPTIONS, settings))
    try:
        work()
    finally:
        threads = api._disable_profiler_legacy()
    events = itertools.chain.from_iterable(threads)
    changes = (event.cpu_memory_usage() for event in events if event.kind() == "memory_alloc")
    peak: int = max(itertools.accumulate(changes, initial=0))
    return peak
