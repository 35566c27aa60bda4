"""Scan many models, each in a process of its own; goes on where it was. Never imports torch."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from lowprec_check.compat.executors import spread
from lowprec_check.compat.rows import failed_row, row_of
from lowprec_check.errors import UsageError
from lowprec_check.schema.matrix import Matrix, Request, Row, load, named, save
from lowprec_check.schema.scan_result import ResultError, ScanResult

OnRow = Callable[[int, int, Row, "ScanResult | None"], None]


class Limits(NamedTuple):
    """What one scan may take."""

    seconds: float
    threads: int | None = None
    """OpenMP threads of each scan; ``None`` leaves them alone."""


class Outcome(NamedTuple):
    """What came of one scan: the saved JSON, or the reason."""

    request: Request
    json: bytes
    reason: str | None
    seconds: float


def read_list(path: Path) -> list[Request]:
    """A target a line, with options of ``scan`` behind it if it needs any; ``#`` begins a comment."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"Cannot read {path}: {why}.", "It must be a text file with a target a line.") from None
    requests = []
    for number, line in enumerate(lines, 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise UsageError(
                f"{path}:{number} does not parse: {error}.", "Write a target, and options of scan behind it."
            ) from None
        if words:
            requests.append(Request(words[0], tuple(words[1:])))
    return requests


def asked_for(requests: Iterable[Request], options: tuple[str, ...], devices: Iterable[str]) -> list[Request]:
    """Each model on each device, once, with the options of all in front of its own."""
    where: list[str | None] = [*devices] or [None]
    return named(
        request._replace(options=(*options, *request.options), device=device)
        for request in requests
        for device in where
    )


# -- one scan


_running: set[subprocess.Popen[bytes]] = set()


def scan_one(request: Request, limits: Limits) -> Outcome:
    """Scan in a new process; whatever happens there is an outcome. Runs on any machine that has this package."""
    device = ["--device", request.device] if request.device else []
    command = [
        sys.executable,
        "-m",
        "lowprec_check",
        "scan",
        request.target,
        "--json",
        "-",
        "--quiet",
        "--fail-on",
        "never",
    ]
    environment = dict(os.environ)
    if limits.threads is not None:
        environment["OMP_NUM_THREADS"] = str(limits.threads)
    started = time.monotonic()
    with subprocess.Popen(
        [*command, *device, *request.options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    ) as process:
        _running.add(process)
        try:
            out, err = process.communicate(timeout=limits.seconds)
            reason = None if process.returncode == 0 else _reason(err, process.returncode)
        except subprocess.TimeoutExpired:
            _kill(process)
            out, reason = b"", f"not done after {limits.seconds:.0f} s"
        except BaseException:  # interrupted
            _kill(process)
            raise
        finally:
            _running.discard(process)
    return Outcome(request, out if reason is None else b"", reason, time.monotonic() - started)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the scan and the workers it started; from any thread, as its pipes stay with the one that reads them."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


def _reason(stderr: bytes, code: int) -> str:
    """The error line of the scan, or the last that it wrote."""
    lines = [line.strip() for line in stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    said = [line[len("error: ") :] for line in lines if line.lower().startswith("error: ")]
    if code < 0:
        return f"killed by signal {-code}"
    return (said or lines or [f"exit code {code}"])[-1][:500]


# -- all of them


def run(
    requests: list[Request],
    folder: Path,
    *,
    jobs: int = 1,
    engine: str | None = None,
    timeout: float = 1800.0,
    retry_failed: bool = False,
    on_row: OnRow | None = None,
) -> Matrix:
    """Scan what ``folder`` does not have yet; every row is saved as soon as it is known.

    ``folder`` gets ``matrix.json`` and ``scans/<slug>.json``; ``on_row`` is called with how many rows there are, of how
    many, the row and its result (``None`` where it failed).

    Raises:
        UsageError: the engine is unknown, not installed or not reached, or the folder holds something else.
    """
    (folder / "scans").mkdir(parents=True, exist_ok=True)
    versions = _versions()
    made_with = {request: versions | _file(request.target) for request in requests}
    rows = {
        row.key: row
        for row in load(folder / "matrix.json").rows
        if row.made_with == made_with.get(row.key, row.made_with | versions) and _is_done(row, folder, retry_failed)
    }
    missing = [request for request in requests if request not in rows]
    threads = max(1, (os.cpu_count() or 1) // jobs) if jobs > 1 and engine is None else None
    for outcome in _outcomes(missing, Limits(timeout, threads), jobs, engine):
        row, result = _row(outcome, made_with[outcome.request])
        if result is not None:
            result.save(folder / "scans" / f"{row.slug}.json")
        rows[row.key] = row
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
    """A digest of the target's file, where it is one: edited, it is another model."""
    path = re.sub(r"(\.py):[^:]*$", r"\1", target)
    with contextlib.suppress(OSError, ValueError):
        return {"file": hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]}
    return {}


def _is_done(row: Row, folder: Path, retry_failed: bool) -> bool:
    """Whether a saved row can stay: its scan is there, or at least its page."""
    if row.state == "failed":
        return not retry_failed
    return any((folder / name).exists() for name in (f"scans/{row.slug}.json", f"models/{row.slug}.md"))


def _ordered(rows: dict[Request, Row], requests: list[Request]) -> Matrix:
    """Those asked for now in their order; then those of earlier calls."""
    first = [rows[request] for request in requests if request in rows]
    slugs, asked = {request.slug for request in requests}, {request._replace(slug="") for request in requests}
    others = [row for key, row in rows.items() if row.slug not in slugs and key._replace(slug="") not in asked]
    return Matrix(rows=[*first, *others])


def _row(outcome: Outcome, made_with: dict[str, str]) -> tuple[Row, ScanResult | None]:
    if outcome.reason is None:
        try:
            result = ScanResult.from_json(outcome.json)
        except ResultError as error:
            outcome = outcome._replace(reason=str(error))
        else:
            return row_of(result, outcome.request, outcome.seconds, made_with), result
    return failed_row(outcome.request, outcome.reason or "no reason given", outcome.seconds, made_with), None


def _outcomes(requests: list[Request], limits: Limits, jobs: int, engine: str | None) -> Iterator[Outcome]:
    """As they come. Ending early ends the scans that are still running here."""
    try:
        yield from spread(functools.partial(scan_one, limits=limits), requests, jobs, engine)
    finally:
        for process in list(_running):
            _kill(process)
