"""Runs a model again with a cast where an op gets several dtypes."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Sequence
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

from lowprec_check.core.trace.dispatched_call import DispatchedCall
from lowprec_check.core.trace.execution import Retry, find_rescue
from lowprec_check.core.trace.function_mode import function_name
from lowprec_check.core.trace.instrument import call_under
from lowprec_check.engine.model.plain_run import judge, output_tensors
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.features.mixed_dtypes.dtype_origins import DtypeOrigins, floating_arguments
from lowprec_check.schema.findings import (
    WRITES_INTO,
    DisabledAutocast,
    DtypeOrigin,
    Gap,
    MixedCall,
    MixedDtypes,
    MixedInput,
)
from lowprec_check.torchkit.autocast import following_regions, noted
from lowprec_check.torchkit.dispatch_mode import AutocastKeys, DispatchMode, observing
from lowprec_check.torchkit.floating_dtypes import is_narrow
from lowprec_check.torchkit.source_location import ModuleStack, source_lines

Way = Literal["narrow", "wide"]


def try_casts(
    ready: Prepared,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    gaps: Sequence[Gap],
    dtype: torch.dtype,
    fp32: Sequence[Tensor],
    *,
    tolerance: float,
    seed: int,
    slow: Collection[str] = (),
) -> MixedDtypes | None:
    """The run with the first casts with which it passes, of those to 16 bits and those to fp32.

    What is written into a tensor, or meets a weight, gets the dtype of that in both. ``None`` if no
    op was met that fails for its dtypes. Ops in ``slow`` are computed in fp32 and rounded.
    """
    snapshot, above = Snapshot(ready.model, (args, kwargs)), any(gap.layer == "function" for gap in gaps)
    first: MixedDtypes | None = None
    ways: tuple[Way, ...] = ("narrow", "wide")
    try:
        for way in ways:
            inputs, regions = ready.inputs(args, kwargs), list[Any]()
            with ModuleStack(ready.model) as stack, following_regions(regions):
                mode = Casting(stack, DtypeOrigins(ready.model, inputs), dtype, way, regions, slow=slow)
                inner = _CastingFunctions(mode) if above else None
                output, error = call_under(mode, ready, *inputs, seed, inner)
            snapshot.rewind()
            tried = MixedDtypes(calls=list(mode.calls.values()))
            # Other failures that this run does not have are no effect of the casts.
            if error is None and not mode.others:
                status, compared = judge(output_tensors(output), fp32, tolerance)
                rel_l2 = compared.error.rel_l2
                if rel_l2 is not None and not math.isfinite(rel_l2):
                    rel_l2 = None
                tried = MixedDtypes(calls=tried.calls, status=status, rel_l2=rel_l2)
            if tried.status == "ok":
                return tried
            first = first or tried
    finally:
        snapshot.restore()
    return first if first is not None and first.calls else None


class Casting(DispatchMode):
    """Runs ops as given; one that fails for its dtypes runs again with a cast."""

    def __init__(
        self,
        stack: ModuleStack,
        origins: DtypeOrigins,
        low: torch.dtype,
        way: Way,
        regions: Sequence[Any],
        *,
        slow: Collection[str] = (),
        raises: bool = False,
    ) -> None:
        super().__init__()
        self._slow = slow
        self._raises = raises  # whether the first such failure is raised, after it was noted
        self._regions = regions  # the active ``torch.autocast``, the innermost last
        self._stack, self.origins, self.low, self._way = stack, origins, low, way
        self.calls: dict[tuple[str, str, str | None], MixedCall] = {}
        self.others = False
        """Whether ops failed for other reasons."""

    def handle(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], keys: AutocastKeys) -> Any:
        """Return the result of the op."""
        call, frame = DispatchedCall(func, args, kwargs, keys), sys._getframe(1)
        retry = Retry(func, args, kwargs, self.low, call.written())
        is_slow = call.traits.name in self._slow and not call.traits.casts and not retry.mixed
        try:
            if is_slow:
                with torch._C._DisableAutocast():
                    out = retry.widened()
            else:
                out = call.run()
        except Exception as error:
            names = [argument.name for argument in func._schema.arguments]
            with torch._C._DisableAutocast():
                out = self.cast(retry, error, call.traits.name, names, frame)
        with observing():
            self.origins.follow(call, out, frame)
        return out

    def cast(self, retry: Retry, error: Exception, op: str, names: Sequence[str], frame: FrameType) -> Any:
        """The result of a failed call with a cast, if that helps; else what a scan goes on with."""
        if len({tensor.dtype for tensor in retry.floating if not tensor.is_complex()}) > 1:
            inputs, dtype = floating_arguments(names, retry.args, retry.kwargs), self._dtype(op, names, retry)
            try:

                def cast(value: Any) -> Any:
                    if isinstance(value, Tensor) and value.is_floating_point():
                        return value.to(dtype)
                    return value

                out = retry.run(cast)
            except Exception:
                pass  # the mismatch is not why it fails
            else:
                self._note(op, inputs, dtype, source_lines(frame).source)
                if not self._raises:
                    return out
        if self._raises:
            raise error
        self.others = True
        rescue = find_rescue(retry, error, "dispatch")
        if rescue is None:
            raise error
        return rescue.result

    def _dtype(self, op: str, names: Sequence[str], retry: Retry) -> torch.dtype:
        """The dtype that all inputs get."""
        packet = op.removeprefix("aten.").removeprefix("torch.Tensor.").partition(".")[0]
        if retry.args and isinstance(retry.args[0], Tensor) and packet.removesuffix("_") in WRITES_INTO:
            return retry.args[0].dtype
        weight = next(filter(self.origins.is_weight, retry.floating), None)
        if weight is not None:
            return weight.dtype
        narrow = next((tensor.dtype for tensor in retry.floating if is_narrow(tensor)), torch.float32)
        return narrow if self._way == "narrow" else torch.float32

    def _note(self, op: str, inputs: dict[str, Tensor], dtype: torch.dtype, source: str | None) -> None:
        mixed = []
        for name, tensor in inputs.items():
            origin = self.origins.of(tensor) or DtypeOrigin(kind="unknown")
            is_cast = tensor.dtype != dtype
            mixed.append(MixedInput(argument=name, dtype=str(tensor.dtype)[6:], origin=origin, is_cast=is_cast))
        place = self._stack.current, op, source
        disabled = next(filter(None, map(_disabled, reversed(self._regions))), None)
        call = MixedCall(module=place[0], op=op, source=source, inputs=mixed, disabled_autocast=disabled)
        self.calls.setdefault(place, call)


def _disabled(autocast: Any) -> DisabledAutocast | None:
    """The region of ``autocast``, if torch disabled it."""
    note = noted(autocast)
    if note is None or not note.disabled_because:
        return None
    dtype = str(autocast.fast_dtype)
    return DisabledAutocast(device=note.device, dtype=dtype, source=note.source, warning=note.disabled_because)


class _CastingFunctions(TorchFunctionMode):
    """The same for functions that fail above dispatch."""

    def __init__(self, casting: Casting) -> None:
        super().__init__()
        self._casting = casting

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except Exception as error:
            retry = Retry(func, args, kwargs, self._casting.low)
            names = [f"argument {index + 1}" for index in range(len(args))]
            return self._casting.cast(retry, error, function_name(func), names, sys._getframe(1))
