"""A quantity of op calls is declared once, as a field of ``OpCall``: files, docs, tables and page derive from it."""

from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser

from conftest import ROOT

from lowprec_check.schema.op_calls import QUANTITIES, OpCall

DECLARED = '''
    toy: Annotated[float | None, Quantity("toy of all calls", "figure", "max", "What a toy is.", "toy")] = None
    """A quantity that nobody measures."""
'''

WITH_TOY = """
import importlib.util, json, sys
from pathlib import Path

spec = importlib.util.find_spec("lowprec_check.schema.op_calls")  # one declaration more, and nothing else
source = Path(spec.origin).read_text(encoding="utf-8")
before, at, after = source.partition("\\n    @property\\n")
module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
exec(compile(before + sys.argv[1] + at + after, spec.origin, "exec"), module.__dict__)

import msgspec
from shared_result import shared_result
from lowprec_check.report.layout.markdown import markdown
from lowprec_check.report.layout.text import text
from lowprec_check.report.page_blocks import scan_page
from lowprec_check.report.registry import render
from lowprec_check.schema.op_calls import to_columns
from lowprec_check.schema.scan_result import ScanResult

result = shared_result()
half = result.run("half")
rows = [*half.op_calls.rows()]
for number, row in enumerate(rows):
    row.toy = 7.25 if number == 2 else 0.5  # the one line of the engine
runs = [msgspec.structs.replace(one, op_calls=to_columns(rows)) if one is half else one for one in result.runs]
result = ScanResult.from_json(msgspec.structs.replace(result, runs=runs).to_json())
page = scan_page(result)
print(json.dumps({
    "html": render(result, "html"),
    "md": markdown(page, sys.maxsize, "all"),
    "txt": text(page, width=400, detail="all"),
    "column": result.columns("op_calls")["toy"],
    "schema": json.dumps(msgspec.json.schema(ScanResult)),
    "old": ScanResult.from_json(Path("tests/goldens/scan-0.1.0.json").read_bytes()).columns("op_calls")["toy"],
}))
"""


class Headings(HTMLParser):
    """The headings of all tables with what they mean."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self.meaning: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.meaning = (dict(attrs).get("title") or "") if tag == "th" else None

    def handle_data(self, data: str) -> None:
        if self.meaning is not None:
            self.found.setdefault(data, self.meaning)


def test_a_declared_quantity_is_saved_documented_and_shown() -> None:
    command = [sys.executable, "-c", WITH_TOY, DECLARED]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    headings = Headings(shown["html"]).found
    assert headings["toy of all calls"] == "What a toy is."
    assert "toy" in headings  # of the worst calls of an op
    for name in ("html", "md", "txt"):
        assert "toy of all calls" in shown[name]
        assert "7.25" in shown[name]
    assert 7.25 in shown["column"]
    assert '"toy"' in shown["schema"]
    assert set(shown["old"]) == {None}


def test_every_quantity_is_a_field_and_says_what_it_is() -> None:
    fields = set(OpCall.__struct_fields__)
    assert len(QUANTITIES) > 5
    for name, quantity in QUANTITIES.items():
        assert name in fields
        assert not quantity.plus or quantity.plus in fields
        assert quantity.meaning.endswith(".")
