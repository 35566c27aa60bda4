"""``lowprec-check scan``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from lowprec_check.analysis.conclusion import DEFAULT, FailOn, asked_to_fail_on, failure
from lowprec_check.cli.app import (
    FINDINGS,
    USAGE_ERROR,
    app,
    check_writable,
    interrupts_ignored_after,
    last_before_end,
    print_error,
    print_status,
    stdout_kept,
)
from lowprec_check.cli.baseline import BaselineFile, UpdateBaseline, apply_baseline, known_findings
from lowprec_check.cli.options import (
    Backends,
    Inputs,
    Isolation,
    Matrix,
    MemoryFormats,
    Precisions,
    Predict,
    PredictedTorch,
    Quiet,
    ScaleWeights,
    ScannedDevice,
    Seed,
    Target,
    Tolerance,
    Weights,
    WhatIfFormats,
    WithoutKernel,
    names_of,
)
from lowprec_check.cli.progress import progress
from lowprec_check.cli.report import Reports, Verbose, check_reports, print_report
from lowprec_check.errors import Terminated, UsageError
from lowprec_check.report.registry import FORMATS, write
from lowprec_check.schema.axes import BACKENDS, MEMORY_FORMATS, RUN_MATRICES
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.registry import choices, words_in
from lowprec_check.schema.what_if import WHAT_IF_FORMATS

if TYPE_CHECKING:
    from lowprec_check.schema.scan_result import ScanResult


@app.command()
def scan(
    target: Target,
    inputs: Inputs = None,
    weights: Weights = None,
    scale_weights: ScaleWeights = False,
    precision: Precisions = None,
    backend: Backends = None,
    memory_format: MemoryFormats = None,
    matrix: Matrix = None,
    device: ScannedDevice = None,
    torch: PredictedTorch = None,
    predict: Predict = False,
    budget: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="Seconds for each part of a run. Default: 20, or the time of ten fp32 forward passes if longer.",
        ),
    ] = None,
    errors: Annotated[
        Literal["both", "accumulated", "none"],
        typer.Option(help="Errors to compute for each op; accumulated and none are faster."),
    ] = "both",
    budget_error: Annotated[
        Literal["auto", "on", "off"],
        typer.Option(
            help="Find out which ops the error of the output comes from; takes time, and memory for all activations. Needs "
            "--errors both. auto: within 2.2 times the memory of fp32, or 4 GiB."
        ),
    ] = "auto",
    reference: Annotated[
        Literal["fp32", "fp64"], typer.Option(help="Precision of the reference for the errors of each op.")
    ] = "fp32",
    tolerance: Tolerance = None,
    seed: Seed = 0,
    without_kernel: WithoutKernel = None,
    batches: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Number of batches: inputs(0), inputs(1), …, or items of a loader or generator. Runs that pass on the first "
            "are run on the others; LP205 reports values that grow.",
        ),
    ] = 1,
    plan: Annotated[
        bool | None,
        typer.Option(
            "--plan/--no-plan",
            help="For each precision that fails, search for modules to keep in fp32. Default: only if none passes.",
        ),
    ] = None,
    times: Annotated[
        Literal["on", "off"],
        typer.Option(
            help="Call all runs in turns, to compare their times with fp32. off saves some seconds, in a CI for example."
        ),
    ] = "on",
    scenario: Annotated[
        Literal["offline", "realtime"] | None,
        typer.Option(
            help="Also time every run as it is served: offline (the inputs on all cores) or realtime (batches of 1, in several "
            "instances of at most 4 cores at a time)."
        ),
    ] = None,
    what_if: WhatIfFormats = None,
    prefer: Annotated[
        Literal["speed", "memory", "accuracy"],
        typer.Option(help="What the recommendation is to gain, among the precisions that pass."),
    ] = "speed",
    train: Annotated[
        bool,
        typer.Option(
            "--train",
            help="Scan training: forward, loss, backward, optimizer. Uses loss(output) and optimizer(parameters) of the file if "
            "it defines them.",
        ),
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            min=1,
            help="With --train: steps of each run, compared with fp32 and with the spread of fp32 runs from other seeds. "
            "Default: 1.",
        ),
    ] = None,
    save_plan: Annotated[
        Path | None, typer.Option("--save-plan", help="Save the plan found, for lowprec_check.apply.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Save the full result as JSON; - for stdout.")] = None,
    report: Reports = None,
    baseline: BaselineFile = None,
    update_baseline: UpdateBaseline = False,
    select: Annotated[
        list[str] | None,
        typer.Option(help="Only findings whose code starts with this prefix, e.g. LP1; repeatable."),
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="No findings whose code starts with this prefix; repeatable.")
    ] = None,
    fail_on: Annotated[
        FailOn,
        typer.Option(
            help="Exit 1 if no precision passes (no-pass), or also on findings of the given severity or higher."
        ),
    ] = DEFAULT,
    findings: Annotated[int, typer.Option(min=0, help="Maximum number of groups of findings to print.")] = 12,
    format: Annotated[
        str | None,
        typer.Option("--format", "-f", help=f"What to print: {choices(FORMATS.names())}. Default: text."),
    ] = None,
    verbose: Verbose = False,
    isolation: Isolation = None,
    quiet: Quiet = False,
) -> None:
    """Run a model in fp32, half, bfloat16 and autocast. Shows which of them run, how accurate and fast they are, and what to do."""
    precisions, backends = names_of(PRECISIONS, precision), names_of(BACKENDS, backend)
    memory_formats, predicted = names_of(MEMORY_FORMATS, memory_format), names_of(WHAT_IF_FORMATS, what_if)
    matrix = RUN_MATRICES.get(matrix).name if matrix is not None else None
    check_writable(json, "--json")
    check_reports(report or [])
    printed = _printed_format(json, format)
    accepted = known_findings(baseline, update_baseline)
    check_writable(save_plan, "--save-plan")
    from lowprec_check.analysis.rules.registry import check_codes

    check_codes([*words_in(select or ()), *words_in(ignore or ())])
    with stdout_kept(), progress(quiet) as shown:
        from lowprec_check.engine.load import TargetSpec
        from lowprec_check.engine.scan_options import ScanOptions
        from lowprec_check.engine.session import scan_file

        options = ScanOptions(
            precisions=precisions,
            backends=backends,
            memory_formats=memory_formats,
            matrix=matrix,
            device=device,
            torch_version=torch,
            predict=predict,
            budget=budget,
            errors=errors,
            budget_error=budget_error,
            reference=reference,
            tolerance=tolerance,
            seed=seed,
            without_kernel=tuple(without_kernel or ()),
            batches=batches,
            select=select or (),
            ignore=ignore or (),
            plan=plan,
            times=times,
            scenario=scenario,
            what_if=predicted,
            prefer=prefer,
            train=train,
            steps=steps,
        )
        spec = TargetSpec(target, tuple(inputs or ()), weights, scale_weights)
        result, ended_by = last_before_end(scan_file(spec, options, isolation, shown.step), shown.done)
    output = _Output(json, tuple(report or ()), save_plan, printed, findings, verbose)
    with interrupts_ignored_after(ended_by):
        concluded = asked_to_fail_on(_conclude(result, ended_by), fail_on, with_baseline=baseline is not None)
        if ended_by is None:
            concluded = apply_baseline(concluded, accepted, baseline, update_baseline)
    try:
        output.show(concluded)
    finally:  # standard output may be full or closed, or Ctrl+C be pressed in a pager
        with interrupts_ignored_after(ended_by):
            complete = output.save(concluded)
    if not complete:
        raise typer.Exit(USAGE_ERROR)
    raise ended_by or typer.Exit(FINDINGS if failure(concluded).fails else 0)


def _conclude(result: ScanResult | None, ended_by: BaseException | None) -> ScanResult:
    """The result with its conclusion, also of a scan that ``ended_by`` ended early, which is raised if nothing was found."""
    from lowprec_check.analysis.conclusion import conclude, conclude_early

    concluded = None
    if result is not None:
        concluded = conclude(result) if ended_by is None else conclude_early(result, _why_early(ended_by))
    if concluded is None:
        assert ended_by is not None
        raise ended_by
    return concluded


def _why_early(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "the scan was interrupted"
    return f"the scan was ended by {error.name}" if isinstance(error, Terminated) else "the scan ended early"


class _Output(NamedTuple):
    """Where a result goes."""

    json: Path | None
    reports: tuple[Path, ...]
    plan: Path | None
    format: str
    """Of what is printed."""
    findings: int
    verbose: bool

    def show(self, result: ScanResult) -> None:
        """Print the result."""
        print_report(result, self.format, self.findings, verbose=self.verbose)
        sys.stdout.flush()

    def save(self, result: ScanResult) -> bool:
        """Write the files; false if one could not be written, which loses nothing else."""
        done = [self._save_plan(result)]
        if self.json is not None and str(self.json) != "-":
            done.append(_written(result.save, self.json))
        done += [_written(functools.partial(write, result, verbose=self.verbose), file) for file in self.reports]
        return all(done)

    def _save_plan(self, result: ScanResult) -> bool:
        if self.plan is None:
            return True
        if result.plan is None:
            print_status("no plan was needed or found; nothing saved")
            return True
        return _written(result.plan.save, self.plan)


def _written(save: Callable[[Path], None], path: Path) -> bool:
    try:
        save(path)
    except UsageError as error:
        print_error(error)
        return False
    return True


def _printed_format(json: Path | None, format: str | None) -> str:
    """The format of what is printed; raises :class:`UsageError` if two are asked for, or one that cannot be rendered."""
    if json is None or str(json) != "-":
        chosen = FORMATS.get(format or "text")
        chosen.check_available()
        return chosen.name
    if format is not None:
        raise UsageError("--json - and --format both print to stdout.", "Use one of them, or give --json a file.")
    return "json"
