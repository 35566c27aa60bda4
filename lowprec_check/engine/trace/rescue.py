"""Is this failure a gap? Told by experiment: fails as given, passes when unified or widened.

The words of the message only add a name; they drift between versions of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowprec_check.engine.core.compare import NARROW, is_float, is_narrow, widened_dtype
from lowprec_check.schema.scan_result import GapKind, Layer

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Rescue(NamedTuple):
    """A failure that an experiment explained, and the result to go on with."""

    kind: GapKind
    result: Any


def map_args(args: Args, kwargs: Kwargs, function: Callable[[Any], Any]) -> tuple[Args, Kwargs]:
    """Apply ``function`` to every tensor and dtype among the arguments, lists of tensors included."""
    return tuple(_map(a, function) for a in args), {k: _map(v, function) for k, v in kwargs.items()}


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, (Tensor, torch.dtype)):
        return function(value)
    if isinstance(value, (list, tuple)) and value and not isinstance(value[0], (int, float)):
        mapped = [_map(item, function) for item in value]
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    if isinstance(value, dict):
        return {key: _map(item, function) for key, item in value.items()}
    return value


def tensors_in(args: Args, kwargs: Kwargs) -> list[Tensor]:
    """All tensors among the arguments, those in lists included."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, Tensor):
                    found.append(item)
                elif isinstance(item, (list, tuple)):
                    found += [inner for inner in item if isinstance(inner, Tensor)]
    return found


def asks_narrow(args: Args, kwargs: Kwargs) -> bool:
    """Whether a narrow dtype is among the arguments (``dtype=torch.half``)."""
    return any(isinstance(value, torch.dtype) and value in NARROW for value in (*args, *kwargs.values()))


class Attempt:
    """One call, to be tried again with other dtypes; what it writes (``written``) reaches the original tensors."""

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
        self.asks_narrow = asks_narrow(args, kwargs)

    @property
    def low_precision(self) -> bool:
        """Whether anything narrow goes in."""
        return self.asks_narrow or any(is_narrow(tensor) for tensor in self.floating)

    @property
    def mixed(self) -> bool:
        """Whether real floating inputs of several dtypes meet, one of them narrow."""
        dtypes = {tensor.dtype for tensor in self.floating if not tensor.is_complex()}
        return len(dtypes) > 1 and not dtypes.isdisjoint(NARROW)

    def unified(self) -> Any:
        """Run with every real floating input in the low dtype."""
        return self._run(lambda value: value.to(self.low) if _is_real_float(value) else value)

    def widened(self) -> Any:
        """Run with narrow inputs and dtypes widened to fp32; narrow again what would have been narrow."""
        return self.narrowed(self._run(_widen))

    def on_cpu(self) -> Any:
        """Run on the CPU in fp32, results back on the device."""
        device = self.floating[0].device if self.floating else torch.device("cpu")
        result = self._run(lambda value: _widen(value).cpu() if isinstance(value, Tensor) else _widen(value))
        return self.narrowed(_map(result, lambda value: value.to(device) if isinstance(value, Tensor) else value))

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
            original.copy_(changed)
        return _map(result, lambda value: originals[id(value)][0] if id(value) in originals else value)

    def narrowed(self, result: Any) -> Any:
        """``result`` of a widened run, in the dtypes that the call would have given."""
        shaped = [tensor for tensor in self.floating if tensor.ndim] or self.floating
        if not self.low_precision or self._asks_wide() or not all(is_narrow(tensor) for tensor in shaped):
            return result

        def narrow(value: Any) -> Any:
            return value.to(self.low) if isinstance(value, Tensor) and value.dtype == torch.float32 else value

        return _map(result, narrow)

    def _asks_wide(self) -> bool:
        values = (*self.args, *self.kwargs.values())
        return any(isinstance(value, torch.dtype) and value not in NARROW for value in values)


def _is_real_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _widen(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return widened_dtype(value, torch.float32) if value in NARROW else value
    return value.to(widened_dtype(value.dtype, torch.float32)) if is_float(value) and is_narrow(value) else value


def rescue(attempt: Attempt, error: BaseException, layer: Layer) -> Rescue | None:
    """Explain ``error`` by trying again; ``None`` if the call fails in every dtype (the user's own error)."""
    if not isinstance(error, Exception) or is_out_of_memory(error):
        return None
    if attempt.mixed:
        result = _succeeds(attempt.unified)
        if result is not None:
            return Rescue("dtype-mismatch", result.value)
    if attempt.low_precision:
        result = _succeeds(attempt.widened)
        if result is not None:
            return Rescue(_kind(error, layer), result.value)
    if any(tensor.device.type != "cpu" for tensor in attempt.floating) and _lacks_backend(error):
        result = _succeeds(attempt.on_cpu)
        if result is not None:
            return Rescue("no-backend-kernel", result.value)
    return None


class _Success(NamedTuple):
    value: Any


def _succeeds(trial: Callable[[], Any]) -> _Success | None:
    try:
        return _Success(trial())
    except Exception:
        return None


def _kind(error: Exception, layer: Layer) -> GapKind:
    if "without overflow" in str(error):
        return "scalar-overflow"
    return "missing-kernel" if layer == "dispatch" else "unsupported-dtype"


def _lacks_backend(error: Exception) -> bool:
    text = str(error)
    return isinstance(error, NotImplementedError) or "Could not run 'aten::" in text or "not currently impl" in text


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out, on any device."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
