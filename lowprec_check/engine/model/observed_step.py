"""Observes the steps that a training script makes: its models, batches, losses, optimizer and clipping, as they happen."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowprec_check.engine.core.devices import generator_restorers, kept_generators
from lowprec_check.engine.core.pytree import leaves, map_tensors
from lowprec_check.engine.core.source_location import own_line
from lowprec_check.engine.model.kept_files import replaced
from lowprec_check.engine.model.loss_program import (
    Node,
    ObservedLoss,
    Program,
    Recorder,
    ScriptStep,
    UnrepeatableError,
    sum_of,
)
from lowprec_check.engine.model.optimizer_like import Clip, OptimizerLike, Settings, settings_of
from lowprec_check.engine.model.snapshot import restore_tensor, saved_tensor
from lowprec_check.errors import UsageError, message_of
from lowprec_check.process import system

SECONDS = 60.0
"""After the first call of a model, until its script is left with the steps that it has made."""

DEFINE_PARTS = "Define `model`, `inputs`, `loss` and `optimizer` in a file and scan that: see docs/training.md."

_FRAMEWORKS = {
    "transformers.trainer": "transformers",
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "accelerate": "accelerate",
}
"""What trains, by the start of the name of a module that calls ``backward()``."""


class Batch(NamedTuple):
    """What a step reads."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Tensor, ...]


class ObservedTraining(NamedTuple):
    """The training step of a script; made again, it gave the same loss and the same gradients."""

    model: nn.Module
    loss: ObservedLoss
    optimizer: OptimizerLike
    batches: list[Batch]
    """Of the first step, and of those after it."""
    line: str | None
    """That calls the model."""
    framework: str
    """What calls ``backward()``: ``lightning``, ``transformers`` or ``accelerate``; empty if the script does."""
    notes: tuple[str, ...]


class _Backward(NamedTuple):
    """A call of ``backward()``."""

    loss: Tensor
    value: Tensor
    """Of the loss, which may be changed in place later."""
    nodes: int
    """How many were recorded before it."""
    scale: float
    """Of a ``GradScaler``; 1 without one."""


class _Step(NamedTuple):
    program: Program
    batch: Batch
    root: nn.Module


class StepObserver:
    """Observes ``steps`` steps of the first optimizer that makes one, in this thread; :meth:`training` is what a scan makes of them.

    Enter :meth:`observing` around the script, and let its calls of models come by :meth:`call`.
    """

    def __init__(self, steps: int) -> None:
        self._wanted, self._recorder = steps, Recorder()
        self._place = os.getpid(), threading.get_ident()
        self._is_over = False
        self._since: float | None = None
        self._backwards: list[_Backward] = []
        self._cleared: dict[int, int] = {}
        """How many of them the gradients of an optimizer, by its id, do not have any more."""
        self._scaled: dict[int, tuple[Tensor, Tensor, float]] = {}
        self._clips: list[Clip] = []
        self._values: dict[int, tuple[Tensor, Tensor, Tensor, dict[str, Any]]] = {}
        """Of parameters and buffers, before the first step."""
        self._states: dict[Optimizer, Any] = {}
        """Of optimizers, before their first step."""
        self._optimizer: Optimizer | None = None
        self._schedule: list[Settings] = []
        self._steps: list[_Step] = []
        self._first: list[_Backward] = []
        """Of the first step, and so are these:"""
        self._first_clips: list[Clip] = []
        self._gradients: dict[int, Tensor] = {}
        self._is_unlike = False
        """Whether a step was not like the first one."""
        self._facts: dict[str, None] = {}
        self._framework = ""
        self._problem: UnrepeatableError | None = None

    def give_up(self, why: str) -> None:
        """Note why no step can be made as the script makes it; the first reason counts."""
        self._problem = self._problem or UnrepeatableError(why)

    # -- While the script runs

    @contextlib.contextmanager
    def observing(self, leave: Callable[[], Any]) -> Iterator[None]:
        """Inside, the functions of torch that train a model are observed. ``leave`` leaves the script, and does not return."""
        self._leave = leave
        places = [(torch.nn.utils, self._clip), (torch.nn.utils.clip_grad, self._clip)]
        observed: list[tuple[Any, str, Callable[..., Any]]] = [
            (torch.autograd, "backward", self._backward),
            (torch.autograd, "grad", self._grad),
            (torch.amp.GradScaler, "scale", self._scale),
            (Optimizer, "zero_grad", self._zero_grad),
            *((place, f"clip_grad_{what}_", clip) for place, clip in places for what in ("norm", "value")),
        ]
        with contextlib.ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            for place, name, function in observed:
                stack.enter_context(replaced(place, name, self._unless_over(getattr(place, name), function)))
            kept = vars(torch.autograd.Function)["apply"]

            def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
                return self._unless_over(kept.__get__(None, kind), self._grad)(*args, **kwargs)

            torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
            stack.callback(setattr, torch.autograd.Function, "apply", kept)
            stack.enter_context(self._recorder)
            yield
        self._is_over = True

    @property
    def _is_elsewhere(self) -> bool:
        return self._is_over or (os.getpid(), threading.get_ident()) != self._place

    def _unless_over(self, kept: Callable[..., Any], observed: Callable[..., Any]) -> Callable[..., Any]:
        """What replaces ``kept``: the user's code may keep it for good, and call it in other threads."""

        @functools.wraps(kept)
        def function(*args: Any, **kwargs: Any) -> Any:
            if self._is_elsewhere:
                return kept(*args, **kwargs)
            return observed(kept, *args, **kwargs)

        return function

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]) -> Any:
        """The result of the user's call of a model, ``call(module, *args, **kwargs)``."""
        self._since = self._since or system.monotonic()
        if system.monotonic() - self._since > SECONDS * (5 if self._backwards and not self._steps else 1):
            self._leave()
        if not torch.is_grad_enabled() or self._recorder.is_paused:
            return call(module, *args, **kwargs)
        if not self._steps:
            self._save((*module.parameters(), *module.buffers()))
        node = Node.of(module, args, kwargs)
        node.given = map_tensors((args, kwargs), _copy_of)
        node.restore_generators = list(generator_restorers())
        with self._recorder.paused():
            output = call(module, *args, **kwargs)
        node.results = [tensor for _, tensor in leaves(output)]
        self._recorder.nodes.append(node)
        self._recorder.on = True
        return output

    def _save(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if id(tensor) not in self._values:
                self._values[id(tensor)] = (tensor, *saved_tensor(tensor))

    def _grad(self, kept: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A function that is no function of torch to its modes."""
        return self._recorder.recorded(kept, args, kwargs) if self._recorder.on else kept(*args, **kwargs)

    def _scale(self, kept: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        scaled = kept(scaler, outputs)
        if isinstance(outputs, Tensor) and scaler.is_enabled():
            self._scaled[id(scaled)] = (scaled, outputs, float(scaler.get_scale()))
        return scaled

    def _zero_grad(self, kept: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self._cleared[id(optimizer)] = len(self._backwards)
        return kept(optimizer, *args, **kwargs)

    def _clip(self, kept: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self._clips.append(Clip(kept, [id(parameter) for parameter in listed], args, kwargs))
        with self._recorder.paused():
            return kept(listed, *args, **kwargs)

    def _backward(self, kept: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(2)
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        _, loss, scale = self._scaled.get(id(given[0]), (None, given[0], 1.0))
        if len(given) > 1 or loss.numel() != 1 or any(found is not None for found in args[:1]):
            self.give_up(f"{own_line(frame)} calls backward() of more than one number")
        self._backwards.append(_Backward(loss, loss.detach().clone(), len(self._recorder.nodes), scale))
        self._framework = self._framework or _framework_of(frame)
        with self._recorder.paused():
            return kept(tensors, *args, **kwargs)

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._is_elsewhere:
            return
        if not self._steps:
            self._save(parameter for group in optimizer.param_groups for parameter in group["params"])
        if optimizer not in self._states:
            self._states[optimizer] = copy.deepcopy(optimizer.state_dict()["state"]) if optimizer.state else None

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        backwards = self._backwards[self._cleared.get(id(optimizer), 0) :]
        if self._is_elsewhere or not backwards:
            return  # without gradients, as a step is made to please a scheduler
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer:
            kind, line = type(optimizer).__name__, own_line(sys._getframe(1))
            self._facts[f"the script has another optimizer, {kind}, at {line}: the scan does not make its steps"] = None
        else:
            with self._recorder.paused():
                try:
                    self._add(optimizer, backwards)
                except UnrepeatableError as problem:
                    self.give_up(message_of(problem))
        self._recorder.on = False
        for kept in (self._recorder.nodes, self._backwards, self._cleared, self._scaled, self._clips):
            kept.clear()
        if self._problem is not None or self._is_unlike or len(self._steps) >= self._wanted:
            self._leave()

    # -- After a step of the optimizer

    def _add(self, optimizer: Optimizer, backwards: list[_Backward]) -> None:
        trained = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        nodes = self._recorder.nodes[: backwards[-1].nodes]
        program = Program(nodes, [backward.loss for backward in backwards], trained)
        step = self._bound(program)
        if not self._steps:
            self._first = list(backwards)
            self._first_clips = [clip for clip in self._clips if any(known in trained for known in clip.parameters)]
            self._gradients = {known: p.grad.clone() for known, p in trained.items() if p.grad is not None}
            self._note_facts(program)
        else:
            program.release()
            self._is_unlike = program.form != self._steps[0].program.form
        if not self._is_unlike:
            self._schedule.append(settings_of(optimizer))
            self._steps.append(step)

    def _bound(self, program: Program) -> _Step:
        call = program.single
        if call is not None and isinstance(call.call, nn.Module):
            targets = program.bind(call.call, {})
            args, kwargs = call.given
            return _Step(program, Batch(args, kwargs, tuple(targets)), call.call)
        root = self._steps[0].root if self._steps else ScriptStep(program)
        names: dict[nn.Module, str] = {}
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
        return _Step(program, Batch(tuple(program.bind(root, names)), {}, ()), root)

    def _note_facts(self, program: Program) -> None:
        facts = self._facts
        dtypes = {dtype: None for node in program.nodes for dtype in node.autocasts.values()}
        made = [f"under autocast to {str(dtype).removeprefix('torch.')}" for dtype in dtypes]
        if self._first[0].scale != 1.0:
            made.append(f"with a GradScaler at {self._first[0].scale:g}")
        if made:
            facts[f"the script trains {' and '.join(made)}: fp32 is trained without"] = None
        if len(self._first) > 1:
            facts[
                f"the script calls backward() {len(self._first)} times for a step: the scan calls it once, of the sum of the losses, "
                "which gives the same gradients and takes more memory"
            ] = None
        if len(program.calls) > 1:
            names = ", ".join(dict.fromkeys(type(node.call).__name__ for node in program.calls))
            facts[
                f"the loss follows from {len(program.calls)} calls ({names}): the scanned module makes all of them"
            ] = None
        for node in program.numbers[:1]:
            facts[
                f"{node.line} makes a number of what the model computes ({node.name}): where the loss depends on it, it is that of the "
                "script's step"
            ] = None

    # -- After the script was left

    def training(self, script: str) -> ObservedTraining | None:
        """What a scan trains, after the first step was made again; ``None`` if the script computes no gradients.

        Raises :class:`UsageError` if no step can be made as the script makes it.
        """
        try:
            if self._problem is not None:
                raise self._problem
            if not self._steps and not self._backwards:
                return None
            if not self._steps or self._optimizer is None:
                raise UnrepeatableError(
                    "it makes no step of a torch.optim.Optimizer with the gradients that it computes"
                )
            program, _, root = self._steps[0]
            loss, line = ObservedLoss(program, root), program.calls[0].line
            if isinstance(root, ScriptStep):
                for parameter in root.parameters():  # of other optimizers
                    parameter.requires_grad_(id(parameter) in program.trained)
            state = self._states[self._optimizer]
            optimizer = OptimizerLike(self._optimizer, root, self._first_clips, state, self._schedule)
            self._check(optimizer, loss)
        except UnrepeatableError as problem:
            raise UsageError(f"The training of {script} cannot be scanned: {problem}.", DEFINE_PARTS) from None
        for module in root.modules():
            _detach(module, self._facts)
        program.release()
        batches = [step.batch for step in self._steps]
        notes = (f"the training step is that of the script, observed at {line}", *self._notes(optimizer))
        return ObservedTraining(root, loss, optimizer, batches, line, self._framework, notes)

    def _check(self, made: OptimizerLike, loss: ObservedLoss) -> None:
        """Make the first step again up to its gradients; raises :class:`UnrepeatableError` if they or the loss differ."""
        program, batch, root = self._steps[0]
        given = batch.args if isinstance(root, ScriptStep) else batch.targets
        scale = self._first[0].scale

        def again() -> Any:
            args, kwargs = map_tensors((batch.args, batch.kwargs), _copy_of)
            return root(*args, **kwargs)

        self._restore()
        try:
            with kept_generators(), torch.enable_grad():
                losses = program.run(root, map_tensors(given, _copy_of), again=again)
                for found, first in zip(losses, self._first, strict=True):
                    if not torch.allclose(found, first.value, rtol=_rounding(found), atol=0, equal_nan=True):
                        raise UnrepeatableError(
                            f"computed again from the same batch, the loss at {loss.line} is {found.item():g}, not {first.value.item():g}"
                        )
                (sum_of(losses) * scale).backward()
                for parameter in root.parameters():
                    if parameter.grad is not None:
                        parameter.grad.div_(scale)
                made.clip([parameter for parameter in root.parameters() if parameter.requires_grad])
                pairs = [
                    (torch.zeros_like(p) if p.grad is None else p.grad, self._gradients[id(p)])
                    for p in root.parameters()
                    if id(p) in self._gradients
                ]
            error = sum(float((a - b).double().square().sum()) for a, b in pairs) ** 0.5
            norm = sum(float(b.double().square().sum()) for _, b in pairs) ** 0.5
        finally:
            self._restore()
        if not error <= _SAME * norm:
            raise UnrepeatableError(
                f"the gradients that the optimizer gets differ from those of the loss at {loss.line} by {error / (norm or 1.0):.1%}"
            )

    def _restore(self) -> None:
        """Make parameters and buffers as they were before the first step."""
        for saved in self._values.values():
            restore_tensor(*saved)
            saved[0].grad = None

    def _notes(self, made: OptimizerLike) -> Iterator[str]:
        for clip in made.clips:
            yield f"gradients are clipped as in the script: {clip.code.removeprefix('torch.nn.utils.')}"
        rates, count = made.rates, len(self._steps)
        if not any(rates) and "initial_lr" in made.schedule[0][0]:
            for settings in [found for step in made.schedule for found in step]:
                settings["lr"] = settings["initial_lr"]
            yield f"the learning rate of the script is 0 in its first step (a warm-up): the scan uses {made.rates[0]:g}"
        elif len(set(rates)) > 1:
            yield f"the learning rate is that of the script in each step: {rates[0]:g} to {rates[-1]:g}"
        if made.state:
            yield "the optimizer starts from the state that it has in the script"
        if count < self._wanted:
            why = "the next one computes something else" if self._is_unlike else "the script makes no more in the time"
            yield f"{count} of the {self._wanted} steps {'is' if count == 1 else 'are'} observed ({why}): their batches are repeated"
        yield from self._facts


_SAME = 1e-3
"""How far gradients may differ, as a part of their norm: sums of several losses are rounded otherwise."""


def _rounding(tensor: Tensor) -> float:
    """How far two results may differ: not at all on the CPU; kernels of accelerators may add in another order."""
    return 0.0 if tensor.device.type == "cpu" else 1e-4


def _copy_of(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _framework_of(frame: FrameType | None) -> str:
    """The outermost that calls it: the Trainer of transformers uses accelerate."""
    found = ""
    while frame is not None:
        name = f"{frame.f_globals.get('__name__')}."
        found = next((one for start, one in _FRAMEWORKS.items() if name.startswith(f"{start}.")), found)
        frame = frame.f_back
    return found


def _detach(module: nn.Module, facts: dict[str, None]) -> None:
    """Take the module from what trains it: a trainer of Lightning, the mixed precision of accelerate."""
    state = vars(module)
    for name in ("_trainer", "_fabric"):
        if state.get(name) is not None:
            state[name] = None
    original = state.pop("_original_forward", None)
    if original is not None:
        state.pop("forward", None)
        if getattr(original, "__func__", None) is not type(module).forward:
            state["forward"] = original
        facts["accelerate makes the model compute in mixed precision: the scan trains it without that"] = None
