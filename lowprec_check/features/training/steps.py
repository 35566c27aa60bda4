"""Steps of training: one is called like the model, a loop makes several and keeps figures."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowprec_check.engine.model.inputs import NoBatchError
from lowprec_check.engine.model.loss_program import Phase as StepPhase
from lowprec_check.engine.model.observed_training import ScriptStep, sum_of
from lowprec_check.engine.model.prepared import FailedCast, Prepared
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.model.training import LossInputs, loss_of, make_optimizer
from lowprec_check.engine.model.user_code import call_user_code, reraise_interrupt
from lowprec_check.engine.model.whole_optimizer import OptimizersLike, OptimizersTogether
from lowprec_check.errors import UsageError, first_line, message_of, type_name
from lowprec_check.features.training.spread import Samples, Trajectory
from lowprec_check.schema.run_key import Phase
from lowprec_check.schema.ways_to_train import WAYS, Updates, WayToTrain, ways_of
from lowprec_check.torchkit import devices
from lowprec_check.torchkit.devices import seed_everything
from lowprec_check.torchkit.floating_dtypes import is_float
from lowprec_check.torchkit.pytree import stored
from lowprec_check.torchkit.source_location import call_model

MAX_SKIPPED = 24  # steps that a ``GradScaler`` may skip: from 2¹⁶, it is then below 2⁻⁸


USUAL = (StepPhase((0,), (), 0, (0,)),)  # the phases of a step with one loss and one optimizer


class StepResult(NamedTuple):
    """What a step computed; the tensors are those of the model and change in the next step."""

    output: Any
    loss: Tensor
    gradients: list[Tensor]
    weights: list[Tensor]  # parameters and buffers
    phases: int = 1  # of several, ``output`` is a list


class TrainingStep:
    """A step that updates the model of ``ready`` by ``way``; autocast is on in its forward pass.

    ``call`` is called in place of the model, by default what its user compiled, or the model.
    """

    updates: Any  # what updates the weights; of several optimizers, what they all have and keep
    average: Any  # the average of the weights, if the user's file makes one

    def __init__(
        self, target: Target, ready: Prepared, way: WayToTrain, call: Callable[..., Any] | None = None
    ) -> None:
        self.target, self.way, self.model = target, way, ready.model
        self.phase: Phase = "forward"  # the part that runs, or failed
        self.in_loss = False  # whether the loss is what runs, or failed, in the forward pass
        self.on_loss: Callable[[Tensor], None] = lambda _loss: None
        """Called with the loss, before the backward pass."""
        self.on_gradients: Callable[[], None] = lambda: None
        """Called before an optimizer makes its step, and may change its gradients."""
        self.on_update: Callable[[], None] = lambda: None  # called after it
        self.number = 0  # of this optimizer, of several
        self._done = set[tuple[int, int]]()
        """Of several optimizers, the steps, by phase and number, that were made before a
        ``GradScaler`` skipped one: they are not made again when the step is repeated.
        """
        self.targets: tuple[Any, ...] = target.targets  # what the loss gets of the batch besides the output
        self._ready = ready
        self._call: Callable[..., Any] = ready.call if isinstance(ready.call, FailedCast) else call or target.called
        self.restart()

    def restart(self) -> None:
        """Forget the state of the optimizer, of the loss scale and of the average."""
        scale, device = self.way.scale, self._ready.device.type
        self.scaler = None
        if scale is not None:
            self.scaler = torch.amp.GradScaler(device, init_scale=scale)
        # Several optimizers: each gets a part of its own, with the parameters that are its.
        optimizer: Any = self.target.optimizer
        models, makes = [self.model], [optimizer]
        if isinstance(optimizer, OptimizersLike):
            models = [
                nn.ParameterList(own)
                for own in optimizer.owned([p for p in self.model.parameters() if p.requires_grad])
            ]
            makes = list(optimizer.parts)
        self.parts = [
            self.way.updates(model, lambda found, make=make: make_optimizer(make, list(found)), self.scaler)
            for model, make in zip(models, makes, strict=True)
        ]
        """What updates the weights, by optimizer."""
        self.updates, self.average = self.parts[0], None
        if len(self.parts) > 1:
            self.updates = _Together(self.parts)
        if self.target.average is not None:
            self.average = self.target.average(self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> StepResult:
        """Do one step on a batch, prepared by ``ready.inputs``."""
        outputs, losses = list[Any](), list[Tensor]()
        is_skipped, plan = False, self._plan(args)
        made = [number for phase in plan for number in phase.steps]
        is_checked = True  # whether the scaler has seen gradients since its last update
        for index, phase in enumerate(plan):
            passes = functools.partial(self._passes, index, phase, args, kwargs, outputs, losses)
            if phase.is_inside:
                self.parts[phase.steps[0]].optimizer.closure = passes
            else:
                passes()
            for self.number in phase.steps:
                # What a repeated step did before its scaler skipped an optimizer stays done.
                if is_skipped or (index, self.number) in self._done:
                    continue
                if not phase.is_inside:
                    self.on_gradients()
                self.phase = "optimizer"
                self.parts[self.number].step()
                self.on_update()
                made.remove(self.number)
                is_checked = True
                # A ``GradScaler`` skips the step of an optimizer whose gradients are not finite.
                if self.scaler is not None and (len(self.parts) > 1 or made or self._done):
                    gradients = [p.grad for p in self.updated.values() if p.grad is not None]
                    is_skipped = not all(bool(gradient.isfinite().all()) for gradient in gradients)
                    self._done |= set() if is_skipped else {(index, self.number)}
                # It must be updated before another call of the same optimizer.
                if self.scaler is not None and self.number in made:
                    self.scaler.update()
                    is_checked = False
        # Else the scaler and the average see a step as a whole, whatever its phases were.
        if self.scaler is not None and is_checked:
            self.scaler.update()
        if not is_skipped:
            self._done = set()
        if self.average is not None:
            self.average.update_parameters(self.model)
        parameters = self.updates.parameters
        return StepResult(
            outputs[0] if len(outputs) == 1 else outputs,
            _total(losses),
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [tensor.detach() for tensor in (*parameters, *self.model.buffers())],
            len(outputs),
        )

    def _passes(
        self,
        index: int,
        phase: StepPhase,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: list[Any],
        losses: list[Tensor],
    ) -> Tensor:
        """Compute the loss of a phase and its gradients; add the first output and loss of it."""
        if isinstance(self.model, ScriptStep):
            self.model.repeat(index)
        for number in phase.clears:
            self.parts[number].zero_grad()
        output, loss = self._forward(args, kwargs)
        self.on_loss(loss)
        self.phase = "backward"
        self.parts[0].backward(loss)
        self.phase = "optimizer"
        if len(losses) == index:
            outputs.append(output)
            losses.append(loss.detach())
            if phase.is_inside:
                self.on_gradients()
        return loss.detach()

    def _plan(self, args: tuple[Any, ...]) -> Sequence[StepPhase]:
        """The phases of a step, which starts."""
        if isinstance(self.model, ScriptStep):
            return self.model.start(args)
        return USUAL

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Tensor]:
        """The output and the loss in the precision; of several phases, all outputs and the sum."""
        phases = [self._forward(args, kwargs) for _ in self._plan(args)]
        if len(phases) == 1:
            return phases[0]
        return ([output for output, _ in phases], _total([loss for _, loss in phases]))

    @property
    def updated(self) -> dict[int, nn.Parameter]:
        """The parameters of the optimizer that makes its step, by id."""
        return {id(parameter): parameter for parameter in self.parts[self.number].parameters}

    def weights(self) -> dict[int, Tensor]:
        """The trained weights, or their copies with more bits, by the id of the parameter."""
        pairs = [zip(part.parameters, self.way.weights(part), strict=True) for part in self.parts]
        return {id(parameter): weight for pair in pairs for parameter, weight in pair}

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Tensor]:
        self.phase, self.in_loss = "forward", False
        targets, _ = self._ready.inputs(self.targets, {})
        with self.context(around=False):
            output = self._call(*args, **kwargs)
            self.in_loss = self.target.loss is not None
            loss = loss_of(self.target.loss, output, LossInputs(args, kwargs, targets))
        self.in_loss = False
        return output, loss

    def context(self, *, around: bool) -> contextlib.AbstractContextManager[Any]:
        """The context of the precision, once ``around`` all steps or in each forward pass."""
        if around != self.way.one_context:
            return contextlib.nullcontext()
        return self._ready.application.context(self._ready.device.type)

    @property
    def scale(self) -> float | None:
        """The loss scale of a ``GradScaler``; ``None`` without one."""
        if self.scaler is None:
            return None
        return float(self.scaler.get_scale())


def _total(losses: Sequence[Tensor]) -> Tensor:
    """The only loss, or the sum of several in fp32."""
    if len(losses) == 1:
        return losses[0]
    return sum_of([loss.float() for loss in losses])


class _Together:
    """What several optimizers update, to be observed."""

    def __init__(self, parts: Sequence[Updates]) -> None:
        self.parameters = [parameter for part in parts for parameter in part.parameters]
        self.optimizer = OptimizersTogether([part.optimizer for part in parts])


def ways_for(target: Target, ready: Prepared, steps: int) -> list[WayToTrain]:
    """The ways to try in each run, for that many steps; the first one gives the status."""
    if getattr(target.optimizer, "takes_closure", False):
        return [WAYS.get("plain")]
    return ways_of(ready.precision, steps)


def with_step(ready: Prepared, step: TrainingStep) -> Prepared:
    """``ready``, called by ``step``, which enters the context of the precision itself."""
    return ready._replace(call=step, enters_context=True)


def kept_by(parts: Sequence[Updates]) -> list[Tensor]:
    """The weights that ``parts`` update, their copies, and the states of the optimizers."""
    # Each way keeps its copies of weights in lists of its own, under names of its own.
    lists = [kept for part in parts for kept in vars(part).values() if isinstance(kept, list)]
    for optimizer in [part.optimizer for part in parts]:
        states = getattr(optimizer, "states", [optimizer.state])
        lists += [list(state.values()) for kept in states for state in kept.values() if isinstance(state, dict)]
    return list(stored(tensor for tensors in lists for tensor in tensors if isinstance(tensor, Tensor)))


def state_bytes(parts: Sequence[Updates]) -> int:
    """Bytes of what ``parts`` keep."""
    # Views of one storage count once.
    storages = [tensor.untyped_storage() for tensor in kept_by(parts)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def batches_of(target: Target, count: int) -> list[Target]:
    """``target`` with the inputs of each of the first ``count`` batches, one if they are fixed."""
    batches = [target]
    while len(batches) < count:
        number = len(batches)
        try:
            batches.append(call_user_code(f"Making batch {number}", functools.partial(target.batch, number)))
        except NoBatchError:  # fixed inputs, or the end of a loader
            break
    return batches


# -- Several steps


class Watcher:
    """Observes the steps of a run from outside."""

    def before(self, step: TrainingStep) -> None:
        """Called before a step."""

    def gradients(self, step: TrainingStep) -> None:
        """Called before each step of an optimizer, which may change its gradients."""

    def update(self, step: TrainingStep) -> None:
        """Called after each step of an optimizer."""

    def after(self, step: TrainingStep) -> None:
        """Called after it."""


class StepFailedError(Exception):
    """A step raised an exception, which is the model's, the loss's or the optimizer's."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class Loop:
    """Trains the model of ``ready`` by ``step`` on ``batches`` in turn.

    ``on_step`` is called before each step, with its number from 1; ``on_first`` after the first.
    """

    def __init__(
        self,
        ready: Prepared,
        step: TrainingStep,
        batches: Sequence[Target],
        seed: int,
        *,
        on_step: Callable[[int], None],
        on_first: Callable[[StepResult], None] | None = None,
        watchers: Sequence[Watcher] = (),
        names: Collection[str] | None = None,
    ) -> None:
        """``names``: the parameters that are compared; by default all that are trained."""
        self._ready, self._step, self._batches, self._seed = ready, step, batches, seed
        self._on_step, self._on_first, self._watchers = on_step, on_first, list(watchers)
        self.faults: list[str] = []  # failures of watchers
        self.draws = False  # whether the first step draws random numbers
        self.trajectory = Trajectory()
        trained = {n: p for n, p in ready.model.named_parameters() if p.requires_grad}
        self.parameters = {n: p for n, p in trained.items() if names is None or n in names}
        self.buffers = {n: b for n, b in ready.model.named_buffers() if is_float(b) and b.layout == torch.strided}
        self.samples, self.buffer_samples = Samples.of(self.parameters), Samples.of(self.buffers)

    def run(self, steps: int, *, may_continue: Callable[[float], bool] = lambda _seconds: True) -> Trajectory:
        """Do ``steps`` updates, fewer if ``may_continue``, which gets the seconds so far, says no;
        then compute the loss of the first batch once more.

        After fewer steps it is the loss of the next batch, which runs that make more have at this
        place. It ends early after a loss that is not finite, and if a ``GradScaler`` skips every
        step. Raises :class:`StepFailedError`.
        """
        run = self.trajectory
        self._keep()
        with self._step.context(around=True):
            while run.steps < steps and (not run.steps or may_continue(sum(run.seconds))):
                self._do(run.steps)
                if run.skipped > MAX_SKIPPED or not all(map(math.isfinite, run.losses[-1:])):
                    return run
            # With gradients, which a model or a loss may compute itself, as in a gradient penalty.
            inputs = self._inputs(0 if run.steps == steps else run.steps)
            with _failures():
                _, loss = call_model(self._step.forward, inputs, {})
                run.losses.append(float(loss.detach()))
        return run

    def _do(self, number: int) -> None:
        """One step; if a ``GradScaler`` skips it, nothing but that is noted."""
        run, step = self.trajectory, self._step
        scale = step.scale
        self._observe(lambda watcher: watcher.before(step))
        self._on_step(number + 1)
        inputs, named = self._inputs(number)
        # What watchers do inside the step is no time of the step.
        watched = 0.0

        def watch(call: Callable[[Watcher], None]) -> None:
            nonlocal watched
            watched += devices.timed(self._ready.device, self._observe, call)[1]

        if self._watchers:
            step.on_gradients = lambda: watch(lambda watcher: watcher.gradients(step))
            step.on_update = lambda: watch(lambda watcher: watcher.update(step))
        states = None
        if not number:
            states = devices.generator_states()
        with _failures():
            result, seconds = devices.timed(self._ready.device, call_model, step, inputs, named)
        self.draws = self.draws or (states is not None and devices.generator_states() != states)
        if self._on_first is not None:
            self._on_first(result)
            self._on_first = None
        self._observe(lambda watcher: watcher.after(step))
        if scale is not None and (step.scale or 0.0) < scale:
            run.skipped += 1
            if run.skipped > MAX_SKIPPED and not math.isfinite(float(result.loss)):
                run.losses.append(float(result.loss))  # no scale helps: the forward pass is not finite
            return  # the same step again, with a smaller scale
        if scale is not None:
            run.scales.append(scale)
        run.losses.append(float(result.loss))
        run.seconds.append(seconds - watched)
        self._keep()

    def _observe(self, call: Callable[[Watcher], None]) -> None:
        """Let the watchers look; one that fails is noted, and left out from then on."""
        for watcher in list(self._watchers):
            try:
                call(watcher)
            except Exception as error:
                self._watchers.remove(watcher)
                self.faults.append(f"{type_name(watcher)} failed: {type_name(error)}: {first_line(message_of(error))}")

    def _inputs(self, number: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs of a step, with the seeds and the targets set."""
        batch = self._batches[number % len(self._batches)]
        self._step.targets = batch.targets
        # The same in every precision, whatever the steps before it drew.
        seed_everything(self._seed + 1_000_003 * number)
        return self._ready.inputs(batch.args, batch.kwargs)

    def _keep(self) -> None:
        weights = self._step.weights()
        self.trajectory.weights.append(self.samples.take({name: weights[id(p)] for name, p in self.parameters.items()}))
        self.trajectory.buffers.append(self.buffer_samples.take(self.buffers))


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Raise :class:`StepFailedError` for what the user's code raises."""
    try:
        yield
    except UsageError:
        raise
    except BaseException as error:
        reraise_interrupt(error)
        raise StepFailedError(error) from error
