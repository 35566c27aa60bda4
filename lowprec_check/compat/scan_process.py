"""Runs one scan in its own process, ``lowprec-check scan``, within limits."""

from __future__ import annotations

import os
import tempfile
import time
from typing import IO, Literal, NamedTuple, NoReturn

from lowprec_check.compat.target_list import Request
from lowprec_check.errors import UsageError
from lowprec_check.process.command_worker import CommandWorker
from lowprec_check.process.exit_code import describe_exit
from lowprec_check.process.interpreter import module_command
from lowprec_check.process.supervisor import StateEvent, Supervisor

_AS_JSON = ("--json", "-", "--quiet", "--fail-on", "never")


class ScanLimits(NamedTuple):
    """Limits of one scan."""

    seconds: float
    threads: int | None = None
    """Number of OpenMP threads of each scan; ``None`` keeps the default."""


class ScanOutcome(NamedTuple):
    """The outcome of one scan: the saved JSON, or the reason why there is none."""

    request: Request
    json: bytes
    reason: str | None
    seconds: float


_running: set[CommandWorker] = set()


def scan_one(request: Request, limits: ScanLimits) -> ScanOutcome:
    """Scan in a new process; a crash or a timeout is an outcome too. Runs on any machine that has this package.

    Raises:
        UsageError: no temporary file can be created.
    """
    started = time.monotonic()
    with temporary_file() as output, temporary_file() as errors:
        worker = CommandWorker(_command(request), environment=_environment(limits), output=output, errors=errors)
        worker.set_timeout(limits.seconds)
        reason = _reason(_watch(worker), errors, limits)
        json = _read(output) if reason is None else b""
    return ScanOutcome(request, json, reason, time.monotonic() - started)


def temporary_file() -> IO[bytes]:
    """A file without a name for the output of a scan; raises :class:`UsageError` if there is no usable temporary folder."""
    try:
        return tempfile.TemporaryFile()
    except OSError as error:
        raise UsageError(
            f"Cannot create a temporary file: {error.strerror}.",
            "Set TMPDIR to a writable folder with free space.",
        ) from None


def end_running_scans() -> None:
    """Kill the scans that threads of this process run, and the workers they started."""
    for worker in list(_running):
        worker.end()


def _command(request: Request) -> list[str]:
    device = ["--device", request.device] if request.device else []
    return module_command(
        "lowprec_check", "--no-settings", "scan", request.target, *_AS_JSON, *device, *request.options
    )


def _environment(limits: ScanLimits) -> dict[str, str]:
    threads = {} if limits.threads is None else {"OMP_NUM_THREADS": str(limits.threads)}
    return os.environ | threads


def _watch(worker: CommandWorker) -> int | Literal["timeout"]:
    """Wait for a scan to end, and return its exit code or ``timeout``; an interruption kills it."""
    _running.add(worker)
    supervisor: Supervisor[CommandWorker, NoReturn] = Supervisor([worker])
    try:
        with supervisor:
            last = next(
                event for event in supervisor.events() if isinstance(event, StateEvent) and event.state != "running"
            )
    finally:
        _running.discard(worker)
    return "timeout" if last.exit_code is None else last.exit_code


def _reason(ended: int | Literal["timeout"], errors: IO[bytes], limits: ScanLimits) -> str | None:
    """Why there is no result: the last line that starts with ``error:``, or the last line written to standard error."""
    if ended == "timeout":
        return f"timed out after {limits.seconds:.0f} s"
    if ended == 0:
        return None
    if ended < 0:
        return describe_exit(ended, brief=True)
    lines = [line.strip() for line in _read(errors).decode("utf-8", "replace").splitlines() if line.strip()]
    messages = [line[len("error: ") :] for line in lines if line.lower().startswith("error: ")]
    return (messages or lines or [describe_exit(ended, brief=True)])[-1][:500]


def _read(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()
