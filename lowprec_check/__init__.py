"""lowprec-check: what happens to a PyTorch model in fp16 and bf16, all at once, with proof.

>>> from lowprec_check import scan
>>> result = scan(model, inputs)  # doctest: +SKIP
>>> print(result.recommendation.code)  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowprec_check.engine.plan.apply import apply
    from lowprec_check.engine.plan.planner import find_plan
    from lowprec_check.engine.scan import scan
    from lowprec_check.errors import UsageError
    from lowprec_check.schema.plan import Plan
    from lowprec_check.schema.scan_result import ScanResult

__all__ = ["Plan", "ScanResult", "UsageError", "apply", "find_plan", "scan"]

_HOMES = {
    "Plan": "schema.plan",
    "ScanResult": "schema.scan_result",
    "UsageError": "errors",
    "apply": "engine.plan.apply",
    "find_plan": "engine.plan.planner",
    "scan": "engine.scan",
}


def __getattr__(name: str) -> Any:
    """Load public names on first use: ``import lowprec_check`` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"lowprec_check.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
