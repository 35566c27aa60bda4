"""Finds the model of a script: runs it as ``python script.py`` does, up to its first call of a model with parameters."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from lowprec_check.engine.core.source_location import source_line
from lowprec_check.engine.model.user_module import call_user_code


class ScriptCall(NamedTuple):
    """A call of a model in a script."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    line: str | None
    """``train.py:40``."""


class _ModelCalled(BaseException):
    """Ends the script at its first call of a model; no handler of ``Exception`` in the script catches it."""

    def __init__(self, call: ScriptCall) -> None:
        super().__init__()
        self.call = call


def first_call(path: Path) -> ScriptCall | None:
    """Run the script up to its first call of a module that has parameters; ``None`` if it calls none.

    Raises :class:`UsageError` with the user's line if the script fails before.
    """
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    kept_main, kept_call = sys.modules["__main__"], nn.Module.__call__

    def capture(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if next(self.parameters(), None) is None:
            return kept_call(self, *args, **kwargs)
        raise _ModelCalled(ScriptCall(self, args, kwargs, source_line(sys._getframe(1))))

    sys.modules["__main__"] = module
    nn.Module.__call__ = capture  # type: ignore[method-assign]
    try:
        return call_user_code(str(path), lambda: _execute(path, module.__dict__))
    finally:
        nn.Module.__call__ = kept_call  # type: ignore[method-assign]
        sys.modules["__main__"] = kept_main


def _execute(path: Path, names: dict[str, Any]) -> ScriptCall | None:
    code: Callable[..., Any] = compile(path.read_bytes(), str(path), "exec")  # type: ignore[assignment]
    try:
        exec(code, names)  # type: ignore[arg-type]
    except _ModelCalled as found:
        return found.call
    return None
