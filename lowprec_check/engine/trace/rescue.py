"""Classifies a failed call by rerunning it: with its dtypes unified, widened to fp32, or on the CPU.

The error message only selects the name of the failure, because messages change between versions of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowprec_check.engine.core.exceptions import is_out_of_memory
from lowprec_check.engine.core.floating_dtypes import NARROW, is_float, is_narrow, widened_dtype
from lowprec_check.engine.trace.op_arguments import Args, Kwargs, has_narrow_dtype, map_args, map_values, tensors_in
from lowprec_check.errors import message_of
from lowprec_check.schema.scan_result import GapKind, Layer


class Rescue(NamedTuple):
    """Why a call failed, and the result to continue with."""

    kind: GapKind
    result: Any


class Retry:
    """A failed call that can be rerun with other dtypes; results are copied back into the tensors in ``written``."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: Args,
        kwargs: Kwargs,
        low: torch.dtype,
        written: Iterable[Tensor] = (),
    ) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.low = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.dtype) and v in NARROW), low)
        self.written = {id(tensor) for tensor in written}
        self.floating = [tensor for tensor in tensors_in(args, kwargs) if is_float(tensor)]
        self.has_narrow_dtype = has_narrow_dtype(args, kwargs)

    @property
    def low_precision(self) -> bool:
        """Whether an input tensor or a dtype argument is narrow."""
        return self.has_narrow_dtype or any(is_narrow(tensor) for tensor in self.floating)

    @property
    def mixed(self) -> bool:
        """Whether the real floating inputs have several dtypes, at least one of them narrow."""
        dtypes = {tensor.dtype for tensor in self.floating if not tensor.is_complex()}
        return len(dtypes) > 1 and not dtypes.isdisjoint(NARROW)

    def unified(self) -> Any:
        """Run with every real floating input in the low dtype."""
        return self._run(lambda value: value.to(self.low) if _is_real_float(value) else value)

    def widened(self) -> Any:
        """Run with narrow inputs and dtypes widened to fp32, and cast the results back."""
        return self.narrowed(self._run(_widen))

    def on_cpu(self) -> Any:
        """Run on the CPU in fp32, and move the results back to the device."""
        device = self.floating[0].device if self.floating else torch.device("cpu")
        result = self._run(lambda value: _widen(value).cpu() if isinstance(value, Tensor) else _widen(value))
        return self.narrowed(map_values(result, lambda value: value.to(device) if isinstance(value, Tensor) else value))

    def _run(self, change: Callable[[Any], Any]) -> Any:
        originals: dict[int, tuple[Tensor, Tensor]] = {}

        def change_and_remember(value: Any) -> Any:
            changed = change(value)
            if id(value) in self.written and changed is not value:
                originals[id(changed)] = (value, changed)
            return changed

        args, kwargs = map_args(self.args, self.kwargs, change_and_remember)
        result = self.function(*args, **kwargs)
        for original, changed in originals.values():
            if original.shape != changed.shape:  # ``out=`` of another size, which the op has resized
                original.resize_(changed.shape)
            original.copy_(changed)
        return map_values(result, lambda value: originals[id(value)][0] if id(value) in originals else value)

    def narrowed(self, result: Any) -> Any:
        """``result`` of a widened run, in the dtypes that the original call would have returned."""
        shaped = [tensor for tensor in self.floating if tensor.ndim] or self.floating
        if not self.low_precision or self._has_wide_dtype() or not all(is_narrow(tensor) for tensor in shaped):
            return result

        def narrow(value: Any) -> Any:
            return value.to(self.low) if isinstance(value, Tensor) and value.dtype == torch.float32 else value

        return map_values(result, narrow)

    def _has_wide_dtype(self) -> bool:
        values = (*self.args, *self.kwargs.values())
        return any(isinstance(value, torch.dtype) and value not in NARROW for value in values)


def _is_real_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _widen(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return widened_dtype(value, torch.float32) if value in NARROW else value
    return value.to(widened_dtype(value.dtype, torch.float32)) if is_float(value) and is_narrow(value) else value


def find_rescue(retry: Retry, error: BaseException, layer: Layer) -> Rescue | None:
    """Explain ``error`` by rerunning the call; ``None`` if it fails in every dtype, so that the model itself is the cause."""
    if not isinstance(error, Exception) or is_out_of_memory(error):
        return None
    if retry.mixed:
        result = _try(retry.unified)
        if result is not None:
            return Rescue("dtype-mismatch", result.value)
    if retry.low_precision:
        result = _try(retry.widened)
        if result is not None:
            return Rescue(gap_kind(error, layer), result.value)
    if any(tensor.device.type != "cpu" for tensor in retry.floating) and _lacks_backend(error):
        result = _try(retry.on_cpu)
        if result is not None:
            return Rescue("no-backend-kernel", result.value)
    return None


def predicted_by(error: BaseException) -> str | None:
    """What a failure rests on that the twin of a device raised; ``None`` for one that happened here."""
    basis: str | None = getattr(error, "predicted_by", None)
    return basis


class _Success(NamedTuple):
    value: Any


def _try(run: Callable[[], Any]) -> _Success | None:
    try:
        return _Success(run())
    except Exception:
        return None


def gap_kind(error: Exception, layer: Layer) -> GapKind:
    """What a failure that widened inputs avoid is called."""
    if "without overflow" in message_of(error):
        return "scalar-overflow"
    return "missing-kernel" if layer == "dispatch" else "unsupported-dtype"


def _lacks_backend(error: Exception) -> bool:
    text = message_of(error)
    return isinstance(error, NotImplementedError) or "Could not run 'aten::" in text or "not currently impl" in text
