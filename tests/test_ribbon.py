"""The range ribbon: histograms of the module chosen, against the limits of fp16 and bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from browser import opened
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_result import op_calls, run, shared_result

from lowprec_check.report.html import ribbon
from lowprec_check.report.html.ribbon import pack_magnitudes, sum_of
from lowprec_check.report.html.scan_page import render
from lowprec_check.schema.magnitudes import ModuleMagnitudes
from lowprec_check.schema.scan_result import ScanResult

HISTOGRAMS = [
    ModuleMagnitudes(module="encoder", lowest=-30, counts=[50, *[0] * 28, 50], zeros=20, ops=2),
    ModuleMagnitudes(module="head", lowest=3, counts=[60], ops=1),
    ModuleMagnitudes(module="head.out", lowest=14, counts=[20, 10, 10], ops=1),
]
"""-30: fp16 flushes it; 16: it overflows in fp16."""


def result() -> ScanResult:
    runs = [
        run("fp32", tolerance=None),
        run("half", "nonfinite", op_calls=op_calls(48, nan=41), magnitudes=HISTOGRAMS),
        run("bfloat16", "ok", 1e-3, op_calls=op_calls(48, half=False)),
    ]
    return msgspec.structs.replace(shared_result(), runs=runs)


histograms = st.builds(
    ModuleMagnitudes,
    module=st.sampled_from(["", "a", "a.b", "a.b.c", "a.d", "e"]),
    lowest=st.integers(-149, 100),
    counts=st.lists(st.integers(0, 9), max_size=5),
    zeros=st.integers(0, 9),
    nonfinite=st.integers(0, 9),
    ops=st.integers(1, 9),
)


def exponents(its: ModuleMagnitudes) -> dict[int, int]:
    return {its.lowest + index: count for index, count in enumerate(its.counts) if count}


@settings(max_examples=60, deadline=None)
@given(known=st.lists(histograms, unique_by=lambda its: its.module, min_size=1), most=st.integers(1, 6))
def test_fewer_modules_hold_the_same_values(known: list[ModuleMagnitudes], most: int) -> None:
    names: dict[str, int] = {}
    kept, ribbon.MOST_MODULES = ribbon.MOST_MODULES, most
    try:
        data = pack_magnitudes(run("half", magnitudes=known), lambda name: names.setdefault(name, len(names)))
    finally:
        ribbon.MOST_MODULES = kept
    assert len(data["module"]) <= most
    total = sum_of("", *known)
    again = [
        ModuleMagnitudes(module="", lowest=lowest, counts=counts)
        for lowest, counts in zip(data["lowest"], data["counts"], strict=True)
    ]
    assert exponents(sum_of("", *again)) == exponents(total)
    assert (sum(data["zeros"]), sum(data["nonfinite"]), sum(data["ops"])) == (total.zeros, total.nonfinite, total.ops)
    assert total.values == sum(its.values for its in known)


@pytest.fixture
def page_at(tmp_path: Path) -> Path:
    path = tmp_path / "report.html"
    path.write_text(render(result()), encoding="utf-8")
    return path


def table(page: Any) -> list[list[str]]:
    return [row.split("\t")[:4] for row in page.locator("#ribbon-table tbody tr").all_inner_texts()]


def bars(page: Any) -> dict[int, tuple[int, str]]:
    """Count and zone by exponent."""
    found = page.locator(".ribbon-bar").evaluate_all(
        "all => all.map((bar) => [+bar.dataset.exponent, +bar.dataset.count, bar.className.split(' z-')[1]])"
    )
    return {exponent: (count, zone) for exponent, count, zone in found}


@pytest.mark.slow
def test_the_shares_of_both_formats_follow_from_the_histogram(browser: Any, page_at: Path) -> None:
    with opened(browser, page_at) as page:
        assert bars(page) == {
            -30: (50, "flushed"),
            -1: (50, "held"),
            3: (60, "held"),
            14: (20, "held"),
            15: (10, "held"),
            16: (10, "over"),
        }
        assert table(page) == [
            ["fp16, predicted from the histogram", "25.0 %", "25.0 %", "5.0 %"],
            ["bf16, predicted from the histogram", "none", "none", "none"],
            ["half, worst op of the run", "at most 25.0 %", "at most 40.0 %", "12 values"],
        ]
        about = page.inner_text("#ribbon-about")
        assert "in the model: 220 values of 4 op calls, a sample of at most 1,024 values per op" in about
        assert "9.1 % zeros" in page.inner_text("#ribbon")


@pytest.mark.slow
def test_it_follows_the_module_chosen(browser: Any, page_at: Path) -> None:
    with opened(browser, page_at) as page:
        page.evaluate("choose({ module: 'head' })")
        assert set(bars(page)) == {3, 14, 15, 16}
        assert table(page)[0][1:] == ["none", "none", "10.0 %"]
        assert "in head: 100 values of 2 op calls" in page.inner_text("#ribbon-about")
        assert page.inner_text("#range-remark").startswith("head.out overflows: 12 values exceed the maximum of fp16.")
        nearest = page.locator("#nearest tbody td:first-child").all_text_contents()
        assert set(nearest) == {"head", "head.out"}
        page.evaluate("choose({ module: 'encoder' })")
        assert set(bars(page)) == {-30, -1}
        assert "overflows" not in page.inner_text("#range-remark")


@pytest.mark.slow
def test_limits_of_both_formats_lie_between_the_right_buckets(browser: Any, page_at: Path) -> None:
    """The largest fp16 number is below 2**16, where the overflowing bucket starts; the smallest subnormal above 2**-25."""
    with opened(browser, page_at, viewport={"width": 1400, "height": 900}) as page:
        left = page.evaluate(
            """() => {
                const at = (query) => document.querySelector(query).getBoundingClientRect().left;
                const bar = (exponent) => at(`.ribbon-bar[data-exponent="${exponent}"]`);
                const limits = Object.fromEntries(["fp16", "bf16"].flatMap((name) =>
                    ["subnormal", "normal", "max"].map((limit) => [`${name} ${limit}`, at(`.f-${name}.l-${limit}`)])));
                return { ...limits, flushed: bar(-30), over: bar(16), last: bar(15) };
            }"""
        )
    assert left["flushed"] < left["fp16 subnormal"] < left["fp16 normal"] < left["last"] < left["fp16 max"]
    assert left["fp16 max"] <= left["over"] + 1.5
    assert left["bf16 subnormal"] < left["bf16 normal"] < left["flushed"]
    assert left["over"] < left["bf16 max"]


@pytest.mark.slow
def test_without_histograms_the_rest_remains(browser: Any, page_at: Path) -> None:
    with opened(browser, page_at) as page:
        page.locator('.run-choice[data-chart="range"]').select_option(label="bfloat16 (ok)")
        assert page.inner_text("#ribbon-about") == "No values of the model are known in this run."
        assert not page.locator("#ribbon").is_visible()
        assert [row[0] for row in table(page)] == ["bfloat16, worst op of the run"]
        assert page.inner_text("#range-remark").startswith("Closest to the maximum: head.")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_ribbon_is_accessible(browser: Any, page_at: Path, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    with opened(browser, page_at, viewport={"width": 400, "height": 900}, color_scheme=scheme) as page:
        broken = [(rule["id"], rule["nodes"][0]["html"]) for rule in axe.run(page).response["violations"]]
        assert broken == []
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        label = page.locator(".ribbon-plot").get_attribute("aria-label")
        assert "fp16 flushes 25.0 % and overflows 5.0 %" in label
