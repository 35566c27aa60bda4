"""Operator support by dtype, device and version of torch, each answer with its evidence.

>>> from lowprec_check import catalog
>>> [answer.op for answer in catalog.lookup("svd", dtype="float16")]
['svd', 'linalg.svd']
>>> catalog.gaps("cpu", "float16", torch="2.13").missing[0].kind
'missing-kernel'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowprec_check.catalog import declared
    from lowprec_check.catalog.answers import difference, find_fix, gaps, lookup
    from lowprec_check.catalog.known_issues import matching
    from lowprec_check.catalog.measured import history, sweep_of

__all__ = ["declared", "difference", "find_fix", "gaps", "history", "lookup", "matching", "sweep_of"]

_MODULES = {
    **dict.fromkeys(("difference", "find_fix", "gaps", "lookup"), "answers"),
    **dict.fromkeys(("history", "sweep_of"), "measured"),
    "matching": "known_issues",
}


def __getattr__(name: str) -> Any:
    """Import public names on first use: the worker of a sweep needs none of them."""
    if name == "declared":
        return importlib.import_module("lowprec_check.catalog.declared")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"lowprec_check.catalog.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
