"""The index of many models: what its cells say, and that its page sorts and searches runs by what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from browser import opened
from shared_result import run, shared_result

from lowprec_check.compat.scan_process import Request, failed_row, row_of
from lowprec_check.report.matrix import matrix_document, status_of
from lowprec_check.report.registry import format_of
from lowprec_check.schema.matrix import Matrix, MatrixCell, MatrixRow, load
from lowprec_check.schema.measures import InputsTried
from lowprec_check.schema.scan_result import ScanResult

COLUMNS = ("bfloat16", "half", "autocast-fp16")


def cell(precision: str, status: str = "ok", error: float | None = 1e-3, **more: Any) -> MatrixCell:
    return MatrixCell(precision=precision, column=precision, device="cpu", status=status, rel_l2=error, **more)  # type: ignore[arg-type]


def model(name: str, *cells: MatrixCell, **more: Any) -> MatrixRow:
    fields: dict[str, Any] = {
        "slug": name,
        "state": "scanned",
        "seconds": 1.0,
        "parameters": 1000,
        "recommended": "half",
    }
    return MatrixRow(target=name, cells=list(cells), **fields | more)


DOT = "aten.dot.default"
NO_KERNEL = {"gaps": [DOT], "first_gap": DOT, "first_gap_kind": "missing-kernel"}
TINY = "the output is tiny (rms 3e-12): fp16 flushes it to zero"
MATRIX = Matrix(
    rows=[
        model(
            "fast.py",
            cell("bfloat16", error=3e-3, time=0.5, memory=0.9),
            cell("half", error=1e-3, time=2.0, memory=0.5),
            cell("autocast-fp16", error=2e-3, time=1.0, memory=1.0),
            weights="random",
            parameters=30,
        ),
        model(
            "gap.py",
            cell("bfloat16", "error", None, codes=["LP101"], **NO_KERNEL),
            cell("half", error=9e-3, time=0.2, memory=0.7),
            cell("autocast-fp16", "nonfinite", None, codes=["LP201"]),
            weights="scaled",
            parameters=10,
        ),
        model(
            "tiny.py",
            cell("bfloat16", error=5e-3, time=0.9, memory=0.6),
            cell("half", "inaccurate", 1.0, time=0.1, memory=0.1, degenerate=TINY),
            cell("autocast-fp16", "ok", 0.0, degenerate="the fp32 output is all zeros"),
            codes=["LP901"],
            parameters=20,
        ),
        MatrixRow(target="gone.py", slug="gone", state="failed", reason="no such file", seconds=1.0),
    ]
)  # fmt: skip


def shown(found: Matrix, suffix: str = ".md", **options: Any) -> str:
    return format_of(Path(suffix)).lay_out(matrix_document(found, **options))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "index.html"
    found.write_text(shown(MATRIX, ".html"), encoding="utf-8")
    return found


# -- what a cell says


def test_degenerate_outputs_are_no_verdict() -> None:
    assert [status_of(each) for each in MATRIX.rows[2].cells[1:]] == ["unjudged"] * 2
    text = shown(MATRIX)
    assert "❔ the output is tiny (rms 3e-12): fp16 flushes it to zero" in text
    assert "❔ cannot be judged" in shown(Matrix(rows=[model("a.py", cell("half", "unjudged", None))]))
    assert "✅ 0" not in text
    totals = [[part.strip() for part in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert totals[0] == ["precision", "ok", "cannot be judged", "NaN or Inf", "fails"]
    assert totals[2:5] == [
        ["bfloat16", "2", "0", "0", "1"],
        ["half", "2", "1", "0", "0"],
        ["autocast-fp16", "1", "1", "1", "0"],
    ]


def test_a_run_that_fails_on_a_further_input_is_not_shown_as_one_that_passes() -> None:
    def on_inputs(**statuses: int) -> InputsTried:
        tried = sum(statuses.values())
        return InputsTried(kind="drawn", tried=tried, failed=tried - statuses["ok"], statuses=statuses, worst=0.02)

    some = cell("half", further_inputs=on_inputs(ok=14, inaccurate=2))
    worse = cell("half", further_inputs=on_inputs(ok=14, inaccurate=1, nonfinite=1))
    passing = cell("half", further_inputs=on_inputs(ok=16))
    assert [status_of(each) for each in (some, worse, passing)] == ["inaccurate", "nonfinite", "ok"]
    text = shown(Matrix(rows=[model("a.py", some), model("b.py", worse), model("c.py", passing)]))
    assert "❌ passes here, fails on 2 of 16 further inputs (drawn anew)" in text
    assert "✅ 1.0e-03" in text
    result = shared_result()
    tried = msgspec.structs.replace(result.run("half"), status="ok", further_inputs=some.further_inputs)
    row = row_of(msgspec.structs.replace(result, runs=[result.runs[0], tried]), Request("net.py", slug="n"), 1.0, {})
    assert row.cells[0].further_inputs == some.further_inputs


def test_speed_has_one_unit() -> None:
    assert "2.0 × as fast" in shown(MATRIX)
    assert "2.0 × slower" in shown(MATRIX)
    assert "≈ fp32" in shown(MATRIX)


def test_a_row_of_a_scan_knows_its_weights_codes_and_degenerate_runs() -> None:
    result = shared_result()
    zero = [msgspec.structs.replace(each, output_is_zero=each.is_reference) for each in result.runs]
    named = msgspec.structs.replace(result.model, weights="scaled")
    result = msgspec.structs.replace(result, runs=zero, model=named)
    row = row_of(result, Request("net.py", slug="n"), 1.0, {})
    assert row.weights == "scaled"
    codes = {each.column: each.codes for each in row.cells}
    assert {code for found in codes.values() for code in found} | set(row.codes) == {d.code for d in result.diagnostics}
    assert "LP101" in codes["half"]
    passing = next(each for each in row.cells if each.status == "ok")
    assert passing.degenerate == "the fp32 output is all zeros"
    assert "scaled random" in shown(Matrix(rows=[row]))
    doubtful = msgspec.structs.replace(row, recommended=passing.precision)
    assert f"{passing.precision} (cannot be judged)" in shown(Matrix(rows=[doubtful]))


def test_a_matrix_of_an_older_version_is_read(tmp_path: Path) -> None:
    (tmp_path / "matrix.json").write_text(
        '{"schema": 1, "rows": [{"target": "a.py", "slug": "a", "state": "scanned", "seconds": 1, "cells": '
        '[{"precision": "half", "device": "cpu", "status": "ok", "rel_l2": 0.001}]}]}'
    )
    row = load(tmp_path / "matrix.json").rows[0]
    assert (row.weights, row.codes, row.cells[0].degenerate, row.cells[0].codes) == ("unknown", [], None, [])
    assert "1.0e-03" in shown(Matrix(rows=[row]), ".html")


def test_without_pages_of_models_there_are_no_links() -> None:
    for suffix in (".md", ".html"):
        assert "models/" not in shown(MATRIX, suffix, pages=None)
    assert 'href="models/gap.py.html"' in shown(MATRIX, ".html", pages=".html")


def test_a_title_is_shown_as_text() -> None:
    assert "&lt;b&gt;a|b</h1>" in shown(MATRIX, ".html", title="<b>a|b")
    assert shown(MATRIX, title="<b>a|b").splitlines()[0] == r"**\<b\>a|b**"


def test_zeros_of_a_real_scan_are_told() -> None:
    result = shared_result()
    low = run("half", "unjudged", None, budget=None)
    fp32 = msgspec.structs.replace(result.run("fp32"), output_is_zero=True)
    zero: ScanResult = msgspec.structs.replace(result, runs=[fp32, low])
    assert "❔ the fp32 output is all zeros" in shown(Matrix(rows=[row_of(zero, Request("net.py", slug="n"), 1.0, {})]))


# -- the page


def runs_of(page: Any) -> Any:
    return page.get_by_role("group", name="runs", exact=True)


def names(page: Any) -> list[str]:
    rows = runs_of(page).locator("tbody tr:visible")
    return [" ".join(row.locator("th").all_inner_texts()) for row in rows.all()]


@pytest.mark.slow
def test_runs_are_sorted_by_error_speed_and_memory(browser: Any, path: Path) -> None:
    with opened(browser, path) as page:
        head = lambda name: runs_of(page).locator("thead button", has_text=name)  # noqa: E731
        head("error").click()
        head("error").click()
        assert names(page)[:2] == ["tiny.py autocast-fp16", "fast.py half"]
        head("speed").click()
        assert names(page)[:2] == ["tiny.py half", "gap.py half"]
        head("memory").click()
        assert names(page)[0] == "fast.py autocast-fp16"


@pytest.mark.slow
def test_runs_are_found_by_status_op_and_finding(browser: Any, path: Path) -> None:
    with opened(browser, path) as page:
        search = page.get_by_label("Search runs")
        for wanted, found in (
            ("cannot be judged", ["tiny.py half", "tiny.py autocast-fp16"]),
            ("dot", ["gap.py bfloat16"]),
            ("LP201", ["gap.py autocast-fp16"]),
            ("LP901", ["tiny.py bfloat16", "tiny.py half", "tiny.py autocast-fp16"]),
        ):
            search.fill(wanted)
            assert names(page) == found


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_the_page_fits_and_breaks_no_accessibility_rule(browser: Any, path: Path, scheme: str, width: int) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    with opened(browser, path, color_scheme=scheme, viewport={"width": width, "height": 900}) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        broken = [(rule["id"], rule["nodes"][0]["html"]) for rule in axe.run(page).response["violations"]]
        assert broken == []


@pytest.mark.slow
def test_hostile_names_stay_text(browser: Any, tmp_path: Path) -> None:
    nasty = "<img src=x onerror=alert(1)>\"' &op=1#\u202e"
    first = cell(nasty, "error", None, gaps=[nasty], first_gap=nasty, first_gap_kind="missing-kernel", codes=[nasty])
    row = msgspec.structs.replace(model("a", first, recommended=nasty), target=nasty)
    failed = failed_row(Request(nasty, slug="f"), nasty, 1.0, {})
    page_path = tmp_path / "index.html"
    page_path.write_text(shown(Matrix(rows=[row, failed]), ".html", title=nasty), encoding="utf-8")
    with opened(browser, page_path) as page:
        assert page.locator("img").count() == 0
