"""Renders the reports in reports/ that have their data beside them, and the examples in the README.

Run ``python tools/committed_reports.py``; a test checks that they are up to date. ``reports/README.md`` lists all
reports, with the commands that measure anew.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from lowprec_check.report.layout.markdown import markdown
from lowprec_check.report.matrix import matrix_document
from lowprec_check.report.registry import format_of, render
from lowprec_check.schema.matrix import load
from lowprec_check.schema.scan_result import ScanResult

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # where this is run as a script

from tools.catalog_report import catalog_document  # noqa: E402

REPORTS = ROOT / "reports"
MATRICES = {
    "torchvision": "torchvision in 16 bits on a CPU",
    "torchvision-cuda": "torchvision in 16 bits on an NVIDIA H200",
}
"""Folders that ``lowprec-check compat`` wrote, and their titles."""


def scan_text(path: Path) -> str:
    """A saved scan as the command prints it."""
    return render(ScanResult.load(path), "text")


def index(path: Path) -> str:
    """The index of a matrix, without links to pages of single models, which are not in git."""
    return markdown(matrix_document(load(path), MATRICES[path.parent.name], pages=None))


def op_support(path: Path) -> str:
    """The page of the catalog."""
    return format_of(path).lay_out(catalog_document())


def files() -> Iterator[tuple[Path, Callable[[], str]]]:
    """Every rendered file, and what renders it."""
    for saved in sorted((REPORTS / "scans").glob("*.json")):
        yield saved.with_suffix(".txt"), partial(scan_text, saved)
    for folder in MATRICES:
        yield REPORTS / folder / "index.md", partial(index, REPORTS / folder / "matrix.json")
    yield REPORTS / "op-support.html", partial(op_support, REPORTS / "op-support.html")
    yield ROOT / "README.md", partial(with_examples, ROOT / "README.md")


def with_examples(path: Path) -> str:
    """A document, with what the commands in it print: of scans, the saved ones."""

    def printed(found: re.Match[str]) -> str:
        command = found[1].split()
        if command[0] == "scan":
            text = scan_text(REPORTS / "scans" / f"{Path(command[1]).stem}.json")
        else:
            text = subprocess.run(
                [sys.executable, "-m", "lowprec_check", *command],
                stdout=subprocess.PIPE,
                check=True,
                env=os.environ | {"COLUMNS": "100", "TERMINAL_WIDTH": "100", "NO_COLOR": "1"},
            ).stdout.decode("utf-8")
        return f"```\n$ lowprec-check {found[1]}\n{text.strip()}\n```"

    examples = r"^```\n\$ lowprec-check ((?:scan examples/|op ).*)\n(?s:.*?)^```$"
    return re.sub(examples, printed, path.read_text(encoding="utf-8"), flags=re.MULTILINE)


def main() -> None:
    """Write all reports that changed."""
    for path, rendered in files():
        text = rendered()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
