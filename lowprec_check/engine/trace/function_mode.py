"""The function mode of the second pass, for checks that fail above dispatch, where no dispatch mode is called.

It is used only after such a failure, because it makes some modules leave their fast paths.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from lowprec_check.engine.trace.op_arguments import dtype_names
from lowprec_check.engine.trace.rescue import Retry, find_rescue, predicted_by
from lowprec_check.errors import message_of

if TYPE_CHECKING:
    from lowprec_check.engine.trace.recorder import Recorder


class FunctionRescue(TorchFunctionMode):
    """Rescues calls of torch functions that do not support a dtype; used together with an active :class:`Recorder`."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except Exception as error:
            if error is self.recorder.execution.raised:
                raise
            return self._rescue(func, args, kwargs, error)

    def _rescue(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
        execution, journal = self.recorder.execution, self.recorder.journal
        name = function_name(func)
        retry = Retry(func, args, kwargs, execution.low, _written(name, args, kwargs))
        gaps_before = len(journal.gaps)
        found = find_rescue(retry, error, "function")
        if found is None:
            execution.raised = error
            raise error
        if len(journal.gaps) == gaps_before or found.kind == "dtype-mismatch":
            module, source = self.recorder.places.of(sys._getframe(2))
            journal.add_gap(
                name,
                module,
                source,
                kind=found.kind,
                layer="function",
                phase=self.recorder.places.phase or "forward",
                message=message_of(error),
                dtypes=dtype_names(retry.floating),
                predicted_by=predicted_by(error),
            )
        execution.pending.add(found.result)
        return found.result


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
