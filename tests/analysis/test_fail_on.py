"""Whether a scan fails: the exit code and the JUnit report say the same, whatever was found, asked for and accepted."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, get_args
from xml.etree import ElementTree

import msgspec
import pytest
from conftest import Call
from hypothesis import given, settings
from hypothesis import strategies as st
from predicted_result import predicted_result
from shared_result import run, shared_result
from training_result import training_result

from lowprec_check.analysis.baseline import accept, baseline_of
from lowprec_check.analysis.conclusion import asked_to_fail_on, failure
from lowprec_check.analysis.diff import diff_scans
from lowprec_check.report.registry import render
from lowprec_check.schema.options import FailOn
from lowprec_check.schema.scan_result import Diagnostic, ScanResult, Severity
from lowprec_check.schema.verdict import Status

RESULTS = {"measured": shared_result(), "trained": training_result(), "predicted": predicted_result()}
SEVERITIES: tuple[Severity, ...] = ("note", "warning", "error")


def exit_code(result: ScanResult, fail_on: str, with_baseline: bool) -> int:
    """1 if nothing passes, or for a new finding of that severity; with a baseline, findings from times are exempt."""
    if fail_on == "never":
        return 0
    worst = max(
        (
            SEVERITIES.index(d.severity)
            for d in result.diagnostics
            if not d.accepted and not (with_baseline and d.timed)
        ),
        default=-1,
    )
    over = fail_on in SEVERITIES and worst >= SEVERITIES.index(fail_on)  # type: ignore[arg-type]
    return int(result.recommendation is None or over)


def junit_of(result: ScanResult) -> ElementTree.Element:
    return ElementTree.fromstring(render(result, "junit"))[0]


def check(result: ScanResult, fail_on: FailOn, with_baseline: bool) -> None:
    asked = asked_to_fail_on(result, fail_on, with_baseline=with_baseline)
    suite = junit_of(asked)
    counts = {name: int(suite.get(name, "")) for name in ("tests", "failures", "errors", "skipped")}
    cases = suite.findall("testcase")
    outcomes = [[child.tag for child in case if child.tag != "system-out"] for case in cases]
    assert all(len(outcome) <= 1 for outcome in outcomes)
    assert counts["tests"] == len(cases) == len(result.runs) + 1
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        assert counts[name] == outcomes.count([tag])
    wanted = exit_code(result, fail_on, with_baseline)
    assert (counts["failures"] + counts["errors"] > 0) == failure(asked).fails == bool(wanted)


diagnostics = st.builds(
    Diagnostic,
    code=st.sampled_from(["LP101", "LP106", "LP202", "LP301"]),
    name=st.just("name"),
    severity=st.sampled_from(SEVERITIES),
    precision=st.sampled_from([None, "half", "bfloat16", "missing"]),
    backend=st.sampled_from(["eager", "inductor"]),
    op=st.sampled_from([None, "aten.mm.default"]),
    message=st.text(max_size=10),
    accepted=st.booleans(),
    timed=st.booleans(),
)
statuses = st.sampled_from(get_args(Status))
results = st.builds(
    lambda found, half, bf16, base, passes: msgspec.structs.replace(
        base,
        runs=[base.runs[0], run("half", half, device="cpu"), run("bfloat16", bf16, device="cpu")],
        diagnostics=found,
        recommendation=base.recommendation if passes else None,
    ),
    st.lists(diagnostics, max_size=5),
    statuses,
    statuses,
    st.just(RESULTS["measured"]),
    st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(results, st.sampled_from(get_args(FailOn)), st.booleans())
def test_junit_fails_if_and_only_if_the_exit_code_is_1(
    result: ScanResult, fail_on: FailOn, with_baseline: bool
) -> None:
    check(result, fail_on, with_baseline)


@pytest.mark.parametrize("kind", RESULTS)
def test_of_scans_with_training_and_predictions_too(kind: str) -> None:
    result = RESULTS[kind]
    accepted, _ = accept(result, baseline_of(result))
    nothing = msgspec.structs.replace(result, recommendation=None)
    for one, fail_on, with_baseline in itertools.product((result, accepted, nothing), get_args(FailOn), (True, False)):
        check(one, fail_on, with_baseline)


def test_a_run_that_fails_alone_is_skipped_with_its_reason() -> None:
    suite = junit_of(RESULTS["measured"])
    half = next(case for case in suite.findall("testcase") if case.get("name") == "half on cpu")
    assert [child.tag for child in half] == ["skipped", "system-out"]
    assert half[0].get("type") == "error"
    assert "does not fail for it (--fail-on no-pass)" in half[0].get("message", "")
    assert "LP101" in (half[1].text or "")


def test_crashes_are_errors_and_accepted_findings_do_not_fail() -> None:
    result = asked_to_fail_on(RESULTS["measured"], "error")
    suite = junit_of(result)
    tags = {case.get("name"): [child.tag for child in case][:1] for case in suite.findall("testcase")}
    assert tags["half · inductor on cpu"] == ["error"]
    assert tags["half on cpu"] == tags["bfloat16 on cpu"] == ["failure"]
    accepted, _ = accept(result, baseline_of(result))
    assert {junit_of(accepted).get(name) for name in ("failures", "errors")} == {"0"}


def test_a_finding_about_no_run_fails_the_verdict() -> None:
    found = [msgspec.structs.replace(RESULTS["measured"].diagnostics[0], precision=None)]
    result = asked_to_fail_on(msgspec.structs.replace(RESULTS["measured"], diagnostics=found), "error")
    failed = [case.get("name") for case in junit_of(result).findall("testcase") if case.find("failure") is not None]
    assert failed == ["verdict"]


def test_what_decides_the_exit_code_is_no_difference() -> None:
    result: Any = RESULTS["measured"]
    assert diff_scans(result, asked_to_fail_on(result, "error", with_baseline=True)).warnings == []


@pytest.mark.parametrize(("fail_on", "code"), [(None, 0), ("no-pass", 0), ("warning", 1), ("never", 0)])
def test_report_decides_again(fail_on: str | None, code: int, tmp_path: Path, call: Call) -> None:
    saved, junit = tmp_path / "scan.json", tmp_path / "r.xml"
    RESULTS["measured"].save(saved)
    option = () if fail_on is None else ("--fail-on", fail_on)
    assert call("report", saved, "-o", junit, *option).returncode == code
    suite = ElementTree.fromstring(junit.read_text(encoding="utf-8"))[0]
    assert (suite.get("failures") != "0") == bool(code)


def test_report_follows_what_the_scan_was_asked(tmp_path: Path) -> None:
    asked = asked_to_fail_on(RESULTS["measured"], "note", with_baseline=True)
    path = tmp_path / "scan.json"
    asked.save(path)
    assert failure(ScanResult.load(path)) == failure(asked)
    assert failure(asked).fails
