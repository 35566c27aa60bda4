"""Updates lost by rounding, found by the same step on wider copies; an ``eps`` that rounds to 0."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowprec_check.engine.model.training import MakeOptimizer
from lowprec_check.engine.model.whole_optimizer import Settings, settings_of
from lowprec_check.errors import first_line, message_of, type_name
from lowprec_check.features.training.spread import Samples, Trajectory
from lowprec_check.features.training.steps import TrainingStep, Watcher
from lowprec_check.schema.training import EpsilonCheck, LostUpdates, Values
from lowprec_check.torchkit.floating_dtypes import widened_dtype

Name = tuple[str, Values]


class _Count(NamedTuple):
    elements: int = 0  # of the tensor
    wanted: int = 0  # elements that the step on wider copies changes, over all steps
    lost: int = 0  # those of them that stay the same


class LostUpdateCounter(Watcher):
    """Repeats each update on ``wide`` copies, in fp32 or fp64; counts what changes only there.

    The copies start each step from the values of the run, with its gradients and the state of its
    optimizer, so that each step is judged alone. ``make`` makes the optimizer.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], make: MakeOptimizer, wide: torch.dtype = torch.float32
    ) -> None:
        self._parameters, self._wide = parameters, wide
        self._copies = {name: nn.Parameter(self._copy(p)) for name, p in parameters.items()}
        self._make = make
        self._optimizer = make(list(self._copies.values()))
        self._counts: defaultdict[Name, _Count] = defaultdict(_Count)
        self._updated: dict[str, nn.Parameter] = {}  # those of the optimizer that makes its step
        self._is_finite = self._is_first = True
        self._before: dict[str, Tensor] = {}
        self._state_before: dict[str, dict[str, Any]] = {}
        self._average: tuple[Any, list[Tensor]] | None = None
        """A wider copy of the average, and its parameters before the step."""
        self._decay: defaultdict[str, _Count] = defaultdict(_Count)
        self._decay_by: dict[str, dict[str, _Count]] = {}
        """What weight decay alone changes in one step, by the settings of the optimizer."""
        self._groups: dict[str, int] = {}  # by name, the parameter group

    def before(self, step: TrainingStep) -> None:
        """Keep the values."""
        optimizer = step.updates.optimizer
        if not self._groups:
            groups = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
            self._groups = {name: groups[id(p)] for name, p in self._parameters.items() if id(p) in groups}
        if step.average is not None:
            self._average = self._wider(step.average), [tensor.clone() for tensor in _floats(step.average)]

    def gradients(self, step: TrainingStep) -> None:
        """Keep the values; give the copies the gradients of the optimizer that makes its step."""
        optimizer, updated = step.updates.optimizer, step.updated
        self._updated = {name: p for name, p in self._parameters.items() if id(p) in updated}
        # Several calls may make an update
        self._is_first = not getattr(_part(optimizer, step.number), "stage", 0)
        for name, p in self._updated.items():
            if self._is_first:
                self._before[name] = p.detach().clone()
                self._state_before[name] = copy.deepcopy(optimizer.state.get(p, {}))
            self._copies[name].grad = None
            if p.grad is not None:
                self._copies[name].grad = self._copy(p.grad)

    def update(self, step: TrainingStep) -> None:
        """Make the same step on the copies, and count, unless a weight becomes NaN or Inf."""
        self._is_finite = all(bool(parameter.detach().isfinite().all()) for parameter in self._parameters.values())
        if not self._is_finite:
            return
        # The copies start from what the run had before the step: each step is judged alone.
        for name in self._updated if self._is_first else ():
            copied = self._copies[name]
            copied.data = self._copy(self._before[name])
            state = self._state_before[name]
            if state:  # a counter of steps may be a number, and one that is a tensor stays in fp32
                wide = {key: self._copy(value) for key, value in _tensors(state) if key != "step"}
                others = {key: value for key, value in state.items() if key not in wide}
                self._optimizer.state[copied] = copy.deepcopy(others) | wide
        optimizer = _part(self._optimizer, step.number)
        optimizer.step()
        if getattr(optimizer, "stage", 0):
            return
        self._count_decay(step.number, optimizer)
        # What the weights lost, then what each tensor of the optimizer's state lost.
        for name, parameter in self._updated.items():
            before = self._before[name]
            self._count((name, "weight"), before, parameter.detach(), self._copies[name].detach())
            exact = dict(_tensors(self._optimizer.state.get(self._copies[name], {})))
            for key, value in _tensors(step.updates.optimizer.state.get(parameter, {})):
                old = self._state_before[name].get(key)
                if not isinstance(old, Tensor):  # the first step makes the state, from zeros
                    old = torch.zeros_like(value)
                if value.shape == before.shape and key in exact:
                    self._count((f"{name} · {key}", "optimizer state"), old, value, exact[key])

    def after(self, step: TrainingStep) -> None:
        """Count what the average loses."""
        if self._is_finite and self._average is not None and step.average is not None:
            average, values = self._average
            average.update_parameters(self._wider(step.model))
            names = [name for name, _ in step.average.named_parameters()]
            for name, *tensors in zip(names, values, _floats(step.average), _floats(average), strict=False):
                self._count((name, "average"), *tensors)

    def _count(self, name: Name, before: Tensor, after: Tensor, exact: Tensor) -> None:
        """Count the finite elements of a tensor that should change, and those that do not."""
        if after.dtype != exact.dtype:
            count = self._counts[name]
            wanted = (exact != before.to(exact.dtype)) & exact.isfinite() & after.isfinite()
            lost = int((wanted & (after == before)).sum())
            self._counts[name] = _Count(after.numel(), count.wanted + int(wanted.sum()), count.lost + lost)

    def _copy(self, tensor: Tensor) -> Tensor:
        """A wider copy; complex numbers stay complex."""
        return tensor.detach().to(widened_dtype(tensor.dtype, self._wide), copy=True)

    def _wider(self, module: nn.Module) -> Any:
        module = copy.deepcopy(module)
        if self._wide == torch.float64:
            return module.double()
        return module.float()

    def _count_decay(self, number: int, optimizer: Any) -> None:
        """Count what weight decay alone changes in this step of ``optimizer``."""
        settings = settings_of(optimizer)
        if not any(group.get("weight_decay", True) for group in settings):
            return
        # The same settings change the same elements: each of them is tried in one step only.
        key = repr((number, settings))
        if key not in self._decay_by:
            self._decay_by[key] = self._decay_of(number, settings)
        for name, (elements, wanted, lost) in self._decay_by[key].items():
            count = self._decay[name]
            self._decay[name] = _Count(elements, count.wanted + wanted, count.lost + lost)

    def _decay_of(self, number: int, settings: Settings) -> dict[str, _Count]:
        """The same by name, of an optimizer without a state, with gradients of zero."""
        low = {name: nn.Parameter(self._before[name].clone()) for name in self._updated}
        wide = {name: nn.Parameter(self._copy(p)) for name, p in low.items()}
        # Zero gradients and no momentum: the step of each copy is the decay of its weights.
        for copies in (low, wide):
            others = {name: nn.Parameter(p.detach()) for name, p in self._parameters.items() if name not in copies}
            try:
                made = _part(self._make([(copies | others)[name] for name in self._parameters]), number)
                made.state.clear()
                made._optimizer_step_pre_hooks.clear()  # which clip, and set what each step of a script had
                for group, given in zip(made.param_groups, copy.deepcopy(settings), strict=True):
                    group.update(given)
                for parameter in copies.values():
                    parameter.grad = torch.zeros_like(parameter)
                made.step()
            except Exception:  # an optimizer that fails on such gradients: the run itself shows it
                return {}
        counts = {}
        for name, exact in wide.items():
            before = self._before[name]
            wanted = exact != before.to(exact.dtype)
            if low[name].dtype != exact.dtype:
                counts[name] = _Count(exact.numel(), int(wanted.sum()), int((wanted & (low[name] == before)).sum()))
        return counts

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
                decay_lost=decay.lost / decay.wanted if values == "weight" and decay.wanted else None,
            )
            for (name, values), count in self._counts.items()
            if count.wanted
            for decay in [self._decay[name]]
        ]

    def share(self) -> float | None:
        """Share of the updates of all weights that are lost; ``None`` if none was counted."""
        counts = [count for (_, values), count in self._counts.items() if values == "weight"]
        wanted = sum(count.wanted for count in counts)
        if wanted:
            return sum(count.lost for count in counts) / wanted
        return None


class Stalls(Watcher):
    """Finds sampled weights that a step leaves as they are though their gradient is not zero."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters, self._samples = parameters, Samples.of(parameters)
        self._moving = self._before = torch.zeros(0)
        self._stalled = self._all = 0.0

    def gradients(self, step: TrainingStep) -> None:
        """Note the weights and which of them have a gradient."""
        updated = step.updated
        # A parameter without a gradient does not move: zeros, which take no memory.
        gradients = {name: torch.zeros(()).expand(p.shape) for name, p in self._parameters.items()}
        for name, p in self._parameters.items():
            if id(p) in updated and p.grad is not None:
                if p.grad.layout == torch.strided:
                    gradients[name] = p.grad
                else:
                    gradients[name] = p.grad.to_dense()
        self._moving, self._before = self._samples.take(gradients) != 0, self._samples.take(self._parameters)

    def update(self, step: TrainingStep) -> None:
        """Count those that stayed as they were."""
        weights = self._samples.weights * self._moving
        self._all += float(weights.sum())
        self._stalled += float(weights[self._samples.take(self._parameters) == self._before].sum())

    @property
    def share(self) -> float:
        """Share (0 to 1) of them, over all steps."""
        return self._stalled / (self._all or 1.0)


def lost_buffer_updates(run: Trajectory, base: Trajectory, samples: Samples, narrow: set[str]) -> list[LostUpdates]:
    """For each buffer of ``narrow``: the share of elements that stay where those of fp32 change."""
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
            size = samples.sizes[name]
            found.append(LostUpdates(name=name, values="buffer", elements=size, lost=lost / wanted, updates=wanted))
    return found


def _part(optimizer: Any, number: int) -> Any:
    """The optimizer of that number, of several."""
    return getattr(optimizer, "parts", [optimizer])[number]


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
    """One step with zero gradients by each implementation of the optimizer that has ``eps``."""
    made = make([nn.Parameter(p.detach().clone()) for p in parameters])
    if "eps" not in made.defaults or hasattr(made, "calls"):  # other calls make its step
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
        pairs = zip(parameters, copies, strict=True)
        wrong = sum(int((given.isfinite() & ~copied.isfinite()).sum()) for given, copied in pairs)
        share = wrong / max(elements, 1)
        found.append(EpsilonCheck(implementation=name, nonfinite=share, error=error))  # type: ignore[arg-type]
    return found
