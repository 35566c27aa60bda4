"""What the catalog adds to a gap: since which torch it is mended, and the issue in which others met it."""

from __future__ import annotations

from lowprec_check.catalog.changes import mending
from lowprec_check.catalog.known_issues import KnownIssue, matching, of_precision
from lowprec_check.catalog.names import dtype_of
from lowprec_check.errors import UsageError
from lowprec_check.results import Gap, Run, ScanResult


def since_when(gap: Gap, run: Run, result: ScanResult) -> str | None:
    """``runs since torch 2.14`` or ``fails up to torch 2.15``; ``None`` where the catalog has not measured it."""
    dtype, way = of_precision(run.precision)
    if dtype is None or gap.phase == "optimizer":
        return None
    device, torch = run.device.partition(":")[0], str(result.environment.get("torch", ""))
    try:
        found = mending(
            gap.op, device=device, dtype=dtype_of(dtype), torch=torch, phase=gap.phase, autocast=way == "autocast"
        )
    except UsageError:  # files that cannot be read cost this remark, not the scan
        return None
    return str(found) if found else None


def known_issue(gap: Gap, run: Run, result: ScanResult) -> KnownIssue | None:
    """The reported issue about this op or model that fits best and that the running torch still has."""
    dtype, way = of_precision(run.precision)
    torch = str(result.environment.get("torch", "")) or None
    device = run.device.partition(":")[0]
    try:
        found = matching(
            op=gap.op, model=result.model.name, device=device, dtype=dtype, way=way, torch=torch, message=gap.message
        )
    except UsageError:
        return None
    return next((issue for issue in found if issue.ops or issue.models), None)
