"""The memory of a CPU run's process: with the prepared model alone, at the peak of a call.

Counted are its own pages (anonymous ones) and those of files other than the libraries that were
loaded before the model was prepared: weights that are mapped, libraries of a backend. What the
process held without the model is subtracted: the interpreter, torch, what the model's file
imported. Own pages are counted in copies of the process, in which everything that only a scan needs
is freed; those of files in the process itself, since a fork does not copy them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from torch import Tensor, nn

from lowprec_check.core.tasks import RunTask
from lowprec_check.engine.model.memory import free_weights
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.errors import UsageError, WorkerError
from lowprec_check.process import system
from lowprec_check.torchkit.isolation import isolated

CALLS, SECONDS = 5, 1.0
"""Most calls, and seconds, to find the peak: the threads of kernels do not meet in each call."""


class ProcessMemory:
    """This process's memory beyond what it holds without ``model``, which is not prepared yet."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._libraries = {mapped.path for mapped in _mappings() if ".so" in os.path.basename(mapped.path)}
        self._libraries.add(os.path.realpath(sys.executable))

        def free_all() -> None:
            for tensor in (*model.parameters(), *model.buffers()):
                # It may belong to a file, or be sparse.
                with contextlib.suppress(RuntimeError, NotImplementedError):
                    tensor.untyped_storage().resize_(0)
            free_weights(model, lambda _: True)

        self._without_model = self._in_copy(free_all)

    @classmethod
    def of(cls, task: RunTask, model: nn.Module) -> ProcessMemory | None:
        """That of the run of ``task``; ``None`` if not asked for, not alone, or not on the CPU."""
        asked = task.process_memory and task.alone and task.measured
        return cls(model) if asked and task.device == "cpu" and task.evidence == "measured" else None

    def peak(self, call: Callable[[], object], free: Callable[[], object], prepared: object = None) -> int | None:
        """Bytes at the peak of ``call``, which was called before; ``None`` if unknown."""

        # What only a scan needs is freed in a copy of this process, and so are the weights of
        # modules that ``prepared``, what a backend made, does not refer to.
        def alone() -> None:
            free()
            gc.unfreeze()  # what a fork copied is found again
            for item in gc.get_objects():
                if type(item) is Snapshot:
                    vars(item).clear()
            if prepared is not None:
                free_weights(self._model, lambda _: True, but={id(module) for module in _modules_reached(prepared)})
                gc.collect()

        ready = self._in_copy(alone)
        if ready is None:
            return None
        more = _more_in(call)
        if more is None or self._without_model is None:
            return None
        files: int = sum(mapped.rss - mapped.anonymous for mapped in _mappings() if mapped.path not in self._libraries)
        return max(0, ready + files + more - self._without_model)

    def _in_copy(self, free: Callable[[], object]) -> int | None:
        """Bytes that a copy of this process holds after ``free``; ``None`` if unknown."""
        original = os.getpid()

        def held() -> int:
            # If the copy dies, the function is called in this process, which must not be changed.
            if os.getpid() == original:
                return -1
            free()
            _trim()
            return sum(mapped.anonymous + mapped.swap for mapped in _mappings())

        with contextlib.suppress(UsageError, WorkerError, psutil.Error, OSError):
            size = isolated(held, "fork", int)
            if size > 0:
                return size
        return None


def _mappings() -> list[Any]:
    return psutil.Process().memory_maps()


def _trim() -> None:
    """Return free memory to the system, which the allocator keeps otherwise."""
    with contextlib.suppress(AttributeError, OSError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)


def _more_in(call: Callable[[], object]) -> int | None:
    """How much the resident memory grows in a call; ``None`` if the system does not tell."""
    try:
        _trim()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is that from now on
        before = _status("VmRSS")
        started = system.monotonic()
        for _ in range(CALLS):
            call()
            if system.monotonic() - started > SECONDS:
                break
        return _status("VmHWM") - before
    except (OSError, StopIteration):
        return None


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) << 10


def _modules_reached(start: object) -> list[nn.Module]:
    """The modules that ``start`` refers to, directly or not; globals of functions do not count."""
    reached: list[nn.Module] = []
    seen, left = set[int](), [start]
    passed_over = (types.ModuleType, type, types.FrameType, types.CodeType, Tensor, Snapshot)
    while left:
        item = left.pop()
        if id(item) in seen or isinstance(item, passed_over):
            continue
        seen.add(id(item))
        if isinstance(item, nn.Module):
            reached.append(item)
        if isinstance(item, types.FunctionType):
            left += [item.__closure__, item.__defaults__, item.__kwdefaults__, item.__dict__]
        else:
            left += gc.get_referents(item)
    return reached
