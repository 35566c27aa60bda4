"""Memory of the machine and of calls: what is free, and what torch allocates on the CPU."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.autograd as profiler

# -- How much memory is free, so that what is optional does not take the memory of the model

_GROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""The limit and the use of memory of a container, in both versions of control groups."""


class MemoryLimit(NamedTuple):
    """Bytes that something may take."""

    size: float
    why: str
    """What the limit is, in words."""

    @classmethod
    def half_of(cls, free: int) -> MemoryLimit:
        """Half of the free memory."""
        return cls(free / 2, "half of the free memory")


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still allocate on ``device``; of a CPU also within the limit of its container."""
    if device.type == "cpu":
        return min(psutil.virtual_memory().available, *_left_in_group())
    module = torch.get_device_module(device)
    with contextlib.suppress(AttributeError, RuntimeError):
        free, _ = module.mem_get_info()
        return int(free) + int(module.memory_reserved()) - int(module.memory_allocated())
    return psutil.virtual_memory().available  # mps shares the memory of the CPU


def _left_in_group() -> list[int]:
    found = [psutil.virtual_memory().total]
    for limit, used in _GROUP_FILES:
        with contextlib.suppress(OSError, ValueError):  # no limit is "max"
            found.append(max(0, int(Path(limit).read_text()) - int(Path(used).read_text())))
    return found


# -- Counts what torch allocates on the CPU, by its profiler, which also sees compiled code and memory inside
# kernels

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
