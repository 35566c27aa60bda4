"""The plain part of training: steps in each way, judged against fp32 runs from other seeds."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from lowprec_check.analysis.run_summary import CLEAR, passes_clearly
from lowprec_check.core.messages import PartFailed, Reporter, Send
from lowprec_check.core.preparation import in_fp32
from lowprec_check.core.tasks import ModelTask
from lowprec_check.core.trace.places import Places
from lowprec_check.core.trace.plain_modes import DrawsDiffer, RecordDraws, ReplayDraws
from lowprec_check.engine.model.plain_run import describe_error
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.model.training import make_optimizer
from lowprec_check.errors import UsageError
from lowprec_check.features.training.advice import FEW
from lowprec_check.features.training.lost_updates import LostUpdateCounter, check_epsilon, lost_buffer_updates
from lowprec_check.features.training.spread import Spread, Trajectory
from lowprec_check.features.training.steps import (
    MAX_SKIPPED,
    Loop,
    StepFailedError,
    TrainingStep,
    Watcher,
    state_bytes,
)
from lowprec_check.features.training.training_reference import (
    MOST,
    FirstGradients,
    GradientComparison,
    Largest,
    LargestGradient,
    TrainingReference,
    TrainingSteps,
    compare_gradients,
    first_loss_under,
    first_step_under,
    in_training,
    suggested_scale,
)
from lowprec_check.features.training.ways.usual import PLAIN, SUGGESTED
from lowprec_check.schema.training import LossScale, TrainingRun, TrainingWay
from lowprec_check.schema.verdict import Status
from lowprec_check.schema.ways_to_train import DEFAULT_SCALE, WAYS, WayToTrain
from lowprec_check.torchkit.compiled import compiled_code_in_eager
from lowprec_check.torchkit.devices import seed_everything
from lowprec_check.torchkit.floating_dtypes import NARROW, underflows
from lowprec_check.torchkit.output_comparison import compare_outputs
from lowprec_check.torchkit.source_location import ModuleStack

STUCK = 0.99
"""The share of lost updates from which on weights that stand still fail, whatever the limits."""


class TrainingPart(TrainingSteps):
    """Trains ``ready`` on ``batches`` in each way of its precision; sends the results."""

    def __init__(
        self,
        task: ModelTask,
        target: Target,
        ready: Prepared,
        report: Reporter,
        batches: Sequence[Target],
        steps: int,
        reference: TrainingReference,
    ) -> None:
        super().__init__(task, target, ready, report, batches, steps)
        self._reference = reference
        self._spread = Spread(reference.base, reference.others, reference.samples, task.tolerance or 0.0)
        self._underflow: dict[str, float] = {}
        """Per way, the share of the gradients' elements that underflow in the first step."""
        self._training = TrainingRun(ways=[])
        self._limit = max(task.budget, 3 * steps * (task.fp32_ms or 0.0) / 1e3)
        """Seconds for the steps of the first way, and for those of all others together."""
        self._seconds = 0.0
        """What the others have taken."""

    @property
    def _compared(self) -> Collection[str]:
        """Those of fp32: a plan with tied weights has copies of some."""
        return self._reference.samples.sizes

    def run(self) -> None:
        """Train in the first way, which gives the run its status."""
        way, watchers = self._ways[0], self._watchers(self._ways[0])
        result, loop = self._train(way, watchers)
        # The error is that of the output and the loss in the first step.
        error = None
        if self.outputs is not None and self._reference.outputs:
            outputs = [tensor.cpu() for tensor in self.outputs[: len(self._reference.outputs)]]
            compared = compare_outputs(outputs, self._reference.outputs)
            if compared.compared:
                error = compared.error
        trajectory = Trajectory() if loop is None else loop.trajectory
        run = msgspec.structs.replace(
            self.report.run,
            status=result.status,
            exception=result.exception,
            output_error=error,
            calls=max(1, trajectory.steps),
            failed_call=result.failed_step if result.failed_step != 1 else None,
            loss=next(reversed(result.losses), None),
        )
        self._add_verdict(run, trajectory.seconds)
        self._add(result, loop, watchers)
        self.explained = explained_way(way, result)
        roundoff = self.ready.precision.format.roundoff
        self.passes_clearly = passes_clearly(run) and not self._spread.divergence(
            trajectory, roundoff, noisy=way.is_random, part=CLEAR
        )
        if result.skipped_steps:
            self.outputs = None

    def compare_ways(self) -> None:
        """Train in the other ways, then with the suggested loss scale; look for a zero ``eps``."""
        ways, usual = self._ways[1:], self._training.ways[0]
        needs_scale = SUGGESTED.suits(self.ready.precision)
        # Where the format is not accelerated, others matter only until one passes; but for a scale
        # for gradients that are lost without one.
        is_slow = self.task.is_hopeless(self.report.so_far)
        is_decided = is_slow and usual.status == "ok"
        if is_decided and PLAIN in ways and self._emulate_gradients():
            self._try_each([PLAIN], None)
            ways = [way for way in ways if way != PLAIN]
        # Together they may take as long as one way: a precision that is slow here is slow in each.
        self._try_each(ways, self._make(self.trained.values()), until_one_passes=is_slow)
        if is_decided and not usual.skipped_steps:
            needs_scale &= any(gradient.underflow >= FEW for gradient in self._training.gradients)
        ran = self._seconds <= self._limit and any(way.status != "error" for way in self._training.ways)
        has_closure = getattr(self.target.optimizer, "takes_closure", False)
        if ran and needs_scale and not has_closure:
            self._try_suggested_scale()
        self._snapshot.rewind()
        parameters = list(self.trained.values())
        if any(p.dtype in NARROW and underflows(p.dtype) for p in parameters):
            self._report(epsilon=check_epsilon(parameters, self._make))

    def _emulate_gradients(self) -> bool:
        """Send the gradients of the first step without a loss scale, computed in fp32 and rounded;
        whether some are not finite.
        """
        self._snapshot.rewind()
        emulated = RecordDraws(emulates=self.ready.application.dtype)
        step = first_step_under(emulated, self.ready, self.target, self.task.seed)
        if not step.gradients or not self._reference.gradients:
            return False
        compared = compare_gradients(step.gradients, self._reference.gradients)
        self._report(**self._gradients_without_scale(compared))
        return any(gradient.overflow for gradient in compared.parameters)

    def _gradients_without_scale(self, compared: GradientComparison) -> dict[str, Any]:
        """The fields of what was ``compared`` in a step without a loss scale."""
        fields = {"gradients": compared.parameters, "gradient_error": compared.error}
        fields["same_draws"] = self._reference.draws
        if underflows(self.ready.application.dtype):
            fields["underflow"] = compared.underflow
        return fields

    def compare_extension(self) -> None:
        """Train in the ways of Intel's extension that the optimizer has; it stays imported here."""
        fitting = [way for way in WAYS if way.trial == "own process" and way.suits(self.ready.precision)]
        self._try_each(fitting, self._make(self.trained.values()))

    def _try_each(self, ways: Sequence[WayToTrain], optimizer: Any, *, until_one_passes: bool = False) -> None:
        for way in ways:
            why = way.why_not(optimizer)
            if until_one_passes and any(tried.status == "ok" for tried in self._training.ways):
                why = f"{self.ready.precision.format.short} is not accelerated here, and another way passes: --thorough"
            if getattr(self.target.optimizer, "is_whole", False) and not way.leaves_weights:
                why = "the script's optimizer is used as it is"
            if why or self._seconds > self._limit:
                untried = {way.name: why or "steps take long here"}
                self._report(untried=self._training.untried | untried)
                continue
            watchers = self._watchers(way)
            try:
                result, loop = self._train(way, watchers)
            except UsageError:
                raise
            except Exception as error:
                if way.trial != "own process":
                    raise
                # An exception of ipex.optimize, before the first step.
                exception = describe_error(error, self.ready.model)
                result, loop = TrainingWay(name=way.name, status="error", exception=exception, failed_step=1), None
            # The run has the memory of the first way.
            if result.status == "ok" and self.report.run.status != "ok":
                result = msgspec.structs.replace(result, peak_memory_bytes=self._peak(way))
            self._add(result, loop, watchers)

    def _make(self, parameters: Any) -> Any:
        return make_optimizer(self.target.optimizer, list(parameters))

    def _watchers(self, way: WayToTrain) -> dict[str, Watcher]:
        """Observe gradients of ``way``, plain or with a loss scale; updates of cast weights."""
        parameters = self.trained
        watchers: dict[str, Watcher] = {}
        if way == PLAIN or way.scale:
            watchers["gradients"] = FirstGradients(parameters)
        is_narrow = any(p.dtype in NARROW for p in parameters.values())
        if way == PLAIN and is_narrow and not getattr(self.target.optimizer, "takes_closure", False):
            # The run itself shows an optimizer that cannot be made.
            with contextlib.suppress(Exception):
                watchers["updates"] = LostUpdateCounter(parameters, self._make)
        return watchers

    def _train(self, way: WayToTrain, watchers: dict[str, Watcher]) -> tuple[TrainingWay, Loop | None]:
        self._snapshot.rewind()
        try:
            step = self._step(way)
        except Exception as error:  # of the optimizer or the average, which fp32 made
            exception = msgspec.structs.replace(describe_error(error, self.ready.model), phase="optimizer")
            return TrainingWay(name=way.name, status="error", exception=exception, failed_step=1), None
        keep = self._keep_outputs if way == self._ways[0] else None
        loop = self._loop(step, self.task.seed, list(watchers.values()), keep)
        try:
            trajectory = loop.run(self.steps, may_continue=lambda seconds: seconds <= self._limit)
        except StepFailedError as failure:
            exception = msgspec.structs.replace(describe_error(failure.error, self.ready.model), phase=step.phase)
            failed_step = loop.trajectory.steps + 1
            return TrainingWay(name=way.name, status="error", exception=exception, failed_step=failed_step), loop
        if way != self._ways[0]:
            self._seconds += sum(trajectory.seconds)
        for fault in loop.faults:
            self.report.send(PartFailed(fault))
        spread = self._spread
        status: Status = "ok"
        divergence, failed = None, None
        finite = [math.isfinite(loss) for loss in trajectory.losses]
        if not all(finite) or trajectory.skipped > MAX_SKIPPED or not trajectory.weights[-1].isfinite().all():
            status = "nonfinite"
            failed = finite.index(False) + 1 if False in finite else trajectory.steps
        else:
            divergence = spread.divergence(trajectory, self.ready.precision.format.roundoff, noisy=way.is_random)
            updates = watchers.get("updates")
            if divergence is None and isinstance(updates, LostUpdateCounter) and (updates.share() or 0.0) >= STUCK:
                lost = [one.name for one in updates.figures() if one.values == "weight" and one.lost >= STUCK]
                divergence = spread.stuck(trajectory, lost)
            if divergence is not None:
                status = "inaccurate"
        result = TrainingWay(
            name=way.name,
            status=status,
            failed_step=failed,
            losses=[loss if math.isfinite(loss) else None for loss in trajectory.losses],
            distances=[distance for distance in spread.distances(trajectory) if math.isfinite(distance)],
            progress=_last(spread.progress(trajectory)),
            moved=_last(spread.moved(trajectory)),
            divergence=divergence,
            skipped_steps=trajectory.skipped,
            scales=trajectory.scales,
            initial_scale=way.scale,
            final_scale=step.scale,
            state_bytes=state_bytes(step.parts),
        )
        return result, loop

    def _add(self, way: TrainingWay, loop: Loop | None, watchers: dict[str, Watcher]) -> None:
        """Send what is known with this way, and what was observed of it."""
        changes: dict[str, Any] = {}
        updates = watchers.get("updates")
        if isinstance(updates, LostUpdateCounter) and loop is not None and way.status != "error":
            way = msgspec.structs.replace(way, lost_updates=updates.share())
            narrow = {name for name, buffer in loop.buffers.items() if buffer.dtype in NARROW}
            buffers = lost_buffer_updates(loop.trajectory, self._reference.base, loop.buffer_samples, narrow)
            changes["lost_updates"] = [*updates.figures(), *buffers]
        gradients = watchers.get("gradients")
        if isinstance(gradients, FirstGradients) and gradients.found and self._reference.gradients:
            compared = compare_gradients(gradients.found, self._reference.gradients)
            self._underflow[way.name] = compared.underflow or 0.0
            if way.name != PLAIN.name:
                lost = {
                    gradient.parameter: gradient.underflow for gradient in compared.parameters if gradient.underflow
                }
                way = msgspec.structs.replace(way, underflow=lost)
            else:
                changes |= self._gradients_without_scale(compared)
        self._report(ways=[*self._training.ways, way], **changes)

    def _report(self, **changes: Any) -> None:
        self._training = msgspec.structs.replace(self._training, **changes)
        self.report.add(training=self._training)

    def _try_suggested_scale(self) -> None:
        """Train with the loss scale that the largest gradient suggests; suggest the better one."""
        plain = self._training.way(PLAIN.name)
        largest = self._largest_gradient()
        # None helps if the loss or a gradient is not finite with any, or no gradient has 16 bits.
        if (plain is not None and plain.losses[:1] == [None]) or not math.isfinite(largest.value):
            return
        if not largest.value and not self._training.underflow:
            return
        scale = suggested_scale(largest.value, self.ready.precision.format.largest)
        best = self._training.way("grad-scaler")
        if scale != DEFAULT_SCALE:
            way = dataclasses.replace(SUGGESTED, scale=scale)
            watchers = self._watchers(way)
            tried, loop = self._train(way, watchers)
            ways = self._training.ways
            self._add(tried, loop, watchers)
            if best is None or self._losses(tried) < self._losses(best):
                best = tried
            else:
                self._report(ways=ways)
        if best is None or best.status == "error":
            return
        suggestion = LossScale(
            scale=best.initial_scale or scale,
            largest=largest.value,
            largest_at=largest.module,
            underflow_unscaled=self._training.underflow or 0.0,
            underflow=self._underflow.get(best.name),
            skipped_steps=best.skipped_steps,
        )
        self._report(loss_scale=suggestion)

    def _losses(self, way: TrainingWay) -> tuple[bool, int, float]:
        """Sorts ways: one that fails, skipped steps, elements of gradients that underflow."""
        return way.status != "ok", way.skipped_steps, self._underflow.get(way.name, math.inf)

    def _largest_gradient(self) -> Largest:
        """The first step's largest 16-bit gradient; its loss is scaled if that is zero or Inf."""
        largest, scales = Largest(), [1.0, 2.0**-10, 2.0**-20]
        for scale in scales:
            self._snapshot.rewind()
            step = TrainingStep(self.target, self.ready, PLAIN, self.target.model)
            with compiled_code_in_eager(), ModuleStack(self.ready.model) as stack:
                mode = LargestGradient(Places(stack, lambda: "forward"), self.ready.application.dtype)
                seed_everything(self.task.seed)
                inputs, named = self.ready.inputs(self.target.args, self.target.kwargs)
                with mode:
                    _, loss = step.forward(inputs, named)
            mode.backward(loss, scale)
            largest = mode.largest
            if largest.value == 0.0 and len(scales) == 3:
                scales[1:] = [MOST]
            elif math.isfinite(largest.value):
                break
        return largest


def explained_way(way: WayToTrain, trained: TrainingWay) -> WayToTrain:
    """What explains a step as it was made: a smaller scale, or none if no step was made."""
    if not trained.skipped_steps:
        return way
    if not trained.scales:
        return PLAIN
    return dataclasses.replace(way, scale=trained.final_scale)


def _last(values: Sequence[float]) -> float | None:
    return next((value for value in reversed(values) if math.isfinite(value)), None)


def with_draws_of(task: ModelTask, target: Target, reference: TrainingReference, send: Send) -> TrainingReference:
    """``reference`` with fp32's first step repeated with the random numbers that ``task`` draws."""
    # Few models draw in the backward pass, which takes twice as long.
    for record in (first_loss_under, first_step_under):
        with in_training(task, target) as ready:
            # Other dtypes draw other numbers from the same seed.
            recorder = RecordDraws(emulates=None if task.accelerated else ready.application.dtype)
            try:
                record(recorder, ready, target, task.seed)
            except Exception:  # the run itself shows it
                return reference
        replay = ReplayDraws(recorder.draws)
        with in_training(in_fp32(task), target) as ready:
            try:
                first_step = first_step_under(replay, ready, target, task.seed)
                replay.check_all_drawn()
                return dataclasses.replace(reference, outputs=first_step.outputs, gradients=first_step.gradients)
            except DrawsDiffer as difference:
                why = f"its first step cannot be compared, since fp32 draws other random numbers ({difference})"
    # Nothing of it is compared.
    send(PartFailed(why))
    return dataclasses.replace(reference, outputs=[], gradients={})
