"""The gradients of the first step: kept in fp32, and compared with those in low precision."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from msgspec import structs
from torch import Tensor

from lowprec_check.engine.core.floating_dtypes import real
from lowprec_check.engine.train.step import TrainingStep
from lowprec_check.schema.training import ParameterGradient


class FirstGradients:
    """A watcher that copies the gradients of the first step that is not skipped, in fp32 on the CPU; ``names`` by parameter."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self.found: dict[str, Tensor] = {}

    def before(self, step: TrainingStep) -> None:
        """Nothing is to be done."""

    def after(self, _step: TrainingStep) -> None:
        """Copy the gradients. A ``GradScaler`` has divided them by its scale; where it skips a step, they are replaced."""
        if self.found and all(bool(gradient.isfinite().all()) for gradient in self.found.values()):
            return
        self.found = {
            name: real(parameter.grad.detach()).float().cpu().clone()
            for name, parameter in self._parameters.items()
            if parameter.grad is not None and parameter.grad.layout == torch.strided
        }


class GradientComparison(NamedTuple):
    """The gradients of all parameters, compared with those of fp32."""

    parameters: list[ParameterGradient]
    error: float | None
    """rel_l2 of all together; ``None`` if it is not finite."""
    underflow: float | None
    """Share of all elements that are not zero in fp32 and zero here; ``None`` if there are none."""


def compare_gradients(mine: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> GradientComparison:
    """Compare the gradients ``mine`` with those of fp32, by name. A parameter that got none here has a gradient of zero."""
    rows, squares, norm, flushed, elements = list[ParameterGradient](), list[float](), 0.0, 0, 0
    for name, exact in reference.items():
        found = mine.get(name)
        low = torch.zeros_like(exact) if found is None else found
        apart, size = float((low.double() - exact).norm()), float(exact.double().norm())
        zero = int(((low == 0) & (exact != 0)).sum())
        overflown = int((~low.isfinite() & exact.isfinite()).sum())
        count = exact.numel()
        rows.append(
            ParameterGradient(
                parameter=name,
                elements=count,
                error=_finite(apart / size if size else (0.0 if apart == 0 else math.inf)),
                absmax=_finite(float(exact.abs().max())) if count else None,
                underflow=zero / max(count, 1),
                overflow=overflown / max(count, 1),
            )
        )
        squares.append(apart**2)
        norm, flushed, elements = norm + size**2, flushed + zero, elements + count
    total = sum(squares)
    if total and math.isfinite(total):
        rows = [structs.replace(row, error_share=square / total) for row, square in zip(rows, squares, strict=True)]
    error = _finite(math.sqrt(total / norm)) if norm else None
    return GradientComparison(rows, error, flushed / elements if elements else None)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
