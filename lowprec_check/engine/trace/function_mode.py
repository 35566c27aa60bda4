"""The function mode of the second pass, for checks that fail above dispatch, where no dispatch mode is called.

It is used only after such a failure, because it makes some modules leave their fast paths.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from lowprec_check.engine.trace.backward_failures import BackwardFailures
from lowprec_check.engine.trace.op_arguments import dtype_names
from lowprec_check.engine.trace.rescue import Retry, find_rescue, gap_kind, predicted_by
from lowprec_check.errors import message_of
from lowprec_check.schema.run_key import Phase
from lowprec_check.schema.scan_result import GapKind

if TYPE_CHECKING:
    from lowprec_check.engine.trace.recorder import Recorder


class FunctionRescue(TorchFunctionMode):
    """Rescues calls of torch functions that do not support a dtype; used together with an active :class:`Recorder`.

    Of a step of training, it also calls the functions on widened inputs whose derivatives failed in an earlier pass.
    """

    def __init__(self, recorder: Recorder, failures: BackwardFailures) -> None:
        super().__init__()
        self.recorder = recorder
        self._failures = failures
        failures.restart()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        phase = self.recorder.places.phase
        if phase == "backward":  # ``Tensor.backward`` itself
            return func(*args, **kwargs)
        try:
            return self._call(func, args, kwargs) if phase == "forward" else func(*args, **kwargs)
        except Exception as error:
            if error is self.recorder.execution.raised:
                raise
            return self._rescue(func, args, kwargs, error)

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function in the forward pass of a step, on widened inputs if its derivative has failed."""
        name = function_name(func)
        known = self._failures.widened.get(name)
        if known is not None:
            retry = self._retry(name, func, args, kwargs)
            if retry.low_precision:
                result = retry.widened()
                self._add_gap(name, retry, gap_kind(known, "dispatch"), known, "backward", sys._getframe(2))
                return result
        return self._failures.call(name, lambda: func(*args, **kwargs))

    def _rescue(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
        execution, journal = self.recorder.execution, self.recorder.journal
        name = function_name(func)
        retry = self._retry(name, func, args, kwargs)
        gaps_before = len(journal.gaps)
        found = find_rescue(retry, error, "function")
        if found is None:
            execution.raised = error
            raise error
        if len(journal.gaps) == gaps_before or found.kind == "dtype-mismatch":
            phase = self.recorder.places.phase or "forward"
            self._add_gap(name, retry, found.kind, error, phase, sys._getframe(2))
        execution.pending.add(found.result)
        return found.result

    def _retry(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Retry:
        return Retry(func, args, kwargs, self.recorder.execution.low, _written(name, args, kwargs))

    def _add_gap(
        self, name: str, retry: Retry, kind: GapKind, error: Exception, phase: Phase, frame: FrameType
    ) -> None:
        self.recorder.journal.add_gap(
            name,
            self.recorder.places.of(frame),
            kind=kind,
            layer="function",
            phase=phase,
            message=message_of(error),
            dtypes=dtype_names(retry.floating),
            predicted_by=predicted_by(error),
        )


def _written(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    written = [kwargs["out"]] if isinstance(kwargs.get("out"), Tensor) else []
    if name.endswith("_") and not name.endswith("__") and args and isinstance(args[0], Tensor):
        written.append(args[0])
    return written


def function_name(func: Callable[..., Any]) -> str:
    """``torch.fft.rfft``, ``torch.Tensor.numpy``; the function's own name if torch cannot resolve it."""
    name = resolve_name(func) or getattr(func, "__qualname__", None) or repr(func)
    if name.startswith("torch."):
        return (
            str(name).replace("torch._C._fft.fft_", "torch.fft.").replace("torch._C._linalg.linalg_", "torch.linalg.")
        )
    module = getattr(func, "__module__", None) or ""
    bare = getattr(func, "__name__", name)
    for prefix, namespace in (("fft_", "torch.fft."), ("linalg_", "torch.linalg."), ("special_", "torch.special.")):
        if bare.startswith(prefix):
            return namespace + bare[len(prefix) :]
    return f"{module}.{bare}" if module.startswith("torch") else f"torch.{bare}"
