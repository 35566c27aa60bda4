"""Optimizers whose step is more than ``step()`` after a backward pass.

Sharpness-aware ones change the weights between two passes, others wrap an optimizer, or compute
losses again in a closure. Their own methods are called again, on a copy of the script's object.
"""

from __future__ import annotations

import collections
import copy
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowprec_check.engine.model.call_recorder import UnrepeatableError
from lowprec_check.engine.model.user_code import parameters_of
from lowprec_check.errors import UsageError, message_of, type_name
from lowprec_check.torchkit.source_location import is_user_code

# -- Optimizers like one of the user's

Settings = list[dict[str, Any]]
"""Of each parameter group, everything but its parameters."""

IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Settings that choose how a step is computed, which no scheduler changes."""


class Clip(NamedTuple):
    """A call of ``clip_grad_norm_`` or ``clip_grad_value_``."""

    function: Callable[..., Any]
    parameters: list[int]  # their ids
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def code(self) -> str:
        """``torch.nn.utils.clip_grad_norm_(parameters, 1.0)``."""
        arguments = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        return f"torch.nn.utils.{self.function.__name__}({', '.join(['parameters', *arguments])})"


class OptimizerLike:
    """Makes optimizers with the class and parameter groups of ``given``, the user's of ``model``.

    A scheduler may have set a rate for its first step, such as 0 for a warm-up: it is left out,
    unless ``schedule`` has the settings of each step. ``state`` is that before the first step.
    """

    is_whole = False
    """Whether what a script calls is copied, of which several calls may make a step."""
    takes_closure = False
    """Whether its step computes losses itself."""

    def __init__(
        self,
        given: torch.optim.Optimizer,
        model: nn.Module,
        clips: Sequence[Clip] = (),
        state: dict[int, Any] | None = None,
        schedule: Sequence[Settings] = (),
    ) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        position = {id(parameter): index for index, parameter in enumerate(trained)}
        count = len(schedule[0]) if schedule else None  # a script may have added some later
        groups = given.param_groups[:count]
        self.parts = [self]
        listed = [parameter for group in groups for parameter in group["params"]]
        self.foreign = sum(parameter.requires_grad and id(parameter) not in position for parameter in listed)
        """How many parameters it trains that are not of the model."""
        self._kind: Any = type(given)
        self._groups = [[position[id(p)] for p in group["params"] if id(p) in position] for group in groups]
        self.schedule = list(schedule)
        if not schedule:
            self.schedule = [settings_of(given)]
            for settings in self.schedule[0]:  # as they are after a warm-up
                rate = settings.pop("initial_lr", settings.get("lr"))
                if rate is not None:
                    settings["lr"] = rate
        # Arguments without a default value, which the class needs besides the groups
        needed = [name for name, parameter in parameters_of(self._kind).items() if _is_needed(parameter)]
        self._needed = {name: given.defaults[name] for name in needed if name in given.defaults}
        # The user's numbers count parameters that are not of the model too
        numbers = [number for number, parameter in enumerate(listed) if id(parameter) in position]
        self.state = {new: (state or {})[old] for new, old in enumerate(numbers) if old in (state or {})}
        self.clips = [
            clip._replace(parameters=[position[key] for key in clip.parameters if key in position]) for clip in clips
        ]

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """An optimizer of ``parameters`` like those of the model; raises if it has none."""
        if not any(self._groups):
            hint = "Make it of model.parameters(), or define `optimizer(parameters)`."
            raise UsageError("`optimizer` has none of the parameters of the model that is scanned.", hint)
        listed, first = list(parameters), self.schedule[0]
        groups = zip(self._groups, first, strict=True)
        made: torch.optim.Optimizer = self._kind(
            [{"params": [listed[index] for index in indices], **settings} for indices, settings in groups],
            **self._needed,
        )
        # Not the state itself, which each optimizer changes in place
        if self.state:
            made.load_state_dict(made.state_dict() | {"state": copy.deepcopy(self.state)})
        done = 0

        def before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            nonlocal done
            # Settings of this step, as the user's scheduler made them
            if len(self.schedule) > 1:
                settings = self.schedule[min(done, len(self.schedule) - 1)]
                for group, values in zip(optimizer.param_groups, settings, strict=True):
                    rate = group.get("lr")
                    changed = {name: value for name, value in values.items() if name not in IMPLEMENTATION}
                    group.update(copy.deepcopy(changed))
                    if isinstance(rate, Tensor):  # as a scheduler does
                        group["lr"] = rate.fill_(values["lr"])
            done += 1
            self.clip(listed, optimizer)

        if self.clips or len(self.schedule) > 1:
            made.register_step_pre_hook(before_step)
        return made

    def clip(self, parameters: Sequence[nn.Parameter], optimizer: Any = None) -> None:
        """Clip the gradients."""
        # A GradScaler leaves it to a fused optimizer to unscale them in its step
        scale = getattr(optimizer, "grad_scale", None)
        if self.clips and isinstance(scale, Tensor):
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(scale.to(parameter.grad.device))
            optimizer.grad_scale = torch.ones_like(scale)
        for clip in self.clips:
            clip.function([parameters[index] for index in clip.parameters], *clip.args, **clip.kwargs)

    def owned(self, parameters: Sequence[nn.Parameter]) -> list[Sequence[nn.Parameter]]:
        """By part, the parameters that it gets of those of the model."""
        return [parameters]

    @property
    def rates(self) -> list[float]:
        """The learning rate of the first group in each step."""
        return [float(settings[0].get("lr", 1.0)) for settings in self.schedule]


class OptimizersTogether:
    """Several optimizers of different parameters, seen as one."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]
        self.defaults = {name: value for part in parts for name, value in part.defaults.items()}
        self.state: Any = collections.defaultdict(dict)
        for part in parts:
            self.state.update(part.state)
            if isinstance(part, torch.optim.Optimizer):
                part.state = self.state

    def step(self) -> None:
        """Make the step of each."""
        for part in self.parts:
            part.step()


class OptimizersLike:
    """Makes optimizers like the ``parts``, each of the model's parameters at its ``positions``."""

    def __init__(self, parts: Sequence[OptimizerLike], positions: Sequence[Sequence[int]]) -> None:
        self.parts, self.positions = parts, positions
        self.is_whole = any(part.is_whole for part in parts)
        self.takes_closure = any(part.takes_closure for part in parts)

    def __call__(self, parameters: Iterable[nn.Parameter]) -> Any:
        """Optimizers of ``parameters``, in the order of those of the model."""
        owned = self.owned(list(parameters))
        return OptimizersTogether([part(own) for part, own in zip(self.parts, owned, strict=True)])

    def owned(self, parameters: Sequence[nn.Parameter]) -> list[Sequence[nn.Parameter]]:
        """By part, the parameters that it gets of those of the model."""
        return [[parameters[index] for index in places] for places in self.positions]


def takes_closure(optimizer: Any) -> bool:
    """Whether its ``step()`` cannot be called without a closure."""
    _, *parameters = parameters_of(type(optimizer).step).values()  # a scheduler wraps that of the object
    return any(map(_is_needed, parameters))


def settings_of(optimizer: torch.optim.Optimizer) -> Settings:
    """A copy of the settings of each parameter group."""
    return [
        copy.deepcopy({name: value for name, value in group.items() if name not in ("params", "param_names")})
        for group in optimizer.param_groups
    ]


def _is_needed(parameter: Any) -> bool:
    return parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD


# -- Optimizers that are taken whole

CLOSURE = object()
"""Stands for the closure among the arguments of a call."""

_WRAPPING = ("accelerate", "deepspeed", "lightning", "pytorch_lightning", "torch", "transformers")
"""Packages whose wrappers of optimizers only make the step of the optimizer inside."""

_CONSTANTS = (bool, int, float, str, type(None))
"""Types of arguments that are given again."""


class OptimizerCall(NamedTuple):
    """A call that changes weights: ``first_step(zero_grad=True)``."""

    method: str
    arguments: Mapping[str, Any]

    @property
    def code(self) -> str:
        """The call, without its owner."""
        given = [
            "closure" if value is CLOSURE else f"{name}={value!r}"
            for name, value in self.arguments.items()
            if value is not None
        ]
        return f"{self.method}({', '.join(given)})"


class Template(NamedTuple):
    """What a step starts from: copies that are made again for each run."""

    owner: Any
    """What the script calls, such as a sharpness-aware optimizer."""
    inner: Optimizer
    """The optimizer that makes the update; perhaps the owner itself."""

    @classmethod
    def of(cls, owner: Any, inner: Optimizer) -> Template:
        """A copy of both as they are now, of the same parameters."""
        parameters = [p for group in inner.param_groups for p in group["params"]]
        return cls(*_copies(owner, inner, {id(parameter): parameter for parameter in parameters}))


class WholeOptimizer:
    """A copy of a script's optimizer; ``step()`` makes the next of the ``calls`` of a step."""

    def __init__(self, template: Template, calls: Sequence[OptimizerCall], before: Callable[[Any, int], None]) -> None:
        self.owner, self.inner = template
        self.calls, self.stage = calls, 0
        self._before = before
        self.closure: Callable[[], Tensor] | None = None
        """Computes the loss of a call that takes a closure, and its gradients."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer inside."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        """That of the optimizer inside."""
        return self.inner.state

    @property
    def states(self) -> list[Mapping[Any, Any]]:
        """All that is kept by parameter."""
        return list({id(state): state for part in (self.inner, self.owner) for state in _states(part)}.values())

    @property
    def defaults(self) -> dict[str, Any]:
        """Those of the optimizer inside."""
        return self.inner.defaults

    def zero_grad(self) -> None:
        """Remove the gradients."""
        self.inner.zero_grad()

    def step(self) -> None:
        """Make the next call."""
        call = self.calls[self.stage]
        self._before(self, self.stage)
        given = {name: self.closure if value is CLOSURE else value for name, value in call.arguments.items()}
        getattr(self.owner, call.method)(**given)
        self.stage = (self.stage + 1) % len(self.calls)


class WholeOptimizerLike(OptimizerLike):
    """Makes copies of a ``template``, for the parameters of a model like ``model``."""

    is_whole = True

    def __init__(
        self,
        given: Optimizer,
        model: nn.Module,
        clips: Sequence[Sequence[Clip]],
        schedule: Sequence[Settings],
        template: Template,
        calls: Sequence[OptimizerCall],
    ) -> None:
        """``clips`` are those before each of the ``calls``."""
        super().__init__(given, model, [clip for before in clips for clip in before], None, schedule)
        self.calls, self._template = calls, template
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        made = iter(self.clips)
        self._clips = [[next(made) for _ in before] for before in clips]

        self.takes_closure = any(value is CLOSURE for call in calls for value in call.arguments.values())

    @property
    def code(self) -> list[str]:
        """The calls: ``.first_step()`` of the optimizer, or ``asam.ascent_step()``."""
        owner = self._template.owner
        name = "" if isinstance(owner, Optimizer) else type(owner).__name__.lower()
        return [f"{name}.{call.code}" for call in self.calls]

    def __call__(self, parameters: Iterable[nn.Parameter]) -> Any:
        """An optimizer of ``parameters``, like that of the script before its first step."""
        listed, done = list(parameters), 0
        own = {id(parameter): new for parameter, new in zip(self._trained, listed, strict=True)}
        made = Template(*_copies(*self._template, own))
        for states in (state for part in made for state in _states(part)):
            for parameter, state in states.items():
                # Cast what was kept of a parameter in fp32, as if it had been made of this one.
                for name, value in state.items() if isinstance(state, dict) else ():
                    if isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape:
                        state[name] = value.to(parameter.dtype)

        def before(optimizer: WholeOptimizer, stage: int) -> None:
            nonlocal done
            if not stage:
                # What schedulers set; a counter is the optimizer's own
                settings = self.schedule[min(done, len(self.schedule) - 1)]
                for group, values in zip(optimizer.param_groups, settings, strict=True):
                    names = [name for name, value in values.items() if type(value) is not int]
                    group.update({name: copy.deepcopy(values[name]) for name in names if name not in IMPLEMENTATION})
                done += 1
            for clip in self._clips[stage]:
                clip.function([listed[index] for index in clip.parameters], *clip.args, **clip.kwargs)

        return WholeOptimizer(made, self.calls, before)


def _states(part: Any) -> Iterator[Mapping[Any, Any]]:
    """What an object keeps by parameter."""
    for value in vars(part).values():
        if isinstance(value, dict) and any(isinstance(key, Tensor) for key in value):
            yield value


def _copies(owner: Any, inner: Optimizer, parameters: Mapping[int, Tensor]) -> tuple[Any, Optimizer]:
    """Copies of both, with the ``parameters`` that are given by the ids of their own."""
    memo: dict[int, Any] = dict(parameters)
    optimizers = {id(one): one for one in (*optimizers_in(owner), inner)}
    # Copied as an optimizer copies itself, one would lose all but its groups and state
    for key, one in optimizers.items():
        memo[key] = object.__new__(type(one))
    try:
        for key, one in optimizers.items():
            memo[key].__dict__.update(
                {name: _attribute(name, value, memo) for name, value in vars(one).items() if name != "step"}
            )
        return copy.deepcopy(owner, memo), memo[id(inner)]
    except Exception as error:
        why = f"{type_name(error)}: {message_of(error)}"
        raise UnrepeatableError(f"{type(owner).__name__} cannot be copied: {why}") from None


def _attribute(name: str, value: Any, memo: dict[int, Any]) -> Any:
    if name.startswith("_optimizer_") and name.endswith("_hooks"):
        return collections.OrderedDict()
    return copy.deepcopy(value, memo)


def optimizers_in(owner: Any) -> list[Optimizer]:
    """The optimizers that an object is, or has in its attributes; the innermost last."""
    waiting, seen, optimizers = [owner], set[int](), list[Optimizer]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Optimizer):
            optimizers.append(value)
        if isinstance(value, (list, tuple)):
            waiting += value
        elif (value is owner or isinstance(value, Optimizer)) and hasattr(value, "__dict__"):
            waiting += vars(value).values()
    return optimizers


# -- Which call of the script's it is


class OuterCall(NamedTuple):
    """A running call of a method, which changes weights."""

    frame: tuple[int, CodeType]
    owner: Any
    inner: Optimizer
    call: OptimizerCall
    is_needed: bool
    """Whether more than a step of the optimizer inside is made, or may be in a later step."""

    @property
    def is_running(self) -> bool:
        """Whether it has not returned."""
        return self.frame in _places()


class OuterCalls:
    """Finds the outermost call, since the last backward pass, of an optimizer or what has one."""

    def __init__(self) -> None:
        self._before: Collection[tuple[int, CodeType]] = ()
        """The frames that ran in the last backward pass."""
        self._callers: set[int] = set()
        """Ids of the objects in whose methods models are called: trainers, no optimizers."""

    def backward(self) -> None:
        """A backward pass is made."""
        self._before = _places()
        self.calls_model()

    def calls_model(self) -> None:
        """A model is called."""
        self._callers |= {id(owner) for _, owner in _methods() if not isinstance(owner, Optimizer)}

    def find(
        self, trains: Callable[[Any], bool], *, step_of: Optimizer | None = None, is_change: bool = False
    ) -> OuterCall | None:
        """The call that changes weights of an optimizer that ``trains`` them; else ``None``.

        In a ``step_of`` an optimizer, calls of that itself do not count. ``is_change``: a weight is
        about to be changed by other means.
        """
        outermost = None
        for frame, owner in _methods():
            place = id(frame), frame.f_code
            if place in self._before:
                break
            if owner is step_of or id(owner) in self._callers or isinstance(owner, nn.Module):
                continue
            is_wrapper = type(owner).__module__.partition(".")[0] in _WRAPPING and owner is not step_of
            inside = [] if is_wrapper else [one for one in optimizers_in(owner) if hasattr(one, "param_groups")]
            inner = [one for one in inside if trains(one)]
            if step_of is not None:
                inner = [one for one in inner if one is step_of]
            if inner:
                # An owner that is an optimizer is its own, unless it has another
                others = [one for one in inner if one is not owner and "_optimizer_step_pre_hooks" in vars(one)]
                chosen = (others or inner)[-1]
                call = OptimizerCall(frame.f_code.co_name, _arguments(frame))
                outermost = OuterCall(place, owner, chosen, call, is_change or isinstance(owner, Optimizer))
        return outermost


def _places() -> set[tuple[int, CodeType]]:
    return {(id(frame), frame.f_code) for frame, _ in traceback.walk_stack(None)}


def _methods() -> Iterator[tuple[FrameType, Any]]:
    """The running methods outside torch, the innermost first, and their objects."""
    for frame, _ in traceback.walk_stack(None):
        code = frame.f_code
        if code.co_argcount and is_user_code(code.co_filename):
            owner = frame.f_locals.get(code.co_varnames[0])
            if hasattr(owner, "__dict__") and not isinstance(owner, (type, Tensor)):
                yield frame, owner


def _arguments(frame: FrameType) -> dict[str, Any]:
    """The arguments of a running method, besides its object."""
    code = frame.f_code
    names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    arguments = {name: frame.f_locals.get(name) for name in names}
    return {name: None if callable(value) else value for name, value in arguments.items()}


def check_arguments(owner: Any, call: OptimizerCall) -> None:
    """Raise :class:`UnrepeatableError` for what a scan cannot give again."""
    for name, value in call.arguments.items():
        if value is not CLOSURE and not isinstance(value, _CONSTANTS):
            what = f"{type(owner).__name__}.{call.method}() gets {name}, an object of type {type(value).__name__}"
            raise UnrepeatableError(f"{what}, which is of the script's step alone")
