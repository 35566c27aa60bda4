"""What follows from the runs of a scan: the recommendation and the diagnostics. Never imports torch."""

from __future__ import annotations

import msgspec

from lowprec_check.analysis.recommend import recommend
from lowprec_check.analysis.rules.registry import diagnose
from lowprec_check.schema.run_key import REFERENCE
from lowprec_check.schema.scan_result import Run, ScanResult


def conclude(result: ScanResult) -> ScanResult:
    """The result with its recommendation and diagnostics, as its options select them."""
    result = msgspec.structs.replace(result, recommendation=recommend(result.runs, result.model, result.environment))
    options = result.options
    return msgspec.structs.replace(
        result, diagnostics=diagnose(result, options.get("select", ()), options.get("ignore", ()))
    )


def wanted_runs(result: ScanResult) -> list[tuple[str, str]]:
    """Precision and backend of every run that the scan was to make, the reference first; a plan is not counted."""
    backends, precisions = result.options.get("backends", []), result.options.get("precisions", [])
    reference = result.runs[0].key
    asked = [(precision, backend) for backend in backends for precision in precisions]
    return list(dict.fromkeys([(REFERENCE, reference.backend), *asked]))


def conclude_early(result: ScanResult, reason: str) -> ScanResult | None:
    """Like :func:`conclude` for a scan that ended early: the missing runs are ``skipped`` for ``reason``.

    ``None`` if no run but the reference has finished.
    """
    done = {(run.precision, run.backend) for run in result.runs}
    if len(done) < 2:
        return None
    missing = [
        Run(precision=precision, backend=backend, device=result.runs[0].device, status="skipped", reason=reason)
        for precision, backend in wanted_runs(result)
        if (precision, backend) not in done
    ]
    return conclude(msgspec.structs.replace(result, runs=[*result.runs, *missing]))
