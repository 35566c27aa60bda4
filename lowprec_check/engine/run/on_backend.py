"""Calls a model through a backend, which prepares it at the first call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.target import Target
from lowprec_check.schema.axes import Backend, Call, Example
from lowprec_check.schema.measures import LayerError


class OnBackend:
    """Replaces the call of ``ready``; the backend gets the inputs of the first call as an example."""

    def __init__(self, backend: Backend, target: Target, ready: Prepared) -> None:
        self._backend, self._target, self._ready = backend, target, ready
        self._call: Callable[..., Any] | None = None
        self._example: Example | None = None
        self.prepared: Callable[..., Any] | None = None
        """What replaces the model, without the loss; ``None`` before the first call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what the backend prepared, and the loss if there is one."""
        if self._call is None:
            self.prepared = self._prepare(args, kwargs)
            self._call = self._target.call(self.prepared)
        return self._call(*args, **kwargs)

    def layer_errors(self) -> list[LayerError]:
        """The errors of the layers that the backend quantized."""
        if self._example is None:
            return []
        return self._backend.layer_errors(self.prepared, self._ready.model, self._example)

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        ready = self._ready

        def calibration() -> Iterable[Call]:
            return (ready.inputs(*call) for call in self._target.calibration())

        self._example = Example(
            args=args,
            kwargs=kwargs,
            precision=ready.precision,
            device=ready.device.type,
            calibration=calibration,
        )
        prepared: Any = self._backend.prepare(ready.model, self._example)
        if not callable(prepared):
            kind = type(prepared).__name__
            raise TypeError(f"prepare of the backend {self._backend.name} returned {kind}, which cannot be called")
        called: Callable[..., Any] = prepared
        return called
