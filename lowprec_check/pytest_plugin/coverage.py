"""``--lowprec-coverage``: the operators that a project's tests use, and which of them do not support a low precision.

Tests run unchanged. The process that runs a test attaches the operators to the test report. pytest-xdist sends the reports to
one process, which looks the operators up in the catalog. Only processes that run tests import torch.
"""

from __future__ import annotations

import importlib.metadata
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lowprec_check.catalog.aten import AtenCatalog
from lowprec_check.catalog.measured import catalog_device
from lowprec_check.catalog.names import dtype_of
from lowprec_check.catalog.records import LOW, Dtype
from lowprec_check.errors import UsageError, encodable
from lowprec_check.pytest_plugin import options
from lowprec_check.report.coverage import RENDERERS, Coverage, OpUse, coverage_text
from lowprec_check.schema.files import write_file
from lowprec_check.schema.registry import choices

if TYPE_CHECKING:
    from lowprec_check.pytest_plugin.fixture.watch import Watch


def register(config: pytest.Config) -> None:
    """Check the options and register the plugin; raises :class:`pytest.UsageError` if an option is wrong."""
    names, device = options.value(config, "coverage"), options.value(config, "device") or "cpu"
    report = options.path(config, "report")
    if not names:
        if config.option.lowprec_device or config.option.lowprec_report:
            raise pytest.UsageError(
                "--lowprec-device and --lowprec-report need --lowprec-coverage: add --lowprec-coverage half."
            )
        return
    if report is not None and report.suffix not in RENDERERS:
        where = options.where(config, "report")
        raise pytest.UsageError(f"{where}: unknown format {report.name!r}: use {choices([*RENDERERS])}.")
    if report is not None and not report.parent.is_dir():
        raise pytest.UsageError(f"{options.where(config, 'report')}: the folder {report.parent} does not exist.")
    installed = importlib.metadata.version("torch")
    wrong = "device"
    try:
        device = catalog_device(device)
        wrong = "coverage"
        catalogs = [AtenCatalog(device, dtype, installed) for dtype in dict.fromkeys(map(_low, names))]
    except UsageError as error:
        raise pytest.UsageError(f"{options.where(config, wrong)}: {error}") from None
    config.pluginmanager.register(CoverageRecorder(config, catalogs, report), "lowprec-coverage")


def _low(name: str) -> Dtype:
    dtype = dtype_of(name)
    if dtype not in LOW:
        raise UsageError(f"{name!r} is not a low precision.", "Choose half or bfloat16.")
    return dtype


class CoverageRecorder:
    """Records the operators of each test and reports them at the end."""

    def __init__(self, config: pytest.Config, catalogs: list[AtenCatalog], report: Path | None) -> None:
        self.config, self.catalogs, self.report = config, catalogs, report
        self.tests: set[str] = set()
        self.uses: dict[str, set[str]] = defaultdict(set)
        self.found: Coverage | None = None
        self.failed_to_write: str | None = None
        self._watch: Watch | None = None

    # -- in processes that run tests

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, object, object]:
        """Record the setup of fixtures."""
        return (yield from self._recorded())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        """Record the test."""
        return (yield from self._recorded())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        """Record the teardown of fixtures."""
        return (yield from self._recorded())

    def _recorded(self) -> Generator[None, object, object]:
        if self._watch is None:
            from lowprec_check.pytest_plugin.fixture.watch import Watch

            self._watch = Watch()
        self._watch.start()
        try:
            return (yield)
        finally:
            self._watch.stop()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach the operators to the report."""
        report = yield
        report.lowprec_ops = self._watch.take() if self._watch else []  # type: ignore[attr-defined]
        return report

    # -- in the process that collects results

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the operators of each test."""
        self.tests.add(encodable(report.nodeid))
        for op in getattr(report, "lowprec_ops", ()):
            self.uses[op].add(encodable(report.nodeid))

    def pytest_sessionfinish(self) -> None:
        """Look up the operators and write the report."""
        if options.is_worker(self.config):
            return
        self.found = self._coverage()
        if self.report is not None:
            try:
                write_file(self.report, RENDERERS[self.report.suffix](self.found))
            except UsageError as error:
                self.failed_to_write = error.message

    def _coverage(self) -> Coverage:
        first = self.catalogs[0]
        return Coverage(
            device=first.device,
            torch=first.torch,
            evidence=first.evidence,
            recorded_torch=importlib.metadata.version("torch"),
            dtypes=[catalog.dtype for catalog in self.catalogs],
            tests=len(self.tests),
            ops=[
                OpUse(op=op, tests=sorted(tests), support={c.dtype: c.of(op) for c in self.catalogs})
                for op, tests in sorted(self.uses.items())
            ],
        )

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the table: with ``-v`` all operators, else only those that do not run in all cases."""
        if self.found is None:
            return
        terminalreporter.section("lowprec coverage")
        every = self.config.get_verbosity() > 0
        for line in coverage_text(self.found, every=every).splitlines():
            terminalreporter.write_line(line)
        if self.report is not None:
            terminalreporter.write_line(self.failed_to_write or f"Full report: {self.report}")
