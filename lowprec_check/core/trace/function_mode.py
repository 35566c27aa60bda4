"""The function mode of the second pass, for failures above dispatch, which no dispatch mode sees.

It is used only after such a failure, because it makes some modules leave their fast paths.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from lowprec_check.core.trace.execution import Execution, Retry, find_rescue, gap_kind, predicted_by
from lowprec_check.core.trace.ops import dtype_names
from lowprec_check.core.trace.places import Places
from lowprec_check.engine.model.user_surroundings import replaced
from lowprec_check.errors import message_of
from lowprec_check.schema.run_key import Phase
from lowprec_check.schema.scan_result import Gap, GapKind
from lowprec_check.torchkit.autograd import accumulates, nodes_of


class FunctionRescue(TorchFunctionMode):
    """Rescues calls of torch functions that do not support a dtype; also in backward passes."""

    def __init__(self, execution: Execution, places: Places, failures: BackwardFailures) -> None:
        super().__init__()
        self._execution, self._journal, self._places, self._failures = execution, execution.journal, places, failures
        failures.restart()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        phase = self._places.phase
        name = function_name(func) if phase != "optimizer" else ""
        failure = self._failures.widened.get(name)
        if func in (Tensor.backward, torch.autograd.backward):
            # torch turns this mode off in its calls; keep it on for what a checkpoint recomputes.
            owner: Any = torch.autograd
            run = owner._engine_run_backward

            def with_mode(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return run(*args, **kwargs)

            with replaced(owner, "_engine_run_backward", with_mode):
                return func(*args, **kwargs)
        retry = None
        if failure is not None:
            rerun = self._retry(name, func, args, kwargs)
            retry = rerun if rerun.low_precision else None
        # In backward a checkpoint computes again, and ends that by an exception.
        if phase == "backward":
            return func(*args, **kwargs) if retry is None else retry.widened()
        try:
            if failure is not None and retry is not None:
                result = retry.widened()
                self._add_gap(name, retry, gap_kind(failure, "dispatch"), failure, "backward", sys._getframe(1))
                return result
            if phase == "forward":
                return self._failures.call(name, lambda: func(*args, **kwargs))
            return func(*args, **kwargs)
        except Exception as error:
            if error is self._execution.raised:
                raise
            retry = self._retry(function_name(func), func, args, kwargs)
            gaps_before = len(self._journal.gaps)
            rescue = find_rescue(retry, error, "function")
            if rescue is None:
                self._execution.raised = error
                raise
            is_complex = self._execution.pending.add(rescue.result)
            # The ops of the rerun may have reported the gap themselves.
            if len(self._journal.gaps) == gaps_before or rescue.kind == "dtype-mismatch":
                name, now, frame = function_name(func), self._places.phase or "forward", sys._getframe(1)
                self._add_gap(name, retry, rescue.kind, error, now, frame, gives_complex=is_complex)
            return rescue.result

    def _retry(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Retry:
        written = [kwargs["out"]] if isinstance(kwargs.get("out"), Tensor) else []
        if name.endswith("_") and not name.endswith("__") and args and isinstance(args[0], Tensor):
            written.append(args[0])
        return Retry(func, args, kwargs, self._execution.low, written)

    def _add_gap(
        self,
        name: str,
        retry: Retry,
        kind: GapKind,
        error: Exception,
        phase: Phase,
        frame: FrameType,
        *,
        gives_complex: bool = False,
    ) -> None:
        module, lines = self._places.of(frame)
        gap = Gap(
            op=name,
            layer="function",
            kind=kind,
            phase=phase,
            module=module,
            source=lines.source,
            caller=lines.caller,
            dtypes=dtype_names(retry.floating),
            message=message_of(error),
            gives_complex=gives_complex,
            predicted_by=predicted_by(error),
        )
        self._journal.add_gap(gap)


def function_name(func: Callable[..., Any]) -> str:
    """``torch.fft.rfft``, ``torch.Tensor.numpy``; its own name if torch cannot resolve it."""
    name = resolve_name(func) or getattr(func, "__qualname__", None) or repr(func)
    if name.startswith("torch."):
        name = str(name).replace("torch._C._fft.fft_", "torch.fft.")
        return name.replace("torch._C._linalg.linalg_", "torch.linalg.")
    module = getattr(func, "__module__", None) or ""
    bare = getattr(func, "__name__", name)
    for prefix, namespace in (("fft_", "torch.fft."), ("linalg_", "torch.linalg."), ("special_", "torch.special.")):
        if bare.startswith(prefix):
            return namespace + bare[len(prefix) :]
    if module.startswith("torch"):
        return f"{module}.{bare}"
    return f"torch.{bare}"


class SteppingCall(Protocol):
    """A call that is a step of training."""

    phase: Phase  # the part that runs
    on_loss: Callable[[Tensor], None]  # called with the loss, before the backward pass

    def restart(self) -> None:
        """Forget what earlier steps left, besides the model."""


class BackwardFailures:
    """Derivatives that fail in low precision before they call an op, where no mode sees them.

    ``i1e_backward``, for example. The function that created the failing node of the autograd graph
    is then called on widened inputs, as its user would fix it; if the backward pass gets further,
    the derivative has no kernel for the dtype. One object serves all passes of a run.
    """

    def __init__(self) -> None:
        self.widened: dict[str, Exception] = {}
        """Functions to call on widened inputs, and what their derivatives raised otherwise."""
        self.unproven: str | None = None
        """A function whose derivative fails on widened inputs too: the dtype is not the cause."""
        # The nodes that each call created, the first and the one after the last, and its function.
        self._calls: list[tuple[int, int, str]] = []
        # The number of the node that was evaluated last.
        self._node: int | None = None
        self._error: Exception | None = None

    def restart(self) -> None:
        """Before a pass."""
        self._calls.clear()
        self._node = self._error = None

    def watch(self, loss: Tensor) -> None:
        """Note which node is evaluated, in the backward pass of ``loss``."""

        def enter(number: int, _gradients: Any) -> None:
            self._node = number

        for node in nodes_of(loss):
            if not accumulates(node):
                node.register_prehook(functools.partial(enter, node._sequence_nr()))

    def call(self, name: str, function: Callable[[], Any]) -> Any:
        """Call a function, and note which nodes it creates."""
        before: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        result = function()
        self._calls.append((before, torch.autograd._get_sequence_nr(), name))  # type: ignore[attr-defined]
        return result

    def failed(self, error: BaseException) -> None:
        """Note that the backward pass raised ``error``, above dispatch."""
        self._error = error if isinstance(error, Exception) else None

    def learn(self) -> bool:
        """After a pass: widen the function whose derivative failed; whether there is a new one."""
        if self._error is None or self._node is None:
            return False
        name = next((name for first, end, name in self._calls if first <= self._node < end), None)
        self.unproven = None
        if name in self.widened:
            self.unproven = name
        if name is None or self.unproven is not None:
            return False
        self.widened[name] = self._error
        return True
