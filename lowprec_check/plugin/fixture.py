"""What the fixture ``lowprec`` gives a test."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import pytest
import torch
from torch import nn

from lowprec_check.catalog.names import dtype_of
from lowprec_check.errors import UsageError
from lowprec_check.instrument import Instrumented, Options, fp32_state, run_instrumented
from lowprec_check.plugin.closeness import Closeness, closeness
from lowprec_check.plugin.marker import Case, is_there
from lowprec_check.plugin.recording import Recording, gaps_as_result
from lowprec_check.plugin.support import Support, support_of
from lowprec_check.precision import PRECISIONS, Precision, Prepared, prepared
from lowprec_check.renderers.assertion import no_support_text, scan_text
from lowprec_check.results import ScanResult
from lowprec_check.scanner import scan
from lowprec_check.session import TOLERANCE
from lowprec_check.tree import map_tensors
from lowprec_check.where import source_line

__tracebackhide__ = True
"""A test that fails is shown at its own line."""

_BARE = nn.Module()
_P = ParamSpec("_P")
_T = TypeVar("_T")


def _plainly(assertion: Callable[_P, _T]) -> Callable[_P, _T]:
    """A :class:`UsageError` says all that there is to say: drop the way that it took through our rooms."""

    @functools.wraps(assertion)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return assertion(*args, **kwargs)
        except UsageError as error:
            raise error.with_traceback(None) from None

    return called


class Lowprec:
    """The fixture: assertions that fail with every finding at once, and what a test under the marker needs."""

    def __init__(self, case: Case | None = None) -> None:
        self._case = case

    # -- assertions

    @_plainly
    def check(
        self,
        model: nn.Module,
        inputs: Any,
        precision: str | Sequence[str] | None = None,
        *,
        tolerance: float | None = None,
        device: str | None = None,
        **options: Any,
    ) -> ScanResult:
        """Scan ``model``, and fail unless each ``precision`` runs and is right.

        Args:
            model: in fp32, in the mode in which it is to be judged; it stays as it was.
            inputs: a tensor, a tuple of positional or a mapping of keyword arguments, or a function that makes one.
            precision: one or several of ``half``, ``bfloat16``, ``autocast-fp16``, ``autocast-bf16``; by default the
                marker's, else ``half``.
            tolerance: on the output's rel_l2; by default the marker's, else 1e-2 for fp16 and 5e-2 for bf16.
            device: by default the marker's, else the CPU; the test is skipped where it is not there.
            options: those of :func:`lowprec_check.scan`, such as ``select`` and ``ignore`` (codes), ``budget``, ``loss``.

        Returns:
            all that was found, for further assertions.

        Raises:
            AssertionError: a precision fails, or has findings of severity *error*; the text reads like a scan.
            UsageError: the model fails in fp32, or an argument is wrong.
        """
        device = self._device(device)
        names = [precision] if isinstance(precision, str) else list(precision or [self._precision()])
        if "fp32" in names:
            raise UsageError("fp32 is what the others are compared with.", f"Choose among {', '.join(_low_names())}.")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            result = scan(
                model,
                inputs,
                precisions=names,
                tolerance=tolerance if tolerance is not None else self._case and self._case.tolerance,
                device=device,
                **{"plan": False} | options,
            )
        failed = [run for run in result.runs if run.precision in names and run.status != "ok"]
        if failed or any(diagnostic.severity == "error" for diagnostic in result.diagnostics):
            raise AssertionError(scan_text(result))
        return result

    @_plainly
    def assert_supported(
        self, op: str, *, dtype: torch.dtype | str = "half", device: str = "cpu", backward: bool = False
    ) -> Support:
        """Fail unless an operator runs in a dtype, in all of its samples.

        Run here, in a process of its own, where the device is there; looked up in the catalog otherwise.

        Args:
            op: in any usual spelling: ``aten::dot``, ``torch.dot``, ``linalg.inv``, ``F.conv2d``.
            dtype: ``torch.half`` or ``torch.bfloat16``.
            device: ``cpu``, ``cuda`` or ``xpu``.
            backward: whether its backward must run too.

        Returns:
            what was found, and by which evidence.

        Raises:
            AssertionError: it fails, in part or always, or nothing is known of it.
            UsageError: there is no such operator, dtype or device.
        """
        found = support_of(op, dtype_of(str(dtype)), device, backward=backward)
        if not found.supported:
            raise AssertionError(no_support_text(found))
        return found

    @_plainly
    def assert_no_gaps(
        self,
        function: Callable[..., Any],
        *args: Any,
        dtype: torch.dtype | str = "half",
        device: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Call ``function`` (a module, or any callable) in ``dtype`` and fail if an operator has no kernel for it.

        Floating tensors among the arguments are cast, and a module's parameters (put back afterwards). Called once
        more if something fails above dispatch (``torch.fft``), and in fp32 if the call fails.

        Raises:
            AssertionError: naming every gap, and what the call raises if it does not get through.
        """
        precision, source, device = blanket_cast(dtype), source_line(sys._getframe(2)), self._device(device)

        def run(precision: Precision) -> Instrumented:
            if not isinstance(function, nn.Module):
                ready = Prepared(_BARE, precision, torch.device(device), function)
                return run_instrumented(ready, args, kwargs, {}, Options(errors="none"))
            fp32 = fp32_state(function)
            with prepared(function, precision, torch.device(device)) as ready:
                return run_instrumented(ready, args, kwargs, fp32, Options(errors="none"))

        found = run(precision)
        if found.gaps or found.exception is not None:
            name = getattr(function, "__name__", type(function).__name__)
            result = gaps_as_result(found.gaps, precision.name, device, name, source)
            in_fp32 = found.exception and run(PRECISIONS["fp32"]).exception
            raise AssertionError(scan_text(result, found.exception, in_fp32=in_fp32 is not None))

    @_plainly
    def record(
        self, dtype: torch.dtype | str = "half", *, device: str | None = None, model: nn.Module | None = None
    ) -> Recording:
        """Record the code in a ``with`` block: operators without a kernel for ``dtype`` are computed in fp32 and noted.

        Nothing is cast. The recording has ``gaps``, ``op_calls`` and ``assert_no_gaps()``; ``model`` lets it name modules
        by their paths.
        """
        return Recording(blanket_cast(dtype), self._device(device), model)

    # -- under the marker

    @property
    def precision(self) -> str:
        """The marker's precision."""
        return self._marked("precision").precision

    @property
    def device(self) -> str:
        """The marker's device."""
        return self._marked("device").device

    @property
    def dtype(self) -> torch.dtype:
        """The 16-bit dtype of the marker's precision."""
        return self._way("dtype").low or torch.float32

    @property
    def tolerance(self) -> float:
        """The marker's tolerance on rel_l2, or the default of its precision."""
        case = self._marked("tolerance")
        return case.tolerance if case.tolerance is not None else TOLERANCE[self.dtype]

    def cast(self, value: Any) -> Any:
        """``value`` as the precision wants it, on its device: a copy of a model, cast; or tensors (in any nesting), cast.

        Under autocast nothing is cast. The original stays as it was.
        """
        way, device = self._way("cast()"), self._marked("cast()").device
        if isinstance(value, nn.Module):
            return _copy(value).to(device=device, dtype=way.cast)

        def ready(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, way.cast if way.cast and tensor.is_floating_point() else tensor.dtype)

        return map_tensors(value, ready)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """What goes around the call: autocast, or nothing for a blanket cast."""
        way, device = self._way("autocast()"), self._marked("autocast()").device
        if way.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device.partition(":")[0], dtype=way.autocast)

    def allclose(self, y: Any, reference: Any) -> Closeness:
        """Whether ``y`` is within the tolerance of ``reference``, in rel_l2, the worst over their floating tensors.

        To be asserted: ``assert lowprec.allclose(y, reference)`` says how far it is.
        """
        return closeness(y, reference, self.tolerance, self._marked("allclose()").precision)

    def _marked(self, what: str) -> Case:
        if self._case is None:
            raise UsageError(
                f"lowprec.{what} needs to know the precision.", 'Mark the test: @pytest.mark.lowprec("half").'
            )
        return self._case

    def _way(self, what: str) -> Precision:
        return PRECISIONS[self._marked(what).precision]

    def _precision(self) -> str:
        return self._case.precision if self._case else "half"

    def _device(self, device: str | None) -> str:
        """The device asked for, or the marker's; skips the test where it is not there."""
        device = device or (self._case.device if self._case else "cpu")
        if not is_there(device):
            pytest.skip(f"device {device} is not there")
        return device


def _low_names() -> list[str]:
    return [name for name in PRECISIONS if name != "fp32"]


def blanket_cast(dtype: torch.dtype | str) -> Precision:
    """The blanket cast to ``dtype``; raises :class:`UsageError` for another than half and bfloat16."""
    low = getattr(torch, dtype_of(str(dtype)))
    for precision in PRECISIONS.values():
        if precision.cast == low:
            return precision
    raise UsageError(f"{dtype} is no low precision.", "Choose torch.half or torch.bfloat16.")


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except RuntimeError as error:
        raise UsageError(
            f"{type(model).__name__} cannot be copied: {error}",
            "Make the model in the test, and cast it itself: model.to(lowprec.device, lowprec.dtype).",
        ) from None
