"""Leaves Intel's extension out of the user's code, which gets models and optimizers as they are.

The extension is archived, replaces kernels of its process for good when it is imported, and gives
modules and optimizers that can no longer be cast or observed. So the code is run as stock PyTorch
runs it; rows and ways to train on the extension run it in their own processes.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.abc
import sys
import types
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType
from typing import Any

import torch

from lowprec_check.catalog.versions import installed_version
from lowprec_check.engine.model.rest_of_code import source_tree
from lowprec_check.engine.model.user_surroundings import replaced
from lowprec_check.torchkit.installation import IPEX, extension_problem, prepack_problem
from lowprec_check.torchkit.source_location import is_own_file, own_line

_MODULE = "intel_extension_for_pytorch"
_LLM = f"{_MODULE}.llm"
_HARMLESS = ("enable_onednn_fusion", "set_fp32_math_mode", "enable_auto_channels_last", "disable_auto_channels_last")
"""Functions of the extension that set what only it does."""


class LeftOut:
    """What was left out of the user's code."""

    def __init__(self) -> None:
        self.calls: dict[str, None] = {}  # `ipex.optimize (train.py:9)`
        self.limits: dict[str, None] = {}  # why calls would fail on this processor
        self.imported: str | None = None  # for which part of it the extension itself was imported

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know of the runs, in words; empty if nothing was left out."""
        left_out, imported = list[str](), list[str]()
        if self.calls:
            what = "runs stock PyTorch, since Intel's extension is archived"
            instead = "autocast replaces its 16-bit weights, and --backend inductor adds compiled code"
            left_out = [f"the scan leaves out {' and '.join(self.calls)} and {what}: {instead}"]
        if self.imported is not None:
            imported = [f"{self.imported} was imported, so all runs use the kernels of Intel's extension"]
        return (*left_out, *self.limits, *imported)

    def optimize(
        self, model: Any, dtype: Any = None, optimizer: Any = None, level: str = "O1", *_args: Any, **options: Any
    ) -> Any:
        """In place of ``ipex.optimize``: what it is called with, as it returns it."""
        line = own_line(sys._getframe(1))
        self.calls[f"ipex.optimize ({line})"] = None
        prepacks = options.get("weights_prepack")
        if prepacks is None:
            prepacks = level != "O0"
        problem = None
        if dtype is not None and prepacks:
            problem = prepack_problem(str(dtype).removeprefix("torch."))
        if problem is not None:
            self.limits[f"without the scan, the call at {line} fails on this processor: {problem}"] = None
        return model if optimizer is None else (model, optimizer)

    def optimize_llm(self, model: Any, optimizer: Any = None, *_args: Any, **_options: Any) -> Any:
        """In place of ``ipex.llm.optimize``."""
        self.calls[f"ipex.llm.optimize ({own_line(sys._getframe(1))})"] = None
        return model if optimizer is None else (model, optimizer)

    def do_nothing(self, *_args: Any, **_options: Any) -> None:
        """In place of one of the :data:`_HARMLESS`."""

    def compile(self, compile: Callable[..., Any], *args: Any, backend: Any = "inductor", **options: Any) -> Any:
        """``torch.compile``, with inductor in place of the extension's backend."""
        if backend == "ipex":
            backend = "inductor"
            self.calls[f'the backend "ipex" of torch.compile ({own_line(sys._getframe(1))})'] = None
        return compile(*args, backend=backend, **options)


@contextlib.contextmanager
def without_extension() -> Iterator[LeftOut]:
    """In this context, the user's code gets a module in place of the extension, if it needs it."""
    # Not if it was imported before. Where the extension cannot be imported, code that expects that
    # (in a `try`, or by `importlib.util.find_spec`) finds none
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
        for name in (_MODULE, _LLM):
            if type(sys.modules.get(name)) is _InPlace:
                del sys.modules[name]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the modules in place of the extension; imports the extension for its other modules."""

    def __init__(self, left_out: LeftOut) -> None:
        self._left_out = left_out

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """The spec of a module in place, or of a module of the extension; else ``None``."""
        in_place = sys.modules.get(_MODULE)
        if fullname == _LLM or (fullname == _MODULE and _is_wanted(sys._getframe(1))):
            return ModuleSpec(fullname, self)
        # Code of packages, or that can do without it, gets the extension, or an ImportError
        if fullname == _MODULE:
            spec = PathFinder.find_spec(fullname, path, target)
            if spec is not None and extension_problem() is not None:
                spec.loader = _Refusing()
            return spec
        if fullname.startswith(f"{_MODULE}.") and isinstance(in_place, _InPlace):
            return PathFinder.find_spec(fullname, in_place.extension(fullname).__path__, target)
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """The module in place, which is complete when it is made."""
        return _InPlace(spec.name, self._left_out)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is left to do."""


def _is_wanted(frame: FrameType | None) -> bool:
    """Whether an import is by the user's own code, which needs the extension or may have it."""
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib._bootstrap"):
        frame = frame.f_back
    if frame is None or not is_own_file(frame.f_code.co_filename):
        return False
    if extension_problem() is None:
        return True
    # Code in a `try` with handlers can do without it
    tree, line = source_tree(frame.f_code.co_filename), frame.f_lineno
    tries = []
    if tree is not None:
        tries = [node for node in ast.walk(tree) if isinstance(node, ast.Try) and node.handlers]
    return not any(node.lineno < line <= (node.body[-1].end_lineno or node.lineno) for node in tries)


class _Refusing(importlib.abc.Loader):
    """Raises ``ImportError`` where importing the extension would end the process."""

    def exec_module(self, module: types.ModuleType) -> None:
        raise ImportError(extension_problem(), name=module.__name__)


class _InPlace(types.ModuleType):
    """The module in place of the extension, or of its ``llm``; it imports others for more names."""

    def __init__(self, name: str, left_out: LeftOut) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self._left_out = left_out
        self.optimize: Callable[..., Any] = left_out.optimize_llm if name == _LLM else left_out.optimize
        if name == _LLM:
            return
        self.__version__ = installed_version(IPEX) or str(torch.__version__)
        self.llm = _InPlace(_LLM, left_out)
        for harmless in _HARMLESS:
            setattr(self, harmless, left_out.do_nothing)

    def extension(self, needed: str) -> types.ModuleType:
        """The extension itself, imported for the name ``needed``; raises ``ImportError``."""
        problem = extension_problem()
        if problem is not None:
            raise ModuleNotFoundError(f"{needed} needs {IPEX}: {problem}", name=needed)
        finders, sys.meta_path[:] = list(sys.meta_path), [f for f in sys.meta_path if not isinstance(f, _Finder)]
        # Not through this finder, nor beside the modules in place
        in_place = {name: sys.modules.pop(name) for name in (_MODULE, _LLM) if name in sys.modules}
        try:
            extension = importlib.import_module(self.__name__)
        finally:
            sys.meta_path[:] = finders
            sys.modules.update(in_place)
        self._left_out.imported = self._left_out.imported or needed
        return extension

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return getattr(self.extension(f"{self.__name__}.{name}"), name)
        except ImportError as error:
            raise AttributeError(error.msg) from None
