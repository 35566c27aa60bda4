"""What user code that is stopped in a call leaves behind: contexts, handlers, threads, imports."""

from __future__ import annotations

import atexit
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch_modes

from lowprec_check.engine.model.call_recorder import autocast_dtypes, autocasts_now, function_modes, set_function_modes
from lowprec_check.engine.model.kept_files import replaced
from lowprec_check.torchkit.source_location import is_own_file

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
        for thread in [thread for thread in threading.enumerate() if type(thread).__module__ in _PROGRESS]:
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
