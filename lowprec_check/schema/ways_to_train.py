"""The ways to train in a precision: each says how the loss is scaled, how weights are updated, and
with which code to paste.

To add one, add a module with ``WAYS`` to :mod:`lowprec_check.features.training.ways`, or register
it from another package (CONTRIBUTING.md).
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, Literal, Protocol

from lowprec_check.schema.precisions import Kind, Precision
from lowprec_check.schema.registry import Registry, modules_in, modules_of_features

DEFAULT_SCALE = 2.0**16
"""The initial scale of ``torch.amp.GradScaler``."""

Trial = Literal["each run", "suggested scale", "own process"]
"""When a way is tried: in each run; with the suggested loss scale; in a process of its own."""


class Updates(Protocol):
    """What a loop calls around its forward pass; state in lists of tensors counts as memory."""

    parameters: list[Any]
    """The parameters of the model that are trained."""
    optimizer: Any

    def zero_grad(self) -> None:
        """Remove the gradients."""

    def backward(self, loss: Any) -> None:
        """Compute the gradients of ``loss``, a tensor."""

    def step(self) -> None:
        """Update the parameters."""


def _of_the_model(updates: Updates) -> list[Any]:
    return list(updates.parameters)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WayToTrain:
    """A way to train in a precision. Its module imports torch inside functions only."""

    name: str
    """The name in saved results: ``master-weights``."""
    words: str
    """How it is shown: ``fp32 master weights``."""
    summary: str
    """What it does, as a sentence that follows its name in the documentation."""
    order: int
    """Ways are tried in this order, and recommended in it if none passes as written."""
    aliases: tuple[str, ...] = ()
    kinds: tuple[Kind, ...] | None = None
    """The kinds of precision that it suits; ``None`` for all."""
    dtype: str | None = None
    """torch's name of the only dtype it suits; ``None``: all, or with a scale what underflows."""
    scale: float | None = None
    """The initial scale of a ``GradScaler``; ``None`` without one."""
    updater: Callable[[], Callable[..., Updates]] | None = None
    """Imports torch, defines one class and returns it: the class is run, and its text is printed as
    code to paste. It is called with the parameters of the model, a function that makes an optimizer
    of parameters, and a ``GradScaler`` if there is a scale, whose ``update()`` the loop calls.
    """
    weights: Callable[[Any], list[Any]] = _of_the_model
    """The weights that are trained: the model's, or copies in more bits, in the same order."""
    is_random: bool = False
    """Whether it rounds at random: then the distance of the weights from fp32 is not judged."""
    one_context: bool = False
    """Whether autocast is entered once, around all steps."""
    usual_scale: bool = False
    """Whether the loss is scaled as in the usual way of the precision."""
    is_trap: bool = False
    """Whether it is tried to show that it fails, and never recommended."""
    trial: Trial = "each run"
    imports: tuple[str, ...] = ()
    """Lines of code to paste that import what :meth:`optimizer_code` needs."""

    @property
    def leaves_weights(self) -> bool:
        """Whether the optimizer updates the weights as they are."""
        return self.updater is None and self.trial != "own process"

    def suits(self, precision: Precision) -> bool:
        """Whether it can be tried in a precision."""
        kind, scales = self.kinds is None or precision.kind in self.kinds, self.scale or self.trial == "suggested scale"
        return kind and self.dtype in (None, precision.format.name) and (precision.format.underflows or not scales)

    def why_not(self, optimizer: Any) -> str:
        """Why it cannot be tried with ``optimizer``, which has made no step; empty if it can."""
        return ""

    def updates(self, model: Any, make: Callable[..., Any], scaler: Any = None) -> Updates:
        """What updates the parameters of ``model``; ``make(parameters)`` makes an optimizer."""
        if self.updater is None:
            raise NotImplementedError(f"the way to train {self.name} has no updater")
        return self.updater()(model.parameters(), make, *(() if scaler is None else (scaler,)))

    def class_code(self) -> str:
        """The text of the class that updates the weights; empty without one."""
        if self.updater is None:
            return ""
        text = textwrap.dedent(inspect.getsource(self.updater))
        (definition,) = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef))
        return textwrap.dedent("\n".join(text.splitlines()[definition.lineno - 1 : definition.end_lineno]))

    def optimizer_code(self, optimizer: str) -> list[str]:
        """Lines of code to paste after ``optimizer``, a variable, is made."""
        return []


def _built_in() -> list[WayToTrain]:
    modules = [module for package in modules_of_features("ways") for module in modules_in(package.__name__)]
    ways: list[WayToTrain] = [way for module in modules for way in module.WAYS]
    return sorted(ways, key=lambda way: way.order)


WAYS: Registry[WayToTrain] = Registry("way to train", WayToTrain, _built_in)
"""All ways to train, in their order."""


def way_named(name: str) -> WayToTrain:
    """The way of that name; one that is not installed is shown by its name."""
    return WAYS.find(name) or WayToTrain(name=name, words=name, summary="", order=0)


def ways_of(precision: Precision, steps: int) -> list[WayToTrain]:
    """The ways to try in each run, for that many steps; the first one gives the status."""
    # What people write: autocast to a format that underflows comes with a scaler.
    is_scaled = precision.kind == "autocast" and precision.format.underflows
    usual = WAYS.get("grad-scaler" if is_scaled else "plain")
    ways = [usual]
    for way in WAYS:
        fits = way.trial == "each run" and way.suits(precision) and (steps > 1 or not way.one_context)
        if fits and way.name != usual.name:
            ways.append(dataclasses.replace(way, scale=usual.scale) if way.usual_scale else way)
    return ways
