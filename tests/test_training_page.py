"""The page of a training scan in a real browser: charts of loss and weights by step, their tables, phases of op calls."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

import msgspec
import pytest
from browser import hover, opened
from training_result import FP32_LOSSES, STEPS, distances, losses, setup, training_result, way

from lowprec_check.report.html import training
from lowprec_check.report.html.scan_page import render
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.training import BEYOND, TrainingRun, TrainingWay

RESULT = training_result()
LARGEST = 5 * 2**20
WIDE = {"width": 1200, "height": 900}


def drawn(page: Any, chart: str, name: str) -> dict[str, Any]:
    """The data of a source in the chart; a column is a list, its numbers rounded."""
    return dict(
        page.evaluate(
            """([chart, name]) => {
                const host = document.getElementById(chart);
                const view = [...Bokeh.index].find((view) => host.contains(view.el));
                const source = view.model.document.get_model_by_name(name);
                const round = (value) => (typeof value === "number" ? Number(value.toPrecision(6)) : value);
                return Object.fromEntries(Object.entries(source.data).map(([key, column]) => [key, [...column].map(round)]));
            }""",
            [chart, name],
        )
    )


def is_visible(page: Any, chart: str, name: str) -> bool:
    return bool(
        page.evaluate(
            """([chart, name]) => {
                const host = document.getElementById(chart);
                return [...Bokeh.index].find((view) => host.contains(view.el)).model.document.get_model_by_name(name).visible;
            }""",
            [chart, name],
        )
    )


# -- in the browser


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_charts_show_the_first_way_of_each_precision(browser: Any, page_of: Any, scheme: str) -> None:
    with opened(browser, page_of(RESULT), color_scheme=scheme) as page:
        assert page.locator("#ways-remark div").all_inner_texts() == [
            "half, as it is: NaN or Inf in the loss after step 2",
            "bfloat16, as it is: loss diverges from step 3 (head.out.weight): 1.96, limit 1.92",
        ]
        assert page.locator("#ways-legend label").all_inner_texts() == [
            " ● half, as it is nonfinite",
            " ■ bfloat16, as it is inaccurate",
            " ◆ autocast-fp16, GradScaler ok",
            " ▼ autocast-bf16, as it is ok",
        ]
        assert drawn(page, "loss-chart", "reference")["y"] == FP32_LOSSES
        assert drawn(page, "loss-chart", "way-0")["x"] == [0, 1]
        assert drawn(page, "loss-chart", "way-1")["y"] == losses(0.06, from_step=1)
        marks = drawn(page, "loss-chart", "marks")
        assert (marks["x"], marks["marker"]) == ([2, 3], ["triangle", "x"])
        assert marks["y"][1] == losses(0.06, from_step=1)[3]
        band = drawn(page, "loss-chart", "seeds")
        assert (band["low"][-1], band["high"][-1]) == (1.316, 1.484)
        assert drawn(page, "loss-chart", "limit")["y"][-1] == pytest.approx(1.412 + 0.03 * STEPS)


@pytest.mark.slow
def test_the_ways_of_a_precision_are_chosen_and_hidden(browser: Any, page_of: Any) -> None:
    with opened(browser, page_of(RESULT), viewport=WIDE) as page:
        page.locator("#ways-choice").select_option(label="bfloat16")
        assert page.locator("#ways-legend label").count() == 5
        assert len(page.locator("#ways-remark div").all_inner_texts()) == 2
        assert drawn(page, "distance-chart", "way-0")["y"] == pytest.approx(distances(0.93, 1.005), rel=1e-4)
        limit = drawn(page, "distance-chart", "limit")["y"]
        assert limit == pytest.approx([BEYOND * value for value in distances(0.19, 1.05)], rel=1e-4)
        marks = drawn(page, "distance-chart", "marks")
        assert (marks["x"], marks["way"]) == ([2], ["Kahan summation"])
        page.get_by_label("Kahan summation").focus()
        page.keyboard.press("Space")
        assert not is_visible(page, "distance-chart", "way-3-line")
        assert drawn(page, "distance-chart", "marks")["x"] == []
        assert drawn(page, "loss-chart", "marks")["x"] == [3]
        page.locator("#ways-choice").select_option(label="autocast-bf16")
        assert is_visible(page, "distance-chart", "way-3-line")
        assert page.locator("#ways-remark").inner_text().startswith("one autocast around all steps: loss diverges")


@pytest.mark.slow
def test_where_nothing_diverges_the_remark_is_calm(browser: Any, page_of: Any) -> None:
    with opened(browser, page_of(RESULT), viewport=WIDE) as page:
        page.locator("#ways-choice").select_option(label="autocast-fp16")
        assert page.locator("#ways-remark.fine").inner_text().startswith("Every line stays in the range")


@pytest.mark.slow
def test_a_tooltip_shows_way_step_and_loss(browser: Any, page_of: Any) -> None:
    with opened(browser, page_of(RESULT), viewport=WIDE) as page:
        tip = hover(page, "loss-chart", 6, losses(0.06, from_step=1)[6] or 0.0)
        assert "bfloat16, as it is" in tip
        assert "1.842" in tip
        assert "1.542" in tip
        mark = hover(page, "loss-chart", 3, losses(0.06, from_step=1)[3] or 0.0)
        assert "limit 1.92" in mark


@pytest.mark.slow
def test_the_tables_hold_every_step(browser: Any, page_of: Any) -> None:
    with opened(browser, page_of(RESULT), viewport=WIDE) as page:
        page.get_by_text("Loss by step (table)").focus()
        page.keyboard.press("Enter")
        rows = page.locator("#loss-table tr").all_inner_texts()
        assert rows[0].split("\t")[:5] == [
            "steps done",
            "fp32",
            "other seeds",
            "half, as it is",
            "bfloat16, as it is",
        ]
        assert len(rows) == STEPS + 2
        assert rows[1].split("\t")[:4] == ["0", "2.303", "2.303 – 2.303", "2.304"]
        assert rows[3].split("\t")[3] == rows[9].split("\t")[3] == "Inf/NaN"
        assert rows[9].split("\t")[4] == "1.832"
        page.get_by_text("Distance of the weights from fp32 by step (table)").click()
        distance = page.locator("#distance-table tr").all_inner_texts()
        assert distance[1].split("\t")[1:] == ["–"] * 5
        assert distance[2].split("\t")[1:4] == ["at most 1.9e-1", "1.1e-1", "9.3e-1"]


@pytest.mark.slow
def test_op_calls_show_their_phase(browser: Any, page_of: Any) -> None:
    with opened(browser, page_of(RESULT), viewport=WIDE) as page:
        assert "aten.gelu.default in encoder.blocks.0.norm (backward) (call 21)" in page.inner_text("#origin")
        page.focus("#call-slider")
        page.keyboard.press("End")
        assert " (optimizer), line" in page.inner_text("#call-details")
        page.locator("#steps-title").click()
        assert page.locator("#steps thead th").all_inner_texts()[:3] == ["call", "phase", "op"]
        assert page.locator("#steps tbody tr").first.inner_text().split("\t")[1] == "backward"
        row = page.locator("#heat tbody tr").first
        shown = {}
        for phase in ("forward", "backward", "optimizer"):
            page.locator("#heat-metric").select_option(label=f"accumulated error in {phase}")
            shown[phase] = row.inner_text().split("\t")[1]
        assert shown["backward"].startswith("Inf/NaN")
        assert not shown["forward"].startswith("Inf/NaN")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_accessibility_rule_is_broken(browser: Any, page_of: Any, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    with opened(browser, page_of(RESULT), color_scheme=scheme) as page:
        page.evaluate("for (const part of document.querySelectorAll('details')) part.open = true")
        broken = [(rule["id"], rule["nodes"][0]["html"]) for rule in axe.run(page).response["violations"]]
        assert broken == []


@pytest.mark.slow
def test_a_narrow_screen_does_not_scroll_sideways(browser: Any, page_of: Any) -> None:
    with opened(browser, page_of(RESULT), viewport={"width": 360, "height": 800}) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.slow
def test_hostile_strings_stay_text(browser: Any, page_of: Any) -> None:
    nasty = "<img src=x onerror=alert(1)><script>alert(2)</script>\"' \u202e {{7*7}} " + "y" * 5000
    with opened(browser, page_of(training_result(nasty)), viewport=WIDE) as page:
        assert "<img src=x" in page.inner_text("#ways-remark")
        assert "<img src=x" in hover(page, "loss-chart", 3, losses(0.06, from_step=1)[3] or 0.0)
        assert page.locator("img").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= 1200


@pytest.mark.slow
def test_a_page_without_op_calls_has_the_charts(browser: Any, page_of: Any) -> None:
    runs = [msgspec.structs.replace(run, op_calls=type(run.op_calls)()) for run in RESULT.runs]
    with opened(browser, page_of(msgspec.structs.replace(RESULT, runs=runs))) as page:
        assert page.locator("#calls").count() == 0
        assert drawn(page, "loss-chart", "reference")["y"] == FP32_LOSSES


@pytest.mark.slow
def test_a_loss_that_explodes_is_drawn_at_the_edge(browser: Any, page_of: Any) -> None:
    run = RESULT.run("bfloat16")
    exploding = way("plain", "inaccurate", losses=[2.3, 1e12, *FP32_LOSSES[2:]])
    changed = msgspec.structs.replace(run, training=TrainingRun(ways=[exploding]))
    with opened(browser, page_of(msgspec.structs.replace(RESULT, runs=[RESULT.runs[0], changed]))) as page:
        shown = drawn(page, "loss-chart", "way-0")
        assert shown["y"][1] < 10
        assert shown["value"][1] == "1000000000000"


# -- without a browser


def unpacked(result: ScanResult) -> dict[str, Any]:
    return dict(json.loads(gzip.decompress(base64.b64decode(training.pack(result)))))


def replaced(run: Run, *ways: TrainingWay) -> Run:
    return msgspec.structs.replace(run, training=TrainingRun(ways=list(ways)))


def test_the_data_of_the_charts_is_that_of_the_result() -> None:
    data = unpacked(RESULT)
    assert data["steps"] == list(range(STEPS + 1))
    assert data["losses"] == FP32_LOSSES
    assert data["low"][-1] == pytest.approx(FP32_LOSSES[-1] - 0.012 * STEPS, rel=1e-4)
    assert data["farthest"][0] is None
    assert [group["label"] for group in data["groups"]] == [
        training.EVERY_PRECISION,
        "half",
        "bfloat16",
        "autocast-fp16",
        "autocast-bf16",
    ]
    half = data["groups"][1]["ways"]
    assert half[0]["losses"] == [2.304, 2.127] + [None] * 7
    assert half[0]["marks"][0]["step"] == 2
    assert half[1]["losses"] == [None] * 9
    assert half[2]["marks"] == [
        {
            "chart": "distances",
            "step": 6,
            "value": pytest.approx(distances(0.343, 1.16)[5]),
            "note": "weights diverge from step 6 (head.out.weight): 0.72, limit 0.49",
        }
    ]


def test_long_runs_are_thinned_but_keep_their_marks_and_ends() -> None:
    steps = 10_007
    long = setup(
        steps=steps,
        losses=[2.0] * (steps + 1),
        distances=[0.5] * steps,
        loss_low=[],
        loss_high=[],
        limit_low=[],
        limit_high=[],
    )
    nan = way("plain", "nonfinite", losses=[2.0] * 4001 + [None], distances=[0.25] * 4000)
    ways = [nan, *(way("kahan", losses=[2.0] * (steps + 1), distances=[0.25] * steps) for _ in range(20))]
    runs = [RESULT.runs[0], *(replaced(run, *ways) for run in RESULT.runs[1:5])]
    result = msgspec.structs.replace(RESULT, runs=runs, training=long)
    data = unpacked(result)
    assert len(data["steps"]) <= training.MOST_POINTS + 1
    assert (data["steps"][0], data["steps"][-1]) == (0, steps)
    assert data["groups"][1]["ways"][0]["marks"][0]["step"] == 4001
    assert len(data["groups"][1]["ways"]) == training.MOST_WAYS
    assert len(render(result)) <= LARGEST


def test_one_step_needs_no_charts() -> None:
    one = setup(steps=1, losses=FP32_LOSSES[:2], distances=[0.2], loss_low=[0, -0.1], loss_high=[0, 0.1])
    page = render(msgspec.structs.replace(RESULT, training=one))
    assert 'id="trajectories"' not in page
    assert 'id="ways"' in page


def test_pages_of_other_scans_have_nothing_of_it() -> None:
    from shared_result import shared_result

    page = render(shared_result())
    for part in ("Ways to train", "drawTrajectories", '<option value="backward">', "lost updates"):
        assert part not in page
