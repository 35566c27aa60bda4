"""Adds to a run that fails what it gives with numbers that its dtype holds for its constants."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from lowprec_check.analysis.error_shares import CAST_INPUT
from lowprec_check.core.feature_hooks import Explained, Feature
from lowprec_check.core.plain_part import Fp32Outputs
from lowprec_check.core.preparation import in_eager_mode, in_fp32, prepared_for
from lowprec_check.core.trace.dispatched_call import DispatchedCall, vanishes_in
from lowprec_check.core.trace.instrument import call_under, fp32_state
from lowprec_check.engine.model.plain_run import judge, output_tensors
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.engine.model.streamed_weights import is_in_memory
from lowprec_check.process import system
from lowprec_check.schema.measures import ConstantTrial, VanishedConstant
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import EAGER
from lowprec_check.torchkit.dispatch_mode import AutocastKeys, DispatchMode
from lowprec_check.torchkit.floating_dtypes import torch_dtype
from lowprec_check.torchkit.made_tensors import tensor_being_made
from lowprec_check.torchkit.source_location import ModuleStack, source_lines

MOST_CONSTANTS = 12  # the first that are called; of each, one run shows whether it matters


class ConstantTrials:
    """Runs of one model with other numbers for constants that are zero in a dtype."""

    def __init__(
        self,
        ready: Prepared,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dtype: torch.dtype,
        fp32: Sequence[Tensor],
        *,
        tolerance: float,
        seed: int,
        seconds: float,
    ) -> None:
        self._ready, self._inputs, self._dtype, self._fp32 = ready, (args, kwargs), dtype, fp32
        self._tolerance, self._seed, self._seconds = tolerance, seed, seconds
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
        ready, snapshot = self._ready, Snapshot(self._ready.model, self._inputs)
        try:
            with ModuleStack(ready.model) as stack, _weights_of(ready.model, replaced, number):
                mode = _Replacing(stack, replaced, number, self._dtype)
                output, error = call_under(mode, ready, *ready.inputs(*self._inputs), self._seed)
        finally:
            snapshot.restore()
        self._made += 1
        if error is not None:
            return None
        status, compared = judge(output_tensors(output), self._fp32, self._tolerance)
        rel_l2 = compared.error.rel_l2
        if rel_l2 is not None and not math.isfinite(rel_l2):
            rel_l2 = None
        return ConstantTrial(constants=list(replaced), number=number, status=status, rel_l2=rel_l2)


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
            call.args, call.kwargs = call.with_numbers(outputs, self._instead, self._low)
        elif not call.traits.mutable:
            return out
        return call.run()

    def _instead(self, constant: float) -> float:
        return math.copysign(self._number, constant)


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
        task, target, report = explained.task, explained.target, explained.report
        run = report.run
        if task.is_reference or not task.mode.is_forward or task.backend != EAGER or run.failed_call is not None:
            return
        seconds = task.explain_budget / 4
        if run.status not in ("nonfinite", "inaccurate") or (run.latency_ms or 0.0) / 1e3 > seconds:
            return
        constants = vanished_constants(run.op_calls.rows(), fp32_state(target.model))
        if not constants:
            return
        saved = Fp32Outputs.load(task.files, target)
        if saved.probe is not None:
            return
        fp32, dtype = saved.outputs[0], torch_dtype(PRECISIONS.get(task.precision).format)
        limits: Any = {
            "tolerance": task.tolerance or 0.0,
            "seed": task.seed,
            "seconds": seconds,
        }
        with prepared_for(task, target) as ready:
            eager = in_eager_mode(ready, target)
            trial = ConstantTrials(eager, target.args, target.kwargs, dtype, fp32, **limits).of_run(constants)
        if trial is not None and trial.status == run.status:
            # Something else is wrong, too: what the constants do alone shows in fp32.
            with prepared_for(in_fp32(task), target) as ready:
                eager = in_eager_mode(ready, target)
                alone = ConstantTrials(eager, target.args, target.kwargs, dtype, fp32, **limits).of_fp32(constants)
            trial = alone or trial
        report.add(constant_trial=trial)


CONSTANT_TRIALS = ConstantTrialsFeature()
