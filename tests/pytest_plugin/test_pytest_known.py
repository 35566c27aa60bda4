"""Known failures with subtests, and entries with patterns, messages and conditions."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowprec_check.pytest_plugin.manifest import KnownFailure, dump, read

XDIST = pytest.mark.parametrize("options", [(), pytest.param(("-n1",), marks=pytest.mark.slow)], ids=["alone", "xdist"])


def run(project: pytest.Pytester, suite: str, entries: str, *options: str) -> pytest.RunResult:
    project.makepyfile(test_suite=suite)
    if entries:
        Path("known.toml").write_text(entries)
    return project.runpytest("--lowprec-manifest", "known.toml", "-p", "no:cacheprovider", *options)


def entry(test: str, exception: str = "AssertionError", *more: str) -> str:
    return "\n".join(["[[known]]", f"test = '{test}'", f"exception = '{exception}'", *more, ""])


# -- subtests

SUBTESTS = """
import unittest

def test_fixture(subtests):
    for n in {numbers}:
        with subtests.test("number", n=n):
            assert n == 1

class TestCase(unittest.TestCase):
    def test_unittest(self):
        for n in {numbers}:
            with self.subTest(n=n):
                assert n == 1
"""
BOTH = [
    KnownFailure(test="test_suite.py::TestCase::test_unittest", exception="AssertionError", reason="one"),
    KnownFailure(test="test_suite.py::test_fixture", exception="AssertionError", reason="two"),
]
needs_subtests = pytest.mark.skipif(
    not hasattr(pytest, "Subtests"),
    reason="the fixture subtests is built into pytest 9; older ones do not count failures",
)


@needs_subtests
@pytest.mark.parametrize(
    ("numbers", "options"),
    [
        ((1, 0), ()),
        ((0, 1), ()),
        ((2, 3), ()),
        ((1, 1, 2, 1), ()),
        pytest.param((1, 1, 2, 1), ("-n1",), marks=pytest.mark.slow),
    ],
)
def test_known_failures_of_subtests_are_green(
    project: pytest.Pytester, numbers: tuple[int, ...], options: tuple[str, ...]
) -> None:
    result = run(project, SUBTESTS.format(numbers=numbers), dump(BOTH), *options, "-rA")
    assert result.ret == 0
    result.assert_outcomes(xfailed=2)  # subtests are counted with -v only
    result.stdout.fnmatch_lines_random(["XFAIL test_suite.py::test_fixture - two"])


@needs_subtests
@XDIST
def test_tests_whose_subtests_all_pass_fail_once(project: pytest.Pytester, options: tuple[str, ...]) -> None:
    result = run(project, SUBTESTS.format(numbers=(1, 1)), dump(BOTH), *options)
    result.assert_outcomes(failed=2)
    for reason in ("one", "two"):
        result.stdout.fnmatch_lines([f"Passed, but known.toml expects it to fail with AssertionError ({reason})."])


@needs_subtests
def test_another_exception_in_a_subtest_fails(project: pytest.Pytester) -> None:
    suite = SUBTESTS.format(numbers=(0, 2)).replace("assert n == 1", "assert n\n            raise KeyError(n)", 1)
    result = run(project, suite, dump(BOTH))
    result.stdout.fnmatch_lines(
        ["Raised KeyError, but known.toml expects AssertionError.", "*contains 1 failed subtest*"]
    )
    assert result.parseoutcomes()["failed"] == 2


TWO_KINDS = """
def test_two(subtests):
    with subtests.test("passes"):
        pass
    with subtests.test("a"):
        raise KeyError("a")
    with subtests.test("b"):
        raise ValueError("b")
    assert 0

def test_one(subtests):
    with subtests.test("a"):
        raise KeyError("a")
"""


@needs_subtests
@XDIST
def test_an_update_keeps_all_exceptions_of_a_test(project: pytest.Pytester, options: tuple[str, ...]) -> None:
    assert run(project, TWO_KINDS, "", "--lowprec-update-manifest", *options).ret == 0
    one, two = read(Path("known.toml"))
    assert (one.exception, two.exception) == ("KeyError", ["AssertionError", "KeyError", "ValueError"])
    assert 'exception = ["AssertionError", "KeyError", "ValueError"]' in Path("known.toml").read_text()
    result = run(project, TWO_KINDS, "", *options)
    assert result.ret == 0
    assert "xfailed" in result.parseoutcomes()
    assert run(project, TWO_KINDS, "", "--lowprec-update-manifest").ret == 0
    assert read(Path("known.toml")) == [one, two]


# -- messages, patterns, conditions

SUITE = """
import pytest

@pytest.mark.parametrize("op", ["dot", "mm", "a*b"])
def test_op(op):
    raise NotImplementedError(f"{op} not implemented for 'Half'")

@pytest.mark.parametrize("op", ["dot", "mm"])
def test_passes(op):
    if op == "dot":
        raise RuntimeError

@pytest.mark.lowprec("half", "bf16")
def test_marked(lowprec):
    assert lowprec.precision == "half"
"""
ALL = [
    entry("test_suite.py::test_op[*]", "NotImplementedError"),
    entry("test_suite.py::test_passes[*]", "RuntimeError", "strict = false"),
    entry("test_suite.py::test_marked[*]", "AssertionError", "strict = false"),
]


@XDIST
def test_a_pattern_names_all_parameters(project: pytest.Pytester, options: tuple[str, ...]) -> None:
    result = run(project, SUITE, "".join(ALL), *options)
    result.assert_outcomes(xfailed=5, xpassed=2)
    assert result.ret == 0
    assert "unused" not in result.stdout.str()


def test_a_strict_pattern_fails_for_a_test_that_passes(project: pytest.Pytester) -> None:
    result = run(project, SUITE, "".join([ALL[0], ALL[1].replace("strict = false", ""), ALL[2]]))
    result.assert_outcomes(xfailed=5, xpassed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "Passed, but known.toml expects it to fail with RuntimeError (no reason given).",
            "The entry is test_suite.py::test_passes[[]*]: let it name fewer tests, or add strict = false.",
        ]
    )


def test_the_message_must_match(project: pytest.Pytester) -> None:
    matching = entry("test_suite.py::test_op[*]", "NotImplementedError", "match = '(dot|mm) not impl.* .Half'")
    result = run(project, SUITE, matching + ALL[1] + ALL[2])
    result.assert_outcomes(xfailed=4, xpassed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "Raised NotImplementedError with another message, but known.toml expects NotImplementedError with a "
            "message that matches '(dot|mm) *"
        ]
    )


@XDIST
def test_two_entries_that_are_equally_close_are_an_error(project: pytest.Pytester, options: tuple[str, ...]) -> None:
    both = entry("test_suite.py::test_op[d*]", "NotImplementedError") + entry("test_suite.py::test_op[*t]", "E")
    result = run(project, SUITE, both, *options)
    result.assert_outcomes(failed=5, passed=2)
    result.stdout.fnmatch_lines(
        [
            "known.toml: test_suite.py::test_op[[]dot] has two entries, and neither is closer: "
            "test_suite.py::test_op[[]d[*]] and test_suite.py::test_op[[][*]t].",
            "Remove one of them, or add an entry for the test itself.",
        ]
    )
    before = Path("known.toml").read_text()
    run(project, SUITE, "", "--lowprec-update-manifest", "-k", "dot")
    assert "::test_op[dot]" not in Path("known.toml").read_text()
    assert "::test_op[d*]" in before


CONDITIONS = [
    ("torch = '>=2.6'", True),
    ("torch = '<2.6'", False),
    ("python = '>=3.10'", True),
    ("python = '>=4'", False),
    ("platform = 'win32'", False),
    ("device = 'xpu'", False),
]


@pytest.mark.parametrize(("condition", "applies"), CONDITIONS)
def test_an_entry_applies_only_where_its_conditions_hold(
    project: pytest.Pytester, condition: str, applies: bool
) -> None:
    suite = "def test_fails():\n    assert 0\n"
    text = entry("test_suite.py::test_fails", "AssertionError", condition)
    run(project, suite, text).assert_outcomes(xfailed=int(applies), failed=int(not applies))
    passing = run(project, suite.replace("assert 0", "pass"), text)
    passing.assert_outcomes(passed=int(not applies), failed=int(applies))
    unused = run(project, "def test_other():\n    pass\n", text).stdout.str()
    assert ("1 unused entry" in unused) == applies
    other = entry("test_suite.py::test_fails", "ValueError")
    run(project, suite, text + other).assert_outcomes(xfailed=int(applies), failed=int(not applies))


def test_the_device_of_a_marked_test_is_that_of_its_case(project: pytest.Pytester) -> None:
    suite = SUITE.replace('"half", "bf16"', '"half", device=["cpu", "xpu"]').replace('== "half"', '== "bf16"')
    for device, outcomes in (("cpu", {"xfailed": 1, "skipped": 1}), ("xpu", {"failed": 1, "skipped": 1})):
        text = entry("test_suite.py::test_marked[*]", "AssertionError", f"device = '{device}'")
        run(project, suite, text, "-k", "marked").assert_outcomes(deselected=5, **outcomes)


UPDATED = """
import pytest

@pytest.mark.parametrize("op", ["dot", "mm", "a*b"])
def test_op(op):
    if op == "mm":
        return
    raise {raises}(op)

def test_own():
    raise KeyError("now another message")
"""


@XDIST
def test_an_update_keeps_patterns_and_keys(project: pytest.Pytester, options: tuple[str, ...]) -> None:
    pattern = entry("test_suite.py::test_op[*]", "NotImplementedError", "torch = '>=2'", "reason = 'why'")
    own = entry("test_suite.py::test_own", "KeyError", "match = 'once'", "python = '>=3'", "strict = false")
    elsewhere = entry("test_suite.py::test_elsewhere", "E", "torch = '<2'") + entry("test_gone.py::*", "E")
    suite = UPDATED.format(raises="NotImplementedError")
    result = run(project, suite, pattern + own + elsewhere, "--lowprec-update-manifest", *options)
    result.stdout.fnmatch_lines(
        [
            "0 added, 1 changed, 1 removed",
            "~ test_suite.py::test_own",
            "- test_gone.py::[*]",
            "[?] test_suite.py::test_op[[][*]]: test_suite.py::test_op[[]mm] passes",
            "Patterns are not updated: let them name fewer tests, or add strict = false.",
        ]
    )
    kept = [
        KnownFailure(test="test_suite.py::test_elsewhere", exception="E", torch="<2"),
        KnownFailure(test="test_suite.py::test_op[*]", exception="NotImplementedError", torch=">=2", reason="why"),
        KnownFailure(test="test_suite.py::test_own", exception="KeyError", python=">=3", strict=False),
    ]
    assert read(Path("known.toml")) == kept
    run(project, UPDATED.format(raises="ValueError"), "", "--lowprec-update-manifest")
    split = [KnownFailure(test=f"test_suite.py::test_op[{op}]", exception="ValueError") for op in (r"a\*b", "dot")]
    assert read(Path("known.toml")) == sorted([*kept, *split], key=lambda one: one.test)
    result = run(project, UPDATED.format(raises="ValueError"), "")
    result.assert_outcomes(xfailed=3, failed=1)  # test_op[mm], which the pattern names
