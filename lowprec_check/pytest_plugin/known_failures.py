"""Known failures: ``--lowprec-manifest`` and ``--lowprec-update-manifest``. Never imports torch.

The process that runs a test changes its outcome. The summary is made from the test reports, which pytest-xdist sends to one
process.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from lowprec_check.errors import UsageError, encodable, type_name
from lowprec_check.pytest_plugin import manifest, options
from lowprec_check.pytest_plugin.manifest import NO_REASON, KnownFailure, Manifest
from lowprec_check.schema.files import write_file

_UNUSED = "lowprec_unused"


def register(config: pytest.Config) -> None:
    """Read the manifest and register the plugin; raises :class:`pytest.UsageError` if it cannot be read."""
    path, update = options.path(config, "manifest"), bool(config.getoption("lowprec_update_manifest"))
    if path is None:
        raise pytest.UsageError(
            "--lowprec-update-manifest needs a manifest: add --lowprec-manifest FILE or the ini key lowprec_manifest."
        )
    try:
        known = {} if update and not path.exists() else manifest.read(path)
    except UsageError as error:
        raise pytest.UsageError(f"{options.where(config, 'manifest')}: {error}") from None
    config.pluginmanager.register(KnownFailures(config, path, known, update), "lowprec-known")


class KnownFailures:
    """Checks tests against the manifest, or updates the manifest."""

    def __init__(self, config: pytest.Config, path: Path, known: Manifest, update: bool) -> None:
        self.config, self.path, self.known, self.update = config, path, known, update
        self.results: dict[str, str | None] = {}
        self.raising: set[str] = set()
        self.unused: list[str] = []
        self.change: manifest.Change | None = None
        self.failed_to_write: str | None = None

    # -- in processes that run tests

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Find entries without a test."""
        self.unused = _unused(self.known, config, items)
        if options.is_worker(config):
            config.workeroutput[_UNUSED] = self.unused  # type: ignore[attr-defined]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Report a known failure as xfailed, and one that passes as failed."""
        report = yield
        if report.when == "teardown" or hasattr(report, "wasxfail"):
            return report
        known = self.known.get(encodable(item.nodeid))
        raised = type_name(call.excinfo.value) if report.failed and call.excinfo else None
        report.lowprec_raised = raised  # type: ignore[attr-defined]
        if raised is not None:
            self.raising.add(item.nodeid)  # a subtest fails before its test is reported as passed
            self._failed(report, known, raised)
        elif report.passed and report.when == "call" and known and not self.update and item.nodeid not in self.raising:
            report.outcome = "failed"
            report.longrepr = self._unexpected_pass(known)
        return report

    def _failed(self, report: pytest.TestReport, known: KnownFailure | None, raised: str) -> None:
        if self.update or (known is not None and known.exception == raised):
            report.outcome = "skipped"
            report.wasxfail = known.reason if known else "added to the manifest"
        elif known is not None:
            text = f"Raised {raised}, but {self._shown()} expects {known.exception}."
            report.sections.append((f"lowprec: {self._shown()}", f"{text}\n{self._how_to_update()}"))

    def _unexpected_pass(self, known: KnownFailure) -> str:
        return (
            f"Passed, but {self._shown()} expects it to fail with {known.exception} ({known.reason}).\n"
            f"{self._how_to_update()}"
        )

    def _how_to_update(self) -> str:
        return f"To update the manifest, run: pytest --lowprec-manifest {self._shown()} --lowprec-update-manifest"

    def _shown(self) -> str:
        try:
            return self.path.relative_to(self.config.invocation_params.dir).as_posix()
        except ValueError:
            return str(self.path)

    # -- in the process that collects results

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the result of each test."""
        if report.when == "teardown" or not hasattr(report, "lowprec_raised"):
            return
        raised: str | None = report.lowprec_raised
        if raised is not None:
            self.results[encodable(report.nodeid)] = raised
        elif report.when == "call" and (report.passed or report.failed):
            self.results.setdefault(encodable(report.nodeid), None)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take the unused entries from an xdist worker; all workers collect the same tests."""
        self.unused = getattr(node, "workeroutput", {}).get(_UNUSED, self.unused)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Update the manifest if requested, unless collection failed or the run was interrupted."""
        completed = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if not self.update or options.is_worker(self.config) or not completed:
            return
        self.change = manifest.updated(self.known, self.results, self.unused)
        text = manifest.dump(self.change.manifest.values(), manifest.head_of(self.path))
        try:
            write_file(self.path, text)
        except UsageError as error:
            self.failed_to_write = error.message

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the changes to the manifest, or its unused entries."""
        lines = self._changes() if self.update else self._unused_lines()
        if lines:
            terminalreporter.section(f"lowprec: {self._shown()}")
            for line in lines:
                terminalreporter.write_line(line)

    def _changes(self) -> list[str]:
        if self.failed_to_write is not None:
            return [self.failed_to_write]
        if self.change is None:
            return ["The manifest was not updated, because the run did not complete."]
        change = self.change
        lines = [f"{len(change.added)} added, {len(change.changed)} changed, {len(change.removed)} removed"]
        for sign, tests in (("+", change.added), ("~", change.changed), ("-", change.removed)):
            lines += [f"{sign} {test}" for test in tests]
        if any(known.reason == NO_REASON for known in change.manifest.values()):
            lines.append(f"Replace {NO_REASON!r} with the reason.")
        return lines

    def _unused_lines(self) -> list[str]:
        if not self.unused:
            return []
        return [
            f"{len(self.unused)} unused {'entry' if len(self.unused) == 1 else 'entries'}: the tests do not exist",
            *self.unused,
            self._how_to_update(),
        ]


def _unused(known: Manifest, config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """Entries whose test does not exist in a collected file, or whose file is missing; none if only parts of files were collected."""
    if any("::" in argument for argument in config.args) or config.getoption("lf", False):
        return []
    tests = {encodable(item.nodeid) for item in items}
    files = set(map(_file, tests))
    missing = [
        test
        for test in known
        if test not in tests and (_file(test) in files or not (config.rootpath / _file(test)).exists())
    ]
    return sorted(missing)


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
