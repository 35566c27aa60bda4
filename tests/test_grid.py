"""The reports: the page op-support.html, its letters, and the document op-support.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from browser import opened

from lowprec_check.catalog import declared
from lowprec_check.catalog.measured import history, sweep_of
from lowprec_check.catalog.missing_ops import gaps
from lowprec_check.catalog.version_diff import difference
from lowprec_check.report.op.document import render_report
from lowprec_check.report.op.grid import CELLS, Line, columns, lines, render_grid, why


@pytest.fixture(scope="module")
def grid() -> dict[str, Line]:
    return {line.op: line for line in lines(columns())}


def letters(line: Line, device: str, cell: tuple[str, str] = ("float16", "forward")) -> dict[str, str]:
    """The letter of each version."""
    states = line.states[CELLS.index(cell)]  # type: ignore[arg-type]
    return {c.label: state for c, state in zip(columns(), states, strict=True) if c.device == device}


# -- letters


def test_the_grid_has_operators_that_only_cuda_runs(grid: dict[str, Line]) -> None:
    on_cuda = history("cuda")[-1]
    assert {op for op, record in on_cuda.records.items() if record.samples[0]} <= grid.keys()
    for op in ("jiterator_unary", "jiterator_binary"):
        assert set(letters(grid[op], "cuda").values()) == {"a"}
        assert set(letters(grid[op], "cpu").values()) == {"o"}
        assert set(letters(grid[op], "xpu").values()) == {"-"}
    assert "_flash_attention_forward" in " ".join(grid)


def test_no_means_that_fp32_runs(grid: dict[str, Line]) -> None:
    modes = {"forward": "forward", "autocast": "forward", "backward": "backward", "autocast-backward": "backward"}
    for index, column in enumerate(columns()):
        for op, line in grid.items() if column.sweep else ():
            for (_, mode), states in zip(CELLS, line.states, strict=True):
                assert column.sweep
                runs = column.sweep.state(op, "float32", modes[mode]) in ("all", "some")  # type: ignore[arg-type]
                assert states[index] != "n" or runs, (op, mode, column.label)
                assert states[index] != "o" or not runs, (op, mode, column.label)


def test_partly_and_wholly_on_the_cpu_differ(grid: dict[str, Line]) -> None:
    assert letters(grid["dot"], "xpu")["2.8"] == "f"
    assert letters(grid["matmul"], "xpu")["2.8"] == "p"
    assert letters(grid["dot"], "xpu")["2.11"] == letters(grid["matmul"], "xpu")["2.11"] == "a"


def test_an_operator_without_gradient_has_none_on_xpu(grid: dict[str, Line]) -> None:
    assert not sweep_of("cpu").records["argmax"].samples[1]
    assert set(letters(grid["argmax"], "xpu", ("float16", "backward")).values()) == {"-"}
    assert letters(grid["argmax"], "xpu")["2.15"] == "a"


def test_every_letter_is_in_the_legend(grid: dict[str, Line]) -> None:
    page = render_grid()
    used = {letter for line in grid.values() for states in line.states for letter in states}
    assert used - {"-"} == set(re.findall(r'<b class="(\w)">', page)) == set("asnofp")


def test_reasons_are_for_the_dtype_and_each_device() -> None:
    text = why("cdist", "bfloat16", columns())
    assert [line.partition(" ")[0] for line in text.splitlines()] == ["cpu", "cuda", "xpu"]
    assert "'BFloat16'" in text
    assert "Half" not in text
    assert "in the measured samples it runs only where" in text
    assert why("angle", "float16", columns()) == "cuda 2.11: \"angle_cuda\" not implemented for 'Half'"


# -- the document


@pytest.mark.slow
def test_the_document_counts_what_is_declared_for_xpu() -> None:
    rows = re.findall(r"^\| xpu +\| ([\d.]+) +\| declared +\| (\d+) .*", render_report(), re.M)
    assert rows == [(release, str(gaps("xpu", "float16", release).runnable)) for release in declared.releases("xpu")]


@pytest.mark.slow
def test_the_document_lists_what_xpu_gained() -> None:
    found = render_report().partition("## Gained and lost by version on xpu (declared)")[2].partition("\n## ")[0]
    lists = dict(re.findall(r"^- \*\*([\d.]+)\*\*: (.*)$", found, re.M))
    assert list(lists) == list(declared.releases("xpu"))[1:]
    gained = difference("2.11", "2.12", "xpu").gained
    assert gained
    assert all(change.op in lists["2.12"] for change in gained)
    assert re.search(r"less on the CPU in half: [^;]*\bdot\b", lists["2.11"])


# -- the page


def widths(page: Any) -> tuple[int, int, int, int]:
    found = page.evaluate(
        "(box => [document.documentElement.scrollWidth, innerWidth, box.scrollWidth, box.clientWidth])(document.getElementById('scroll'))"
    )
    return tuple(found)  # type: ignore[return-value]


def open_grid(browser: Any, folder: Path, **options: Any) -> Any:
    path = folder / "grid.html"
    path.write_text(render_grid(), encoding="utf-8")
    return opened(browser, path, **options)


@pytest.mark.slow
def test_all_columns_fit_a_desktop(browser: Any, tmp_path: Path) -> None:
    with open_grid(browser, tmp_path, viewport={"width": 1400, "height": 900}) as page:
        document, window, table, box = widths(page)
        assert document <= window
        assert table <= box
        assert page.locator("#versions th").count() == len(columns()) + 1


@pytest.mark.slow
def test_on_a_phone_the_names_stay_while_the_table_scrolls(browser: Any, tmp_path: Path) -> None:
    with open_grid(browser, tmp_path, viewport={"width": 400, "height": 800}) as page:
        document, window, table, box = widths(page)
        assert document <= window
        assert table > box
        name = page.locator("#body th").first
        before = name.bounding_box()
        page.evaluate("document.getElementById('scroll').scrollLeft = 300")
        assert name.bounding_box()["x"] == pytest.approx(before["x"], abs=2)
        assert before["width"] < 200


@pytest.mark.slow
def test_devices_and_reasons_work_with_the_keyboard(browser: Any, tmp_path: Path) -> None:
    with open_grid(browser, tmp_path) as page:
        page.focus("#device")
        page.keyboard.type("cuda")
        assert page.locator("#devices th").all_inner_texts() == ["cuda"]
        page.fill("#name", "angle")
        page.focus("#body button")
        page.keyboard.press("Enter")
        assert "angle_cuda" in page.inner_text("td.why")
        assert page.get_attribute("#body button", "aria-expanded") == "true"
        page.keyboard.press("Enter")
        assert page.locator("td.why").count() == 0
        page.fill("#name", "_upsample_bilinear2d_aa")  # fails on CPU only, which is not shown
        assert page.locator("#body tr").count() == 0


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_passes_all_accessibility_rules(browser: Any, tmp_path: Path, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    with open_grid(browser, tmp_path, color_scheme=scheme) as page:
        page.uncheck("#gaps")
        page.fill("#name", "_")
        page.locator("#body button:not([disabled])").first.press("Enter")
        page.locator("#torch").select_option("2.9")
        assert [(rule["id"], rule["nodes"][0]["html"]) for rule in axe.run(page).response["violations"]] == []


def hash_of(page: Any) -> str:
    return str(page.evaluate("location.hash"))


@pytest.mark.slow
def test_my_torch_and_my_device_show_whether_it_works(browser: Any, tmp_path: Path) -> None:
    with open_grid(browser, tmp_path) as page:
        page.locator("#torch").select_option("2.9")
        assert page.locator("#devices th").all_inner_texts() == ["cpu", "xpu, declared"]
        page.locator("#device").select_option("xpu")
        page.fill("#name", "dot")
        page.uncheck("#gaps")
        assert page.locator("#versions th").all_inner_texts() == ["operator", "2.9"]
        assert page.locator("#body tr").first.inner_text().split() == ["dot", "yes,", "on", "the", "CPU"]
        page.locator("#device").select_option("cuda")
        assert "no data for torch 2.9 on cuda" in page.inner_text("#count")


@pytest.mark.slow
def test_a_link_shows_one_operator_on_my_machine(browser: Any, tmp_path: Path) -> None:
    with open_grid(browser, tmp_path) as page:
        address = page.url
        page.goto(f"{address}#torch=2.9&device=xpu&op=dot")
        assert page.locator("#body tr").first.inner_text().split() == ["dot", "yes,", "on", "the", "CPU"]
        assert [page.input_value(f"#{name}") for name in ("torch", "device", "name")] == ["2.9", "xpu", "dot"]
        page.locator("#dtype").select_option("bfloat16")
        assert hash_of(page) == "#torch=2.9&device=xpu&precision=bfloat16&op=dot&all=1"
        page.reload()
        assert page.input_value("#dtype") == "bfloat16"
        page.goto(f"{address}#")
        assert page.locator("#versions th").count() == len(columns()) + 1
        assert page.is_checked("#gaps")


@pytest.mark.slow
@pytest.mark.parametrize("value", ["<img src=x onerror=alert(1)>", "__proto__", "\"'`;alert(2)//", "%3Cb%3E"])
def test_a_link_with_anything_in_it_is_harmless(browser: Any, tmp_path: Path, value: str) -> None:
    with open_grid(browser, tmp_path) as page:
        page.goto(f"{page.url}#torch={value}&device={value}&precision={value}&mode={value}&op={value}")
        assert [page.input_value(f"#{name}") for name in ("torch", "device", "dtype", "mode")] == [
            "",
            "",
            "float16",
            "forward",
        ]
        assert page.locator("#body tr").count() == 0
        assert page.locator("img").count() == 0


@pytest.mark.slow
def test_the_policy_runs_no_other_script(browser: Any, tmp_path: Path) -> None:
    page_text = render_grid()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page_text)[1]  # type: ignore[index]
    assert "default-src &#39;none&#39;" in policy
    assert policy.count("sha256-") == 1
    path = tmp_path / "grid.html"
    path.write_text(page_text.replace("</main>", "<script>document.title = 'run'</script></main>"), encoding="utf-8")
    page = browser.new_page()
    page.goto(path.as_uri())
    assert page.title() != "run"
    assert page.locator("#body tr").count() > 100
    page.close()


def test_hostile_text_in_the_catalog_stays_data(monkeypatch: pytest.MonkeyPatch) -> None:
    nasty = "</script><img src=x onerror=alert(1)>"
    monkeypatch.setattr("lowprec_check.report.op.grid.lines", lambda _: [Line(nasty, ["a"] * len(CELLS), [nasty] * 2)])
    page = render_grid()
    assert nasty not in page
    assert page.count("</script>") == 2
