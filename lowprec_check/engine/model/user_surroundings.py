"""What user code does to its surroundings: effects that cannot be undone, open contexts, files."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import io
import os
import pathlib
import shlex
import shutil
import signal
import stat
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils import _python_dispatch as dispatch_modes

from lowprec_check.engine.model.call_recorder import autocast_dtypes, autocasts_now, function_modes, set_function_modes
from lowprec_check.process import system
from lowprec_check.process.process_group import GUARDIAN
from lowprec_check.torchkit.source_location import is_own_file, is_user_code, own_line, show_file

_PROGRESS = {"rich.live": "stop", "tqdm._monitor": "exit"}
"""How to end threads that redraw progress bars, by the module of their class."""


class Surroundings:
    """What contexts that are never left would change for good, as it was before them."""

    def __init__(self) -> None:
        self._stream, self._gradients = sys.stderr, torch.is_grad_enabled()
        self._cached, self._autocast_dtypes = torch.is_autocast_cache_enabled(), autocast_dtypes()
        self._functions, self._dispatched = function_modes(), torch._C._len_torch_dispatch_stack()
        self._hooks = set(_hooks_of_torch())
        self._in_main_thread = threading.current_thread() is threading.main_thread()
        self._handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}

    def restore(self, handlers: Sequence[Callable[..., Any]]) -> None:
        """Make all as it was; remove exit ``handlers`` and threads that redraw progress bars."""
        for registered in handlers:
            atexit.unregister(registered)
        for thread in threads_of_progress():
            getattr(thread, _PROGRESS[type(thread).__module__])()
            thread.join(1.0)
        # Modes of torch
        sys.stderr = self._stream
        torch.set_grad_enabled(self._gradients)
        if torch.is_inference_mode_enabled():
            _never_left.append(torch.inference_mode(False))
            _never_left[-1].__enter__()
        for kind in autocasts_now():
            torch.set_autocast_enabled(kind, False)
            torch.set_autocast_dtype(kind, self._autocast_dtypes[kind])
        # Out of all blocks of autocast: there is no other way to set their number
        torch.autocast_increment_nesting()
        while torch.autocast_decrement_nesting() > 0:
            pass
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(self._cached)
        torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
        torch.jit._trace._trace_module_map = None
        while torch._C._len_torch_dispatch_stack() > self._dispatched:
            dispatch_modes._pop_mode()
        device_of_the_file = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        # A default device that the file sets stays
        allowed = [*self._functions, device_of_the_file]
        set_function_modes([mode for mode in function_modes() if mode in allowed])
        for name, key in set(_hooks_of_torch()) - self._hooks:
            del vars(torch.nn.modules.module)[name][key]
        for number, handler in self._handlers.items():
            if self._in_main_thread and handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)
        # Imports are complete: other threads would wait for their end
        for module in list(sys.modules.values()):
            spec: Any = getattr(module, "__spec__", None)
            if getattr(spec, "_initializing", False):
                spec._initializing = False


_never_left: list[Any] = []


def threads_of_progress() -> list[threading.Thread]:
    """Those that redraw progress bars, for which nothing waits."""
    return [thread for thread in threading.enumerate() if type(thread).__module__ in _PROGRESS]


def _hooks_of_torch() -> list[tuple[str, int]]:
    """The hooks of all modules that contexts of torch registered, such as a counter of ops."""
    tables = {name: table for name, table in vars(torch.nn.modules.module).items() if name.startswith("_global_")}
    return [
        (name, key)
        for name, table in tables.items()
        if isinstance(table, dict)
        for key, hook in table.items()
        if str(getattr(hook, "__module__", "")).startswith("torch.")
    ]


@contextlib.contextmanager
def exit_handlers_of_the_user() -> Iterator[list[Callable[..., Any]]]:
    """The exit handlers that lines of the user's own files register inside."""
    handlers: list[Callable[..., Any]] = []
    original = atexit.register

    def register(handler: Any, *args: Any, **kwargs: Any) -> Any:
        if is_own_file(sys._getframe(1).f_code.co_filename):
            handlers.append(handler)
        return original(handler, *args, **kwargs)

    with replaced(atexit, "register", register):
        yield handlers


# -- What cannot be undone

_STARTS = ("os.system", "os.posix_spawn", "os.exec", "os.startfile")
_STDLIB = os.path.dirname(os.__file__) + os.sep

_watching: list[OutsideEffects] = []
"""An audit hook stays for good, so it looks here whether anything is watched."""


class OutsideEffects:
    """What was seen while :meth:`watched`, by what it is done to."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, None]] = {"starts": {}, "opens the database": {}, "connects to": {}}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, what the user's code does is seen."""
        _add_hook()
        _watching.append(self)
        try:
            yield
        finally:
            _watching.remove(self)

    def see(self, event: str, args: tuple[Any, ...], frame: FrameType) -> None:
        """Note an event, if it is one of the user's code and not of torch."""
        what = _described(event, args)
        if what is not None and _is_of_user(frame):
            verb, name = what
            self._seen[verb].setdefault(f"{name} at {own_line(frame)}")

    @property
    def notes(self) -> tuple[str, ...]:
        """All of it, in a sentence."""
        parts = []
        for verb, names in self._seen.items():
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            if names:
                parts.append(f"{verb} {', '.join([*names][:2])}{more}")
        if not parts:
            return ()
        return (f"the file {'; '.join(parts)}: what that changes outside this process stays changed",)


@functools.cache
def _add_hook() -> None:
    sys.addaudithook(_audit)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _watching and (event in ("subprocess.Popen", "sqlite3.connect", "socket.connect") or event in _STARTS):
        with contextlib.suppress(Exception):  # else the user's call would fail
            _watching[-1].see(event, args, sys._getframe(1))


def _described(event: str, args: tuple[Any, ...]) -> tuple[str, str] | None:
    """What an event does, and to what; ``None`` if to nothing that stays."""
    if event == "sqlite3.connect":
        name = os.path.basename(os.fsdecode(args[0]))
        return None if name in ("", ":memory:") else ("opens the database", name)
    if event == "socket.connect":
        address = args[1]
        return ("connects to", f"{address[0]}:{address[1]}") if isinstance(address, tuple) else None
    program = args[0]
    if event == "subprocess.Popen":
        program = args[1] if isinstance(args[1], (str, bytes)) else args[1][0]
    words = shlex.split(os.fsdecode(program)) or ["a program"]
    return ("starts", os.path.basename(words[0]))


def _is_of_user(frame: FrameType) -> bool:
    """Whether the innermost code outside the standard library is neither torch's nor ours."""
    for at, _ in traceback.walk_stack(frame):
        name = at.f_code.co_filename
        is_library = name.startswith(("<frozen", _STDLIB)) and "site-packages" not in name
        if not is_library:
            return is_user_code(name) and own_line(frame) is not None
    return False


# -- Other functions in place of torch's and the user's


@contextlib.contextmanager
def replaced(place: Any, name: str, function: Any) -> Iterator[None]:
    """Inside, ``function`` stands for the attribute ``name`` of ``place``."""
    original = getattr(place, name)
    setattr(place, name, function)
    has_dynamo = "torch._dynamo" in sys.modules
    try:
        yield
    finally:
        setattr(place, name, original)
        if not has_dynamo:
            _give_to_dynamo(original, function)


def _give_to_dynamo(original: Any, function: Any) -> None:
    """Replace ``function`` by the ``original`` in Dynamo, which takes it for that of torch."""
    for module in [module for path, module in list(sys.modules.items()) if path.startswith("torch._dynamo")]:
        for name in [name for name, value in list(vars(module).items()) if value is function]:
            setattr(module, name, original)


class MethodsReplaced:
    """Methods of classes of models, of which those that count have others in their places.

    ``counts`` gets a class and a name and value of its own; ``other`` makes the other method, by
    :func:`functools.wraps`.
    """

    def __init__(self, counts: Callable[[type, str, Any], bool], other: Callable[[Any], Any]) -> None:
        self._counts, self._other = counts, other
        self._replaced: dict[type, list[tuple[str, Any]]] = {}

    @contextlib.contextmanager
    def of_new_models(self) -> Iterator[None]:
        """Inside, those of each class of which a model is made, and of :meth:`replace_in`."""
        make = nn.Module.__init__

        def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            self.replace_in(type(module))
            make(module, *args, **kwargs)

        try:
            with replaced(nn.Module, "__init__", init):
                yield
        finally:
            self.restore()

    def replace_in(self, kind: type) -> None:
        """Replace those of a class and its bases."""
        for owner in kind.__mro__:
            if owner not in self._replaced:
                methods = [(name, value) for name, value in vars(owner).items() if self._counts(owner, name, value)]
                self._replaced[owner] = methods
                for name, function in methods:
                    setattr(owner, name, self._other(function))

    def restore(self) -> None:
        """Put the methods back."""
        for owner, methods in self._replaced.items():
            for name, function in methods:
                # The user's code may have replaced it too
                if getattr(vars(owner).get(name), "__wrapped__", None) is function:
                    setattr(owner, name, function)
        self._replaced.clear()


# -- Files that stay as they are


class KeptFiles(contextlib.ExitStack):
    """Inside, ``open``, :mod:`os`, :mod:`shutil` and ``torch.save`` change no file that exists.

    Code that opens one for writing gets a copy, which it also reads from then on; a removed file or
    folder counts as removed where it is made anew. Other processes and libraries in C can change
    files.
    """

    def __init__(self) -> None:
        super().__init__()
        self._folder: str | None = None
        self._since = 0
        self._copies: dict[str, str] = {}
        self._removed: set[str] = set()
        self._made: set[str] = set()  # folders
        self._kept: dict[str, None] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """Which files were kept, in a sentence."""
        names = [show_file(path) for path in self._kept]
        if not names:
            return ()
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return (f"the file writes to or removes {', '.join(names[:3])}{more}, which the scan left as they are",)

    def __enter__(self) -> KeptFiles:
        # Files that the user's code makes from now on are to have a later time than existing ones
        self._since = _time_of_files()
        deadline = system.monotonic() + _TICK_SECONDS
        while _time_of_files() <= self._since and system.monotonic() < deadline:
            system.sleep(0.001)
        files: list[Any] = [os]
        if hasattr(pathlib, "_normal_accessor"):  # Python 3.10, which has copies of the functions of os
            files.append(pathlib._normal_accessor)
        for place in (builtins, io, *files[1:]):
            self._replace(place, "open", self._open)
        for place in files:
            for name in ("remove", "unlink", "rmdir"):
                self._replace(place, name, self._remove)
            for name in ("rename", "replace"):
                self._replace(place, name, self._rename)
            self._replace(place, "mkdir", self._make_folder)
        self._replace(os, "truncate", lambda original, path, length: original(self._place(path, "r+"), length))
        self._replace(shutil, "rmtree", self._remove)
        self._replace(torch, "save", self._save)
        return self

    def _replace(self, place: Any, name: str, instead: Callable[..., Any]) -> None:
        """Let ``instead`` be called with the function and its arguments."""
        original = getattr(place, name, None)

        def function(*args: Any, **kwargs: Any) -> Any:
            return instead(original, *args, **kwargs)

        if original is not None:
            self.enter_context(replaced(place, name, function))

    # -- Which files, and where their copies are

    def _is_kept(self, path: Any) -> bool:
        """Whether ``path`` is a file or folder that existed before."""
        try:
            status = os.lstat(path)
        except (OSError, TypeError, ValueError):
            return False
        # The time of a folder changes with what it holds
        if stat.S_ISDIR(status.st_mode):
            return _name(path) not in self._made
        return status.st_ctime_ns <= self._since

    def _place(self, path: Any, mode: str) -> Any:
        """Where to open ``path``: there, or at its copy if it must be kept."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return path  # a descriptor
        name = _name(path)
        writes = any(letter in mode for letter in "wax+")
        if name in self._copies or not writes or not os.path.isfile(name) or not self._is_kept(name):
            return self._copies.get(name, path)
        if self._folder is None:
            self._folder = tempfile.mkdtemp(dir=GUARDIAN.temporary_folder())
        copy = os.path.join(self._folder, f"{len(self._copies)}-{os.path.basename(name)}")
        # The user's code adds to the file, or reads what it does not overwrite
        if "w" not in mode and name not in self._removed:
            shutil.copyfile(name, copy)
        self._copies[name] = copy
        self._kept[name] = None
        return copy

    # -- The functions

    def _open(self, original: Callable[..., Any], file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return original(self._place(file, mode) if isinstance(mode, str) else file, mode, *args, **kwargs)

    def _save(self, original: Callable[..., Any], obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        original(obj, self._place(f, "w"), *args, **kwargs)

    def _remove(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dir_fd") is not None or not self._is_kept(path):
            return original(path, *args, **kwargs)
        name = _name(path)
        self._removed.add(name)
        self._kept[name] = None
        return None

    def _rename(self, original: Callable[..., Any], src: Any, dst: Any, **kwargs: Any) -> None:
        if kwargs or not (self._is_kept(src) or self._is_kept(dst)):
            original(src, dst, **kwargs)
        elif os.path.isfile(src):
            shutil.copyfile(self._place(src, "r"), self._place(dst, "w"))
            os.remove(src)
        else:  # a folder
            self._kept[_name(src)] = None

    def _make_folder(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> None:
        name = _name(path)
        # A folder that counts as removed, or lies in one, is still there
        is_removed = any(name.startswith(removed) for removed in self._removed)
        if kwargs.get("dir_fd") is None and os.path.isdir(name) and is_removed:
            return
        original(path, *args, **kwargs)
        self._made.add(name)


_TICK_SECONDS = 0.05
"""At least the resolution of the times of files."""


def _time_of_files() -> int:
    """The time that a file made now has, which is behind the clock."""
    with tempfile.TemporaryFile() as file:
        return os.fstat(file.fileno()).st_ctime_ns


def _name(path: Any) -> str:
    return os.path.abspath(os.fsdecode(path))
