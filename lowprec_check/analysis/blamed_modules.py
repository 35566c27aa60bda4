"""The modules that the analysis of a failing run blames, which an ablation then keeps in fp32, and whether that helped."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from lowprec_check.analysis.error_origin import origin
from lowprec_check.analysis.error_shares import main_causes, module_shares, trusted_budget
from lowprec_check.schema.measures import BlamedFor
from lowprec_check.schema.module_paths import is_inside, paths_above
from lowprec_check.schema.scan_result import Run

MOST = 3
"""As many modules as reports name."""

LEAST_SHARE = 0.2
"""Smaller shares of the squared error change the error itself by less than a tenth, about as much as other roundings do."""

UNCHANGED = 0.9
"""The part of the error from which on it is said to be left as it was."""


class BlamedModules(NamedTuple):
    """Modules that are blamed for the error of a run."""

    modules: tuple[str, ...]
    blamed_for: BlamedFor
    predicted: float | None
    """rel_l2 of the output without their shares, to first order."""


def blamed_modules(run: Run) -> BlamedModules | None:
    """The modules to keep in fp32 to test what the analysis of ``run`` says; ``None`` if it blames no submodule.

    Only of a run that fails by the error of its output, in the first call on the first batch, which the analysis is about.
    """
    if run.status not in ("inaccurate", "nonfinite") or run.failed_call or run.failed_batch or run.keep_fp32:
        return None
    return _by_share(run) or _by_first_fault(run)


def is_confirmed(run: Run) -> bool:
    """Whether keeping the blamed modules in fp32 made the output finite, or at least halved its error."""
    found = run.ablation
    if found is None or found.rel_l2 is None:
        return False
    before = run.output_error.rel_l2 if run.output_error else None
    return before is None or found.rel_l2 <= before / 2


def is_disproved(run: Run) -> bool:
    """Whether keeping the blamed modules in fp32 left the error as it was: their shares, derived to first order, do not hold.

    Not of a run that passes then: a little was enough.
    """
    found = run.ablation
    before = run.output_error.rel_l2 if run.output_error else None
    if found is None or found.status == "ok" or found.rel_l2 is None or before is None:
        return False
    return found.rel_l2 >= UNCHANGED * before


def _by_share(run: Run) -> BlamedModules | None:
    budget = trusted_budget(run)
    error = run.output_error.rel_l2 if run.output_error else None
    if budget is None or error is None:
        return None
    causes = main_causes(module_shares(run), MOST)
    modules = _outermost(part.name for part in causes if part.name in run.called_modules)
    share = math.fsum(part.share for part in budget.shares if any(is_inside(part.module, name) for name in modules))
    if share < LEAST_SHARE:
        return None
    return BlamedModules(modules, "share", error * math.sqrt(max(0.0, 1.0 - share)))


def _by_first_fault(run: Run) -> BlamedModules | None:
    rows = run.op_calls.rows()
    faulty = _outermost(row.module for row in rows if row.introduced_inf or row.introduced_nan)
    known = tuple(path for path in faulty if path in run.called_modules)
    if known:
        return BlamedModules(known, "nonfinite", None)
    found = origin(run)
    if found is None or found.kind != "tolerance" or found.op_call.module not in run.called_modules:
        return None
    return BlamedModules((found.op_call.module,), "tolerance", None)


def _outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """``paths`` without those inside others, each once, in their order."""
    unique = dict.fromkeys(paths)
    return tuple(path for path in unique if not any(above in unique for above in paths_above(path)))
