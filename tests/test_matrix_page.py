"""The page of many models: what it shows, how it is sorted and filtered, its links, on a desktop and on a phone."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from browser import opened
from shared_result import run, shared_result

from lowprec_check.compat.rows import failed_row, row_of
from lowprec_check.compat.target_list import Request
from lowprec_check.report.html.matrix_page import matrix_page
from lowprec_check.report.matrix import describe, markdown, word
from lowprec_check.schema.matrix import Matrix, MatrixCell, MatrixRow, load
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
            cell("bfloat16", "error", None, gaps=[DOT], first_gap=DOT, first_gap_kind="missing-kernel", codes=["LP101"]),
            cell("half", error=9e-3, time=0.2, memory=0.7),
            cell("autocast-fp16", "nonfinite", None, codes=["LP201"]),
            weights="scaled",
            parameters=10,
        ),
        model(
            "tiny.py",
            cell("bfloat16", error=5e-3, time=0.9, memory=0.6),
            cell("half", "inaccurate", 1.0, time=0.1, memory=0.1, degenerate="the output is tiny (rms 3e-12): fp16 flushes it to zero"),
            cell("autocast-fp16", "ok", 0.0, degenerate="the fp32 output is all zeros"),
            codes=["LP901"],
            parameters=20,
        ),
        MatrixRow(target="gone.py", slug="gone", state="failed", reason="no such file", seconds=1.0),
    ]
)  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "index.html"
    found.write_text(matrix_page(MATRIX), encoding="utf-8")
    return found


def names(page: Any) -> list[str]:
    shown = page.locator("#matrix tbody tr:visible th bdi:first-child, #matrix tbody tr:visible th a bdi")
    return list(dict.fromkeys(shown.all_inner_texts()))


def hash_of(page: Any) -> str:
    return str(page.evaluate("location.hash"))


# -- what a cell says


def test_degenerate_outputs_are_no_verdict() -> None:
    tiny, zero = MATRIX.rows[2].cells[1:]
    assert [word(each) for each in (tiny, zero)] == ["cannot be judged"] * 2
    assert describe(tiny) == "❔ cannot be judged · the output is tiny (rms 3e-12): fp16 flushes it to zero"
    assert describe(cell("half", "unjudged", None)) == "❔ cannot be judged"
    assert "✅ 0.0e+00" not in markdown(MATRIX)
    assert "| half" in (totals := next(line for line in markdown(MATRIX).splitlines() if line.startswith("| half")))
    assert [part.strip() for part in totals.split("|")[2:5]] == ["2", "", "1"]


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
    assert "scaled random" in markdown(Matrix(rows=[row]))
    doubtful = msgspec.structs.replace(row, recommended=passing.precision)
    assert f"{passing.precision} (cannot be judged)" in markdown(Matrix(rows=[doubtful]))


def test_a_matrix_of_an_older_version_is_read(tmp_path: Path) -> None:
    (tmp_path / "matrix.json").write_text(
        '{"schema": 1, "rows": [{"target": "a.py", "slug": "a", "state": "scanned", "seconds": 1, "cells": '
        '[{"precision": "half", "device": "cpu", "status": "ok", "rel_l2": 0.001}]}]}'
    )
    row = load(tmp_path / "matrix.json").rows[0]
    assert (row.weights, row.codes, row.cells[0].degenerate, row.cells[0].codes) == ("unknown", [], None, [])
    assert "1.0e-03" in matrix_page(Matrix(rows=[row]))


def test_without_pages_of_models_there_are_no_links() -> None:
    assert "models/" not in matrix_page(MATRIX, linked=False)
    assert "models/" not in markdown(MATRIX, linked=False)
    assert 'href="models/gap.py.html"' in matrix_page(MATRIX)


def test_a_note_is_shown_as_text() -> None:
    assert '<p class="note"><bdi>&lt;b&gt;a|b</bdi></p>' in matrix_page(MATRIX, note="<b>a|b")
    assert 'class="note"' not in matrix_page(MATRIX)
    shown = markdown(MATRIX, "Title", note="<b>a|b")
    assert shown.splitlines()[2] == r"\<b\>a|b"


# -- sort and filter


@pytest.mark.slow
def test_precisions_are_sorted_by_error_time_or_memory(browser: Any, path: Path) -> None:
    with opened(browser, path) as page:
        page.get_by_role("button", name="half", exact=True).click()
        assert names(page)[:3] == ["fast.py", "gap.py", "tiny.py"]  # what cannot be judged comes after what can
        page.locator("#by").select_option("time")
        assert names(page)[:2] == ["gap.py", "fast.py"]
        page.locator("#by").select_option("memory")
        assert names(page)[:2] == ["fast.py", "gap.py"]
        assert page.locator("th[aria-sort]").all_inner_texts() == ["half"]
        page.get_by_role("button", name="half", exact=True).click()
        assert page.get_attribute("th[aria-sort]", "aria-sort") == "descending"
        assert names(page)[-1] == "fast.py"
        page.locator("#sort").select_option("parameters")
        page.get_by_role("button", name="descending").click()
        assert names(page) == ["gone.py", "gap.py", "tiny.py", "fast.py"]


@pytest.mark.slow
def test_filters_by_status_op_finding_and_text(browser: Any, path: Path) -> None:
    with opened(browser, path) as page:
        choose = lambda name: page.get_by_role("button", name=name, exact=True).click()  # noqa: E731
        choose("cannot be judged")
        assert names(page) == ["tiny.py"]
        assert page.locator("#matrix .match").all_inner_texts() == page.locator("#matrix td[data-word='cannot be judged']").all_inner_texts()  # fmt: skip
        choose("error")
        assert names(page) == ["gap.py", "tiny.py"]
        assert page.inner_text("#shown") == "2 of 4 models"
        choose("cannot be judged")
        choose("error")
        choose("not scanned")
        assert names(page) == ["gone.py"]
        choose("Show all")
        assert len(names(page)) == 4
        page.locator("#op").select_option(DOT)
        assert names(page) == ["gap.py"]
        page.locator("#code").select_option("LP201")  # found in another run of the same model
        assert names(page) == []
        page.locator("#op").select_option("")
        assert names(page) == ["gap.py"]
        page.locator("#code").select_option("LP901")
        assert names(page) == ["tiny.py"]
        choose("Show all")
        page.fill("#filter", "NO SUCH")
        assert names(page) == ["gone.py"]


@pytest.mark.slow
def test_the_link_shows_the_same_rows(browser: Any, path: Path) -> None:
    with opened(browser, path) as page:
        page.get_by_role("button", name="error", exact=True).click()
        page.locator("#code").select_option("LP101")
        page.locator("#sort").select_option(label="half")
        page.locator("#by").select_option("time")
        page.fill("#filter", "p")
        link = hash_of(page)
        page.goto(path.as_uri() + "#status=nonfinite")
        assert names(page) == ["gap.py"]
        assert page.get_attribute("button[data-word=nonfinite]", "aria-pressed") == "true"
        page.goto(path.as_uri() + link)
        assert names(page) == ["gap.py"]
        assert [page.input_value(f"#{name}") for name in ("code", "sort", "by", "filter")] == [
            "LP101",
            "3",
            "time",
            "p",
        ]
        page.get_by_role("link", name=DOT).click()
        assert page.input_value("#op") == DOT
        assert page.input_value("#code") == ""
        page.get_by_role("link", name="Totals").click()  # an anchor changes nothing
        assert page.input_value("#op") == DOT


@pytest.mark.slow
@pytest.mark.parametrize(
    "link", ["op=<img src=x onerror=alert(1)>", "sort=constructor&by=__proto__", "status=ok,x&code=%", "q=%3Cscript%3E"]
)
def test_a_link_with_anything_in_it_is_harmless(browser: Any, path: Path, link: str) -> None:
    with opened(browser, path) as page:
        page.goto(f"{path.as_uri()}#{link}")
        page.wait_for_timeout(50)
        assert page.locator("img").count() == 0
        assert page.input_value("#sort") == ""
        assert len(names(page)) in (0, 3, 4)


@pytest.mark.slow
def test_hostile_names_stay_text_and_can_be_chosen(browser: Any, tmp_path: Path) -> None:
    nasty = "<img src=x onerror=alert(1)>\"' &op=1#\u202e"
    page_path = tmp_path / "index.html"
    first = cell(nasty, "error", None, gaps=[nasty], first_gap=nasty, first_gap_kind="missing-kernel", codes=[nasty])
    rows = [model("a", first, recommended=nasty), model("b", cell(nasty))]
    rows = [msgspec.structs.replace(row, target=f"{nasty}{row.target}") for row in rows]
    failed = failed_row(Request(nasty, slug="f"), nasty, 1.0, {})
    page_path.write_text(matrix_page(Matrix(rows=[*rows, failed]), nasty), encoding="utf-8")
    with opened(browser, page_path, viewport={"width": 400, "height": 800}) as page:
        assert page.locator("img").count() == 0
        page.locator("#op").select_option(index=1)
        assert len(names(page)) == 1
        assert quote(page.input_value("#op"), safe="") in hash_of(page).replace("+", "%20")
        page.reload()
        assert len(names(page)) == 1
        page.locator("#code").select_option(index=1)
        assert len(names(page)) == 1
        assert page.evaluate("document.documentElement.scrollWidth") <= 400


# -- screens


def many(columns: int) -> Matrix:
    precisions = ("bfloat16", "autocast-bf16", "half", "autocast-fp16", "half · inductor", "bfloat16 · inductor", "fp32 · int8", "plan")  # fmt: skip
    cells = [cell(name, time=0.51, memory=0.52) for name in precisions[:columns]]
    long = "transformers:BertForMaskedLM,hidden_size=256,num_hidden_layers=4,num_attention_heads=4,vocab_size=8192"
    return Matrix(rows=[model(long, *cells, slug=f"m{i}", weights="scaled") for i in range(60)])


@pytest.mark.slow
@pytest.mark.parametrize("columns", [4, 8])
def test_all_columns_fit_a_desktop_and_the_heading_stays(browser: Any, tmp_path: Path, columns: int) -> None:
    page_path = tmp_path / "index.html"
    page_path.write_text(matrix_page(many(columns)), encoding="utf-8")
    with opened(browser, page_path, viewport={"width": 1400, "height": 900}) as page:
        box = page.locator(".frozen")
        assert box.evaluate("box => box.scrollWidth <= box.clientWidth")
        assert page.evaluate("document.documentElement.scrollWidth") <= 1400
        cut = "cells => cells.filter((cell) => cell.scrollWidth > cell.clientWidth + 1).map((cell) => cell.textContent)"
        assert page.locator("#matrix :is(th, td)").evaluate_all(cut) == []
        heading = page.locator("#matrix thead th").first
        before = heading.bounding_box()["y"]
        box.evaluate("box => { box.scrollTop = 1500; }")
        assert heading.bounding_box()["y"] == pytest.approx(before, abs=1)


@pytest.mark.slow
def test_model_and_recommended_stay_while_the_table_scrolls(browser: Any, tmp_path: Path) -> None:
    page_path = tmp_path / "index.html"
    page_path.write_text(matrix_page(many(8)), encoding="utf-8")
    with opened(browser, page_path, viewport={"width": 1100, "height": 800}) as page:
        places = [page.locator(f"#matrix tbody tr:first-child > :nth-child({n})") for n in (1, 2, 3)]
        before = [place.bounding_box()["x"] for place in places]
        page.locator(".frozen").evaluate("box => { box.scrollLeft = 100; }")
        moved = [old - place.bounding_box()["x"] for old, place in zip(before, places, strict=True)]
        assert moved == pytest.approx([0, 0, 100], abs=1)


@pytest.mark.slow
def test_on_a_phone_rows_are_cards(browser: Any, path: Path) -> None:
    with opened(browser, path, viewport={"width": 400, "height": 900}) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        assert not page.locator("#matrix thead").is_visible()
        card = page.locator("#matrix tbody tr").first
        assert card.bounding_box()["width"] <= 400
        labels = card.locator("td").evaluate_all(
            "cells => cells.map((cell) => getComputedStyle(cell, '::before').content)"
        )
        assert labels == ['"recommended"', *(f'"{name}"' for name in COLUMNS)]
        page.locator("#sort").select_option(label="half")
        assert names(page)[0] == "fast.py"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
def test_no_accessibility_rule_is_broken(browser: Any, path: Path, scheme: str, width: int) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    with opened(browser, path, color_scheme=scheme, viewport={"width": width, "height": 900}) as page:
        page.get_by_role("button", name="error", exact=True).click()
        broken = [(rule["id"], rule["nodes"][0]["html"]) for rule in axe.run(page).response["violations"]]
        assert broken == []


@pytest.mark.slow
def test_the_keyboard_is_enough(browser: Any, path: Path) -> None:
    with opened(browser, path) as page:
        page.focus("#matrix thead button >> nth=0")
        page.keyboard.press("Enter")
        assert names(page) == ["fast.py", "gap.py", "gone.py", "tiny.py"]
        page.focus("button[data-word=error]")
        page.keyboard.press("Space")
        assert names(page) == ["gap.py"]
        page.focus("#all")
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "filter"


def test_zeros_of_a_real_scan_are_told(tmp_path: Path) -> None:
    result = shared_result()
    low = run("half", "unjudged", None, budget=None)
    fp32 = msgspec.structs.replace(result.run("fp32"), output_is_zero=True)
    zero: ScanResult = msgspec.structs.replace(result, runs=[fp32, low])
    row = row_of(zero, Request("net.py", slug="n"), 1.0, {})
    assert describe(row.cells[0]) == "❔ cannot be judged · the fp32 output is all zeros"
