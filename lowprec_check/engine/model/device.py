"""Every accelerator through one code path: ``torch.get_device_module`` and ``torch.accelerator``, no per-vendor copies."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from lowprec_check.errors import UsageError
from lowprec_check.schema.devices import DEVICES, accelerators


def module_of(device: torch.device) -> Any:
    """``torch.cpu``, ``torch.cuda``, ``torch.xpu`` or ``torch.mps``."""
    return torch.get_device_module(device)


def is_available(kind: str) -> bool:
    """Whether this torch has a device of that type."""
    if kind == "cpu":
        return True
    try:
        return bool(module_of(torch.device(kind)).is_available())
    except RuntimeError:  # a type that this build of torch does not know
        return False


def resolve(name: str | None) -> torch.device:
    """The device named, or the one at hand; raises :class:`UsageError` if it is not there."""
    if name is None:
        return torch.device(next((kind for kind in accelerators() if is_available(kind)), "cpu"))
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in DEVICES.names():
        raise UsageError(f"Unknown device {name!r}.", f"Choose from {', '.join(DEVICES.names())}.")
    if not is_available(device.type):
        there = [kind for kind in DEVICES.names() if is_available(kind)]
        raise UsageError(f"Device {name!r} is not available.", f"This torch sees: {', '.join(there)}.")
    return device


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it."""
    module_of(device).synchronize()


def peak_memory(device: torch.device, work: Callable[[], Any]) -> int | None:
    """Bytes that ``work`` allocates on the accelerator at its peak, by the allocator's own account.

    ``None`` where the device keeps no such account (mps) or is the CPU.
    """
    module = module_of(device)
    if not hasattr(module, "reset_peak_memory_stats"):
        return None
    synchronize(device)
    module.reset_peak_memory_stats(device)
    before = module.memory_allocated(device)
    work()
    synchronize(device)
    return int(module.max_memory_allocated(device) - before)


def timed(device: torch.device, work: Callable[[], Any]) -> tuple[Any, float]:
    """The result of ``work`` and the seconds it took, the device's own work included."""
    synchronize(device)
    started = time.perf_counter()
    result = work()
    synchronize(device)
    return result, time.perf_counter() - started


def default_autocast_dtype(device: torch.device) -> torch.dtype:
    """What ``torch.autocast(device.type)`` casts to: bf16 on a CPU, fp16 on CUDA and XPU."""
    return torch.get_autocast_dtype(device.type)


def name_of(device: torch.device) -> str:
    """The device's name as its vendor gives it."""
    module = module_of(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type
