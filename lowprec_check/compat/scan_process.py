"""One scan as a process of its own, ``lowprec-check scan``: what it may take, and what came of it. Never imports torch."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from typing import IO, Literal, NamedTuple, NoReturn

from lowprec_check.compat.target_list import Request
from lowprec_check.process.command_worker import CommandWorker
from lowprec_check.process.exit_code import describe_exit
from lowprec_check.process.supervisor import Seen, Supervisor

_SCAN = (sys.executable, "-m", "lowprec_check", "scan")
_AS_JSON = ("--json", "-", "--quiet", "--fail-on", "never")


class ScanLimits(NamedTuple):
    """What one scan may take."""

    seconds: float
    threads: int | None = None
    """OpenMP threads of each scan; ``None`` leaves them alone."""


class ScanOutcome(NamedTuple):
    """What came of one scan: the saved JSON, or the reason why there is none."""

    request: Request
    json: bytes
    reason: str | None
    seconds: float


_running: set[CommandWorker] = set()


def scan_one(request: Request, limits: ScanLimits) -> ScanOutcome:
    """Scan in a new process; whatever happens there is an outcome. Runs on any machine that has this package."""
    started = time.monotonic()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        worker = CommandWorker(_command(request), environment=_environment(limits), output=output, errors=errors)
        worker.allow(limits.seconds)
        reason = _reason(_watch(worker), errors, limits)
        json = _read(output) if reason is None else b""
    return ScanOutcome(request, json, reason, time.monotonic() - started)


def end_running_scans() -> None:
    """Kill the scans that run in this process's threads, with the workers they started."""
    for worker in list(_running):
        worker.end()


def _command(request: Request) -> list[str]:
    device = ["--device", request.device] if request.device else []
    return [*_SCAN, request.target, *_AS_JSON, *device, *request.options]


def _environment(limits: ScanLimits) -> dict[str, str]:
    threads = {} if limits.threads is None else {"OMP_NUM_THREADS": str(limits.threads)}
    return os.environ | threads


def _watch(worker: CommandWorker) -> int | Literal["timeout"]:
    """Wait for the end of a scan, which is killed if this is interrupted: its exit code, or that it took too long."""
    _running.add(worker)
    supervisor: Supervisor[CommandWorker, NoReturn] = Supervisor([worker])
    try:
        with supervisor:
            gone = next(event for event in supervisor.events() if isinstance(event, Seen) and event.state != "running")
    finally:
        _running.discard(worker)
    return "timeout" if gone.exit_code is None else gone.exit_code


def _reason(ended: int | Literal["timeout"], errors: IO[bytes], limits: ScanLimits) -> str | None:
    """Why there is no result: the error line of the scan, or the last that it wrote."""
    if ended == "timeout":
        return f"not done after {limits.seconds:.0f} s"
    if ended == 0:
        return None
    if ended < 0:
        return describe_exit(ended, brief=True)
    lines = [line.strip() for line in _read(errors).decode("utf-8", "replace").splitlines() if line.strip()]
    said = [line[len("error: ") :] for line in lines if line.lower().startswith("error: ")]
    return (said or lines or [describe_exit(ended, brief=True)])[-1][:500]


def _read(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()
