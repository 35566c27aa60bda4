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
from lowprec_check.analysis.recommend import passes, recommended_run
from lowprec_check.analysis.statements.advice import verdict
from lowprec_check.analysis.statements.kinds import statements
from lowprec_check.features.training.outcomes import remarks
from lowprec_check.features.training.report import loss_by_step, training_blocks
from lowprec_check.report.blocks import Fold, Say, Table, cell_text
from lowprec_check.report.diff import diff_document
from lowprec_check.report.layout.markdown import LONGEST
from lowprec_check.report.layout.text import text as laid_out
from lowprec_check.report.registry import FORMATS, render
from lowprec_check.report.runs_table import runs_table
from lowprec_check.report.scan_document import scan_document
from lowprec_check.schema.findings import Recommendation
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import percent
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
    "the same batch each step"
)


def changed(run: Run, **more: Any) -> Run:
    """``run`` with other fields of its training."""
    return msgspec.structs.replace(run, training=msgspec.structs.replace(run.training, **more))


def of_one(run: Run, **more: Any) -> ScanResult:
    """:data:`RESULT` with fp32 and ``run`` alone, its training changed."""
    return msgspec.structs.replace(RESULT, runs=[RESULT.runs[0], changed(run, **more)])


def said(result: ScanResult, *kinds: str) -> list[str]:
    """The statements of these kinds, each after its runs."""
    return [": ".join(filter(None, (", ".join(f.runs), f.text))) for f in statements(result) if f.kind in kinds]


def tables(result: ScanResult, name: str) -> list[list[list[str]]]:
    """The cells of each table of that name, below its heads, by the columns that it has; those on pages too."""
    blocks = list(training_blocks(result, statements(result)))
    blocks += [inner for block in blocks if isinstance(block, Fold) for inner in block.blocks]
    return [
        [
            [column.name for column in block.columns],
            *([cell_text(v, c.type) for v, c in zip(row.cells, block.columns, strict=True)] for row in block.rows),
        ]
        for block in blocks
        if isinstance(block, Table) and block.name == name
    ]


def ways(result: ScanResult) -> list[dict[str, str]]:
    """The rows about ways, first those that are shown everywhere."""
    found = tables(result, "ways to train")
    return [dict(zip(rows[0], row, strict=True)) for rows in found for row in rows[1:]]


def whys(*found: TrainingWay) -> list[str]:
    return [remark.text if (remark := remarks(one, setup())) is not None else "–" for one in found]


@pytest.mark.parametrize(("format", "name"), [("text", "training.txt"), ("md", "training.md")])
def test_goldens(format: str, name: str, golden: Callable[[str, str], None]) -> None:
    golden(name, render(RESULT, format))


def test_golden_of_every_way(golden: Callable[[str, str], None]) -> None:
    golden("training-verbose.txt", verbose(RESULT))


def verbose(result: ScanResult) -> str:
    return laid_out(scan_document(result), width=140, detail="more")


# -- the head


@pytest.mark.parametrize("format", ["text", "md", "html"])
def test_reports_say_how_the_model_was_trained(format: str) -> None:
    shown = laid_out(scan_document(RESULT), detail="more") if format == "text" else render(RESULT, format)
    shown = " ".join(shown.replace("\\", "").split())
    assert shown.count(HEAD) == 1
    assert "nly the forward pass" not in shown


def test_junit_says_it_too() -> None:
    found = ElementTree.fromstring(render(RESULT, "junit"))[0].find("properties")
    assert found is not None
    assert {one.get("name"): one.get("value") for one in found}["training"] == HEAD


@pytest.mark.parametrize(
    ("setup", "shown"),
    [
        (
            TrainingSetup(steps=1, loss="loss of the file", optimizer="SGD(lr=0.1)"),
            "1 step of SGD(lr=0.1), loss: loss of the file",
        ),
        (
            TrainingSetup(steps=20, loss="f", optimizer="AdamW(lr=0.001)", default_optimizer=True, new_batches=True),
            "20 steps of AdamW(lr=0.001) (default), loss: f, a new batch each step",
        ),
        (
            TrainingSetup(steps=8, loss="f", optimizer="SGD(lr=0.1)", new_batches=True, batches=3),
            "8 steps of SGD(lr=0.1), loss: f, 3 batches in turn",
        ),
    ],
)
def test_the_head_names_what_is_a_default(setup: TrainingSetup, shown: str) -> None:
    assert said(msgspec.structs.replace(RESULT, training=setup), "scope") == [shown]


def test_the_head_says_what_a_run_is_judged_by() -> None:
    assert said(RESULT, "seeds") == [
        "judged by 3 fp32 runs from other seeds (other initial weights, batches, random draws), after the last step"
    ]
    alone = msgspec.structs.replace(RESULT, training=setup(seeds=0))
    assert said(alone, "seeds") == ["no fp32 run from another seed finished, so the loss is not judged"]


# -- the table of runs


def runs(result: ScanResult) -> dict[str, list[str]]:
    """The cells of each run by its label, as far as they are about training, and why it failed."""
    table = runs_table(result)
    names = [column.name for column in table.columns]
    wanted = [names.index(name) for name in ("status", "loss", "gradient error", "lost updates", "why")]
    cells = [[cell_text(v, c.type) for v, c in zip(row.cells, table.columns, strict=True)] for row in table.rows]
    return {row[0]: [row[index] for index in wanted] for row in cells}


def test_the_runs_have_the_figures_of_training() -> None:
    shown = runs(RESULT)
    assert {name: row[:4] for name, row in shown.items()} == {
        "fp32": ["reference", "1.412", "–", "–"],
        "half": ["NaN or Inf", "Inf/NaN", "Inf/NaN", "42 %"],
        "bfloat16": ["inaccurate", "1.832", "1.6e-02", "96.2 %"],
        "autocast-fp16": ["ok", "1.415", "6.1e-03", "–"],
        "autocast-bf16": ["ok", "1.415", "7.2e-03", "–"],
        "half · inductor": ["skipped", "–", "–", "–"],
    }
    assert shown["half"][4] == (
        "NaN or Inf in the loss after step 2, first in gelu (backward) of encoder.blocks.0.norm; "
        "passes with fp32 master weights and GradScaler"
    )
    assert shown["bfloat16"][4] == (
        "loss diverges from step 3 (head.out.weight): 1.956, 0.033 above its limit; "
        "passes with fp32 master weights, weights split into 16 + 16 bits, stochastic rounding"
    )
    assert shown["autocast-fp16"][4] == "with GradScaler"
    assert shown["autocast-bf16"][4] == ""


def test_losses_in_one_table_are_after_the_same_step() -> None:
    """A slow run ends after fewer steps, with the loss of the batch that fp32 has at this place."""
    slow = RESULT.run("autocast-bf16")
    assert slow.training is not None
    ended = msgspec.structs.replace(slow.training.ways[0], losses=losses()[:4], distances=distances(0.01)[:3])
    result = msgspec.structs.replace(
        RESULT,
        runs=[changed(run, ways=[ended]) if run is slow else run for run in RESULT.runs],
    )
    shown = {name: row[1] for name, row in runs(result).items()}
    assert shown["fp32"] == f"{FP32_LOSSES[3]:.4g}"
    assert shown["autocast-bf16"] == f"{FP32_LOSSES[3]:.4g}"
    assert float(shown["autocast-fp16"]) == pytest.approx(FP32_LOSSES[3], abs=0.02)
    rows = [(row["precision"], row["way"], row["loss"]) for row in ways(result)]
    assert ("fp32", "as it is", f"{FP32_LOSSES[3]:.4g}") in rows


def test_the_error_of_the_output_is_no_column() -> None:
    assert "output error" not in [column.name for column in runs_table(RESULT).columns]
    untrained = msgspec.structs.replace(RESULT, training=None)
    assert "output error" in [column.name for column in runs_table(untrained).columns]


def test_an_op_without_a_kernel_is_named_with_its_phase() -> None:
    half = RESULT.run("half")
    raised = ExceptionInfo(type="NotImplementedError", message="no kernel", phase="backward")
    failed = changed(half, ways=[TrainingWay(name="plain", status="error", exception=raised, failed_step=1)])
    failed = msgspec.structs.replace(failed, status="error", exception=raised)
    result = msgspec.structs.replace(RESULT, runs=[*RESULT.runs[:1], failed, *RESULT.runs[2:]])
    assert runs(result)["half"][4] == "1 of 4 ops has no kernel: pdist_backward (backward)"
    without = msgspec.structs.replace(failed, gaps=[], failed_call=3)
    shown = runs(msgspec.structs.replace(result, runs=[*RESULT.runs[:1], without, *RESULT.runs[2:]]))["half"][4]
    assert shown == "backward: NotImplementedError: no kernel"


def test_a_way_that_passes_may_be_recommended() -> None:
    half = changed(RESULT.run("half"), ways=[way("plain", "nonfinite"), way("master-weights")])
    advice = Recommendation(precision="half", way="master-weights", reason="passes.", code="", worth="unknown")
    result = msgspec.structs.replace(RESULT, runs=[RESULT.runs[0], half], recommendation=advice)
    assert verdict(result) == "half with fp32 master weights passes (not timed)"
    tables = [block for block in training_blocks(result, []) if isinstance(block, Table)]
    tagged = [row.cells[1] for table in tables for row in table.rows if row.tag]
    assert tagged == [], "what passes without a known gain is not recommended"
    used = msgspec.structs.replace(result, recommendation=msgspec.structs.replace(advice, worth="faster"))
    tables = [block for block in training_blocks(used, []) if isinstance(block, Table)]
    assert [row.cells[1] for table in tables for row in table.rows if row.tag] == ["fp32 master weights"]
    assert [change.new for change in diff_scans(RESULT, result).changes if change.kind == "recommendation"] == [
        "half with fp32 master weights"
    ]
    assert recommended_run(result) is half
    assert said(result, "other-way")[0].startswith(
        "half: as it is it does not pass: NaN or Inf in the weights, first in gelu"
    )
    failing = msgspec.structs.replace(result, runs=[RESULT.runs[0], changed(half, ways=[way("plain", "nonfinite")])])
    assert not passes(failing)


# -- ways to train


def test_each_way_has_its_figures() -> None:
    rows = {(row["precision"], row["way"]): list(row.values())[2:8] for row in ways(RESULT)}
    assert rows["fp32", "as it is"] == ["reference", "1.412", "–", "–", "–", "140.0 MiB"]
    assert rows["bfloat16", "as it is"] == ["inaccurate", "1.832", "9.6e-01", "5 %", "96.2 %", "70.0 MiB"]
    assert rows["bfloat16", "stochastic rounding"] == ["ok", "1.444", "1.7e-01", "99 %", "–", "70.0 MiB"]
    assert rows["half", "GradScaler"] == ["fails", "–", "–", "–", "–", "–"]
    assert len(rows) == 1 + sum(len(run.training.ways) for run in RESULT.runs[1:] if run.training)


@pytest.mark.parametrize(
    ("setup", "shown"),
    [
        (
            setup(loss_low=[-0.1] * 9, loss_high=[0.2] * 9, losses=[5.0] * 9),
            "fp32 with 3 other seeds, counted from the first loss of fp32: a loss of 4.9 – 5.2, "
            "weights up to 2.7e-01 from those of fp32",
        ),
        (setup(loss_low=[], distances=[]), ""),
    ],
)
def test_the_band_of_the_seeds_is_counted_from_the_first_loss_of_fp32(setup: TrainingSetup, shown: str) -> None:
    blocks = training_blocks(msgspec.structs.replace(RESULT, training=setup), [])
    assert [block.text for block in blocks if isinstance(block, Say)] == [shown] * bool(shown)


def test_a_short_report_leaves_out_ways_that_say_nothing_new() -> None:
    short, rest = tables(RESULT, "ways to train")
    shown = [(row[0], row[1]) for row in short]
    assert ("autocast-bf16", "one autocast around all steps") in shown
    assert ("autocast-bf16", "as it is") not in shown
    assert ("autocast-bf16", "as it is") in [(row[0], row[1]) for row in rest]
    assert not [run for run, _ in shown if run == "autocast-fp16"]
    assert len([run for run, _ in shown if run == "bfloat16"]) == 5
    assert "4 more ways to train pass" not in render(RESULT, "text")
    assert "4 more ways to train pass" in verbose(RESULT)


def test_where_every_way_passes_there_is_no_table() -> None:
    passing = of_one(RESULT.run("autocast-bf16"), ways=[way("plain"), way("one-autocast")])
    shown = render(passing, "text")
    assert "Ways to train" not in shown
    assert "2 ways to train pass" in verbose(passing)
    assert "one autocast around all steps" in verbose(passing)


def test_ways_that_fail_like_their_precision_are_counted() -> None:
    raised = ExceptionInfo(type="NotImplementedError", message="no kernel")
    failing = [TrainingWay(name=name, status="error", exception=raised) for name in ("plain", "kahan")]
    shown = of_one(RESULT.run("bfloat16"), ways=failing)
    assert "Ways to train" not in render(shown, "text")
    assert "2 ways to train fail as their precision does" in verbose(shown)
    shown = of_one(RESULT.run("bfloat16"), ways=[*failing, way("master-weights")])
    assert "1 more way to train fails as its precision does" in verbose(shown)
    assert [row[1] for row in tables(shown, "ways to train")[0][2:]] == ["as it is", "fp32 master weights"]


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
        "loss diverges from step 3: 2.013, 0.14 above its limit",
        "weights diverge from step 3: 3.1e-01 from those of fp32, 129.2 % of the limit",
        "weights move too little from step 3: 3 % as far as in fp32, limit 90 %",
        "weights move too far from step 3: 300 % as far as in fp32, limit 110 %",
        "the loss differs from that of fp32 before the first step",
        "NaN or Inf in the loss after step 2",
        "NaN or Inf in the loss of the first step",
        "NaN or Inf in the weights",
        "NaN or Inf in the gradients of step 1 with every scale of GradScaler; 25 steps skipped; "
        "loss scale 65536 → 0.00195312",
        "optimizer: ValueError: bad",
        "step 4, optimizer: ValueError: bad",
        "ValueError: bad",
        "1 step skipped; loss scale 65536 → 32768",
        "stopped after 5 of 8 steps",
        "–",
    ]


def test_a_run_that_made_fewer_steps_shows_how_many() -> None:
    few = [way("plain", losses=[2.0, 1.9]), way("kahan")]
    assert said(of_one(RESULT.run("bfloat16"), ways=few), "passing-ways") == ["bfloat16: after 1 of 8 steps"]
    scaled = [way("grad-scaler", losses=[2.0, 1.9, 1.8])]
    found = said(of_one(RESULT.run("bfloat16"), ways=scaled), "passing-ways")
    assert found == ["bfloat16: with GradScaler; after 2 of 8 steps"]
    assert not said(of_one(RESULT.run("bfloat16"), ways=[way("plain", losses=[2.0] * 9)]), "passing-ways")


def test_a_way_of_a_newer_version_is_shown_as_saved() -> None:
    result = of_one(RESULT.run("half"), ways=[way("fp8-master", "nonfinite", losses=[None])])
    assert [row["way"] for row in ways(result)][-1] == "fp8-master"
    assert all(render(result, name) for name in FORMATS.names())


def test_steps_with_gradients_of_zero() -> None:
    assert said(RESULT, "zero-gradients") == [
        "half: a step with gradients of zero makes 100 % of the weights NaN or Inf "
        "with the optimizer as given, foreach=False, foreach=True; none with fused=True"
    ]
    checks = [EpsilonCheck(implementation="loop", nonfinite=0.5), EpsilonCheck(implementation="fused", nonfinite=0.25)]
    assert "makes up to 50 % of the weights" in said(of_one(RESULT.run("half"), epsilon=checks), "zero-gradients")[0]
    harmless = of_one(RESULT.run("half"), epsilon=[EpsilonCheck(implementation="loop", nonfinite=0.0)])
    assert not said(harmless, "zero-gradients")


def test_the_chart_shows_changes_of_the_loss_as_they_are_judged() -> None:
    above = way("plain", losses=[loss + 1 for loss in FP32_LOSSES], distances=[])
    (chart,) = loss_by_step(of_one(RESULT.run("half"), ways=[above]), [])
    drawn = re.findall(r'<(?:path|polyline)[^>]* (?:d|points)="([^"]+)"', chart.draw())
    assert len(drawn) != len(set(drawn)), "the line of half is that of fp32"


# -- gradients and the loss scale


UNSCALED = "34 % of the elements of gradients underflow without scaling"
NONE = "no element of the gradients underflows, with it or without scaling"


@pytest.mark.parametrize(
    ("more", "skips", "shown"),
    [
        (
            {"underflow": 0.003, "skipped_steps": 0},
            0,
            "start GradScaler at 2^17; the largest 16-bit gradient of the backward pass is 0.21 (conv2), "
            f"2.8e+04 with this scale, of at most 65504; {UNSCALED}, 0.3 % with it; tried in 8 steps: no step skipped",
        ),
        (
            {"scale": 65536.0, "underflow": 0.0, "largest_at": None, "skipped_steps": 1},
            1,
            "keep the initial scale of GradScaler, 2^16; the largest 16-bit gradient of the backward pass is 0.21, "
            f"1.4e+04 with this scale, of at most 65504; {UNSCALED}, 0 % with it; tried in 8 steps: 1 step skipped",
        ),
        (
            {"scale": 1000.0},
            2,
            "start GradScaler at 1000: its default skips 2 steps; the largest 16-bit gradient of the backward pass is "
            f"0.21 (conv2), 2.1e+02 with this scale, of at most 65504; {UNSCALED}",
        ),
        (
            {"scale": 0.25, "largest": 1e6, "underflow_unscaled": 0.0, "underflow": 0.0},
            0,
            "the default scale of GradScaler will do; 2^-2 was tried; the largest 16-bit gradient of the backward "
            f"pass is 1e+06 (conv2); {NONE}",
        ),
    ],
)
def test_the_loss_scale_has_its_reason(more: dict[str, Any], skips: int, shown: str) -> None:
    fields: dict[str, Any] = {"scale": 2.0**17, "largest": 0.21, "largest_at": "conv2", "underflow_unscaled": 0.34}
    tried = [way("grad-scaler", initial_scale=65536.0, skipped_steps=skips)]
    tried.append(way("grad-scaler-suggested", initial_scale=131072.0))
    result = of_one(RESULT.run("autocast-fp16"), ways=tried, loss_scale=LossScale(**fields | more))
    assert said(result, "loss-scale") == [f"autocast-fp16: {shown}"]


def test_gradients_name_the_worst_parameters() -> None:
    half, low, autocast = said(RESULT, "gradients")
    assert half == (
        "half: 34 % of the elements underflow (47.6 % of encoder.blocks.0.conv.weight, 4.2 % of head.out.weight); "
        "elements become NaN or Inf (0.3 % of head.out.weight)"
    )
    assert low == (
        "bfloat16, autocast-bf16: error 7.2e-03 – 1.6e-02 (65 % from encoder.blocks.0.conv.weight, "
        "27 % from encoder.0.weight)"
    )
    assert autocast.startswith("autocast-fp16: 34 % of the elements underflow")
    assert {block.detail for block in training_blocks(RESULT, statements(RESULT))} <= {"more", "all"}
    many = [ParameterGradient(parameter=f"p{i}", elements=4, underflow=0.5 - i / 100) for i in range(30)]
    result = of_one(RESULT.run("half"), gradients=many, underflow=0.4)
    assert "(50 % of p0, 49 % of p1 and of 28 more)" in said(result, "gradients")[0]
    [rows] = tables(result, "gradients, half")
    assert (len(rows), rows[1][0]) == (21, "p0")


def test_tables_of_gradients_start_with_overflow_then_underflow_then_the_share_of_the_error() -> None:
    [half], [low] = (tables(RESULT, f"gradients, {name}") for name in ("half", "bfloat16"))
    assert [row[0] for row in half[1:]] == ["head.out.weight", "encoder.blocks.0.conv.weight", "encoder.0.weight"]
    assert half[1] == ["head.out.weight", "4,096", "Inf/NaN", "–", "0.21", "4.2 %", "0.3 %"]
    assert low[1] == ["encoder.blocks.0.conv.weight", "36,864", "2.2e-02", "65 %", "0.00082", "0 %", "0 %"]


# -- lost updates


def test_lost_updates_by_kind_group_and_key() -> None:
    [table] = tables(RESULT, "lost updates")
    rows = {(row[0], row[1]): row for row in table[1:]}
    assert list(rows) == [
        ("half", "weights of group 0"),
        ("half", "weights of group 1"),
        ("bfloat16", "weights"),
        ("bfloat16", "buffers"),
        ("bfloat16", "optimizer state exp_avg_sq"),
        ("bfloat16", "optimizer state exp_avg"),
        ("bfloat16", "averages of weights"),
    ]
    assert rows["bfloat16", "weights"][2:] == ["2", "13,504", "96.2 %", "100 %", "head.out.weight, 99 %"]
    both = (9408 * 0.2 + 4096 * 0.61) / (9408 + 4096)
    assert rows["bfloat16", "optimizer state exp_avg_sq"][4] == percent(both)
    assert rows["bfloat16", "optimizer state exp_avg"][4:] == ["0 %", "–", "–"]


def test_lost_updates_in_a_sentence() -> None:
    half, low = said(RESULT, "lost-updates")
    assert half == "half: weights of group 0 41 % (encoder.0.weight); weights of group 1 44 % (head.out.weight)"
    assert low == (
        "bfloat16: weights 96.2 % (most in head.out.weight, 99 %), their weight decay 100 %; "
        "buffers 22 % (encoder.bn.running_mean); optimizer state exp_avg_sq 32.4 % (most in head.out.weight, 61 %); "
        "averages of weights 100 % (module.head.out.weight)"
    )


def test_weight_decay_that_is_lost_is_shown_even_if_updates_are_not() -> None:
    only = [LostUpdates(name="w", values="weight", elements=4, lost=0.0, group=0, decay_lost=1.0)]
    result = of_one(RESULT.run("bfloat16"), ways=[way("plain", lost_updates=0.0)], lost_updates=only)
    assert said(result, "lost-updates") == ["bfloat16: weights 0 % (w), their weight decay 100 %"]


# -- phases


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
        "loss diverges from step 3 (head.out.weight): 1.956, 0.033 above its limit"
    ]
    assert "2 regressions" in laid_out(diff_document(found))
    lossy = way("plain", lost_updates=0.5, distances=distances(0.1)[:-1])  # it ended early
    ways = [way("plain", lost_updates=0.1), way("master-weights"), way("kahan", "inaccurate")]
    runs = [
        changed(RESULT.run("bfloat16"), ways=ways),
        changed(RESULT.run("bfloat16"), ways=[lossy, way("master-weights", "nonfinite"), way("kahan")]),
    ]
    old, new = (
        msgspec.structs.replace(RESULT, runs=[RESULT.runs[0], msgspec.structs.replace(one, status="ok")])
        for one in runs
    )
    assert [
        (change.direction, change.what) for change in diff_scans(old, new).changes if change.kind in ("error", "status")
    ] == [
        ("worse", "the weights end 5.3 times as far from those of fp32 as before"),
        ("worse", "rounding loses more updates of weights"),
        ("worse", "fp32 master weights: passes no longer"),
        ("better", "Kahan summation: passes now"),
    ]
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
    assert len(shown) <= LONGEST
    assert html_in(shown) <= {"<details>", "<summary>", "</summary>", "</details>"}
    for screen in (render(result, "text"), verbose(result)):
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", screen + shown)
    page = render(result, "html")
    assert page.count("<script") == page.count("</script>") == 1
    assert "<script>alert" not in page


@pytest.mark.parametrize("width", [40, 60, 80, 100, 130])
@pytest.mark.parametrize("detail", ["first", "more"])
def test_the_screen_fits_and_drops_nothing(width: int, detail: Any) -> None:
    shown = laid_out(scan_document(RESULT), width=width, detail=detail)
    code = {line for line in shown.splitlines() if line.startswith("    ") and ("torch" in line or "model" in line)}
    assert max(len(line) for line in shown.splitlines() if line not in code) <= width
    words = " ".join(shown.split())
    if detail == "more":
        short, rest = tables(RESULT, "ways to train")
        for row in short[1:] + rest[1:]:
            assert all(cell in words for cell in row[1:] if cell != "–"), row
        assert HEAD in words


def test_long_runs_are_judged_by_their_last_step() -> None:
    steps = 2000
    long = setup(steps=steps, losses=[2.0] * (steps + 1), distances=[0.5] * steps, loss_low=[], loss_high=[])
    trained = way("plain", losses=[2.0] * steps + [1.5], distances=[0.25] * (steps - 1) + [0.125])
    result = msgspec.structs.replace(of_one(RESULT.run("half"), ways=[trained]), training=long)
    assert (ways(result)[-1]["loss"], ways(result)[-1]["distance"]) == ("1.5", "1.2e-01")


def test_the_fixture_is_consistent() -> None:
    assert len(FP32_LOSSES) == STEPS + 1
    assert len(distances(0.1)) == STEPS
