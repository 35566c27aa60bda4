"""Which models to scan, a scan in its own process, and the row of the matrix that it gives."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from lowprec_check.analysis.recommend import action
from lowprec_check.analysis.run_summary import degenerate_output, failing_gaps, label, memory_ratio, missing_kernels
from lowprec_check.analysis.speed import speed
from lowprec_check.analysis.statements.advice import what_is_unknown
from lowprec_check.analysis.statements.status import error_text
from lowprec_check.analysis.training_status import way_text
from lowprec_check.errors import UsageError, encodable
from lowprec_check.process import system
from lowprec_check.process.command_worker import CommandWorker
from lowprec_check.process.interpreter import module_command
from lowprec_check.process.supervisor import StateEvent, Supervisor, describe_exit
from lowprec_check.schema.matrix import MatrixCell, MatrixRow
from lowprec_check.schema.scan_result import Run, ScanResult

# -- Which models to scan: reads a list from a file, adds options and devices, chooses file names


class Request(NamedTuple):
    """One model to scan on one device."""

    target: str
    options: tuple[str, ...] = ()
    """Additional options of ``scan``."""
    device: str | None = None
    slug: str = ""
    """A file name, unique in the list."""


# The time to parse one grows with the square of its length.
_LONGEST_LINE = 10_000


def read_list(path: Path) -> list[Request]:
    """Read one target per line, followed by options of ``scan``; ``#`` starts a comment. File names
    need not be UTF-8.
    """
    hint, text = "one target per line, followed by scan options.", ""
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
        problem = "it has a null byte" if "\0" in text else None  # no argument of a command can contain it
        if any(len(line) > _LONGEST_LINE for line in text.splitlines()):
            problem = f"a line has more than {_LONGEST_LINE:,} characters"
    except OSError as error:
        problem = error.strerror
    if problem is not None:
        raise UsageError(f"Cannot read {path}: {problem}.", f"Choose a text file with {hint}")
    requests = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise UsageError(f"Cannot parse {path}:{number}: {error}.", f"Write {hint}") from None
        if words:
            requests.append(Request(words[0], tuple(words[1:])))
    return requests


def expand_requests(requests: Iterable[Request], options: tuple[str, ...], devices: Iterable[str]) -> list[Request]:
    """Each model on each device once; ``options`` come before the model's own options."""
    chosen: list[str | None] = [*devices] or [None]
    return with_slugs(
        request._replace(options=(*options, *request.options), device=device)
        for request in requests
        for device in chosen
    )


def with_slugs(requests: Iterable[Request]) -> list[Request]:
    """The requests once, each with its slug: the target, the device, and if others have the same, a
    digest of options.
    """
    slugs = {}
    for request in requests:
        zoo = re.match(r"\w+:[^,./]+(?=,)", request.target)  # without the values of a configuration
        slugs[request] = _file_name(zoo[0] if zoo else request.target)[-80:].lstrip("-.") or "model"
        if request.device:
            slugs[request] += f"-{_file_name(request.device.replace(':', ''))}"
    uses, with_slug = Counter(slugs.values()), []
    for request, slug in slugs.items():
        text = "\0".join([request.target, *request.options])
        digest = hashlib.sha256(encodable(text).encode()).hexdigest()[:6]
        with_slug.append(request._replace(slug=slug if uses[slug] == 1 else f"{slug}-{digest}"))
    return with_slug


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")


# -- The row of the matrix that a scan gives

_ENVIRONMENT = ("torch", "python", "device_name", "cpu_capability", "threads", "torchvision", "timm", "transformers")


def request_of(row: MatrixRow) -> Request:
    """Return the request that a row was made for, also after the row was saved and read again."""
    return Request(_as_given(row.target), tuple(map(_as_given, row.options)), row.device, row.slug)


def _as_given(saved: str) -> str:
    r"""Undo :func:`~lowprec_check.errors.encodable` for bytes that are not UTF-8: ``\udcff``."""
    return re.sub(r"\\u(dc[89a-f][0-9a-f])", lambda match: chr(int(match[1], 16)), saved)


def _shown_error(run: Run) -> str | None:
    """What a cell shows in place of the relative error: the measure that decides, or weights."""
    if run.by_meaning is not None:
        return run.by_meaning.shown
    if run.rel_l2 is None or run.training:
        return error_text(run)
    return None


def row_of(result: ScanResult, request: Request, seconds: float, made_with: dict[str, str]) -> MatrixRow:
    """Return the row of a scanned model."""
    cells = []
    for run in result.runs:
        if run.is_reference:
            continue
        first = next(iter(failing_gaps(run)), None)
        distance = run.relative_error
        cell = MatrixCell(
            precision=label(run),
            column=run.key.label,
            device=run.device,
            status=run.status,
            degenerate=degenerate_output(run, result.runs),
            evidence=run.evidence,
            further_inputs=run.further_inputs,
            rel_l2=_digits(distance if run.is_forward else None),
            error=_shown_error(run),
            time=_digits(speed(run, result.runs).time),
            memory=_digits(memory_ratio(run, result.runs)),
            gaps=missing_kernels(run),
            first_gap=getattr(first, "op", None),
            first_gap_kind=getattr(first, "kind", None),
            first_gap_source=getattr(first, "source", None),
            codes=sorted({finding.code for finding in result.diagnostics if finding.is_about(run)}),
        )
        cells.append(cell)
    # ``half``; ``fp32 (half: saves 50 % of the memory)`` where fp32 is better in other ways;
    # ``half (not timed)`` where half passes and nothing says that it gains anything
    advice, recommended = result.recommendation, None
    if advice is not None:
        recommended = advice.label + way_text(advice.way)
        if advice.kept:
            recommended += f" + {len(advice.kept)} in fp32"
        advised = action(result)
        if advised == "stay":
            recommended = f"fp32 ({recommended}: {advice.gain})" if advice.gain else "fp32"
        elif advised == "passes":
            recommended += f" ({what_is_unknown(result)})"
    about = {**result.environment, "torch": result.torch or None}
    return _row(
        request,
        seconds,
        made_with,
        state="scanned",
        model=result.model.name,
        parameters=result.model.parameters,
        weights=result.model.weights,
        codes=sorted({finding.code for finding in result.diagnostics if finding.precision is None}),
        inputs=result.model.inputs,
        environment={key: str(about[key]) for key in _ENVIRONMENT if about.get(key) is not None},
        cells=cells,
        recommended=recommended,
    )


def failed_row(request: Request, reason: str, seconds: float, made_with: dict[str, str]) -> MatrixRow:
    """Return the row of a model that could not be scanned."""
    return _row(request, seconds, made_with, state="failed", reason=reason)


def _row(request: Request, seconds: float, made_with: dict[str, str], **outcome: Any) -> MatrixRow:
    return MatrixRow(
        target=request.target,
        options=list(request.options),
        device=request.device,
        slug=request.slug,
        seconds=round(seconds, 1),
        made_with=made_with,
        **outcome,
    )


def _digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")  # 2 or 3 digits are shown


# -- Runs one scan in its own process, ``lowprec-check scan``, within limits


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
    """Scan in a new process; a crash or a timeout is an outcome too. Needs this package only, on
    any machine, and temporary files.
    """
    started = system.monotonic()
    # Findings are no failure of the scan, and what a user has set for scans is not for these.
    device = ["--device", request.device] if request.device else []
    options = ("--json", "-", "--quiet", *device, *request.options, "--fail-on", "never")
    command = module_command("lowprec_check", "--no-settings", "scan", request.target, *options)
    environment = dict(os.environ)
    if limits.threads is not None:
        environment["OMP_NUM_THREADS"] = str(limits.threads)
    with temporary_file() as output, temporary_file() as errors:
        worker = CommandWorker(command, environment=environment, output=output, errors=errors)
        worker.set_timeout(limits.seconds)
        _running.add(worker)
        try:  # an interruption ends the scan with its supervisor
            with Supervisor[CommandWorker, NoReturn]([worker]) as supervisor:
                states = (event for event in supervisor.events() if isinstance(event, StateEvent))
                exit_code = next(event.exit_code for event in states if event.state != "running")
        finally:
            _running.discard(worker)
        json, reason = b"", None
        if exit_code is None:
            reason = f"timed out after {limits.seconds:.0f} s"
        elif exit_code == 0:
            json = _read(output)
        elif exit_code < 0:
            reason = describe_exit(exit_code, brief=True)
        else:
            # the last line that starts with ``error:``, or the last line on standard error
            lines = [line.strip() for line in _read(errors).decode("utf-8", "replace").splitlines() if line.strip()]
            messages = [line[len("error: ") :] for line in lines if line.lower().startswith("error: ")]
            reason = (messages or lines or [describe_exit(exit_code, brief=True)])[-1][:500]
    return ScanOutcome(request, json, reason, system.monotonic() - started)


def temporary_file() -> IO[bytes]:
    """A file without a name for what a scan prints."""
    try:
        return tempfile.TemporaryFile()
    except OSError as error:
        hint = "Set TMPDIR to a writable folder with free space."
        raise UsageError(f"Cannot create a temporary file: {error.strerror}.", hint) from None


def end_running_scans() -> None:
    """Kill the scans that threads of this process run, and the workers they started."""
    for worker in list(_running):
        worker.end()


def _read(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()
