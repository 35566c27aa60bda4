"""Runs the user's code up to its first call of a model, or the end of a step of training.

It is left there: neither handlers around that place nor later lines run. A file that defines its
model and inputs is run until it has, or to its end.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple, NoReturn, Protocol

import greenlet  # type: ignore[import-untyped]
import torch
from torch import nn

from lowprec_check.engine.model.model_making import Making, made_by_constructor, part_of_making, still_defines
from lowprec_check.engine.model.observed_step import SECONDS, StepObserver
from lowprec_check.engine.model.observed_training import ObservedTraining
from lowprec_check.engine.model.rest_of_code import expressions_of_call, is_module
from lowprec_check.engine.model.user_surroundings import (
    KeptFiles,
    MethodsReplaced,
    OutsideEffects,
    Surroundings,
    exit_handlers_of_the_user,
    replaced,
)
from lowprec_check.errors import UsageError
from lowprec_check.process.function_worker import end_if_forked
from lowprec_check.torchkit.source_location import PACKAGE, is_own_file, own_line, source_line


class ModelCall(NamedTuple):
    """A call of a model in the user's code."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    line: str | None  # `train.py:40`
    names: dict[str, str] = {}
    """By ``model`` and ``inputs``, the expressions for them in that line, if it has such."""
    namespace: dict[str, Any] | None = None
    """What names mean there."""
    passed_over: tuple[str, ...] = ()
    """Earlier calls that make a model: ``the call at train.py:12 initializes lazy layers``."""


class Ran(NamedTuple):
    """How far the user's code ran."""

    call: ModelCall | None
    """The first call of a model, where it stopped unless observed; ``None`` at the code's end."""
    notes: tuple[str, ...]  # what was done to keep the user's files as they are
    training: ObservedTraining | None = None  # its training, if that was observed and there is any
    was_left: bool = False  # whether an import would run more of it

    @property
    def uses_model(self) -> bool:
        """Whether it calls a model, or trains one."""
        return self.call is not None or self.training is not None


class Observer(Protocol):
    """What lets a script run on after its first call of a model, and observes it."""

    has_enough: bool
    """Whether the script may end in any way, since all that is needed was seen."""

    def observing(self, leave: Callable[[], Any], wait: Callable[[], None]) -> contextlib.AbstractContextManager[Any]:
        """Entered around the script; ``leave`` leaves that, and does not return; ``wait`` lets it
        wait where it is, and returns in each fork in which it goes on.
        """

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]) -> Any:
        """The result of the script's call of a model, ``call(module, *args, **kwargs)``."""

    def method(
        self, method: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of the script's call of another ``method`` of a model."""

    def give_up(self, why: str) -> None:
        """Note why it cannot be observed."""

    def waiting(self, go_on: Callable[[], None]) -> None:
        """The script waits; ``go_on``, in a fork, runs it to where it is left."""


class Definitions(NamedTuple):
    """What a file defines, by its own code, to be scanned."""

    model: str  # the name of its model
    parts: tuple[str, ...]  # names that it may define besides, such as `loss`

    @property
    def needed(self) -> set[str]:
        """The names that it must define."""
        return {self.model, "inputs"}


def run_user_code(work: Callable[[], object], script: str, steps: int, defined: Definitions | None = None) -> Ran:
    """Run ``work`` up to the first call of a model, or the end of ``steps`` steps of training.

    Raises what it raises before, and :class:`UsageError` if steps of ``script`` cannot be made as
    it makes them. A file without such steps in which all that matters is ``defined`` runs until it
    is, or to its end.
    """
    if not steps:
        return run_to_first_call(work, defined=defined)
    observer = StepObserver(steps)
    try:
        try:
            ran = run_to_first_call(work, observer)
        except UsageError:
            if not observer.lacks_autocast:
                raise
            # It may look at the dtypes that autocast gives
            observer.forget()
            observer = StepObserver(steps, keeps_autocast=True)
            ran = run_to_first_call(work, observer)
        training = None
        if ran.call is not None or observer.found.is_training or observer.found.processes:
            training = observer.found.training(script)
        if defined is not None and training is None:  # it is no script
            ran = ran._replace(call=None)
        return ran._replace(training=training)
    finally:
        observer.forget()  # user code may keep functions that refer to it


def run_to_first_call(
    work: Callable[[], object], observer: Observer | None = None, defined: Definitions | None = None
) -> Ran:
    """Run ``work`` up to the first call of a module that has parameters; raises what it raises.

    An ``observer`` lets it run on. A call in another thread counts; one in another process, or in
    the constructor of a module, does not; nor does one that is part of making a model, unless the
    code ends, computes gradients or takes long before there is another, and it may be of the whole
    model. If the code is a file that has all that matters ``defined``, no call counts: it is left
    at a call after which it defines nothing more. Files that exist stay (:class:`KeptFiles`).
    """
    # In a greenlet of this thread, which is never resumed after the call, so that no `finally`,
    # `except` or `with` around it runs
    running = _Running(observer, defined)

    def run() -> None:
        try:
            work()
        except BaseException as caught:
            end_if_forked(caught)
            if running.is_failure(caught):
                running.errors.append(caught)

    start = threading.Thread.start

    def as_daemon(thread: threading.Thread) -> None:
        thread.daemon = True  # the interpreter does not wait for it
        start(thread)

    script = greenlet.greenlet(run)
    script.gr_context = running.caller.gr_context
    before, outside = Surroundings(), OutsideEffects()
    with contextlib.ExitStack() as inside:
        handlers, files = inside.enter_context(exit_handlers_of_the_user()), inside.enter_context(KeptFiles())
        inside.enter_context(outside.watched())
        running.interrupt = inside.enter_context(_interrupted_by(running.leave_if_possible))
        inside.enter_context(replaced(threading.Thread, "start", as_daemon))
        inside.enter_context(running.watched())
        if observer is not None:
            inside.enter_context(observer.observing(running.leave, running.wait))

        def go_on() -> None:
            running.move_here()
            script.switch()
            inside.close()
            running.check()

        script.switch()
        if observer is not None and running.waits:
            observer.waiting(go_on)
    running.is_over = True
    running.check()
    call = running.first or running.made_last
    if call is not None or running.has_left or running.waits:
        # Else it would be unwound when it is freed, also at exit
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(script))
        before.restore(handlers)
    notes = (*files.notes, *outside.notes)
    if running.has_left and running.is_overdue and defined is not None:
        notes = (*notes, _LEFT)
    return Ran(call, notes, was_left=running.has_left)


_LEFT = (
    f"the file was left {SECONDS:g} s after it had defined its model and inputs, while it still ran: put the rest "
    'under `if __name__ == "__main__":`'
)


class _Running:
    """The user's code while it runs in a greenlet, and the calls of models that it makes."""

    def __init__(self, observer: Observer | None, defined: Definitions | None) -> None:
        self._observer, self._defined = observer, defined
        self.caller = greenlet.getcurrent()
        self._place = os.getpid(), threading.get_ident()
        self._torch_call, self._torch_backward = nn.Module.__call__, torch.autograd.backward
        self.interrupt: Callable[[], None] | None = None
        self._left, self._anywhere = threading.Event(), threading.Event()
        self._timer: threading.Timer | None = None
        self.is_over = self.is_overdue = self.waits = False
        self.errors: list[BaseException] = []
        self.first: ModelCall | None = None  # the first call of a model, once it is made
        # Calls that are part of making a model, and the threads that are in one
        self._passed_over: list[tuple[ModelCall, Making]] = []
        self._threads_making: set[int] = set()

    @property
    def has_left(self) -> bool:
        """Whether the code was left before its end."""
        return self._left.is_set()

    @property
    def _is_here(self) -> bool:
        return (os.getpid(), threading.get_ident()) == self._place

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, calls of models, and of ``backward()``, come by here."""

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.is_over:  # `torch.compile` keeps this function as that of the module inside
                return self._torch_call(module, *args, **kwargs)
            return self._call(module, args, kwargs, sys._getframe(1))

        try:
            with (
                methods_watched(self._method),
                replaced(nn.Module, "__call__", call),
                replaced(torch.autograd, "backward", self._backward),
            ):
                yield
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _call(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
        forward: Callable[..., Any] | None = None,
    ) -> Any:
        """A call of a model in ``frame``, of its ``forward`` or, by default, of itself."""
        forward = forward or self._torch_call
        is_here, is_next = self._is_here, self._observer is not None and self.first is not None
        stops = is_here or (self.interrupt is not None and not is_next)
        is_inner = os.getpid() != self._place[0] or threading.get_ident() in self._threads_making
        if is_inner or not stops or next(module.parameters(), None) is None or made_by_constructor(frame):
            return forward(module, *args, **kwargs)
        if self._defined is not None:
            if is_here and self._is_defined(self._defined, frame):
                self.leave()
            return self._make(module, args, kwargs)
        if not is_next:
            reasons = dict.fromkeys(f"the call at {call.line} {making.why}" for call, making in self._passed_over)
            line, (names, namespace) = own_line(frame) or source_line(frame), expressions_of_call(frame, args, kwargs)
            call = ModelCall(module, args, kwargs, line, names, namespace, tuple(reasons))
            making = None
            if self._observer is None:
                making = part_of_making(module, frame)
            if making is not None:
                self._passed_over.append((call, making))
                if making.is_model:
                    self._limit_time()
                return self._make(module, args, kwargs)
            self.first = call
        if self._observer is not None and is_here:
            return self._observer.call(module, args, kwargs, forward)
        if self._observer is not None:
            self._observer.give_up("it calls its model in another thread")
        if is_here or self.interrupt is None:
            self.leave()
        # Only the thread that the code runs in can leave it: interrupt that one, and stay here, so
        # that the interpreter ends without this one; pools of threads join theirs at exit
        thread, lock = threading.current_thread(), threading.Lock()
        _parked.append(thread)
        self._interrupt_until_left()
        thread.join = lambda timeout=None: None  # type: ignore[method-assign]  # noqa: ARG005
        while True:
            lock.acquire()

    def _method(self, method: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a method of a model; that of ``forward`` is one of the model."""
        is_inner = threading.get_ident() in self._threads_making
        if not self.is_over and self._is_here and not is_inner and is_module(module):
            if method.__name__ == "forward":
                return self._call(module, args, kwargs, sys._getframe(2), method)
            if self._observer is not None and self._defined is None and not made_by_constructor(sys._getframe(2)):
                return self._observer.method(method, module, args, kwargs)
        return method(module, *args, **kwargs)

    def _make(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call that does not count; nor do those inside it."""
        self._threads_making.add(threading.get_ident())
        try:
            return self._torch_call(module, *args, **kwargs)
        finally:
            self._threads_making.discard(threading.get_ident())

    def _is_defined(self, names: Definitions, frame: FrameType) -> bool:
        """Whether the file that calls a model in ``frame`` has ``names``, and defines no more."""
        # The frame of the file itself: it may import others that call models
        outermost: FrameType | None = None
        for at, _ in traceback.walk_stack(frame):
            if at.f_code.co_filename.startswith(PACKAGE):
                break
            if at.f_code.co_name == "<module>":
                outermost = at
        if outermost is None or not names.needed <= outermost.f_globals.keys():
            return False
        self._limit_time()
        return not still_defines(outermost, names.model, names.parts)

    # -- Code that takes long after a call that does not count, such as a server

    def _limit_time(self) -> None:
        """Leave the code :data:`SECONDS` after the first call of this, if it still runs then."""

        def be_overdue() -> None:
            self.is_overdue = True
            self._interrupt_until_left()

        if self._timer is None and self.interrupt is not None:
            self._timer = threading.Timer(SECONDS, be_overdue)
            self._timer.daemon = True
            self._timer.start()

    def _interrupt_until_left(self) -> None:
        """In another thread: interrupt the code until it is left, or over."""
        for number in itertools.count():
            if self.interrupt is not None:
                self.interrupt()
            if self._left.wait(0.01) or self.is_over:
                return
            # After a while, wherever it is, even if it may hold locks there
            if number == _TRIES:
                self._anywhere.set()

    @property
    def made_last(self) -> ModelCall | None:
        """The last call that is part of making a model, of what may be the whole one."""
        return next((call for call, making in reversed(self._passed_over) if making.is_model), None)

    def _backward(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_here and not self.is_over and self._observer is None and self.made_last is not None:
            self.first = self.made_last
            self.leave()
        return self._torch_backward(*args, **kwargs)

    def leave_if_possible(self, _number: int, frame: FrameType | None) -> None:
        """Leave the code if another thread called a model, or it takes too long."""
        if self.is_overdue and self.first is None:
            self.first = self.made_last
        is_wanted = self.first is not None or (self.is_overdue and self._defined is not None)
        # Where it neither runs a user's line nor waits, the thread may hold a lock of a library
        while frame is not None and frame.f_code.co_name in _WAITS:
            frame = frame.f_back
        holds_no_lock = frame is None or is_own_file(frame.f_code.co_filename)
        if is_wanted and not self.is_over and (self._anywhere.is_set() or holds_no_lock):
            self.leave()

    def leave(self) -> NoReturn:
        """Leave the code for good."""
        self._left.set()
        while True:
            self.caller.switch()

    def wait(self) -> None:
        """Let the code wait where it is; returns in each fork in which it goes on."""
        self.waits = True
        self.caller.switch()

    def check(self) -> None:
        """Raise what has ended the code too early."""
        if self.errors:
            raise self.errors[0]

    def move_here(self) -> None:
        """In a fork: watch this process."""
        self._place, self.waits = (os.getpid(), threading.get_ident()), False

    def is_failure(self, caught: BaseException) -> bool:
        """Whether an exception ends the code too early."""
        # Code that has trained, or whose calls did not count, may call `exit()`
        ended = caught.__context__
        exits = isinstance(ended, SystemExit) and ended.code in (None, 0)
        if exits and (self._passed_over or self._defined is not None):
            return False
        if self._observer is None or self.first is None:
            return self.first is None
        return not (self._observer.has_enough or isinstance(ended, SystemExit))


# -- The thread in which a model was called

_parked: list[threading.Thread] = []


def parked_threads() -> list[threading.Thread]:
    """Threads of the user's code that wait forever, in a call of a model."""
    return list(_parked)


_TRIES = 100
"""Of an interrupt, 10 ms apart, until it no longer matters where the thread is."""

_WAITS = ("wait", "join", "_wait_for_tstate_lock", "result", "get", "__exit__", "shutdown")
"""Functions of the standard library in which a thread waits without holding locks."""


@contextlib.contextmanager
def _interrupted_by(handler: Callable[..., None]) -> Iterator[Callable[[], None] | None]:
    """What makes another thread interrupt this one; ``None`` if this is not the main thread."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_kill"):
        yield None
        return
    thread, earlier = threading.get_ident(), signal.signal(signal.SIGURG, handler)
    try:
        yield lambda: signal.pthread_kill(thread, signal.SIGURG)
    finally:
        signal.signal(signal.SIGURG, earlier)


# -- Lets calls of the methods that models define, such as ``model.forward(x)``, come by


@contextlib.contextmanager
def methods_watched(call: Callable[..., Any]) -> Iterator[None]:
    """Inside, methods of the user's classes of models come by ``call``.

    It gets the method, the model and the arguments, and calls the method. Calls by torch or by a
    framework do not count: ``forward`` in a call of the model, ``training_step`` of Lightning.
    """
    methods, script = MethodsReplaced(_counts, functools.partial(_watched, call=call)), torch.jit.script

    def script_unwatched(obj: Any, optimize: Any = None, _frames_up: int = 0, *args: Any, **kwargs: Any) -> Any:
        methods.restore()  # torch.jit reads the globals of methods
        # And the names in the frame of its caller, which is one further up
        return script(obj, optimize, _frames_up + 1, *args, **kwargs)

    with methods.of_new_models(), replaced(torch.jit, "script", script_unwatched):
        yield


def _counts(kind: type, _name: str, function: Any) -> bool:
    """Whether a class of models defines this as a method that may compute something."""
    if type(function) is not FunctionType or not issubclass(kind, nn.Module):
        return False
    name, code = function.__name__, function.__code__
    if kind is nn.Sequential:
        return name == "forward"
    is_method = code.co_argcount > 0 and not name.startswith("__")
    return is_method and is_own_file(code.co_filename) and (name == "forward" or not hasattr(nn.Module, name))


def _watched(function: Any, call: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        caller: CodeType = sys._getframe(1).f_code
        if not args or not is_own_file(caller.co_filename):
            return function(*args, **kwargs)
        return call(function, args[0], args[1:], kwargs)

    return method
