"""The documents say what the program does."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from conftest import ROOT

from lowprec_check.schema.scan_result import ScanResult

PAGES = ("*.md", "docs/*.md", "catalog/*.md", "reports/*.md", "reports/*/index.md")
DOCUMENTS = sorted(path for pattern in PAGES for path in ROOT.glob(pattern))


def make_reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "tools" / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["cli.md", "diagnostics.md", "schema.json"])
def test_references_are_up_to_date(name: str) -> None:
    wanted = make_reference().REFERENCES[name]()
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == wanted, "run python tools/make_reference.py"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", document.read_text(encoding="utf-8")):
        if not link.startswith("http"):
            assert (document.parent / link.partition("#")[0]).exists(), link


def test_every_room_is_on_the_map() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for path in (ROOT / "lowprec_check").glob("[a-z]*.py"):
        assert re.search(rf"\b{path.stem}\b", text), path.stem


def test_the_readme_is_what_ci_runs() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(r"<!-- tests -->\n    python3 -m venv \.venv && .*pytest", readme)
    assert "<!-- tests -->" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted((ROOT / "reports").glob("scans/*.json")), ids=lambda path: path.stem)
def test_saved_scans_can_be_read(path: Path) -> None:
    result = ScanResult.load(path)
    assert result.recommendation is not None
    assert len(result.runs) >= 5
