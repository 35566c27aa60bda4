"""Known failures: ``--lowprec-manifest`` and ``--lowprec-update-manifest``. Never imports torch.

Outcomes are changed in the process that runs a test; what they come to is summed up from the reports, which pytest-xdist
brings to one process.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from lowprec_check.errors import UsageError
from lowprec_check.pytest_plugin import manifest, options
from lowprec_check.pytest_plugin.manifest import NO_REASON, Known, Manifest

_UNUSED = "lowprec_unused"


def register(config: pytest.Config) -> None:
    """Read the manifest and take part in the session; raises :class:`pytest.UsageError` where it cannot be read."""
    path, update = options.path(config, "manifest"), bool(config.getoption("lowprec_update_manifest"))
    if path is None:
        raise pytest.UsageError("--lowprec-update-manifest: give --lowprec-manifest FILE too, or the ini key.")
    try:
        known = {} if update and not path.exists() else manifest.read(path)
    except UsageError as error:
        raise pytest.UsageError(f"{options.where(config, 'manifest')}: {error}") from None
    config.pluginmanager.register(KnownFailures(config, path, known, update), "lowprec-known")


class KnownFailures:
    """Holds tests to the manifest, or the manifest to the tests."""

    def __init__(self, config: pytest.Config, path: Path, known: Manifest, update: bool) -> None:
        self.config, self.path, self.known, self.update = config, path, known, update
        self.results: dict[str, str | None] = {}
        self.raising: set[str] = set()
        self.unused: list[str] = []
        self.change: manifest.Change | None = None
        self.failed_to_write: str | None = None

    # -- where tests run

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Find the entries that belong to no test."""
        self.unused = _unused(self.known, config, items)
        if options.is_worker(config):
            config.workeroutput[_UNUSED] = self.unused  # type: ignore[attr-defined]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """A known failure is expected; a known failure that passes is a failure."""
        report = yield
        if report.when == "teardown" or hasattr(report, "wasxfail"):
            return report
        known = self.known.get(item.nodeid)
        raised = type(call.excinfo.value).__name__ if report.failed and call.excinfo else None
        report.lowprec_raised = raised  # type: ignore[attr-defined]
        if raised is not None:
            self.raising.add(item.nodeid)  # a subtest's failure comes before the pass of its test
            self._failed(report, known, raised)
        elif report.passed and report.when == "call" and known and not self.update and item.nodeid not in self.raising:
            report.outcome = "failed"
            report.longrepr = self._unexpected_pass(known)
        return report

    def _failed(self, report: pytest.TestReport, known: Known | None, raised: str) -> None:
        if self.update or (known is not None and known.exception == raised):
            report.outcome = "skipped"
            report.wasxfail = known.reason if known else "entered into the manifest"
        elif known is not None:
            said = f"The manifest knows that this test fails, but with {known.exception}; it raised {raised}."
            report.sections.append((f"lowprec: {self._shown()}", f"{said}\n{self._how_to_update()}"))

    def _unexpected_pass(self, known: Known) -> str:
        return (
            f"Passes, though {self._shown()} knows that it fails with {known.exception} ({known.reason}).\n"
            f"{self._how_to_update()}"
        )

    def _how_to_update(self) -> str:
        return f"To update it: pytest --lowprec-manifest {self._shown()} --lowprec-update-manifest"

    def _shown(self) -> str:
        try:
            return self.path.relative_to(self.config.invocation_params.dir).as_posix()
        except ValueError:
            return str(self.path)

    # -- where results come together

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect what each test did."""
        if report.when == "teardown" or not hasattr(report, "lowprec_raised"):
            return
        raised: str | None = report.lowprec_raised
        if raised is not None:
            self.results[report.nodeid] = raised
        elif report.when == "call" and (report.passed or report.failed):
            self.results.setdefault(report.nodeid, None)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """An xdist worker is done: all of them collected the same tests."""
        self.unused = getattr(node, "workeroutput", {}).get(_UNUSED, self.unused)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Rewrite the manifest if asked to; not where collection failed or the run was interrupted."""
        whole = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if not self.update or options.is_worker(self.config) or not whole:
            return
        self.change = manifest.updated(self.known, self.results, self.unused)
        text = manifest.dump(self.change.manifest.values(), manifest.head_of(self.path))
        try:
            self.path.write_text(text, encoding="utf-8")
        except OSError as error:
            self.failed_to_write = f"Cannot write {self._shown()}: {error.strerror}."

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say what was changed, and which entries are of no use."""
        lines = self._changes() if self.update else self._unused_lines()
        if lines:
            terminalreporter.section(f"lowprec: {self._shown()}")
            for line in lines:
                terminalreporter.write_line(line)

    def _changes(self) -> list[str]:
        if self.failed_to_write is not None:
            return [self.failed_to_write]
        if self.change is None:
            return ["Not rewritten: the run did not get through."]
        change = self.change
        lines = [f"{len(change.added)} added, {len(change.changed)} changed, {len(change.removed)} removed"]
        for sign, tests in (("+", change.added), ("~", change.changed), ("-", change.removed)):
            lines += [f"{sign} {test}" for test in tests]
        if any(known.reason == NO_REASON for known in change.manifest.values()):
            lines.append(f"Say why, in place of {NO_REASON!r}.")
        return lines

    def _unused_lines(self) -> list[str]:
        if not self.unused:
            return []
        return [f"{len(self.unused)} unused: there is no such test", *self.unused, self._how_to_update()]


def _unused(known: Manifest, config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """Entries whose file was collected, or is gone, without such a test in it; nothing can be said where files were cut."""
    if any("::" in argument for argument in config.args) or config.getoption("lf", False):
        return []
    tests, files = {item.nodeid for item in items}, {_file(item.nodeid) for item in items}
    gone = [
        test
        for test in known
        if test not in tests and (_file(test) in files or not (config.rootpath / _file(test)).exists())
    ]
    return sorted(gone)


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
