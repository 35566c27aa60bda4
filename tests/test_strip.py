"""The network as a strip: its data, and what a reader can do with it in a browser."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from browser import opened
from helpers import run as run_model
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_result import gap, run, shared_result
from test_data_flow import IMAGE, BasicBlock, UNet
from torch import nn

from lowprec_check.report.html import strip
from lowprec_check.report.html.strip import pack_strip
from lowprec_check.schema.op_calls import OpCall, OpCalls, to_columns
from lowprec_check.schema.scan_result import Run, ScanResult

TOLERANCE = 1e-2


class Names(dict[str, int]):
    """Numbers of names, as the page's data has them."""

    def number(self, name: str) -> int:
        return self.setdefault(name, len(self))

    def of(self, numbers: list[int]) -> list[str]:
        return [list(self)[number] for number in numbers]


def packed(its: Run) -> tuple[dict[str, Any], list[str]]:
    """The data, and the module of each segment."""
    names = Names()
    found = pack_strip(its, names.number)
    return found, names.of(found["module"])


def named_edges(found: dict[str, Any], modules: list[str]) -> set[tuple[str, str]]:
    """Pairs of modules that are connected, but not as neighbours."""
    return {
        (modules[source] if source >= 0 else "input", modules[target])
        for target, sources in enumerate(found["reads"])
        for source in sources
        if source < target - 1
    }


@pytest.mark.parametrize("precision", ["half", "autocast-bf16"])
@pytest.mark.parametrize(
    ("make", "edges"),
    [
        (lambda: BasicBlock(4, downsample=False), {("input", "")}),
        (lambda: BasicBlock(8, downsample=True), {("input", "conv1"), ("downsample", "")}),
        (UNet, {("encode", "")}),
    ],
)
def test_the_arcs_are_the_skips_of_the_model(make: Any, edges: set[tuple[str, str]], precision: str) -> None:
    _, found = run_model(make().eval(), (torch.rand(IMAGE),), precision)
    data, modules = packed(run(precision, op_calls=found.op_calls))
    assert named_edges(data, modules) == edges
    assert len(data["time"]) == len(modules)
    assert all(time > 0 for time in data["time"])


calls_of_a_run = st.lists(
    st.builds(
        OpCall,
        op=st.sampled_from(["aten.add.Tensor", "aten.mm.default"]),
        module=st.sampled_from(["", "a", "a.b", "a.b.c", "a.c", "d.0", "d.1"]),
        accumulated_error=st.none() | st.floats(0, 1),
        absmax=st.just(1.0),
        time_ms=st.floats(0.001, 10),
        introduced_inf=st.integers(0, 2),
        phase=st.sampled_from(["forward", "backward"]),
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=80, deadline=None)
@given(rows=calls_of_a_run, reads=st.lists(st.integers(0, 60), min_size=60, max_size=60), most=st.integers(1, 60))
def test_segments_hold_every_call_of_the_first_forward_pass_once(
    rows: list[OpCall], reads: list[int], most: int
) -> None:
    for index, row in enumerate(rows):
        row.reads = (min(reads[index], index),)
    forward = next((index for index, row in enumerate(rows) if row.phase != "forward"), len(rows))
    kept, strip.MOST_SEGMENTS = strip.MOST_SEGMENTS, most
    try:
        data, modules = packed(run("half", op_calls=to_columns(rows)))
    finally:
        strip.MOST_SEGMENTS = kept
    assert sum(data["calls"]) == forward
    assert sum(data["lost"]) == sum(row.introduced_inf for row in rows[:forward])
    assert sum(data["time"]) == pytest.approx(sum(row.time_ms or 0 for row in rows[:forward]), abs=1e-3)
    assert all(-1 <= source < target for target, sources in enumerate(data["reads"]) for source in sources)
    if len(modules) > most:
        assert len(set(modules)) == len(modules)


def test_times_that_are_not_known_are_left_out_and_an_overflow_is_the_highest_level() -> None:
    rows = [
        OpCall("aten.mm.default", "a", accumulated_error=1e-3, absmax=1.0),
        OpCall("aten.mul.Tensor", "b", introduced_inf=3, absmax=1.0),
        OpCall("aten.add.Tensor", "c", absmax=1.0, reads=(1,)),
        OpCall("aten.argmax.default", "d"),
    ]
    data, _ = packed(run("half", op_calls=to_columns(rows), gaps=[gap(module="c.x")], tolerance=TOLERANCE))
    assert data["time"] == []
    assert data["level"] == [3, 8, 8, 0]
    assert data["lost"] == [0, 3, 0, 0]
    assert data["gaps"] == [0, 0, 3, 0]


# -- in the browser


def block(name: str, error: float, **more: Any) -> list[OpCall]:
    """A residual block: a norm, a product, and a sum that reads the input of the block."""
    common = {"accumulated_error": error, "absmax": 1.0, "time_ms": 1.0} | more
    return [
        OpCall("aten.native_layer_norm.default", f"{name}.norm", reads=(1,), **common),
        OpCall("aten.addmm.default", f"{name}.fc", reads=(1,), **common),
        OpCall("aten.add.Tensor", name, reads=(1, 3), **common),
    ]


def stack(depth: int, **more: Any) -> OpCalls:
    """A stem, blocks, and a head that also reads the stem."""
    rows = [OpCall("aten.convolution.default", "stem", reads=(0,), accumulated_error=1e-5, absmax=1.0, time_ms=9.0)]
    for index in range(depth):
        rows += block(f"layers.{index}", 5e-4 if index < depth - 2 else 0.03, **more)
    rows.append(OpCall("aten.addmm.default", "head", reads=(1, len(rows)), absmax=1.0, introduced_nan=2, time_ms=1.0))
    return to_columns(rows)


def result_of(calls: OpCalls, **more: Any) -> ScanResult:
    runs = [
        run("fp32", tolerance=None),
        run("half", "nonfinite", op_calls=calls, **more),
        run("bfloat16", "ok", 1e-3, tolerance=5e-2, op_calls=calls),
    ]
    return msgspec.structs.replace(shared_result(), runs=runs)


def names(page: Any) -> list[str]:
    return list(page.locator("#strip .block-name").all_inner_texts())


def arcs(page: Any) -> set[tuple[int, int]]:
    """Pairs of blocks that an arc connects; -1 is outside."""
    found = page.locator("#strip path[data-from]").evaluate_all(
        "all => all.map((p) => [+p.dataset.from, +p.dataset.to])"
    )
    return {(source, target) for source, target in found}


def chosen(page: Any) -> Any:
    return page.evaluate("chosen.module")


@pytest.mark.slow
def test_blocks_open_on_a_click_and_close_with_escape_or_the_breadcrumb(browser: Any, page_of: Any) -> None:
    with opened(browser, page_of(result_of(stack(12)))) as page:
        everything = ["stem", *(f"layers.{index}" for index in range(12)), "head"]
        assert names(page) == everything
        assert arcs(page) == {(0, 13)}
        assert page.locator("#strip path.inside").count() == 12
        page.locator('#strip button[data-path="layers.3"]').click()
        assert chosen(page) == "layers.3"
        assert names(page) == ["norm", "fc", "add"]
        assert arcs(page) == {(-1, 2)}
        assert page.locator("#crumbs li").all_inner_texts() == ["(model)", "layers.3"]
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        assert chosen(page) == "layers.3.fc"
        assert page.locator("#strip button[aria-pressed=true]").get_attribute("data-path") == "layers.3.fc"
        page.keyboard.press("Escape")
        assert (names(page), chosen(page)) == (everything, None)
        assert page.evaluate("document.activeElement.dataset.path") == "layers.3"
        page.keyboard.press("Enter")
        page.locator("#crumbs button").first.click()
        assert (names(page), chosen(page)) == (everything, None)


@pytest.mark.slow
def test_other_sections_choose_a_module_and_the_strip_follows(browser: Any, page_of: Any) -> None:
    with opened(browser, page_of(result_of(stack(12)))) as page:
        page.evaluate("choose({ module: 'layers.2.fc' })")
        assert page.locator("#strip button[aria-pressed=true]").get_attribute("data-path") == "layers.2"
        page.locator('#strip button[data-path="layers.5"]').click()
        page.evaluate("choose({ module: 'head' })")
        assert len(names(page)) == 14
        assert page.locator("#strip button[aria-pressed=true]").get_attribute("data-path") == "head"
        page.evaluate("choose({ module: null })")
        assert page.locator("#strip button[aria-pressed=true]").count() == 0


@pytest.mark.slow
def test_long_models_fold_and_the_worst_member_gives_the_colour(browser: Any, page_of: Any) -> None:
    with opened(browser, page_of(result_of(stack(48)))) as page:
        assert names(page) == ["stem", "48 × layers.*", "head"]
        fold = page.locator("#strip button").nth(1)
        label = fold.get_attribute("aria-label")
        assert "144 op calls; 144 ms" in label
        assert "worst error 3.0e-2, 3 × tolerance" in label
        assert "lv6" in fold.get_attribute("class")
        assert arcs(page) == {(0, 2)}
        fold.focus()
        page.keyboard.press("Enter")
        assert len(names(page)) == 50
        page.keyboard.press("Escape")
        assert len(names(page)) == 3


@pytest.mark.slow
def test_a_few_blocks_of_many_parts_stay_blocks_instead_of_a_fold_of_their_parts(browser: Any, page_of: Any) -> None:
    common = {"accumulated_error": 1e-4, "absmax": 1.0, "time_ms": 1.0, "reads": (1,)}
    rows: list[OpCall] = []
    for index in range(4):
        parts = [OpCall("aten.addmm.default", f"layers.{index}.fc{part}", **common) for part in range(7)]
        rows += [*parts, OpCall("aten.add.Tensor", f"layers.{index}", **(common | {"reads": (1, 8)}))]
    with opened(browser, page_of(result_of(to_columns(rows)))) as page:
        assert names(page) == [f"layers.{index}" for index in range(4)]
        assert page.locator("#strip path.inside").count() == 4


@pytest.mark.slow
def test_a_residual_around_a_single_part_is_an_arc_inside_the_block(browser: Any, page_of: Any) -> None:
    common = {"accumulated_error": 1e-4, "absmax": 1.0, "time_ms": 1.0}
    rows: list[OpCall] = []
    for index in range(30):
        rows += [OpCall("aten.addmm.default", f"layers.{index}.fc", reads=(1,), **common)]
        rows += [OpCall("aten.add.Tensor", f"layers.{index}", reads=(1, 2), **common)]
    with opened(browser, page_of(result_of(to_columns(rows)))) as page:
        assert names(page) == ["30 × layers.*"]
        assert page.locator("#strip path.inside").count() == 1
        assert page.inner_text("#strip-details") == "1 block; 0 connections skip blocks."


@pytest.mark.slow
def test_a_block_says_its_time_error_marks_and_connections(browser: Any, page_of: Any) -> None:
    result = result_of(stack(12), gaps=[gap(module="layers.1.norm", calls=2)])
    with opened(browser, page_of(result)) as page:
        labels = page.locator("#strip button").evaluate_all("all => all.map((one) => one.getAttribute('aria-label'))")
        assert labels[0] == (
            "stem: 1 op call; 9.0 ms, 19.6 % of the time shown; error 1.0e-5, 0.001 × tolerance; also read by head"
        )
        assert "✕ 2 calls have no kernel" in labels[2]
        assert "error Inf or NaN; ▲ Inf or NaN appears here; also reads stem" in labels[-1]
        page.keyboard.press("Tab")
        page.locator("#strip button").nth(2).hover()
        assert page.inner_text("#strip-details") == labels[2]
        legend = page.inner_text("#strip-legend")
        assert "(1.0e-2)" in legend
        assert all(text in legend for text in ("≤ 1/1000", "≤ 1/10", "> tolerance", "Inf/NaN", "✕n", "▲"))
        assert "≤ 1/3" not in legend
        page.locator('.run-choice[data-chart="strip"]').select_option(label="bfloat16 (ok)")
        assert "(5.0e-2)" in page.inner_text("#strip-legend")


@pytest.mark.slow
def test_without_times_the_width_is_the_number_of_calls(browser: Any, page_of: Any) -> None:
    with opened(browser, page_of(result_of(stack(12, time_ms=None)))) as page:
        assert "number of op calls (times are not known)" in page.inner_text("#strip-legend")
        widths = page.locator("#strip button").evaluate_all(
            "all => all.map((one) => one.getBoundingClientRect().width)"
        )
        assert widths[1] == pytest.approx(widths[2], abs=1)
        assert widths[1] > 1.5 * widths[0]


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_strip_is_accessible_and_scrolls_inside_itself(browser: Any, page_of: Any, scheme: str, width: int) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    path = page_of(result_of(stack(20), gaps=[gap(module="layers.1.norm")]))
    with opened(browser, path, viewport={"width": width, "height": 900}, color_scheme=scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert (
            min(page.locator("#strip button").evaluate_all("all => all.map((b) => b.getBoundingClientRect().width)"))
            >= 23.5
        )
        for _ in range(2):
            broken = [(rule["id"], rule["nodes"][0]["html"]) for rule in axe.run(page).response["violations"]]
            assert broken == []
            page.locator('#strip button[data-path="layers.1"]').click()


@pytest.mark.slow
def test_a_run_without_connections_or_calls_says_so(browser: Any, page_of: Any) -> None:
    with opened(browser, page_of(shared_result())) as page:
        assert "an older version saved this scan" in page.inner_text("#strip-details")


def test_a_real_network_is_packed_in_a_few_bytes_per_call() -> None:
    model = nn.Sequential(*(BasicBlock(4, downsample=False) for _ in range(8))).eval()
    _, found = run_model(model, (torch.rand(IMAGE),), "bfloat16")
    before = len(msgspec.json.encode(msgspec.structs.replace(found.op_calls, reads=[()] * len(found.op_calls))))
    added = len(msgspec.json.encode(found.op_calls)) - before
    assert added <= 4 * len(found.op_calls)
