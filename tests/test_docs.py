"""The documents match the program."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from conftest import ROOT

PAGES = ("*.md", "docs/*.md", "catalog/*.md", "reports/*.md", "reports/*/*.md")
DOCUMENTS = sorted(path for pattern in PAGES for path in ROOT.glob(pattern))
LINKS = [
    pytest.param(document, link, id=f"{document.relative_to(ROOT)}-{link}")
    for document in DOCUMENTS
    for link in dict.fromkeys(re.findall(r"\]\(([^)]+)\)", document.read_text(encoding="utf-8")))
    if not link.startswith("http")
]


def anchors_of(document: Path) -> set[str]:
    """The anchors that GitHub makes of headings."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def make_reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "tools" / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name == "cli.md" else ()) for name in make_reference().REFERENCES],
)
def test_references_are_up_to_date(name: str) -> None:
    wanted = make_reference().REFERENCES[name]()
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == wanted, "run python tools/make_reference.py"


@pytest.mark.parametrize(("document", "link"), LINKS)
def test_links_are_valid(document: Path, link: str) -> None:
    path, _, anchor = link.partition("#")
    target = document.parent / path if path else document
    assert target.exists()
    assert not anchor or anchor in anchors_of(target)


@pytest.mark.parametrize(
    ("document", "marker", "command"),
    [
        ("README.md", "tests", r"python3 -m venv \.venv && .*tools/checks\.py"),
        ("CONTRIBUTING.md", "ipex install", r"python3 -m venv \.venv-ipex && .*-c constraints-ipex\.txt"),
        ("CONTRIBUTING.md", "ipex tests", r"\.venv-ipex/bin/python -c 'import intel_.*pytest tests/ipex"),
    ],
)
def test_ci_runs_the_commands_in_the_documents(document: str, marker: str, command: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    assert re.search(rf"^<!-- {marker} -->\n    {command}", text, re.MULTILINE)
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.search(rf"\$\(documented {document} '?{marker}'?\)", script)
