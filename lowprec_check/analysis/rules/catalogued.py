"""What the catalog adds to a finding: the torch release that fixes it, and a known issue about it."""

from __future__ import annotations

from lowprec_check.catalog.fixes import find_fix
from lowprec_check.catalog.known_issues import KnownIssue, Way, known_issues, matching
from lowprec_check.errors import UsageError
from lowprec_check.schema.precisions import LOW_FORMATS, Precision
from lowprec_check.schema.scan_result import Gap, Run, ScanResult


def fixed_since(gap: Gap, run: Run, result: ScanResult) -> str | None:
    """``supported since torch 2.14`` or ``no torch release up to 2.15 supports it``; ``None`` if the catalog has not measured it."""
    basis, dtype = run.basis, _catalog_dtype(run.basis)
    if basis is None or dtype is None or gap.phase == "optimizer":
        return None
    try:
        found = find_fix(
            gap.op,
            device=run.device,
            dtype=dtype,
            torch=result.torch,
            phase=gap.phase,
            autocast=basis.kind == "autocast",
        )
    except UsageError:  # an unreadable catalog must not fail the scan
        return None
    return str(found) if found else None


def known_issue(
    result: ScanResult, code: str, op: str | None, run: Run | None, message: str | None
) -> KnownIssue | None:
    """The known issue that fits a finding best: same code, same op or model, not fixed in the torch of the runs.

    ``message`` is what the op raised or warned; ``None`` if it did not run, but the catalog says that it fails.
    """
    basis = run.basis if run else None
    device = run.device if run else str(result.environment.get("device", ""))
    try:
        if not any(code in issue.codes for issue in known_issues()):
            return None
        found = matching(
            code=code,
            op=op,
            model=result.model.name,
            device=device or None,
            dtype=_catalog_dtype(basis),
            way=_way(basis),
            torch=result.torch or None,
            message=message,
        )
    except UsageError:
        return None
    return next((issue for issue in found if issue.ops or issue.models), None)


def _catalog_dtype(basis: Precision | None) -> str | None:
    """The dtype to look up; ``None`` for one that the catalog does not cover: it has the 16-bit ones."""
    return basis.format.name if basis is not None and basis.format in LOW_FORMATS else None


def _way(basis: Precision | None) -> Way | None:
    if basis is None:
        return None
    return "cast" if basis.kind == "cast" else "autocast" if basis.kind == "autocast" else None
