"""Known failures: the options of the manifest, and which entry applies to which test."""

from __future__ import annotations

import posixpath
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lowprec_check.errors import UsageError, encodable, type_name
from lowprec_check.pytest_plugin import manifest
from lowprec_check.pytest_plugin.manifest import MATCH_SECONDS, NO_REASON, KnownFailure, Manifest, Result, closest
from lowprec_check.pytest_plugin.marker import Case, is_device_available
from lowprec_check.pytest_plugin.shared import is_worker, option_path, shown_path, wrong_option
from lowprec_check.report.foreign_text import visible_text
from lowprec_check.schema.axes import accelerators, device_type
from lowprec_check.schema.base import write_file

# -- Which entry of a manifest applies to which test, and which to none


class EntryOfTest:
    """The entries of the collected tests."""

    def __init__(self, known: Manifest) -> None:
        self._known = known
        self._exact: dict[str, list[KnownFailure]] = {}
        self._patterns: list[KnownFailure] = []
        for entry in known:
            if "*" in entry.test:
                self._patterns.append(entry)
            else:
                self._exact.setdefault(entry.test, []).append(entry)
        # By test, its entry, or why none can be chosen.
        self.found: dict[str, KnownFailure] = {}
        self.problems: dict[str, str] = {}

    def find(self, items: Sequence[pytest.Item]) -> None:
        """Find the entry of each test; one with two entries that are equally close is a problem."""
        for item in items:
            test = encodable(item.nodeid)
            named = [*self._exact.get(test, ()), *(entry for entry in self._patterns if entry.names(test))]
            try:
                entry = closest([entry for entry in named if entry.applies_here and _runs_on(item, entry.device)], test)
            except UsageError as error:
                self.problems[item.nodeid] = str(error)
                continue
            if entry is not None:
                self.found[item.nodeid] = entry

    def unused(self, config: pytest.Config, items: Sequence[pytest.Item]) -> list[int]:
        """Positions of the entries that apply here and name no test, although its file was
        collected or is missing; none if only parts of files were collected.
        """
        if any("::" in argument for argument in config.args) or config.getoption("lf", False):
            return []
        tests = {encodable(item.nodeid) for item in items}
        files = {_file(test) for test in tests}
        unused = []
        for position, entry in enumerate(self._known):
            file = _file(entry.test)
            # A pattern of files may name any, also one that was not collected.
            if "*" in file or not entry.applies_here or not (entry.device is None or is_device_available(entry.device)):
                continue
            is_collected = file in files or as_in_ids(file) in files or not (config.rootpath / file).exists()
            if is_collected and not any(map(entry.names, tests if "*" in entry.test else tests & {entry.test})):
                unused.append(position)
        return unused


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def as_in_ids(file: str) -> str:
    """A path as pytest writes it in ids on every system: ``tests/test_a.py``."""
    return posixpath.normpath(file.replace("\\", "/"))


def _runs_on(item: pytest.Item, device: str | None) -> bool:
    """Whether a marked test runs on a type of device; of another one, whether this machine has it.
    It chooses the best device, if any: ``cpu`` are machines without an accelerator.
    """
    if device is None:
        return True
    case = getattr(getattr(item, "callspec", None), "params", {}).get("lowprec")
    if isinstance(case, Case):
        return device_type(case.key.device) == device
    if device == "cpu":
        return not any(map(is_device_available, accelerators()))
    return is_device_available(device)


# -- Known failures: ``--lowprec-manifest`` and ``--lowprec-update-manifest``
#
# The process that runs a test changes its outcome. The summary is made from the test reports, which
# pytest-xdist sends to one process.

_UNUSED = "lowprec_unused"


def register(config: pytest.Config) -> None:
    """Read the manifest and register the plugin."""
    path, update = option_path(config, "manifest"), bool(config.getoption("lowprec_update_manifest"))
    if path is None:
        hint = "add --lowprec-manifest FILE or the ini key lowprec_manifest."
        raise pytest.UsageError(f"--lowprec-update-manifest needs a manifest: {hint}")
    if update and not path.parent.is_dir():
        raise wrong_option(config, "manifest", f"the folder {path.parent} does not exist.")
    known: Manifest = []
    try:
        if not update or path.exists():
            known = manifest.read(path)
    except UsageError as error:
        raise wrong_option(config, "manifest", error) from None
    config.pluginmanager.register(KnownFailures(config, path, known, update), "lowprec-known")


class KnownFailures:
    """Checks tests against the manifest, or updates the manifest."""

    def __init__(self, config: pytest.Config, path: Path, known: Manifest, update: bool) -> None:
        self.config, self.path, self.known, self.update = config, path, known, update
        self.shown = shown_path(config, path)
        command = f"pytest --lowprec-manifest {self.shown} --lowprec-update-manifest"
        self.how_to_update = f"To update the manifest, run: {command}"
        self.entries = EntryOfTest(known)
        self.unused: list[int] = []  # positions in the manifest
        # In a process that runs tests: by test that raised, whether anything was unexpected.
        self.unexpected: dict[str, bool] = {}
        self._in_phase = False
        # In the process that collects results.
        self.results: dict[str, Result] = {}
        self.change: manifest.Change | None = None
        self.failed_to_write: str | None = None

    # -- in processes that run tests

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Find the entry of each test, and entries without a test."""
        self.entries.find(items)
        self.unused = self.entries.unused(config, items)
        if is_worker(config):
            config.workeroutput[_UNUSED] = self.unused  # type: ignore[attr-defined]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        """Note that reports are those of subtests."""
        self.unexpected.pop(item.nodeid, None)  # of an earlier attempt
        return (yield from self._phase())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Note that reports are those of subtests; fail a test with two entries."""
        problem = self.entries.problems.get(item.nodeid)
        if problem is not None:  # not at collection, where an error would break pytest-xdist
            pytest.fail(f"{self.shown}: {problem}", pytrace=False)
        return (yield from self._phase())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        """Note that reports are those of subtests."""
        return (yield from self._phase())

    def _phase(self) -> Generator[None, object, object]:
        self._in_phase = True
        try:
            return (yield)
        finally:
            self._in_phase = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Report a known failure as xfailed, and one that passes as failed."""
        report = yield
        is_subtest = self._in_phase
        if hasattr(report, "wasxfail") or item.nodeid in self.entries.problems:
            return report
        entry = self.entries.found.get(item.nodeid)
        if report.when == "teardown" and not is_subtest:
            if report.failed and (entry is not None or self.update):
                advice = "So nothing was added to the manifest for it. Fix the teardown."
                if entry is not None:
                    about = f"The entry {entry.test} is for a test that fails itself: if it passes, remove the entry."
                    advice = f"Fix the teardown. {about}"
                why = f"{self.shown} is about the test and its setup"
                text = f"An error in the teardown cannot be a known failure: {why}.\n{advice}"
                report.sections.append((f"lowprec: {self.shown}", text))
        elif report.failed and call.excinfo:
            raised, problem = type_name(call.excinfo.value), " with another message"
            try:
                matched = entry is None or entry.matches(call.excinfo.value)
            except TimeoutError:
                matched, problem = False, f" with a message that takes more than {MATCH_SECONDS:g} s to match"
            expected = entry is not None and raised in entry.exceptions and matched
            self._attach(report, Result((raised,), entry, expected, matched))
            self.unexpected[report.nodeid] = self.unexpected.get(report.nodeid, False) or not expected
            if self.update or expected:
                report.outcome = "skipped"
                report.wasxfail = entry.reason if entry else "added to the manifest"
            elif entry is not None:
                which = problem if raised in entry.exceptions else ""
                text = f"Raised {raised}{which}, but {self.shown} expects {_expected(entry)}."
                report.sections.append((f"lowprec: {self.shown}", f"{text}\n{self.how_to_update}"))
        elif report.passed and report.when == "call" and not is_subtest:
            self._passed(report, entry)
        return report

    def _passed(self, report: pytest.TestReport, entry: KnownFailure | None) -> None:
        """A test passed, but its subtests may have failed."""
        if report.nodeid in self.unexpected:
            if self.update or not self.unexpected[report.nodeid]:
                report.outcome = "skipped"
                report.wasxfail = entry.reason if entry else "added to the manifest"
            return
        self._attach(report, Result((), entry))
        if entry is None or self.update:
            return
        if not entry.strict:
            report.wasxfail = entry.reason
            return
        report.outcome = "failed"
        advice = f"The entry is {entry.test}: let it name fewer tests, or add strict = false."
        if entry.is_exact(encodable(report.nodeid)):
            advice = self.how_to_update
        text = f"Passed, but {self.shown} expects it to fail with {_expected(entry)} ({entry.reason})."
        report.longrepr = f"{text}\n{advice}"

    def _attach(self, report: pytest.TestReport, result: Result) -> None:
        """Attach what pytest-xdist can send."""
        position = None
        if result.entry is not None:
            position = self.known.index(result.entry)
        known = [list(result.raised), position, result.expected, result.matched]
        report.lowprec_known = known  # type: ignore[attr-defined]

    # -- in the process that collects results

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the result of each test."""
        if not hasattr(report, "lowprec_known"):
            return
        raised, position, expected, matched = report.lowprec_known
        result = Result(tuple(raised), None if position is None else self.known[position], expected, matched)
        test = encodable(report.nodeid)
        if test in self.results:  # of another subtest
            result = self.results[test] + result
        self.results[test] = result

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take the unused entries from an xdist worker; all workers collect the same tests."""
        self.unused = getattr(node, "workeroutput", {}).get(_UNUSED, self.unused)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Update the manifest if requested, unless collection failed or the run was interrupted."""
        completed = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if not self.update or is_worker(self.config) or not completed or self.config.option.collectonly:
            return
        self.change = manifest.updated(self.known, self.results, [self.known[n] for n in self.unused])
        text = manifest.dump(self.change.manifest, manifest.head_of(self.path))
        try:
            write_file(self.path, text.replace("\n", manifest.line_break_of(self.path)))
        except UsageError as error:
            self.failed_to_write = error.message
            if session.exitstatus == pytest.ExitCode.OK:  # failures were reported as added to the manifest
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the changes to the manifest, or its unused entries."""
        lines, change = list[str](), self.change
        if self.failed_to_write is not None:
            lines = [self.failed_to_write, "The run fails: what it reports as added is not in the manifest."]
        elif change is not None:
            lines = [f"{len(change.added)} added, {len(change.changed)} changed, {len(change.removed)} removed"]
            for sign, tests in (("+", change.added), ("~", change.changed), ("-", change.removed), ("?", change.edit)):
                lines += [f"{sign} {test}" for test in tests]
            if change.edit:
                lines.append("Patterns are not updated: let them name fewer tests, or add strict = false.")
            if any(entry.reason == NO_REASON for entry in change.manifest):
                lines.append(f"Replace {NO_REASON!r} with the reason.")
        elif self.update:
            lines = ["The manifest was not updated, because the run did not complete."]
        elif self.unused:
            unused = sorted(self.known[position].test for position in self.unused)
            entries = "entry" if len(unused) == 1 else "entries"
            lines = [f"{len(unused)} unused {entries}: the tests do not exist", *unused]
            # Likely causes: a path or an id as pytest does not write them.
            files = sorted({_file(test) for test in unused})
            odd = [file for file in files if as_in_ids(file) != file and "*" not in file]
            lines += [f"The path {file} is not as in the ids of pytest: write {as_in_ids(file)}." for file in odd]
            if any("::" not in test for test in unused):
                lines.append("Write the ids that `pytest --collect-only -q` shows.")
            lines.append(self.how_to_update)
        if lines:
            terminalreporter.section(f"lowprec: {self.shown}")
            for line in lines:
                terminalreporter.write_line(visible_text(line))


def _expected(entry: KnownFailure) -> str:
    """``NotImplementedError with a message that matches 'dot'``."""
    names = " or ".join(entry.exceptions)
    if entry.match is None:
        return names
    return f"{names} with a message that matches {entry.match!r}"
