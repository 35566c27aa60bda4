"""``--lowprec-coverage``: the operators that a project's tests use, and which of them do not support a low precision.

Tests run unchanged. The process that runs a test attaches the operators to the test report. pytest-xdist sends the reports to
one process, which looks the operators up in the catalog. Only processes that run tests import torch.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from lowprec_check.catalog.aten import AtenCatalog, AtenSupport, AutocastDtype
from lowprec_check.catalog.measured import catalog_device
from lowprec_check.catalog.numbers import Numbers, stronger
from lowprec_check.catalog.records import Dtype
from lowprec_check.errors import UsageError, encodable
from lowprec_check.pytest_plugin import options
from lowprec_check.pytest_plugin.replayed_calls import KeptCalls
from lowprec_check.report.coverage import RENDERERS, Coverage, OpUse, coverage_github, coverage_text
from lowprec_check.schema.files import write_file
from lowprec_check.schema.precisions import FP16, PRECISIONS, Precision, low_precisions
from lowprec_check.schema.registry import choices

if TYPE_CHECKING:
    from lowprec_check.pytest_plugin.fixture.watch import Watch

FORMATS = ("text", "github")
_POLICIES = "lowprec_autocast_policies"


class CoverageColumn(NamedTuple):
    """One precision to look operators up in."""

    precision: Precision
    catalog: AtenCatalog

    @property
    def key(self) -> str:
        """In saved coverage: the dtype of a cast, ``float16``; the name under autocast, ``autocast-bf16``."""
        return self.precision.format.name if self.precision.kind == "cast" else self.precision.name


def register(config: pytest.Config) -> None:
    """Check the options and register the plugin; raises :class:`pytest.UsageError` if an option is wrong."""
    names, device = options.value(config, "coverage"), options.value(config, "device") or "cpu"
    report, how = options.path(config, "report"), options.value(config, "format") or "text"
    option = config.option
    if not names:
        if option.lowprec_device or option.lowprec_report or option.lowprec_format:
            raise pytest.UsageError(
                "--lowprec-device, --lowprec-report and --lowprec-format need --lowprec-coverage: add --lowprec-coverage half."
            )
        return
    if how not in FORMATS:
        raise pytest.UsageError(f"{options.where(config, 'format')}: unknown format {how!r}: use {choices(FORMATS)}.")
    if report is not None and report.suffix not in RENDERERS:
        where = options.where(config, "report")
        raise pytest.UsageError(f"{where}: unknown format {report.name!r}: use {choices([*RENDERERS])}.")
    if report is not None and not report.parent.is_dir():
        raise pytest.UsageError(f"{options.where(config, 'report')}: the folder {report.parent} does not exist.")
    wrong = "device"
    try:
        device = catalog_device(device)
        wrong = "coverage"
        columns = [_column(name, device) for name in PRECISIONS.names_in(names)]
    except UsageError as error:
        raise pytest.UsageError(f"{options.where(config, wrong)}: {error}") from None
    recorder = CoverageRecorder(config, columns, report, how)
    config.pluginmanager.register(recorder, "lowprec-coverage")
    config.pluginmanager.register(recorder.kept, "lowprec-kept-calls")


def _column(name: str, device: str) -> CoverageColumn:
    precision = PRECISIONS.get(name)
    if precision.kind not in ("cast", "autocast"):
        known = [other.name for other in low_precisions() if other.kind in ("cast", "autocast")]
        what = "fp32 is the baseline." if precision.kind == "reference" else f"Coverage does not know {name}."
        raise UsageError(what, f"Choose from {', '.join(known)}.")
    dtype: Dtype = "float16" if precision.format == FP16 else "bfloat16"
    installed = importlib.metadata.version("torch")
    return CoverageColumn(precision, AtenCatalog(device, dtype, installed, autocast=precision.kind == "autocast"))


class CoverageRecorder:
    """Records the operators of each test and reports them at the end."""

    def __init__(self, config: pytest.Config, columns: list[CoverageColumn], report: Path | None, how: str) -> None:
        self.config, self.columns, self.report, self.how = config, columns, report, how
        self.root = _root(config)
        self.lines: dict[str, str] = {}
        """By test, the line of its definition, ``tests/test_net.py:7``."""
        self.uses: dict[str, dict[str, tuple[Numbers, str | None]]] = {}
        """By operator and test."""
        self.policies: dict[str, AutocastDtype] = {}
        self.found: Coverage | None = None
        self.failed_to_write: str | None = None
        self.kept = KeptCalls(config, [column.catalog for column in columns])
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
            from lowprec_check.pytest_plugin.fixture.kept_calls import CallKeeper
            from lowprec_check.pytest_plugin.fixture.watch import Watch

            self.kept.keeper = CallKeeper(self.kept.position)
            self._watch = Watch(str(self.root), self._may_be_gap, self.kept.wants, self.kept.keeper)
        self._watch.start()
        try:
            return (yield)
        finally:
            self._watch.stop()

    def _may_be_gap(self, op: str) -> bool:
        known = any(column.catalog.of(op).state in ("some", "none") for column in self.columns)
        return known or self.kept.wants(op)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach the operators to the report."""
        report = yield
        found = self._watch.take() if self._watch else {}
        report.lowprec_ops = {op: tuple(recorded) for op, recorded in found.items()}  # type: ignore[attr-defined]
        return report

    def _autocast_policies(self) -> dict[str, AutocastDtype]:
        """What autocast of the installed torch does on the device; empty if it is not needed or not known."""
        asked = [column for column in self.columns if column.precision.kind == "autocast"]
        if self._watch is None or not asked:
            return {}
        return self._watch.autocast_policies(asked[0].catalog.device, asked[0].catalog.dtype)

    # -- in the process that collects results

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the operators of each test."""
        test = encodable(report.nodeid)
        path, line, _ = report.location
        self.lines[test] = encodable(f"{self._relative(path)}:{(line or 0) + 1}")
        for op, (numbers, source) in getattr(report, "lowprec_ops", {}).items():
            tests = self.uses.setdefault(op, {})
            known, earlier = tests.get(test, (numbers, source))
            tests[test] = stronger(numbers, known), earlier or source

    def _relative(self, path: str) -> str:
        """The path of a test, which pytest reports relative to its root directory, relative to ``root``."""
        return os.path.relpath(self.config.rootpath / path, self.root)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take the policies of autocast from an xdist worker; all workers run the same torch."""
        self.policies = self.policies or getattr(node, "workeroutput", {}).get(_POLICIES, {})

    def pytest_sessionfinish(self) -> None:
        """Look up the operators and write the report."""
        if options.is_worker(self.config):
            self.config.workeroutput[_POLICIES] = self._autocast_policies()  # type: ignore[attr-defined]
            return
        self.policies = self.policies or self._autocast_policies()
        self._try_unknown()
        self.found = self._coverage()
        if self.report is not None:
            try:
                write_file(self.report, RENDERERS[self.report.suffix](self.found))
            except UsageError as error:
                self.failed_to_write = error.message

    def _coverage(self) -> Coverage:
        first = self.columns[0].catalog
        return Coverage(
            device=first.device,
            torch=first.torch,
            evidence=first.evidence,
            recorded_torch=importlib.metadata.version("torch"),
            dtypes=[column.key for column in self.columns],
            tests=len(self.lines),
            ops=[self._use(op, tests) for op, tests in sorted(self.uses.items())],
        )

    def _support(self, op: str, column: CoverageColumn) -> AtenSupport:
        """What the catalog says of an op, and what a call of it has shown."""
        support = column.catalog.of(op, _strongest(self.uses[op]), self.policies)
        return self.kept.settled(op, column.catalog.dtype, support)

    def _try_unknown(self) -> None:
        """Try a call of each op that the catalog does not know."""
        pairs = [(op, column) for op in self.uses for column in self.columns]
        self.kept.try_all((op, column.catalog.dtype, self._support(op, column)) for op, column in pairs)

    def _use(self, op: str, tests: dict[str, tuple[Numbers, str | None]]) -> OpUse:
        numbers = _strongest(tests)
        support = {column.key: self._support(op, column) for column in self.columns}
        use = OpUse(op=op, tests=sorted(tests), numbers=numbers, support=support)
        if not use.is_gap:
            return use
        sources = sorted({source or self.lines[test] for test, (_, source) in tests.items()}, key=_by_line)
        return OpUse(op=op, tests=use.tests, numbers=numbers, support=support, sources=sources)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the table: with ``-v`` all operators, else only those that do not run in all cases."""
        if self.found is None:
            return
        terminalreporter.section("lowprec coverage")
        every = self.config.get_verbosity() > 0
        text = coverage_text(self.found, every=every)
        if self.how == "github":
            text += coverage_github(self.found)
        for line in text.splitlines():
            terminalreporter.write_line(line)
        if self.report is not None:
            terminalreporter.write_line(self.failed_to_write or f"Full report: {self.report}")


def _strongest(tests: Mapping[str, tuple[Numbers, str | None]]) -> Numbers:
    """The strongest numbers that any of the tests called an op with."""
    numbers: Numbers = "integer"
    for called_with, _ in tests.values():
        numbers = stronger(numbers, called_with)
    return numbers


def _root(config: pytest.Config) -> Path:
    """The folder that lines of the project are relative to: on GitHub the checkout, where annotations look for them."""
    checkout = os.environ.get("GITHUB_WORKSPACE")
    if checkout and config.rootpath.is_relative_to(os.path.realpath(checkout)):
        return Path(os.path.realpath(checkout))
    return config.rootpath


def _by_line(source: str) -> tuple[str, int]:
    path, _, line = source.rpartition(":")
    return path, int(line)
