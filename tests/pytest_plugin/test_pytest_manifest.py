"""Known failures: the manifest file and its effect on tests."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec_check.errors import UsageError
from lowprec_check.pytest_plugin import known_failures as known
from lowprec_check.pytest_plugin.manifest import (
    HEAD,
    KnownFailure,
    Result,
    closest,
    dump,
    exact,
    head_of,
    read,
    updated,
)

NAME = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="."), min_size=1, max_size=30)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
OPTIONAL = {
    "match": st.none() | st.sampled_from(["dot", r"^\"dot\" not", ".*"]),
    "torch": st.none() | st.sampled_from([">=2.6", "<2.6", "!=2.9"]),
    "device": st.none() | st.sampled_from(["cpu", "cuda"]),
    "platform": st.none() | st.sampled_from(["linux", "win32"]),
    "strict": st.booleans(),
}
NAMES = NAME | st.lists(NAME, min_size=1, max_size=3)
ENTRIES = st.lists(
    st.builds(KnownFailure, test=TEXT.filter(bool), exception=NAMES, reason=TEXT, **OPTIONAL),
    unique_by=lambda entry: entry.test,
    max_size=6,
)


@given(ENTRIES)
def test_reading_a_manifest_returns_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, entries: list[KnownFailure]
) -> None:
    path = tmp_path_factory.getbasetemp() / "round.toml"
    path.write_text(dump(entries), encoding="utf-8", newline="")
    found = read(path)
    assert found == sorted(entries, key=lambda entry: entry.test)
    assert dump(found, head_of(path)) == path.read_text(encoding="utf-8")


def ran(test: str, raised: str | None, entries: list[KnownFailure]) -> Result:
    """The result of a test that raised an exception of that name, or passed, as the plugin finds it."""
    entry = closest([entry for entry in entries if entry.names(test)], test)
    return Result((raised,) if raised is not None else (), entry, entry is not None and raised in entry.exceptions)


@given(ENTRIES, st.dictionaries(TEXT, st.none() | TEXT, max_size=6), st.data())
def test_an_update_keeps_other_keys_and_tests_that_did_not_run(
    entries: list[KnownFailure], results: dict[str, str | None], data: st.DataObject
) -> None:
    entries = [msgspec.structs.replace(entry, test=exact(entry.test)) for entry in entries]
    before = {entry.test: entry for entry in entries}
    if before:
        results[data.draw(st.sampled_from(sorted(before))).replace(r"\*", "*")] = data.draw(st.none() | TEXT)
    change = updated(entries, {test: ran(test, raised, entries) for test, raised in results.items()})
    after = {entry.test: entry for entry in change.manifest}
    for test, raised in results.items():
        entry = after.get(exact(test))
        assert (entry is None) == (raised is None and (exact(test) not in before or before[exact(test)].strict))
        assert entry is None or raised is None or raised in entry.exceptions
    for test, entry in before.items():
        if test in after:
            kept = msgspec.structs.replace(after[test], exception=entry.exception)
            assert kept == entry
    assert before.keys() - after.keys() <= set(map(exact, results))
    again = updated(change.manifest, {test: ran(test, raised, change.manifest) for test, raised in results.items()})
    assert again.manifest == change.manifest
    assert [*again.added, *again.changed, *again.removed] == []


# -- patterns


@given(TEXT, TEXT, TEXT)
def test_a_star_stands_for_any_characters(head: str, between: str, tail: str) -> None:
    entry = KnownFailure(test=f"{exact(head)}|*{exact(tail)}", exception="E")
    assert entry.names(f"{head}|{between}{tail}")
    assert not entry.names(f"{head}-{between}{tail}") or "|" in between + tail
    assert KnownFailure(test=exact(head), exception="E").names(head)


@given(TEXT, TEXT)
def test_an_escaped_id_names_one_test(test: str, other: str) -> None:
    entry = KnownFailure(test=exact(test), exception="E")
    assert entry.names(test)
    assert entry.is_exact(test)
    assert entry.names(other) == (other in (test, exact(test)))


@pytest.mark.parametrize(
    ("pattern", "test", "named"),
    [
        ("t.py::test_x[*]", "t.py::test_x[a[0]-b]", True),
        ("t.py::test_x[*]", "t.py::test_x", False),
        ("t.py::test_x[*]", "t.py::test_xy[a]", False),
        ("t.py::test_x[a-*]", "t.py::test_x[a-]", True),
        ("tests/*::test_x", "tests/deep/t.py::Class::test_x", True),
        ("t.py::test_?", "t.py::test_x", False),
        ("t.py::test_x[[]a]", "t.py::test_x[a]", False),
        (r"t.py::test_x[a\*b]", "t.py::test_x[a*b]", True),
        (r"t.py::test_x[a\*b]", "t.py::test_x[acb]", False),
        ("t.py::test_x[a*b]", "t.py::test_x[a*b]", True),
    ],
)
def test_what_a_pattern_names(pattern: str, test: str, named: bool) -> None:
    assert KnownFailure(test=pattern, exception="E").names(test) == named


def test_the_closest_entry_wins() -> None:
    def found(test: str, *patterns: str | KnownFailure) -> str:
        entries = [p if isinstance(p, KnownFailure) else KnownFailure(test=p, exception="E") for p in patterns]
        entry = closest([entry for entry in entries if entry.names(test)], test)
        assert entry is not None
        return entry.test if entry.torch is None else f"{entry.test} {entry.torch}"

    assert found("t.py::x[a]", "t.py::x[*]", "t.py::x[a]", "*") == "t.py::x[a]"
    assert found("t.py::x[a-b]", "t.py::*", "t.py::x[*]", "t.py::x[a*]") == "t.py::x[a*]"
    assert found("t.py::x[*]", "t.py::x[*]", "t.py::x[**") == "t.py::x[*]"
    assert found("a", "a", KnownFailure(test="a", exception="E", torch=">=2")) == "a >=2"
    with pytest.raises(UsageError, match=r"t.py::x\[ab\] has two entries.*t.py::x\[a\*\].* and t.py::x\[\*b\]"):
        found("t.py::x[ab]", "t.py::x[a*]", "t.py::x[*b]")
    with pytest.raises(UsageError, match=r"a \(torch >=2\) and a \(device cpu\)"):
        found(
            "a", KnownFailure(test="a", exception="E", torch=">=2"), KnownFailure(test="a", exception="E", device="cpu")
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[known]]\ntest = 'a'\n", "entry 'a': the key 'exception' is missing"),
        (
            "[[known]]\ntest = 'a'\nexception = 'E'\nwhy = 'x'\n",
            "entry 'a': unknown key 'why'.\n"
            "The keys are test, exception, match, torch, device, python, platform, strict and reason.",
        ),
        ("[[known]]\ntest = 'a'\nexception = 'E'\n" * 2, "duplicate entry 'a'"),
        ("[[known]]\ntest = 'a'\nexeption = 'E'\n", "entry 'a': unknown key 'exeption'.\nDid you mean exception?"),
        ("[[known]]\nexception = 'E'\n", "entry known 1: the key 'test' is missing"),
        ("[[known]]\ntest = ''\nexception = 'E'\n", "entry '': no test is given"),
        ("[[known]]\ntest = 'a'\nexception = ''\n", "entry 'a': no exception is given"),
        (
            "[[known]]\ntest = 'a'\nexception = 'torch.cuda.OutOfMemoryError'\n",
            "Name the class alone: OutOfMemoryError.",
        ),
        ("[[gap]]\n", "unknown key 'gap'"),
        ("[[knwon]]\n", "Entries are [[known]] tables. Did you mean it?"),
        ("known = [3]\n", "entry known 1 is not a table"),
        ('[[known]]\ntest = "a\\d"\n', "starts an escape: write it twice, or use single quotes"),
        ("[[known]]\ntest = '\udcff'\n", "known.toml: line 2 is not UTF-8.\nSave the file as UTF-8."),
        ("[[known]\n", "line 1"),
        (
            "[[known]]\ntest = 'a'\nexception = 'E'\ntorch = '2.9'\n",
            "entry 'a': torch '2.9' is not a range of versions",
        ),
        ("[[known]]\ntest = 'a'\nexception = 'E'\ntorch = 2.9\n", "entry 'a': torch: expected str | null, got float."),
        ("[[known]]\ntest = 'a'\nexception = 'E'\nmatch = '('\n", "entry 'a': match '(' is not a regular expression"),
        (f"[[known]]\ntest = 'a'\nexception = 'E'\nmatch = 'a{{{'9' * 30}}}'\n", "is not a regular expression"),
        (
            f"[[known]]\ntest = 'a'\nexception = 'E'\nmatch = '{'(' * 5000}{')' * 5000}'\n",
            "is not a regular expression",
        ),
        (f"known = {'[' * 5000}{']' * 5000}\n", "known.toml: a value is nested too deeply."),
        (f"{'a.' * 100_000}a = 1\n", "known.toml: a key has more than 1,000 parts."),
        ("[[known]]\ntest = 'a'\nexception = 'E'\ndevice = 'tpu'\n", "entry 'a': unknown device 'tpu'"),
        ("[[known]]\ntest = 'a'\nexception = 'E'\nplatform = 'Linux'\n", "entry 'a': unknown platform 'Linux'"),
        ("[[known]]\ntest = 'a'\nexception = []\n", "entry 'a': no exception is given"),
    ],
)
def test_a_wrong_manifest_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "known.toml"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(UsageError, match=r"known\.toml") as caught:
        read(path)
    assert message in str(caught.value)


@pytest.mark.parametrize("head", ["# mine\r\n# and yours\r\n", ""])
def test_files_of_windows_editors_are_read(tmp_path: Path, head: str) -> None:
    path = tmp_path / "known.toml"
    entries = [KnownFailure(test="test_a.py::test_a", exception="E")]
    path.write_bytes(b"\xef\xbb\xbf" + (head + dump(entries, "").replace("\n", "\r\n")).encode())
    assert read(path) == entries
    assert head_of(path) == (head.replace("\r", "") or HEAD)


SUITE = """
import unittest
import pytest

def test_runs(): pass
def test_gap(): raise NotImplementedError("dot")
def test_wrong(): assert 1 == 2

@pytest.fixture
def broken(): raise OSError("no")

def test_broken(broken): pass

class TestCase(unittest.TestCase):
    def test_u(self): raise RuntimeError("u")
"""

KNOWN = [
    KnownFailure(test="test_suite.py::TestCase::test_u", exception="RuntimeError", reason="a reason"),
    KnownFailure(test="test_suite.py::test_broken", exception="OSError", reason='it says "no"'),
    KnownFailure(test="test_suite.py::test_gap", exception="NotImplementedError"),
    KnownFailure(test="test_suite.py::test_wrong", exception="AssertionError"),
]
UPDATE = "To update the manifest, run: pytest --lowprec-manifest known.toml --lowprec-update-manifest"


@pytest.fixture
def suite(project: pytest.Pytester) -> pytest.Pytester:
    project.makepyfile(test_suite=SUITE)
    Path("known.toml").write_text(dump(KNOWN))
    return project


def run(suite: pytest.Pytester, *options: str) -> pytest.RunResult:
    return suite.runpytest("--lowprec-manifest", "known.toml", *options)


@pytest.mark.parametrize(
    "options",
    [(), pytest.param(("-n2",), marks=pytest.mark.slow), ("-p", "no:terminal")],
    ids=["alone", "xdist", "no-terminal"],
)
def test_known_failures_are_xfailed(suite: pytest.Pytester, options: tuple[str, ...]) -> None:
    result = run(suite, *options, "--junitxml=out.xml")
    assert result.ret == 0
    assert Path("out.xml").read_text().count('type="pytest.xfail"') == 4
    if "no:terminal" not in options:
        result.assert_outcomes(passed=1, xfailed=4)
        assert "lowprec: known.toml" not in result.stdout.str()


@pytest.mark.parametrize("options", [(), pytest.param(("-n1",), marks=pytest.mark.slow)], ids=["alone", "xdist"])
def test_an_unexpected_pass_fails_and_shows_how_to_update(suite: pytest.Pytester, options: tuple[str, ...]) -> None:
    suite.makepyfile(test_suite=SUITE.replace('raise RuntimeError("u")', "pass"))
    result = run(suite, *options)
    result.assert_outcomes(passed=1, xfailed=3, failed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["Passed, but known.toml expects it to fail with RuntimeError (a reason).", UPDATE])


def test_a_search_that_takes_too_long_fails_the_test(suite: pytest.Pytester) -> None:
    """Backtracking for (a+)+$ takes time exponential in the length of the message."""
    text = Path("known.toml").read_text()
    Path("known.toml").write_text(
        text.replace('exception = "NotImplementedError"', 'exception = "NotImplementedError"\nmatch = "(a+)+$"')
    )
    suite.makepyfile(test_suite=SUITE.replace('NotImplementedError("dot")', f"NotImplementedError('{'a' * 60}!')"))
    result = run(suite)
    result.assert_outcomes(passed=1, xfailed=3, failed=1)
    result.stdout.fnmatch_lines(["Raised NotImplementedError with a message that takes more than 1 s to match, *"])


def test_many_stars_take_no_time() -> None:
    entry = KnownFailure(test="*a" * 40 + "b", exception="E")
    assert not entry.names("a" * 5000)
    assert entry.names("a" * 5000 + "b")


def test_another_exception_fails(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_suite=SUITE.replace("NotImplementedError", "ValueError"))
    result = run(suite)
    result.assert_outcomes(passed=1, xfailed=3, failed=1)
    result.stdout.fnmatch_lines(["Raised ValueError, but known.toml expects NotImplementedError.", UPDATE])


@pytest.mark.parametrize(
    "options",
    [(), pytest.param(("-n2",), marks=pytest.mark.slow), ("-k", "runs")],
    ids=["alone", "xdist", "deselected"],
)
def test_unused_entries_are_reported(suite: pytest.Pytester, options: tuple[str, ...]) -> None:
    gone = [
        KnownFailure(test="test_gone.py::test_a", exception="E"),
        KnownFailure(test="test_suite.py::test_no", exception="E"),
    ]
    Path("known.toml").write_text(dump([*KNOWN, *gone]))
    result = run(suite, *options)
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "* lowprec: known.toml *",
            "2 unused entries: the tests do not exist",
            "test_gone.py::test_a",
            "test_suite.py::test_no",
            UPDATE,
        ]
    )


@pytest.mark.parametrize("options", [("--lf",), ("test_suite.py::test_runs",), ("test_other.py",)])
def test_entries_of_tests_that_were_not_selected_are_not_reported(
    suite: pytest.Pytester, options: tuple[str, ...]
) -> None:
    suite.makepyfile(test_other="def test_fails(): assert 0")
    run(suite)
    assert "unused" not in run(suite, *options).stdout.str()


@pytest.mark.parametrize("options", [(), pytest.param(("-n2",), marks=pytest.mark.slow)], ids=["alone", "xdist"])
def test_update_writes_the_manifest(suite: pytest.Pytester, options: tuple[str, ...]) -> None:
    Path("known.toml").unlink()
    assert run(suite).ret == pytest.ExitCode.USAGE_ERROR
    result = run(suite, "--lowprec-update-manifest", *options)
    result.assert_outcomes(passed=1, xfailed=4)
    result.stdout.fnmatch_lines(["4 added, 0 changed, 0 removed", "+ test_suite.py::TestCase::test_u"])
    found = read(Path("known.toml"))
    assert {entry.test: entry.exception for entry in found} == {k.test: k.exception for k in KNOWN}
    run(suite).assert_outcomes(passed=1, xfailed=4)


def test_collecting_tests_updates_nothing(suite: pytest.Pytester) -> None:
    text = Path("known.toml").read_text() + '\n[[known]]\ntest = "test_gone.py::test_x"\nexception = "OSError"\n'
    Path("known.toml").write_text(text)
    run(suite, "--lowprec-update-manifest", "--collect-only")
    assert Path("known.toml").read_text() == text


def test_update_keeps_reasons_comments_and_tests_that_did_not_run(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_suite=SUITE.replace("OSError", "KeyError").replace('raise NotImplementedError("dot")', "pass")
    )
    Path("known.toml").write_text(dump(KNOWN, "# Ours.\n"))
    result = run(suite, "--lowprec-update-manifest", "-k", "not wrong")
    result.stdout.fnmatch_lines(["0 added, 1 changed, 1 removed", "~ test_suite.py::test_broken", "- *::test_gap"])
    text = Path("known.toml").read_text()
    assert text.startswith("# Ours.\n\n[[known]]\ntest = ")
    found = {entry.test: entry for entry in read(Path("known.toml"))}
    assert [test.rpartition("::")[2] for test in found] == ["test_u", "test_broken", "test_wrong"]
    assert found["test_suite.py::test_broken"] == KnownFailure(
        test="test_suite.py::test_broken", exception="KeyError", reason='it says "no"'
    )


def test_an_interrupted_run_does_not_update(suite: pytest.Pytester) -> None:
    before = Path("known.toml").read_text()
    suite.makepyfile(test_other="import nothing_like_that")
    result = run(suite, "--lowprec-update-manifest")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert "The manifest was not updated, because the run did not complete." in result.stdout.str()
    assert Path("known.toml").read_text() == before


def test_the_ini_key_is_used_without_the_option(suite: pytest.Pytester) -> None:
    suite.makeini("[pytest]\nlowprec_manifest = known.toml\n")
    suite.runpytest().assert_outcomes(passed=1, xfailed=4)
    Path("none.toml").write_text(HEAD)
    suite.runpytest("--lowprec-manifest", "none.toml").assert_outcomes(passed=1, failed=3, errors=1)
    suite.makeini("[pytest]\nlowprec_manifest = nowhere.toml\n")
    result = suite.runpytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: lowprec_manifest in *tox.ini: The manifest *nowhere.toml does not exist."])
    suite.makeini("[pytest]\n")
    result = suite.runpytest("--lowprec-update-manifest")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --lowprec-update-manifest needs a manifest: add --lowprec-manifest FILE*"])


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), pytest.param(("-n1",), marks=pytest.mark.slow)], ids=["alone", "xdist"])
def test_a_failing_subtest_fails_its_test(suite: pytest.Pytester, options: tuple[str, ...]) -> None:
    body = """
        import unittest

        class TestCase(unittest.TestCase):
            def test_u(self):
                for n in range(3):
                    with self.subTest(n=n):
                        self.assertEqual(n, 1)
        """
    suite.makepyfile(test_suite=body)
    if suite.runpytest().ret == 0:
        pytest.skip("this pytest does not count subtests")
    run(suite, "--lowprec-update-manifest", *options)
    entry = KnownFailure(test="test_suite.py::TestCase::test_u", exception="AssertionError", reason="a reason")
    assert read(Path("known.toml")) == [entry]
    result = run(suite, *options)
    assert result.ret == 0
    suite.makepyfile(test_suite=body.replace("(n, 1)", "(n, n)"))
    assert "Passed, but known.toml expects it to fail" in run(suite, *options).stdout.str()


def test_last_failed_reruns_an_unexpected_pass(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_suite=SUITE.replace("assert 1 == 2", "pass"))
    run(suite).assert_outcomes(passed=1, xfailed=3, failed=1)
    result = run(suite, "--lf")
    result.assert_outcomes(failed=1)
    assert "Passed, but" in result.stdout.str()


@pytest.mark.parametrize("line_break", ["\n", "\r\n"])
def test_an_update_keeps_the_line_breaks(suite: pytest.Pytester, line_break: str) -> None:
    text = dump(KNOWN[1:]).replace("\n", line_break)
    Path("known.toml").write_bytes(text.encode())
    run(suite, "--lowprec-update-manifest")
    updated = Path("known.toml").read_bytes().decode()
    assert updated.replace(line_break, "") == dump(sorted(KNOWN, key=lambda entry: entry.test)).replace(
        "\n", ""
    ).replace('reason = "a reason"', 'reason = "no reason given"')
    assert updated.count("\r") == (updated.count("\n") if line_break == "\r\n" else 0)


def test_an_update_that_cannot_be_written_fails_the_run(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise UsageError("Cannot write known.toml: No space left on device.")

    monkeypatch.setattr(known, "write_file", full)
    Path("known.toml").unlink()
    result = run(suite, "--lowprec-update-manifest")
    result.assert_outcomes(passed=1, xfailed=4)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["Cannot write known.toml: No space left on device.", "The run fails: *"])


def test_a_new_manifest_needs_its_folder(suite: pytest.Pytester) -> None:
    result = suite.runpytest("--lowprec-manifest", "no/known.toml", "--lowprec-update-manifest")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert re.search(r"--lowprec-manifest: the folder .*no does not exist", result.stderr.str())


TEARDOWN = """
import pytest

@pytest.fixture
def broken():
    yield
    raise OSError("no")

def test_passes(broken): pass
def test_fails(broken): raise KeyError
"""


def test_an_error_in_the_teardown_says_that_it_cannot_be_known(project: pytest.Pytester) -> None:
    project.makepyfile(test_suite=TEARDOWN)
    entries = [KnownFailure(test=f"test_suite.py::test_{name}", exception="OSError") for name in ("passes", "fails")]
    Path("known.toml").write_text(dump(entries))
    result = run(project)
    result.assert_outcomes(failed=2, errors=2)
    text = result.stdout.str()
    assert (
        text.count("An error in the teardown cannot be a known failure: known.toml is about the test and its setup.")
        == 2
    )
    assert (
        "The entry test_suite.py::test_passes is for a test that fails itself: if it passes, remove the entry." in text
    )
    Path("known.toml").write_text("")
    assert "cannot be a known failure" not in run(project).stdout.str()
    result = run(project, "--lowprec-update-manifest")
    assert result.stdout.str().count("So nothing was added to the manifest for it. Fix the teardown.") == 2
    assert [entry.test for entry in read(Path("known.toml"))] == ["test_suite.py::test_fails"]


@pytest.mark.parametrize(
    ("test", "note"),
    [
        (
            r"sub\test_suite.py::test_runs",
            r"The path sub\test_suite.py is not as in the ids of pytest: write sub/test_suite.py.",
        ),
        (
            "./sub/test_suite.py::test_runs",
            "The path ./sub/test_suite.py is not as in the ids of pytest: write sub/test_suite.py.",
        ),
        ("sub/test_suite.py", "Write the ids that `pytest --collect-only -q` shows."),
    ],
)
def test_an_entry_whose_path_is_no_id_is_listed(project: pytest.Pytester, test: str, note: str) -> None:
    project.mkdir("sub").joinpath("test_suite.py").write_text("def test_runs(): pass\n")
    Path("known.toml").write_text(dump([KnownFailure(test=test, exception="E")]))
    result = run(project)
    assert result.ret == 0
    lines = result.stdout.lines
    assert "1 unused entry: the tests do not exist" in lines
    assert lines[lines.index("1 unused entry: the tests do not exist") + 1 :][:2] == [test, note]
