"""The accelerators that this process uses."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from typing import Any

import torch

from lowprec_check.schema.axes import accelerators


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
