"""What the catalog adds to a finding: since which torch a gap is mended, and the issue in which others met it."""

from __future__ import annotations

from lowprec_check.catalog.fixes import find_fix
from lowprec_check.catalog.known_issues import KnownIssue, Way, known_issues, matching
from lowprec_check.errors import UsageError
from lowprec_check.schema.precisions import LOW_FORMATS, Precision
from lowprec_check.schema.scan_result import Gap, Run, ScanResult


def since_when(gap: Gap, run: Run, result: ScanResult) -> str | None:
    """``supported since torch 2.14`` or ``no torch release up to 2.15 supports it``; ``None`` where the catalog has not measured it."""
    basis, dtype = run.basis, _catalog_dtype(run.basis)
    if basis is None or dtype is None or gap.phase == "optimizer":
        return None
    torch = str(result.environment.get("torch", ""))
    try:
        found = find_fix(
            gap.op, device=run.device, dtype=dtype, torch=torch, phase=gap.phase, autocast=basis.kind == "autocast"
        )
    except UsageError:  # files that cannot be read cost this remark, not the scan
        return None
    return str(found) if found else None


def known_issue(result: ScanResult, code: str, op: str | None, run: Run | None, message: str) -> KnownIssue | None:
    """The reported issue that fits a finding best: of its code, about its op or model, not yet mended in the running torch."""
    basis = run.basis if run else None
    device = run.device if run else str(result.environment.get("device", ""))
    torch = str(result.environment.get("torch", "")) or None
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
            torch=torch,
            message=message,
        )
    except UsageError:
        return None
    return next((issue for issue in found if issue.ops or issue.models), None)


def _catalog_dtype(basis: Precision | None) -> str | None:
    """The dtype to look up: the catalog knows the 16-bit ones."""
    return basis.format.name if basis is not None and basis.format in LOW_FORMATS else None


def _way(basis: Precision | None) -> Way | None:
    if basis is None:
        return None
    return "cast" if basis.kind == "cast" else "autocast" if basis.kind == "autocast" else None
