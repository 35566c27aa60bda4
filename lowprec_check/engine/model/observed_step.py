"""Observes the steps of a training script: its models, batches, losses, optimizers, clipping."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import multiprocessing.process
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowprec_check.engine.model.amp_calls import AmpCalls
from lowprec_check.engine.model.call_recorder import CallRecorder, Node, UnrepeatableError, opened
from lowprec_check.engine.model.loss_program import Backward, Phase, Program, copy_of
from lowprec_check.engine.model.observed_training import (
    CHECKED,
    ONE_AUTOCAST,
    ObservedStep,
    ObservedSteps,
    OptimizerStep,
    StepRecord,
)
from lowprec_check.engine.model.snapshot import saved_tensor
from lowprec_check.engine.model.user_surroundings import replaced
from lowprec_check.engine.model.weight_changes import Sgd, WeightCasts, WeightChanges
from lowprec_check.engine.model.whole_optimizer import (
    Clip,
    OuterCall,
    OuterCalls,
    Template,
    optimizers_in,
    settings_of,
    takes_closure,
)
from lowprec_check.errors import message_of
from lowprec_check.process import system
from lowprec_check.torchkit.devices import MemoryLimit, free_memory, generator_restorers
from lowprec_check.torchkit.pytree import leaves, map_tensors
from lowprec_check.torchkit.source_location import own_line

_SPAWN = torch.multiprocessing.spawn.__code__  # type: ignore[attr-defined]

_FRAMEWORKS = ("transformers.trainer", "lightning", "pytorch_lightning", "accelerate")
"""What trains: how names of modules start that call ``backward()``."""

SECONDS = 60.0
"""After the first call of a model, until its script is left with the steps that it has made."""

_WAIT = 10
"""Steps of an optimizer, after which another one that trains other weights is not waited for; and
backward passes without any."""

_EVALUATED = 100
"""Calls without gradients that are kept: of an evaluation, unless a ``backward()`` follows."""


class ThreadObserver:
    """Replaces functions in the thread that makes it, until it is over."""

    def __init__(self) -> None:
        self._place = os.getpid(), threading.get_ident()
        self._is_over = False

    def waiting(self, go_on: Callable[[], None]) -> None:
        """The script waits; by default, it never does."""

    @property
    def _is_elsewhere(self) -> bool:
        return self._is_over or (os.getpid(), threading.get_ident()) != self._place

    def _unless_over(self, original: Callable[..., Any], observed: Callable[..., Any]) -> Callable[..., Any]:
        """What replaces ``original``; the user's code may keep it, and call it in other threads."""

        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            if self._is_elsewhere:
                return original(*args, **kwargs)
            return observed(original, *args, **kwargs)

        return function


class StepObserver(ThreadObserver):
    """Observes ``steps`` steps of the first optimizer that makes one, in this thread.

    Enter :meth:`observing` around the script, and let its calls of models come by :meth:`call`.
    """

    def __init__(self, steps: int, *, keeps_autocast: bool = False) -> None:
        super().__init__()
        self._amp = AmpCalls(lambda: self._recorder.is_paused, keeps_autocast=keeps_autocast)
        self._recorder = CallRecorder(self._amp.computed)
        self._recorder.on_change = self._weight_changes
        self._torch_call = nn.Module.__call__
        self._since: float | None = None
        self._limit: MemoryLimit | None = None
        """Of what is recorded of a step."""
        self._weights = WeightChanges()
        self._backwards: list[Backward] = []
        self._cleared: list[tuple[int, frozenset[int]]] = []
        """After how many backward passes gradients were cleared, and of which parameters, by id."""
        self._clips: dict[int, list[Clip]] = {}  # by the number of backward passes before them
        self._stepping: list[Optimizer] = []  # whose step() runs, the innermost last
        self._closure = _Closure(0, 0)  # of the outermost
        self._outer_calls = OuterCalls()
        self._outer: OuterCall | None = None
        """A method that may be what makes the step, until it has returned."""
        self._outer_start = 0
        """After how many backward passes gradients were cleared before it."""
        self._outer_step: OptimizerStep | None = None
        """The step that an optimizer made in it."""
        self._no_template: dict[Optimizer, UnrepeatableError] = {}
        """Why an optimizer cannot be taken whole."""
        self._events = 0
        """How many backward passes and steps there were."""
        self._in_autocast = False  # whether a step was made in the autocast block that is open
        self._made_steps: list[OptimizerStep] = []  # of the step that is not complete
        self.has_enough = False
        self._casts = WeightCasts()
        self.found = ObservedSteps(steps, amp=lambda: self._amp.uses, cast_of=self._casts.of)

    def give_up(self, why: str) -> None:
        """Note why no step can be made as the script makes it; the first reason counts."""
        self.found.problem = self.found.problem or why

    # -- While the script runs

    @contextlib.contextmanager
    def observing(self, leave: Callable[[], Any], _wait: Callable[[], None]) -> Iterator[None]:
        """Inside, the functions of torch that train are observed; ``leave`` never returns."""
        self._leave = leave
        places = [(torch.nn.utils, self._clip), (torch.nn.utils.clip_grad, self._clip)]
        observed: list[tuple[Any, str, Callable[..., Any]]] = [
            (torch.autograd, "backward", self._backward),
            (torch.autograd, "grad", self._grad),
            *self._amp.functions,
            *self._casts.functions,
            (torch, "clear_autocast_cache", self._leave_autocast),
            (multiprocessing.process.BaseProcess, "start", self._start_process),
            (Optimizer, "__init__", self._made),
            (Optimizer, "zero_grad", self._zero_grad),
            (nn.Module, "zero_grad", self._zero_grad),
            *((place, f"clip_grad_{what}_", clip) for place, clip in places for what in ("norm", "value")),
        ]
        with contextlib.ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            for place, name, function in observed:
                stack.enter_context(replaced(place, name, self._unless_over(getattr(place, name), function)))
            # A class method, which is bound to the class that the user calls it of
            original = vars(torch.autograd.Function)["apply"]

            def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
                return self._unless_over(original.__get__(None, kind), self._grad)(*args, **kwargs)

            torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
            stack.callback(setattr, torch.autograd.Function, "apply", original)
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code may call models
            stack.enter_context(self._recorder)
            yield
        if not self._is_over:
            self._leave = lambda: None  # it has ended itself
            self._settle()
            self._look_at_weights()
            self._end()
        self._is_over = True

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]) -> Any:
        """The result of the user's call of a model, ``call(module, *args, **kwargs)``."""
        if self._recorder.is_paused or torch._C._get_tracing_state() is not None:
            return call(module, *args, **kwargs)
        self._settle()
        self._limit_step()
        if self.has_enough:
            with self._recorder.paused():
                return self._amp.computed(Node.of(module, args, kwargs), functools.partial(call, module))
        if not (torch.is_grad_enabled() or module.training):
            return call(module, *args, **kwargs)
        # Of a long evaluation nothing is needed: forget it
        is_trained = module.training and torch.is_grad_enabled()
        if not (is_trained or self._backwards) and len(self._recorder.nodes) > _EVALUATED:
            self._recorder.nodes.clear()
        self._begin_call(module)
        node = Node.of(module, args, kwargs)
        node.given = map_tensors((args, kwargs), copy_of)
        node.modes = {part: part.training for part in module.modules()}
        node.restore_generators = list(generator_restorers())
        self._amp.calls(module)
        with self._recorder.paused(), replaced(nn.Module, "__call__", self._torch_call):  # a compiler looks at it
            output = self._amp.computed(node, functools.partial(call, module))
        node.results = [tensor for _, tensor in leaves(output)]
        self._recorder.add(node)
        self._recorder.on = True
        return output

    def method(
        self, method: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of the user's call of a method; it counts if that can be called again."""
        recorder = self._recorder
        if self._is_elsewhere or self.has_enough or recorder.is_paused or not torch.is_grad_enabled():
            return method(module, *args, **kwargs)
        # The script is observed without the autocast that a method enters
        if next(module.parameters(), None) is None or "autocast" in method.__code__.co_names:
            return method(module, *args, **kwargs)
        self._settle()
        self._limit_step()
        self._begin_call(module)
        node, restorers = Node.of(module, args, kwargs), list(generator_restorers())
        node.modes = {part: part.training for part in module.modules()}
        before, was_on, events = len(recorder.nodes), recorder.on, self._events
        recorder.on = True
        result = method(module, *args, **kwargs)
        if self._events != events:  # it trains
            return result
        inside = recorder.nodes[before:]
        node.results = [tensor for _, tensor in leaves(result)]
        if inside and node.computes_like(module, inside, recorder.nodes[:before]):
            node.method, node.inside, node.restore_generators = method.__name__, inside, restorers
            node.given = map_tensors((args, kwargs), copy_of)
            del recorder.nodes[before:]
            recorder.add(node)
        elif not any(isinstance(inner.call, nn.Module) for inner in inside):
            recorder.on = was_on
            if not was_on:
                del recorder.nodes[before:]
        return result

    def _begin_call(self, module: nn.Module) -> None:
        """Note what a call of a module starts from."""
        self.found.calls += 1
        if not self._stepping:
            self._look_at_weights(is_used=True)
        # The first steps are made again from the state before them
        record = self._record
        if record is not None:
            self._outer_calls.calls_model()
            self._save((*module.parameters(), *module.buffers()))

    @property
    def _record(self) -> StepRecord | None:
        """That of the step which is made now, if it is made again later."""
        records, number = self.found.records, len(self.found.steps)
        if number >= CHECKED:
            return None
        if number == len(records):
            records.append(StepRecord())
        return records[-1]

    def _limit_step(self) -> None:
        """Leave a script that takes too long, or of which too much was recorded."""
        # Gradients that nothing seems to use, as of a saliency map, are not kept for a later step
        if len(self._backwards) >= _WAIT and not self._trains_soon():
            self._forget_step()
        now = system.monotonic()
        self._since = self._since or now
        self._limit = self._limit or MemoryLimit.half_of(free_memory(torch.device("cpu")))
        # A step that has begun gets more time, so that one at least is complete
        in_step = bool(self._recorder.nodes or self._backwards) and not self.found.steps
        is_late = now - self._since > SECONDS * (5 if in_step and self._trains_soon() else 1)
        is_large = self._recorder.bytes > self._limit.size
        if not (is_late or is_large):
            return
        self._end()
        limit = f"within {SECONDS:g} s"
        if is_large:
            limit = f"while what is recorded of it fits into {self._limit.why}"
        self.found.unlike = self.found.unlike or f"the script makes no more {limit}"
        if not self.found.steps:
            self.give_up(f"no step of an optimizer is complete {limit}: {self.found.seen}")
        self._leave()

    def _trains_soon(self) -> bool:
        """Whether an optimizer may still make its step with the gradients."""
        return not self._backwards or any(p.grad is not None for p in self._trained_by_optimizers().values())

    def _trained_by_optimizers(self) -> dict[int, nn.Parameter]:
        """The parameters of all optimizers that the script has made, by id."""
        made = [optimizer for optimizer, _ in self.found.made if optimizer is not self.found.by_hand]
        trained: dict[int, nn.Parameter] = {}
        for optimizer in made:
            if hasattr(optimizer, "param_groups"):
                trained |= _trained_by(optimizer)
        return trained

    # -- Weights that the script changes itself

    def _look_at_weights(self, *, is_used: bool = False) -> None:
        """Take changes of weights since the last backward pass for a step of the script's own.

        Weights of optimizers must not change if a loss of the same step ``is_used``.
        """
        weights, found = self._weights, self.found
        if not self._backwards or found.problem is not None:
            return
        with self._recorder.paused():
            changed = weights.changed()
            by_hand = {key: parameter for key, parameter in changed.items() if key in weights.gradients}
            update = weights.sgd(by_hand)
        trained = self._trained_by_optimizers()
        if is_used and changed.keys() & trained.keys() and update is None:
            between = "the backward passes of a step, as sharpness-aware optimizers do"
            if self._made_steps:
                between = "the steps of its optimizers"
            what = f"{weights.line or 'the script'} changes weights between {between}"
            self.give_up(f"{what}, and a scan computes all losses of a step without that")
            self._leave()
            return
        if by_hand and (update is not None or not by_hand.keys() & trained.keys()):
            self._make_step_by_hand(by_hand, update)

    def _others(self) -> dict[int, nn.Parameter]:
        """The weights of optimizers, if any has made a step."""
        return self._trained_by_optimizers() if self.found.states.keys() - {self.found.by_hand} else {}

    def _make_step_by_hand(self, changed: dict[int, nn.Parameter], update: Sgd | None) -> None:
        """Add a step of the script without an optimizer, if SGD makes the same ``update``."""
        weights, found = self._weights, self.found
        made = found.by_hand
        line, trained, earlier = weights.line or "no line that is seen", changed, dict[int, nn.Parameter]()
        if made is not None:
            earlier = _trained_by(made)
        if update is not None:
            with self._recorder.paused():
                trained = weights.trained(changed, update.lr)
                # Rounding may have lost the update of one that changed before
                trained |= {key: parameter for key, parameter in earlier.items() if weights.is_lost(key, update.lr)}
        if update is None or (made is not None and earlier.keys() != trained.keys()):
            what = "not as SGD does from the gradients of its backward passes"
            self.give_up(f"it updates its weights itself, at {line}, and {what}: {found.seen}")
            self._leave()
            return
        gradients = {key: weights.gradients[key] for key in trained}
        if made is None:
            made = found.by_hand = torch.optim.SGD(trained.values(), lr=update.lr)
            found.made[-1] = (made, weights.line)
            found.facts[f"{line} updates the weights itself: the scan makes the same updates with SGD"] = None
        made.param_groups[0].update(update._asdict())
        for settings in found.schedule.get(made, []):
            settings[0]["momentum"] = update.momentum
        self._before_step(made, (), {})
        self._stepping.clear()
        with self._recorder.paused():
            weights.keep_all(trained.values())
        step = self._step_of(made)
        if step is not None:
            self._add_step(step._replace(gradients=gradients))

    def _weight_changes(self, tensor: Tensor, line: str | None) -> None:
        if not self._weights.owner(tensor):
            return
        self._weights.line = line
        if self._outer is None and self._backwards and not self._stepping:
            self._begin_outer(self._outer_calls.find(self._trains_used, is_change=True))

    # -- Methods of the script that are more than a step of an optimizer

    def _trains_used(self, optimizer: Any) -> bool:
        """Whether it trains weights that got gradients."""
        return any(parameter.grad is not None for parameter in _trained_by(optimizer).values())

    def _begin_outer(self, outer: OuterCall | None) -> None:
        self._outer = outer
        if outer is not None:
            self._outer_start = self._start_of(outer.inner)
            self._keep_template(outer.owner, outer.inner)

    def _keep_template(self, owner: Any, inner: Optimizer) -> None:
        """Keep what the first step starts from."""
        if not self.found.steps and inner not in self.found.templates:
            try:
                with self._recorder.paused():
                    self.found.templates[inner] = Template.of(owner, inner)
            except UnrepeatableError as problem:
                self._no_template[inner] = problem

    def _settle(self) -> None:
        """Note what a method of the script's has done to the weights, once it has returned."""
        outer, step = self._outer, self._outer_step
        if outer is None or outer.is_running:
            return
        self._outer = self._outer_step = None
        trained = _trained_by(outer.inner)
        with self._recorder.paused():
            is_changed = bool(self._weights.changed().keys() & trained.keys())
        if not (outer.is_needed or is_changed):  # it only makes the step of the optimizer inside
            outer = None
        if step is None and outer is not None:  # a first pass of several
            step = self._step_of(outer.inner, self._outer_start)
            if step is not None:
                step = step._replace(is_last=False)
                del self._recorder.nodes[self._backwards[-1].nodes :]  # what it computed
        if step is not None and outer is not None:  # which may have cleared gradients
            step = step._replace(call=outer.call, gradients=self._gradients_of(outer.inner))
        if step is not None:
            self._add_step(step)

    def _save(self, tensors: Iterable[Tensor]) -> None:
        record = self._record
        if record is None:
            return
        for tensor in tensors:
            if id(tensor) not in record.values and not is_lazy(tensor):
                record.values[id(tensor)] = (tensor, *saved_tensor(tensor))
                if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                    self._weights.keep(tensor, record.values[id(tensor)][2])

    @property
    def lacks_autocast(self) -> bool:
        """Whether autocast of the script was switched off."""
        return self._amp.has_switched_off

    def _grad(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A function that is no function of torch to its modes."""
        args = tuple(list(argument) if isinstance(argument, Iterator) else argument for argument in args)
        if self._recorder.on:
            return self._recorder.recorded(original, args, kwargs)
        return original(*args, **kwargs)

    def _start_process(self, original: Callable[..., Any], process: Any) -> None:
        """A process that gets a model, or is one of ``torch.multiprocessing.spawn``, may train."""
        values = [*process._args, *process._kwargs.values()]
        spawns = any(frame.f_code is _SPAWN for frame, _ in traceback.walk_stack(None))
        if spawns or any(isinstance(value, nn.Module) for value in values):
            self.found.processes = self.found.processes or own_line(sys._getframe(2))
        original(process)

    def _leave_autocast(self, original: Callable[..., Any]) -> None:
        self._in_autocast = False
        original()

    def _made(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self.found.made.append((optimizer, own_line(sys._getframe(2))))
        return original(optimizer, *args, **kwargs)

    def _zero_grad(self, original: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> Any:
        if self._recorder.is_paused:
            return original(owner, *args, **kwargs)
        self._settle()
        if self._outer is None and not self._stepping:
            self._look_at_weights()
        parameters = owner.parameters() if isinstance(owner, nn.Module) else _trained_by(owner).values()
        cleared = frozenset(map(id, parameters))
        self._amp.clears(cleared)
        if self._record is not None:
            for key in cleared:
                self._record.left.pop(key, None)
        if self._backwards:
            self._cleared.append((len(self._backwards), cleared))
        return original(owner, *args, **kwargs)

    def _clip(self, original: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        self._settle()
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self._amp.clips(listed, sys._getframe(2))
        clip = Clip(original, [id(parameter) for parameter in listed], args, kwargs)
        self._clips.setdefault(len(self._backwards), []).append(clip)
        with self._recorder.paused():
            result = original(listed, *args, **kwargs)
            self._weights.keep_gradients(self._others())
        return result

    def _backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if self._recorder.is_paused:  # inside a model, or another backward pass
            return original(tensors, *args, **kwargs)
        self._settle()
        self._outer_calls.backward()
        self._events += 1
        frame = sys._getframe(2)
        losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        loss = self._amp.unscaled(losses[0])
        self._amp.backward(losses[0], frame)
        if self.has_enough:
            return original(tensors, *args, **kwargs)
        has_gradient = any(gradient is not None for gradient in args[:1])
        if len(losses) > 1 or loss.numel() != 1 or has_gradient:
            self.give_up(f"{own_line(frame)} calls backward() of more than one number")
        self.found.passes += 1
        if self._record is not None and not self._backwards:
            with self._recorder.paused():
                # Keep the gradients that the script has not cleared before it computes others.
                called = {key: tensor for key, (tensor, *_) in self._record.values.items() if tensor.is_leaf}
                for key, tensor in (called | self._trained_by_optimizers()).items():
                    if tensor.grad is not None and bool(tensor.grad.any()):
                        self._record.left[key] = tensor.grad.detach().clone()
        retain, create = (*args[1:3], None, None)[:2]
        keeps_graph = any((retain, create, kwargs.get("retain_graph"), kwargs.get("create_graph")))
        self._backwards.append(Backward(loss, loss.detach().clone(), len(self._recorder.nodes), keeps_graph))
        self.found.framework = self.found.framework or framework_of(frame)
        with self._recorder.paused():
            original(tensors, *args, **kwargs)
            self._weights.keep_gradients(self._others())

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Observe a call of ``step()``, and give it a closure that is observed."""
        if self._is_elsewhere:
            return None
        self._settle()
        self._recorder.on = False
        self._events += 1
        if not any(map(_runs, self._stepping)):  # the last step raised
            self._stepping.clear()
        self._stepping.append(optimizer)
        if len(self._stepping) > 1:  # of another's step, or a method of a base class
            return None
        self._amp.steps(optimizer, sys._getframe(1))
        if self.has_enough:
            self._leave()
        if self._outer is None and self._backwards and (self._record is not None or self.found.templates):
            self._begin_outer(self._outer_calls.find(self._trains_used, step_of=optimizer))
        self._closure = _Closure(len(self._backwards), self._start_of(optimizer))
        given = self._observed_closure(optimizer, args, kwargs)
        if self._backwards:  # else a step without gradients, before the first loss
            self._save(_trained_by(optimizer).values())
        if optimizer not in self.found.states:
            state = None
            if optimizer.state:
                state = copy.deepcopy(optimizer.state_dict()["state"])
            self.found.states[optimizer] = state
        return given

    def _observed_closure(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """The arguments of a step with a closure that is observed; ``None`` if it has none."""
        has_others = len(optimizers_in(optimizer)) > 1
        if has_others:
            self._keep_template(optimizer, optimizer)
        listed = [*args, *kwargs.values()]
        closures = [value for value in listed[1:] if callable(value)]
        if len(closures) != 1:
            return None
        closure, state = closures[0], self._closure
        if takes_closure(optimizer) or not type(optimizer).__module__.startswith("torch."):
            self._keep_template(optimizer, optimizer)

        def evaluated(*own_args: Any, **own_kwargs: Any) -> Any:
            if self._is_elsewhere or self._closure is not state:
                return closure(*own_args, **own_kwargs)
            state.calls += 1
            if state.calls == 1:
                with self._recorder.paused():
                    state.has_moved = bool(self._weights.changed().keys() & _trained_by(optimizer).keys())
                return closure(*own_args, **own_kwargs)
            with self._recorder.paused():
                return closure(*own_args, **own_kwargs)

        def replaced_in(value: Any) -> Any:
            return evaluated if value is closure else value

        return tuple(map(replaced_in, args)), {name: replaced_in(value) for name, value in kwargs.items()}

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._is_elsewhere or not self._stepping:
            return
        self._stepping.pop()
        if self._stepping:
            return
        self._recorder.on = False
        closure, start = self._closure, None
        is_inside = takes_closure(optimizer) or closure.calls > 1 or closure.has_moved
        if is_inside:
            start = closure.start
        elif self._outer is not None:
            start = self._outer_start
        step = self._step_of(optimizer, start)
        if step is None:
            self._outer = None
            return
        if self._record is not None or self.found.templates:
            with self._recorder.paused():
                self._weights.keep_all(_trained_by(optimizer).values())
        if is_inside:
            if step.end - closure.backwards != 1:
                count, name = step.end - closure.backwards, type(optimizer).__name__
                self.give_up(f"the closure of {name}.step() calls backward() {count} times")
            clears = any(count == closure.backwards for count, _ in self._cleared) or not closure.backwards
            step = step._replace(inside=closure.backwards, clears_inside=clears)
        if self._outer is not None:
            self._outer_step = step
        else:
            self._add_step(step)

    def _start_of(self, optimizer: Optimizer) -> int:
        """After how many backward passes its gradients were cleared."""
        trained = _trained_by(optimizer).keys()
        return max((count for count, cleared in self._cleared if trained <= cleared), default=0)

    def _step_of(self, optimizer: Optimizer, start: int | None = None) -> OptimizerStep | None:
        """A step that it has made; ``None`` without gradients, as one made to please a scheduler.

        ``start``: after how many backward passes its gradients were cleared, before the step.
        """
        trained, end = _trained_by(optimizer), len(self._backwards)
        if start is None:
            start = self._start_of(optimizer)
        if start == end:
            return None
        clips = [clip for clip in self._clips.get(end, []) if any(key in trained for key in clip.parameters)]
        return OptimizerStep(optimizer, start, end, clips, self._gradients_of(optimizer), {}, settings_of(optimizer))

    def _gradients_of(self, optimizer: Optimizer) -> dict[int, Tensor]:
        """Copies, if the step is made again later."""
        if self._record is None:
            return {}
        with self._recorder.paused():
            return {key: p.grad.clone() for key, p in _trained_by(optimizer).items() if p.grad is not None}

    def _add_step(self, step: OptimizerStep) -> None:
        optimizer = step.optimizer
        trained = _trained_by(optimizer)
        settings, before = step.settings, self.found.schedule.setdefault(optimizer, [])
        if before and len(before[0]) != len(settings):
            self.found.unlike = "the script adds parameters to its optimizer before the next one"
            self._forget_step()
            if not self.found.steps:
                self.give_up("it adds parameters to its optimizer in its first step")
            self._leave()
        # Whether the last step was made in this block of autocast too: torch counts those it is in
        in_block = torch.autocast_increment_nesting() > 1
        torch.autocast_decrement_nesting()
        casts = torch.is_autocast_cache_enabled() and bool(self._amp.open_blocks)
        if self._in_autocast and casts:
            self.found.facts[ONE_AUTOCAST] = None
        self._in_autocast = in_block
        with self._recorder.paused():
            if self._record is not None:
                step = step._replace(weights={key: p.detach().clone() for key, p in trained.items()})
            if step.call is not None:
                self._weights.keep_all(trained.values())
        self._made_steps.append(step)
        if step.is_last:
            before.append(settings)
        # Other optimizers may make their steps from the same losses
        if self.found.problem is None and not self._is_complete():
            self._recorder.on = True
            return
        self._end()
        is_over = self.found.problem is not None or bool(self.found.unlike)
        if is_over or len(self.found.steps) >= max(self.found.wanted, CHECKED):
            # What a script asks its scaler for after a step shows until the next one
            self.has_enough = self._amp.has_scaler
            if not self.has_enough:
                self._leave()

    def _is_complete(self) -> bool:
        """Whether each optimizer has made a step; in the first, all that train other weights."""
        made, found = {step.optimizer for step in self._made_steps if step.is_last}, self.found
        if found.steps or not made:
            return bool(made) and made >= set(found.optimizers)
        trained = {key for optimizer in made for key in _trained_by(optimizer)}
        others = [_trained_by(other) for other, _ in found.made if other not in made and hasattr(other, "param_groups")]
        # One that trains other weights is waited for, unless many steps are made before its first
        for own in others:
            if own.keys().isdisjoint(trained) and any(p.requires_grad for p in own.values()):
                return len(self._made_steps) >= max(_WAIT, found.wanted)
        return True

    def _end(self) -> None:
        """Add the step that was made."""
        made, found = self._made_steps, self.found
        while made and not made[-1].is_last:
            made.pop()
        if found.problem is None and made and (not found.steps or self._is_complete()):
            optimizers = list(dict.fromkeys(step.optimizer for step in made))
            if not found.steps:
                found.optimizers = optimizers
                self._keep_templates_of(made)
            further = [optimizer for optimizer in optimizers if optimizer not in found.optimizers]
            if further:
                line = dict(found.made).get(further[0])
                what = f"{type(further[0]).__name__}, made at {line}, makes a step after those of its first step"
                self.give_up(f"{what}, of weights that these train too")
                self._forget_step()
                return
            # The steps of one optimizer that waited in vain for others are steps of their own
            parts = [made]
            if len(optimizers) == 1 and not found.steps:
                parts = [[]]
                for step in made:
                    parts[-1].append(step)
                    if step.is_last and step is not made[-1]:
                        parts.append([])
            with self._recorder.paused():
                # Replace calls of methods, of which more is used than they return, by what they
                # called.
                opened_nodes = opened(self._recorder.nodes, [backward.loss for backward in self._backwards])
                counts = [0, *itertools.accumulate(map(len, opened_nodes))]
                self._recorder.nodes[:] = itertools.chain(*opened_nodes)
                self._backwards[:] = [backward._replace(nodes=counts[backward.nodes]) for backward in self._backwards]
                try:
                    for steps in parts[: max(found.wanted, CHECKED)]:
                        self._add(steps)
                except UnrepeatableError as problem:
                    if found.steps:
                        found.unlike = message_of(problem)
                    else:
                        self.give_up(message_of(problem))
        self._forget_step()

    def _keep_templates_of(self, made: Sequence[OptimizerStep]) -> None:
        """Keep the templates of what is more than the step of an optimizer."""
        whole = [step.optimizer for step in made if step.call is not None or step.inside is not None]
        whole += [step.optimizer for step in made if len(optimizers_in(step.optimizer)) > 1]
        problem = next((self._no_template[one] for one in whole if one in self._no_template), None)
        if problem is not None:
            self.give_up(message_of(problem))
        self.found.templates = {one: template for one, template in self.found.templates.items() if one in whole}

    def _forget_step(self) -> None:
        self._recorder.forget()
        self._weights.gradients.clear()
        for records in (self._backwards, self._cleared, self._made_steps, self._clips):
            records.clear()
            records.clear()

    def forget(self) -> None:
        """Free all that was observed."""
        self._forget_step()
        self._amp.forget()
        self.found = ObservedSteps(0)

    # -- After a step of the optimizer

    def _add(self, made: list[OptimizerStep]) -> None:
        found = self.found
        trained = {key: p for optimizer in found.optimizers for key, p in _trained_by(optimizer).items()}
        plan = plan_of(made, self._backwards, found.optimizers)
        program = Program(self._recorder.nodes[: plan[-1].nodes], plan, trained, self._recorder.copies)
        used = {id(loss) for loss in program.losses}
        backwards = [backward for backward in self._backwards if id(backward.loss) in used]
        loss = sum(float(backward.value) for backward in backwards)
        step = ObservedStep.of(program, found.steps[0] if found.steps else None, loss)
        record = self._record
        if record is None:
            program.release()
        else:
            record.backwards, record.made = backwards, list(made)
            # Those of its calls: an evaluation may come before them
            for node in reversed(program.calls):
                record.modes |= node.modes
        if not found.steps:
            dtypes = [str(dtype).removeprefix("torch.") for dtype in self._amp.dtypes]
            found.facts |= dict.fromkeys(found.facts_of(program, dtypes, self._amp.scale))
        found.steps.append(step)
        if len(found.steps) >= CHECKED and found.by_hand is None and not found.templates:
            self._weights.forget()


def plan_of(
    made: Sequence[OptimizerStep], backwards: Sequence[Backward], optimizers: Sequence[Optimizer]
) -> list[Phase]:
    """The phases of the steps ``made``, from the backward passes that they use."""
    plan: list[Phase] = []
    waiting = [(optimizers.index(step.optimizer), step) for step in made]
    for index, backward in enumerate([*backwards, None]):
        # Steps after the last backward pass end its phase
        done = [number for number, step in waiting if step.end <= index]
        waiting = [(number, step) for number, step in waiting if step.end > index]
        if done:
            plan[-1] = plan[-1]._replace(steps=(*plan[-1].steps, *done))
        inside = any(step.inside == index for _, step in waiting)
        clears = tuple(
            dict.fromkeys(
                number
                for number, step in waiting
                if step.start == index or (step.inside == index and step.clears_inside)
            )
        )
        if backward is None or not any(step.start <= index for _, step in waiting):
            continue
        # Only the backward passes of one graph are made as one
        if not plan or clears or inside or plan[-1].steps or not backwards[index - 1].keeps_graph:
            plan.append(Phase(clears, (), 0, (), inside))
        plan[-1] = plan[-1]._replace(losses=(*plan[-1].losses, backward.loss), nodes=backward.nodes)
    # Before the first backward pass, those are cleared that make a step before they are cleared
    cleared, stepped = set[int](), set(plan[0].steps)
    for phase in plan[1:]:
        cleared |= set(phase.clears)
        # One that computes a loss itself has used the gradients before
        stepped |= set(phase.steps) - (set() if phase.is_inside else set(phase.clears))
    first = tuple(number for number in range(len(optimizers)) if number in stepped or number not in cleared)
    return [plan[0]._replace(clears=first), *plan[1:]]


def _trained_by(optimizer: Optimizer) -> dict[int, nn.Parameter]:
    """Its parameters, by id."""
    return {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}


@dataclasses.dataclass
class _Closure:
    """The closure that a step is called with, if any."""

    backwards: int
    """How many backward passes there were before the step."""
    start: int
    """After how many gradients were cleared before it."""
    calls: int = 0
    has_moved: bool = False
    """Whether the step changed weights before it called the closure."""


def _runs(optimizer: Optimizer) -> bool:
    """Whether its ``step()`` is running: torch wraps that in a function."""
    frames = (frame for frame, _ in traceback.walk_stack(None) if frame.f_code.co_name == "wrapper")
    return any(frame.f_locals.get("self") is optimizer for frame in frames)


def framework_of(frame: FrameType) -> str:
    """The outermost that calls it: the Trainer of transformers uses accelerate."""
    outermost = ""
    for at, _ in traceback.walk_stack(frame):
        name = f"{at.f_globals.get('__name__')}."
        outermost = next((start for start in _FRAMEWORKS if name.startswith(f"{start}.")), outermost)
    return outermost.partition(".")[0]
