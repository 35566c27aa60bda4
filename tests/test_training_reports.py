"""Every report format of a training scan: how it was trained, ways, gradients, loss scales, lost updates, phases."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given
from test_reports import FEW, hostile, html_in
from training_result import FP32_LOSSES, STEPS, distances, losses, setup, training_result, way

from lowprec_check.analysis.diff import diff_scans
from lowprec_check.report import gradients, lost_updates, markdown, run_rows, summary, text, training
from lowprec_check.report.diff import verdict
from lowprec_check.report.registry import FORMATS, render
from lowprec_check.schema.recommendation import Recommendation
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.training import (
    Divergence,
    EpsilonCheck,
    LossScale,
    LostUpdates,
    ParameterGradient,
    TrainingRun,
    TrainingSetup,
    TrainingWay,
)
from lowprec_check.schema.verdict import ExceptionInfo

RESULT = training_result()
HEAD = (
    "8 steps of AdamW(lr=0.001, weight_decay=0.01), loss: cross-entropy with random labels (default), "
    "the same batch each step."
)


def changed(run: Run, **more: Any) -> Run:
    """``run`` with other fields of its training."""
    return msgspec.structs.replace(run, training=msgspec.structs.replace(run.training, **more))


def of_one(run: Run, **more: Any) -> ScanResult:
    """:data:`RESULT` with fp32 and ``run`` alone, its training changed."""
    return msgspec.structs.replace(RESULT, runs=[RESULT.runs[0], changed(run, **more)])


def whys(*ways: TrainingWay) -> list[str]:
    result = of_one(RESULT.run("half"), ways=list(ways))
    return [row.why for row in training.way_rows(result) if row.status != "reference"]


@pytest.mark.parametrize(("format", "name"), [("text", "training.txt"), ("md", "training.md")])
def test_goldens(format: str, name: str, golden: Callable[[str, str], None]) -> None:
    golden(name, render(RESULT, format))


def test_golden_of_every_way(golden: Callable[[str, str], None]) -> None:
    golden("training-verbose.txt", text.render(RESULT, width=140, verbose=True))


# -- the head


@pytest.mark.parametrize("format", ["text", "md", "html"])
def test_reports_say_how_the_model_was_trained(format: str) -> None:
    shown = render(RESULT, format).replace("\\", "").replace("\n", " ")
    assert shown.count(HEAD) == 1
    assert summary.SCOPE not in shown


def test_the_notebook_and_junit_say_it_too() -> None:
    assert HEAD in RESULT._repr_html_()
    found = ElementTree.fromstring(render(RESULT, "junit"))[0].find("properties")
    assert found is not None
    assert {one.get("name"): one.get("value") for one in found}["training"] == HEAD


@pytest.mark.parametrize(
    ("setup", "shown"),
    [
        (
            TrainingSetup(steps=1, loss="loss of the file", optimizer="SGD(lr=0.1)"),
            "1 step of SGD(lr=0.1), loss: loss of the file.",
        ),
        (
            TrainingSetup(steps=20, loss="f", optimizer="AdamW(lr=0.001)", default_optimizer=True, new_batches=True),
            "20 steps of AdamW(lr=0.001) (default), loss: f, a new batch each step.",
        ),
    ],
)
def test_the_head_names_what_is_a_default(setup: TrainingSetup, shown: str) -> None:
    assert summary.scope(msgspec.structs.replace(RESULT, training=setup)) == shown


# -- the table of runs


def test_the_runs_have_the_figures_of_training() -> None:
    shown = {row.label: row for row in run_rows.rows(RESULT)}
    figures = {name: (row.status, row.loss, row.gradient, row.lost) for name, row in shown.items()}
    assert figures == {
        "fp32": ("reference", "1.412", "–", "–"),
        "half": ("nonfinite", "Inf/NaN", "Inf/NaN", "42 %"),
        "bfloat16": ("inaccurate", "1.832", "1.6e-02", "96.2 %"),
        "autocast-fp16": ("ok", "1.415", "6.1e-03", "–"),
        "autocast-bf16": ("ok", "1.415", "7.2e-03", "–"),
        "half · inductor": ("skipped", "–", "–", "–"),
    }
    assert shown["half"].why == (
        "NaN or Inf in the loss after step 2, first in gelu of encoder.blocks.0.norm (backward); "
        "passes with fp32 master weights and GradScaler"
    )
    assert shown["bfloat16"].why == (
        "loss diverges from step 3 (head.out.weight); "
        "passes with fp32 master weights, weights split into 16 + 16 bits and 1 more"
    )
    assert shown["autocast-fp16"].why == "with GradScaler"
    assert shown["autocast-bf16"].why == ""


HEADS = "run status loss grad error lost updates time memory why"


def test_the_error_of_the_output_is_no_column() -> None:
    wide = text.render(RESULT, width=160)
    assert HEADS in [" ".join(line.split()) for line in wide.splitlines()]
    assert HEADS in [" ".join(re.split(r"[|\s]+", line)).strip() for line in render(RESULT, "md").splitlines()]
    for page in (render(RESULT, "html").partition('<table class="runs')[2], RESULT._repr_html_()):
        head = page.partition("</thead>")[0].partition("<thead>")[2]
        assert " ".join(re.sub("<[^>]*>", " ", head).split()) == HEADS


def test_a_result_at_a_prompt_has_the_losses() -> None:
    assert "fp32 reference (loss 1.412), half nonfinite (loss Inf/NaN), bfloat16 inaccurate (loss 1.832)" in repr(
        RESULT
    )


def test_an_op_without_a_kernel_is_named_with_its_phase() -> None:
    half = RESULT.run("half")
    raised = ExceptionInfo(type="NotImplementedError", message="no kernel", phase="backward")
    failed = changed(half, ways=[TrainingWay(name="plain", status="error", exception=raised, failed_step=1)])
    result = msgspec.structs.replace(RESULT, runs=[msgspec.structs.replace(failed, status="error", exception=raised)])
    assert run_rows.rows(result)[0].why == "1 of 4 ops has no kernel: pdist_backward (backward)"
    without = msgspec.structs.replace(result.runs[0], gaps=[], failed_call=3)
    shown = run_rows.rows(msgspec.structs.replace(result, runs=[without]))[0].why
    assert shown == "backward: NotImplementedError: no kernel"


def test_a_way_that_passes_may_be_recommended() -> None:
    half = changed(RESULT.run("half"), ways=[way("plain", "nonfinite"), way("master-weights")])
    advice = Recommendation(precision="half", way="master-weights", reason="passes.", code="", worth="unknown")
    result = msgspec.structs.replace(RESULT, runs=[RESULT.runs[0], half], recommendation=advice)
    assert summary.verdict(result) == "Use half with fp32 master weights"
    assert [row.way for row in training.way_rows(result) if row.recommended] == ["fp32 master weights"]
    assert "**fp32 master weights** (recommended)" in render(result, "md")
    assert [change.new for change in diff_scans(RESULT, result).changes if change.kind == "recommendation"] == [
        "half with fp32 master weights"
    ]
    assert summary.is_recommended(half, result)
    failing = msgspec.structs.replace(result, runs=[RESULT.runs[0], changed(half, ways=[way("plain", "nonfinite")])])
    assert not summary.passes(failing)


# -- ways to train


def test_each_way_has_its_figures() -> None:
    rows = {(row.run, row.way): row for row in training.way_rows(RESULT)}
    assert rows["fp32", "as it is"][2:8] == ("reference", "1.412", "–", "–", "–", "140.0 MiB")
    assert rows["fp32", "3 other seeds"][2:8] == ("reference", "1.32 – 1.48", "0.27", "–", "–", "–")
    assert rows["bfloat16", "as it is"][2:8] == ("inaccurate", "1.832", "0.96", "5 %", "96.2 %", "70.0 MiB")
    assert rows["bfloat16", "stochastic rounding"][2:8] == ("ok", "1.444", "0.17", "99 %", "–", "70.0 MiB")
    assert rows["half", "GradScaler"][2:8] == ("error", "–", "–", "–", "–", "–")
    assert len(rows) == 2 + sum(len(run.training.ways) for run in RESULT.runs[1:] if run.training)


def test_the_band_of_the_seeds_is_counted_from_the_first_loss_of_fp32() -> None:
    one = setup(loss_low=[-0.1] * 9, loss_high=[0.2] * 9, losses=[5.0] * 9)
    assert training.last_band(one) == pytest.approx([4.9, 5.2])
    assert training.last_band(setup(loss_low=[])) == []


def test_a_short_report_leaves_out_ways_that_say_nothing_new() -> None:
    every = training.way_rows(RESULT)
    shown = [(row.run, row.way) for row in training.news(every)]
    assert ("autocast-bf16", "one autocast around all steps") in shown
    assert ("autocast-bf16", "as it is") not in shown
    assert not [run for run, _ in shown if run == "autocast-fp16"]
    assert len([run for run, _ in shown if run == "bfloat16"]) == 5
    assert "4 more ways to train pass · -v lists them" in text.render(RESULT)
    verbose = text.render(RESULT, verbose=True)
    assert "GradScaler with the suggested scale" in verbose
    assert "-v lists them" not in verbose


def test_where_every_way_passes_there_is_no_table() -> None:
    passing = of_one(RESULT.run("autocast-bf16"), ways=[way("plain"), way("one-autocast")])
    shown = text.render(passing)
    assert "Ways to train" not in shown
    assert "2 ways to train pass · -v lists them" in shown
    assert "one autocast around all steps" in text.render(passing, verbose=True)


def test_ways_that_fail_like_their_precision_are_counted() -> None:
    raised = ExceptionInfo(type="NotImplementedError", message="no kernel")
    failing = [TrainingWay(name=name, status="error", exception=raised) for name in ("plain", "kahan")]
    shown = text.render(of_one(RESULT.run("bfloat16"), ways=failing))
    assert "2 ways to train fail as their precision does · -v lists them" in shown
    assert "Ways to train\n" not in shown
    shown = text.render(of_one(RESULT.run("bfloat16"), ways=[*failing, way("master-weights")]))
    assert "1 more way to train fails as its precision does · -v lists them" in shown
    rows = training.news(training.way_rows(of_one(RESULT.run("bfloat16"), ways=[*failing, way("master-weights")])))
    assert [row.way for row in rows if row.status != "reference"] == ["as it is", "fp32 master weights"]


def test_figures_that_differ_are_shown_with_enough_digits() -> None:
    assert training.apart([2.0312, 2.0309]) == ["2.0312", "2.0309"]
    assert training.apart([2.0, 1.5]) == ["2", "1.5"]
    assert training.apart([2.0, 2.0]) == ["2", "2"]
    assert training.apart([]) == []


def test_why_a_way_fails() -> None:
    at = lambda what, value, limit, step=3: Divergence(step=step, what=what, value=value, limit=limit)  # noqa: E731
    raised = ExceptionInfo(type="ValueError", message="bad", phase="optimizer")
    in_forward = ExceptionInfo(type="ValueError", message="bad", phase="forward")
    assert whys(
        way("plain", "inaccurate", divergence=at("loss", -0.29, -0.43)),
        way("kahan", "inaccurate", divergence=at("weights", 0.31, 0.24)),
        way("kahan", "inaccurate", divergence=at("progress", 0.03, 0.9)),
        way("kahan", "inaccurate", divergence=at("progress", 3.0, 1.1)),
        way("plain", "inaccurate", divergence=at("loss", 0.0, 0.0, step=0)),
        way("plain", "nonfinite", losses=[2.3, 2.2, None]),
        way("plain", "nonfinite", losses=[None]),
        way("plain", "nonfinite", failed_step=8),
        way("grad-scaler", "nonfinite", losses=[], skipped_steps=25, initial_scale=65536.0, final_scale=2.0**-9),
        way("grad-scaler", "error", exception=raised, failed_step=1),
        way("grad-scaler", "error", exception=raised, failed_step=4),
        way("plain", "error", exception=in_forward, failed_step=1),
        way("grad-scaler", skipped_steps=1, initial_scale=65536.0, final_scale=32768.0),
        way("plain", losses=losses()[:6]),
        way("plain"),
    ) == [
        "loss diverges from step 3: 2.01, limit 1.87",
        "weights diverge from step 3: 0.31, limit 0.24",
        "weights move too little from step 3: 3 % as far as in fp32, limit 90 %",
        "weights move too far from step 3: 300 % as far as in fp32, limit 110 %",
        "loss differs from that of fp32 before the first step: 2.3, limit 2.3",
        "NaN or Inf in the loss after step 2",
        "NaN or Inf in the loss of the first step",
        "NaN or Inf in the weights",
        "NaN or Inf in the gradients; 25 steps skipped, loss scale 65536 → 0.00195312",
        "optimizer: ValueError: bad",
        "step 4, optimizer: ValueError: bad",
        "ValueError: bad",
        "1 step skipped, loss scale 65536 → 32768",
        "stopped after 5 of 8 steps",
        "",
    ]


@pytest.mark.parametrize(
    ("size", "shown"), [(None, "–"), (1, "1 byte"), (3 << 10, "3 KiB"), (5 << 20, "5.0 MiB"), (7 << 30, "7.0 GiB")]
)
def test_sizes(size: int | None, shown: str) -> None:
    assert training.size_text(size) == shown


def test_a_way_of_a_newer_version_is_shown_as_saved() -> None:
    result = of_one(RESULT.run("half"), ways=[way("fp8-master", "nonfinite", losses=[None])])
    assert [row.way for row in training.way_rows(result)][-1] == "fp8-master"
    assert all(render(result, name) for name in FORMATS.names())


def test_steps_with_gradients_of_zero() -> None:
    assert list(training.epsilon_lines(RESULT)) == [
        "half: a step with gradients of zero makes 100 % of the weights NaN or Inf "
        "(the optimizer as given, foreach=False, foreach=True; none with fused=True)"
    ]
    harmless = of_one(RESULT.run("half"), epsilon=[EpsilonCheck(implementation="loop", nonfinite=0.0)])
    assert not list(training.epsilon_lines(harmless))


# -- gradients and the loss scale


def scale_line(**more: Any) -> str:
    fields: dict[str, Any] = {"scale": 2.0**17, "largest": 0.21, "largest_at": "conv2", "underflow_unscaled": 0.34}
    result = of_one(RESULT.run("autocast-fp16"), loss_scale=LossScale(**fields | more))
    return gradients.scale_lines(result)[0]


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        (
            {"underflow": 0.003, "skipped_steps": 0},
            "start GradScaler at 2^17: the largest 16-bit gradient of backward is 0.21 (conv2), 2.8e+04 with this scale, so it "
            "does not overflow; 0.3 % of the gradients' elements underflow instead of 34 %. Tried: 0 of 8 steps skipped.",
        ),
        (
            {"scale": 65536.0, "underflow": 0.0, "largest_at": None, "skipped_steps": 1},
            "keep GradScaler's initial scale of 2^16: the largest 16-bit gradient of backward is 0.21, 1.4e+04 with this scale, "
            "so it does not overflow; 0 % of the gradients' elements underflow instead of 34 %. Tried: 1 of 8 steps skipped.",
        ),
        (
            {"scale": 1000.0},
            "start GradScaler at 1000: the largest 16-bit gradient of backward is 0.21 (conv2), 2.1e+02 with this scale, so it "
            "does not overflow; without scaling, 34 % of the gradients' elements underflow.",
        ),
        (
            {"scale": 0.25, "largest": 1e6, "underflow_unscaled": 0.0, "underflow": 0.0},
            "start GradScaler at 2^-2: the largest 16-bit gradient of backward is 1e+06 (conv2); no element of the gradients "
            "underflows, also without scaling.",
        ),
    ],
)
def test_the_loss_scale_has_its_reason(more: dict[str, Any], shown: str) -> None:
    assert scale_line(**more) == f"autocast-fp16: {shown}"


def test_gradients_name_the_worst_parameters() -> None:
    lines = gradients.gradient_lines(RESULT, verbose=True)
    assert lines[0] == (
        "half: 34 % of the elements underflow (47.6 % of encoder.blocks.0.conv.weight, 4.2 % of head.out.weight); "
        "elements overflow (0.3 % of head.out.weight)"
    )
    assert lines[1] == ("bfloat16: error 1.6e-02 (65 % from encoder.blocks.0.conv.weight, 27 % from encoder.0.weight)")
    short = gradients.gradient_lines(RESULT)
    assert [line.partition(":")[0] for line in short] == ["half", "autocast-fp16", "autocast-fp16"]
    many = [ParameterGradient(parameter=f"p{i}", elements=4, underflow=0.5 - i / 100) for i in range(30)]
    result = of_one(RESULT.run("half"), gradients=many, underflow=0.4)
    assert "(50 % of p0, 49 % of p1 and of 28 more)" in gradients.gradient_lines(result)[0]
    [table] = gradients.gradient_tables(result)
    assert (len(table.rows), table.more, table.rows[0].parameter) == (20, 10, "p0")
    assert "22 more parameters not shown." in render(result, "md")


def test_tables_of_gradients_start_with_overflow_then_underflow_then_the_share_of_the_error() -> None:
    first, second = gradients.gradient_tables(RESULT)[:2]
    assert [row.parameter for row in first.rows] == [
        "head.out.weight",
        "encoder.blocks.0.conv.weight",
        "encoder.0.weight",
    ]
    assert first.rows[0] == ("head.out.weight", "4,096", "Inf/NaN", "–", "2.1e-01", "4.2 %", "0.3 %")
    assert second.rows[0] == ("encoder.blocks.0.conv.weight", "36,864", "2.2e-02", "65 %", "8.2e-04", "0 %", "0 %")


# -- lost updates


def test_lost_updates_by_kind_group_and_key() -> None:
    rows = {(row.run, row.values): row for row in lost_updates.lost_rows(RESULT)}
    assert list(rows) == [
        ("half", "weights of group 0"),
        ("half", "weights of group 1"),
        ("bfloat16", "weights"),
        ("bfloat16", "buffers"),
        ("bfloat16", "optimizer state exp_avg_sq"),
        ("bfloat16", "optimizer state exp_avg"),
        ("bfloat16", "averages of weights"),
    ]
    assert rows["bfloat16", "weights"][2:] == ("2", "13,504", "96.2 %", "100 %", "head.out.weight, 99 %")
    both = (9408 * 0.2 + 4096 * 0.61) / (9408 + 4096)
    assert rows["bfloat16", "optimizer state exp_avg_sq"].lost == training.share_figure(both)
    assert rows["bfloat16", "optimizer state exp_avg"][4:] == ("0 %", "–", "")


def test_lost_updates_in_a_line() -> None:
    half, low = lost_updates.lost_lines(RESULT)
    assert half == "half: weights of group 0 41 % (encoder.0.weight); weights of group 1 44 % (head.out.weight)"
    assert low == (
        "bfloat16: weights 96.2 % (most in head.out.weight, 99 %), their weight decay 100 %; "
        "buffers 22 % (encoder.bn.running_mean); optimizer state exp_avg_sq 32.4 % (most in head.out.weight, 61 %); "
        "averages of weights 100 % (module.head.out.weight)"
    )


def test_weight_decay_that_is_lost_is_shown_even_if_updates_are_not() -> None:
    only = [LostUpdates(name="w", values="weight", elements=4, lost=0.0, group=0, decay_lost=1.0)]
    result = of_one(RESULT.run("bfloat16"), ways=[way("plain", lost_updates=0.0)], lost_updates=only)
    assert lost_updates.lost_lines(result) == ["bfloat16: weights 0 % (w), their weight decay 100 %"]


# -- phases


def test_the_op_to_look_at_has_its_phase() -> None:
    assert "first Inf: `aten.gelu.default` in `encoder.blocks.0.norm` (backward), 12 of" in render(RESULT, "md")


def test_formats_for_other_programs_have_every_run() -> None:
    cases = ElementTree.fromstring(render(RESULT, "junit"))[0].findall("testcase")
    assert len(cases) == len(RESULT.runs) + 1, "the verdict"
    message = next(case for case in cases if case.get("name") == "bfloat16 on cpu")[0].get("message") or ""
    assert message.startswith("loss diverges from step 3 (head.out.weight)")
    assert ScanResult.from_json(render(RESULT, "json").encode()) == RESULT
    assert json.loads(render(RESULT, "sarif"))["runs"]


def test_a_difference_names_what_changed() -> None:
    better = msgspec.structs.replace(RESULT, runs=[msgspec.structs.replace(one) for one in RESULT.runs])
    fine = changed(RESULT.run("bfloat16"), ways=[way("plain")])
    better.runs[2] = msgspec.structs.replace(fine, status="ok")
    found = diff_scans(better, RESULT)
    assert [change.what for change in found.changes if change.kind == "status"] == [
        "loss diverges from step 3 (head.out.weight)"
    ]
    assert verdict(found).startswith("1 regression")
    untrained = msgspec.structs.replace(RESULT, training=None, options={})
    assert any("option train" in warning for warning in diff_scans(untrained, RESULT).warnings)


# -- what is missing, and hostile strings


def bare(run: Run) -> Run:
    return msgspec.structs.replace(run, training=None if run.is_reference else TrainingRun(ways=[]))


@pytest.mark.parametrize("name", FORMATS.names())
def test_incomplete_results_render(name: str) -> None:
    nothing = TrainingSetup(steps=1, loss="f", optimizer="SGD(lr=0.1)")
    assert render(msgspec.structs.replace(RESULT, runs=[bare(run) for run in RESULT.runs], training=nothing), name)
    assert render(msgspec.structs.replace(RESULT, training=nothing), name)
    assert render(msgspec.structs.replace(RESULT, runs=[], training=nothing), name)
    way_only = [changed(run, gradients=[], gradient_error=None, lost_updates=[]) for run in RESULT.runs if run.training]
    assert render(msgspec.structs.replace(RESULT, runs=way_only), name)


@FEW
@given(hostile)
def test_no_string_breaks_a_format(nasty: str) -> None:
    result = training_result(nasty)
    assert ScanResult.from_json(render(result, "json").encode()) == result
    assert len(ElementTree.fromstring(render(result, "junit")).findall(".//testcase")) == len(result.runs) + 1
    shown = render(result, "md")
    assert len(shown) <= markdown.LONGEST
    assert html_in(shown) <= {"<details>", "<summary>", "</summary>", "</details>"}
    for screen in (text.render(result), text.render(result, verbose=True)):
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", screen + shown)
    rows = [line for line in re.sub(r"(?s)\n(`{3,})python\n.*?\n\1\n", "", shown).splitlines() if line[:1] == "|"]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {10, 9, 8, 7, 3}
    page = render(result, "html")
    assert page.count("<script") == page.count("</script>") == 5
    assert "<script>alert" not in page


@pytest.mark.parametrize("width", [40, 60, 80, 100, 130])
@pytest.mark.parametrize("verbose", [False, True])
def test_the_screen_fits_and_drops_nothing(width: int, verbose: bool) -> None:
    shown = text.render(RESULT, width=width, verbose=verbose)
    code = {line for line in shown.splitlines() if line.startswith("    ") and ("torch" in line or "model" in line)}
    assert max(len(line) for line in shown.splitlines() if line not in code) <= width
    words = " ".join(shown.split())
    for row in training.way_rows(RESULT) if verbose else training.news(training.way_rows(RESULT)):
        assert all(cell in words for cell in row[1:9] if cell != "–"), row
    assert HEAD in words


def test_long_runs_are_judged_by_their_last_step() -> None:
    steps = 2000
    long = setup(steps=steps, losses=[2.0] * (steps + 1), distances=[0.5] * steps, loss_low=[], loss_high=[])
    trained = way("plain", losses=[2.0] * steps + [1.5], distances=[0.25] * (steps - 1) + [0.125])
    result = msgspec.structs.replace(of_one(RESULT.run("half"), ways=[trained]), training=long)
    assert training.way_rows(result)[-1][3:5] == ("1.5", "0.12")


def test_the_fixture_is_consistent() -> None:
    assert len(FP32_LOSSES) == STEPS + 1
    assert len(distances(0.1)) == STEPS
