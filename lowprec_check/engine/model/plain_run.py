"""The plain part of a run, which gives status, time and outputs: the model as its user runs it."""

from __future__ import annotations

import contextlib
import math
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from lowprec_check.engine.model.output_measures import compare_by_meaning
from lowprec_check.engine.model.output_tensors import OutputForm, OutputTensors, form_of
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.run_so_far import RunSoFar
from lowprec_check.engine.model.streamed_weights import stream_of
from lowprec_check.engine.model.target import WithLoss
from lowprec_check.engine.model.user_code import reraise_interrupt
from lowprec_check.errors import UsageError, first_line, message_of, one_line, text_of, type_name
from lowprec_check.process import system
from lowprec_check.schema.scan_result import Run
from lowprec_check.schema.verdict import ExceptionInfo, Status
from lowprec_check.torchkit import devices
from lowprec_check.torchkit.compiled import compiled_code_in_eager, compiled_frames
from lowprec_check.torchkit.devices import generator_states, seed_everything
from lowprec_check.torchkit.floating_dtypes import NARROW, is_float
from lowprec_check.torchkit.output_comparison import NOTHING, OutputComparison, is_zero
from lowprec_check.torchkit.pytree import leaves
from lowprec_check.torchkit.source_location import (
    call_model,
    is_own_file,
    module_names,
    show_line,
    traceback_lines,
)


class _Call(NamedTuple):
    """One call, in seconds."""

    seconds: float  # without the time that its threads waited for a core
    by_clock: float
    sets_up: bool
    """Whether it compiled, or imported what the model needs: other calls do not repeat that."""


class CallTimes:
    """Times of at most ``most`` calls of a model in a row.

    There is no further call if all but the first would take longer than ``seconds``, or the fastest
    took longer than ``too_slow`` or ``hopeless``. What threads waited for a core does not count. A
    call that sets something up is followed by one, unless it ``reads_weights``; so is the
    first one where none is ``hopeless``, since an accelerator loads its kernels in it.
    """

    def __init__(
        self, most: int, *, seconds: float, too_slow: float, hopeless: float, reads_weights: bool = False
    ) -> None:
        self._most, self._seconds, self._too_slow, self._hopeless = most, seconds, too_slow, hopeless
        self._reads_weights = reads_weights
        self._calls: list[_Call] = []
        self.begin()

    def begin(self) -> None:
        """A call begins."""
        self._set_up = (compiled_frames(), len(sys.modules))
        self._waits, self._used = system.CoreWaits(), system.thread_time()

    def end(self, seconds: float, *, prepares: bool = False) -> None:
        """It took so many ``seconds``; whether its first one ``prepares`` the model."""
        # A wait shortly before the call counts, too: what its thread has used is the least.
        working = max(seconds - (self._waits.longest() or 0.0), system.thread_time() - self._used)
        sets_up = (prepares and not self._calls) or (compiled_frames(), len(sys.modules)) > self._set_up
        self._calls.append(_Call(min(working, seconds), seconds, sets_up))

    @property
    def count(self) -> int:
        """Number of calls."""
        return len(self._calls)

    @property
    def fastest(self) -> float:
        """Seconds of the fastest call, of those that set nothing up if there are any; else 0."""
        return min((call.seconds for call in self._settled), default=0.0)

    @property
    def fastest_by_clock(self) -> float:
        """The same, with the time that its threads waited for a core."""
        return min((call.by_clock for call in self._settled), default=0.0)

    @property
    def first(self) -> float:
        """Seconds of the first call, and what later ones that set something up took in addition."""
        more = (call.seconds - self.fastest for call in self._calls[1:] if call.sets_up)
        return self._calls[0].seconds + sum(max(0.0, seconds) for seconds in more)

    @property
    def is_hopeless(self) -> bool:
        """Whether no call is fast enough to be worth another one."""
        return bool(self._calls) and self.fastest > self._hopeless

    @property
    def goes_on(self) -> bool:
        """Whether there is to be another call."""
        if not self._calls:
            return True
        last = self._calls[-1]
        # Its time proves nothing about the next call
        if last.sets_up:
            return not self._reads_weights and (self.count == 1 or self.count < self._most)
        # The next call probably takes as long as the last one; the first is not counted
        taken = sum(call.seconds for call in self._calls[1:] if not call.sets_up) + last.seconds
        may_be_fast = self.fastest <= self._too_slow and not self.is_hopeless
        may_be_fast |= self.count == 1 and self._hopeless == math.inf and not self._reads_weights
        return self.count < self._most and may_be_fast and taken <= self._seconds

    @property
    def _settled(self) -> list[_Call]:
        return [call for call in self._calls if not call.sets_up] or self._calls


COMPARED_CALLS = 3
"""Calls in a row whose outputs are compared: a model may fail or drift after its first call."""
_FROM_GOOD_TO_BAD: tuple[Status, ...] = ("ok", "unjudged", "inaccurate", "nonfinite")
_FALLBACK = re.compile(r"fall(ing|s)?[ -]?back.*cpu|fallback from \w+ to cpu", re.IGNORECASE)


class PlainCalls:
    """Calls a model several times in a row, as its user does, and judges each output.

    Nothing is attached or rewound. ``references`` are the outputs of the fp32 run's calls, ``None``
    for the fp32 run itself. With ``prepares``, the first call also prepares the model, so it may
    take longer. ``made`` holds the output of a call to judge in place of any.
    """

    def __init__(
        self,
        ready: Prepared,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        seed: int,
        tolerance: float | None = None,
        references: Sequence[Sequence[Tensor]] | None = None,
        on_call: Callable[[int], None] | None = None,
        prepares: bool = False,
        made: Sequence[Any] = (),
    ) -> None:
        self._ready, self._args, self._kwargs, self._seed, self._made = ready, args, kwargs, seed, made
        self._call: Callable[..., tuple[Any, float]] = run_once
        if made:
            self._call = lambda *_: (made[0], 0.0)
        self._tolerance, self._references = tolerance, references
        self._on_call, self._prepares = on_call, prepares
        # A call then reads all weights, which is not repeated to find out what the first one set up
        self._streams = stream_of(ready.model) is not None
        self.outputs: list[OutputTensors] = []
        """The leaves of the outputs, one list per call."""
        self.warnings: list[warnings.WarningMessage] = []
        """What was warned of in the calls."""

    def run(
        self,
        begun: RunSoFar,
        *,
        seconds: float,
        too_slow: float = math.inf,
        hopeless: float = math.inf,
        until_failed: bool = False,
    ) -> RunSoFar:
        """Call the model :data:`COMPARED_CALLS` times, within limits and until a call raises.

        Return ``begun`` with the verdict on the calls.
        """
        seed_everything(self._seed)
        before, frames = generator_states(), compiled_frames()
        most = len(self._made) or (COMPARED_CALLS if self._references is None else len(self._references))
        times = CallTimes(most, seconds=seconds, too_slow=too_slow, hopeless=hopeless, reads_weights=self._streams)
        drew, loss, failed = False, None, False
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            try:
                while times.goes_on and not failed:
                    if self._on_call is not None:
                        self._on_call(times.count + 1)
                    times.begin()
                    output, last = self._call(self._ready, self._args, self._kwargs, self._seed)
                    times.end(last, prepares=self._prepares)
                    drew = drew or generator_states() != before
                    if loss is None and isinstance(output, WithLoss) and math.isfinite(value := float(output.loss)):
                        loss = value
                    # Copies: the model may write to its output in the next call
                    self.outputs.append(output_tensors(output).mapped(Tensor.clone))
                    del output
                    if until_failed and not drew and self._references is not None:
                        reference = self._references[times.count - 1]
                        failed = judge(self.outputs[-1], reference, self._tolerance)[0] in ("inaccurate", "nonfinite")
            except BaseException as error:
                reraise_interrupt(error)
                number = times.count + 1
                run = msgspec.structs.replace(
                    begun.run,
                    status="error",
                    exception=describe_error(error, self._ready.model),
                    calls=number,
                    failed_call=number if number > 1 else None,
                )
                return msgspec.structs.replace(begun, run=run, is_judged=True, seconds=times.fastest)
        self.warnings = list(caught)
        floating = [tensor for tensor in self.outputs[0] if is_float(tensor) and tensor.numel()]
        messages = [text_of(warning.message) for warning in caught]
        run = msgspec.structs.replace(
            begun.run,
            status="ok",
            random=drew,
            compiled=compiled_frames() > frames,
            fallbacks=list(dict.fromkeys(first_line(message) for message in messages if _FALLBACK.search(message))),
            loss=loss,
            output_is_zero=bool(floating) and all(map(is_zero, floating)),
            calls=times.count,
            failed_call=None,
            judged_by_one_call=times.is_hopeless,
        )
        if self._references is not None:
            run = judged(run, self.outputs, self._references, self._tolerance)
        return msgspec.structs.replace(
            begun,
            run=run,
            is_judged=True,
            seconds=times.fastest,
            seconds_by_clock=times.fastest_by_clock,
            first_seconds=times.first,
            draws=True if drew else None,
        )


def run_once(ready: Prepared, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int) -> tuple[Any, float]:
    """One seeded call on fresh inputs: the output and its seconds."""
    seed_everything(seed)
    return call_once(ready, *ready.inputs(args, kwargs))


def call_once(ready: Prepared, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, float]:
    """One call on inputs as they are: the output and its seconds."""
    with ready.context():
        return devices.timed(ready.device, call_model, ready.call, args, kwargs)


def describe_error(error: BaseException, model: nn.Module) -> ExceptionInfo:
    """Type, message and place of the exception; of a compiler's, that of what it failed on."""
    traced = getattr(error, "real_stack", None) or ()
    # Compilers of torch wrap exceptions around what they failed on, with its message
    while type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        inner = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
        if not isinstance(inner, BaseException) or first_line(message_of(inner)) not in message_of(error):
            break
        error = inner
    # The innermost module whose method is on the stack
    names = {id(module): name for name, module in model.named_modules()}
    module, traceback = None, error.__traceback__
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        if type(owner) is type(model) and id(owner) not in names:  # a copy that a backend made
            names |= {id(module): name for name, module in owner.named_modules()}
        if owner is not None:
            module = names.get(id(owner), module)
        traceback = traceback.tb_next
    lines = traceback_lines(error.__traceback__)
    at = [show_line(frame.filename, frame.lineno or 0) for frame in traced if is_own_file(frame.filename)]
    return ExceptionInfo(
        type=type_name(error),
        message=first_line(message_of(error)),
        module=module,
        source=lines.source or (at[-1] if at else None),
        caller=lines.caller,
        hint=error.hint if isinstance(error, UsageError) else None,
    )


# -- The verdict on outputs


def judged(
    run: Run,
    outputs: Sequence[Sequence[Tensor]],
    references: Sequence[Sequence[Tensor]],
    tolerance: float | None,
) -> Run:
    """``run`` with the worst verdict over the calls."""
    verdicts = [judge(output, reference, tolerance) for output, reference in zip(outputs, references, strict=False)]
    # Each call is held against the limit of what decides it
    badness = [
        (_FROM_GOOD_TO_BAD.index(status), compared.distance / (compared.limit or 1.0)) for status, compared in verdicts
    ]
    worst = badness.index(max(badness))
    later = verdicts[worst][0] != verdicts[0][0]
    run = msgspec.structs.replace(run, failed_call=worst + 1 if later else None)
    return with_verdict(run, *verdicts[worst], form_of(outputs[0]).paths)


def judge(
    outputs: Sequence[Tensor], reference: Sequence[Tensor], tolerance: float | None
) -> tuple[Status, OutputComparison]:
    """The status of one output compared with fp32's, by what its form means, and the comparison."""
    try:
        low, fp32 = ([tensor.cpu() for tensor in tensors] for tensors in (outputs, reference))
        compared = compare_by_meaning(low, fp32, form_of(reference), tolerance)
    except UsageError:
        raise
    except Exception as error:  # a kind of tensor that torch itself can hardly handle
        note = f"its output could not be compared: {one_line(error)}"
        return "unjudged", OutputComparison(NOTHING, math.inf, note=note, compared=False, limit=tolerance)
    if compared.limit is None:
        compared = compared._replace(limit=tolerance)
    if compared.nonfinite:
        return "nonfinite", compared
    if not compared.compared:
        return "unjudged", compared
    # Not `>`: a distance may be NaN
    if compared.limit is not None and not compared.distance <= compared.limit:
        return "inaccurate", compared
    return "ok", compared


def with_verdict(run: Run, status: Status, compared: OutputComparison, paths: Sequence[str] = ()) -> Run:
    """Return ``run`` with another verdict on its output, of which ``paths`` name the tensors."""
    path = None
    if compared.leaf is not None and len(paths) > 1:
        path = paths[compared.leaf] or "0"  # of an output and its loss
    rms = compared.rms
    if rms is not None and not math.isfinite(rms):  # JSON cannot hold it
        rms = None
    return msgspec.structs.replace(
        run,
        status=status,
        tolerance=run.tolerance if compared.limit is None else compared.limit,
        output_error=compared.error if compared.compared else None,
        output_rms=rms,
        compared_output=path,
        notes=[*run.notes, *filter(None, [compared.note])],
    )


# -- The tensors of an output


def output_tensors(output: Any) -> OutputTensors:
    """The tensors of an output, detached and dense; also of its numbers and NumPy arrays."""
    named = named_output_tensors(output)
    paths = [path for path, _ in named]
    if isinstance(output, WithLoss):
        output = output.output
        paths = ["loss" if path == "1" else path.removeprefix("0").removeprefix(".") for path in paths]
    form = OutputForm(type(output).__name__, tuple(paths))
    return OutputTensors((tensor for _, tensor in named), form)


def named_output_tensors(output: Any) -> list[tuple[str, Tensor]]:
    """Like :func:`output_tensors`, each with its path in the output, ``logits.0``."""
    return [(path, part) for path, tensor in leaves(output, numbers=True) for part in _dense(tensor.detach())]


class OutputPart(NamedTuple):
    """One of :func:`output_tensors`, and what it was made of."""

    tensor: Tensor
    leaf: Tensor
    """The tensor in the output; of a NumPy array, one that shares its memory."""
    is_own: bool
    """Whether the model returned ``leaf`` itself, as a tensor."""


def output_parts(output: Any) -> Iterator[OutputPart]:
    """Each of :func:`output_tensors`, with what it was made of."""
    own = {id(tensor) for _, tensor in leaves(output)}
    for _, leaf in leaves(output, numbers=True, shared=True):
        for part in _dense(leaf.detach()):
            yield OutputPart(part, leaf, id(leaf) in own)


def _dense(tensor: Tensor) -> list[Tensor]:
    """``tensor`` as strided tensors of dtypes that can be compared."""
    if tensor.is_nested:
        return [part for item in tensor.unbind() for part in _dense(item)]
    if tensor.layout != torch.strided:
        return [tensor.to_dense()]
    if tensor.dtype in NARROW - {torch.half, torch.bfloat16}:  # 8 bits: few kernels support them
        return [tensor.float()]
    return [tensor if type(tensor) is Tensor else tensor.as_subclass(Tensor)]


# -- The output of one module, for a model whose own has nothing to compare: zeros, ``None``, a text


class ModuleOutput(NamedTuple):
    """The floating output of one call of a module."""

    module: str
    number: int
    """Which call of that module, counted from 1."""
    tensors: list[Tensor]


def last_informative_module(ready: Prepared, args: Any, kwargs: Any, seed: int) -> ModuleOutput | None:
    """The last module call whose output is floating, finite and not all zeros; else ``None``."""
    last = None

    def keep_last(name: str, number: int, output: Any) -> None:
        nonlocal last
        tensors = _floating(output)
        if tensors and all(bool(t.isfinite().all()) for t in tensors) and not all(map(is_zero, tensors)):
            last = ModuleOutput(name, number, tensors)

    with _on_every_call(ready.model, keep_last):
        run_once(ready, args, kwargs, seed)
    return last


def module_output(ready: Prepared, args: Any, kwargs: Any, seed: int, wanted: ModuleOutput) -> list[Tensor] | None:
    """The output of the same call of the same module as ``wanted``; ``None`` if there is none."""
    tensors = None

    def keep_wanted(name: str, number: int, output: Any) -> None:
        nonlocal tensors
        if (name, number) == (wanted.module, wanted.number):
            tensors = _floating(output)

    with _on_every_call(ready.model, keep_wanted):
        run_once(ready, args, kwargs, seed)
    return tensors


@contextlib.contextmanager
def kept_output(model: nn.Module, wanted: ModuleOutput | None) -> Iterator[list[OutputPart]]:
    """Yield a list that gets the tensors of the same call as ``wanted``, not copies of them."""
    parts: list[OutputPart] = []

    def keep_wanted(name: str, number: int, output: Any) -> None:
        if wanted is not None and (name, number) == (wanted.module, wanted.number):
            parts.extend(part for part in output_parts(output) if is_float(part.tensor) and part.tensor.numel())

    if wanted is None:
        yield parts
        return
    with _on_every_call(model, keep_wanted):
        yield parts


@contextlib.contextmanager
def _on_every_call(model: nn.Module, report: Any) -> Iterator[None]:
    """Call ``report(name, number, output)`` after every call of a submodule."""
    names, calls = module_names(model), Counter[str]()

    def hook(module: nn.Module, _inputs: Any, output: Any) -> None:
        name = names.get(module)
        if name:
            calls[name] += 1
            report(name, calls[name], output)

    # A hook for all modules, since own hooks would take modules off their fast paths
    handle = register_module_forward_hook(hook)
    try:
        with compiled_code_in_eager():
            yield
    finally:
        handle.remove()


def _floating(output: Any) -> list[Tensor]:
    return [tensor.clone() for tensor in output_tensors(output) if is_float(tensor) and tensor.numel()]
