"""Makes optimizers like the user's, which may change the learning rate and clip gradients."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowprec_check.engine.model.user_code import parameters_of
from lowprec_check.errors import UsageError

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
