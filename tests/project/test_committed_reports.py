"""The reports in reports/ are what the program makes of the data beside them, and stay few."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT

from lowprec_check.schema.scan_result import ScanResult
from tools.committed_reports import REPORTS, files
from tools.example_scans import WITH_JSON, scans

RENDERED = dict(files())
UNTRACKED = ("models", "scans", "index.html")  # what compat writes beside the index of a matrix
LARGEST_BYTES = 1_200_000


def tracked_reports() -> list[Path]:
    """The files in reports/ that git does not ignore."""
    return [
        path
        for path in REPORTS.rglob("*")
        if path.is_file()
        and not (path.relative_to(REPORTS).parts[0].startswith("torchvision") and path.parts[-2] in UNTRACKED)
        and not (path.parent.name.startswith("torchvision") and path.name in UNTRACKED)
    ]


@pytest.mark.parametrize(
    ("path", "rendered"),
    [pytest.param(path, rendered, id=str(path.relative_to(ROOT))) for path, rendered in RENDERED.items()],
)
def test_reports_are_up_to_date(path: Path, rendered: Callable[[], str]) -> None:
    assert path.read_text(encoding="utf-8") == rendered(), "run python tools/committed_reports.py"


def test_reports_are_small_and_listed() -> None:
    paths = tracked_reports()
    listed = set(re.findall(r"\]\(([\w-]+)", (REPORTS / "README.md").read_text(encoding="utf-8")))
    assert {path.relative_to(REPORTS).parts[0].partition(".")[0] for path in paths} == listed | {"README"}
    assert sum(path.stat().st_size for path in paths) < LARGEST_BYTES


def test_every_example_has_a_report() -> None:
    reports = {str(path.relative_to(REPORTS).with_suffix("")) for path in REPORTS.glob("*/*.txt")}
    assert reports == set(scans())
    saved = {str(path.relative_to(REPORTS).with_suffix("")) for path in REPORTS.glob("*/*.json")}
    others = {"torchvision/matrix", "torchvision-cuda/matrix"}
    assert saved - others == set(WITH_JSON)


@pytest.mark.parametrize("name", WITH_JSON)
def test_saved_scans_can_be_read(name: str) -> None:
    result = ScanResult.load(REPORTS / f"{name}.json")
    assert result.recommendation is not None
    assert len(result.runs) >= 5


def test_results_name_benchmarks_that_exist() -> None:
    commands = re.findall(r"benchmarks/(\w+\.py)", (REPORTS / "results.md").read_text(encoding="utf-8"))
    assert len(set(commands)) > 5
    assert [name for name in commands if not (ROOT / "benchmarks" / name).exists()] == []
