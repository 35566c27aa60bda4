"""Leaves Intel's extension out of the user's code: what it imports in its place returns models and optimizers as they are.

The extension is archived, replaces kernels of its process for good when it is imported, and gives modules and optimizers that can no longer
be cast or observed. So the code is run as stock PyTorch runs it; rows and ways to train on the extension run it in their own processes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import sys
import types
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

import torch

from lowprec_check.catalog.versions import installed_version
from lowprec_check.engine.core.installation import ARCHIVED, IPEX, extension_problem, prepack_problem
from lowprec_check.engine.core.source_location import own_line
from lowprec_check.engine.model.kept_files import replaced

_MODULE = "intel_extension_for_pytorch"


class LeftOut:
    """What was left out of the user's code."""

    def __init__(self) -> None:
        self.calls: dict[str, None] = {}
        """``ipex.optimize (train.py:9)``."""
        self.limits: dict[str, None] = {}
        """Why calls would fail on this processor."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know of the runs, in words; empty if nothing was left out."""
        if not self.calls:
            return ()
        are = "is" if len(self.calls) == 1 else "are"
        instead = "autocast in place of its 16-bit weights; --backend inductor adds compiled code in place of its fused operators"
        return (
            f"{ARCHIVED}: {' and '.join(self.calls)} {are} left out, and stock PyTorch is scanned ({instead})",
            *self.limits,
        )

    def optimize(
        self, model: Any, dtype: Any = None, optimizer: Any = None, level: str = "O1", *_given: Any, **options: Any
    ) -> Any:
        """In place of ``ipex.optimize``: what it is called with, as it returns it."""
        line = own_line(sys._getframe(1))
        self.calls[f"ipex.optimize ({line})"] = None
        problem = None if dtype is None else prepack_problem(str(dtype).removeprefix("torch."))
        prepacks = options.get("weights_prepack")
        if problem is not None and (level != "O0" if prepacks is None else prepacks):
            self.limits[f"the call at {line} fails on this processor: {problem}"] = None
        return model if optimizer is None else (model, optimizer)

    def optimize_llm(self, model: Any, optimizer: Any = None, *_given: Any, **_options: Any) -> Any:
        """In place of ``ipex.llm.optimize``."""
        self.calls[f"ipex.llm.optimize ({own_line(sys._getframe(1))})"] = None
        return model if optimizer is None else (model, optimizer)

    def compile(self, compile: Callable[..., Any], *given: Any, backend: Any = "inductor", **options: Any) -> Any:
        """``torch.compile``, with inductor in place of the extension's backend."""
        if backend == "ipex":
            backend = "inductor"
            self.calls[f'the backend "ipex" of torch.compile ({own_line(sys._getframe(1))})'] = None
        return compile(*given, backend=backend, **options)


@contextlib.contextmanager
def without_extension() -> Iterator[LeftOut]:
    """In this context, what imports the extension gets a module in its place, unless it was imported before."""
    left_out = LeftOut()
    if _MODULE in sys.modules:
        yield left_out
        return
    finder = _Finder(left_out)
    sys.meta_path.insert(0, finder)
    compiled = functools.partial(left_out.compile, torch.compile)
    try:
        with replaced(torch, "compile", functools.wraps(torch.compile)(compiled)):
            yield left_out
    finally:
        sys.meta_path.remove(finder)
        if type(sys.modules.get(_MODULE)) is _InPlace:
            del sys.modules[_MODULE]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the module in place of the extension; imports the extension itself for its submodules."""

    def __init__(self, left_out: LeftOut) -> None:
        self._left_out = left_out

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """That of the module in place, or of a submodule of the extension; ``None`` for other modules."""
        if fullname == _MODULE and self in sys.meta_path:
            return ModuleSpec(_MODULE, _Loader(self._left_out))
        in_place = sys.modules.get(_MODULE)
        if fullname.startswith(f"{_MODULE}.") and isinstance(in_place, _InPlace):
            return PathFinder.find_spec(fullname, in_place.extension(fullname).__path__, target)
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, left_out: LeftOut) -> None:
        self._left_out = left_out

    def create_module(self, _spec: ModuleSpec) -> types.ModuleType:
        return _InPlace(self._left_out)

    def exec_module(self, module: types.ModuleType) -> None:
        """It is complete when it is made."""


class _InPlace(types.ModuleType):
    """The module in place of the extension; other names than those of ``optimize`` are those of the extension, which they import."""

    def __init__(self, left_out: LeftOut) -> None:
        super().__init__(_MODULE)
        self.__path__: list[str] = []
        self.__version__ = installed_version(IPEX) or "2.8.0"
        self.optimize = left_out.optimize
        self.llm = types.SimpleNamespace(optimize=left_out.optimize_llm)

    def extension(self, name: str) -> types.ModuleType:
        """The extension itself, imported; raises ``ImportError`` if it is not there, for the sake of ``name``."""
        problem = extension_problem()
        if problem is not None:
            raise ModuleNotFoundError(f"{name} is needed: {problem}", name=name)
        finders, sys.meta_path[:] = list(sys.meta_path), [f for f in sys.meta_path if not isinstance(f, _Finder)]
        del sys.modules[_MODULE]
        try:
            return importlib.import_module(_MODULE)
        finally:
            sys.meta_path[:] = finders
            sys.modules[_MODULE] = self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return getattr(self.extension(f"{_MODULE}.{name}"), name)
        except ImportError as error:
            raise AttributeError(error.msg) from None
