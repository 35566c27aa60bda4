"""Dispatch modes for runs without a recorder: kernels withheld, the first NaN, the same draws."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from lowprec_check.core.trace.dispatched_call import DispatchedCall
from lowprec_check.core.trace.execution import Retry
from lowprec_check.core.trace.lockstep import GeneratorState, followed, has_drawn, rerun, state_before
from lowprec_check.core.trace.ops import Args, Kwargs, map_args, tensors_in, traits
from lowprec_check.core.trace.places import CallSite
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.errors import UsageError
from lowprec_check.schema.precisions import FloatFormat, formats
from lowprec_check.torchkit.devices import seed_everything
from lowprec_check.torchkit.dispatch_mode import AutocastKeys, DispatchMode, run_op
from lowprec_check.torchkit.floating_dtypes import is_float, torch_dtype, widen
from lowprec_check.torchkit.pytree import leaves
from lowprec_check.torchkit.source_location import ModuleStack, call_model, source_line

# -- kernels withheld: an op fails for a dtype in every run, as if torch had no kernel for it

_FORMATS = {
    spelling: described for described in formats() for spelling in (*described.aliases, described.name, described.short)
}
_SPEC = re.compile(r"(?:aten(?:\.|::))?(?P<op>\w+)(?:\.(?P<overload>\w+))?:(?P<dtype>\w+)")


class WithheldKernel(NamedTuple):
    """One ``op[.overload]:dtype``."""

    op: str
    overload: str | None
    format: FloatFormat


def parse_withheld(specs: Iterable[str]) -> list[WithheldKernel]:
    """Parse ``aten.dot:half``; raises :class:`UsageError` for an unknown op or dtype."""
    kernels = []
    for spec in specs:
        match = _SPEC.fullmatch(spec)
        if match is None or match["dtype"] not in _FORMATS:
            raise UsageError(
                f"{spec!r} names no kernel to run without.",
                f"Write an op and a dtype, such as aten.dot:half; dtypes: {', '.join(_FORMATS)}.",
            )
        op, overload = match["op"], match["overload"]
        if not hasattr(torch.ops.aten, op):
            hint = "Write the op as it is named in the findings of a scan."
            raise UsageError(f"This torch has no op aten.{op}.", hint)
        overloads = getattr(torch.ops.aten, op).overloads()
        if overload not in (None, *overloads):
            raise UsageError(f"This torch has no op aten.{op}.{overload}.", f"aten.{op} has {', '.join(overloads)}.")
        kernels.append(WithheldKernel(op, overload, _FORMATS[match["dtype"]]))
    return kernels


def withholding(specs: Iterable[str]) -> contextlib.AbstractContextManager[Any]:
    """A context in which the kernels of ``specs`` are missing; does nothing for none."""
    withheld = parse_withheld(specs)
    if withheld:
        return _Withholding(withheld)
    return contextlib.nullcontext()


class _Withholding(DispatchMode):
    """Raises the error that torch raises if a kernel is missing."""

    def __init__(self, withheld: list[WithheldKernel]) -> None:
        super().__init__()
        self.withheld = withheld

    def handle(self, func: OpOverload, args: Any, kwargs: Any, keys: AutocastKeys) -> Any:
        for op, overload, format_ in self.withheld:
            is_op = func._schema.name == f"aten::{op}" and overload in (None, func._overloadname)
            if is_op and any(tensor.dtype == torch_dtype(format_) for tensor in tensors_in(args, kwargs)):
                raise NotImplementedError(f"\"{op}\" not implemented for '{format_.cpp_name}' (withheld)")
        return run_op(func, args, kwargs, keys)


# -- the first NaN or Inf of a plain fp32 run


def first_nonfinite(ready: Prepared, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int) -> CallSite | None:
    """The first op that gives NaN or Inf from finite inputs; ``None`` if no op does."""
    seed_everything(seed)
    inputs, named = ready.inputs(args, kwargs)
    with ModuleStack(ready.model) as stack, _FirstNonfinite(stack) as mode, ready.context():
        call_model(ready.call, inputs, named)
    site: CallSite | None = mode.site
    return site


class _FirstNonfinite(DispatchMode):
    def __init__(self, stack: ModuleStack) -> None:
        super().__init__()
        self.stack = stack
        self.site: CallSite | None = None

    def handle(self, func: OpOverload, args: Any, kwargs: Any, keys: AutocastKeys) -> Any:
        op = traits(func)
        inputs_finite = self.site is None and not op.skipped and all(map(_finite, tensors_in(args, kwargs)))
        out = run_op(func, args, kwargs, keys)
        if inputs_finite and not all(_finite(tensor) for _, tensor in leaves(out)):
            self.site = (op.name, self.stack.current, source_line(sys._getframe(1)))
        return out


def _finite(tensor: Tensor) -> bool:
    is_exact = not (tensor.is_floating_point() or tensor.is_complex())
    return is_exact or bool(tensor.isfinite().all())


# -- the same random numbers in two runs


class Draw(NamedTuple):
    """One random call of a run."""

    op: str
    state: GeneratorState
    inputs: list[Tensor]  # its floating inputs, widened
    outputs: list[Tensor]


class DrawsDiffer(Exception):  # noqa: N818 - not an error of the user
    """The reference draws in other places than the run."""


class RecordDraws(DispatchMode):
    """Records the random calls of a run. ``emulates``: a dtype that the device does not accelerate;
    other calls in it are computed in fp32, and rounded.
    """

    def __init__(self, emulates: torch.dtype | None = None) -> None:
        super().__init__()
        self.draws: list[Draw] = []
        self._emulates = emulates

    def handle(self, func: Any, args: Any, kwargs: Any, keys: AutocastKeys) -> Any:
        """Run the op, and record it if it draws."""
        call = DispatchedCall(func, args, kwargs, keys)
        state = state_before(call)
        if state is None:
            return call.run() if self._emulates is None else emulated(call, self._emulates)
        inputs = [widen(tensor).clone() for tensor in call.inputs if is_float(tensor)]
        out = call.run()
        if has_drawn(call, state):
            outputs = [tensor.detach().clone() for tensor in call.results(out)]
            self.draws.append(Draw(call.traits.name, state, inputs, outputs))
        return out


def emulated(call: DispatchedCall, low: torch.dtype) -> Any:
    """The result of ``call``, of narrow inputs in fp32 and rounded; of a cast, as it is."""
    retry = Retry(call.func, call.args, call.kwargs, low)
    is_quick = call.traits.view or call.traits.casts or call.traits.mutable
    if is_quick or retry.mixed or not retry.low_precision:
        return call.run()
    with torch._C._DisableAutocast():
        return retry.widened()


class ReplayDraws(DispatchMode):
    """Gives the random calls of an fp32 run recorded draws; raises :class:`DrawsDiffer`."""

    def __init__(self, recorded: Sequence[Draw]) -> None:
        super().__init__()
        self._left = list(recorded)

    def check_all_drawn(self) -> None:
        """At the end: raise :class:`DrawsDiffer` if the recorded run has drawn more."""
        if self._left:
            raise DrawsDiffer(f"{self._left[0].op} is called more often here")

    def handle(self, func: Any, args: Any, kwargs: Any, keys: AutocastKeys) -> Any:
        """Run the op; if it draws, replace its results."""
        call = DispatchedCall(func, args, kwargs, keys)
        state = state_before(call)
        if state is None:
            return call.run()
        draw = self._left[0] if self._left else None
        replaced = self._with_inputs_of(call, draw)
        if draw is not None:
            state.state = draw.state.state
            state.generator.set_state(state.state)
        out = call.run()
        if not has_drawn(call, state):
            return out
        outputs = call.results(out)
        if draw is None or replaced is None or [t.shape for t in outputs[:1]] != [t.shape for t in draw.outputs[:1]]:
            raise DrawsDiffer(f"{call.traits.name} there, {draw.op if draw else 'nothing'} here")
        widened = rerun(call, state, *replaced)
        for out_, low, wide in zip(outputs, draw.outputs, widened, strict=False):
            if out_.shape == low.shape == wide.shape:
                out_.copy_(followed(low, out_.clone(), wide))
        self._left.pop(0)
        return out

    def _with_inputs_of(self, call: DispatchedCall, draw: Draw | None) -> tuple[Args, Kwargs] | None:
        """The arguments of ``call`` with the floating inputs of ``draw``; ``None`` if unfit."""
        inputs = [tensor for tensor in call.inputs if is_float(tensor)]
        if draw is None or [t.shape for t in inputs] != [t.shape for t in draw.inputs]:
            return None
        by_id = {id(tensor): other for tensor, other in zip(inputs, draw.inputs, strict=True)}

        def replaced(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) in by_id:
                return by_id[id(value)].to(value.dtype, copy=True)
            return value.clone()

        return map_args(call.args, call.kwargs, replaced)
