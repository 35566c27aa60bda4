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
        self.found: dict[str, KnownFailure] = {}
        """The entry of each test that has one."""
        self.problems: dict[str, str] = {}
        """By test."""

    def find(self, items: Sequence[pytest.Item]) -> None:
        """Find the entry of each test; one with two entries that are equally close is a problem."""
        for item in items:
            test = encodable(item.nodeid)
            named = [*self._exact.get(test, ()), *(entry for entry in self._patterns if entry.names(test))]
            try:
                found = closest([entry for entry in named if entry.applies_here and _runs_on(item, entry.device)], test)
            except UsageError as error:
                self.problems[item.nodeid] = str(error)
                continue
            if found is not None:
                self.found[item.nodeid] = found

    def unused(self, config: pytest.Config, items: Sequence[pytest.Item]) -> list[int]:
        """Positions of the entries that name no test, although its file was collected or is
        missing.

        None if only parts of files were collected. An entry that does not apply here may name tests
        that exist elsewhere only.
        """
        if any("::" in argument for argument in config.args) or config.getoption("lf", False):
            return []
        tests = {encodable(item.nodeid) for item in items}
        files = {_file(test) for test in tests}

        def is_missing(entry: KnownFailure) -> bool:
            file = _file(entry.test)
            if "*" in file:  # it may be any, also one that was not collected
                return False
            return file in files or as_in_ids(file) in files or not (config.rootpath / file).exists()

        return [
            position
            for position, entry in enumerate(self._known)
            if entry.applies_here
            and (entry.device is None or is_device_available(entry.device))
            and is_missing(entry)
            and not any(map(entry.names, tests if "*" in entry.test else tests & {entry.test}))
        ]


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def as_in_ids(file: str) -> str:
    """A path as pytest writes it in ids on every system: ``tests/test_a.py``."""
    return posixpath.normpath(file.replace("\\", "/"))


def _runs_on(item: pytest.Item, device: str | None) -> bool:
    """Whether a test with the marker runs on a type of device; else, whether this machine has it.

    A test without the marker chooses the best device, if any: ``cpu`` are machines without an
    accelerator.
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
# The process that runs a test changes its outcome. The summary is made from the test reports, which pytest-xdist sends to one
# process.

_UNUSED = "lowprec_unused"


def register(config: pytest.Config) -> None:
    """Read the manifest and register the plugin."""
    path, update = option_path(config, "manifest"), bool(config.getoption("lowprec_update_manifest"))
    if path is None:
        raise pytest.UsageError(
            "--lowprec-update-manifest needs a manifest: add --lowprec-manifest FILE or the ini key lowprec_manifest."
        )
    if update and not path.parent.is_dir():
        raise wrong_option(config, "manifest", f"the folder {path.parent} does not exist.")
    try:
        if update and not path.exists():
            known = []
        else:
            known = manifest.read(path)
    except UsageError as error:
        raise wrong_option(config, "manifest", error) from None
    config.pluginmanager.register(KnownFailures(config, path, known, update), "lowprec-known")


class KnownFailures:
    """Checks tests against the manifest, or updates the manifest."""

    def __init__(self, config: pytest.Config, path: Path, known: Manifest, update: bool) -> None:
        self.config, self.path, self.known, self.update = config, path, known, update
        self.shown = shown_path(config, path)
        self.how_to_update = (
            f"To update the manifest, run: pytest --lowprec-manifest {self.shown} --lowprec-update-manifest"
        )
        self.entries = EntryOfTest(known)
        self.results: dict[str, Result] = {}
        self.unexpected: dict[str, bool] = {}
        """By test that raised, in this process: whether anything was unexpected."""
        self.unused: list[int] = []
        """Positions in the manifest."""
        self.change: manifest.Change | None = None
        self.failed_to_write: str | None = None
        self._in_phase = False

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
        known = self.entries.found.get(item.nodeid)
        if report.when == "teardown" and not is_subtest:
            if report.failed and (known is not None or self.update):
                text = (
                    f"An error in the teardown cannot be a known failure: {self.shown} is about the test and its setup."
                )
                advice = "So nothing was added to the manifest for it. Fix the teardown."
                if known is not None:
                    advice = f"Fix the teardown. The entry {known.test} is for a test that fails itself: if it passes, remove the entry."
                report.sections.append((f"lowprec: {self.shown}", f"{text}\n{advice}"))
            return report
        if report.failed and call.excinfo:
            self._failed(report, known, call.excinfo.value)
        elif report.passed and report.when == "call" and not is_subtest:
            self._passed(report, known)
        return report

    def _failed(self, report: pytest.TestReport, known: KnownFailure | None, error: BaseException) -> None:
        raised = type_name(error)
        problem = " with another message"
        try:
            matched = known is None or known.matches(error)
        except TimeoutError:
            matched, problem = False, f" with a message that takes more than {MATCH_SECONDS:g} s to match"
        expected = known is not None and raised in known.exceptions and matched
        self._attach(report, Result((raised,), known, expected, matched))
        self.unexpected[report.nodeid] = self.unexpected.get(report.nodeid, False) or not expected
        if self.update or expected:
            report.outcome = "skipped"
            report.wasxfail = known.reason if known else "added to the manifest"
        elif known is not None:
            which = problem if raised in known.exceptions else ""
            text = f"Raised {raised}{which}, but {self.shown} expects {_expected(known)}."
            report.sections.append((f"lowprec: {self.shown}", f"{text}\n{self.how_to_update}"))

    def _passed(self, report: pytest.TestReport, known: KnownFailure | None) -> None:
        """A test passed, but its subtests may have failed."""
        if report.nodeid in self.unexpected:
            if self.update or not self.unexpected[report.nodeid]:
                report.outcome = "skipped"
                report.wasxfail = known.reason if known else "added to the manifest"
            return
        self._attach(report, Result((), known))
        if known is None or self.update:
            return
        if known.strict:
            report.outcome = "failed"
            text = f"Passed, but {self.shown} expects it to fail with {_expected(known)} ({known.reason})."
            is_exact = known.is_exact(encodable(report.nodeid))
            pattern = f"The entry is {known.test}: let it name fewer tests, or add strict = false."
            report.longrepr = f"{text}\n{self.how_to_update if is_exact else pattern}"
        else:
            report.wasxfail = known.reason

    def _attach(self, report: pytest.TestReport, result: Result) -> None:
        """Attach what pytest-xdist can send."""
        position = None
        if result.entry is not None:
            position = self.known.index(result.entry)
        report.lowprec_known = [list(result.raised), position, result.expected, result.matched]  # type: ignore[attr-defined]

    # -- in the process that collects results

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the result of each test."""
        if not hasattr(report, "lowprec_known"):
            return
        raised, position, expected, matched = report.lowprec_known
        found = Result(tuple(raised), None if position is None else self.known[position], expected, matched)
        earlier = self.results.get(encodable(report.nodeid))
        if earlier is None:
            self.results[encodable(report.nodeid)] = found
        else:
            self.results[encodable(report.nodeid)] = earlier + found

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
        if self.update:
            lines = self._changes()
        else:
            lines = self._unused_lines()
        if lines:
            terminalreporter.section(f"lowprec: {self.shown}")
            for line in lines:
                terminalreporter.write_line(visible_text(line))

    def _changes(self) -> list[str]:
        if self.failed_to_write is not None:
            return [self.failed_to_write, "The run fails: what it reports as added is not in the manifest."]
        if self.change is None:
            return ["The manifest was not updated, because the run did not complete."]
        change = self.change
        lines = [f"{len(change.added)} added, {len(change.changed)} changed, {len(change.removed)} removed"]
        for sign, tests in (("+", change.added), ("~", change.changed), ("-", change.removed)):
            lines += [f"{sign} {test}" for test in tests]
        lines += [f"? {pattern}" for pattern in change.edit]
        if change.edit:
            lines.append("Patterns are not updated: let them name fewer tests, or add strict = false.")
        if any(known.reason == NO_REASON for known in change.manifest):
            lines.append(f"Replace {NO_REASON!r} with the reason.")
        return lines

    def _unused_lines(self) -> list[str]:
        if not self.unused:
            return []
        tests = sorted(self.known[position].test for position in self.unused)
        files = {test.partition("::")[0] for test in tests}
        written = [file for file in sorted(files) if as_in_ids(file) != file and "*" not in file]
        return [
            f"{len(self.unused)} unused {'entry' if len(self.unused) == 1 else 'entries'}: the tests do not exist",
            *tests,
            *(f"The path {file} is not as in the ids of pytest: write {as_in_ids(file)}." for file in written),
            *(["Write the ids that `pytest --collect-only -q` shows."] if any("::" not in t for t in tests) else []),
            self.how_to_update,
        ]


def _expected(known: KnownFailure) -> str:
    """``NotImplementedError with a message that matches 'dot'``."""
    names = " or ".join(known.exceptions)
    if known.match is None:
        return names
    return f"{names} with a message that matches {known.match!r}"
