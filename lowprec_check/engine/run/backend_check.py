"""Does a backend do what the model does in eager mode? On changed inputs, to inputs and buffers; in
which dtypes, and with what warnings.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from torch import Tensor

from lowprec_check.engine.core.compiled import compiled_code_in_eager, graph_breaks
from lowprec_check.engine.core.devices import seed_everything
from lowprec_check.engine.core.output_comparison import is_finite
from lowprec_check.engine.core.pytree import leaves
from lowprec_check.engine.core.source_location import call_model, is_user_code, show_line
from lowprec_check.engine.model.input_draws import changed_inputs
from lowprec_check.engine.model.plain_run import PlainResult, describe_error, judge, with_verdict
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.run.compiler_check import MORE_CALLS, CompilerChecker, distances, inputs_like, worst
from lowprec_check.engine.run.margin_part import RANDOM, SLOW
from lowprec_check.engine.run.preparation import in_eager_mode
from lowprec_check.errors import text_of
from lowprec_check.process import system
from lowprec_check.schema.axes import Call
from lowprec_check.schema.backend_checks import (
    BackendCheck,
    ChangedInputs,
    CompilerRemark,
    InputChange,
    StateChanged,
)

SHARE = 0.25
"""The part of the budget of a call after which no more changed inputs are tried."""

SECONDS_TO_COMPILE = 30.0
"""A larger batch, for which a compiler may compile again, is tried if the first call took less."""

STATE_CALLS = 2
"""Calls after which inputs and buffers are compared."""

_IN_RANGE: tuple[InputChange, ...] = ("reversed", "larger-batch")
"""What a backend that quantizes is tried on: other values may leave the range that it was
calibrated for.
"""


class BackendChecker:
    """Compares the call of ``checker`` with eager mode in the same precision; ``plain`` is the
    result of the plain part.
    """

    def __init__(self, checker: CompilerChecker, plain: PlainResult, *, quantizes: bool) -> None:
        self._checker, self._plain, self._quantizes = checker, plain, quantizes
        self._task, self._target, self._ready = checker.task, checker.target, checker.ready
        self._eager = in_eager_mode(self._ready, self._target)
        self.found, self.result = BackendCheck(), plain
        """What is known so far, and the result with the verdict on changed inputs, if the run fails
        on some.
        """

    def check(self, given: Sequence[warnings.WarningMessage], on_input: Callable[[InputChange], Any]) -> None:
        """Set :attr:`found` and :attr:`result`; of a run that fails, with what the compiler said
        only.

        ``given`` are the warnings of the calls on the backend; ``on_input`` gets the name of
        changed inputs before it is called on them.
        """
        breaks = [
            CompilerRemark(kind="graph-break", text=text, source=line) for text, line in dict.fromkeys(graph_breaks())
        ]
        if self._plain.status != "ok":
            self._add(remarks=_counted([*_warnings(given, None), *breaks]))
            return
        self._add(remarks=_counted(breaks))  # eager mode may fail where the backend does not
        inputs = self._target.inputs
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            eager = self._checker.outputs(self._eager, inputs, in_eager=True)
        known = {text_of(warning.message) for warning in caught}
        self._add(remarks=_counted([*_warnings(given, known), *breaks]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled = self._checker.outputs(self._ready, inputs)
            kinds = ([str(t.dtype).removeprefix("torch.") for t in pair] for pair in zip(eager, compiled, strict=False))
            self._add(dtypes=list(dict.fromkeys((a, b) for a, b in kinds if a != b)))
            if self._plain.random and judge(compiled, eager, self._task.tolerance)[0] != "ok":
                self._add(reason=RANDOM)
                return
            self._add(changed=self._changed())
            self._try_changed_inputs(on_input)

    def _add(self, **found: Any) -> None:
        self.found = msgspec.structs.replace(self.found, **found)

    def _changed(self) -> list[str]:
        """The inputs and buffers whose values differ after calls in eager mode and on the backend."""
        with compiled_code_in_eager():
            expected = self._state_after_calls(self._eager)
        after = self._state_after_calls(self._ready)
        both = [name for name, tensor in expected.items() if name in after and after[name].shape == tensor.shape]
        verdicts = {name: judge([after[name]], [expected[name]], self._task.tolerance)[0] for name in both}
        return [name for name, status in verdicts.items() if status not in ("ok", "unjudged")]

    def _state_after_calls(self, ready: Prepared) -> dict[str, Tensor]:
        self._checker.rewind()
        for _ in range(STATE_CALLS):
            seed_everything(self._task.seed)
            args, kwargs = ready.inputs(*self._target.inputs)
            with ready.context():
                call_model(ready.call, args, kwargs)
        given = {f"input {path}": tensor for path, tensor in (*leaves(args), *leaves(kwargs))}
        buffers = {f"buffer {name}": buffer for name, buffer in ready.model.named_buffers()}
        return {name: tensor.detach().cpu().clone() for name, tensor in (given | buffers).items()}

    # -- changed inputs

    def _try_changed_inputs(self, on_input: Callable[[InputChange], Any]) -> None:
        """Until the run fails on one, or there is no time; the time that threads wait for a core
        does not count.
        """
        limit = _seconds_with_core() + SHARE * self._task.call_budget
        for change, call in changed_inputs(self._target, self._task.seed):
            if self._quantizes and change not in _IN_RANGE:
                continue
            compiles = change == "larger-batch" and self._plain.first_seconds > SECONDS_TO_COMPILE
            if compiles or _seconds_with_core() > limit:
                self._add(reason=SLOW)
            elif self.result is self._plain:
                self._try(change, call, on_input)

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
            self._add(inputs=[*self.found.inputs, ChangedInputs(change=change, status="error")])
            if change != "larger-batch":  # for which it was not prepared, as its exception says
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
        self._add(inputs=[*self.found.inputs, tried])

    def _is_worse(self, call: Call, compiled: list[Tensor]) -> tuple[bool, float | None]:
        """Whether the backend, which gave ``compiled``, is further from fp64 than eager mode by
        more than the tolerance, also with inputs near by, as for :class:`CompilerCheck`; and the
        error of eager mode. What cannot be compared with fp64 is worse.
        """
        slack, end = self._task.tolerance or 0.0, system.monotonic() + self._checker.seconds
        corners = self._checker.corners(call)
        if corners is not None:
            corners = corners._replace(compiled=compiled)
        else:
            corners = None
        known = []
        if corners is not None and corners.match():
            known = [corners]
        for number in range(1, MORE_CALLS + 1):
            if not known or worst(distances(known), slack).verdict(slack) != "worse" or system.monotonic() > end:
                break
            more = self._checker.corners(inputs_like(call, number))
            known += [more] if more is not None else []
        if not known:
            return True, None
        found = worst(distances(known), slack)
        return found.verdict(slack) == "worse", found.error(found.eager)


def _seconds_with_core() -> float:
    return system.monotonic() - (system.longest_wait() or 0.0)


# -- What a compiler says


def _warnings(given: Sequence[warnings.WarningMessage], of_eager: set[str] | None) -> list[CompilerRemark]:
    """The warnings of tracing, and those that code other than torch's gives only on the backend:
    with ``of_eager``, which eager mode gives.
    """
    found = []
    for warning in given:
        text = text_of(warning.message)
        if issubclass(warning.category, StateChanged):
            found.append(CompilerRemark(kind="state", text=text))
            continue
        is_new = of_eager is not None and text not in of_eager and is_user_code(warning.filename)
        if warning.category.__name__ == "TracerWarning" or is_new:
            line = show_line(warning.filename, warning.lineno)
            first = text.strip().partition("\n")[0].partition(". ")[0].rstrip(".")
            found.append(CompilerRemark(kind="warning", text=first, source=line))
    return found


def _counted(remarks: Sequence[CompilerRemark]) -> list[CompilerRemark]:
    """Each once, with how often it is given."""
    return [msgspec.structs.replace(remark, count=count) for remark, count in Counter(remarks).items()]
