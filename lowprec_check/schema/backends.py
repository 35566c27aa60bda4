"""The backends: each a way to execute a model in its precision. Never imports torch.

To add one, add a module with a ``BACKEND`` to :mod:`lowprec_check.engine.backends`, or register it from another package
(CONTRIBUTING.md).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from lowprec_check.schema.precisions import Precision
from lowprec_check.schema.registry import Registry
from lowprec_check.schema.run_key import EAGER


class Backend:
    """How a prepared model is executed. Subclasses import torch only inside :meth:`prepare`."""

    name: ClassVar[str]
    """The name in options, saved results and reports: ``inductor``."""
    summary: ClassVar[str]
    """One line for ``--help``."""
    aliases: ClassVar[tuple[str, ...]] = ()

    def skip_reason(self, precision: Precision, device: str, memory_format: str) -> str | None:
        """Why the backend cannot run a precision on a device, the reason of a skipped run; ``None`` if it can."""
        return None

    def prepare(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """Return a callable that replaces ``model`` (a ``torch.nn.Module`` in its precision, on its device).

        ``args`` and ``kwargs`` are an example of its inputs, cast for the precision.
        """
        raise NotImplementedError

    def snippet(self) -> list[str]:
        """Lines of code that replace ``model``, in its precision, by what :meth:`prepare` returns."""
        return []


def _built_in() -> Iterator[Backend]:
    package = importlib.import_module("lowprec_check.engine.backends")
    found = [importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    yield from sorted((module.BACKEND for module in found), key=lambda backend: (backend.name != EAGER, backend.name))


def _problem(backend: Backend) -> str | None:
    return None if isinstance(getattr(backend, "summary", None), str) else "it has no summary"


BACKENDS: Registry[Backend] = Registry("backend", Backend, _built_in, _problem)
"""All backends, eager first."""
