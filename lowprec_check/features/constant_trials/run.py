"""Adds to a run that fails what it gives with numbers that its dtype holds for its constants."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from lowprec_check.analysis.error_shares import CAST_INPUT
from lowprec_check.core.feature_hooks import Explained, Feature
from lowprec_check.core.judged_trials import SHARE, JudgedTrials, fails_first_call, trials_of
from lowprec_check.core.preparation import in_fp32
from lowprec_check.core.trace.dispatched_call import DispatchedCall, vanishes_in
from lowprec_check.core.trace.instrument import fp32_state
from lowprec_check.engine.model.streamed_weights import is_in_memory
from lowprec_check.process import system
from lowprec_check.schema.measures import ConstantTrial, VanishedConstant
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.torchkit.dispatch_mode import AutocastKeys, DispatchMode
from lowprec_check.torchkit.floating_dtypes import torch_dtype
from lowprec_check.torchkit.made_tensors import tensor_being_made
from lowprec_check.torchkit.source_location import ModuleStack, source_lines

MOST_CONSTANTS = 12  # the first that are called; of each, one run shows whether it matters


class ConstantTrials:
    """Runs of one model with other numbers for constants that are zero in a dtype."""

    def __init__(self, trials: JudgedTrials, dtype: torch.dtype, seconds: float) -> None:
        self._trials, self._dtype, self._seconds = trials, dtype, seconds
        self._started, self._made = system.monotonic(), 0

    def of_run(self, constants: Sequence[VanishedConstant]) -> ConstantTrial | None:
        """The run with other numbers for the fewest of ``constants`` with which it fails less.

        ``None`` if it raises, or if time is short. If it fails as before, the trial is of all.
        """
        # The smallest number with all its digits is written most easily. Where it is too large, the
        # smallest number of all may do.
        limits = torch.finfo(self._dtype)
        trials = [self._tried(constants, limits.tiny)]
        if trials[0] is not None and trials[0].status != "ok":
            trials.append(self._tried(constants, limits.tiny * limits.eps))
        best = min(filter(None, trials), key=lambda trial: _BADNESS[trial.status], default=None)
        if best is None or best.status not in ("ok", "inaccurate"):
            return best
        for constant in constants:
            fewer = [other for other in best.constants if other != constant]
            without = None
            if fewer:
                without = self._tried(fewer, best.number)
            if without is not None and without.status == best.status:
                best = without
        return best

    def of_fp32(self, constants: Sequence[VanishedConstant]) -> ConstantTrial | None:
        """The fp32 model with other numbers for those of ``constants`` that spoil it as zeros.

        ``None`` if none does, or if it then does not pass.
        """
        alone = [(constant, self._tried([constant], 0.0)) for constant in constants]
        harmful = [constant for constant, trial in alone if trial is not None and trial.status != "ok"]
        if not harmful:
            return None
        trial = self._tried(harmful, torch.finfo(self._dtype).tiny)
        if trial is None or trial.status != "ok":
            return None
        return msgspec.structs.replace(trial, in_fp32=True)

    def _tried(self, replaced: Sequence[VanishedConstant], number: float) -> ConstantTrial | None:
        if self._made and (system.monotonic() - self._started) * (self._made + 1) / self._made > self._seconds:
            return None
        model = self._trials.ready.model
        with ModuleStack(model) as stack, _weights_of(model, replaced, number):
            judged = self._trials.judged(_Replacing(stack, replaced, number, self._dtype))
        self._trials.snapshot.rewind()
        self._made += 1
        if judged is None:
            return None
        return ConstantTrial(constants=list(replaced), number=number, status=judged[0], rel_l2=judged[1])


@contextlib.contextmanager
def _weights_of(model: nn.Module, replaced: Sequence[VanishedConstant], number: float) -> Iterator[None]:
    """``number`` in the place of those that are weights of the model."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    paths = [".".join(filter(None, (c.module, c.weight))) for c in replaced if c.weight is not None]
    with contextlib.ExitStack() as changed:
        for tensor in [tensors[path] for path in paths if path in tensors]:
            changed.callback(setattr, tensor, "data", tensor.data)
            tensor.data = torch.full_like(tensor.data, number).copysign(tensor.data)
        yield


_BADNESS = {"ok": 0, "inaccurate": 1, "nonfinite": 2, "unjudged": 3}


class _Replacing(DispatchMode):
    """Runs ops as given, but with another number for some constants."""

    def __init__(
        self, stack: ModuleStack, replaced: Sequence[VanishedConstant], number: float, low: torch.dtype
    ) -> None:
        super().__init__()
        self._stack, self._number, self._low = stack, number, low
        self._replaced = {_as_fp32(*constant.place) for constant in replaced if constant.constant is not None}

    def handle(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], keys: AutocastKeys) -> Any:
        """Return the result of the op."""
        call = DispatchedCall(func, args, kwargs, keys)
        if call.traits.casts or call.traits.packet == "aten::lift_fresh":
            # The tensor ``out`` that it made or cast, with the number where constants became zero.
            out = call.run()
            constant, values = None, call.inputs[0]
            if call.traits.casts:
                constant = call.vanished_constant([out])
            else:
                made = tensor_being_made()
                exact = None if made is None else made.in_dtype(torch.float64)
                if exact is not None and exact.shape == out.shape:
                    values = exact
                    constant = next(iter(exact[vanishes_in(self._low, exact)].tolist()), None)
            source = source_lines(sys._getframe(1)).source
            if constant is not None and _as_fp32(self._stack.current, source, constant) in self._replaced:
                numbers = torch.full_like(values, self._number).copysign(values)
                out.copy_(torch.where(vanishes_in(self._low, values), numbers, values))
            return out
        if not call.traits.number_slots:
            return call.run()
        # The dtype in which it takes numbers is that of its result, or of what it writes to.
        out, outputs = None, list(call.written())
        if not call.traits.mutable:
            out = call.run()
            outputs = call.results(out)
        constant, source = call.vanished_constant(outputs, self._low), source_lines(sys._getframe(1)).source
        if constant is not None and _as_fp32(self._stack.current, source, constant) in self._replaced:
            call.args, call.kwargs = call.with_number(outputs, self._number, self._low)
        elif not call.traits.mutable:
            return out
        return call.run()


def _as_fp32(module: str, source: str | None, constant: float | None) -> tuple[str, str | None, str]:
    """A place, with the number as it is if a tensor in fp32 holds it."""
    return module, source, f"{constant:.6g}"


def vanished_constants(rows: Iterable[OpCall], weights: Mapping[str, Tensor]) -> list[VanishedConstant]:
    """The constants that are zero in op calls of a forward pass, in the order of the calls.

    ``weights``: the parameters and buffers before their cast; those of one value are constants.
    """
    constants: dict[VanishedConstant, None] = {}
    for row in rows:
        if row.vanished is not None and row.is_forward:
            constants[VanishedConstant(module=row.module, source=row.source, constant=row.vanished)] = None
            continue
        is_weight = row.op.startswith("cast ") and not row.op.startswith(CAST_INPUT)
        if is_weight and row.flushed == 1.0:
            weight = row.op.removeprefix("cast ")
            values = weights.get(".".join(filter(None, (row.module, weight))))
            if values is not None and is_in_memory(values) and bool((values == values.flatten()[0]).all()):
                constants[VanishedConstant(module=row.module, constant=None, weight=weight)] = None
    return list(constants)[:MOST_CONSTANTS]


class ConstantTrialsFeature(Feature):
    """A run again, with other constants."""

    place = 5

    def after_explanation(self, explained: Explained) -> None:
        """Try it, if the first call of an eager run gives wrong values."""
        task, run = explained.task, explained.report.run
        if not fails_first_call(explained):
            return
        constants = vanished_constants(run.op_calls.rows(), fp32_state(explained.target.model))
        if not constants:
            return
        dtype, seconds = torch_dtype(PRECISIONS.get(task.precision).format), SHARE * task.explain_budget
        with trials_of(explained) as trials:
            if trials is None:
                return
            trial = ConstantTrials(trials, dtype, seconds).of_run(constants)
        if trial is not None and trial.status == run.status:
            # Something else is wrong, too: what the constants do alone shows in fp32.
            with trials_of(explained, in_fp32(task)) as trials:
                assert trials is not None
                trial = ConstantTrials(trials, dtype, seconds).of_fp32(constants) or trial
        explained.report.add(constant_trial=trial)


CONSTANT_TRIALS = ConstantTrialsFeature()
