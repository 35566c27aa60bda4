"""What 16 bits do to updates: which are lost to rounding, by the same step on fp32 copies; and an ``eps`` that becomes zero."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowprec_check.engine.core.floating_dtypes import NARROW, widen, widened_dtype
from lowprec_check.engine.model.training import MakeOptimizer
from lowprec_check.engine.train.steps import Samples, TrainingStep, Trajectory, Watcher
from lowprec_check.errors import first_line, message_of, type_name
from lowprec_check.schema.training import EpsilonCheck, LostUpdates, Values

Name = tuple[str, Values]


class _Count(NamedTuple):
    elements: int = 0
    """Of the tensor."""
    wanted: int = 0
    """Elements that the step on fp32 copies changes, over all steps."""
    lost: int = 0
    """Those of them that stay the same in 16 bits."""


class LostUpdateCounter(Watcher):
    """Repeats each update on fp32 copies of the 16-bit values, and counts what they change and the run does not.

    The copies start each step from the values of the run, with its gradients and the state of its optimizer, so that each step
    is judged alone. ``make`` makes the optimizer.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], make: MakeOptimizer) -> None:
        self._parameters = parameters
        self._copies = {name: nn.Parameter(_wide_copy(p)) for name, p in parameters.items()}
        self._make = make
        self._optimizer = make(list(self._copies.values()))
        self._counts: defaultdict[Name, _Count] = defaultdict(_Count)
        self._before: dict[str, Tensor] = {}
        self._state_before: dict[str, dict[str, Any]] = {}
        self._average: tuple[nn.Module, list[Tensor]] | None = None
        """A copy of the average in fp32, and its parameters before the step."""
        self._decay: dict[str, float | None] = {}
        self._groups: dict[str, int] = {}
        """By name, the parameter group."""

    def before(self, step: TrainingStep) -> None:
        """Keep the values, and on the first step count what weight decay alone changes."""
        optimizer = step.updates.optimizer
        if not self._groups:
            groups = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
            self._groups = {name: groups[id(p)] for name, p in self._parameters.items() if id(p) in groups}
            self._decay = self._lost_decay()
        self._before = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._state_before = {name: copy.deepcopy(optimizer.state.get(p, {})) for name, p in self._parameters.items()}
        if step.average is not None:
            self._average = copy.deepcopy(step.average).float(), [tensor.clone() for tensor in _floats(step.average)]

    def after(self, step: TrainingStep) -> None:
        """Make the same step on the copies, and count."""
        for name, parameter in self._parameters.items():
            mine = self._copies[name]
            mine.data = _wide_copy(self._before[name])
            mine.grad = None if parameter.grad is None else parameter.grad.detach().to(mine.dtype)
            state = self._state_before[name]
            if state:  # a counter of steps may be a number
                wide = {key: value.to(torch.float32, copy=True) for key, value in _tensors(state)}
                others = {key: value for key, value in state.items() if key not in wide}
                self._optimizer.state[mine] = copy.deepcopy(others) | wide
        self._optimizer.step()
        for name, parameter in self._parameters.items():
            before = self._before[name]
            self._count((name, "weight"), before, parameter.detach(), self._copies[name].detach())
            exact = dict(_tensors(self._optimizer.state.get(self._copies[name], {})))
            for key, value in _tensors(step.updates.optimizer.state.get(parameter, {})):
                known = self._state_before[name].get(key)
                known = known if isinstance(known, Tensor) else torch.zeros_like(value)
                if value.shape == before.shape and key in exact:
                    self._count((f"{name} · {key}", "optimizer state"), known, value, exact[key])
        if self._average is not None and step.average is not None:
            average, values = self._average
            average.update_parameters(copy.deepcopy(step.model).float())  # type: ignore[operator]
            names = [name for name, _ in step.average.named_parameters()]
            for name, *tensors in zip(names, values, _floats(step.average), _floats(average), strict=False):
                self._count((name, "average"), *tensors)

    def _count(self, name: Name, before: Tensor, after: Tensor, exact: Tensor) -> None:
        """Count the elements of a 16-bit tensor that should change, and those of them that do not."""
        if after.dtype in NARROW:
            wanted, known = exact != before.float(), self._counts[name]
            lost = int((wanted & (after == before)).sum())
            self._counts[name] = _Count(after.numel(), known.wanted + int(wanted.sum()), known.lost + lost)

    def _lost_decay(self) -> dict[str, float | None]:
        """By name, the share of the updates by weight decay alone, with gradients of zero, that are lost."""
        low = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in self._parameters.items()}
        wide = {name: nn.Parameter(_wide_copy(p)) for name, p in self._parameters.items()}
        for copies in (low, wide):
            for parameter in copies.values():
                parameter.grad = torch.zeros_like(parameter)
            try:
                self._make(list(copies.values())).step()
            except Exception:  # an optimizer that fails on such gradients: the run itself shows it
                return {}
        found: dict[str, float | None] = {}
        for name, original in self._parameters.items():
            wanted = wide[name] != widen(original)
            count, lost = int(wanted.sum()), int((wanted & (low[name] == original)).sum())
            found[name] = lost / count if count and low[name].dtype in NARROW else None
        return found

    def figures(self) -> list[LostUpdates]:
        """What was counted of each tensor, in the order of the model."""
        return [
            LostUpdates(
                name=name,
                values=values,
                elements=count.elements,
                lost=count.lost / count.wanted,
                updates=count.wanted,
                group=self._groups.get(name) if values == "weight" else None,
                decay_lost=self._decay.get(name) if values == "weight" else None,
            )
            for (name, values), count in self._counts.items()
            if count.wanted
        ]

    def share(self) -> float | None:
        """Share of the updates of all weights that are lost; ``None`` if no weight has 16 bits."""
        counts = [count for (_, values), count in self._counts.items() if values == "weight"]
        wanted = sum(count.wanted for count in counts)
        return sum(count.lost for count in counts) / wanted if wanted else None


def lost_buffer_updates(run: Trajectory, base: Trajectory, samples: Samples, narrow: set[str]) -> list[LostUpdates]:
    """Of each buffer in ``narrow``, by name: the share of its elements that stay the same in steps in which those of fp32 change."""
    found = []
    for name, part in samples.slices.items():
        if name not in narrow:
            continue
        wanted = lost = 0
        for step in range(1, min(run.steps, base.steps) + 1):
            changes = base.buffers[step][part] != base.buffers[step - 1][part]
            stays = run.buffers[step][part] == run.buffers[step - 1][part]
            wanted, lost = wanted + int(changes.sum()), lost + int((changes & stays).sum())
        if wanted:
            found.append(
                LostUpdates(
                    name=name, values="buffer", elements=samples.sizes[name], lost=lost / wanted, updates=wanted
                )
            )
    return found


def _wide_copy(tensor: Tensor) -> Tensor:
    """A copy in fp32; complex numbers stay complex."""
    return tensor.detach().to(widened_dtype(tensor.dtype, torch.float32), copy=True)


def _tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for key, value in state.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            yield key, value


def _floats(module: nn.Module) -> list[Tensor]:
    return [parameter.detach() for parameter in module.parameters()]


# -- An eps that becomes zero


_IMPLEMENTATIONS: Mapping[str, dict[str, Any]] = {
    "as given": {},
    "loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}


def check_epsilon(parameters: Sequence[nn.Parameter], make: MakeOptimizer) -> list[EpsilonCheck]:
    """One step with zero gradients on copies of ``parameters``, by each implementation that the optimizer has; empty without ``eps``."""
    if "eps" not in make([nn.Parameter(p.detach().clone()) for p in parameters]).defaults:
        return []
    found = []
    for name, settings in _IMPLEMENTATIONS.items():
        copies = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
        optimizer = make(copies)
        if not settings.keys() <= optimizer.defaults.keys():
            continue
        for group in optimizer.param_groups:
            group.update(settings)
        for copied in copies:
            copied.grad = torch.zeros_like(copied)
        error = None
        try:
            optimizer.step()
        except Exception as failure:
            error = f"{type_name(failure)}: {first_line(message_of(failure))}"
        elements = sum(copied.numel() for copied in copies)
        wrong = sum(int((~copied.isfinite()).sum()) for copied in copies)
        found.append(EpsilonCheck(implementation=name, nonfinite=wrong / max(elements, 1), error=error))  # type: ignore[arg-type]
    return found
