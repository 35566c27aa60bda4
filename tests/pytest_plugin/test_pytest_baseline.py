"""A baseline of ``--lowprec-coverage`` that runs update: tests that fail, crash or do not run take nothing from it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from conftest import Call
from hypothesis import given
from hypothesis import strategies as st

from lowprec_check.analysis.saved_coverage import Coverage, OpUse, coverage_from_json, diff_coverages, indexed, updated
from lowprec_check.catalog.aten import AtenSupport

OK, FAILED = pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED
WITH_WORKERS = pytest.mark.slow

# -- the function that updates a saved coverage

STATES = {"inv": "none", "qr": "none", "fold": "some", "exp": "all", "eig": None}
"""What the catalog knows of some operators; a call of the last one is tried."""


class UsingTest(NamedTuple):
    """A test: what it calls in this order, and whether its call of ``eig`` fails in the dtype."""

    calls: list[str]
    eig_fails: bool


class Outcome(NamedTuple):
    """How a test went: the number of calls until it failed, ``None`` if it passed, -1 if it was not selected."""

    failed_after: int | None
    crashed: bool


PASSED, DESELECTED = Outcome(None, False), Outcome(-1, False)
tests = st.lists(
    st.builds(UsingTest, st.lists(st.sampled_from([*STATES]), max_size=4), st.booleans()), min_size=1, max_size=4
)
failures = st.builds(Outcome, st.integers(0, 3), st.booleans())


def name_of(number: int) -> str:
    return f"test_net.py::test_{number}"


def recorded(suite: list[UsingTest], outcomes: list[Outcome]) -> Coverage:
    """What a run of the suite records. A process that crashed takes the calls with it that its tests kept."""
    uses: dict[str, dict[str, None]] = {}
    incomplete, ran, kept_calls = {}, [], []
    for number, (test, (failed_after, crashed)) in enumerate(zip(suite, outcomes, strict=True)):
        if failed_after == -1:
            continue
        ran.append(name_of(number))
        if failed_after is not None:
            incomplete[name_of(number)] = "crashed" if crashed else "failed"
        for op in test.calls[:failed_after]:
            uses.setdefault(op, {})[name_of(number)] = None
            if op == "eig":
                kept_calls.append(test.eig_fails)
    kept_calls = [] if any(outcome.crashed for outcome in outcomes) else kept_calls
    index = indexed(ran, uses)
    ops = []
    for op in sorted(uses):
        tried = op == "eig" and bool(kept_calls)
        state: Any = ("none" if kept_calls[0] else "all") if tried else STATES[op]
        kind = "missing-kernel" if state in ("none", "some") else None
        support = AtenSupport(state=state, kind=kind, message=kind and "no kernel", tried_here=tried)
        lines = ["net.py:3"] if kind else []
        ops.append(OpUse(op=f"aten.{op}.default", tests=index[op], support={"float16": support}, sources=lines))
    return Coverage(
        device="cpu",
        torch="2.13",
        evidence="measured",
        recorded_torch="2.13.0",
        dtypes=["float16"],
        tests=ran,
        incomplete=incomplete,
        ops=ops,
    )


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[UsingTest], list[list[Outcome]]]:
    """A suite and the outcomes of its runs; the first selects all tests, though some may fail."""
    suite = draw(tests)
    outcome = st.one_of(st.just(PASSED), failures)
    first = draw(st.lists(outcome, min_size=len(suite), max_size=len(suite)))
    later = st.lists(st.one_of(outcome, st.just(DESELECTED)), min_size=len(suite), max_size=len(suite))
    return suite, [first, *draw(st.lists(later, max_size=4))]


@given(sequences())
def test_after_any_runs_a_healthy_run_has_no_new_gap(sequence: tuple[list[UsingTest], list[list[Outcome]]]) -> None:
    suite, runs = sequence
    saved, completed = recorded(suite, runs[0]), set[str]()
    for outcomes in runs:
        before = saved
        saved = updated(saved, recorded(suite, outcomes))
        saved = coverage_from_json(saved.to_json())
        for number, outcome in enumerate(outcomes):
            completed |= {name_of(number)} if outcome == PASSED else set()
            if outcome != PASSED and name_of(number) in before.tests:  # its entries are as they were
                assert ops_of(saved, name_of(number)) == ops_of(before, name_of(number))
    for number, test in enumerate(suite):
        if name_of(number) in completed:
            assert ops_of(saved, name_of(number)) == {f"aten.{op}.default" for op in test.calls}
    assert saved.never_complete == {name_of(number) for number in range(len(suite))} - completed
    healthy = recorded(suite, [PASSED] * len(suite))
    found = diff_coverages(saved, healthy)
    assert not found.new_gaps
    if not saved.never_complete:
        assert not found.first_gaps
        gaps = {use.op for use in healthy.gaps}
        assert gaps <= {use.op for use in saved.gaps} <= gaps | {"aten.eig.default"}  # of which another call was tried
    assert updated(saved, healthy) == healthy


def ops_of(found: Coverage, test: str) -> set[str]:
    return {use.op for use in found.ops if test in found.tests_of(use)}


SUITE = [UsingTest(["inv", "exp"], False), UsingTest(["qr", "eig"], True), UsingTest(["exp"], False)]


def test_an_operator_that_no_longer_exists_goes_with_its_last_test() -> None:
    whole = recorded(SUITE, [PASSED] * 3)
    without = recorded(SUITE, [PASSED, DESELECTED, PASSED])
    assert updated(whole, without) == whole
    assert updated(whole, without, removed={name_of(1)}) == without
    fixed = recorded([UsingTest(["exp"], False), *SUITE[1:]], [PASSED] * 3)
    assert updated(whole, fixed) == fixed


def test_what_the_catalog_knows_today_counts_for_what_did_not_run() -> None:
    whole = recorded(SUITE, [PASSED] * 3)
    failed = recorded(SUITE, [PASSED, Outcome(0, False), PASSED])
    today = {"aten.qr.default": "all", "aten.eig.default": None}
    both = updated(whole, failed, look_up=lambda use, _: AtenSupport(state=today[use.op]))  # type: ignore[arg-type]
    assert [use.op for use in both.gaps] == ["aten.eig.default", "aten.inv.default"]  # a call of eig was tried


def test_a_difference_does_not_call_gaps_gone_that_were_not_checked(tmp_path: Path, call: Call) -> None:
    old, new = recorded(SUITE, [PASSED] * 3), recorded(SUITE, [PASSED, Outcome(0, True), PASSED])
    for name, found in (("old", old), ("new", new), ("part", recorded(SUITE, [DESELECTED, PASSED, PASSED]))):
        (tmp_path / f"{name}.json").write_bytes(found.to_json())
    done = call("diff", tmp_path / "old.json", tmp_path / "new.json", "-f", "text")
    assert done.returncode == 0
    assert done.stdout.startswith("No new gap\n")
    assert "Gaps that are gone" not in done.stdout
    assert "Gaps of tests without a complete run in the new one (2)\n      eig\n      qr\n" in done.stdout
    assert "Tests incomplete in the new one (1)\n      test_net.py::test_1 (crashed)" in done.stdout
    done = call("diff", tmp_path / "new.json", tmp_path / "old.json", "-f", "md")
    assert done.returncode == 0
    assert "Gaps of tests without a complete run in the old one" in done.stdout
    found = json.loads(call("diff", tmp_path / "old.json", tmp_path / "part.json", "-f", "json").stdout)
    assert found["gone_gaps"] == []
    assert [change["op"] for change in found["unchecked_gaps"]] == ["aten.inv.default"]


def test_numbers_of_an_incomplete_test_are_not_new() -> None:
    """An op that a complete test called with integers only, and one that failed before with floating-point numbers."""
    whole = recorded([UsingTest(["inv"], False), UsingTest(["inv"], False)], [PASSED] * 2)
    [use] = whole.ops
    integers = {"float16": AtenSupport(state=None, applies=False)}
    partly = msgspec.structs.replace(use, tests=[1], numbers="integer", support=integers)
    old = msgspec.structs.replace(whole, incomplete={name_of(0): "failed"}, ops=[partly])
    assert [change.op for change in diff_coverages(old, whole).first_gaps] == ["aten.inv.default"]
    assert [change.op for change in diff_coverages(msgspec.structs.replace(old, incomplete={}), whole).new_gaps] == [
        "aten.inv.default"
    ]


# -- runs of pytest

CONFTEST = """
import os
import pytest, torch

def go_wrong(test):
    how = os.environ.get(f"WRONG_{test}")
    if how == "fail": assert 0
    if how == "crash": os._exit(3)
    if how == "interrupt": raise KeyboardInterrupt
    if how in ("skip", "xfail"): getattr(pytest, how)("not today")

@pytest.fixture(scope="session")
def shared():
    yield torch.linalg.cholesky(torch.eye(3))
    torch.linalg.det(torch.eye(3))

@pytest.fixture
def before(request):
    go_wrong(f"{request.node.name}_setup")
    yield
    go_wrong(f"{request.node.name}_teardown")
"""
FILE = """
import pytest, torch
from conftest import go_wrong
pytestmark = pytest.mark.usefixtures("before")

def test_inv(shared): go_wrong("test_inv"); torch.linalg.inv(torch.eye(3))
def test_qr(shared): go_wrong("test_qr"); torch.linalg.qr(torch.eye(3))
def test_exp(): go_wrong("test_exp"); torch.ones(2).exp()
"""
GAPS = {
    "_linalg_det": ["test_inv", "test_qr"],
    "linalg_cholesky_ex": ["test_inv", "test_qr"],
    "linalg_inv_ex": ["test_inv"],
    "linalg_qr": ["test_qr"],
}


@pytest.fixture
def suite(project: pytest.Pytester) -> pytest.Pytester:
    """A suite with its baseline ``base.json``."""
    project.makeconftest(CONFTEST)
    project.makepyfile(test_suite=FILE)
    run(project, "--lowprec-report", "base.json").assert_outcomes(passed=3)
    assert gaps() == GAPS
    return project


def run(suite: pytest.Pytester, *options: str, crashes: bool = False) -> pytest.RunResult:
    start = suite.runpytest_subprocess if crashes else suite.runpytest
    return start("--lowprec-coverage", "half", *options)


def gaps(file: str = "base.json") -> dict[str, list[str]]:
    """The tests of each gap in a file."""
    found = coverage_from_json(Path(file).read_bytes())
    uses = sorted(found.gaps, key=lambda use: use.op)
    return {
        use.name: [test.partition("::test_")[2] and test.partition("::")[2] for test in found.tests_of(use)]
        for use in uses
    }


WAYS = [
    ("--lowprec-report", "base.json"),
    ("--lowprec-report", "base.json", "--lowprec-baseline", "base.json"),
    ("--lowprec-report", "new.json", "--lowprec-baseline", "base.json"),
]


WRONG: list[tuple[dict[str, str], tuple[str, ...], dict[str, str]]] = [
    ({"test_inv": "fail"}, (), {"test_inv": "failed"}),
    ({"test_inv_setup": "fail"}, (), {"test_inv": "error in setup"}),
    ({"test_inv_teardown": "fail"}, (), {"test_inv": "error in teardown"}),
    ({"test_inv": "skip", "test_qr": "xfail"}, (), {"test_qr": "xfailed"}),
    ({"test_inv": "fail"}, ("-x",), {"test_inv": "failed", "test_qr": "not run", "test_exp": "not run"}),
    ({}, ("-k", "exp"), {}),
    ({}, ("--deselect", "test_suite.py::test_inv"), {}),
    ({}, ("test_suite.py::test_qr",), {}),
]
CUT_SHORT, SELECTED = WRONG[4], WRONG[5]


@pytest.mark.parametrize(
    ("report", "wrong", "options", "incomplete"),
    [
        *((WAYS[0], *wrong) for wrong in WRONG),
        *((way, *wrong) for way in WAYS[1:] for wrong in (CUT_SHORT, SELECTED)),
    ],
    ids=str,
)
def test_what_a_run_does_not_complete_stays_in_the_baseline(
    suite: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    report: tuple[str, ...],
    wrong: Mapping[str, str],
    options: tuple[str, ...],
    incomplete: Mapping[str, str],
) -> None:
    before = Path("base.json").read_bytes()
    for test, how in wrong.items():
        monkeypatch.setenv(f"WRONG_{test}", how)
    result = run(suite, *report, "-p", "no:randomly", *options)
    assert gaps(report[1]) == GAPS
    saved = json.loads(Path(report[1]).read_text())
    assert saved["incomplete"] == {f"test_suite.py::{test}": why for test, why in incomplete.items()}
    if not incomplete:
        assert Path(report[1]).read_bytes() == before
    for test, why in incomplete.items():
        assert f"test_suite.py::{test}" in result.stdout.str()
        assert f"\n  {why}: " in result.stdout.str()
    for test in wrong:
        monkeypatch.delenv(f"WRONG_{test}")
    shutil.copy(report[1], "given.json")
    healthy = run(
        suite, "--lowprec-baseline", "given.json", "--lowprec-fail-on", "new", "--lowprec-report", "given.json"
    )
    assert healthy.ret == OK
    assert Path("given.json").read_bytes() == before


def test_a_failing_test_does_not_hide_a_new_gap(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_suite=FILE + "\ndef test_svd(): torch.linalg.svd(torch.eye(3)); pytest.xfail('why')\n")
    result = run(suite, "--lowprec-baseline", "base.json", "--lowprec-fail-on", "new", "--lowprec-report", "base.json")
    assert result.ret == FAILED
    assert "1 new gap, compared with base.json" in result.stdout.str()
    assert gaps() == GAPS


def test_a_baseline_made_while_a_test_failed(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it used is not known, so its gaps are not new when it passes; those of others are."""
    project.makeconftest(CONFTEST)
    project.makepyfile(test_suite=FILE)
    monkeypatch.setenv("WRONG_test_inv", "fail")
    run(project, "--lowprec-report", "base.json").assert_outcomes(passed=2, failed=1)
    assert [*gaps()] == ["_linalg_det", "linalg_cholesky_ex", "linalg_qr"]
    monkeypatch.delenv("WRONG_test_inv")
    compare = ("--lowprec-baseline", "base.json", "--lowprec-fail-on", "new", "--lowprec-report", "base.json")
    result = run(project, *compare)
    assert result.ret == OK
    note = "Not compared, since base.json has no complete run of the tests: 1 gap (linalg_inv_ex)."
    assert note in result.stdout.str()
    assert gaps() == GAPS
    project.makepyfile(test_suite=FILE.replace("torch.ones(2).exp()", "torch.linalg.svd(torch.eye(2))"))
    assert run(project, *compare).ret == FAILED


SKIPS = """
import os, unittest
import pytest, torch

def stop():
    if "STOP" in os.environ: pytest.skip("not today")
    torch.linalg.qr(torch.eye(3))

class TestCase(unittest.TestCase):
    def test_sub(self):
        with self.subTest(): stop()

def test_fixture(subtests):
    with subtests.test(): stop()

@pytest.fixture
def own():
    yield
    stop()
def test_teardown(own): pass

@pytest.fixture(scope="class")
def shared():
    yield
    stop()
class TestClass:
    def test_first(self, shared): pass
    def test_last(self, shared): pass
"""


@pytest.mark.skipif(not hasattr(pytest, "Subtests"), reason="the fixture subtests is built into pytest 9")
def test_what_a_test_skips_in_part_stays(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a test passes, but its subtest, or the rest of a teardown, did not run."""
    project.makepyfile(test_suite=SKIPS)
    run(project, "--lowprec-report", "base.json").assert_outcomes(passed=5)
    in_classes = ["TestCase::test_sub", "TestClass::test_first", "TestClass::test_last"]
    assert gaps() == {"linalg_qr": [*in_classes, "test_fixture", "test_teardown"]}
    before = Path("base.json").read_bytes()
    monkeypatch.setenv("STOP", "1")
    run(project, "--lowprec-report", "base.json")
    saved = coverage_from_json(Path("base.json").read_bytes())
    assert [len(saved.tests_of(use)) for use in saved.gaps] == [5]
    assert {why for test, why in saved.incomplete.items() if "first" not in test} == {"skipped in part"}
    assert saved.incomplete["test_suite.py::TestClass::test_first"] == "shared fixture not torn down"
    monkeypatch.delenv("STOP")
    run(project, "--lowprec-report", "base.json")
    assert Path("base.json").read_bytes() == before


def test_reruns_are_incomplete(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pytest-rerunfailures does: the report that failed is logged as ``rerun``, and that of the teardown is not."""
    rerun = """
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item, nextitem):
    for attempt in range(2):
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        for report in reports:
            if attempt == 0 and report.failed:
                report.outcome = "rerun"
                os.environ.pop(f"WRONG_{item.name}")
            item.ihook.pytest_runtest_logreport(report=report)
            if report.outcome == "rerun":
                break
        else:
            return True
    return True

def pytest_report_teststatus(report):
    if report.outcome == "rerun": return "rerun", "R", "RERUN"
"""
    suite.makeconftest(CONFTEST + rerun)
    monkeypatch.setenv("WRONG_test_qr", "fail")
    before = Path("base.json").read_bytes()
    run(suite, "--lowprec-report", "base.json").assert_outcomes(passed=3)
    assert json.loads(Path("base.json").read_text())["incomplete"] == {"test_suite.py::test_qr": "rerun"}
    assert gaps() == GAPS
    run(suite, "--lowprec-report", "base.json").assert_outcomes(passed=3)
    assert Path("base.json").read_bytes() == before


def test_an_interrupted_run_takes_nothing(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Path("base.json").read_bytes()
    monkeypatch.setenv("WRONG_test_qr", "interrupt")
    coverage = ("--lowprec-coverage", "half", "--lowprec-report", "base.json")
    assert suite.runpytest_inprocess(*coverage, no_reraise_ctrlc=True).ret == pytest.ExitCode.INTERRUPTED
    assert gaps() == GAPS
    incomplete = json.loads(Path("base.json").read_text())["incomplete"]
    assert incomplete["test_suite.py::test_qr"] == "interrupted"
    assert incomplete["test_suite.py::test_inv"] == "shared fixture not torn down"
    Path("base.json").write_bytes(before)
    monkeypatch.setenv("WRONG_test_qr", "crash")
    assert run(suite, "--lowprec-report", "base.json", crashes=True).ret == 3
    assert Path("base.json").read_bytes() == before


@WITH_WORKERS
def test_a_crashed_worker_takes_nothing(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Path("base.json").read_bytes()
    monkeypatch.setenv("WRONG_test_qr", "crash")
    for options in (("-n2",), ("-n1", "-x")):
        result = run(suite, "--lowprec-report", "base.json", *options)
        assert result.ret in (FAILED, pytest.ExitCode.INTERRUPTED)
        assert json.loads(Path("base.json").read_text())["incomplete"]["test_suite.py::test_qr"] == "crashed"
        assert "crashed: test_suite.py::test_qr" in result.stdout.str()
        assert gaps() == GAPS
    monkeypatch.delenv("WRONG_test_qr")
    assert run(suite, "--lowprec-report", "base.json").ret == OK
    assert Path("base.json").read_bytes() == before


# -- tests that no longer exist

RENAMED = FILE.replace("test_qr(", "test_other(").replace("torch.linalg.qr", "torch.linalg.svd")


@pytest.mark.parametrize("workers", [(), pytest.param(("-n1",), marks=pytest.mark.slow)], ids=str)
def test_a_test_that_was_removed_goes_when_the_whole_suite_was_collected(
    suite: pytest.Pytester, workers: tuple[str, ...]
) -> None:
    suite.makepyfile(test_more="import torch\ndef test_sin(): torch.ones(2).sin()\n")
    run(suite, "--lowprec-report", "base.json")
    suite.makepyfile(test_suite=RENAMED)
    of_all = {gap: ["test_inv", "test_other", "test_qr"] for gap in ("_linalg_det", "linalg_cholesky_ex")}
    kept = GAPS | {"_linalg_svd": ["test_other"]} | of_all
    parts = (("test_suite.py",), ("--ignore", "test_more.py"), ("test_suite.py::test_other", "test_more.py"))
    for options in parts[-1:] if workers else parts:
        run(suite, "--lowprec-report", "base.json", *options, *workers)
        assert gaps() == kept, options
    run(suite, "--lowprec-report", "base.json", "-k", "sin")
    assert [*gaps()] == ["_linalg_det", "_linalg_svd", "linalg_cholesky_ex", "linalg_inv_ex"]
    suite.path.joinpath("test_more.py").unlink()
    run(suite, "--lowprec-report", "base.json", *workers)
    assert "aten.sin.default" not in Path("base.json").read_text()


def test_nothing_goes_if_a_file_could_not_be_collected(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_more="import torch\ndef test_sin(): torch.ones(2).sin()\n")
    run(suite, "--lowprec-report", "base.json")
    before = gaps()
    for broken in ("import nothing_of_that_name", "import pytest; pytest.skip('why', allow_module_level=True)"):
        suite.makepyfile(test_suite=RENAMED, test_more=broken)
        run(suite, "--lowprec-report", "base.json", "--continue-on-collection-errors")
        assert "aten.sin.default" in Path("base.json").read_text()
        assert set(before) <= set(gaps())


def test_parameters_that_no_longer_exist_go(project: pytest.Pytester) -> None:
    source = """
        import pytest, torch

        @pytest.mark.parametrize("name", ["inv", "NAME"])
        def test_it(name): getattr(torch.linalg, name)(torch.eye(3))
        """
    for name in ("qr", "svd"):
        project.makepyfile(test_suite=source.replace("NAME", name))
        run(project, "--lowprec-report", "base.json")
    assert gaps() == {"_linalg_svd": ["test_it[svd]"], "linalg_inv_ex": ["test_it[inv]"]}


def test_a_baseline_of_another_root_stays(suite: pytest.Pytester) -> None:
    folder = suite.mkdir("below")
    for name in ("conftest.py", "test_suite.py"):
        shutil.copy(name, folder / name)
    run(suite, "--lowprec-report", "base.json", f"--rootdir={folder}", str(folder))
    saved = json.loads(Path("base.json").read_text())
    assert "test_suite.py::test_qr" in saved["tests"]


def test_a_baseline_keeps_its_precisions(suite: pytest.Pytester) -> None:
    suite.runpytest("--lowprec-coverage", "half,bfloat16", "--lowprec-report", "base.json")
    before = Path("base.json").read_bytes()
    result = run(suite, "--lowprec-baseline", "base.json", "--lowprec-report", "base.json")
    refusal = "base.json was not replaced, since it would lose bfloat16. Add --lowprec-coverage bfloat16."
    assert refusal in result.stdout.str()
    assert Path("base.json").read_bytes() == before


def test_another_file_is_replaced(suite: pytest.Pytester) -> None:
    for content in ("{", '{"schema": 1, "runs": []}'):
        Path("out.json").write_text(content)
        assert run(suite, "--lowprec-report", "out.json", "-k", "inv").ret == OK
        assert json.loads(Path("out.json").read_text())["tests"] == ["test_suite.py::test_inv"]
    run(suite, "--lowprec-report", "out.json", "-k", "exp", "--lowprec-device", "xpu")
    assert json.loads(Path("out.json").read_text())["tests"] == ["test_suite.py::test_exp"]


def test_every_format_names_incomplete_tests(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WRONG_test_inv", "fail")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    for file in ("out.md", "out.html"):
        run(suite, "--lowprec-report", file, "--lowprec-format", "github")
    for file in ("out.md", "out.html", "summary.md"):
        text = Path(file).read_text().replace("\\", "")
        assert "1 test is incomplete, and may use more operators" in text, file
        assert "failed: test_suite.py::test_inv" in text, file
