"""What ``scan --baseline`` and ``--update-baseline`` do, before and after the scan."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowprec_check.cli.app import check_writable
from lowprec_check.errors import UsageError

if TYPE_CHECKING:
    from lowprec_check.analysis.baseline import Baseline
    from lowprec_check.schema.scan_result import ScanResult


BaselineFile = Annotated[
    Path | None, typer.Option("--baseline", help="A file of accepted findings: --fail-on passes over them.")
]
UpdateBaseline = Annotated[
    bool, typer.Option("--update-baseline", help="Accept what this scan finds: write it to the baseline.")
]


def known_findings(path: Path | None, update: bool) -> Baseline | None:
    """The baseline to hold the scan to; raises :class:`UsageError` before the work."""
    from lowprec_check.analysis.baseline import load

    if update:
        if path is None:
            raise UsageError("--update-baseline needs to know the file.", "Add --baseline FILE.")
        check_writable(path, "--baseline")
        return load(path) if path.exists() and path.stat().st_size else None  # what is no baseline is not overwritten
    return load(path) if path is not None else None


def apply_baseline(result: ScanResult, accepted: Baseline | None, path: Path | None, update: bool) -> ScanResult:
    """``result`` with known findings marked; says on stderr what was written, or what no longer occurs."""
    from lowprec_check.analysis.baseline import accept, baseline_of, save

    if update and path is not None:
        accepted = baseline_of(result, accepted)
        save(accepted, path)
        print(f"{path}: {len(accepted.findings)} findings accepted", file=sys.stderr)
    if accepted is None:
        return result
    result, stale = accept(result, accepted)
    if stale:
        what = "finding of the baseline does" if len(stale) == 1 else "findings of the baseline do"
        print(f"{len(stale)} {what} not occur any more: --update-baseline leaves them out", file=sys.stderr)
    return result
