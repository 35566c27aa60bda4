"""Repeats a run that fails by its error with the modules in fp32 that its analysis blames."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from lowprec_check.analysis.error_shares import UNCHANGED, BlamedModules, blamed_modules
from lowprec_check.analysis.run_summary import is_hopeless
from lowprec_check.core.feature_hooks import Feature
from lowprec_check.core.target_runs import TargetRuns
from lowprec_check.features.ablation.uncovering import uncovered
from lowprec_check.schema.measures import Ablation, UncoveredFault
from lowprec_check.schema.module_paths import role_of
from lowprec_check.schema.scan_result import Run

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
