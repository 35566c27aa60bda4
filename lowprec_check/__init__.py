"""lowprec-check: what happens to a PyTorch model in fp16 and bf16, all at once, with proof.

>>> from lowprec_check import scan
>>> result = scan(model, inputs)  # doctest: +SKIP
>>> print(result.recommendation.code)  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowprec_check.applied import apply
    from lowprec_check.errors import UsageError
    from lowprec_check.planner import find_plan
    from lowprec_check.plans import Plan
    from lowprec_check.results import ScanResult
    from lowprec_check.scanner import scan

__all__ = ["Plan", "ScanResult", "UsageError", "apply", "find_plan", "scan"]

_HOMES = {
    "Plan": "plans",
    "ScanResult": "results",
    "UsageError": "errors",
    "apply": "applied",
    "find_plan": "planner",
    "scan": "scanner",
}


def __getattr__(name: str) -> Any:
    """Load public names on first use: ``import lowprec_check`` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"lowprec_check.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
