"""What follows from the runs of a scan: the recommendation and the diagnostics."""

from __future__ import annotations

import msgspec

from lowprec_check.analysis.recommend import recommend
from lowprec_check.analysis.rules.registry import diagnose
from lowprec_check.analysis.statements.advice import basis
from lowprec_check.analysis.statements.kinds import statements
from lowprec_check.analysis.training_advice import recommend_training
from lowprec_check.schema.run_key import CONTIGUOUS, EAGER, RunKey
from lowprec_check.schema.scan_result import ScanResult, skipped


def conclude(result: ScanResult) -> ScanResult:
    """The result with its recommendation and diagnostics, as its options select them."""
    options = result.options
    about = {**result.environment, "torch": result.torch}
    prefer = options.get("prefer", "speed")
    if result.training is not None:
        advice = recommend_training(result, about, prefer)
    else:
        advice = recommend(result.runs, result.model, about, prefer)
    result = msgspec.structs.replace(result, recommendation=advice)
    diagnostics = diagnose(result, options.get("select", ()), options.get("ignore", ()))
    result = msgspec.structs.replace(result, diagnostics=diagnostics)
    said = statements(result)
    if advice is not None and not advice.reason:
        advice = msgspec.structs.replace(advice, reason=basis(said))
    return msgspec.structs.replace(result, recommendation=advice, statements=said)


def wanted_runs(result: ScanResult) -> list[RunKey]:
    """Every run that the scan was to make, the reference first; a plan is not counted."""
    options, reference = result.options, result.runs[0].key
    asked = [
        reference._replace(precision=precision, backend=backend, memory_format=memory_format)
        for backend in sorted(options.get("backends", []), key=lambda name: name != EAGER)
        for memory_format in options.get("memory_formats", [CONTIGUOUS])
        for precision in options.get("precisions", [])
    ]
    return list(dict.fromkeys([reference, *asked]))


def conclude_early(result: ScanResult, reason: str) -> ScanResult | None:
    """Like :func:`conclude` for a scan that ended early: the missing runs are ``skipped`` for ``reason``.

    Calls that were not yet taken in rounds are not compared: what else the machine did may have slowed them down. ``None`` if no run but the reference has finished.
    """
    done = {run.key for run in result.runs}
    if len(done) < 2:
        return None
    runs = result.runs
    if result.timing_conditions is None:
        runs = [msgspec.structs.replace(run, latency_ms=None) for run in runs]
    missing = [skipped(key, reason, result.evidence) for key in wanted_runs(result) if key not in done]
    return conclude(msgspec.structs.replace(result, runs=[*runs, *missing]))
