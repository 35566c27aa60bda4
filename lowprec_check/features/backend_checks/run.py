"""Compares a backend, or what the user compiled, with eager mode in the worker of its run."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from torch import Tensor

from lowprec_check.core.feature_hooks import Feature, Measurement
from lowprec_check.core.messages import Started
from lowprec_check.core.plain_part import RANDOM, SLOW, PlainPart
from lowprec_check.core.preparation import in_eager_mode
from lowprec_check.engine.model.input_draws import changed_inputs
from lowprec_check.engine.model.plain_run import describe_error, judge, with_verdict
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.run_so_far import RunSoFar
from lowprec_check.errors import text_of
from lowprec_check.features.backend_checks.compiler_checker import (
    MORE_CALLS,
    CompilerChecker,
    distances,
    inputs_like,
    worst,
)
from lowprec_check.process import system
from lowprec_check.schema.axes import BACKENDS, Call
from lowprec_check.schema.backend_checks import BackendCheck, ChangedInputs, CompilerRemark, InputChange, StateChanged
from lowprec_check.torchkit.compiled import compiled_code_in_eager, graph_breaks
from lowprec_check.torchkit.devices import seed_everything
from lowprec_check.torchkit.output_comparison import is_finite
from lowprec_check.torchkit.pytree import leaves
from lowprec_check.torchkit.source_location import call_model, is_user_code, show_line

SHARE = 0.25
"""The part of the budget of a call after which no more changed inputs are tried."""
SECONDS_TO_COMPILE = 30.0
"""A larger batch, for which a compiler may compile again, is tried if the first call took less."""
STATE_CALLS = 2
"""Calls after which inputs and buffers are compared."""
_IN_RANGE: tuple[InputChange, ...] = ("reversed", "larger-batch")
"""Tried on a backend that quantizes: other values may leave the range it was calibrated for."""


class BackendChecker:
    """Compares the call of ``checker`` with eager mode; ``plain`` is what its calls showed."""

    def __init__(self, checker: CompilerChecker, plain: RunSoFar, *, quantizes: bool) -> None:
        self._checker, self._plain, self._quantizes = checker, plain.run, quantizes
        self._first_seconds = plain.first_seconds
        self._task, self._target, self._ready = checker.task, checker.target, checker.ready
        self._eager = in_eager_mode(self._ready, self._target)
        self.observed, self.result = BackendCheck(), plain.run
        """What is known so far; and the run, with the verdict on changed inputs if some fail."""

    def check(self, caught: Sequence[warnings.WarningMessage], on_input: Callable[[InputChange], Any]) -> None:
        """Set :attr:`observed` and :attr:`result`; ``caught`` is from calls on the backend."""
        breaks = [
            CompilerRemark(kind="graph-break", text=text, source=line) for text, line in dict.fromkeys(graph_breaks())
        ]
        # Of a run that fails, there is only what the compiler said.
        if self._plain.status != "ok":
            self._add(remarks=_counted([*_warnings(caught, None), *breaks]))
            return
        # Noted before eager mode is called, which may fail where the backend does not.
        self._add(remarks=_counted(breaks))
        inputs = self._target.inputs
        with warnings.catch_warnings(record=True) as caught_in_eager:
            warnings.simplefilter("default")
            eager = self._checker.outputs(self._eager, inputs, in_eager=True)
        of_eager = {text_of(warning.message) for warning in caught_in_eager}
        self._add(remarks=_counted([*_warnings(caught, of_eager), *breaks]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled = self._checker.outputs(self._ready, inputs)
            kinds = ([str(t.dtype).removeprefix("torch.") for t in pair] for pair in zip(eager, compiled, strict=False))
            self._add(dtypes=list(dict.fromkeys((a, b) for a, b in kinds if a != b)))
            if self._plain.random and judge(compiled, eager, self._task.tolerance)[0] != "ok":
                self._add(reason=RANDOM)
                return

            # Inputs and buffers that differ after calls in eager mode and on the backend.
            with compiled_code_in_eager():
                expected = self._state_after_calls(self._eager)
            after = self._state_after_calls(self._ready)
            both = [name for name, tensor in expected.items() if name in after and after[name].shape == tensor.shape]
            statuses = {name: judge([after[name]], [expected[name]], self._task.tolerance)[0] for name in both}
            self._add(changed=[name for name, status in statuses.items() if status not in ("ok", "unjudged")])
            # Changed inputs, until the run fails on one or time is up; waiting for a core is free.
            started, waits, limit = system.monotonic(), system.CoreWaits(), SHARE * self._task.call_budget
            for change, call in changed_inputs(self._target, self._task.seed):
                if self._quantizes and change not in _IN_RANGE:
                    continue
                compiles = change == "larger-batch" and self._first_seconds > SECONDS_TO_COMPILE
                if compiles or system.monotonic() - started - (waits.longest() or 0.0) > limit:
                    self._add(reason=SLOW)
                elif self.result is self._plain:
                    self._try(change, call, on_input)

    def _add(self, **observations: Any) -> None:
        self.observed = msgspec.structs.replace(self.observed, **observations)

    def _state_after_calls(self, ready: Prepared) -> dict[str, Tensor]:
        self._checker.rewind()
        for _ in range(STATE_CALLS):
            seed_everything(self._task.seed)
            args, kwargs = ready.inputs(*self._target.inputs)
            with ready.context():
                call_model(ready.call, args, kwargs)
        inputs = {f"input {path}": tensor for path, tensor in (*leaves(args), *leaves(kwargs))}
        buffers = {f"buffer {name}": buffer for name, buffer in ready.model.named_buffers()}
        return {name: tensor.detach().cpu().clone() for name, tensor in (inputs | buffers).items()}

    def _try(self, change: InputChange, call: Call, on_input: Callable[[InputChange], Any]) -> None:
        """Compare on one call, unless eager mode fails on it, or gives NaN or Inf."""
        try:
            eager = self._checker.outputs(self._eager, call, in_eager=True)
        except Exception:
            return
        if not all(map(is_finite, eager)):
            return
        on_input(change)
        replace = msgspec.structs.replace
        failed = replace(self._plain, failed_input=change, failed_call=None)
        try:
            compiled = self._checker.outputs(self._ready, call)
        except Exception as error:
            self._add(inputs=[*self.observed.inputs, ChangedInputs(change=change, status="error")])
            # The model was not prepared for a larger batch, as the exception says.
            if change != "larger-batch":
                raised = describe_error(error, self._ready.model)
                self.result = replace(failed, status="error", exception=raised, output_error=None)
            return
        status, compared = judge(compiled, eager, self._task.tolerance)
        tried = ChangedInputs(change=change, status=status, error=compared.error.distance)
        if status not in ("ok", "unjudged"):
            is_worse, eager_error = self._is_worse(call, compiled)
            if is_worse:
                self.result = with_verdict(failed, status, compared)
            tried = replace(tried, status=status if is_worse else "ok", eager_error=eager_error)
        self._add(inputs=[*self.observed.inputs, tried])

    def _is_worse(self, call: Call, compiled: list[Tensor]) -> tuple[bool, float | None]:
        """Whether ``compiled`` is further from fp64 than eager mode, and the error of eager."""
        slack, end = self._task.tolerance or 0.0, system.monotonic() + self._checker.seconds
        comparable = []
        corners = self._checker.corners(call)
        if corners is not None:
            corners = corners._replace(compiled=compiled)
            if corners.match():
                comparable = [corners]
        # Inputs near by must confirm a larger error, as for CompilerCheck.
        for number in range(1, MORE_CALLS + 1):
            is_settled = not comparable or worst(distances(comparable), slack).verdict(slack) != "worse"
            if is_settled or system.monotonic() > end:
                break
            more = self._checker.corners(inputs_like(call, number))
            if more is not None:
                comparable.append(more)
        # What cannot be compared with fp64 counts as worse.
        if not comparable:
            return True, None
        distance = worst(distances(comparable), slack)
        return distance.verdict(slack) == "worse", distance.error(distance.eager)


# -- What a compiler says


def _warnings(caught: Sequence[warnings.WarningMessage], of_eager: set[str] | None) -> list[CompilerRemark]:
    """Those of tracing, and those of code outside torch that eager mode does not give."""
    remarks = []
    for warning in caught:
        text = text_of(warning.message)
        if issubclass(warning.category, StateChanged):
            remarks.append(CompilerRemark(kind="state", text=text))
            continue
        is_new = of_eager is not None and text not in of_eager and is_user_code(warning.filename)
        if warning.category.__name__ == "TracerWarning" or is_new:
            line = show_line(warning.filename, warning.lineno)
            first_sentence = text.strip().partition("\n")[0].partition(". ")[0].rstrip(".")
            remarks.append(CompilerRemark(kind="warning", text=first_sentence, source=line))
    return remarks


def _counted(remarks: Sequence[CompilerRemark]) -> list[CompilerRemark]:
    """Each once, with how often it is given."""
    return [msgspec.structs.replace(remark, count=count) for remark, count in Counter(remarks).items()]


def check_backend(part: PlainPart) -> None:
    """Report how the backend differs from eager mode; the verdict, if changed inputs fail."""
    task, report, so_far = part.task, part.report, part.report.so_far
    if not part.is_compiled or so_far.failed or not task.measured:
        return
    if part.too_slow:
        report.add(backend_check=BackendCheck(reason=SLOW))
        return

    def start(change: InputChange) -> None:
        """If the worker ends now, the run fails on changed inputs."""
        failed = msgspec.structs.replace(report.run, failed_input=change)
        late = None
        if change != "larger-batch":  # it may compile for any time
            late = msgspec.structs.replace(failed, status="timeout")
        crashed = msgspec.structs.replace(failed, status="crashed")
        report.send(Started(seconds=task.measure_budget, if_crashed=crashed, if_late=late))

    quantizes = BACKENDS.get(task.backend).lowers_precision
    checker = BackendChecker(_compiler_checker(part), so_far, quantizes=quantizes)
    try:
        checker.check(part.warnings, start)
    finally:
        report.replace_run(msgspec.structs.replace(checker.result, backend_check=checker.observed))


def check_compiler(part: PlainPart) -> None:
    """Report whether the compiler made the output worse, if it is compiled and not random."""
    task, report = part.task, part.report
    compiled = part.is_compiled and not BACKENDS.get(task.backend).lowers_precision and task.evidence == "measured"
    if compiled and part.outputs and not (report.run.random or part.too_slow or task.keep_fp32):
        # In a run that passes it is a warning, which is not worth a minute of search.
        explained = task.explains_all or report.run.status != "ok"
        checker = _compiler_checker(part)
        # Each is reported, in case time is too short for what follows.
        for check in checker.checks(explained=explained):
            report.add(compiler=check)
        last_check = report.run.compiler
        if explained and last_check is not None and last_check.verdict == "worse":
            report.send(Started(seconds=task.measure_budget, doing="bisecting the compiler"))
            report.add(compiler=msgspec.structs.replace(last_check, culprit=checker.bisect()))


def _compiler_checker(part: PlainPart) -> CompilerChecker:
    return CompilerChecker(part.task, part.target, part.ready, part.rewind, by_dynamo=part.report.run.compiled)


class BackendChecks(Feature):
    """The checks of a backend."""

    measurements = (
        Measurement(10, "comparing with eager mode", check_backend),
        Measurement(40, "checking the compiler", check_compiler),
    )


BACKEND_CHECKS = BackendChecks()
