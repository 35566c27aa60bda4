"""The HTML report in a real browser: no errors, no network, usable with mouse, keyboard, screen reader and on paper."""

from __future__ import annotations

import base64
import gzip
import json
import random
import re
import subprocess
import sys
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pytest
from browser import hover, opened
from shared_result import budgeted, budgeted_result, op_calls, run, shared_result

from lowprec_check.analysis.error_origin import origin
from lowprec_check.report.html import charts, error_levels, module_tree
from lowprec_check.report.html.error_levels import error_level
from lowprec_check.report.html.module_tree import Node
from lowprec_check.report.html.scan_page import render
from lowprec_check.schema.scan_result import ScanResult

RESULT = shared_result()
LARGEST = 5 * 2**20


def label_in_chart(page: Any) -> str:
    return str(page.locator("#origin-label").text_content())


CHART = "Bokeh.documents.find((one) => one.get_model_by_name('call-areas'))"
"""The document of the error chart, in the page."""
LABELS_ARE_PLACED = """() => new Promise((resolve) => {
    const places = () => JSON.stringify([...document.querySelectorAll("#error-labels > *, #error-chart, .series label")]
        .map((element) => element.getBoundingClientRect()));
    const before = places();
    setTimeout(() => resolve(places() === before), 200);
})"""
"""Whether the labels of the error chart hold still."""


def points(page: Any, name: str) -> dict[str, list[Any]]:
    """A data source of the error chart; NaN is ``None``."""
    script = f"(name) => Object.fromEntries(Object.entries({CHART}.get_model_by_name(name).data)"
    script += ".map(([key, values]) => [key, [...values].map((value) => (Number.isNaN(value) ? null : value))]))"
    return dict(page.evaluate(script, name))


def shown_calls(page: Any) -> tuple[float, float]:
    """The range of op calls that the error chart shows."""
    start, end = page.evaluate(f"(({{ start, end }}) => [start, end])({CHART}.roots()[0].x_range)")
    return start, end


def show(page: Any, label: str) -> None:
    page.locator('.run-choice[data-chart="error"]').select_option(label=label)


# -- in the browser


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_opens_without_errors_and_shows_the_origin_of_the_error(
    browser: Any, page_of: Any, scheme: str
) -> None:
    with opened(browser, page_of(RESULT), color_scheme=scheme) as page:
        assert page.locator("html").get_attribute("data-theme") == scheme
        assert "Use half with 2 of 6 modules in fp32" in page.locator(".verdict").inner_text()
        assert (
            "First Inf: aten.gelu.default in head at net.py:26 (call 42), 12 of 65,536 values (< 0.1 %)."
            in page.inner_text("#origin")
        )
        assert label_in_chart(page) == "first Inf: aten.gelu.default"
        show(page, "bfloat16 (inaccurate)")
        assert page.inner_text("#origin").startswith("First to leave the tolerance: aten.gelu.default in")
        assert "(call 21), error grows from" in page.inner_text("#origin")
        show(page, "half (error)")
        assert page.inner_text("#origin") == "No op stands out: none is over the tolerance."
        assert label_in_chart(page) == ""


@pytest.mark.slow
def test_the_page_shows_shares_in_bars_tree_and_calls(browser: Any, page_of: Any) -> None:
    with opened(browser, page_of(budgeted_result()), viewport={"width": 1200, "height": 900}) as page:
        first = page.locator(".budget", has_text="bfloat16").filter(has=page.locator(".shares")).first
        first.evaluate("details => { details.open = true; }")
        told = first.locator("summary").first.inner_text()
        assert told.startswith("bfloat16 inaccurate error over the tolerance")
        assert "46 % from head.out" in told
        assert first.locator("tbody tr").first.inner_text().split()[:3] == ["head.out", "46", "%"]
        widths = (
            first.locator("table")
            .first.locator(".bar")
            .evaluate_all(
                "bars => bars.map((bar) => parseFloat(getComputedStyle(bar, '::before').width) / bar.clientWidth)"
            )
        )
        assert widths[:3] == pytest.approx([0.46, 0.12, 0.09], abs=0.01)
        page.locator("#heat-metric").select_option("s")
        shown = {
            row.split("\t")[0].strip(): row.split("\t")[1] for row in page.locator("#heat tbody tr").all_inner_texts()
        }
        assert (shown["head"], shown["norm"], shown["(model)"]) == ("46 %", "12 %", "74 %")
        assert page.locator(".scale:visible span").last.inner_text() == "> 50 %"
        show(page, "bfloat16 (inaccurate)")
        assert page.inner_text("#origin").startswith("Largest share: aten.native_layer_norm.default in head.out")
        assert page.inner_text("#steps-title") == "The 20 calls with the largest shares (table)"
        page.focus("#call-slider")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowLeft")
        assert page.inner_text("#call-details").endswith(", share 46 %")


@pytest.mark.slow
def test_findings_without_an_effect_are_folded_and_found(browser: Any, page_of: Any) -> None:
    with opened(browser, page_of(budgeted_result())) as page:
        folded = page.locator("#no-effect .finding")
        assert page.locator("#no-effect > summary").inner_text() == "2 more with no effect on the output"
        assert not folded.first.is_visible()
        page.fill("#filter", "LP304")
        assert folded.first.is_visible()


@pytest.mark.slow
def test_both_ends_of_the_range_are_told(browser: Any, page_of: Any) -> None:
    with opened(browser, page_of(RESULT)) as page:
        page.locator('.run-choice[data-chart="range"]').select_option(label="half (error)")
        remark = page.inner_text("#range-remark")
        assert "Closest to the maximum: head." in remark
        assert (
            "40.0 % of its non-zeros are below the smallest normal number of fp16, 6.1e-5; 25.0 % become zero."
            in remark
        )
        page.locator('.run-choice[data-chart="range"]').select_option(label="bfloat16 (inaccurate)")
        assert "Closest to the minimum" not in page.inner_text("#range-remark")


@pytest.mark.slow
def test_a_tooltip_shows_op_module_and_line(browser: Any, page_of: Any) -> None:
    with opened(browser, page_of(RESULT), viewport={"width": 1200, "height": 900}) as page:
        show(page, "bfloat16 (inaccurate)")
        calls = RESULT.run("bfloat16").op_calls
        tip = hover(page, "error-chart", 22, calls.accumulated_error[21])
        assert calls.op[21] in tip
        assert calls.module[21] in tip
        assert calls.source[21] in tip


@pytest.mark.slow
def test_the_tooltip_of_the_nearest_call_shows_at_any_height(browser: Any, page_of: Any) -> None:
    with opened(browser, page_of(RESULT), viewport={"width": 1200, "height": 900}) as page:
        show(page, "bfloat16 (inaccurate)")
        heights = points(page, "areas")
        bottom, top = heights["bottom"][0], heights["top"][0]
        for x, y in [(5.4, bottom * 1.5), (5.6, top / 1.5), (30.0, 1e-3), (0.2, top / 3), (48.8, bottom * 2)]:
            nearest = min(48, max(1, round(x)))
            assert hover(page, "error-chart", x, y).startswith(
                f"{nearest}: {RESULT.run('bfloat16').op_calls.op[nearest - 1]}"
            )


def with_errors(errors: list[float | None], tolerance: float = 1e-2, **more: Any) -> ScanResult:
    """A result whose run in half has these accumulated errors, and no local ones."""
    count = len(errors)
    calls = msgspec.structs.replace(op_calls(count, **more), local_error=[None] * count, accumulated_error=errors)
    half = run("half", "inaccurate", 0.5, tolerance=tolerance, op_calls=calls)
    return msgspec.structs.replace(RESULT, runs=[run("fp32", tolerance=None), half])


@pytest.mark.slow
def test_an_error_of_exactly_zero_neither_breaks_nor_drops_the_line(browser: Any, page_of: Any) -> None:
    with opened(browser, page_of(with_errors([1e-4, 0.0, 0.0, 2e-4, 3e-4, None, 5e-4, 0.0]))) as page:
        line, zeros = points(page, "all"), points(page, "zeros")
        assert (line["x"], line["y"]) == ([1, 4, 5, 7], [1e-4, 2e-4, 3e-4, 5e-4])
        assert zeros["x"] == [2, 3, 8]
        assert max(zeros["y"]) < 1e-4 / 4
        assert points(page, "accumulated")["x"] == [1, 4, 5, 7]
        assert "All 8 op calls are drawn, except 1 without a measured error (not floating" in page.inner_text("#drawn")
        assert "○ at the bottom" in page.inner_text("#drawn")


@pytest.mark.slow
def test_the_line_breaks_at_inf_and_nan(browser: Any, page_of: Any) -> None:
    with opened(browser, page_of(with_errors([1e-4, 2e-4, None, None, 1.0], nan=2))) as page:
        assert points(page, "all")["y"] == [1e-4, 2e-4, None, None, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize("origin_at", [0, 1, 20, 39])
@pytest.mark.parametrize("is_trained", [False, True])
def test_labels_hide_neither_each_other_nor_the_chart(
    browser: Any, page_of: Any, width: int, origin_at: int, is_trained: bool
) -> None:
    errors: list[float | None] = [9e-3 if i < origin_at else 1.1e-2 for i in range(40)]
    result = with_errors(errors)
    if is_trained:
        half = result.runs[1]
        phase = ["forward"] * 20 + ["backward"] * 18 + ["optimizer"] * 2
        calls = msgspec.structs.replace(half.op_calls, phase=phase)
        result = msgspec.structs.replace(result, runs=[result.runs[0], msgspec.structs.replace(half, op_calls=calls)])
    with opened(browser, page_of(result), viewport={"width": width, "height": 900}) as page:
        page.wait_for_function(LABELS_ARE_PLACED)
        frame = page.locator("#error-chart").bounding_box()
        labels = page.locator("#error-labels > :visible, #tolerance-text, .series label")
        boxes = {labels.nth(i).inner_text(): labels.nth(i).bounding_box() for i in range(labels.count())}
        names = {"first to leave the tolerance: " + result.runs[1].op_calls.op[origin_at], "tolerance 1.0e-2"}
        assert boxes.keys() >= (names | {"forward", "backward", "optimizer"} if is_trained else names)
        places = list(boxes.values())
        assert not [(one, other) for i, one in enumerate(places) for other in places[:i] if overlap(one, other)]
        assert not [one for one in places if overlap(one, frame)]
        assert all(one["x"] >= 0 and one["x"] + one["width"] <= width for one in places)
        marks = f"['tolerance-label', 'origin-label'].some((name) => {CHART}.get_model_by_name(name))"
        assert not page.evaluate(marks)  # nothing is written into the chart


def overlap(one: dict[str, float], other: dict[str, float]) -> bool:
    return all(
        one[at] < other[at] + other[size] - 0.5 and other[at] < one[at] + one[size] - 0.5
        for at, size in (("x", "width"), ("y", "height"))
    )


@pytest.mark.slow
def test_the_error_chart_follows_the_module_chosen(browser: Any, page_of: Any) -> None:
    calls = RESULT.run("bfloat16").op_calls
    inside = [i + 1 for i, module in enumerate(calls.module) if module.startswith("encoder.blocks.1")]
    with opened(browser, page_of(RESULT), viewport={"width": 1200, "height": 900}) as page:
        show(page, "bfloat16 (inaccurate)")
        page.evaluate("choose({ module: 'encoder.blocks.1' })")
        start, end = shown_calls(page)
        assert inside[0] - 3 < start < inside[0]
        assert inside[-1] < end < inside[-1] + 3
        found = points(page, "accumulated")
        assert [x for x, alpha in zip(found["x"], found["alpha"], strict=True) if alpha == 1] == inside
        assert page.inner_text("#drawn").endswith("Those outside encoder.blocks.1 are dimmed.")
        page.focus("#call-slider")
        page.keyboard.press("End")
        assert page.inner_text("#call-details").startswith(f"Call {inside[-1]}: ")
        page.evaluate(f"{CHART}.roots()[0].x_range.reset()")
        assert shown_calls(page) == (0, 49)
        page.evaluate("choose({ module: null })")
        assert set(points(page, "accumulated")["alpha"]) == {1}
        assert shown_calls(page) == (0, 49)


@pytest.mark.slow
def test_the_chart_says_how_many_calls_are_drawn(browser: Any, page_of: Any) -> None:
    result = with_errors([10 ** random.Random(i).uniform(-5, -3) for i in range(50_000)])
    with opened(browser, page_of(result)) as page:
        drawn = points(page, "accumulated")["x"]
        assert 10_000 < len(drawn) <= charts.MOST_CALLS
        assert page.inner_text("#drawn") == f"{len(drawn):,} of 50,000 op calls are drawn, the worst of each segment."


@pytest.mark.slow
def test_the_keyboard_steps_through_the_calls(browser: Any, page_of: Any) -> None:
    with opened(browser, page_of(RESULT)) as page:
        page.focus("#call-slider")
        page.keyboard.press("Home")
        assert page.inner_text("#call-details").startswith("Call 1: aten.convolution.default in encoder, line –")
        page.keyboard.press("ArrowRight")
        shown = page.inner_text("#call-details")
        assert shown.startswith("Call 2: aten.native_layer_norm.default in encoder, line net.py:21")
        assert page.get_attribute("#call-slider", "aria-valuetext") == shown


@pytest.mark.slow
def test_the_module_tree_opens_and_closes_by_keyboard(browser: Any, page_of: Any) -> None:
    with opened(browser, page_of(RESULT)) as page:
        rows = page.locator("#heat tbody tr:visible")
        everything = rows.count()
        page.locator("#heat tbody tr").first.focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowLeft")
        assert rows.count() < everything
        assert page.locator("#heat tbody tr").nth(1).get_attribute("aria-expanded") == "false"
        page.keyboard.press("Enter")
        assert rows.count() == everything
        page.locator("#heat-metric").select_option("t")
        assert "×" in page.locator("#heat tbody tr").first.inner_text()


@pytest.mark.slow
def test_findings_are_filtered(browser: Any, page_of: Any) -> None:
    with opened(browser, page_of(RESULT)) as page:
        page.fill("#filter", "cholesky")
        assert page.locator(".finding:visible").count() == 2
        assert page.inner_text("#shown").startswith("2 of ")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_accessibility_rule_is_broken(browser: Any, page_of: Any, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    with opened(browser, page_of(budgeted_result()), color_scheme=scheme) as page:
        broken = [(rule["id"], rule["nodes"][0]["html"]) for rule in axe.run(page).response["violations"]]
        assert broken == []


@pytest.mark.slow
def test_prints_in_light_colours(browser: Any, page_of: Any, tmp_path: Path) -> None:
    with opened(browser, page_of(RESULT), color_scheme="dark") as page:
        page.emulate_media(media="print")
        page.wait_for_selector("html[data-theme=light]", state="attached", timeout=30_000)
        assert not page.locator("nav").is_visible()
        assert page.pdf(path=tmp_path / "report.pdf")[:4] == b"%PDF"


@pytest.mark.slow
def test_a_narrow_screen_does_not_scroll_sideways(browser: Any, page_of: Any) -> None:
    with opened(browser, page_of(budgeted_result()), viewport={"width": 360, "height": 800}) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.slow
def test_hostile_strings_stay_text(browser: Any, page_of: Any) -> None:
    nasty = "<img src=x onerror=alert(1)><script>alert(2)</script>\"' javascript:alert(3) \u202e {{7*7}} " + "y" * 5000
    with opened(browser, page_of(budgeted_result(nasty)), viewport={"width": 1200, "height": 900}) as page:
        show(page, "bfloat16 (inaccurate)")
        error = shared_result().run("bfloat16").op_calls.accumulated_error[21]
        assert "<img src=x" in hover(page, "error-chart", 22, error)
        assert page.locator("img").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= 1200


@pytest.mark.slow
def test_twenty_thousand_calls_a_run_are_shown(browser: Any, page_of: Any) -> None:
    runs = [run("fp32", tolerance=None)]
    for name in ("bfloat16", "autocast-bf16", "half", "autocast-fp16", "plan"):
        calls = op_calls(20_000, jump=12_345)
        calls = msgspec.structs.replace(calls, module=[f"layers.{i // 40}.block.{i // 10 % 4}" for i in range(20_000)])
        runs.append(run(name, "ok", 1e-3, op_calls=calls))
    result = msgspec.structs.replace(RESULT, runs=runs)
    path = page_of(result)
    assert path.stat().st_size <= LARGEST
    with opened(browser, path, viewport={"width": 1200, "height": 900}) as page:
        show(page, "half (ok)")
        tip = hover(page, "error-chart", 12_346, result.run("half").op_calls.accumulated_error[12_345])
    assert "aten.convolution.default" in tip


# -- without a browser


def test_no_two_scripts_of_a_page_declare_one_name() -> None:
    """All scripts of the page are one: the second declaration would replace the first, or raise."""
    folder = files("lowprec_check.report.html") / "static"
    names = [file.name for file in folder.iterdir() if file.name.endswith(".js") and file.name != "matrix.js"]
    declared = Counter[str]()
    for name in names:
        text = (folder / name).read_text(encoding="utf-8")
        declared.update(re.findall(r"(?m)^(?:async )?(?:function|class|const|let) (\w+)", text))
    assert [name for name, count in declared.items() if count > 1] == []


@pytest.mark.parametrize(
    ("error", "level"),
    [(None, 0), (0.0, 0), (1e-9, 1), (1e-5, 1), (2e-5, 2), (1e-3, 3), (2e-3, 4), (1e-2, 5), (1.01e-2, 6), (0.2, 7)],
)
def test_the_level_of_an_error_is_relative_to_the_tolerance(error: float | None, level: int) -> None:
    assert error_level(error, 1e-2) == level
    assert error_level(error and 5 * error, 5e-2) == level
    assert (level > error_levels.WITHIN) == ((error or 0.0) > 1e-2)
    assert error_level(error, None) == 0
    assert error_level(error, 1e-2, is_nonfinite=True) == 8 == len(error_levels.LEVEL_TEXTS)


def test_the_tree_colours_each_run_by_its_own_tolerance() -> None:
    same = op_calls(6, half=False)
    worst = max(same.accumulated_error)
    runs = [run("bfloat16", tolerance=worst * 1.5, op_calls=same), run("half", tolerance=worst / 1.5, op_calls=same)]
    cells = module_tree.build(runs).nodes[0].cells
    assert [cell.accumulated.level for cell in cells] == [5, 6]
    assert cells[0].accumulated.text == cells[1].accumulated.text


def test_the_policy_allows_only_the_scripts_of_the_page() -> None:
    page = render(RESULT)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]  # type: ignore[index]
    assert "default-src &#39;none&#39;" in policy
    assert "unsafe-eval" not in policy
    assert policy.count("sha256-") == 3
    assert not re.search(r'(?:src|href)="(?!#)', re.sub(r"(?s)<script>.*?</script>", "", page))


def test_a_page_is_made_without_importing_bokeh(tmp_path: Path) -> None:
    RESULT.save(tmp_path / "scan.json")
    code = (
        "import sys; from lowprec_check.report.registry import render; from lowprec_check.schema.scan_result import ScanResult;"
        "page = render(ScanResult.load(sys.argv[1]), 'html'); assert 'Bokeh' in page;"
        "print(sorted({'bokeh', 'numpy', 'torch'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "scan.json")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


def unpacked(result: ScanResult) -> dict[str, Any]:
    drawn = [found for found in result.runs if len(found.op_calls)]
    return dict(json.loads(gzip.decompress(base64.b64decode(charts.pack(drawn)))))


def test_the_chart_data_holds_the_measured_values() -> None:
    data = unpacked(RESULT)
    calls, first = data["runs"][0]["calls"], RESULT.run("bfloat16").op_calls
    assert [data["strings"]["op"][number] for number in calls["op"]] == first.op
    assert calls["accumulated_error"] == pytest.approx(first.accumulated_error, rel=1e-2)
    assert [run["format"] for run in data["runs"]] == ["bf16", "bf16", "fp16", "fp16"]


def test_thinning_keeps_the_worst_and_the_origin() -> None:
    calls = op_calls(50_000, jump=31_007)
    result = msgspec.structs.replace(RESULT, runs=[run("half", "inaccurate", 0.5, op_calls=calls)])
    found = unpacked(result)["runs"][0]
    assert found["total"] == 50_000
    assert len(found["calls"]["index"]) <= charts.MOST_CALLS
    assert 31_007 in found["calls"]["index"]
    assert found["origin"]["call"] == 31_007


def test_findings_that_are_not_shown_are_counted() -> None:
    first = RESULT.diagnostics[0]
    many = [msgspec.structs.replace(first, op=f"aten.op_{i}.default", message="m" * 300) for i in range(20_000)]
    page = render(msgspec.structs.replace(RESULT, diagnostics=many))
    assert len(page) <= LARGEST
    assert "19500 of 20000 causes are not shown" in page


def test_the_origin_is_the_largest_share_else_the_first_nonfinite_else_the_first_over_the_tolerance() -> None:
    at = lambda **more: origin(run("half", op_calls=op_calls(60, **more)))  # noqa: E731
    overflow, jump = at(nan=41, jump=10), at(jump=10)
    largest = origin(budgeted(run("half", "inaccurate", 0.5, op_calls=op_calls(60, nan=41, jump=10))))
    assert overflow is not None
    assert jump is not None
    assert largest is not None
    assert (overflow.position, overflow.kind) == (41, "nonfinite")
    assert (jump.position, jump.kind) == (10, "tolerance")
    assert (largest.op_call.module, largest.kind, largest.share) == ("head.out", "share", 0.46)
    assert at() is None
    assert origin(run("half")) is None


def test_the_tree_shows_the_worst_call_in_each_subtree() -> None:
    built = module_tree.build([RESULT.run("bfloat16"), RESULT.run("half")])
    by_path: dict[str, Node] = {node.path: node for node in built.nodes}
    assert [node.path for node in built.nodes[:3]] == ["(model)", "encoder", "encoder.blocks"]
    assert by_path["encoder.blocks"].parent == 1
    assert by_path["encoder"].cells[0].accumulated.level >= by_path["encoder.blocks.0"].cells[0].accumulated.level
    assert by_path["encoder.blocks.0.norm"].cells[1].gaps == 6
    assert by_path["(model)"].cells[1].gaps == 6
    assert by_path["head"].cells[1].gaps == 0


def test_a_tree_of_thousands_of_modules_leaves_out_the_deepest() -> None:
    calls = msgspec.structs.replace(op_calls(5000), module=[f"a.{i // 100}.{i}" for i in range(5000)])
    built = module_tree.build([run("half", op_calls=calls)])
    assert len(built.nodes) <= module_tree.MOST_ROWS
    assert len(built.nodes) + built.left_out == 5000 + 50 + 2
    assert all(node.parent < index for index, node in enumerate(built.nodes))
