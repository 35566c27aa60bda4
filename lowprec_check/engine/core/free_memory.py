"""How much memory is free, so that what is optional does not take the memory of the model."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

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
