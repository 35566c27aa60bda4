"""Repeats a run that fails by its error with the modules in fp32 that its analysis blames.

Behind values out of range, it looks for further causes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from lowprec_check.analysis.error_shares import (
    UNCHANGED,
    BlamedModules,
    Place,
    blamed_modules,
    harmful_trials,
    leaving_shares,
    place_shares,
    trusted_budget,
)
from lowprec_check.analysis.run_summary import is_hopeless
from lowprec_check.core.feature_hooks import Feature
from lowprec_check.core.target_runs import TargetRuns
from lowprec_check.schema.measures import MATTERS, Ablation, BlamedFor, UncoveredFault
from lowprec_check.schema.module_paths import is_inside, role_of
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.scan_result import Run
from lowprec_check.schema.statements import short_op

# -- Causes behind values out of range

ROUNDS = 3
"""Runs that are explained again, at most."""


def uncovered(
    batches: Sequence[TargetRuns], run: Run, ablation: Ablation, tried: Callable[[BlamedModules], Ablation]
) -> tuple[Ablation, list[UncoveredFault]]:
    """The ablation with the causes of further Inf, NaN and errors in fp32 too, and what they are.

    ``tried`` repeats ``run`` with modules in fp32.
    """
    faults: list[UncoveredFault] = []
    causes = _out_of_range(run)
    if causes and causes != tuple(ablation.keep_fp32):
        ablation = tried(BlamedModules(causes, "range", None))
    # What the run shows as it is has its finding.
    shown = {row.place for row in run.op_calls.rows() if row.introduced_inf or row.introduced_nan}
    for _ in range(ROUNDS):
        if ablation.status not in ("nonfinite", "inaccurate"):
            break
        kept = tuple(ablation.keep_fp32)
        explained = batches[0].run(run.precision, memory_format=run.memory_format, keep_fp32=kept, measured=False)
        causes, blamed_for = _blamed(explained)
        modules = tuple(name for name in causes if not any(is_inside(name, other) for other in kept))
        is_nonfinite = blamed_for in ("nonfinite", "range")
        new = _faults(explained, modules, kept, is_nonfinite=is_nonfinite)
        if not new:
            break
        outside = (name for name in kept if not any(is_inside(name, module) for module in modules))
        further = tried(BlamedModules((*outside, *modules), "nonfinite", None))
        # They are why it fails only if their repair helps.
        most = _error(ablation)
        if not is_nonfinite:
            most *= UNCHANGED
        if further.status != "ok" and _error(further) >= most and ablation.status != "nonfinite":
            break
        faults += [fault for fault in new if (fault.module, fault.op, fault.source) not in shown]
        ablation = further
    return ablation, faults


def _blamed(explained: Run) -> tuple[tuple[str, ...], BlamedFor]:
    """The modules that a run with others in fp32 blames, and for what."""
    causes = _out_of_range(explained)
    if causes:
        return causes, "range"
    # As if it were a run of its own.
    blamed = blamed_modules(msgspec.structs.replace(explained, keep_fp32=[]))
    if blamed is None:
        return (), "nonfinite"
    return blamed.modules, blamed.blamed_for


def _out_of_range(run: Run) -> tuple[str, ...]:
    """The modules whose values out of range alone make the output of fp32 wrong."""
    modules = dict.fromkeys(trial.module for trial in harmful_trials(run))
    return tuple(name for name in run.called_modules if name in modules)


def _error(ablation: Ablation) -> float:
    return math.inf if ablation.rel_l2 is None else ablation.rel_l2


def _faults(explained: Run, modules: Sequence[str], kept: Sequence[str], *, is_nonfinite: bool) -> list[UncoveredFault]:
    """The op of each of ``modules`` that turns finite values into Inf or NaN first; else that with
    the largest share of the error, or that adds most.
    """
    shares: dict[Place, float] = {}
    if not is_nonfinite and trusted_budget(explained) is not None:
        shares = {place: share.share for place, share in place_shares(explained).items()}
        for place, leaving in leaving_shares(explained).items():
            shares[place] = shares.get(place, 0.0) + leaving
    faults = []
    for module in modules:
        rows = [row for row in explained.op_calls.rows() if row.is_forward and is_inside(row.module, module)]
        what: dict[str, Any]
        if is_nonfinite:
            row = next((row for row in rows if row.introduced_inf or row.introduced_nan), None)
            # A value that a kept module returns, and that the dtype cannot hold, is no other cause.
            if row is None or (short_op(row.op) == "to_copy" and any(is_inside(name, row.module) for name in kept)):
                continue
            what = {"becomes": "Inf" if row.introduced_inf else "NaN", "of": row.compared_values}
            what["values"] = row.introduced_inf or row.introduced_nan
        else:
            row = max(rows, key=lambda row: (shares.get(row.place, 0.0), _added(row)), default=None)
            if row is None or not (shares.get(row.place, 0.0) >= MATTERS or _added(row)):
                continue
            what = {"becomes": "magnified error", "error": row.accumulated_error, "share": shares.get(row.place)}
            if (row.local_error or 0.0) >= _added(row) / 2:
                what |= {"becomes": "error", "error": row.local_error}
        faults.append(UncoveredFault(kept=list(kept), module=row.module, op=row.op, source=row.source, **what))
    return faults


def _added(row: OpCall) -> float:
    """What the op adds itself, or by which it magnifies the error of its inputs."""
    return max(row.local_error or 0.0, (row.accumulated_error or 0.0) - (row.input_error or 0.0))


# -- The run again, with the blamed modules in fp32

SLOWEST_MS = 5000.0
"""A run that takes longer for a call is not repeated to test what its analysis blames."""


class AblationFeature(Feature):
    """What fp32 in the blamed modules changes."""

    place = 0

    def after_run(self, batches: Sequence[TargetRuns], run: Run) -> Run:
        """``run`` with its ablation, a run with blamed modules in fp32, if its error fails it."""
        blamed = None
        if run.is_eager and run.training is None:
            blamed = blamed_modules(run)
        if blamed is None or is_hopeless(run) or (run.latency_ms or 0.0) > SLOWEST_MS:
            return run
        ablation, faults = _tried(batches, run, blamed), list[UncoveredFault]()
        # Constants with which the run passes hide nothing.
        passes = run.constant_trial is not None and run.constant_trial.status == "ok"
        if not passes and (run.status == "nonfinite" or blamed.blamed_for in ("nonfinite", "range")):
            ablation, faults = uncovered(batches, run, ablation, functools.partial(_tried, batches, run))
        # One of a stack hides what its counterparts do: the first with all of its own, then all.
        types = {name: type(module) for name, module in batches[0].target.model.named_modules()}
        named = tuple(ablation.keep_fp32)
        for modules in (named[:1], named):
            roles = {(role_of(module), types.get(module)) for module in modules}
            group = [name for name in run.called_modules if (role_of(name), types.get(name)) in roles]
            if ablation.status != "ok" and len(group) > len(modules):
                with_group = _tried(batches, run, blamed._replace(modules=tuple(group), predicted=None))
                if _is_better(with_group, ablation):
                    ablation = with_group
        return msgspec.structs.replace(run, ablation=ablation, uncovered=faults)


def _tried(batches: Sequence[TargetRuns], run: Run, blamed: BlamedModules) -> Ablation:
    options: Any = {"memory_format": run.memory_format, "measured": False, "instrumented": False}
    ablated = batches[0].run(run.precision, keep_fp32=blamed.modules, **options)
    # The status is that of the first batch on which it fails.
    status = ablated.status
    for batch in batches[1:]:
        if status == "ok":
            status = batch.run(run.precision, keep_fp32=blamed.modules, **options).status
    return Ablation(
        keep_fp32=list(blamed.modules),
        blamed_for=blamed.blamed_for,
        status=status,
        rel_l2=ablated.output_error.rel_l2 if ablated.output_error is not None else None,
        predicted=blamed.predicted,
    )


def _is_better(ablation: Ablation, other: Ablation) -> bool:
    """Whether ``ablation`` passes, or has a clearly smaller error."""
    if ablation.status == "ok":
        return True
    before = math.inf if other.rel_l2 is None else other.rel_l2
    return ablation.status == "inaccurate" and ablation.rel_l2 is not None and ablation.rel_l2 <= UNCHANGED * before


ABLATION = AblationFeature()
