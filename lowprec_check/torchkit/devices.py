"""Devices of all kinds through ``torch.get_device_module``: memory and random number generators."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import os
import random
import re
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.autograd as profiler

from lowprec_check.errors import UsageError, message_of
from lowprec_check.process import system
from lowprec_check.schema.axes import DEVICES, accelerators, device_of, device_type
from lowprec_check.schema.op_calls import PRODUCTS

# -- Which devices exist


def module_of(device: torch.device) -> Any:
    """``torch.cpu``, ``torch.cuda``, ``torch.xpu`` or ``torch.mps``."""
    return torch.get_device_module(device)


def is_available(name: str) -> bool:
    """Whether torch can use this type of device here, or with an index (``cuda:1``) that one."""
    kind, _, index = name.partition(":")
    if kind == "cpu":
        return True
    try:
        module = module_of(torch.device(kind))
        return bool(module.is_available()) and (not index or int(index) < module.device_count())
    except RuntimeError:
        return False  # this build of torch does not support the type


def resolve(name: str | None) -> torch.device:
    """The device ``name``, by default an accelerator if there is one; may raise UsageError."""
    if name is None:
        return torch.device(next((kind for kind in accelerators() if is_available(kind)), "cpu"))
    declared = device_of(name)
    try:
        device = torch.device(declared.name + name.strip()[len(device_type(name)) :])
    except RuntimeError:
        raise UsageError(
            f"Unknown device {name!r} in this torch.", f"Choose from {', '.join(DEVICES.names())}, or upgrade torch."
        ) from None
    if not is_available(device.type):
        available = [kind for kind in DEVICES.names() if is_available(kind)]
        hint = ""
        if declared.catalog:
            hint = f" Predict it with: lowprec-check scan TARGET --device {device.type}"
        raise UsageError(f"Device {name!r} is not available.", f"Available here: {', '.join(available)}.{hint}")
    return device


def default_index(kind: str) -> int:
    """The index of a bare type: ``cuda`` is ``cuda:0``, or what ``set_device`` chose."""
    module = module_of(torch.device(kind))
    if getattr(module, "is_initialized", lambda: False)():
        return int(module.current_device())
    return 0


def default_autocast_dtype(device: torch.device) -> torch.dtype:
    """The default dtype of ``torch.autocast(device.type)``: bf16 on a CPU, fp16 on CUDA and XPU."""
    return torch.get_autocast_dtype(device.type)


def name_of(device: torch.device) -> str:
    """The device's product name."""
    module = module_of(device)
    if hasattr(module, "get_device_name"):
        return str(module.get_device_name(device))
    return device.type


# -- The accelerators that this process uses


def initialized() -> Iterator[Any]:
    """The modules (``torch.cuda``) of the accelerators that this process has initialized."""
    for name in accelerators():
        module = getattr(torch, name, None)
        if module is not None and getattr(module, "is_initialized", lambda: False)():
            yield module


def in_bad_fork() -> bool:
    """Whether this process is a fork of one that used its accelerators, and so cannot use them."""
    # ``torch.cuda.is_available()`` is enough, after which ``is_initialized()`` is still false.
    modules = (getattr(torch, name, None) for name in accelerators())
    return any(getattr(module, "_is_in_bad_fork", lambda: False)() for module in modules)


def cuda_driver_is_initialized() -> bool:
    """Whether torch or another library initialized CUDA's driver here; no fork can use it then."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)  # only if it is loaded
    except (OSError, AttributeError):
        return False
    # A device count needs the driver but does not initialize it: before, it fails with error 3.
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) == 0


def why_broken() -> str | None:
    """Why this process can no longer use an accelerator; ``None`` if it can. Waits for all."""
    # After a failed assertion in a kernel or an illegal memory access, every later call fails.
    try:
        for module in initialized():
            module.synchronize()
    except Exception as error:
        return message_of(error).partition("\n")[0]
    return None


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    module_of(device).synchronize()


def timed(device: torch.device, work: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """The result of ``work(*args)`` and its seconds, including the work on the device."""
    synchronize(device)
    started = system.perf_counter()
    result = work(*args)
    synchronize(device)
    return result, system.perf_counter() - started


# Ops of cuDNN: torch lets them use TF32 by default, but not matrix products.
_OF_CUDNN = re.compile(r"conv(?!ert)|rnn|lstm|gru")


def rounds_to_tf32(device: torch.device, ops: Collection[str]) -> bool:
    """Whether one of these fp32 ops may round its operands to TF32: to the bits of fp16."""
    if device.type != "cuda":
        return False
    of_cudnn = any(map(_OF_CUDNN.search, ops))
    products = any(PRODUCTS.search(op) and not _OF_CUDNN.search(op) for op in ops)
    with contextlib.suppress(RuntimeError):  # torch refuses to read the settings where the user mixed old and new ones
        cudnn_allows, cublas_allows = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
        return (of_cudnn and cudnn_allows) or (products and cublas_allows)
    return of_cudnn or products


# -- Memory: what is free, and what a call allocates

# The limit and the use of memory of a container, in bytes, in both versions of control groups.
_GROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class MemoryLimit(NamedTuple):
    """Bytes that something optional may take, so that it does not take the memory of the model."""

    size: float
    why: str  # what the limit is, in words

    @classmethod
    def half_of(cls, free: int) -> MemoryLimit:
        """Half of the free memory."""
        return cls(free / 2, "half of the free memory")


def free_memory(device: torch.device) -> int:
    """Bytes this process can still allocate on ``device``; on a CPU, also within its container."""
    if device.type != "cpu":
        module = module_of(device)
        with contextlib.suppress(AttributeError, RuntimeError):
            free, _ = module.mem_get_info()
            return int(free) + int(module.memory_reserved()) - int(module.memory_allocated())
    available = psutil.virtual_memory().available  # mps shares the memory of the CPU
    for limit, used in _GROUP_FILES:
        with contextlib.suppress(OSError, ValueError):  # without a limit, the file says "max"
            available = min(available, max(0, int(Path(limit).read_text()) - int(Path(used).read_text())))
    return available


def release_memory() -> int:
    """Free unused memory and return the bytes of the tensors that remain on the accelerators."""
    gc.collect()
    held = 0
    for module in initialized():
        for name in ("synchronize", "empty_cache"):
            if hasattr(module, name):
                getattr(module, name)()
        if hasattr(module, "memory_allocated"):
            held += int(module.memory_allocated())
    return held


def peak_memory(device: torch.device, work: Callable[[], Any]) -> int | None:
    """Peak bytes that ``work`` allocates on the accelerator; ``None`` for the CPU and mps."""
    module = module_of(device)
    if not hasattr(module, "reset_peak_memory_stats"):
        return None
    synchronize(device)
    with _garbage_kept():
        module.reset_peak_memory_stats(device)
        before = module.memory_allocated(device)
        work()
        synchronize(device)
    return int(module.max_memory_allocated(device) - before)


def peak_allocated(work: Callable[[], Any]) -> int:
    """Peak bytes that ``work`` allocates on the CPU; RuntimeError if it is being profiled."""
    # The profiler without Kineto, which prints a line to stderr whenever it starts.
    api: Any = profiler
    only_memory = (False, True, False, False, False)  # not shapes, stacks, FLOPs and modules
    settings = torch._C._profiler._ExperimentalConfig()
    # Before it starts: garbage of an earlier profile, freed in this one, would be subtracted.
    with _garbage_kept():
        api._enable_profiler_legacy(api.ProfilerConfig(api.ProfilerState.CPU, *only_memory, settings))
        try:
            # torch warns of memory that was allocated before and is freed in the call.
            with _without_stderr():
                work()
        finally:
            threads = api._disable_profiler_legacy()
    events = itertools.chain.from_iterable(threads)
    changes = (event.cpu_memory_usage() for event in events if event.kind() == "memory_alloc")
    peak: int = max(itertools.accumulate(changes, initial=0))
    return peak


@contextlib.contextmanager
def _garbage_kept() -> Iterator[None]:
    """Free no garbage of what was done before, which would count as memory that the work frees."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Discard what is written to the standard error of this process, if it has one."""
    try:
        stderr = os.dup(2)
    except OSError:
        yield
        return
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


# -- Exceptions of devices


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is an out-of-memory error, on any device."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in message_of(error)


_NO_DEVICE = re.compile(
    r"not compiled with (CUDA|XPU)|no NVIDIA driver|No (CUDA|XPU) |not linked with support for", re.IGNORECASE
)


def says_device_is_absent(message: str) -> bool:
    """Whether an exception's message is about a device that this torch or this machine lacks."""
    return _NO_DEVICE.search(message) is not None


# -- The random number generators that a model may use: seeding, saving and restoring them


def seed_everything(seed: int) -> None:
    """Seed torch (CPU and all initialized accelerators), ``random``, and NumPy if it is loaded."""
    # Not ``torch.manual_seed``: its first call imports ``torch._dynamo``, a second in each worker.
    torch.default_generator.manual_seed(seed)
    for module in initialized():
        module.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def generator_restorers() -> Iterator[Callable[[], Any]]:
    """Functions that restore the generators of torch, ``random`` and NumPy to the present state."""
    yield functools.partial(torch.set_rng_state, torch.get_rng_state())
    for module in initialized():
        yield functools.partial(module.set_rng_state_all, module.get_rng_state_all())
    yield functools.partial(random.setstate, random.getstate())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield functools.partial(numpy.random.set_state, numpy.random.get_state())


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """Leave the generators as they were."""
    restorers = list(generator_restorers())
    try:
        yield
    finally:
        for restore in restorers:
            restore()


def generator_states() -> list[Any]:
    """The states of torch's generators on all devices in use; equal until a number is drawn."""
    states: list[Any] = [torch.default_generator.get_state().tolist()]
    for module in initialized():
        states += [state.tolist() for state in module.get_rng_state_all()]
    return states


def default_generator(device: Any = None) -> torch.Generator:
    """The generator of torch for ``device``, by default that of the CPU."""
    device = torch.device("cpu" if device is None else device)
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    generators = getattr(getattr(torch, device.type, None), "default_generators", None)
    if not generators:
        return torch.default_generator
    generator: torch.Generator = generators[default_index(device.type) if device.index is None else device.index]
    return generator
