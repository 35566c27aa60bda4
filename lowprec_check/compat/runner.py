"""Scans many models, each in its own process; resumes after an interruption."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
from collections.abc import Callable, Generator, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lowprec_check.compat.executors import map_unordered
from lowprec_check.compat.report_folder import needs_scan, scan_path
from lowprec_check.compat.scan_process import (
    ScanLimits,
    ScanOutcome,
    end_running_scans,
    failed_row,
    request_of,
    row_of,
    scan_one,
    temporary_file,
)
from lowprec_check.compat.target_list import Request
from lowprec_check.errors import UsageError, message_of, type_name
from lowprec_check.schema.base import make_folder
from lowprec_check.schema.matrix import Matrix, MatrixRow, load, save
from lowprec_check.schema.scan_result import ResultError, ScanResult

OnRow = Callable[[int, int, MatrixRow, "ScanResult | None"], None]


def scan_all(
    requests: list[Request],
    folder: Path,
    *,
    jobs: int = 1,
    engine: str | None = None,
    timeout: float = 1800.0,
    retry_failed: bool = False,
    pages: Iterable[str] = (".md",),
    on_row: OnRow | None = None,
) -> Matrix:
    """Scan the models that ``folder`` does not contain yet; every row is saved as soon as its scan has ended.

    ``matrix.json`` and ``scans/<slug>.json`` are written into ``folder``, which is made again if it is removed meanwhile.
    A model whose scan is gone is done if it has all ``pages`` (suffixes). ``on_row`` is called with the number of finished
    rows, the number of all rows, the row, and its result (``None`` if the scan failed).

    Raises:
        UsageError: the engine is unknown, not installed or not reachable, ``matrix.json`` in the folder is not valid, or
            a file cannot be written.
    """
    make_folder(folder)
    versions = _versions()
    made_with = {request: versions | _file(request.target) for request in requests}
    rows = {
        request_of(row): row
        for row in load(folder / "matrix.json").rows
        if row.made_with == made_with.get(request_of(row), row.made_with | versions)
        and _is_done(row, folder, retry_failed, pages if request_of(row) in made_with else (".md",))
    }
    missing = [request for request in requests if request not in rows]
    threads = max(1, (os.cpu_count() or 1) // jobs) if jobs > 1 and engine is None else None
    with contextlib.closing(_outcomes(missing, ScanLimits(timeout, threads), jobs, engine)) as outcomes:
        for outcome in outcomes:
            row, result = _row(outcome, made_with[outcome.request])
            make_folder(folder / "scans")
            if result is not None:
                result.save(scan_path(folder, row))
            rows[outcome.request] = row
            save(_ordered(rows, requests), folder / "matrix.json")
            if on_row is not None:
                on_row(sum(request in rows for request in requests), len(requests), row, result)
    matrix = _ordered(rows, requests)
    save(matrix, folder / "matrix.json")
    return matrix


def _versions() -> dict[str, str]:
    found = {}
    for name, package in (("tool", "lowprec-check"), ("torch", "torch")):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(package)
    return found


def _file(target: str) -> dict[str, str]:
    """A digest of the target's file, if it is one, so that an edited file is scanned again."""
    path = re.sub(r"(\.py):[^:]*$", r"\1", target)
    with contextlib.suppress(OSError, ValueError):
        return {"file": hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]}
    return {}


def _is_done(row: MatrixRow, folder: Path, retry_failed: bool, pages: Iterable[str]) -> bool:
    """Whether a saved row need not be scanned again: its scan is saved, or at least its pages."""
    return not retry_failed if row.state == "failed" else not needs_scan(folder, row, pages)


def _ordered(rows: dict[Request, MatrixRow], requests: list[Request]) -> Matrix:
    """The requested rows in their order, then the rows of earlier calls."""
    first = [rows[request] for request in requests if request in rows]
    slugs, asked = {request.slug for request in requests}, {request._replace(slug="") for request in requests}
    others = [row for key, row in rows.items() if row.slug not in slugs and key._replace(slug="") not in asked]
    return Matrix(rows=[*first, *others])


def _row(outcome: ScanOutcome, made_with: dict[str, str]) -> tuple[MatrixRow, ScanResult | None]:
    if outcome.reason is None:
        try:
            result = ScanResult.from_json(outcome.json)
        except ResultError as error:
            outcome = outcome._replace(reason=message_of(error))
        else:
            return row_of(result, outcome.request, outcome.seconds, made_with), result
    return failed_row(outcome.request, outcome.reason or "no reason given", outcome.seconds, made_with), None


def _outcomes(
    requests: list[Request], limits: ScanLimits, jobs: int, engine: str | None
) -> Generator[ScanOutcome, None, None]:
    """Yield outcomes in order of completion. If iteration stops early, the scans still running on this machine are killed."""
    if requests and engine is None:
        temporary_file().close()  # without one, no scan can run
    scan = functools.partial(scan_one, limits=limits)
    yield from map_unordered(scan, requests, jobs, engine, on_error=_failed, stop=end_running_scans)


def _failed(request: Request, error: Exception) -> ScanOutcome:
    """The outcome of a scan that could not be started, or that killed its worker in the cluster."""
    reason = error.message if isinstance(error, UsageError) else f"{type_name(error)}: {message_of(error)}"
    return ScanOutcome(request, b"", reason[:500], 0.0)
