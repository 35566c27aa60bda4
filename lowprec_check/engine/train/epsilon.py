"""What a step with gradients of zero does to 16-bit weights: an ``eps`` that is zero in the dtype divides zero by zero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lowprec_check.engine.model.training import MakeOptimizer
from lowprec_check.errors import first_line, message_of, type_name
from lowprec_check.schema.training import EpsilonCheck

_VARIANTS: Mapping[str, dict[str, Any]] = {
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
    for name, settings in _VARIANTS.items():
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
