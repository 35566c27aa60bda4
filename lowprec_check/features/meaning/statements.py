"""Which measure fits an output, and what it says."""

from __future__ import annotations

from collections.abc import Iterable

from lowprec_check.analysis.statements.kinds import Made, per_scan
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.statements import plain


@per_scan("not-by-meaning", "model", after="note", detail="more")
def not_by_meaning(result: ScanResult) -> Iterable[Made]:
    """Why a measure that fits the output decides nothing."""
    meanings = (run.output_error.meaning for run in result.runs if run.output_error is not None)
    reasons = {m.measure: m.cannot_tell for m in meanings if m is not None and m.cannot_tell}
    for measure, reason in reasons.items():
        yield plain(f"judged by the relative error, not by {measure}: {reason}")
