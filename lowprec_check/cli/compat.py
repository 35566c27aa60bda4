"""``lowprec-check compat``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from lowprec_check.cli.app import FINDINGS, app, print_status
from lowprec_check.cli.options import OTHER_COMMANDS, Backends, Budget, Devices, Precisions, Quiet
from lowprec_check.cli.parameters import Argument, Option, files
from lowprec_check.errors import Terminated, UsageError
from lowprec_check.schema.axes import BACKENDS, device_of
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.statements import counted, fill, some

if TYPE_CHECKING:
    from lowprec_check.schema.matrix import MatrixRow
    from lowprec_check.schema.scan_result import ScanResult


FromFile = Annotated[
    Path | None,
    Option(
        "--from-file",
        metavar="LIST",
        help="File with one target per line, followed by scan options; # starts a comment.",
    ),
]
ScanOptions = Annotated[
    str, Option("--scan-options", metavar="TEXT", help='More options for each scan, e.g. "--seed 1 --errors none".')
]
Engine = Annotated[
    str | None,
    Option(metavar="ADDRESS", help="Run the scans on dask (extra cluster): dask://HOST:PORT; dask alone: locally."),
]


@app.command()
def compat(
    targets: Annotated[
        list[str] | None,
        Argument(metavar="[TARGET]...", help="Models to scan, written as for scan.", shell_complete=files),
    ] = None,
    from_file: FromFile = None,
    report: Annotated[Path, Option("--report", "-o", metavar="FOLDER", help="Folder for the report.")] = Path(
        "reports"
    ),
    device: Devices = None,
    precision: Precisions = None,
    backend: Backends = None,
    budget: Budget = None,
    scan_options: ScanOptions = "",
    jobs: Annotated[
        int, Option("--jobs", "-j", least=1, help="Number of parallel scans; they distort each other's times.")
    ] = 1,
    engine: Engine = None,
    timeout: Annotated[float, Option(least=1, help="Seconds after which the scan of a model is stopped.")] = 1800.0,
    quiet: Quiet = False,
) -> None:
    """Scan many models and write a compatibility matrix. Run the same command again to resume
    after an interruption; it also repeats the scans that failed.
    """
    from lowprec_check.compat.report_folder import ReportFolder
    from lowprec_check.compat.runner import scan_all
    from lowprec_check.compat.scan_process import Request, expand_requests, read_list
    from lowprec_check.report.foreign_text import visible
    from lowprec_check.report.matrix import status_of
    from lowprec_check.schema.verdict import look

    for name in device or []:
        device_of(name)
    requests = list(map(Request, targets or []))
    if from_file:
        requests += read_list(from_file)
    requests = expand_requests(requests, _options(precision, backend, budget, scan_options), device or [])
    for request in requests:
        for other in OTHER_COMMANDS.get("scan", []):
            if other.option in request.options:
                words = f"A row of compat is one model, so {other.option} does not go with it ({request.target})."
                raise UsageError(words, f"Use lowprec-check {other.name} {request.target}.")
    if not requests:
        raise UsageError("There is nothing to scan.", "Pass at least one target, or --from-file LIST.")
    with ReportFolder(report) as folder:
        scanned: list[MatrixRow] = []

        # Each row is written at once: a list may take hours.
        def on_row(done: int, of: int, row: MatrixRow, result: ScanResult | None) -> None:
            scanned.append(row)
            folder.model(row, result)
            if quiet:
                return
            outcome = f"failed: {row.reason}"
            if row.state != "failed":
                outcome = ", ".join(f"{cell.precision} {look(status_of(cell)).word}" for cell in row.cells)
            line = f"{row.target}{fill(' on {}', row.device)} · {row.seconds:.0f} s · {outcome}"
            print_status(f"[{done}/{of}] {visible(line)}")

        try:
            matrix = scan_all(requests, report, jobs=jobs, engine=engine, timeout=timeout, on_row=on_row)
        except (KeyboardInterrupt, Terminated):
            print_status("Progress is saved; run the same command to resume.")
            raise
        without_pages = folder.index(matrix)
    # Rows of other models, which the folder has from earlier calls, do not decide the exit code.
    asked = {request.slug for request in requests}
    failed = sum(row.state == "failed" and row.slug in asked for row in matrix.rows)
    rows = counted(len(matrix.rows), "row") + fill(" ({} of earlier runs)", len(matrix.rows) - len(scanned))
    print(f"{rows}, {failed} could not be scanned: {visible(str(report / 'index.md'))}")
    if without_pages:
        print_status(
            f"warning: No page could be written for {some([row.target for row in without_pages], 5)}: "
            "the saved scans were removed.\n"
            "Run compat with these models again to scan them again."
        )
    raise click.exceptions.Exit(FINDINGS if failed or without_pages else 0)


def _options(
    precision: list[str] | None, backend: list[str] | None, budget: float | None, more: str
) -> tuple[str, ...]:
    try:
        words = shlex.split(more)
    except ValueError as error:
        raise UsageError(f"Cannot parse --scan-options: {error}.", "Quote it as in a shell.") from None
    if any(word.partition("=")[0] == "--json" for word in words):
        raise UsageError("--json cannot be in --scan-options: each scan is saved under --report.", "Leave it out.")
    # Names as registered: an alias would be another model to the folder.
    named = [word for name in PRECISIONS.names_in(precision or []) for word in ("-p", name)]
    named += [word for name in BACKENDS.names_in(backend or []) for word in ("--backend", name)]
    if budget is not None:
        named += ["--budget", f"{budget:g}"]
    return (*named, *words)
