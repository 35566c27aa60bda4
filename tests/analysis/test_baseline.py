"""Baselines: when two findings count as the same, and how accepted findings change a scan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import Call
from shared_result import gap, run, shared_result

from lowprec_check.analysis import baseline
from lowprec_check.analysis.conclusion import asked_to_fail_on, failure
from lowprec_check.analysis.rules.registry import diagnose, rules
from lowprec_check.errors import UsageError
from lowprec_check.report.registry import render
from lowprec_check.schema.op_calls import OpCall, OpCalls, to_columns
from lowprec_check.schema.scan_result import Diagnostic, ScanResult
from lowprec_check.schema.verdict import ExceptionInfo

RESULT = shared_result()


def finding(**more: Any) -> Diagnostic:
    fields: dict[str, Any] = {
        "code": "LP101",
        "name": "missing-kernel",
        "severity": "error",
        "precision": "half",
        "module": "blocks.3.attn",
        "op": "aten.dot.default",
        "source": "net.py:41",
        "message": "\"dot\" not implemented for 'Half'",
    }
    return Diagnostic(**fields | more)


@pytest.mark.parametrize(
    "more",
    [
        {"source": "net.py:99"},
        {"module": "blocks.11.attn"},
        {"message": "other words, 17 of them"},
        {"calls": 7},
        {"severity": "note"},
        {"help": "do"},
    ],
)
def test_a_fingerprint_does_not_depend_on(more: dict[str, Any]) -> None:
    assert baseline.fingerprint(finding(**more)) == baseline.fingerprint(finding())


@pytest.mark.parametrize(
    "more",
    [
        {"code": "LP102"},
        {"precision": "bfloat16"},
        {"op": "aten.vdot.default"},
        {"module": "blocks.3.mlp"},
        {"source": "other.py:41"},
    ],
)
def test_a_fingerprint_depends_on(more: dict[str, Any]) -> None:
    assert baseline.fingerprint(finding(**more)) != baseline.fingerprint(finding())


def test_a_message_can_be_reworded() -> None:
    at = lambda message: baseline.fingerprint(finding(op=None, module=None, source=None, message=message))  # noqa: E731
    assert at("output error 3.1e-01, tolerance 5e-02") == at("output error 1.2e-05, tolerance 1e-02")
    assert at("output error 3.1e-01") == at("it differs by 3.1e-01")


@pytest.mark.parametrize(("status", "complete", "gone"), [("ok", True, 1), ("timeout", True, 0), ("error", False, 0)])
def test_what_was_not_looked_for_is_not_gone(status: str, complete: bool, gone: int) -> None:
    known = baseline.baseline_of(msgspec.structs.replace(RESULT, diagnostics=[finding()]))
    runs = [msgspec.structs.replace(each, status=status, complete=complete) for each in RESULT.runs]
    now = msgspec.structs.replace(RESULT, runs=runs, diagnostics=[])
    assert len(baseline.accept(now, known)[1]) == gone
    assert len(baseline.baseline_of(now, known).findings) == 1 - gone


def test_a_scan_that_ended_early_fails_when_it_is_decided_again() -> None:
    early = msgspec.structs.replace(RESULT, complete=False, diagnostics=[])
    assert not failure(asked_to_fail_on(msgspec.structs.replace(early, complete=True), "error")).fails
    assert failure(asked_to_fail_on(early, "error")).fails
    assert not failure(asked_to_fail_on(early, "never")).fails
    assert 'type="incomplete"' in render(asked_to_fail_on(early, "error"), "junit")


def test_targets_may_share_a_file() -> None:
    one, other = (msgspec.structs.replace(RESULT, target=f"{name}/model.py") for name in ("one", "other"))
    both = baseline.baseline_of(
        msgspec.structs.replace(other, diagnostics=[finding(code="LP102")]),
        baseline.baseline_of(msgspec.structs.replace(one, diagnostics=[finding()])),
    )
    assert {entry.target for entry in both.findings} == {"one/model.py", "other/model.py"}
    fixed = msgspec.structs.replace(one, diagnostics=[])
    assert [entry.code for entry in baseline.accept(fixed, both)[1]] == ["LP101"]


def test_what_is_told_by_errors_of_ops_is_not_gone_where_none_are_computed() -> None:
    known = baseline.baseline_of(msgspec.structs.replace(RESULT, diagnostics=[finding(code="LP302")]))
    runs = [msgspec.structs.replace(each, op_calls=OpCalls()) for each in RESULT.runs]
    assert len(baseline.accept(msgspec.structs.replace(RESULT, diagnostics=[]), known)[1]) == 1
    assert not baseline.accept(msgspec.structs.replace(RESULT, runs=runs, diagnostics=[]), known)[1]


def test_an_accepted_error_does_not_accept_nan() -> None:
    at = {"code": "LP301", "op": None, "module": None}
    small, large = ({"error": error, "limit": 0.01} for error in (0.02, 7.0))
    of_error = {baseline.fingerprint(finding(figures=figures, **at)) for figures in (small, large)}
    assert len(of_error) == 1
    assert baseline.fingerprint(finding(figures={"output": "output 0"}, **at)) not in of_error


def test_another_exception_of_the_users_is_not_accepted() -> None:
    def raised(text: str) -> Diagnostic:
        return finding(code="LP108", op=None, figures={"when": "", "error": text})

    first = baseline.fingerprint(raised("ValueError: 3 rows"))
    assert baseline.fingerprint(raised("ValueError: 4 rows")) == first
    texts = [f"RuntimeError: <C object at 0x{end}> of /tmp/x{end}/a.py" for end in ("7f01", "7fa8f7b331d0")]
    assert len({*map(baseline.fingerprint, map(raised, texts))}) == 1
    assert baseline.fingerprint(raised("RuntimeError: no mask")) != first


def test_a_baseline_accepts_its_own_scan(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    baseline.save(baseline.baseline_of(RESULT), path)
    known = baseline.load(path)
    marked, stale = baseline.accept(RESULT, known)
    assert {diagnostic.accepted for diagnostic in marked.diagnostics} == {True}
    assert stale == []
    text = path.read_text()
    assert ":23" not in text
    assert path.read_bytes() == (baseline.save(baseline.baseline_of(RESULT), path), path.read_bytes())[1]
    fewer = msgspec.structs.replace(RESULT, diagnostics=[*RESULT.diagnostics[1:], finding()])
    marked, stale = baseline.accept(fewer, known)
    assert [d.accepted for d in marked.diagnostics].count(False) == 1
    assert [entry.code for entry in stale] == ["LP101"]


def test_findings_of_precisions_not_scanned_stay_in_the_baseline() -> None:
    known = baseline.baseline_of(RESULT)
    half = [d for d in RESULT.diagnostics if d.precision == "half"]
    only = msgspec.structs.replace(RESULT, runs=[run("half")], diagnostics=half[1:])
    stale = baseline.accept(only, known)[1]
    assert [entry.fingerprint for entry in stale] == [baseline.fingerprint(half[0])]
    updated = baseline.baseline_of(only, known)
    assert known.fingerprints - updated.fingerprints == {baseline.fingerprint(half[0])}
    assert baseline.baseline_of(RESULT, updated) == known


def test_findings_of_codes_not_selected_stay_in_the_baseline() -> None:
    known = baseline.baseline_of(RESULT)
    for options in ({"select": ["LP1"]}, {"ignore": ["LP2", "LP3", "LP4", "LP9"]}):
        found = [d for d in RESULT.diagnostics if d.code.startswith("LP1")]
        only = msgspec.structs.replace(RESULT, options=options, diagnostics=found)
        assert baseline.accept(only, known)[1] == []
        assert baseline.baseline_of(only, known) == known


def slow_kernel() -> Diagnostic:
    return finding(code="LP106", name="slow-kernel", severity="warning", source=None, timed=True)


def test_a_baseline_does_not_depend_on_time() -> None:
    quiet = msgspec.structs.replace(RESULT, diagnostics=[d for d in RESULT.diagnostics if not d.timed])
    busy = msgspec.structs.replace(quiet, diagnostics=[*quiet.diagnostics, slow_kernel()])
    known = baseline.baseline_of(quiet)
    assert baseline.baseline_of(busy) == known
    assert baseline.baseline_of(busy, known) == known
    for result in (quiet, busy):
        marked, stale = baseline.accept(result, known)
        assert (stale, {d.timed for d in marked.diagnostics if not d.accepted} - {True}) == ([], set())


def test_a_timed_entry_of_an_older_baseline_is_ignored() -> None:
    entry = baseline.baseline_of(msgspec.structs.replace(RESULT, diagnostics=[finding(code="LP106")])).findings
    assert [each.code for each in entry] == ["LP106"]  # written before findings said that they rest on times
    known = baseline.Baseline(findings=entry)
    marked, stale = baseline.accept(msgspec.structs.replace(RESULT, diagnostics=[slow_kernel()]), known)
    assert ([d.accepted for d in marked.diagnostics], stale) == ([False], [])
    assert baseline.accept(msgspec.structs.replace(RESULT, diagnostics=[]), known)[1] == []


@pytest.mark.parametrize(("with_baseline", "fails"), [(False, True), (True, False)])
def test_findings_that_rest_on_times_fail_only_without_a_baseline(with_baseline: bool, fails: bool) -> None:
    timed = msgspec.structs.replace(RESULT, diagnostics=[slow_kernel()])
    assert timed.recommendation is not None
    assert failure(asked_to_fail_on(timed, "warning", with_baseline=with_baseline)).fails is fails
    new = msgspec.structs.replace(timed, diagnostics=[slow_kernel(), finding()])
    assert failure(asked_to_fail_on(new, "warning", with_baseline=with_baseline)).fails


def test_findings_say_whether_they_rest_on_times() -> None:
    """Of an op that is too slow, of a run over its budget, and of the further inputs that there was time for; not of a
    crash, and not of an exception.
    """
    assert [code for code, rule in rules().items() if rule.timed] == ["LP106", "LP307"]
    slow = OpCall(op="a.slow.default", time_ms=190.0, reference_ms=1.0)
    emulated_calls = [OpCall(op=op, outcome="emulated") for op in ("a.slow.default", "a.bad.default")]
    calls = to_columns([slow, *emulated_calls])
    emulated = {"a.slow.default": "too slow", "a.bad.default": "it crashes"}
    crash = gap(op="a.bad.default", kind="crash")
    half = run(
        "half",
        latency_ms=100.0,
        op_calls=calls,
        emulated=emulated,
        gaps=[crash],
        complete=False,
        incomplete_because="over budget",
    )
    bf16 = run("bfloat16", "error", complete=False, stopped_by=ExceptionInfo(type="ValueError", message="no"))
    found = diagnose(msgspec.structs.replace(RESULT, runs=[half, bf16]), ("LP106", "LP9"))
    timed = {(d.code, d.op or d.precision): d.timed for d in found if d.code != "LP901"}
    assert timed == {
        ("LP106", "a.slow.default"): True,
        ("LP903", "a.slow.default"): True,
        ("LP903", "a.bad.default"): False,
        ("LP905", "half"): True,
        ("LP905", "bfloat16"): False,
    }


@pytest.mark.parametrize(
    ("status", "judged", "advice"),
    [("timeout", False, "--budget"), ("ok", True, "--thorough"), ("error", False, "fix what fails in this run")],
)
def test_what_makes_a_scan_run_a_slow_kernel_depends_on_why_it_was_left_out(
    status: str, judged: bool, advice: str
) -> None:
    calls = to_columns([OpCall(op="a.slow.default", outcome="emulated")])
    half = run("half", status, op_calls=calls, emulated={"a.slow.default": "slow"}, judged_by_one_call=judged)
    [found] = diagnose(msgspec.structs.replace(RESULT, runs=[half]), ("LP903",))
    assert advice in (found.help or "")


@pytest.mark.parametrize(
    "data", [b"{", b"[]", b'{"schema": 1}', b'{"schema": 1, "findings": [{"code": 3}]}', b'{"schema": 9}', b'{"x": 1}']
)
def test_invalid_baselines_are_rejected(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    path.write_bytes(data)
    with pytest.raises(UsageError, match="baseline"):
        baseline.load(path)


@pytest.mark.slow
def test_scan_with_a_baseline(tmp_path: Path, call: Call) -> None:
    path, saved, sarif = tmp_path / "baseline.json", tmp_path / "scan.json", tmp_path / "scan.sarif"
    scan = ["scan", "examples/whitening.py", "-q", "-p", "half", "-p", "autocast-fp16", "--fail-on", "error"]
    assert call(*scan).returncode == 1
    assert call(*scan, "--baseline", path).returncode == 2
    assert call(*scan, "--update-baseline").returncode == 2
    done = call(*scan, "--baseline", path, "--update-baseline")
    assert (done.returncode, "findings accepted" in done.stderr) == (0, True)
    if Path("/dev/full").exists():
        lost = call(*scan, "--baseline", "/dev/full", "--update-baseline", "--json", tmp_path / "kept.json")
        assert (lost.returncode, (tmp_path / "kept.json").exists(), bool(lost.stdout)) == (2, True, True)
    done = call(*scan, "--baseline", path, "--json", saved, "--report", sarif)
    assert (done.returncode, done.stderr) == (0, "")
    assert "accepted by the baseline" in done.stdout
    found = ScanResult.load(saved).diagnostics
    assert {diagnostic.accepted for diagnostic in found if not diagnostic.timed} == {True}
    entries = json.loads(sarif.read_text())["runs"][0]["results"]
    assert {entry["ruleId"] for entry in entries} <= {d.code for d in found if d.timed}
    entries = json.loads(path.read_text())
    entries["findings"] = [entry for entry in entries["findings"] if entry["op"] != "torch.quantile"]
    path.write_text(json.dumps(entries))
    assert call(*scan, "--baseline", path).returncode == 1


def test_a_message_in_the_file_has_no_figures() -> None:
    text = "sort picked a different element than fp32 135 of 576 times (23.4 %), float16 in x2"
    assert (
        baseline.without_numbers(text) == "sort picked a different element than fp32 N of N times (N %), float16 in x2"
    )
