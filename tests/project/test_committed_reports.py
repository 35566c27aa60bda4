"""The reports in reports/ are what the program and its benchmarks make of the JSON beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT

from lowprec_check.schema.scan_result import ScanResult
from tools.committed_reports import DATA, PARTS, REPORTS, files

KEPT = dict(files())


@pytest.mark.parametrize(
    ("path", "rendered"),
    [pytest.param(path, rendered, id=str(path.relative_to(ROOT))) for path, rendered in KEPT.items()],
)
def test_reports_are_up_to_date(path: Path, rendered: Callable[[], str]) -> None:
    assert path.read_text(encoding="utf-8") == rendered(), "run python tools/committed_reports.py"


def test_no_other_file_is_a_report() -> None:
    sources = {saved for part in PARTS.values() for report in part for _, saved in report.files()}
    known = {*KEPT, *sources, *(REPORTS / name for name in DATA)}
    folders = ("models", "scans")  # what compat writes beside an index, which is not in git
    found = {path for path in REPORTS.rglob("*") if path.is_file()}
    ignored = {path for path in found if path.parts[-3].startswith("torchvision") and path.parts[-2] in folders}
    assert found - ignored - known == set()


@pytest.mark.parametrize("path", sorted(ROOT.glob("reports/scans/*.json")), ids=lambda path: path.stem)
def test_saved_scans_can_be_read(path: Path) -> None:
    result = ScanResult.load(path)
    assert result.recommendation is not None
    assert len(result.runs) >= 5
