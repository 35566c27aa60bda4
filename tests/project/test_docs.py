"""The documents match the program."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from conftest import ROOT
from predicted_result import predicted_result

from lowprec_check.analysis.speed import Speed
from lowprec_check.analysis.statements.kinds import said
from lowprec_check.report.blocks import speed_text

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


@pytest.mark.parametrize("name", make_reference().REFERENCES)
def test_references_are_up_to_date(name: str) -> None:
    wanted = make_reference().REFERENCES[name]()
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == wanted, "run python tools/make_reference.py"


@pytest.mark.parametrize(("document", "link"), LINKS)
def test_links_are_valid(document: Path, link: str) -> None:
    path, _, anchor = link.partition("#")
    target = document.parent / path if path else document
    assert target.exists()
    assert not anchor or anchor in anchors_of(target)


def test_pictures_are_small() -> None:
    pictures = list((ROOT / "docs" / "images").iterdir())
    assert pictures
    assert not [path.name for path in pictures if path.stat().st_size > 200_000]


WALK = re.compile(r"^\| \d+ \| `([\w/]+)` \|", re.MULTILINE)


def test_the_walks_through_the_code_are_short_and_lead_through_modules_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## The layout")[0]
    assert 5 < len(WALK.findall(text)) <= 12
    rooms = "analysis|cli|core|engine|features|report|schema|torchkit"
    named = set(re.findall(rf"`((?:{rooms})/[\w/]+?)/?(?:\.[a-z_]\w+)?`", text))
    drawn = set(re.findall(r"((?:cli|core|engine|analysis)/[\w/]+)", text.split("```")[1]))
    assert len(named) > 15
    assert len(drawn) > 5
    named |= drawn
    package = ROOT / "lowprec_check"
    assert not {name for name in named if not (package / f"{name}.py").exists() and not (package / name).is_dir()}


MEASURED = re.compile(r"\d ?(?:×|ms\b|MiB|KiB|GiB)|\d[.,]?\d*e-\d|\d+ of \d+")
GUIDES = [path for path in ROOT.glob("docs/*.md") if path.name not in make_reference().REFERENCES]


@pytest.mark.parametrize("document", [ROOT / "README.md", *GUIDES], ids=lambda path: path.name)
def test_measured_figures_name_the_report_that_has_them(document: Path) -> None:
    """A section whose table has measured figures links to a committed report; formats and limits are not measured."""
    explained = {"Times, and what is worth it"}  # the words that stand for figures
    sections = re.split(r"^##+ ", document.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert sections
    for section in sections:
        title = section.partition("\n")[0]
        rows = [line for line in section.splitlines() if line.startswith("|") and MEASURED.search(line)]
        assert len(rows) < 3 or "reports/" in section or title in explained, (title, rows[:3])


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


def test_the_guide_writes_speeds_and_sentences_as_reports_do() -> None:
    guide = (ROOT / "docs" / "scan.md").read_text(encoding="utf-8")
    for told in (Speed("faster", 1.4, 1.3, 1.5), Speed("slower", 1 / 134, 1 / 140, 1 / 130), Speed("same", 1.0)):
        assert f"| {speed_text(told)} | {told.text()} |" in guide
    words = re.sub(r"\d+", "0", (ROOT / "docs" / "prediction.md").read_text(encoding="utf-8"))
    for part in said(predicted_result(), "prediction").partition("; the catalog ")[2].split(", ")[:2]:
        assert re.sub(r"\d+", "0", part.partition(":")[0]) in words
    shares = (
        "half: shares of the error, estimated: 46 % lm_head (addmm, model.py:41), 12 % ln_f, 9 % h.0.attn, "
        "5 % not explained"
    )
    assert shares in guide  # the same words: tests/analysis/test_error_shares.py
