"""The gate of ``--lowprec-coverage``: new gaps fail a run; the saved file, GitHub, JUnit, ops of shared fixtures."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import ROOT, Call

from lowprec_check.analysis.saved_coverage import Coverage, OpUse, coverage_from_json, diff_coverages, kind_of
from lowprec_check.catalog.aten import AtenSupport
from lowprec_check.report.coverage import LONGEST_SUMMARY, step_summary

OK, FAILED, USAGE = pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.USAGE_ERROR

BEFORE = """
import torch

def test_linear(): torch.ones(2, 2) @ torch.ones(2, 2)
def test_inv(): torch.linalg.inv(torch.eye(3))
"""
AFTER = BEFORE + "def test_cholesky(): torch.linalg.cholesky(torch.eye(3))\n"

WORKERS = [(), pytest.param(("-n1",), marks=pytest.mark.slow)]


@pytest.fixture
def suite(project: pytest.Pytester) -> pytest.Pytester:
    """A suite with a gap, its baseline ``base.json``, and then a test with another gap."""
    project.makepyfile(test_suite=BEFORE)
    assert run(project, "--lowprec-report", "base.json").ret == OK
    project.makepyfile(test_suite=AFTER)
    return project


def run(suite: pytest.Pytester, *options: str, precision: str = "half") -> pytest.RunResult:
    return suite.runpytest("--lowprec-coverage", precision, *options)


def gate(suite: pytest.Pytester, *options: str) -> pytest.RunResult:
    return run(suite, "--lowprec-fail-on", "new", "--lowprec-baseline", "base.json", *options)


def section(result: pytest.RunResult) -> list[str]:
    """The lines of the section."""
    lines = result.stdout.lines
    start = next(number for number, line in enumerate(lines) if "= lowprec coverage =" in line)
    return lines[start + 1 + (not lines[start + 1]) :]


# -- the exit code


@pytest.mark.parametrize("options", WORKERS, ids=str)
def test_a_new_gap_fails_the_run_and_is_named_first(suite: pytest.Pytester, options: tuple[str, ...]) -> None:
    result = gate(suite, *options)
    assert result.ret == FAILED
    result.assert_outcomes(passed=3)
    lines = section(result)
    assert lines[0] == "1 new gap, compared with base.json: the run fails (--lowprec-fail-on new)."
    assert lines[1] == "linalg_cholesky_ex: does not run in half (not used before)"
    assert lines[2].strip() == "at test_suite.py:5"
    assert lines[3].strip() == "missing-kernel: \"cholesky_cpu\" not implemented for 'Half'"
    rest = " ".join(line.strip() for line in lines[4:7])
    advice = "→ compute it in fp32 and cast real results back, or try autocast; no torch release .* supports it"
    assert re.match(f"{advice} used by test_suite.py::test_cholesky", rest)
    assert "linalg_inv_ex" not in "".join(lines[:7])


def test_without_a_new_gap_the_run_passes(suite: pytest.Pytester) -> None:
    assert run(suite, "--lowprec-report", "base.json").ret == OK
    result = gate(suite)
    assert result.ret == OK
    assert section(result)[0] == "No new gap, compared with base.json."


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ((), OK),
        (("--lowprec-fail-on", "never"), OK),
        (("--lowprec-baseline", "base.json"), OK),
        (("--lowprec-fail-on", "gaps"), FAILED),
        (("--lowprec-fail-on", "gaps", "-k", "linear"), OK),
        (("--lowprec-fail-on", "gaps", "-k", "nothing"), pytest.ExitCode.NO_TESTS_COLLECTED),
        (("--lowprec-fail-on", "new", "--lowprec-baseline", "base.json"), FAILED),
        (("--lowprec-fail-on", "new", "--lowprec-baseline", "base.json", "-p", "no:terminal"), FAILED),
        (("--lowprec-fail-on", "new", "--lowprec-baseline", "base.json", "-k", "inv"), OK),
    ],
    ids=str,
)
def test_the_exit_code(suite: pytest.Pytester, options: tuple[str, ...], status: pytest.ExitCode) -> None:
    assert run(suite, *options).ret == status


def test_a_gate_on_all_gaps_names_the_new_ones_first(suite: pytest.Pytester) -> None:
    lines = section(run(suite, "--lowprec-fail-on", "gaps", "--lowprec-baseline", "base.json"))
    both = "2 gaps: the run fails (--lowprec-fail-on gaps). 1 new gap, compared with base.json."
    assert lines[0] == both
    assert lines[1].startswith("linalg_cholesky_ex: does not run")
    assert section(run(suite, "--lowprec-fail-on", "gaps", "-k", "linear"))[0] == "No gap."


def test_a_baseline_without_a_gate_names_new_gaps(suite: pytest.Pytester) -> None:
    assert section(run(suite, "--lowprec-baseline", "base.json"))[0] == "1 new gap, compared with base.json."


def test_the_ini_keys(suite: pytest.Pytester) -> None:
    suite.makeini("[pytest]\nlowprec_coverage = half\nlowprec_fail_on = new\nlowprec_baseline = base.json\n")
    assert suite.runpytest().ret == FAILED
    assert suite.runpytest("--lowprec-fail-on", "never").ret == OK


@pytest.mark.slow
def test_an_interrupted_run_keeps_its_exit_code(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_suite=AFTER + "def test_stop(): raise KeyboardInterrupt\n")
    options = ("--lowprec-coverage", "half", "--lowprec-fail-on", "new", "--lowprec-baseline", "base.json")
    result = suite.runpytest_subprocess(*options)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    stopped, first, *_ = section(result)
    assert stopped == "The run stopped early: only the tests that ran are counted."
    assert first.startswith("1 new gap")


def test_a_gap_that_was_partial_is_new_when_it_never_runs(suite: pytest.Pytester) -> None:
    saved = json.loads(Path("base.json").read_text())
    inverse = next(use for use in saved["ops"] if "inv_ex" in use["op"])
    for state, ret in (("some", FAILED), (None, FAILED), ("all", FAILED), ("none", OK)):
        inverse["support"]["float16"]["state"] = state
        Path("base.json").write_text(json.dumps(saved))
        assert gate(suite, "-k", "not cholesky").ret == ret, state


def test_a_partial_run_compares_only_what_ran(suite: pytest.Pytester) -> None:
    Path("base.json").unlink()
    run(suite, "--lowprec-report", "base.json")
    lines = section(gate(suite, "-k", "linear"))
    assert lines[0] == "No new gap, compared with base.json."
    assert lines[1] == "1 test ran, and 2 of base.json did not: only operators of tests that ran are compared."
    assert "gone" not in "".join(lines)
    suite.makepyfile(test_suite=AFTER.replace("torch.linalg.inv(", "torch.exp("))
    assert section(gate(suite))[1] == "1 gap of base.json is gone."


# -- the baseline


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, (), "base.json does not exist."),
        ("{", (), "base.json is not a coverage that can be read: it is not JSON."),
        ("[]", (), "base.json is not a coverage that can be read: it lacks the keys of a coverage."),
        ('{"schema": 1, "runs": []}', (), "base.json is not a coverage that can be read: it is a scan."),
        ('{"schema": 1, "findings": []}', (), "it is a baseline of scan."),
        ('{"schema": 99, "tool": "lowprec-check 9", "dtypes": [], "ops": []}', (),
         "saved by lowprec-check 9 with schema 99; upgrade"),
        ("", ("--lowprec-device", "cuda"),
         "base.json is for cpu, and this run for cuda.\nAdd --lowprec-device cpu, or give"),
        ("", ("--lowprec-coverage", "bfloat16"),
         "base.json lacks bfloat16: it has half.\nSave it again with: pytest --lowprec-coverage half,bfloat16"),
    ],
    ids=str,
)  # fmt: skip
def test_a_baseline_that_cannot_be_used(
    suite: pytest.Pytester, content: str | None, options: tuple[str, ...], message: str
) -> None:
    if content is None:
        Path("base.json").unlink()
    elif content:
        Path("base.json").write_text(content)
    result = gate(suite, *options)
    assert result.ret == USAGE
    assert (
        f"--lowprec-baseline: The baseline {suite.path / message}" in result.stderr.str()
        or message in result.stderr.str()
    )
    assert "Traceback" not in result.stderr.str()


def test_a_baseline_may_have_more_precisions(suite: pytest.Pytester) -> None:
    run(suite, "--lowprec-report", "base.json", precision="half,bfloat16")
    result = gate(suite)
    assert result.ret == OK
    assert section(result)[:2] == ["No new gap, compared with base.json.", ""]


def test_new_needs_a_baseline(suite: pytest.Pytester) -> None:
    result = run(suite, "--lowprec-fail-on", "new")
    assert result.ret == USAGE
    assert (
        "--lowprec-fail-on: new gaps are those that a baseline does not have: add --lowprec-baseline"
        in result.stderr.str()
    )
    result = run(suite, "--lowprec-fail-on", "all")
    assert "unknown fail-on 'all': use never, gaps or new." in result.stderr.str()


def test_the_report_replaces_the_baseline_only_if_nothing_is_lost(suite: pytest.Pytester) -> None:
    before = Path("base.json").read_text()
    result = gate(suite, "--lowprec-report", "base.json")
    assert result.ret == FAILED
    assert "base.json was not replaced, since it would accept the new gaps." in result.stdout.str()
    assert Path("base.json").read_text() == before
    assert gate(suite).ret == FAILED
    result = gate(suite, "--lowprec-report", "base.json", "-k", "inv")
    assert "base.json; it has earlier runs of 1 test" in result.stdout.str()
    assert Path("base.json").read_text() == before
    suite.makepyfile(test_suite=BEFORE + "def test_exp(): torch.ones(2).exp()\n")
    assert gate(suite, "--lowprec-report", "base.json").ret == OK
    assert "aten.exp.default" in Path("base.json").read_text()


# -- the saved file


def old_file(new: dict[str, Any]) -> dict[str, Any]:
    """The same coverage as version 0.1 saved it."""
    ops = [use | {"tests": [new["tests"][index] for index in use["tests"]]} for use in new["ops"]]
    return {key: value for key, value in new.items() if key != "tool"} | {
        "schema": 1,
        "tests": len(new["tests"]),
        "ops": ops,
    }


def test_a_file_of_the_old_schema_can_be_read(suite: pytest.Pytester) -> None:
    new = json.loads(Path("base.json").read_text())
    old = old_file(new)
    read, again = coverage_from_json(json.dumps(old).encode()), coverage_from_json(json.dumps(new).encode())
    assert {use.op: read.tests_of(use) for use in read.ops} == {use.op: again.tests_of(use) for use in again.ops}
    assert [use.support for use in read.ops] == [use.support for use in again.ops]
    Path("base.json").write_text(json.dumps(old))
    assert section(gate(suite))[1] == "linalg_cholesky_ex: does not run in half (not used before)"
    assert not diff_coverages(read, again).gone_tests


@pytest.mark.parametrize(
    "change",
    [
        {"tests": []},
        {"dtypes": ["float16", "bfloat16"]},
        {"ops": [{"op": "aten.mm.default", "tests": [-1], "support": {}}]},
        {"ops": 3},
    ],
    ids=str,
)
def test_a_damaged_file_is_refused(suite: pytest.Pytester, change: dict[str, Any]) -> None:
    damaged = json.loads(Path("base.json").read_text()) | change
    with pytest.raises(ValueError, match=r"names a test|lacks one of|Expected"):
        coverage_from_json(json.dumps(damaged).encode())


def test_a_test_is_saved_once(suite: pytest.Pytester) -> None:
    run(suite, "--lowprec-report", "base.json")
    text = Path("base.json").read_text()
    assert text.count("test_suite.py::test_inv") == 1
    assert kind_of(text.encode()) == "coverage"
    lines = [line for line in text.splitlines() if '"op":' in line]
    assert all(isinstance(json.loads(line.strip().rstrip(",")), dict) for line in lines)


def test_pandas_reads_the_file_as_the_document_says(suite: pytest.Pytester, capsys: pytest.CaptureFixture[str]) -> None:
    run(suite, "--lowprec-report", "coverage.json")
    text = (ROOT / "docs" / "pytest.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(import json\nimport pandas\n.*?)```", text, re.S)
    capsys.readouterr()
    exec(code, {})
    shown = [line.split()[1:] for line in capsys.readouterr().out.splitlines()[1:]]
    assert shown == [
        ["aten.linalg_cholesky_ex.default", "test_suite.py::test_cholesky"],
        ["aten.linalg_inv_ex.default", "test_suite.py::test_inv"],
    ]


# -- diff


def use_of(op: str, tests: list[int], state: Any = "none", **support: Any) -> OpUse:
    kind = "missing-kernel" if state in ("none", "some") else None
    return OpUse(
        op=f"aten.{op}.default",
        tests=tests,
        support={"float16": AtenSupport(state=state, kind=kind, message=kind and "no kernel", **support)},
        sources=["net.py:3"] if kind else [],
    )


def coverage_with(*uses: OpUse, tests: int = 3, **fields: Any) -> Coverage:
    head = {"device": "cpu", "torch": "2.13", "evidence": "measured", "recorded_torch": "2.13.0", "dtypes": ["float16"]}
    return Coverage(tests=[f"test_net.py::test_{n}" for n in range(tests)], ops=[*uses], **head | fields)


OLD = coverage_with(use_of("dot", [0]), use_of("inv", [1]), use_of("exp", [1], "all"), use_of("fold", [0], "some"))
NEW = coverage_with(
    use_of("dot", [0], "all"), use_of("exp", [1], "some"), use_of("fold", [0, 3]), use_of("eig", [3], None), tests=4
)


def test_what_a_difference_is() -> None:
    found = diff_coverages(OLD, NEW)
    assert {change.op: (c.old, c.new) for change in found.new_gaps for c in change.precisions.values()} == {
        "aten.fold.default": ("some", "none"),
        "aten.exp.default": ("runs", "some"),
    }
    assert {change.op: (c.old, c.new) for change in found.gone_gaps for c in change.precisions.values()} == {
        "aten.dot.default": ("none", "runs"),
        "aten.inv.default": ("none", "unused"),
    }
    assert (found.new_ops, found.gone_ops) == (["aten.eig.default"], ["aten.inv.default"])
    assert (found.new_tests, found.gone_tests) == (["test_net.py::test_3"], [])
    again = diff_coverages(NEW, NEW)
    assert [again.new_gaps, again.gone_gaps, again.new_ops, again.gone_ops, again.new_tests] == [[]] * 5


@pytest.mark.parametrize(
    ("tests", "changes", "new_gaps"),
    [
        ([0, 1], {}, 1),  # all tests ran: the call changed
        ([0], {}, 0),  # another call of a test that did not change was tried
        ([0, 3], {}, 1),  # a new test uses it
        ([0], {"tried_here": False}, 1),  # the catalog says so
    ],
)
def test_a_cell_that_rests_on_one_call_is_not_compared_in_a_partial_run(
    tests: list[int], changes: dict[str, Any], new_gaps: int
) -> None:
    old = coverage_with(use_of("fold", [0, 1], "all", **{"tried_here": True} | changes), tests=2)
    names = [f"test_net.py::test_{number}" for number in tests]
    use = use_of("fold", [*range(len(tests))], **{"tried_here": True} | changes)
    new = msgspec.structs.replace(coverage_with(use), tests=names)
    assert len(diff_coverages(old, new).new_gaps) == new_gaps


def write(path: Path, found: Coverage) -> Path:
    path.write_bytes(found.to_json())
    return path


def test_the_command_compares_coverages(tmp_path: Path, call: Call) -> None:
    old, new = write(tmp_path / "old.json", OLD), write(tmp_path / "new.json", NEW)
    done = call("diff", old, new, "-f", "text")
    assert done.returncode == 1
    assert done.stdout.startswith(
        "2 new gaps, 2 gaps gone\nold: half on cpu, torch 2.13, measured, 4 operators, 3 gaps"
    )
    assert (
        "fold: does not run in half (ran in part before)\n      at net.py:3\n      missing-kernel: no kernel"
        in done.stdout
    )
    assert "inv: no longer used" in done.stdout
    assert "Tests only in the new one (1)\n      test_net.py::test_3" in done.stdout
    assert call("diff", new, old).returncode == 1  # dot and inv are gaps there
    assert call("diff", new, new).stdout.startswith("No new gap\n")
    assert call("diff", new, new).returncode == 0
    assert json.loads(call("diff", old, new, "-f", "json").stdout)["new_ops"] == ["aten.eig.default"]
    files = [tmp_path / name for name in ("d.md", "d.html", "d.json")]
    done = call("diff", old, new, *(part for file in files for part in ("-o", file)))
    assert (done.returncode, done.stdout) == (1, "")
    assert all("aten.fold" in file.read_text() or "fold: does not run" in file.read_text() for file in files)


def test_a_coverage_and_a_scan_cannot_be_compared(tmp_path: Path, call: Call) -> None:
    new, scan = write(tmp_path / "new.json", NEW), tmp_path / "scan.json"
    scan.write_text('{"schema": 1, "runs": []}')
    for pair in ((new, scan), (scan, new)):
        done = call("diff", *pair)
        assert done.returncode == 2
        assert f"{new} is the coverage of a test suite and {scan} is a scan, so they cannot be compared." in done.stderr
    bfloat16 = coverage_with(dtypes=["bfloat16"])
    done = call("diff", new, write(tmp_path / "bf16.json", bfloat16))
    assert done.returncode == 2
    assert "The old coverage has half and the new one bfloat16: no precision to compare." in done.stderr


def test_a_coverage_is_not_a_scan(tmp_path: Path, call: Call) -> None:
    done = call("report", write(tmp_path / "new.json", NEW))
    assert done.returncode == 2
    assert "new.json is the coverage of a test suite, not a scan.\nCompare two of them with:" in done.stderr


def test_other_conditions_are_named(tmp_path: Path, call: Call) -> None:
    other = coverage_with(device="xpu", torch="2.14", evidence="declared")
    done = call("diff", write(tmp_path / "a.json", coverage_with()), write(tmp_path / "b.json", other), "-f", "text")
    assert "  device cpu → xpu\n  torch of the catalog 2.13 → 2.14\n  evidence measured → declared" in done.stdout


def test_foreign_names_break_no_format(tmp_path: Path, call: Call) -> None:
    nasty = "<script>alert(1)</script>|`x`\n\u202e"
    worse = coverage_with(use_of(nasty, [0]), use_of("dot", [0], shown_by=[nasty]))
    for wanted in ("text", "md", "html", "json"):
        done = call(
            "diff", write(tmp_path / "a.json", coverage_with()), write(tmp_path / "b.json", worse), "-f", wanted
        )
        assert done.returncode == 1
        assert "\u202e" not in done.stdout or wanted == "json"
        assert "<script>alert" not in done.stdout or wanted != "html"


# -- GitHub and JUnit


def test_annotations_mark_new_gaps(suite: pytest.Pytester) -> None:
    commands = [line for line in gate(suite, "--lowprec-format", "github").stdout.lines if line.startswith("::")]
    assert re.match(
        r"::error file=test_suite.py,line=5,title=lowprec%3A new%3A linalg_cholesky_ex does not", commands[0]
    )
    assert re.match(r"::notice file=test_suite.py,line=4,title=lowprec%3A linalg_inv_ex does not", commands[1])
    assert len(commands) == 2


@pytest.mark.parametrize("options", [(), ("-p", "no:terminal")], ids=str)
def test_the_summary_of_the_step(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    Path("summary.md").write_text("before\n")
    gate(suite, *options)
    assert Path("summary.md").read_text() == "before\n"
    gate(suite, "--lowprec-format", "github", *options)
    text = Path("summary.md").read_text()
    assert text.startswith(
        "before\n### Low precision in the tests\n\n> 1 new gap, compared with base.json: the run fails"
    )
    new = "<details open><summary>linalg_cholesky_ex: does not run in half (not used before)</summary>"
    assert f"{new}\n\n- at test\\_suite.py:5\n" in text
    assert re.search(r"^\| `linalg_inv_ex` +\| no +\| +1 \| `test_suite.py:4` ", text, re.M)
    assert text.endswith("\n\n")


def test_a_summary_that_cannot_be_written_is_named(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(suite.path / "none" / "summary.md"))
    result = run(suite, "--lowprec-format", "github")
    assert result.ret == OK
    assert "Cannot write GITHUB_STEP_SUMMARY, " in result.stdout.str()


def test_the_summary_leaves_the_step_what_others_wrote(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """GitHub drops the whole summary of a step if it has more than 1 MiB."""
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    for already in (2**20 - 3_000, 2**20):
        Path("summary.md").write_text("x" * already)
        result = run(suite, "--lowprec-format", "github")
        assert already <= Path("summary.md").stat().st_size <= 2**20
    assert "The summary of the step has no room left for the coverage (GitHub allows 1 MiB)." in result.stdout.str()


def test_the_summary_fits() -> None:
    many = [use_of(f"op_{number}_{'é' * 200}", [0]) for number in range(3_000)]
    found = coverage_with(*many)
    text = step_summary(found, diff_coverages(coverage_with(), found), "3,000 new gaps")
    assert LONGEST_SUMMARY // 3 < len(text.encode()) <= LONGEST_SUMMARY < 2**20
    assert re.search(r"[\d,]+ of 3,000 rows are not shown; the saved JSON has all", text)


def junit(path: Path) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """The properties of the suite, and those of its tests."""

    def properties(parent: Any) -> dict[str, str]:
        return {found.get("name"): found.get("value") for found in parent.findall("./properties/property")}

    [suite] = ElementTree.parse(path).getroot().iter("testsuite")
    return properties(suite), {case.get("name", ""): properties(case) for case in suite.iter("testcase")}


@pytest.mark.parametrize("options", WORKERS, ids=str)
def test_junit_has_the_gaps_of_each_test(suite: pytest.Pytester, options: tuple[str, ...]) -> None:
    suite.makepyfile(test_suite=AFTER + "def test_both(): torch.rrelu(torch.inverse(torch.eye(2)), training=True)\n")
    result = gate(suite, "--junitxml", "junit.xml", *options)
    result.assert_outcomes(passed=4)
    whole, tests = junit(Path("junit.xml"))
    assert whole["lowprec_half_do_not_run"] == "2"
    assert whole["lowprec_half_run_in_part"] == "1"
    assert whole["lowprec_new_gaps"] == "2"
    assert whole["lowprec_device"] == "cpu"
    assert tests == {
        "test_linear": {},
        "test_inv": {"lowprec_half": "linalg_inv_ex"},
        "test_cholesky": {"lowprec_half": "linalg_cholesky_ex"},
        "test_both": {"lowprec_half": "linalg_inv_ex, rrelu_with_noise (in part)"},
    }


@pytest.mark.parametrize(
    ("last", "options", "early"),
    [
        ("assert 0", (), False),
        ("assert 0", ("-x",), True),
        ("assert 0", ("--maxfail=1", "-n0"), True),
        ("pytest.exit('why')", (), True),
    ],
)
def test_a_run_that_stops_early_says_so(
    project: pytest.Pytester, last: str, options: tuple[str, ...], early: bool
) -> None:
    project.makepyfile(test_suite=f"import pytest\n{BEFORE}\ndef test_last(): {last}\ndef test_more(): pass\n")
    result = run(project, *options)
    assert ("The run stopped early: only the tests that ran are counted." in result.stdout.str()) == early


def test_junit_has_the_gaps_of_tests_that_fail_twice_and_keeps_other_properties(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_suite="""
        import pytest, torch

        @pytest.fixture
        def broken():
            yield
            torch.linalg.inv(torch.eye(3))
            raise ValueError

        def test_both(broken): raise KeyError

        def test_own(record_property):
            record_property("mine", "ü")
            torch.linalg.inv(torch.eye(3))

        @pytest.mark.skip
        def test_skipped(): pass
        """
    )
    run(project, "--junitxml", "junit.xml", "-o", "junit_family=xunit1")  # of record_property
    cases = [
        (case.get("name"), {each.get("name"): each.get("value") for each in case.findall("./properties/property")})
        for case in ElementTree.parse("junit.xml").getroot().iter("testcase")
    ]
    gap = {"lowprec_half": "linalg_inv_ex"}
    assert cases == [
        ("test_both", gap),
        ("test_both", gap),
        ("test_own", {"mine": "ü"} | gap),
        ("test_skipped", {}),
    ]


# -- what counts

EMPTY = """
import pytest, torch

@pytest.mark.skip
def test_marked(): torch.linalg.inv(torch.eye(3))

def test_inside():
    torch.linalg.inv(torch.eye(3))
    pytest.skip("not here")

@pytest.fixture
def device(): pytest.skip("no device")

def test_without_device(device): torch.linalg.inv(torch.eye(3))
"""


def test_skipped_tests_do_not_count(project: pytest.Pytester) -> None:
    expected = """
        @pytest.mark.xfail
        def test_expected(): assert torch.ones(2).sum() == 3

        @pytest.fixture
        def broken(): raise RuntimeError

        def test_broken(broken): pass
        def test_runs(): torch.ones(2).exp()
    """
    project.makepyfile(test_suite=EMPTY + "\n".join(line[8:] for line in expected.splitlines()))
    result = run(project, "--lowprec-report", "out.json")
    result.assert_outcomes(skipped=3, passed=1, xfailed=1, errors=1)
    saved = json.loads(Path("out.json").read_text())
    assert saved["tests"] == [f"test_suite.py::test_{name}" for name in ("broken", "expected", "runs")]
    assert "aten.exp.default" in {use["op"] for use in saved["ops"]}
    assert "aten.linalg_inv_ex.default" not in {use["op"] for use in saved["ops"]}
    assert " in 3 tests " in result.stdout.str()


@pytest.mark.parametrize("options", WORKERS, ids=str)
def test_a_run_without_tests_writes_nothing(project: pytest.Pytester, options: tuple[str, ...]) -> None:
    project.makepyfile(test_suite=EMPTY)
    result = run(project, "--lowprec-report", "out.json", "--lowprec-fail-on", "gaps", *options)
    assert result.ret == OK
    assert section(result)[0] == f"No test ran, so there is no coverage; {project.path / 'out.json'} was not written."
    assert not Path("out.json").exists()
    assert "operators in" not in result.stdout.str()


def test_collecting_prints_no_table(project: pytest.Pytester) -> None:
    project.makepyfile(test_suite=BEFORE)
    result = run(project, "--co", "--lowprec-report", "out.json", "--lowprec-fail-on", "gaps")
    assert result.ret == OK
    assert "lowprec coverage" not in result.stdout.str()
    assert not Path("out.json").exists()


def test_the_index_of_a_device_does_not_matter(project: pytest.Pytester) -> None:
    project.makepyfile(test_suite=BEFORE)
    assert " · cuda, torch " in run(project, "--lowprec-device", "cuda:0").stdout.str()


# -- fixtures that several tests share

CONFTEST = """
import pytest, torch

@pytest.fixture(scope="session")
def base():
    yield torch.linalg.cholesky(torch.eye(3))
    torch.ones(2).tanh()

@pytest.fixture(scope="session")
def shared(): return torch.ones(2).log()
"""

FIXTURES = """
import pytest, torch

@pytest.fixture(scope="module")
def factor(base): return torch.linalg.inv(base)

@pytest.fixture(scope="module")
def dynamic(request): return request.getfixturevalue("factor").exp()

@pytest.fixture(scope="module", params=["sin", "cos"])
def wave(request): return getattr(torch, request.param)(torch.ones(2))

@pytest.fixture(scope="module")
def shared(shared): return shared.sqrt()

@pytest.fixture
def of_one(base): return base.abs()

@pytest.fixture(scope="class", autouse=True)
def automatic(): torch.ones(2).expm1()

def test_first(factor): factor.floor()
def test_second(factor): pass
def test_third(of_one): pass
def test_wave(wave): pass
def test_wave_again(wave): pass
def test_dynamic(dynamic): pass
def test_dynamic_again(dynamic): pass
def test_override(shared): pass
def test_override_again(shared): pass
def test_alone(): pass
def test_request(request): request.getfixturevalue("base")
"""

OF_FIXTURES = {
    "linalg_cholesky_ex": ["dynamic", "dynamic_again", "first", "request", "second", "third"],
    "tanh": ["dynamic", "dynamic_again", "first", "request", "second", "third"],
    "linalg_inv_ex": ["dynamic", "dynamic_again", "first", "second"],
    "exp": ["dynamic", "dynamic_again"],
    "sin": ["wave[sin]", "wave_again[sin]"],
    "cos": ["wave[cos]", "wave_again[cos]"],
    "log": ["override", "override_again"],
    "sqrt": ["override", "override_again"],
    "abs": ["third"],
    "floor": ["first"],
    "expm1": sorted(
        ["alone", "dynamic", "dynamic_again", "first", "override", "override_again", "request", "second", "third"]
        + [f"wave{again}[{name}]" for again in ("", "_again") for name in ("sin", "cos")]
    ),
}


@pytest.mark.parametrize("options", [(), ("-p", "no:randomly", "--deselect", "test_suite.py::test_first")], ids=str)
def test_ops_of_a_shared_fixture_belong_to_all_its_tests(project: pytest.Pytester, options: tuple[str, ...]) -> None:
    project.makeconftest(CONFTEST)
    project.makepyfile(test_suite=FIXTURES)
    run(project, "--lowprec-report", "out.json", *options).assert_outcomes(
        passed=13 - ("--deselect" in options), deselected=int("--deselect" in options)
    )
    saved = json.loads(Path("out.json").read_text())
    names = [test.removeprefix("test_suite.py::test_") for test in saved["tests"]]
    found = {
        use["op"].removeprefix("aten.").removesuffix(".default"): sorted(names[index] for index in use["tests"])
        for use in saved["ops"]
    }
    for op, tests in OF_FIXTURES.items():
        expected = [test for test in tests if test in names]
        assert found.get(op, []) == expected, op


@pytest.mark.slow
def test_workers_give_the_same_file(project: pytest.Pytester) -> None:
    project.makeconftest(CONFTEST)
    project.makepyfile(test_suite=FIXTURES, test_more=FIXTURES)
    for options in ((), ("-n2",)):
        run(project, "--lowprec-report", f"{len(options)}.json", *options)
    assert Path("0.json").read_bytes() == Path("1.json").read_bytes()


def test_junit_has_the_gaps_of_shared_fixtures(project: pytest.Pytester) -> None:
    project.makeconftest(CONFTEST)
    project.makepyfile(test_suite=FIXTURES)
    run(project, "--junitxml", "junit.xml")
    tests = junit(Path("junit.xml"))[1]
    both = {"lowprec_half": "linalg_cholesky_ex, linalg_inv_ex"}
    assert tests["test_first"] == tests["test_second"] == tests["test_dynamic_again"] == both
    assert tests["test_request"] == tests["test_third"] == {"lowprec_half": "linalg_cholesky_ex"}
    assert tests["test_alone"] == {}


def test_a_failing_fixture_is_reported_as_without_coverage(project: pytest.Pytester) -> None:
    project.makeconftest(
        """
        import pytest, torch

        @pytest.fixture(scope="module")
        def broken(): raise ValueError(torch.ones(2).sum())
        """
    )
    project.makepyfile(test_suite="def test_one(broken): pass\ndef test_two(broken): pass\n")
    for style in ("auto", "long", "native"):
        shown = []
        for options in ((), ("--lowprec-coverage", "half")):
            result = project.runpytest(f"--tb={style}", *options)
            result.assert_outcomes(errors=2)
            text = re.sub(r"=+ lowprec coverage =+.*?(?==+ short test)", "", result.stdout.str(), flags=re.S)
            shown.append(re.sub(r"0x[0-9a-f]+|in \d+\.\d+s|=+", "", text))
        if style == "native":  # which also shows how pluggy calls hooks
            assert "lowprec_check" not in shown[1]
        else:
            assert shown[1] == shown[0], style
