"""What a scan trains of a script: its step, checked to give the same loss and gradients again."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowprec_check.engine.model.call_recorder import Node, UnrepeatableError, dtype_read
from lowprec_check.engine.model.loss_program import Backward, Phase, Program, copy_of
from lowprec_check.engine.model.snapshot import restore_tensor
from lowprec_check.engine.model.weight_changes import Sgd, widen, widened
from lowprec_check.engine.model.whole_optimizer import (
    CLOSURE,
    Clip,
    OptimizerCall,
    OptimizerLike,
    OptimizersLike,
    Settings,
    Template,
    WholeOptimizerLike,
    check_arguments,
)
from lowprec_check.errors import UsageError
from lowprec_check.schema.training import AmpUse, WeightCast, all_told
from lowprec_check.torchkit.devices import kept_generators
from lowprec_check.torchkit.output_comparison import same_values
from lowprec_check.torchkit.pytree import map_tensors

SAME_LOSS = 1e-3
"""The part of the largest loss by which two may differ that are the same but for rounding."""

ONE_AUTOCAST = (
    "the script makes several steps in one autocast block, so all of them use the casts of fp32 weights that the "
    "first one made: `lowprec-check fix --train` fixes that; put printed code outside the block"
)

_SAME_WEIGHTS = 0.05
"""The part of an update by which two may differ: Adam magnifies the rounding of small gradients."""

DEFINE_PARTS = "Define `model`, `inputs`, `loss` and `optimizer` in a file and scan that: see docs/training.md."


class ScriptStep(nn.Module):
    """What a script computes of a batch, up to its loss, with several models or calls."""

    def __init__(self) -> None:
        super().__init__()
        self.programs: list[Program] = []
        self._phase = 0

    def start(self, inputs: Sequence[Any]) -> Sequence[Phase]:
        """The phases of the step with these inputs; each is a call."""
        self._phase = 0
        return _program_of(self.programs, inputs)[0].plan

    def forward(self, *inputs: Any) -> Tensor:
        """The sum of the losses that the script calls ``backward()`` of in the next phase."""
        program, rest = _program_of(self.programs, inputs)
        phase, self._phase = self._phase, (self._phase + 1) % len(program.plan)
        return sum_of(program.run(self, rest, phase=phase))

    def repeat(self, phase: int) -> None:
        """Let the next call be that of a ``phase``."""
        self._phase = phase


def _program_of(programs: Sequence[Program], inputs: Sequence[Any]) -> tuple[Program, Sequence[Any]]:
    """What computes the losses of a step, by number if there are several, and its inputs."""
    if len(programs) == 1:
        return (programs[0], inputs)
    return (programs[inputs[0]], inputs[1:])


def sum_of(losses: Sequence[Tensor]) -> Tensor:
    """One loss, as it is, or the sum of several."""
    return sum(losses[1:], losses[0])


class ObservedLoss:
    """``loss(output, *targets)`` of a script; the targets are what it reads besides the output."""

    def __init__(self, programs: Sequence[Program], model: nn.Module) -> None:
        program = programs[0]
        of_model = len(program.nodes) == 1
        self.is_returned = of_model or isinstance(model, ScriptStep)
        """Whether the scanned model returns it."""
        self.line: str | None = None  # where it is computed: `train.py:12`
        phases: dict[int, list[Node]] = {}
        for node, phase in zip(program.nodes, program.phases, strict=True):
            phases.setdefault(phase, []).append(node)
        # What computes the loss of each phase
        made = []
        for nodes in phases.values():
            # A function may have been recorded as what observes it
            calls = [(node, inspect.unwrap(node.call)) for node in nodes if not isinstance(node.call, nn.Module)]
            functional = [node for node, call in calls if getattr(nn.functional, node.name, None) is call]
            # A number that divides the loss in the end, to accumulate gradients, does not count
            is_divided = bool(functional) and nodes[-1].name == "div" and len(nodes[-1].reads) == 1
            self.line = nodes[-2 if is_divided else -1].line
            words = f"the loss of {self.line}"
            if functional:
                function = f"{functional[-1].name} of {functional[-1].line}"
                words = function if functional[-1].line == self.line else f"{words}, with {function}"
            made.append(words)
        self.words = "the loss that the model returns" if of_model else " + ".join(dict.fromkeys(made))
        self.setup = () if self.is_returned else (f"# `loss(output)`: what {self.line} computes of the output",)
        """What the words are of, as code."""
        self._programs, self._model = programs, model
        # A scan asks the signature whether a loss needs targets
        reads = not isinstance(model, ScriptStep) and (len(programs) > 1 or bool(program.input_keys))
        self.__signature__ = inspect.signature((lambda _output, _target, *_rest: 0) if reads else (lambda _: 0))

    def __call__(self, output: Any, *targets: Any) -> Tensor:
        """The loss, with one element."""
        if isinstance(self._model, ScriptStep):
            return sum_of([output])
        program, inputs = _program_of(self._programs, targets)
        return sum_of(program.run(self._model, inputs, output))


class ObservedBatch(NamedTuple):
    """What a step reads."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Any, ...]

    def numbered(self, number: int, *, is_input: bool) -> ObservedBatch:
        """The same, with the number of its program, as an input of the model or a target."""
        if is_input:
            return self._replace(args=(number, *self.args))
        return self._replace(targets=(number, *self.targets))


class ObservedTraining(NamedTuple):
    """The training step of a script; made again, it gave the same loss and the same gradients."""

    model: nn.Module
    loss: ObservedLoss
    optimizer: OptimizerLike | OptimizersLike
    batches: list[ObservedBatch]  # of the first step, and of those after it
    line: str | None  # that calls the model
    framework: str
    """What calls ``backward()``: ``lightning``, ``transformers``, ``accelerate``; else empty."""
    optimizers: tuple[str, ...]  # the lines that make the optimizers
    notes: tuple[str, ...]
    losses: tuple[float, ...] = ()
    """Of the script, in the observed steps; none in 16 bits, since fp32 gives others."""
    amp: tuple[AmpUse, ...] = ()
    """What the script does wrong with autocast and ``GradScaler``."""
    optimizer_code: str = ""
    """What makes an optimizer for a script that has none; else empty."""
    cast: WeightCast | None = None
    """How it casts its weights, which are in fp32 here."""

    def differs_in(self, losses: Sequence[float]) -> str | None:
        """Where the ``losses`` of the scan in fp32 differ from the script's, and perhaps why."""
        for number, (wanted, loss) in enumerate(zip(self.losses, losses, strict=False), start=1):
            largest = max(map(abs, self.losses[:number]))
            if math.isfinite(wanted) and not abs(wanted - loss) <= SAME_LOSS * largest:
                why = "the scan does not repeat what it does to weights, gradients or settings between its steps"
                return f"in step {number} the loss of the script is {wanted:.4g}, and {loss:.4g} in the scan: {why}"
        return None


class OptimizerStep(NamedTuple):
    """A step of an optimizer."""

    optimizer: Optimizer
    start: int
    """How many backward passes there were when its gradients were cleared."""
    end: int  # how many there were before it
    clips: list[Clip]
    gradients: dict[int, Tensor]  # by the id of the parameter, as the optimizer got them
    weights: dict[int, Tensor]  # after it
    settings: Settings
    call: OptimizerCall | None = None
    """What the script called, if that is more than ``step()``."""
    is_last: bool = True
    """Whether the update is complete: a sharpness-aware one makes two calls."""
    inside: int | None = None
    """The number of the backward pass that its closure made, and whether that clears gradients."""
    clears_inside: bool = False


class ObservedStep(NamedTuple):
    """What computes the losses of a step, from what."""

    program: Program
    batch: ObservedBatch
    root: nn.Module
    """The model that the program calls, or a :class:`ScriptStep`."""
    loss: float  # what the script computed, summed over its backward passes

    @classmethod
    def of(cls, program: Program, first: ObservedStep | None, loss: float) -> ObservedStep:
        """The step of ``program``, which must call the same models as the ``first`` step."""
        call = program.single
        is_single = call is not None and (first is None or first.root is call.call)
        if first is not None and not is_single and not isinstance(first.root, ScriptStep):
            is_same = all(node.call is first.root for node in program.calls)
            what = "does not compute the loss of one call alone, as" if is_same else "calls other models than"
            raise UnrepeatableError(f"{program.calls[0].line} {what} in the step before")
        # One call of a model: that model is scanned, and the rest is its loss
        if call is not None and is_single and isinstance(call.call, nn.Module):
            targets = program.bind(call.call, {})
            args, kwargs = call.given
            return cls(program, ObservedBatch(args, kwargs, tuple(targets)), call.call, loss)
        # Otherwise a module that computes the loss, with models and weights of the script inside
        root = ScriptStep() if first is None else first.root
        names = {module: name for name, module in root.named_children()}
        for model in [node.call for node in program.calls if isinstance(node.call, nn.Module)]:
            if model not in names:
                stem = type(model).__name__.lower()
                same = sum(name.rstrip("0123456789") == stem for name in names.values())
                names[model] = f"{stem}{same + 1}" if same else stem
                root.add_module(names[model], model)
        inside = {id(parameter) for parameter in root.parameters()}
        for tensor in [tensor for node in program.nodes for tensor in node.reads]:
            if id(tensor) in program.trained and id(tensor) not in inside:
                root.register_parameter(f"weight{len(inside)}", program.trained[id(tensor)])
                inside.add(id(tensor))
        return cls(program, ObservedBatch(tuple(program.bind(root, names)), {}, ()), root, loss)


CHECKED = 2
"""Steps that must give the same losses, gradients and weights again."""


@dataclasses.dataclass
class StepRecord:
    """What one of the first steps started from, and led to."""

    values: dict[int, tuple[Tensor, Tensor, Tensor, dict[str, Any]]] = dataclasses.field(default_factory=dict)
    """Of parameters and buffers."""
    modes: dict[nn.Module, bool] = dataclasses.field(default_factory=dict)
    """Whether modules were in training mode."""
    left: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    """Gradients of earlier steps that were not cleared, by the id of the parameter."""
    backwards: Sequence[Backward] = ()
    """Those that it uses; none if it is not complete."""
    made: Sequence[OptimizerStep] = ()

    def restore(self) -> None:
        """Make parameters, buffers and modes as they were before the step."""
        for saved in self.values.values():
            restore_tensor(*saved)
            saved[0].grad = None
        for module, training in self.modes.items():
            module.training = training


@dataclasses.dataclass
class ObservedSteps:
    """What was observed of the first ``wanted`` steps of the optimizers."""

    wanted: int
    optimizers: list[Optimizer] = dataclasses.field(default_factory=list)  # those that made steps
    states: dict[Optimizer, Any] = dataclasses.field(default_factory=dict)
    """Of optimizers, before their first step."""
    schedule: dict[Optimizer, list[Settings]] = dataclasses.field(default_factory=dict)
    """Of each step."""
    steps: list[ObservedStep] = dataclasses.field(default_factory=list)
    unlike: str = ""  # why the next step was not like those before it
    records: list[StepRecord] = dataclasses.field(default_factory=list)  # of the first steps
    facts: dict[str, None] = dataclasses.field(default_factory=dict)  # notes
    framework: str = ""
    made: list[tuple[Optimizer, str | None]] = dataclasses.field(default_factory=list)
    """All optimizers, and the lines that make them."""
    by_hand: Optimizer | None = None  # what makes the updates that the script makes itself
    templates: dict[Optimizer, Template] = dataclasses.field(default_factory=dict)
    """Of what is taken whole, by the optimizer that makes the update."""
    calls: int = 0  # of models
    passes: int = 0  # calls of backward()
    problem: str | None = None  # why no step can be made as the script makes it
    processes: str | None = None  # the line that starts other processes, which may train
    amp: Callable[[], tuple[AmpUse, ...]] = tuple  # what it does wrong with autocast and `GradScaler`
    cast_of: Callable[[nn.Module], WeightCast | None] = lambda _root: None  # how it casts its weights

    @property
    def is_training(self) -> bool:
        """Whether the script computes gradients, or makes a step that cannot be made again."""
        return self.passes > 0 or self.problem is not None

    @property
    def seen(self) -> str:
        """What was observed, in words."""
        return f"observed are {self.calls} calls of models and {self.passes} of backward()"

    def facts_of(self, program: Program, dtypes: Sequence[str], scale: float | None) -> Iterator[str]:
        """What the first step does differently from a scan, as notes; ``dtypes`` of autocast."""
        made = [f"under autocast to {dtype}" for dtype in dtypes]
        if scale is not None:
            made.append(f"with a GradScaler, at {scale:g} at first")
        if made:
            yield f"the script trains {' and '.join(made)}: fp32 is trained without"
        if len(program.losses) > len(program.plan):
            once = "once" if len(program.plan) == 1 else "less often"
            yield (
                f"the script calls backward() {len(program.losses)} times for a step: the scan calls it {once}, of "
                "the sum of the losses of one graph, which gives the same gradients"
            )
        if len(self.optimizers) > 1:
            lines = dict(self.made)
            listed = [f"{type(optimizer).__name__} (made at {lines.get(optimizer)})" for optimizer in self.optimizers]
            shown = "the loss shown is the sum of theirs"
            yield f"a step is that of {len(listed)} optimizers: {', '.join(listed)}; {shown}"
        for optimizer, template in self.templates.items():
            calls = " and ".join(call.code for call in self._calls_of(optimizer))
            summed = "; the loss shown is the sum of all passes" if len(program.plan) > 1 else ""
            yield f"a step is what {type(template.owner).__name__} makes of it, called again: {calls}{summed}"
        if len(program.calls) > 1:
            names = ", ".join(dict.fromkeys(type(node.call).__name__ for node in program.calls))
            yield f"the loss follows from {len(program.calls)} calls ({names}): the scanned module makes all of them"
        reads = {node.call is dtype_read: node for node in reversed(program.numbers)}
        for is_dtype, node in reads.items():
            what = "reads the dtype" if is_dtype else "makes a number"
            name = "" if is_dtype else f" ({node.name})"
            whose = "where the loss depends on it, it is that of the script's step"
            yield f"{node.line} {what} of what the model computes{name}: {whose}"

    def training(self, script: str) -> ObservedTraining | None:
        """What a scan trains, after a check of the first step; ``None`` without any gradients."""
        try:
            if not self.is_training and self.processes is None:
                return None
            if not self.is_training:
                where = f"it starts other processes at {self.processes}, in which nothing is observed"
                raise UnrepeatableError(f"{where}, and computes no gradients in its own")
            if self.problem is not None or not self.steps:
                none = "it makes no step of a torch.optim.Optimizer with the gradients that it computes"
                raise UnrepeatableError(self.problem or f"{none}: {self.seen}")
            # One more than is wanted may have been made, to be checked
            checked, self.steps = self.steps[:CHECKED], self.steps[: self.wanted]
            program, _, root, _ = self.steps[0]
            # Steps of one form share a program, and differ in their batches
            forms: dict[str, Program] = {}
            for step in self.steps:
                forms.setdefault(step.program.form, step.program)
            programs, line = list(forms.values()), program.calls[0].line
            loss = ObservedLoss(programs, root)
            optimizer = self._optimizer(root)
            self._check(optimizer, checked, loss.line)
        except UnrepeatableError as problem:
            hint = f"{all_told(self.amp())} {DEFINE_PARTS}".strip()
            raise UsageError(f"The training of {script} cannot be scanned: {problem}.", hint) from None
        # From here on, the scan trains it in its own ways
        for part in optimizer.parts:
            del part.schedule[self.wanted :]
        for module in root.modules():
            _detach(module, self.facts)
        cast, batches = self._widened(root)
        notes = (f"the training step is that of the script, observed at {line}", *self._notes(optimizer.parts))
        for step in checked:
            step.program.release()
        is_input = isinstance(root, ScriptStep)
        if isinstance(root, ScriptStep):
            root.programs = programs
        if len(programs) > 1:
            numbers = [list(forms).index(step.program.form) for step in self.steps]
            pairs = zip(batches, numbers, strict=True)
            batches = [batch.numbered(number, is_input=is_input) for batch, number in pairs]
        elif all(same_values(batch, batches[0]) for batch in batches):
            batches = batches[:1]
        made = tuple(dict(self.made).get(optimizer) or "" for optimizer in self.optimizers)
        losses = () if program.autocasts or cast is not None else tuple(step.loss for step in self.steps)
        amp, code = self.amp(), self._sgd_code()
        return ObservedTraining(
            root, loss, optimizer, batches, line, self.framework, made, notes, losses, amp, code, cast
        )

    def _widened(self, root: nn.Module) -> tuple[WeightCast | None, list[ObservedBatch]]:
        """How the script casts its weights; they and the batches are then in fp32."""
        cast, batches = self.cast_of(root), [step.batch for step in self.steps]
        if cast is None:
            return None, batches
        widen(root)
        how = f"{cast.code} at {cast.line}" if cast.line else "they are made so"
        self.facts[f"the script trains weights in {cast.dtype} ({how}): the scan starts from them in fp32"] = None
        return cast, [ObservedBatch(*map_tensors(tuple(batch), widened)) for batch in batches]

    def _optimizer(self, root: nn.Module) -> OptimizerLike | OptimizersLike:
        """What makes optimizers like those of the script, of the parameters of ``root``."""
        trained = self.steps[0].program.trained
        if isinstance(root, ScriptStep):
            for parameter in root.parameters():  # of other optimizers
                parameter.requires_grad_(id(parameter) in trained)
        position = {id(p): index for index, p in enumerate([p for p in root.parameters() if p.requires_grad])}
        parts, positions = list[OptimizerLike](), []
        for optimizer in self.optimizers:
            own = {id(p): p for group in optimizer.param_groups for p in group["params"] if id(p) in position}
            clips = [step.clips for step in self.records[0].made if step.optimizer is optimizer]
            model, schedule = root, self.schedule[optimizer]
            if len(self.optimizers) != 1:
                model = nn.ParameterList(own.values())
            if optimizer in self.templates:
                template, calls = self.templates[optimizer], self._calls_of(optimizer)
                parts.append(WholeOptimizerLike(optimizer, model, clips, schedule, template, calls))
            else:
                parts.append(OptimizerLike(optimizer, model, clips[0], self.states[optimizer], schedule))
            positions.append([position[key] for key in own])
        return parts[0] if len(parts) == 1 else OptimizersLike(parts, positions)

    def _calls_of(self, optimizer: Optimizer) -> list[OptimizerCall]:
        """The calls that make a step of one that is taken whole."""
        calls = []
        for step in self.records[0].made:
            if step.optimizer is optimizer:
                call = step.call or OptimizerCall("step", {} if step.inside is None else {"closure": CLOSURE})
                check_arguments(self.templates[optimizer].owner, call)
                calls.append(call)
        return calls

    def _sgd_code(self) -> str:
        """What makes an optimizer for updates by hand, as code; empty without any."""
        if self.by_hand is None:
            return ""
        settings, line = self.by_hand.param_groups[0], dict(self.made)[self.by_hand]
        listed = ", ".join(f"{name}={settings[name]}" for name in Sgd._fields if settings[name])
        return f"optimizer = torch.optim.SGD(model.parameters(), {listed})  # the update at {line}"

    def _check(self, made: OptimizerLike | OptimizersLike, checked: Sequence[ObservedStep], line: str | None) -> None:
        """Make steps again, whose loss is at ``line``.

        Raises :class:`UnrepeatableError` if their results differ.
        """
        root = checked[0].root
        own = made.owned([parameter for parameter in root.parameters() if parameter.requires_grad])
        optimizers = [part(parameters) for part, parameters in zip(made.parts, own, strict=True)]
        records = [record for record in self.records if record.backwards]
        if ONE_AUTOCAST in self.facts:  # later steps use the casts of the first
            records = records[:1]
        try:
            with kept_generators(), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
                for number, (step, record) in enumerate(zip(checked, records, strict=False), start=1):
                    record.restore()
                    try:
                        _check_step(step, record, own, optimizers, line)
                    except UnrepeatableError as problem:
                        which = "" if number == 1 else f"in its step {number}, "
                        raise UnrepeatableError(f"{which}{problem}") from None
        finally:
            self.records[0].restore()

    def _notes(self, parts: Sequence[OptimizerLike]) -> Iterator[str]:
        for code in dict.fromkeys(clip.code for made in parts for clip in made.clips):
            yield f"gradients are clipped as in the script: {code.removeprefix('torch.nn.utils.')}"
        for made in parts:
            rates = made.rates
            if not any(rates) and "initial_lr" in made.schedule[0][0]:
                for settings in [settings for step in made.schedule for settings in step]:
                    settings["lr"] = settings["initial_lr"]
                why = "0 in its first step (a warm-up)"
                yield f"the learning rate of the script is {why}: the scan uses {made.rates[0]:g}"
            elif len(set(rates)) > 1:
                yield f"the learning rate is that of the script in each step: {rates[0]:g} to {rates[-1]:g}"
        if any(made.state for made in parts):
            yield "the optimizer starts from the state that it has in the script"
        if (count := len(self.steps)) < self.wanted:
            why = self.unlike or "there is no further one like that"
            batches = "is observed: its batch is" if count == 1 else "are observed: their batches are"
            yield f"{count} of the {self.wanted} steps {batches} repeated, since {why}"
        trained = self.steps[0].program.trained
        for optimizer, line in self.made:
            own = [parameter for group in getattr(optimizer, "param_groups", []) for parameter in group["params"]]
            if not any(id(parameter) in trained for parameter in own):
                kind = type(optimizer).__name__
                yield f"the script has another optimizer, {kind}, made at {line}: the scan does not make its steps"
        # Of a step that is not complete, weights may be left that it does not train
        if any(key in trained for record in self.records[1:] if record.made for key in record.left):
            yield "the script does not clear its gradients before its second step: the scan clears them in each step"
        yield from self.facts


def _check_step(
    step: ObservedStep,
    record: StepRecord,
    own: Sequence[Sequence[nn.Parameter]],
    optimizers: Sequence[Any],
    line: str | None,
) -> None:
    """Make a step again, whose loss is at ``line``, with ``optimizers`` of their ``own`` weights.

    Raises :class:`UnrepeatableError` if it differs.
    """
    program, batch, root, _ = step
    inputs = batch.args if isinstance(root, ScriptStep) else batch.targets

    def again() -> Any:
        args, kwargs = map_tensors((batch.args, batch.kwargs), copy_of)
        return root(*args, **kwargs)

    values, steps = iter([backward.value for backward in record.backwards]), iter(record.made)
    for number, phase in enumerate(program.plan):
        # What the script's closure gave first is compared
        expected = [next(values) for _ in phase.losses]

        def passes(phase: Phase = phase, number: int = number, expected: list[Tensor] = expected) -> Tensor:
            for parameter in itertools.chain(*(own[index] for index in phase.clears)):
                parameter.grad = None
                if not number and id(parameter) in record.left:
                    parameter.grad = record.left[id(parameter)].clone()
            losses = program.run(root, map_tensors(inputs, copy_of), again=again, phase=number)
            while expected:
                computed, value = losses[-len(expected)], expected.pop(0)
                # Accelerators may add in another order
                rounding = 0.0 if computed.device.type == "cpu" else 1e-4
                if number:  # it follows from a step that was made again
                    rounding = max(rounding, program.gradient_rounding)
                if not torch.allclose(computed, value, rtol=rounding, atol=0, equal_nan=True):
                    what = f"the loss at {line} is {computed.item():g}, not {value.item():g}"
                    raise UnrepeatableError(f"computed again from the same batch, {what}")
            total = sum_of(losses)
            total.backward()
            return total.detach()

        if phase.is_inside:
            optimizers[phase.steps[0]].closure = passes
        else:
            passes()
        for index in phase.steps:
            optimizers[index].step()
            wanted = next(steps)
            _check_gradients(own[index], wanted, line, program.gradient_rounding)
            _check_weights(own[index], wanted, record, program.gradient_rounding)


def _check_weights(
    parameters: Sequence[nn.Parameter], step: OptimizerStep, record: StepRecord, rounding: float
) -> None:
    """Raise :class:`UnrepeatableError` if the weights are others than after the script's step."""
    apart = moved = size = 0.0
    for parameter in parameters:
        if id(parameter) in step.weights and id(parameter) in record.values:
            after, before = step.weights[id(parameter)].double(), record.values[id(parameter)][2].double()
            apart += float((parameter.detach().double() - after).square().sum())
            moved += float((after - before).square().sum())
            size += float((torch.finfo(parameter.dtype).eps * after).square().sum())
    if apart**0.5 > max(_SAME_WEIGHTS, 10 * rounding) * moved**0.5 + 4 * size**0.5:
        by = f"differ from the script's by {(apart / (moved or 1.0)) ** 0.5:.1%} of its update"
        raise UnrepeatableError(f"the weights after the step of {type(step.optimizer).__name__}, made again, {by}")


def _check_gradients(parameters: Sequence[nn.Parameter], step: OptimizerStep, line: str | None, same: float) -> None:
    """Raise :class:`UnrepeatableError` if the gradients differ by more than ``same``."""
    own = {id(parameter): parameter.grad for parameter in parameters}
    pairs = []
    for key, wanted in step.gradients.items():
        if key in own:
            gradient = own[key]
            pairs.append((torch.zeros_like(wanted) if gradient is None else gradient, wanted))
    error = sum(float((a - b).double().square().sum()) for a, b in pairs) ** 0.5
    norm = sum(float(b.double().square().sum()) for _, b in pairs) ** 0.5
    # NaN at the same places, as a script in fp16 may give, is no difference
    is_nan = math.isnan(error) and all(torch.allclose(*pair, rtol=same, atol=0, equal_nan=True) for pair in pairs)
    if error <= same * norm or is_nan:
        return
    # Where the scan is known to compute other gradients than the script
    why = ""
    if not own.keys() >= {parameter for clip in step.clips for parameter in clip.parameters}:
        others = "those of other parameters, the scan clips those of each optimizer alone"
        why = f"; the script clips them together with {others}"
    by = f"from those of the loss at {line} by {error / (norm or 1.0):.1%}"
    raise UnrepeatableError(f"the gradients that the optimizer gets differ {by}{why}")


def _detach(module: nn.Module, facts: dict[str, None]) -> None:
    """Take the module from what trains it: a trainer of Lightning, or accelerate."""
    state = vars(module)
    for name in ("_trainer", "_fabric"):
        if state.get(name) is not None:
            state[name] = None
    # Accelerate wraps `forward` in the mixed precision that it chose
    original = state.pop("_original_forward", None)
    if original is not None:
        state.pop("forward", None)
        if getattr(original, "__func__", None) is not type(module).forward:
            state["forward"] = original
        facts["accelerate makes the model compute in mixed precision: the scan trains it without that"] = None
