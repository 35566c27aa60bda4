"""Finds the model of a script: runs it as ``python script.py`` does, up to its first call of a model with parameters."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from lowprec_check.engine.core.source_location import own_line, source_line
from lowprec_check.engine.model.user_module import call_user_code
from lowprec_check.errors import UsageError


class ScriptCall(NamedTuple):
    """A call of a model in a script."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    line: str | None
    """``train.py:40``."""


class _ModelCalled(BaseException):
    """Ends the script at its first call of a model; no handler of ``Exception`` in the script catches it."""


def first_call(path: Path, package: str | None = None) -> ScriptCall | None:
    """Run the script up to its first call of a module that has parameters; ``None`` if it calls none.

    ``package`` is what its relative imports refer to, as in ``python -m package.script``. A call in another thread counts,
    one in another process does not. Raises :class:`UsageError` with the user's line if the script fails before.
    """
    module = types.ModuleType("__main__")
    module.__file__, module.__package__ = os.path.abspath(path), package or None
    kept_main, kept_call, process = sys.modules["__main__"], nn.Module.__call__, os.getpid()
    calls: list[ScriptCall] = []
    running = True

    def capture(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # `torch.compile` keeps this function as that of the module inside: it does nothing once the script has ended
        if not running or os.getpid() != process or next(self.parameters(), None) is None:
            return kept_call(self, *args, **kwargs)
        frame = sys._getframe(1)
        calls.append(ScriptCall(self, args, kwargs, own_line(frame) or source_line(frame)))
        raise _ModelCalled

    sys.modules["__main__"] = module
    nn.Module.__call__ = capture  # type: ignore[method-assign]
    try:
        call_user_code(f"Running {path}", lambda: _execute(path, module.__dict__))
    except UsageError:  # of a script that catches everything, what it does next may fail
        if not calls:
            raise
    finally:
        running = False
        nn.Module.__call__ = kept_call  # type: ignore[method-assign]
        sys.modules["__main__"] = kept_main
    return calls[0] if calls else None


def _execute(path: Path, names: dict[str, Any]) -> None:
    code: Callable[..., Any] = compile(path.read_bytes(), str(path), "exec")  # type: ignore[assignment]
    with contextlib.suppress(_ModelCalled):
        exec(code, names)  # type: ignore[arg-type]
