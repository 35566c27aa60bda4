"""Runs the user's code up to its first call of a model, in a thread that goes no further: neither handlers nor later lines run."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from lowprec_check.engine.core.source_location import is_own_file, own_line, source_line
from lowprec_check.engine.model.kept_files import KeptFiles, replaced
from lowprec_check.process.function_worker import end_if_forked

_STACK_BYTES = 64 * 2**20
"""Of the thread: deep models need as much as in the main thread."""


class ModelCall(NamedTuple):
    """A call of a model in the user's code."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    line: str | None
    """``train.py:40``."""


class Ran(NamedTuple):
    """How far the user's code ran."""

    call: ModelCall | None
    """The call of a model at which it was stopped; ``None`` if it calls none."""
    notes: tuple[str, ...]
    """What was done to keep the user's files as they are."""


class _Settings(NamedTuple):
    """Settings of torch that each thread has for itself."""

    gradients: bool
    threads: int
    device: torch.device

    @classmethod
    def read(cls) -> _Settings:
        return cls(torch.is_grad_enabled(), torch.get_num_threads(), torch.get_default_device())

    def apply(self, before: _Settings) -> None:
        """Set those that the thread changed since ``before``."""
        if self.gradients != before.gradients:
            torch.set_grad_enabled(self.gradients)
        if self.threads != before.threads:
            torch.set_num_threads(self.threads)
        if self.device != before.device:
            torch.set_default_device(self.device)


class _End(NamedTuple):
    call: ModelCall | None
    error: BaseException | None
    settings: _Settings


_parked: list[threading.Thread] = []


def parked_threads() -> list[threading.Thread]:
    """The threads that wait forever in the user's code. They hold no pool of threads, so a fork loses nothing with them."""
    return list(_parked)


def run_to_first_call(work: Callable[[], object]) -> Ran:
    """Run ``work`` up to the first call of a module that has parameters; raises what it raises before.

    A call in another thread counts; one in another process, or while a module is constructed, does not. The thread of the call waits
    forever, so that no ``finally``, ``except`` or ``with`` around it runs; exit handlers of the user's files are removed.
    Files that exist are kept as they are (:class:`KeptFiles`).
    """
    ends: queue.SimpleQueue[_End] = queue.SimpleQueue()
    kept_call, process, running = nn.Module.__call__, os.getpid(), True

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # `torch.compile` keeps this function as that of the module inside: it does nothing once the code has ended
        frame = sys._getframe(1)
        if not running or os.getpid() != process or not _counts(self, frame):
            return kept_call(self, *args, **kwargs)
        found = ModelCall(self, args, kwargs, own_line(frame) or source_line(frame))
        _park(lambda: ends.put(_End(found, None, _Settings.read())))

    def run() -> None:
        error = None
        try:
            work()
        except BaseException as caught:
            end_if_forked(caught)
            error = caught
        if os.getpid() != process:  # a fork that the code made, and that has reached its end
            os._exit(0 if error is None else 1)
        ends.put(_End(None, error, _Settings.read()))

    before, errors = _Settings.read(), sys.stderr
    with _exit_handlers_of_the_user() as handlers, KeptFiles() as files, _in_a_thread():
        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            _Thread(run).start()
            end = ends.get()
        finally:
            running = False
            nn.Module.__call__ = kept_call  # type: ignore[method-assign]
    if end.call is None:
        end.settings.apply(before)
    else:
        end.settings._replace(gradients=before.gradients).apply(before)  # `with torch.no_grad()` ends at the call
        sys.stderr = errors
        for handler in handlers:
            atexit.unregister(handler)
        _release_imports()
    if end.error is not None:
        raise end.error
    return Ran(end.call, files.notes)


def _counts(module: nn.Module, frame: FrameType | None) -> bool:
    """Whether it is a model, and not called by the constructor of a module, for example to find out the shape of an output."""
    if next(module.parameters(), None) is None:
        return False
    while frame is not None:
        code = frame.f_code
        is_constructor = code.co_name == "__init__" and code.co_argcount > 0
        if is_constructor and isinstance(frame.f_locals.get(code.co_varnames[0]), nn.Module):
            return False
        frame = frame.f_back
    return True


def _park(report: Callable[[], None] = lambda: None) -> NoReturn:
    """Call ``report`` and wait forever; the interpreter ends without this thread."""
    thread = threading.current_thread()
    _parked.append(thread)

    def join(timeout: float | None = None) -> None:  # noqa: ARG001
        if threading.current_thread() is not threading.main_thread():  # which waits for pools of threads at exit
            _park()

    thread.join = join  # type: ignore[method-assign]
    report()
    lock = threading.Lock()
    while True:
        lock.acquire()


class _Thread(threading.Thread):
    """The thread of the user's code. Once its code is stopped it is among the parked ones, also if it waits for another thread."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._work = work

    def start(self) -> None:
        _parked.append(self)
        kept = threading.stack_size(_STACK_BYTES)
        try:
            super().start()
        finally:
            threading.stack_size(kept)

    def run(self) -> None:
        run_users_code(self._work)
        _parked.remove(self)


def run_users_code(work: Callable[[], None]) -> None:
    """Call ``work``. Tracebacks of a process that is ended are searched for this function: the user's lines are inside."""
    work()


@contextlib.contextmanager
def _in_a_thread() -> Iterator[None]:
    """Make code run that is written for the main thread, and the interpreter end while threads that it starts wait.

    Signal handlers are not installed: they would run later than the call.
    """
    start = threading.Thread.start

    def as_daemon(self: threading.Thread) -> None:
        if not self.daemon:
            self.daemon = True
        start(self)

    def keep_handler(number: int, _handler: object) -> object:
        return signal.getsignal(number)

    with replaced(threading.Thread, "start", as_daemon), replaced(signal, "signal", keep_handler):
        yield


@contextlib.contextmanager
def _exit_handlers_of_the_user() -> Iterator[list[Callable[..., Any]]]:
    """The exit handlers that lines of the user's own files register inside."""
    found: list[Callable[..., Any]] = []
    kept = atexit.register

    def register(handler: Any, *args: Any, **kwargs: Any) -> Any:
        if is_own_file(sys._getframe(1).f_code.co_filename):
            found.append(handler)
        return kept(handler, *args, **kwargs)

    with replaced(atexit, "register", register):
        yield found


def _release_imports() -> None:
    """Let other threads import the modules whose import was stopped; they would wait for it forever."""
    for module in list(sys.modules.values()):
        spec = getattr(module, "__spec__", None)
        if getattr(spec, "_initializing", False):
            spec._initializing = False  # type: ignore[union-attr]
