"""Training steps, and those in fp32: the reference, and other seeds, which set the limits."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec import structs
from torch import Tensor, nn
from torch._ops import OpOverload

from lowprec_check.core.messages import Reporter, Started
from lowprec_check.core.preparation import prepared_for
from lowprec_check.core.tasks import ModelTask, TaskFiles
from lowprec_check.core.trace.op_errors import ROUNDING
from lowprec_check.core.trace.places import Places
from lowprec_check.engine.model.memory import measure_memory
from lowprec_check.engine.model.observed_training import DEFINE_PARTS, ScriptStep
from lowprec_check.engine.model.plain_run import describe_error, output_tensors
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.model.training import (
    DescribedLoss,
    check_optimizer,
    describe_loss,
    describe_optimizer,
    make_optimizer,
    optimizer_code,
)
from lowprec_check.engine.model.user_code import call_user_code, required_arguments
from lowprec_check.engine.model.whole_optimizer import OptimizerLike, OptimizersLike, WholeOptimizerLike
from lowprec_check.errors import UsageError
from lowprec_check.features.training.lost_updates import LostUpdateCounter, Stalls
from lowprec_check.features.training.spread import SEEDS, OtherSeeds, Samples, Spread, Trajectory
from lowprec_check.features.training.steps import (
    MAX_SKIPPED,
    USUAL,
    Loop,
    StepFailedError,
    StepResult,
    TrainingStep,
    Watcher,
    kept_by,
    state_bytes,
    ways_for,
)
from lowprec_check.features.training.ways.usual import PLAIN
from lowprec_check.schema.scan_result import Run
from lowprec_check.schema.statements import counted
from lowprec_check.schema.training import ParameterGradient, TrainingPhase, TrainingRun, TrainingSetup, TrainingWay
from lowprec_check.schema.verdict import ExceptionInfo
from lowprec_check.schema.ways_to_train import DEFAULT_SCALE, WayToTrain
from lowprec_check.torchkit.autograd import accumulates, nodes_of
from lowprec_check.torchkit.compiled import compiled_code_in_eager
from lowprec_check.torchkit.devices import seed_everything
from lowprec_check.torchkit.dispatch_mode import AutocastKeys, DispatchMode, run_op
from lowprec_check.torchkit.floating_dtypes import as_real
from lowprec_check.torchkit.output_comparison import same_bits
from lowprec_check.torchkit.source_location import call_model
from lowprec_check.torchkit.tensor_comparison import ratio

MOST = 2.0**24  # the largest loss scale that is suggested

MARGIN = 2.0  # how many times larger the gradients may become before one overflows


class FirstGradients(Watcher):
    """The gradients of the first step that is made, unscaled, in fp32 on the CPU, by parameter."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._is_skipped, self._has_scale = True, False
        self.found: dict[str, Tensor] = {}

    def gradients(self, step: TrainingStep) -> None:
        """Copy the gradients of an optimizer, again if a ``GradScaler`` skipped the step."""
        if not self._is_skipped:
            return
        scale, updated = step.scale, step.updated
        self._has_scale = scale is not None
        self.found |= {
            name: as_real(parameter.grad.detach()).float().cpu().clone().div_(scale or 1.0)
            for name, parameter in self._parameters.items()
            if id(parameter) in updated and parameter.grad is not None and parameter.grad.layout == torch.strided
        }

    def after(self, step: TrainingStep) -> None:
        """Note whether the step was skipped."""
        self._is_skipped = self._has_scale and not all(bool(found.isfinite().all()) for found in self.found.values())


class FirstStep(NamedTuple):
    """What the first step computes before its update, in fp32 on the CPU."""

    outputs: list[Tensor]  # its output and its loss
    gradients: dict[str, Tensor]  # by the name of the parameter


@contextlib.contextmanager
def _first_step(ready: Prepared, target: Target, seed: int) -> Iterator[tuple[TrainingStep, Any, Any]]:
    """The first step of ``ready`` in eager mode, without loss scaling, and its inputs; what it
    changes is restored.
    """
    snapshot = Snapshot(ready.model, target.rewound, parameters=True)
    seed_everything(seed)
    try:
        with compiled_code_in_eager():
            yield TrainingStep(target, ready, PLAIN, target.model), *ready.inputs(target.args, target.kwargs)
    finally:
        snapshot.rewind()


def first_step_under(mode: DispatchMode, ready: Prepared, target: Target, seed: int) -> FirstStep:
    """The first step of ``ready`` under ``mode``."""
    watcher = FirstGradients({name: p for name, p in ready.model.named_parameters() if p.requires_grad})
    with _first_step(ready, target, seed) as (step, inputs, named):
        # Before the update, which may change gradients
        step.on_gradients = lambda: watcher.gradients(step)
        with mode:
            result = call_model(step, inputs, named)
        outputs = [tensor.cpu().clone() for tensor in output_tensors((result.output, result.loss))]
    return FirstStep(outputs, watcher.found)


def first_loss_under(mode: DispatchMode, ready: Prepared, target: Target, seed: int) -> None:
    """Compute the loss of the first step of ``ready`` under ``mode``."""
    with _first_step(ready, target, seed) as (step, inputs, named), mode:
        call_model(step.forward, (inputs, named), {})


class GradientComparison(NamedTuple):
    """The gradients of all parameters, compared with those of fp32."""

    parameters: list[ParameterGradient]
    error: float | None  # rel_l2 of all together; ``None`` if it is not finite
    underflow: float | None
    """Share of all elements that are not zero in fp32 and zero here; ``None`` if there are none."""


def compare_gradients(mine: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> GradientComparison:
    """Compare the gradients ``mine`` with those of fp32, by name; one that is missing is zero.

    One that is rounding alone in fp32, as of a bias before a batch norm, is zero and left out.
    """
    # The largest root mean square of a gradient of each module.
    sizes: dict[str, float] = {}
    for name, exact in reference.items():
        module, size = name.rpartition(".")[0], float(exact.double().norm()) / math.sqrt(max(exact.numel(), 1))
        sizes[module] = max(sizes.get(module, 0.0), size)
    rows, squares, norm, flushed, elements = list[ParameterGradient](), list[float](), 0.0, 0, 0
    for name, exact in reference.items():
        low = mine.get(name)
        if low is None:
            low = torch.zeros_like(exact)
        apart, size = float((low.double() - exact).norm()), float(exact.double().norm())
        zero = int(((low == 0) & (exact != 0)).sum())
        overflown = int((~low.isfinite() & exact.isfinite()).sum())
        count = exact.numel()
        # Of the size of the rounding of its neighbours: zero in exact arithmetic.
        if size < ROUNDING * math.sqrt(count) * sizes[name.rpartition(".")[0]] and not overflown:
            largest = _finite(float(exact.abs().max()))
            rows.append(ParameterGradient(parameter=name, elements=count, absmax=largest, is_rounding=True))
            squares.append(0.0)
            continue
        rows.append(
            ParameterGradient(
                parameter=name,
                elements=count,
                error=_finite(ratio(apart, size)),
                absmax=_finite(float(exact.abs().max())) if count else None,
                underflow=zero / max(count, 1),
                overflow=overflown / max(count, 1),
            )
        )
        squares.append(apart**2)
        norm, flushed, elements = norm + size**2, flushed + zero, elements + count
    # Shares of the error exist only if no gradient overflows.
    total = sum(squares)
    if total and math.isfinite(total):
        rows = [structs.replace(row, error_share=square / total) for row, square in zip(rows, squares, strict=True)]
    whole_error = _finite(math.sqrt(total / norm)) if norm else None
    return GradientComparison(rows, whole_error, flushed / elements if elements else None)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class Largest(NamedTuple):
    """The largest magnitude of a gradient, maybe infinite, and the module whose op gets it."""

    value: float = 0.0
    module: str | None = None


class LargestGradient(DispatchMode):
    """Finds the largest gradient that a node of a loss's autograd graph gets; active while it is
    made. Only those in ``dtype`` count: one that reaches a loss in fp32 does not overflow.
    """

    def __init__(self, places: Places, dtype: torch.dtype) -> None:
        super().__init__()
        self._places, self._dtype = places, dtype
        self.largest = Largest()

    def handle(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], keys: AutocastKeys) -> Any:
        """Run the op, and note where it is called."""
        self._places.of(sys._getframe(1))
        return run_op(func, args, kwargs, keys)

    def backward(self, loss: Tensor, scale: float) -> None:
        """Compute the gradients of ``loss`` · ``scale``; the largest, divided by the scale."""

        def look(node: Any, gradients: tuple[Tensor | None, ...]) -> None:
            for gradient in gradients:
                if gradient is None or gradient.dtype != self._dtype or not gradient.numel():
                    continue
                value = float(gradient.detach().float().abs().max()) / scale
                if not value <= self.largest.value:
                    place = self._places.of_node(node)
                    self.largest = Largest(math.inf if math.isnan(value) else value, place and place.module)

        # The leaves only add up what they get, which the nodes before them have had.
        hooks = [
            node.register_prehook(functools.partial(look, node)) for node in nodes_of(loss) if not accumulates(node)
        ]
        try:
            (loss * scale).backward()
        finally:
            for hook in hooks:
                hook.remove()


def suggested_scale(largest: float, maximum: float) -> float:
    """The largest power of two that keeps :data:`MARGIN` · ``largest`` below ``maximum``."""
    if not largest or not math.isfinite(largest):
        return DEFAULT_SCALE
    return min(MOST, 2.0 ** math.floor(math.log2(maximum / (MARGIN * largest))))


STALLS = 0.01
"""The share of updates that rounding seems to lose in fp32 from which on they are counted."""


@dataclasses.dataclass
class TrainingReference:
    """What the fp32 run keeps for the runs that are compared with it."""

    base: Trajectory
    others: list[Trajectory]
    """From other seeds."""
    samples: Samples
    outputs: list[Tensor]
    """The output and the loss of the first step; empty if they cannot be compared."""
    gradients: dict[str, Tensor]
    """Of the first step, by parameter; empty if they cannot be compared."""
    draws: bool

    def save(self, files: TaskFiles) -> None:
        """Write the file that :meth:`load` reads."""
        runs = [dataclasses.asdict(run) for run in (self.base, *self.others)]
        files.keep({"runs": runs, "kept": (self.samples.sizes, self.outputs, self.gradients, self.draws)})

    @classmethod
    def load(cls, files: TaskFiles) -> TrainingReference:
        """Read what the fp32 run saved."""
        saved = files.kept()
        base, *others = (Trajectory(**run) for run in saved["runs"])
        # In the order in which `save` writes them
        sizes, *first_step = saved["kept"]
        return cls(base, others, Samples(sizes), *first_step)


@contextlib.contextmanager
def in_training(task: ModelTask, target: Target, snapshot: Snapshot | None = None) -> Iterator[Prepared]:
    """The model of ``task``, or its script's, in training mode with gradients; restored later."""
    with prepared_for(task, target, snapshot) as ready, torch.enable_grad():
        # A script sets the mode of its modules itself
        if not ready.model.training and target.observed is None:
            ready.model.train()
        yield ready


def script_parts(target: Target) -> dict[str, Any]:
    """A script's step beyond its loss and optimizer, to be saved; empty for other targets."""
    observed, optimizer = target.observed, target.optimizer
    if observed is None or not isinstance(optimizer, (OptimizerLike, OptimizersLike)):
        return {}
    parts, clips = optimizer.parts, [list(dict.fromkeys(clip.code for clip in part.clips)) for part in optimizer.parts]
    fields: dict[str, Any] = {"script": observed.line or "", "framework": observed.framework, "clip_code": clips[0]}
    fields |= {"amp": list(observed.amp), "cast": observed.cast}
    plan = target.model.start(target.args) if isinstance(target.model, ScriptStep) else ()
    if len(plan) > 1 or len(parts) > 1 or optimizer.is_whole:
        calls = [iter(part.code if isinstance(part, WholeOptimizerLike) else ()) for part in parts]
        fields["phases"] = [
            TrainingPhase(
                clears=list(phase.clears),
                steps=list(phase.steps),
                calls=[next(calls[number], ".step()") for number in phase.steps] if optimizer.is_whole else [],
                is_inside=phase.is_inside,
            )
            for phase in plan or USUAL
        ]
    if len(parts) > 1:
        fields |= {"optimizers": list(observed.optimizers), "clips": clips}
    return fields


class TrainingSteps:
    """Steps of the model ``ready`` on ``batches`` in turn, for ``task``."""

    def __init__(
        self, task: ModelTask, target: Target, ready: Prepared, report: Reporter, batches: Sequence[Target], steps: int
    ) -> None:
        self.task, self.target, self.ready, self.report, self._batches = task, target, ready, report, batches
        self.steps = steps
        self._snapshot = Snapshot(ready.model, target.rewound, parameters=True)
        self._ways = ways_for(target, ready, steps)
        """The ways to train; the first is that of the run."""
        self.explained = self._ways[0]
        """The way of the step that is explained op by op."""
        self.passes_clearly = False
        """Whether it ends so far within its limits that nobody asks for the errors of ops."""
        self._measures_memory = False
        self.outputs: list[Tensor] | None = None
        """What the first step computed: its output, loss, gradients and weights, in this order."""

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by name."""
        return {name: p for name, p in self.ready.model.named_parameters() if p.requires_grad}

    @property
    def _compared(self) -> Collection[str] | None:
        """Names of the parameters compared with fp32's; ``None``: all that are trained."""
        return None

    @property
    def too_slow(self) -> bool:
        """Whether a step failed, or is too slow to be repeated."""
        return self.report.so_far.failed or self.report.so_far.seconds > self.task.slow_seconds

    def measure(self, *, memory: bool) -> None:
        """Send the time of the fastest step, and with ``memory`` the peak of one."""
        self._measures_memory = memory and not (self.too_slow or self.task.is_hopeless(self.report.so_far))
        if not self.report.so_far.failed:
            self.report.add(latency_ms=self.report.so_far.seconds * 1e3)
            peak = self._peak(self._ways[0])
            if peak is not None:
                self.report.add(peak_memory_bytes=peak)

    def _peak(self, way: WayToTrain) -> int | None:
        """Peak bytes of two steps in ``way``; ``None`` if all are skipped, or not measured."""
        if not self._measures_memory:
            return None
        self._snapshot.rewind()
        step, made = self._step(way), 0

        # The optimizer makes its state in the first. A step that GradScaler skips is repeated.
        def two_steps(*args: Any, **kwargs: Any) -> None:
            nonlocal made
            for _ in range(MAX_SKIPPED + 2):
                scale = step.scale
                step(*args, **kwargs)
                made += scale is None or (step.scale or 0.0) >= scale
                if made == 2:
                    return

        # What a way keeps between steps is held while one is made
        kept = kept_by(step.parts)
        if step.average is not None:
            kept = [*kept, *step.average.state_dict().values()]
        ready = self.ready._replace(call=two_steps, enters_context=True)
        memory = measure_memory(ready, self.target.args, self.target.kwargs, seed=self.task.seed, kept=kept)
        return memory.peak if made == 2 else None

    def compare_ways(self) -> None:
        """Train in the other ways; there is only one in fp32."""

    def _keep_outputs(self, result: StepResult) -> None:
        self.outputs = [tensor.clone() for tensor in output_tensors(result)]

    def _step(self, way: WayToTrain) -> TrainingStep:
        return TrainingStep(self.target, self.ready, way)

    def _start_step(self, number: int | None = None) -> None:
        self.report.send(Started(seconds=self.task.part_budget, call=number))

    def _add_verdict(self, run: Run, seconds: Sequence[float] = ()) -> None:
        """Add the verdict on steps that took so many seconds each."""
        first, fastest = next(iter(seconds), 0.0), min(seconds, default=0.0)
        judged = msgspec.structs.replace(
            self.report.so_far, run=run, is_judged=True, seconds=fastest, first_seconds=first
        )
        self.report.update(judged)

    def _loop(
        self,
        step: TrainingStep,
        seed: int,
        watchers: Sequence[Watcher] = (),
        on_first: Callable[[StepResult], None] | None = None,
        batches: Sequence[Target] | None = None,
    ) -> Loop:
        return Loop(
            self.ready,
            step,
            batches or self._batches,
            seed,
            on_step=self._start_step,
            on_first=on_first,
            watchers=watchers,
            names=self._compared,
        )


class ReferenceTraining(TrainingSteps):
    """Trains the model in fp32 on ``batches``, then from other seeds; sends the results."""

    def __init__(
        self, task: ModelTask, target: Target, ready: Prepared, report: Reporter, batches: Sequence[Target], steps: int
    ) -> None:
        super().__init__(task, target, ready, report, batches, steps)
        self._count = 0
        """How many of the outputs are the output and the loss."""
        self._loss: DescribedLoss | None = None
        self._optimizer = ""
        """As it is before the first step, in words."""

    def run(self) -> None:
        """Train, send the verdict; an exception or a non-finite loss is for the user to fix."""
        check_optimizer(self.target.optimizer, list(self.trained.values()))
        gradients, stalls = FirstGradients(self.trained), Stalls(self.trained)
        step = call_user_code("Calling average(model)", lambda: self._step(PLAIN))
        self._optimizer = describe_optimizer(step.updates.optimizer)
        loop = self._loop(step, self.task.seed, (gradients, stalls), self._keep_outputs)
        try:
            base = loop.run(self.steps)
        except StepFailedError as failure:
            exception = msgspec.structs.replace(describe_error(failure.error, self.ready.model), phase=step.phase)
            if step.in_loss:
                raise UsageError(*_failed_loss(exception, self.target)) from None
            calls = loop.trajectory.steps + 1
            run = msgspec.structs.replace(self.report.run, status="error", exception=exception, calls=calls)
            self._add_verdict(run)
            return
        # With a rate and gradients, updates may be lost to rounding in fp32 too
        rates = [float(group.get("lr", 1.0)) for group in step.updates.optimizer.param_groups]
        has_gradients = not gradients.found or any(bool(gradient.any()) for gradient in gradients.found.values())
        changes = any(not weights.equal(base.weights[0]) for weights in base.weights)
        if not changes and not (any(rates) and has_gradients):
            steps = f"{base.steps} step{'s' if base.steps > 1 else ''}"
            raise UsageError(
                f"No weight changes in fp32 in {steps} of training, so there is nothing to compare.",
                "Check the learning rate (a warm-up may start at 0), and that the loss depends on the weights.",
            )
        # Steps that draw random numbers differ from the script's in any case
        observed, differs = self.target.observed, None
        if observed is not None and not loop.draws:
            differs = observed.differs_in(base.losses[: base.steps])
        note, optimizer = differs, self.target.optimizer
        # Parameters of an optimizer of the user that the scan does not train.
        if observed is None and isinstance(optimizer, OptimizerLike) and optimizer.foreign:
            whose = f"{counted(optimizer.foreign, 'parameter')} of the optimizer that the model does not have"
            them = "it" if optimizer.foreign == 1 else "them"
            note = f"{whose}, perhaps of the loss: the scan does not train {them}"
        finite = all(map(math.isfinite, base.losses)) and bool(base.weights[-1].isfinite().all())
        if differs is not None and not finite:
            raise UsageError(f"The training of the script cannot be scanned: {differs}.", DEFINE_PARTS)
        run = msgspec.structs.replace(
            self.report.run,
            status="ok" if finite else "nonfinite",
            calls=max(1, base.steps),
            failed_call=None,
            loss=base.losses[-1] if finite else None,
            notes=[note] if note is not None else [],
        )
        if finite:
            self._add_seeds(loop, gradients.found, step, stalls)
            run = msgspec.structs.replace(run, training=self.report.run.training)
        self._add_verdict(run, base.seconds)

    def _add_seeds(self, loop: Loop, gradients: dict[str, Tensor], trained: TrainingStep, stalls: Stalls) -> None:
        """Train from other seeds; save all for other runs, and send how the model was trained."""
        base, samples, state = loop.trajectory, loop.samples, state_bytes(trained.parts)
        seeds = OtherSeeds(
            self.target,
            self.ready.model,
            self._batches,
            self.task.seed,
            draws=loop.draws,
            keep_alive=self._start_step,
        )
        others = [self._other_seed(seeds, number) for number in range(1, SEEDS + 1)]
        assert self.outputs is not None
        assert self._loss is not None
        reference = TrainingReference(
            base=base,
            others=[other for other in others if other is not None and all(map(math.isfinite, other.losses))],
            samples=samples,
            outputs=[tensor.cpu() for tensor in self.outputs[: self._count]],
            gradients=gradients,
            draws=loop.draws,
        )
        reference.save(self.task.files)
        lines, made = optimizer_code(self.target.optimizer)
        spread = Spread(base, reference.others, samples, 0.0)
        low, high = spread.loss_band()
        # Counting makes every step once more, so only where updates seem to be lost
        limits, counter = spread.loss_limits(), None
        if stalls.share >= STALLS and not getattr(self.target.optimizer, "takes_closure", False):
            make = functools.partial(make_optimizer, self.target.optimizer)
            counter = LostUpdateCounter(self.trained, make, torch.float64)
        setup = TrainingSetup(
            steps=self.steps,
            loss=self._loss.words,
            loss_code=self._loss.code,
            loss_setup=[*self._loss.setup, *lines],
            optimizer=self._optimizer,
            optimizer_code=made,
            **script_parts(self.target),
            average_code="" if self.target.average is None else "average(model)",
            repeatable=self._repeats(counter),
            default_loss=self.target.loss is None,
            default_optimizer=self.target.optimizer is None,
            new_batches=len(self._batches) > 1,
            batches=len(self._batches) if 1 < len(self._batches) < self.steps else 0,
            seeds=len(reference.others),
            varied=seeds.varied,
            losses=base.losses,
            loss_low=low,
            loss_high=high,
            limit_low=limits[0],
            limit_high=limits[1],
            distances=spread.distance_limits,
        )
        way = TrainingWay(name=PLAIN.name, status="ok", losses=list(base.losses), state_bytes=state)
        run = TrainingRun(ways=[way])
        if counter is not None:
            way = msgspec.structs.replace(way, lost_updates=counter.share())
            run = TrainingRun(ways=[way], lost_updates=counter.figures())
        self.report.update(msgspec.structs.replace(self.report.so_far.with_fields(training=run), training=setup))

    def _repeats(self, counter: LostUpdateCounter | None) -> bool:
        """Whether the first step gives the same bits again; a ``counter`` observes all steps."""
        self._snapshot.rewind()
        again: list[Tensor] = []

        def keep(result: StepResult) -> None:
            again.extend(tensor.clone() for tensor in output_tensors(result))  # the last loss changes buffers

        watchers: tuple[Watcher, ...] = ()
        steps = 1
        if counter is not None:
            watchers, steps = (counter,), self.steps
        try:
            self._loop(self._step(PLAIN), self.task.seed, watchers, keep).run(steps)
        except StepFailedError:
            return False
        return self.outputs is not None and same_bits(again, self.outputs)

    def _other_seed(self, seeds: OtherSeeds, number: int) -> Trajectory | None:
        """A run from another seed; ``None`` if it fails."""
        self._snapshot.rewind()
        batches = seeds.start(number)
        try:
            return self._loop(self._step(PLAIN), self.task.seed + number, batches=batches).run(self.steps)
        except StepFailedError:  # of a decomposition, for example, that the initial weights make impossible
            return None

    def _keep_outputs(self, result: StepResult) -> None:
        super()._keep_outputs(result)
        self._count = len(output_tensors((result.output, result.loss)))
        target = self.target
        output = result.output[0] if result.phases > 1 else result.output  # of its first phase
        self._loss = describe_loss(target.loss, output, target.form, target.targets_code)


def _failed_loss(error: ExceptionInfo, target: Target) -> tuple[str, str]:
    """The message about a loss that raises an exception in fp32, and what to do."""
    arguments = "the output of the model"
    if target.loss is not None and required_arguments(target.loss) > 1:
        if target.targets:
            arguments += " and the rest of the batch"
        else:
            arguments += " and its inputs, as the batch has nothing else"
    source = ""
    if error.source:
        source = f" at {error.source}"
    hint = (
        f"It is called with {arguments}. Labels are the elements of a batch that the model does not take: "
        "`inputs` may be a DataLoader."
    )
    return f"The loss fails in fp32{source}: {error.text}", hint
