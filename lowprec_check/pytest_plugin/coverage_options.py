"""The options of ``--lowprec-coverage``: checked before any test is collected."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import NamedTuple

import pytest

from lowprec_check.catalog.aten import AtenCatalog
from lowprec_check.catalog.measured import catalog_device
from lowprec_check.catalog.records import Dtype
from lowprec_check.errors import UsageError
from lowprec_check.pytest_plugin import options
from lowprec_check.pytest_plugin.coverage_gate import FAIL_ON, NEVER, CoverageGate, load_baseline
from lowprec_check.report.coverage import RENDERERS
from lowprec_check.schema.precisions import FP16, PRECISIONS, Precision, low_precisions
from lowprec_check.schema.registry import choices, words_in

FORMATS = ("text", "github")
_NEED_COVERAGE = ("device", "report", "format", "fail_on", "baseline")


class CoverageColumn(NamedTuple):
    """One precision to look operators up in."""

    precision: Precision
    catalog: AtenCatalog

    @property
    def key(self) -> str:
        """In saved coverage: the dtype of a cast, ``float16``; the name under autocast, ``autocast-bf16``."""
        return self.precision.format.name if self.precision.kind == "cast" else self.precision.name


class CoverageOptions(NamedTuple):
    """What was asked for."""

    columns: list[CoverageColumn]
    report: Path | None
    how: str
    """One of :data:`FORMATS`."""
    gate: CoverageGate


def checked_options(config: pytest.Config) -> CoverageOptions | None:
    """The options; ``None`` if no coverage was asked for. Raises :class:`pytest.UsageError` if one is wrong."""
    names = options.value(config, "coverage")
    if not names:
        alone = [
            f"--lowprec-{name.replace('_', '-')}" for name in _NEED_COVERAGE if config.getoption(f"lowprec_{name}")
        ]
        if alone:
            raise pytest.UsageError(
                f"Without --lowprec-coverage, {alone[0]} does nothing: add --lowprec-coverage half."
            )
        return None
    how = _one_of(config, "format", FORMATS)
    report = _report(config)
    wrong = "device"
    try:
        device = _device(options.value(config, "device") or "cpu")
        wrong = "coverage"
        given = PRECISIONS.names_in(names, _known()) if any(words_in(names)) else []
        if not given:
            raise UsageError("No precision is given.", f"Choose from {', '.join(_known())}.")
        columns = [_column(name, device) for name in given]
    except UsageError as error:
        raise pytest.UsageError(f"{options.where(config, wrong)}: {error}") from None
    return CoverageOptions(columns, report, how, _gate(config, columns, report))


def _one_of(config: pytest.Config, name: str, known: tuple[str, ...]) -> str:
    """The value of an option that has a few; by default the first."""
    given = options.value(config, name) or known[0]
    if given not in known:
        what = name.replace("_", "-")
        raise pytest.UsageError(f"{options.where(config, name)}: unknown {what} {given!r}: use {choices([*known])}.")
    return str(given)


def _report(config: pytest.Config) -> Path | None:
    report = options.path(config, "report")
    if report is not None and report.is_dir():
        raise pytest.UsageError(f"{options.where(config, 'report')}: {report} is a folder: name a file in it.")
    if report is not None and report.suffix not in RENDERERS:
        where = options.where(config, "report")
        raise pytest.UsageError(f"{where}: unknown format {report.name!r}: use {choices([*RENDERERS])}.")
    if report is not None and not report.parent.is_dir():
        raise pytest.UsageError(f"{options.where(config, 'report')}: the folder {report.parent} does not exist.")
    return report


def _device(device: str) -> str:
    """The type of the device, ``cuda`` for ``cuda:0``: all devices of a type have the same kernels."""
    kind = catalog_device(device)
    index = device.strip().partition(":")
    if index[1] and not index[2].isdecimal():
        raise UsageError(f"Unknown device {device!r}.", f"Use {kind}, or {kind}:0.")
    return kind


def _known() -> list[str]:
    """The precisions that the catalog has data for."""
    return [precision.name for precision in low_precisions() if precision.kind in ("cast", "autocast")]


def _column(name: str, device: str) -> CoverageColumn:
    precision = PRECISIONS.get(name)
    if name not in _known():
        what = "fp32 is the baseline." if precision.kind == "reference" else f"Coverage does not know {name}."
        raise UsageError(what, f"Choose from {', '.join(_known())}.")
    dtype: Dtype = "float16" if precision.format == FP16 else "bfloat16"
    installed = importlib.metadata.version("torch")
    return CoverageColumn(precision, AtenCatalog(device, dtype, installed, autocast=precision.kind == "autocast"))


def _gate(config: pytest.Config, columns: list[CoverageColumn], report: Path | None) -> CoverageGate:
    """The gate, with the baseline, which is read now, since the report of this run may replace it."""
    fail_on, path = _one_of(config, "fail_on", FAIL_ON), options.path(config, "baseline")
    if path is None:
        if fail_on == "new":
            raise pytest.UsageError(
                f"{options.where(config, 'fail_on')}: new gaps are those that a baseline does not have: add "
                "--lowprec-baseline FILE.json."
            )
        return CoverageGate(fail_on)
    if options.is_worker(config):  # the process that collects the results compares them
        return CoverageGate(NEVER)
    try:
        baseline = load_baseline(path, columns[0].catalog.device, [column.key for column in columns])
    except UsageError as error:
        raise pytest.UsageError(f"{options.where(config, 'baseline')}: {error}") from None
    replaces = report is not None and report.resolve() == path.resolve()
    return CoverageGate(fail_on, baseline, options.shown(config, path), replaces=replaces)
