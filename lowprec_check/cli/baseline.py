"""``scan --baseline`` and ``--update-baseline``: the parts before and after the scan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowprec_check.cli.app import check_writable, print_status
from lowprec_check.errors import UsageError

if TYPE_CHECKING:
    from lowprec_check.analysis.baseline import Baseline
    from lowprec_check.schema.scan_result import ScanResult


BaselineFile = Annotated[
    Path | None, typer.Option("--baseline", help="File of accepted findings, which --fail-on ignores.")
]
UpdateBaseline = Annotated[
    bool, typer.Option("--update-baseline", help="Accept all findings of this scan: write them to the baseline.")
]


def known_findings(path: Path | None, update: bool) -> Baseline | None:
    """Load the baseline at ``path``; raises :class:`UsageError` before the scan starts if it cannot be used."""
    from lowprec_check.analysis.baseline import load

    if update:
        if path is None:
            raise UsageError("--update-baseline needs a file to write.", "Add --baseline FILE.")
        check_writable(path, "--baseline")
        return load(path) if path.exists() and path.stat().st_size else None  # never overwrite another file
    return load(path) if path is not None else None


def apply_baseline(result: ScanResult, accepted: Baseline | None, path: Path | None, update: bool) -> ScanResult:
    """Mark accepted findings in ``result``; report on stderr what was written and which findings no longer occur."""
    from lowprec_check.analysis.baseline import accept, baseline_of, save

    if update and path is not None:
        accepted = baseline_of(result, accepted)
        save(accepted, path)
        print_status(f"{len(accepted.findings)} findings accepted in {path}")
    if accepted is None:
        return result
    result, stale = accept(result, accepted)
    if stale:
        what = (
            "finding in the baseline no longer occurs"
            if len(stale) == 1
            else "findings in the baseline no longer occur"
        )
        print_status(f"{len(stale)} {what}; --update-baseline removes them")
    return result
