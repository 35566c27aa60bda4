"""What the process of a run on the CPU holds: its memory with the prepared model alone, at the peak
of a call.

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

from lowprec_check.engine.model.memory import free_weights
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.engine.run.isolation import isolated
from lowprec_check.engine.run.tasks import RunTask
from lowprec_check.errors import UsageError, WorkerError
from lowprec_check.process import system

CALLS, SECONDS = 5, 1.0
"""Of the model, to find the peak: at most so many calls, and none after so many seconds. The
threads of kernels do not meet in each.
"""


class ProcessMemory:
    """The memory of this process beyond what it holds without ``model``, which is not prepared yet."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._libraries = {each.path for each in _mappings() if ".so" in os.path.basename(each.path)}
        self._libraries.add(os.path.realpath(sys.executable))
        self._without_model = self._in_copy(lambda: _free_all(model))

    @classmethod
    def of(cls, task: RunTask, model: nn.Module) -> ProcessMemory | None:
        """That of the run of ``task``; ``None`` if it is not asked for, its process has done other
        runs, or they are on another device.
        """
        here = task.process_memory and task.alone and task.measured and task.device == "cpu" and task.predicted is None
        if here:
            return cls(model)
        return None

    def peak(self, call: Callable[[], object], free: Callable[[], object], prepared: object = None) -> int | None:
        """Bytes at the peak of ``call``, which was called before; ``None`` if the system does not
        tell.

        ``free`` frees what only a scan needs, in a copy of this process. ``prepared`` is what a
        backend made of the model: weights of modules that it does not refer to are freed there,
        too.
        """

        def alone() -> None:
            free()
            self._free_originals(prepared)

        ready = self._in_copy(alone)
        more = None
        if ready is not None:
            more = _more_in(call)
        if ready is None or more is None or self._without_model is None:
            return None
        files: int = sum(each.rss - each.anonymous for each in _mappings() if each.path not in self._libraries)
        return max(0, ready + files + more - self._without_model)

    def _free_originals(self, prepared: object) -> None:
        gc.unfreeze()  # what a fork copied is found again
        for found in gc.get_objects():
            if type(found) is Snapshot:
                vars(found).clear()
        if prepared is not None:
            free_weights(self._model, lambda _: True, but={id(module) for module in _modules_reached(prepared)})
            gc.collect()

    def _in_copy(self, free: Callable[[], object]) -> int | None:
        """Bytes that a copy of this process holds after ``free``; ``None`` if the system does not
        tell, or the copy dies.
        """
        original = os.getpid()

        def held() -> int:
            if os.getpid() == original:
                return -1
            free()
            _trim()
            return sum(each.anonymous + each.swap for each in _mappings())

        with contextlib.suppress(UsageError, WorkerError, psutil.Error, OSError):
            found = isolated(held, "fork", int)
            return found if found > 0 else None
        return None


def _free_all(model: nn.Module) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        with contextlib.suppress(RuntimeError, NotImplementedError):  # it belongs to a file, or is sparse
            tensor.untyped_storage().resize_(0)
    free_weights(model, lambda _: True)


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
    """The modules that ``start`` refers to, directly or not; the globals of functions do not count."""
    found: list[nn.Module] = []
    seen, left = set[int](), [start]
    while left:
        item = left.pop()
        if id(item) in seen or isinstance(
            item, (types.ModuleType, type, types.FrameType, types.CodeType, Tensor, Snapshot)
        ):
            continue
        seen.add(id(item))
        if isinstance(item, nn.Module):
            found.append(item)
        if isinstance(item, types.FunctionType):
            left += [item.__closure__, item.__defaults__, item.__kwdefaults__, item.__dict__]
        else:
            left += gc.get_referents(item)
    return found
