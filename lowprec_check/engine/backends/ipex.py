"""Intel's extension: ``ipex.optimize``, called eagerly, compiled, or traced and frozen."""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any, ClassVar

from lowprec_check.catalog.versions import installed_version
from lowprec_check.engine.backends.jit import frozen_trace, frozen_trace_code
from lowprec_check.schema.axes import Backend, Code, Example, Replacement
from lowprec_check.schema.precisions import PRECISIONS, Precision
from lowprec_check.schema.run_key import RunKey
from lowprec_check.torchkit.installation import (
    ARCHIVED,
    IPEX,
    LAST_FIT,
    extension_problem,
    minor_version,
    prepack_problem,
)

if TYPE_CHECKING:
    from lowprec_check.schema.scan_result import ModelInfo

IMPORT = "import intel_extension_for_pytorch as ipex"


class ExtensionBackend(Backend):
    """A backend that uses the extension. It folds batch norm into convolutions and, where the
    processor has the instructions, prepacks weights for oneDNN.
    """

    project = "intel/intel-extension-for-pytorch"

    setup_budget = 600.0
    changes_process = True  # the extension overrides kernels of autocast when it is imported
    successor: ClassVar[str] = "inductor-freeze"
    """The backend that does the same on newer torch."""

    def skip_reason(self, precision: Precision, device: str, memory_format: str) -> str | None:
        """Why the extension cannot be used on ``device``; a wrong precision fails in the run."""
        if device != "cpu":
            return f"{IPEX} on PyPI supports the CPU only; use the backend inductor on {device}"
        return extension_problem()

    def replacement(self) -> Replacement | None:
        """The backend in its place on torch after 2.8 without the extension."""
        torch = minor_version(installed_version("torch"))
        if torch is None or torch <= LAST_FIT or installed_version(IPEX) is not None:
            return None
        successors = {
            "inductor-freeze": "torch.compile with frozen weights, which it prepacks for oneDNN as ipex.optimize did",
            "inductor": "torch.compile with inductor",
        }
        instead = successors[self.successor]
        return Replacement(self.successor, f"{ARCHIVED}; it was replaced by {instead} (on Intel GPUs, by torch.xpu)")

    def prepack_problem(self, precision: Precision) -> str | None:
        """Why this processor cannot prepack weights in the dtype; ``None`` if it can."""
        if _gives_dtype(precision):
            return prepack_problem(precision.format.name)
        return None

    def note(self, precision: Precision) -> str | None:
        """That weights are not prepacked, and why: one note for all backends."""
        problem = self.prepack_problem(precision)
        if problem is None:
            return None
        return f"{problem}, as rows on ipex and ipex-jit have it here"

    def options(self, precision: Precision) -> dict[str, Any]:
        """The options of ``ipex.optimize`` besides the dtype."""
        if self.prepack_problem(precision) is None:
            return {}
        return {"weights_prepack": False}

    def prepare(self, model: Any, example: Example) -> Any:
        """A copy of ``model``, an ``nn.Module`` in the precision, after ``ipex.optimize``.

        Raises ``AssertionError`` for a model in training mode, and for weights that the processor
        cannot prepack.
        """
        torch: Any = importlib.import_module("torch")
        ipex: Any = importlib.import_module("intel_extension_for_pytorch")
        options = self.options(example.precision)
        if _gives_dtype(example.precision):
            options["dtype"] = getattr(torch, example.precision.format.name)
        return ipex.optimize(model, **options)

    def prepare_code(self, key: RunKey) -> str:
        """:meth:`prepare` as code."""
        precision = PRECISIONS.get(key.precision)
        given = [f"{name}={value!r}" for name, value in self.options(precision).items()]
        if _gives_dtype(precision):
            given.insert(0, f"dtype={precision.format.dtype}")
        return f"ipex.optimize({', '.join(['model', *given])})"

    def code(self, key: RunKey, model: ModelInfo) -> Code:
        """The model is prepared before the call."""
        return Code(imports=(IMPORT,), before=(f"model = {self.prepare_code(key)}",))


def _gives_dtype(precision: Precision) -> bool:
    """Whether ``ipex.optimize`` gets a dtype: a custom precision changes the model itself."""
    return precision.kind in ("cast", "autocast")


class Ipex(ExtensionBackend):
    """Calls the optimized model eagerly."""

    name = "ipex"
    summary = "Intel's extension: ipex.optimize; torch 2.8 only"
    setup_budget = 120.0


class IpexCompile(ExtensionBackend):
    """Optimizes the model without prepacked weights, which are the compiler's, and compiles it."""

    name = "ipex-compile"
    summary = 'ipex.optimize, then torch.compile(backend="ipex"); torch 2.8 only'
    successor = "inductor"

    def note(self, precision: Precision) -> str | None:
        """Nothing: it prepacks no weights anywhere."""

    def options(self, precision: Precision) -> dict[str, Any]:
        """No prepacked weights."""
        return {"weights_prepack": False}

    def prepare(self, model: Any, example: Example) -> Any:
        """The compiled model, which is compiled in its first call."""
        import torch

        return torch.compile(super().prepare(model, example), backend="ipex")

    def prepare_code(self, key: RunKey) -> str:
        """``torch.compile`` of the optimized model."""
        return f'torch.compile({super().prepare_code(key)}, backend="ipex")'


class IpexJit(ExtensionBackend):
    """Optimizes the model and runs the graph of a trace, in which the extension fuses ops."""

    name = "ipex-jit"
    summary = "ipex.optimize, then torch.jit.trace and freeze; torch 2.8 only"

    def prepare(self, model: Any, example: Example) -> Any:
        """The frozen graph of the optimized copy of the model."""
        return frozen_trace(super().prepare(model, example), example)

    def code(self, key: RunKey, model: ModelInfo) -> Code:
        """``ipex.optimize`` before the call, the trace inside its context."""
        return dataclasses.replace(super().code(key, model), inside=frozen_trace_code(model, key))


PLAIN, COMPILED, TRACED = Ipex(), IpexCompile(), IpexJit()
