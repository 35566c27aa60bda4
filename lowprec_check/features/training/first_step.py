"""The gradients of the first step against those of fp32, and the loss scale they suggest."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from msgspec import structs
from torch import Tensor
from torch._ops import OpOverload

from lowprec_check.core.trace.op_errors import ROUNDING
from lowprec_check.core.trace.places import Places, accumulates, nodes_of
from lowprec_check.engine.model.plain_run import output_tensors
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.engine.model.target import Target
from lowprec_check.features.training.steps import TrainingStep, Watcher
from lowprec_check.features.training.ways.usual import PLAIN
from lowprec_check.schema.training import ParameterGradient
from lowprec_check.schema.ways_to_train import DEFAULT_SCALE
from lowprec_check.torchkit.compiled import compiled_code_in_eager
from lowprec_check.torchkit.devices import seed_everything
from lowprec_check.torchkit.dispatch_mode import AutocastKeys, DispatchMode, run_op
from lowprec_check.torchkit.floating_dtypes import as_real
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


def first_step_under(mode: DispatchMode, ready: Prepared, target: Target, seed: int) -> FirstStep:
    """The first step of ``ready`` in eager mode under ``mode``, without loss scaling."""
    step = TrainingStep(target, ready, PLAIN, target.model)
    watcher = FirstGradients({name: p for name, p in ready.model.named_parameters() if p.requires_grad})
    step.on_gradients = lambda: watcher.gradients(step)
    snapshot = Snapshot(ready.model, target.rewound, parameters=True)
    seed_everything(seed)
    inputs, named = ready.inputs(target.args, target.kwargs)
    try:
        with compiled_code_in_eager(), mode:
            result = call_model(step, inputs, named)
        outputs = [tensor.cpu().clone() for tensor in output_tensors((result.output, result.loss))]
    finally:
        snapshot.rewind()
    return FirstStep(outputs, watcher.found)


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
