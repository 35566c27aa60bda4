"""Intel's extension for PyTorch: whether it can be used here, and ``ipex.optimize``.

Imported beside another torch than its own, the extension calls ``os._exit(127)``. So the versions are compared first, without
importing it. It is archived: 2.8.0, for torch 2.8, was its last release.
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

from lowprec_check.engine.core.compiled import IPEX, installed_version, minor_version
from lowprec_check.schema.axes import Backend, Replacement
from lowprec_check.schema.precisions import Precision

IMPORT = "import intel_extension_for_pytorch as ipex"
_LAST = (2, 8)
_INSTALL = f"run pip install torch==2.8.0 {IPEX}==2.8.0"
_ARCHIVED = "Intel's extension is archived and its last release fits torch 2.8 only"


class ExtensionBackend(Backend):
    """A backend that uses the extension."""

    changes_process = True  # the extension overrides kernels of autocast when it is imported
    successor: ClassVar[str]
    """The backend that does the same on newer torch."""

    def skip_reason(self, precision: Precision, device: str, memory_format: str) -> str | None:
        """Why the extension cannot be used on ``device``; precisions that it does not support raise an exception in the run."""
        if device != "cpu":
            return f"{IPEX} on PyPI supports the CPU only; use the backend inductor on {device}"
        return extension_problem()

    def replacement(self) -> Replacement | None:
        """The backend that does the same, if torch is newer than 2.8 and the extension is not installed."""
        torch = installed_version("torch")
        if not _is_newer(torch) or installed_version(IPEX) is not None:
            return None
        successors = {
            "inductor-freeze": "torch.compile with frozen weights, which it prepacks for oneDNN as ipex.optimize did",
            "inductor": "torch.compile with inductor",
        }
        instead = successors[self.successor]
        return Replacement(self.successor, f"{_ARCHIVED}; it was replaced by {instead} (on Intel GPUs, by torch.xpu)")


def extension_problem() -> str | None:
    """Why the extension cannot be imported here; ``None`` if it is installed beside the torch that it needs."""
    torch, extension = installed_version("torch") or "of an unknown version", installed_version(IPEX)
    if extension is None and _is_newer(torch):
        return f"{_ARCHIVED}, but torch {torch} is installed; use torch.compile instead"
    if extension is None:
        return f"{IPEX} is not installed; {_INSTALL}"
    if minor_version(extension) != minor_version(torch):
        needed = ".".join(map(str, minor_version(extension) or ()))
        return (
            f"{IPEX} {extension} needs torch {needed}, but torch {torch} is installed, and importing it would end "
            f"the process; {_INSTALL}"
        )
    return None


def optimized(model: Any, precision: Precision, **options: Any) -> Any:
    """A copy of ``model``, an ``nn.Module`` in ``precision`` on the CPU, after ``ipex.optimize`` with ``options``.

    Raises ``AssertionError`` for fp16 with prepacked weights on a CPU without fp16 instructions, and for a model in training mode.
    """
    torch: Any = importlib.import_module("torch")
    ipex: Any = importlib.import_module("intel_extension_for_pytorch")
    if _lowers(precision):
        options["dtype"] = getattr(torch, precision.format.name)
    return ipex.optimize(model, **options)


def optimize_code(precision: Precision, options: str = "") -> str:
    """The call of :func:`optimized` as code; ``options`` are further arguments, ``weights_prepack=False``."""
    dtype = f"dtype={precision.format.dtype}" if _lowers(precision) else ""
    return f"ipex.optimize({', '.join(filter(None, ['model', dtype, options]))})"


def _lowers(precision: Precision) -> bool:
    """Whether ``ipex.optimize`` gets the dtype of ``precision``: a custom precision changes the model itself."""
    return precision.kind in ("cast", "autocast")


def _is_newer(torch: str | None) -> bool:
    """Whether a version of torch is newer than what the last release of the extension fits."""
    return (minor_version(torch) or _LAST) > _LAST
