"""Differences between scans: what counts as a change, what is noise, how it is shown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from browser import opened
from conftest import Call
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_result import gap, run, shared_result

from lowprec_check.analysis.diff import diff_scans
from lowprec_check.report.diff import diff_document, verdict
from lowprec_check.report.layout.text import text
from lowprec_check.report.registry import FORMATS, diff_formats
from lowprec_check.schema.measures import InputsTried
from lowprec_check.schema.scan_diff import ScanChange, ScanDiff
from lowprec_check.schema.scan_result import ExceptionInfo, Run, ScanResult


def render(diff: ScanDiff, format: str) -> str:
    return FORMATS.get(format).render_diff(diff)


RESULT = shared_result()


def result_of(*runs: Run, **more: Any) -> ScanResult:
    fields = {"recommendation": None, "diagnostics": []} | more
    return msgspec.structs.replace(RESULT, runs=[run("fp32", latency_ms=10.0, tolerance=None), *runs], **fields)


def changes(old: Run, new: Run, **options: Any) -> list[tuple[str, str]]:
    found = diff_scans(result_of(old), result_of(new), **options)
    return [(change.kind, change.direction) for change in found.changes]


def test_a_result_does_not_differ_from_itself() -> None:
    found = diff_scans(RESULT, RESULT)
    assert (found.changes, found.warnings, found.regressions) == ([], [], 0)
    assert len(found.runs) == len(RESULT.runs)


@pytest.mark.parametrize(
    ("old", "new", "direction"),
    [
        ("ok", "inaccurate", "worse"),
        ("inaccurate", "nonfinite", "worse"),
        ("nonfinite", "error", "worse"),
        ("error", "crashed", "worse"),
        ("error", "timeout", "worse"),
        ("crashed", "ok", "better"),
        ("timeout", "crashed", "other"),
        ("ok", "skipped", "worse"),
        ("skipped", "ok", "better"),
    ],
)
def test_status(old: str, new: str, direction: str) -> None:
    assert ("status", direction) in changes(run("half", old), run("half", new))


def test_gaps_gained_and_fixed() -> None:
    had, has = run("half", "error", gaps=[gap()]), run("half", "error", gaps=[gap(op="torch.quantile")])
    assert changes(had, has) == [("gap", "worse"), ("gap", "better")]
    what = [change.what for change in diff_scans(result_of(had), result_of(has)).changes]
    assert what[0].startswith("missing-kernel (new): torch.quantile in encoder.blocks.0.norm at net.py:23")
    assert what[1].startswith("missing-kernel (fixed): linalg_cholesky_ex in ")


def test_a_gap_that_moved_is_the_same_gap() -> None:
    before = run("half", "error", gaps=[gap()])
    after = run("half", "error", gaps=[gap(source="net.py:99", module="encoder.blocks.7.norm", message="other words")])
    assert changes(before, after) == []


def test_one_op_in_many_places_is_one_change() -> None:
    after = run("half", "error", gaps=[gap(source=f"file{i}.py:3") for i in range(9)])
    found = diff_scans(result_of(run("half", "error")), result_of(after))
    assert [change.what for change in found.changes] == [
        "missing-kernel (new): linalg_cholesky_ex in encoder.blocks.0.norm at file0.py:3 and 8 more places"
    ]


def test_gaps_of_incomplete_runs_are_neither_gained_nor_fixed() -> None:
    seen, unseen = run("half", "error", gaps=[gap()]), run("half", "error", complete=False)
    assert changes(seen, unseen) == []
    assert changes(unseen, seen) == [("gap", "other")]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (1e-3, 1.9e-3, []),
        (1e-3, 2.1e-3, [("error", "worse")]),
        (2.1e-3, 1e-3, [("error", "better")]),
        (1e-9, 9e-8, []),
        (0.0, 5e-8, []),
        (0.0, 1e-3, [("error", "worse")]),
        (None, 1e-3, []),
    ],
)
def test_errors_that_changed_beyond_noise(
    old: float | None, new: float | None, expected: list[tuple[str, str]]
) -> None:
    assert changes(run("half", "ok", old), run("half", "ok", new)) == expected


def timed(fp32: float, half: float, **environment: Any) -> ScanResult:
    runs = [run("fp32", latency_ms=fp32, tolerance=None), run("half", latency_ms=half)]
    known = RESULT.environment | environment
    return msgspec.structs.replace(RESULT, runs=runs, environment=known, recommendation=None, diagnostics=[])


def speeds(old: ScanResult, new: ScanResult) -> list[tuple[str, str]]:
    return [(change.run, change.direction) for change in diff_scans(old, new).changes if change.kind == "speed"]


def test_slower_by_the_clock_and_against_fp32() -> None:
    assert speeds(timed(10, 10), timed(10, 16)) == [("half", "worse")]
    assert speeds(timed(10, 16), timed(10, 10)) == [("half", "better")]
    assert speeds(timed(10, 10), timed(10, 14)) == []


def test_a_busy_machine_is_no_regression() -> None:
    assert speeds(timed(10, 10), timed(30, 30)) == [("fp32", "other")]


def test_a_faster_fp32_is_no_regression() -> None:
    assert speeds(timed(30, 10), timed(10, 10)) == [("fp32", "other")]


def test_on_another_machine_only_the_ratio_counts() -> None:
    assert speeds(timed(10, 10), timed(100, 30, device_name="another")) == [("half", "better")]
    assert speeds(timed(10, 10), timed(1000, 1000, device_name="another")) == []


def test_times_below_a_millisecond_are_ignored() -> None:
    assert speeds(timed(0.2, 0.1), timed(0.2, 0.9)) == []


def test_without_rounds_times_are_ignored() -> None:
    slower = timed(10, 1000)
    assert diff_scans(timed(10, 10), slower).regressions
    assert not diff_scans(timed(10, 10), msgspec.structs.replace(slower, options={"times": "off"})).regressions


def test_memory() -> None:
    assert changes(run("half"), run("half", peak_memory_bytes=6 << 20)) == [("memory", "worse")]


def test_losing_the_recommendation_is_a_regression() -> None:
    found = diff_scans(result_of(recommendation=RESULT.recommendation), result_of())
    assert [(change.kind, change.direction, change.new) for change in found.changes] == [
        ("recommendation", "worse", "none")
    ]


@pytest.mark.parametrize(
    ("status", "precisions", "direction", "why"),
    [
        ("ok", None, "worse", ""),
        ("ok", ["half", "bfloat16"], "worse", ""),
        ("ok", ["bfloat16"], "other", ": not requested"),
        ("error", None, "other", ""),
    ],
)
def test_a_missing_run_is_reported(status: str, precisions: list[str] | None, direction: str, why: str) -> None:
    options = {"precisions": precisions} if precisions else {}
    found = diff_scans(result_of(run("half", status)), result_of(run("bfloat16"), options=options))
    assert {(change.run, change.kind, change.direction, change.what) for change in found.changes} == {
        ("bfloat16", "run", "other", "not in the old scan"),
        ("half", "run", direction, f"missing from the new scan{why}"),
    }
    assert found.regressions == (direction == "worse")
    assert verdict(found).endswith("1 run missing from the new scan")


def test_a_plan_or_precision_that_was_not_requested_is_no_regression() -> None:
    planned = result_of(run("plan", base="half"), recommendation=RESULT.recommendation)
    assert diff_scans(planned, result_of(recommendation=RESULT.recommendation)).regressions == 0
    assert diff_scans(planned, result_of()).regressions == 1
    assert diff_scans(planned, result_of(options={"precisions": ["bfloat16"]})).regressions == 0


def test_a_memory_format_that_was_not_requested_is_no_regression() -> None:
    old = result_of(run("half", memory_format="channels_last"))
    for asked, worse in ((["contiguous"], 0), (["contiguous", "channels_last"], 1)):
        assert diff_scans(old, result_of(options={"memory_formats": asked})).regressions == worse


def test_plans_of_different_bases_are_not_compared() -> None:
    old, new = (result_of(run("plan", base=base, rel_l2=error)) for base, error in (("half", 1e-4), ("bfloat16", 1e-2)))
    assert {change.kind for change in diff_scans(old, new).changes} == {"run"}


@pytest.mark.parametrize(("message", "shown"), [("no CPU", True), ("8 rows", False)])
def test_another_exception_of_a_run_that_failed_before_is_shown(message: str, shown: bool) -> None:
    old, new = (
        run("half", "error", exception=ExceptionInfo(type="ValueError", message=each)) for each in ("4 rows", message)
    )
    found = diff_scans(result_of(old), result_of(new)).changes
    raised = ScanChange(
        kind="status", direction="other", run="half", what=f"ValueError: {message}; before: ValueError: 4 rows"
    )
    assert found == ([raised] if shown else [])


def test_a_run_that_passes_on_the_given_inputs_only_does_not_pass_now() -> None:
    further = InputsTried(kind="drawn", tried=64, failed=7, statuses={"inaccurate": 7, "ok": 57})
    (change,) = diff_scans(result_of(run("half", "error")), result_of(run("half", further_inputs=further))).changes
    assert (change.new, change.what) == ("inaccurate", "passes here, fails on 7 of 64 further inputs (drawn anew)")
    zeros = [run("fp32", latency_ms=10.0, tolerance=None, output_is_zero=True), run("half", output_is_zero=True)]
    new = msgspec.structs.replace(result_of(), runs=zeros)
    (change,) = diff_scans(result_of(run("half", "error")), new).changes
    assert (change.new, change.what) == ("unjudged", "cannot be judged: the fp32 output is all zeros")


def test_staying_in_fp32_is_another_recommendation() -> None:
    best = RESULT.recommendation
    assert best is not None
    stays = msgspec.structs.replace(best, stay_in_fp32=True)
    (change,) = diff_scans(result_of(recommendation=best), result_of(recommendation=stays)).changes
    assert (change.kind, change.new) == ("recommendation", f"fp32 (rather than {change.old})")


def test_the_order_of_backends_is_no_difference() -> None:
    old, new = result_of(options={"backends": ["eager", "jit"]}), result_of(options={"backends": ["jit", "eager"]})
    assert diff_scans(old, new).warnings == []


def test_different_environments_cause_warnings() -> None:
    other = msgspec.structs.replace(
        RESULT,
        environment=RESULT.environment | {"torch": "2.14.0", "device": "xpu"},
        options={"budget": None, "seed": 0, "precisions": ["half", "bfloat16"]},
        target="other.py",
    )
    assert diff_scans(RESULT, other).warnings == [
        "target: net.py → other.py",
        "device: cpu → xpu",
        "torch: 2.13.0+cpu → 2.14.0",
        "option budget: 20.0 → –",
        "option precisions: – → half, bfloat16",
    ]


# -- rendering


DIFFERENT = diff_scans(
    result_of(run("half")), result_of(run("half", "error", gaps=[gap()], latency_ms=None), options={"seed": 1})
)


def test_json_holds_all_of_it() -> None:
    assert msgspec.json.decode(render(DIFFERENT, "json"), type=ScanDiff) == DIFFERENT


def test_markdown_shows_changes_and_warnings() -> None:
    shown = render(DIFFERENT, "md")
    assert "2 regressions" in shown
    assert "option budget" in shown
    assert "missing-kernel (new)" in shown


def test_markdown_of_thousands_of_changes_fits() -> None:
    many = [ScanChange(kind="gap", direction="worse", run="half", what=f"{i} " + "m" * 200) for i in range(2000)]
    shown = render(msgspec.structs.replace(DIFFERENT, changes=many, regressions=2000), "md")
    assert len(shown) <= 60_000
    assert "rows are not shown; the saved JSON has all" in shown


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_text_is_as_wide_as_the_terminal(width: int) -> None:
    found = diff_scans(RESULT, result_of(run("half", "ok", 1e-3), run("bfloat16", "nonfinite"), options={"seed": 1}))
    lines = text(diff_document(found), width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].startswith(verdict(found)[:30])
    words = " ".join(" ".join(lines).split())
    for phrase in ("Worse", "Better", "missing from the new scan", "The two scans ran under different conditions"):
        assert phrase in words


@pytest.mark.slow
def test_diff_prints_text_to_a_terminal_and_to_a_pipe(tmp_path: Path, call: Call) -> None:
    pty = pytest.importorskip("pty")
    path = tmp_path / "scan.json"
    RESULT.save(path)
    command = [sys.executable, "-m", "lowprec_check", "diff", str(path), str(path)]
    controller, terminal = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    subprocess.run(command, stdout=terminal, check=True, env=environment)
    os.close(terminal)
    shown = os.read(controller, 1 << 16).decode()
    os.close(controller)
    assert "No difference beyond noise" in shown
    assert "|" not in shown
    assert call("diff", path, path).stdout == render(diff_scans(RESULT, RESULT), "text")
    assert call("diff", path, path, "-f", "text").stdout == render(diff_scans(RESULT, RESULT), "text")


@pytest.mark.slow
def test_the_page_is_silent_and_accessible(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "diff.html"
    path.write_text(render(DIFFERENT, "html"), encoding="utf-8")
    with opened(browser, path) as page:
        assert "2 regressions" in page.inner_text(".verdict")
        axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
        assert [rule["id"] for rule in axe.run(page).response["violations"]] == []


@pytest.mark.slow
def test_a_narrow_page_does_not_break_words(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "diff.html"
    path.write_text(render(DIFFERENT, "html"), encoding="utf-8")
    with opened(browser, path, viewport={"width": 360, "height": 800}) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        heights = page.locator("table tbody th").evaluate_all("all => all.map((one) => one.offsetHeight)")
        assert max(heights) < 40


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(st.one_of(st.text(max_size=200), st.sampled_from(["<script>alert(1)</script>", "a|b\n|c", "x" * 10_000])))
def test_no_string_breaks_a_difference(nasty: str) -> None:
    found = diff_scans(RESULT, shared_result(nasty))
    for format_ in diff_formats():
        shown = render(found, format_)
        assert "<script>alert" not in shown or format_ != "html"
    assert all(
        line.count("|") - line.count("\\|") in (5, 6) for line in render(found, "md").splitlines() if line[:1] == "|"
    )


# -- the commands


def test_exit_codes_of_diff(tmp_path: Path, call: Call) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    result_of(run("half")).save(good)
    result_of(run("half", "error")).save(bad)
    assert call("diff", good, good).returncode == 0
    assert call("diff", bad, good).returncode == 0
    done = call("diff", good, bad)
    assert (done.returncode, "1 regression" in done.stdout) == (1, True)
    out = [tmp_path / f"d{suffix}" for suffix in (".md", ".html", ".json")]
    done = call("diff", good, bad, *(argument for file in out for argument in ("-o", file)))
    assert (done.returncode, done.stdout) == (1, "")
    assert [file.read_text(encoding="utf-8") for file in out] == [
        render(diff_scans(ScanResult.load(good), ScanResult.load(bad)), format_) for format_ in ("md", "html", "json")
    ]
    done = call("diff", good, tmp_path / "nothing.json")
    assert done.returncode == 2
    assert "lowprec-check scan TARGET --json FILE, or a coverage with: pytest --lowprec-coverage" in done.stderr
    assert call("diff", good, bad, "-o", tmp_path / "d.sarif").returncode == 2


@pytest.mark.parametrize(
    ("old", "new", "direction"),
    [
        ((16, 0), (16, 1), "worse"),
        ((4, 0), (64, 1), "other"),
        ((16, 1), (16, 0), "better"),
        ((64, 1), (4, 0), "other"),
        ((16, 1), (16, 2), None),
        ((0, 0), (16, 1), "other"),
    ],
)
def test_further_inputs_that_fail_are_a_difference(
    old: tuple[int, int], new: tuple[int, int], direction: str | None
) -> None:
    runs = [
        run("half", further_inputs=InputsTried(kind="drawn", tried=tried, failed=failed))
        for tried, failed in (old, new)
    ]
    assert changes(*runs) == ([("status", direction)] if direction else [])
