"""One code path for all devices, through ``torch.get_device_module``, and the accelerators that this process uses."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lowprec_check.errors import UsageError
from lowprec_check.schema.axes import DEVICES, accelerators, device_of, device_type

# -- The accelerators that this process uses


def initialized() -> Iterator[Any]:
    """The modules (``torch.cuda``) of the accelerators that this process has initialized."""
    for name in accelerators():
        module = getattr(torch, name, None)
        if module is not None and getattr(module, "is_initialized", lambda: False)():
            yield module


def in_bad_fork() -> bool:
    """Whether this process is a fork of one that has asked for its accelerators, so that it cannot use them.

    ``torch.cuda.is_available()`` is enough, after which ``is_initialized()`` is still false.
    """
    modules = (getattr(torch, name, None) for name in accelerators())
    return any(getattr(module, "_is_in_bad_fork", lambda: False)() for module in modules)


def cuda_driver_is_initialized() -> bool:
    """Whether something in this process has initialized CUDA's driver, torch or another library: no fork can use it then.

    A device count, which needs the driver but does not initialize it, is error 3 (``CUDA_ERROR_NOT_INITIALIZED``) before that.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)  # only if it is loaded
    except (OSError, AttributeError):
        return False
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) == 0


def check_accelerators() -> None:
    """Wait for the accelerators; raises an exception if one cannot be used any more in this process.

    After an assertion in a kernel or an illegal access to memory, every later call fails.
    """
    for module in initialized():
        module.synchronize()


def release_memory() -> int:
    """Free what is no longer used, and return the bytes of tensors that remain on the accelerators."""
    gc.collect()
    held = 0
    for module in initialized():
        for name in ("synchronize", "empty_cache"):
            if hasattr(module, name):
                getattr(module, name)()
        held += int(module.memory_allocated()) if hasattr(module, "memory_allocated") else 0
    return held


# -- One code path for all devices, through ``torch.get_device_module``; nothing here is specific to a vendor


def module_of(device: torch.device) -> Any:
    """``torch.cpu``, ``torch.cuda``, ``torch.xpu`` or ``torch.mps``."""
    return torch.get_device_module(device)


def is_available(name: str) -> bool:
    """Whether torch can use a device of this type here, and with an index (``cuda:1``) that very device."""
    kind, _, index = name.partition(":")
    if kind == "cpu":
        return True
    try:
        module = module_of(torch.device(kind))
        return bool(module.is_available()) and (not index or int(index) < module.device_count())
    except RuntimeError:  # this build of torch does not support the type
        return False


def default_index(kind: str) -> int:
    """The index that a type stands for: ``cuda`` is ``cuda:0``, or what ``torch.cuda.set_device`` chose. Starts no device."""
    module = module_of(torch.device(kind))
    is_started = getattr(module, "is_initialized", None)
    if is_started is None or not is_started():
        return 0
    return int(module.current_device())


def resolve(name: str | None) -> torch.device:
    """The device ``name``, by default an accelerator if there is one; raises :class:`UsageError` if it is not available."""
    if name is None:
        return torch.device(next((kind for kind in accelerators() if is_available(kind)), "cpu"))
    known = device_of(name)
    try:
        device = torch.device(known.name + name.strip()[len(device_type(name)) :])
    except RuntimeError:
        raise UsageError(
            f"Unknown device {name!r} in this torch.", f"Choose from {', '.join(DEVICES.names())}, or upgrade torch."
        ) from None
    if not is_available(device.type):
        available = [kind for kind in DEVICES.names() if is_available(kind)]
        hint = f" Predict it with: lowprec-check scan TARGET --device {device.type}" if known.catalog else ""
        raise UsageError(f"Device {name!r} is not available.", f"Available here: {', '.join(available)}.{hint}")
    return device


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    module_of(device).synchronize()


def peak_memory(device: torch.device, work: Callable[[], Any]) -> int | None:
    """Peak bytes that ``work`` allocates on the accelerator, as its allocator reports them.

    ``None`` for the CPU, and for a device whose allocator does not report a peak (mps).
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
    """The result of ``work`` and its duration in seconds, including the work on the device."""
    synchronize(device)
    started = time.perf_counter()
    result = work()
    synchronize(device)
    return result, time.perf_counter() - started


def default_autocast_dtype(device: torch.device) -> torch.dtype:
    """The default dtype of ``torch.autocast(device.type)``: bf16 on a CPU, fp16 on CUDA and XPU."""
    return torch.get_autocast_dtype(device.type)


def name_of(device: torch.device) -> str:
    """The device's product name."""
    module = module_of(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type
