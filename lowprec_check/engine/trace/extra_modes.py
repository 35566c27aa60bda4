"""Modes beside the recorder: checks above dispatch (the second pass), kernels withheld on request, and the first NaN of an fp32 run."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode, resolve_name

from lowprec_check.engine.core.dispatch_mode import AutocastKeys, DispatchMode, run_op
from lowprec_check.engine.core.floating_dtypes import torch_dtype
from lowprec_check.engine.core.pytree import leaves
from lowprec_check.engine.core.seed import seed_everything
from lowprec_check.engine.core.source_location import ModuleStack, call_model, source_line
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.trace.execution import Retry, find_rescue, gap_kind, predicted_by
from lowprec_check.engine.trace.op_arguments import dtype_names, tensors_in
from lowprec_check.engine.trace.op_traits import traits
from lowprec_check.engine.trace.places import accumulates, nodes_of
from lowprec_check.errors import UsageError, message_of
from lowprec_check.schema.precisions import FloatFormat, formats
from lowprec_check.schema.run_key import Phase
from lowprec_check.schema.scan_result import GapKind

if TYPE_CHECKING:
    from lowprec_check.engine.trace.recorder import Recorder


# -- Where a NaN or Inf originates in a plain fp32 run: the first op with finite inputs and a non-finite output


class _FirstNonfinite(DispatchMode):
    def __init__(self, stack: ModuleStack) -> None:
        super().__init__()
        self.stack = stack
        self.found: tuple[str, str, str | None] | None = None

    def handle(self, func: OpOverload, args: Any, kwargs: Any, keys: AutocastKeys) -> Any:
        op = traits(func)
        inputs_finite = self.found is None and not op.skipped and all(map(_finite, tensors_in(args, kwargs)))
        out = run_op(func, args, kwargs, keys)
        if inputs_finite and not all(_finite(tensor) for _, tensor in leaves(out)):
            self.found = (op.name, self.stack.current, source_line(sys._getframe(1)))
        return out


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def first_nonfinite(
    ready: Prepared, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int
) -> tuple[str, str, str | None] | None:
    """``(op, module, source)``; ``None`` if it comes from a weight or an input."""
    seed_everything(seed)
    inputs, named = ready.inputs(args, kwargs)
    with ModuleStack(ready.model) as stack, _FirstNonfinite(stack) as mode, ready.context():
        call_model(ready.call, inputs, named)
    found: tuple[str, str, str | None] | None = mode.found
    return found


# -- Withholds kernels: makes an op fail for a dtype in every run, as if this build of torch had no kernel for it

_FORMATS = {
    spelling: described for described in formats() for spelling in (*described.aliases, described.name, described.short)
}
_SPEC = re.compile(r"(?:aten(?:\.|::))?(?P<op>\w+)(?:\.(?P<overload>\w+))?:(?P<dtype>\w+)")


class WithheldKernel(NamedTuple):
    """One ``op[.overload]:dtype``."""

    op: str
    overload: str | None
    format: FloatFormat

    def matches(self, func: OpOverload) -> bool:
        """Whether ``func`` is the op withheld."""
        namespace, name = func._schema.name.split("::")
        return namespace == "aten" and name == self.op and self.overload in (None, func._overloadname)


def parse_withheld(specs: Iterable[str]) -> list[WithheldKernel]:
    """Parse ``aten.dot:half``; raises :class:`UsageError` for an op or dtype that does not exist."""
    return [_parse(spec) for spec in specs]


def _parse(spec: str) -> WithheldKernel:
    match = _SPEC.fullmatch(spec)
    format_ = _FORMATS.get(match["dtype"]) if match else None
    if match is None or format_ is None:
        raise UsageError(
            f"{spec!r} names no kernel to run without.",
            f"Write an op and a dtype, such as aten.dot:half; dtypes: {', '.join(_FORMATS)}.",
        )
    if not hasattr(torch.ops.aten, match["op"]):
        raise UsageError(
            f"This torch has no op aten.{match['op']}.", "Write the op as it is named in the findings of a scan."
        )
    overloads = getattr(torch.ops.aten, match["op"]).overloads()
    if match["overload"] not in (None, *overloads):
        named = f"aten.{match['op']}.{match['overload']}"
        raise UsageError(f"This torch has no op {named}.", f"aten.{match['op']} has {', '.join(overloads)}.")
    return WithheldKernel(match["op"], match["overload"], format_)


class WithholdMode(DispatchMode):
    """Raises the error that torch raises if a kernel is missing."""

    def __init__(self, withheld: list[WithheldKernel]) -> None:
        super().__init__()
        self.withheld = withheld

    def handle(self, func: OpOverload, args: Any, kwargs: Any, keys: AutocastKeys) -> Any:
        """Raise for an op that is withheld, else run it."""
        for item in self.withheld:
            if item.matches(func) and any(
                tensor.dtype == torch_dtype(item.format) for tensor in tensors_in(args, kwargs)
            ):
                raise NotImplementedError(f"\"{item.op}\" not implemented for '{item.format.cpp_name}' (withheld)")
        return run_op(func, args, kwargs, keys)


def withholding(specs: Iterable[str]) -> contextlib.AbstractContextManager[Any]:
    """A context in which the kernels of ``specs`` are missing; does nothing for none."""
    withheld = parse_withheld(specs)
    return WithholdMode(withheld) if withheld else contextlib.nullcontext()


# -- Derivatives that fail in low precision before they call an op, where no mode sees them: ``i1e_backward``, for
# example
#
# The function that created the failing node of the autograd graph is then called on widened inputs, as its user would fix it;
# if the backward pass gets further, the derivative has no kernel for the dtype.


class SteppingCall(Protocol):
    """A call that is a step of training."""

    phase: Phase
    """The part that runs."""
    on_loss: Callable[[Tensor], None]
    """Called with the loss, before the backward pass."""

    def restart(self) -> None:
        """Forget what earlier steps left, besides the model."""


class BackwardFailures:
    """What is known of the derivatives that fail; one object for all passes of an instrumented part."""

    def __init__(self) -> None:
        self.widened: dict[str, Exception] = {}
        """Functions to call on widened inputs, and what their derivatives raised otherwise."""
        self.unproven: str | None = None
        """A function whose derivative fails on widened inputs too: the dtype is not the cause."""
        self._calls: list[tuple[int, int, str]] = []
        """The numbers of the nodes that each call created: the first, and the one after the last; and the name of the function."""
        self._node: int | None = None
        """The number of the node that was evaluated last."""
        self._error: Exception | None = None

    def restart(self) -> None:
        """Before a pass."""
        self._calls.clear()
        self._node = self._error = None

    def watch(self, loss: Tensor) -> None:
        """Note which node is evaluated, in the backward pass of ``loss``."""
        for node in nodes_of(loss):
            if not accumulates(node):
                node.register_prehook(functools.partial(self._enter, node._sequence_nr()))

    def _enter(self, number: int, _gradients: Any) -> None:
        self._node = number

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
        """After a pass: widen the function whose derivative failed from now on; false if there is none, or it was widened."""
        if self._error is None or self._node is None:
            return False
        name = next((name for first, end, name in self._calls if first <= self._node < end), None)
        self.unproven = name if name in self.widened else None
        if name is None or name in self.widened:
            return False
        self.widened[name] = self._error
        return True


# -- The function mode of the second pass, for checks that fail above dispatch, where no dispatch mode is called
#
# It is used only after such a failure, because it makes some modules leave their fast paths.


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
