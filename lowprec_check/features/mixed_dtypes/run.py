"""Where dtypes meet for which ops fail: in a run, with a cast that helps; in the model as given."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from types import FrameType
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

from lowprec_check.core.feature_hooks import Explained, Feature
from lowprec_check.core.judged_trials import JudgedTrials, trials_of
from lowprec_check.core.messages import Receive, Send, TaskAnswer, faults_sent
from lowprec_check.core.preparation import in_eager_mode, prepared_for
from lowprec_check.core.target_runs import TargetRuns
from lowprec_check.core.tasks import ModelTask
from lowprec_check.core.trace.dispatched_call import DispatchedCall
from lowprec_check.core.trace.execution import Retry, find_rescue
from lowprec_check.core.trace.function_mode import function_name
from lowprec_check.core.trace.instrument import call_under
from lowprec_check.core.trace.ops import outputs_of, tensors_in
from lowprec_check.core.trace.twins import storage_key
from lowprec_check.engine.model.plain_run import describe_error
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.streamed_weights import stream_of
from lowprec_check.engine.model.target import Target
from lowprec_check.schema.findings import (
    WRITES_INTO,
    DisabledAutocast,
    DtypeOrigin,
    Gap,
    MixedCall,
    MixedDtypes,
    MixedInput,
    ModelAsGiven,
)
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import EAGER
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.statements import short_op
from lowprec_check.torchkit.autocast_rules import following_regions, noted
from lowprec_check.torchkit.dispatch_mode import AutocastKeys, DispatchMode, observing
from lowprec_check.torchkit.floating_dtypes import is_narrow, torch_dtype
from lowprec_check.torchkit.pytree import leaves
from lowprec_check.torchkit.source_location import PACKAGE, ModuleStack, source_lines

# -- Where dtypes come from

_MAKE_NEW = ("_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")


class DtypeOrigins:
    """The origin of the dtype of each live storage; a tensor inherits that of an input."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        self._origins: dict[int, tuple[DtypeOrigin, weakref.ref[Any]]] = {}
        # Casts at the same place as the op that reads them are those of autocast.
        self._casts: dict[int, tuple[int, int]] = {}
        self._by_autocast: set[int] = set()
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, Tensor):
                    self._add(value, DtypeOrigin(kind="attribute", name=".".join(filter(None, (path, name)))))
        for name, buffer in model.named_buffers():
            self._add(buffer, DtypeOrigin(kind="buffer", name=name))
        self._weights = {storage_key(parameter) for parameter in model.parameters()}
        for name, parameter in model.named_parameters():
            self._add(parameter, DtypeOrigin(kind="parameter", name=name))
        for path, tensor in leaves(inputs):
            self._add(tensor, DtypeOrigin(kind="input", name=path.partition(".")[2] or path))

    def of(self, tensor: Tensor) -> DtypeOrigin | None:
        """Where its dtype comes from; ``None`` if that was not observed."""
        entry = self._origins.get(storage_key(tensor))
        if entry is None:
            return None
        return entry[0]

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether it is a parameter, or a view of one."""
        return storage_key(tensor) in self._weights

    def follow(self, call: DispatchedCall, out: Any, frame: FrameType) -> None:
        """Note what ``call`` has made."""
        made = [tensor for tensor in outputs_of(out) if tensor.is_floating_point()]
        made = [tensor for tensor in made if storage_key(tensor) not in self._origins]
        read = [tensor for tensor in tensors_in(call.args, call.kwargs) if tensor.is_floating_point()]
        site = _site(frame)
        if call.traits.casts:
            for tensor in made:
                if is_narrow(tensor) and read and read[0].dtype.itemsize == 4:
                    self._casts[storage_key(tensor)] = site
        else:
            keys = {storage_key(tensor) for tensor in read}
            self._by_autocast |= {key for key in keys if self._casts.get(key) == site}
        for tensor in made:
            self._add(tensor, self._origin(call, tensor, read, frame))

    def _origin(self, call: DispatchedCall, made: Tensor, read: list[Tensor], frame: FrameType) -> DtypeOrigin:
        op, source, packet = short_op(call.traits.name), source_lines(frame).source, call.traits.packet
        same = [tensor for tensor in read if tensor.dtype == made.dtype]
        if not read or packet.endswith(_MAKE_NEW):
            return DtypeOrigin(kind="made", name=op, source=source)
        if call.traits.casts and not same:
            return DtypeOrigin(kind="cast", name=op, source=source)
        if any(storage_key(tensor) in self._by_autocast for tensor in same):
            return DtypeOrigin(kind="autocast", name=op, source=source)
        inherited = next(filter(None, map(self.of, same)), None)
        return inherited or DtypeOrigin(kind="op", name=op, source=source)

    def _add(self, tensor: Tensor, origin: DtypeOrigin) -> None:
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        # When the storage is freed, its key may be given to another one.
        self._origins[key] = origin, weakref.ref(storage, functools.partial(self._forget, key))

    def _forget(self, key: int, _storage: Any) -> None:
        self._origins.pop(key, None)
        self._casts.pop(key, None)
        self._by_autocast.discard(key)


def _site(frame: FrameType | None) -> tuple[int, int]:
    """The innermost running call that is not of this package: its frame, and the instruction."""
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return (0, 0) if frame is None else (id(frame), frame.f_lasti)


def floating_arguments(names: Iterable[str], args: Iterable[Any], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """The floating tensors among arguments, by the names of these; of lists, with the position."""
    named: dict[str, Tensor] = {}
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        if isinstance(value, Tensor):
            named[name] = value
        elif isinstance(value, (list, tuple)):
            named |= {f"{name}[{index}]": item for index, item in enumerate(value) if isinstance(item, Tensor)}
    return {name: tensor for name, tensor in named.items() if tensor.is_floating_point()}


# -- Runs with casts

Way = Literal["narrow", "wide"]


def try_casts(
    trials: JudgedTrials, gaps: Sequence[Gap], dtype: torch.dtype, slow: Collection[str]
) -> MixedDtypes | None:
    """The run with the first casts with which it passes, of those to 16 bits and those to fp32.

    What is written into a tensor, or meets a weight, gets the dtype of that in both. ``None`` if no
    op was met that fails for its dtypes. Ops in ``slow`` are computed in fp32 and rounded.
    """
    above, model = any(gap.layer == "function" for gap in gaps), trials.ready.model
    first: MixedDtypes | None = None
    ways: tuple[Way, ...] = ("narrow", "wide")
    for way in ways:
        inputs, regions = trials.inputs(), list[Any]()
        with ModuleStack(model) as stack, following_regions(regions):
            mode = Casting(stack, DtypeOrigins(model, inputs), dtype, way, regions, slow=slow)
            judged = trials.judged(mode, inputs, _CastingFunctions(mode) if above else None)
        trials.snapshot.rewind()
        tried = MixedDtypes(calls=list(mode.calls.values()))
        # Other failures that this run does not have are no effect of the casts.
        if judged is not None and not mode.others:
            tried = MixedDtypes(calls=tried.calls, status=judged[0], rel_l2=judged[1])
        if tried.status == "ok":
            return tried
        first = first or tried
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


# -- The model as given


def floating_dtypes(target: Target) -> set[torch.dtype]:
    """Those of the parameters and of the inputs."""
    tensors = [*target.model.parameters(), *(tensor for _, tensor in leaves(target.inputs))]
    return {tensor.dtype for tensor in tensors if tensor.is_floating_point()}


def called_as_given(ready: Prepared, target: Target, seed: int) -> ModelAsGiven:
    """What one call of the model gives, without autocast; the op at which dtypes meet, if any."""
    # The modules that own parameters of each dtype, with ``*`` for numbers; each once.
    modules: dict[str, dict[str, None]] = {}
    for name, parameter in target.model.named_parameters():
        if parameter.is_floating_point():
            owner = re.sub(r"\b\d+\b", "*", name.rpartition(".")[0])
            modules.setdefault(str(parameter.dtype)[6:], {})[owner] = None
    dtypes = {dtype: list(names) for dtype, names in modules.items()}
    without_autocast = ready._replace(enters_context=True)
    with ModuleStack(ready.model) as stack:
        inputs = ready.inputs(target.args, target.kwargs)
        mode = Casting(stack, DtypeOrigins(ready.model, inputs), torch.float16, "narrow", [], raises=True)
        _, error = call_under(mode, without_autocast, *inputs, seed)
    if error is None:
        return ModelAsGiven(dtypes=dtypes)
    mixed = next(iter(mode.calls.values()), None)
    return ModelAsGiven(dtypes=dtypes, exception=describe_error(error, ready.model), mixed=mixed)


# -- The feature


class MixedDtypesTrials(Feature):
    """A run again, with casts where dtypes meet."""

    place = 6

    def after_explanation(self, explained: Explained) -> None:
        """Try them in an eager run that fails in its forward pass."""
        task, report = explained.task, explained.report
        run = report.run
        if task.is_reference or not task.mode.is_forward or task.backend != EAGER or run.status != "error":
            return
        if not any(gap.kind == "dtype-mismatch" for gap in run.gaps):
            return
        with trials_of(explained) as trials:
            if trials is not None:
                dtype = torch_dtype(PRECISIONS.get(task.precision).format)
                report.add(mixed_dtypes=try_casts(trials, run.gaps, dtype, run.emulated))

    def after_runs(self, batches: Sequence[TargetRuns], result: ScanResult, options: ScanOptions) -> ScanResult | None:
        """Call a model with several floating dtypes as it is given, which no run does."""
        runs, target = batches[0], batches[0].target
        is_measured = runs.mode.is_forward and runs.mode.evidence == "measured" and stream_of(target.model) is None
        if not is_measured or len(floating_dtypes(target)) < 2:
            return None
        task = runs.reference_task().as_task(AsGivenTask, precision="autocast-bf16", budget=runs.reference_budget)
        outcome = runs.launcher.do(task)
        if not outcome.answers:
            return None
        return msgspec.structs.replace(result, as_given=outcome.answers[-1].read(ModelAsGiven))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AsGivenTask(ModelTask):
    """Call the model as its user gives it; its precision is one that leaves it as it is."""

    @property
    def progress(self) -> tuple[str, str]:
        """It is about no run of its own."""
        return "the model as given", "calling it"

    def do(self, target: Target, send: Send, receive: Receive) -> None:
        """Send what it raised, if it did."""
        with faults_sent("calling the model as given", send), prepared_for(self, target) as ready:
            send(TaskAnswer.of(called_as_given(in_eager_mode(ready, target), target, self.seed)))


MIXED_DTYPES = MixedDtypesTrials()
