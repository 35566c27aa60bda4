"""Which measure fits an output, why, and what it cannot tell."""

from __future__ import annotations

from collections.abc import Iterable

from lowprec_check.analysis.statements.kinds import Made, Said, per_scan
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.statements import plain


@per_scan("by-meaning", "model", after="note")
def by_meaning(result: ScanResult) -> Iterable[Made]:
    """What decides, and by what it was chosen; why a measure that fits the output does not."""
    errors = [run.output_error for run in result.runs if run.output_error is not None]
    chosen = (error.by_meaning for error in errors)
    for name in dict.fromkeys(f"{m.measure} ({m.why})" for m in chosen if m is not None and m.why):
        yield plain(f"judged by {name}")
    meanings = (each for error in errors if error.by_meaning is None for each in (error.meaning, *error.beside))
    reasons = {m.measure: m.cannot_tell for m in meanings if m is not None and m.cannot_tell}
    for measure, reason in reasons.items():
        yield Said(plain(f"judged by the relative error, not by {measure}: {reason}"), "warn")
