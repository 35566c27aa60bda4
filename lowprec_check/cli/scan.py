"""``lowprec-check scan``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lowprec_check.cli.app import FINDINGS, app, check_writable, print_status, progress, stdout_kept
from lowprec_check.cli.baseline import BaselineFile, UpdateBaseline, apply_baseline, known_findings
from lowprec_check.cli.options import (
    Backends,
    Device,
    Inputs,
    Isolation,
    Precisions,
    Quiet,
    Seed,
    Target,
    Tolerance,
    WithoutKernel,
    names_of,
)
from lowprec_check.cli.report import Reports, Verbose, check_reports, print_report
from lowprec_check.errors import UsageError
from lowprec_check.report.registry import FORMATS, write
from lowprec_check.schema.backends import BACKENDS
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.registry import choices

if TYPE_CHECKING:
    from lowprec_check.schema.scan_result import ScanResult

FailOn = Literal["no-pass", "error", "warning", "note", "never"]


@app.command()
def scan(
    target: Target,
    inputs: Inputs = None,
    precision: Precisions = None,
    backend: Backends = None,
    device: Device = None,
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
    reference: Annotated[
        Literal["fp32", "fp64"], typer.Option(help="Precision of the reference for the errors of each op.")
    ] = "fp32",
    tolerance: Tolerance = None,
    seed: Seed = 0,
    without_kernel: WithoutKernel = None,
    plan: Annotated[
        bool | None,
        typer.Option(
            "--plan/--no-plan",
            help="For each precision that fails, search for modules to keep in fp32. Default: only if none passes.",
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
    ] = "no-pass",
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
    check_writable(json, "--json")
    check_reports(report or [])
    printed = _printed_format(json, format)
    accepted = known_findings(baseline, update_baseline)
    check_writable(save_plan, "--save-plan")
    _check_codes([*(select or []), *(ignore or [])])
    with stdout_kept(), progress(target, quiet) as on_progress:
        from lowprec_check.engine.load import load_and_scan
        from lowprec_check.engine.scan import ScanOptions

        options = ScanOptions(
            precisions=precisions,
            backends=backends,
            device=device,
            budget=budget,
            errors=errors,
            reference=reference,
            tolerance=tolerance,
            seed=seed,
            without_kernel=tuple(without_kernel or ()),
            select=select or (),
            ignore=ignore or (),
            plan=plan,
        )
        result = load_and_scan(target, tuple(inputs or ()), options, isolation, on_progress)
    if save_plan is not None:
        if result.plan is None:
            print_status("no plan was needed or found; nothing saved")
        else:
            result.plan.save(save_plan)
    result = apply_baseline(result, accepted, baseline, update_baseline)
    if json is not None and str(json) != "-":
        result.save(json)
    print_report(result, printed, findings, verbose=verbose)
    for file in report or []:
        write(result, file, verbose=verbose)
    raise typer.Exit(FINDINGS if _fails(result, fail_on) else 0)


def _check_codes(prefixes: list[str]) -> None:
    from lowprec_check.analysis.rules.registry import rules

    for prefix in prefixes:
        if not any(code.startswith(prefix) for code in rules()):
            raise UsageError(f"No diagnostic code starts with {prefix!r}.", "List them with: lowprec-check explain")


def _printed_format(json: Path | None, format: str | None) -> str:
    """The format of what is printed; raises :class:`UsageError` if two are asked for, or one that cannot be rendered."""
    if json is None or str(json) != "-":
        chosen = FORMATS.get(format or "text")
        chosen.check_available()
        return chosen.name
    if format is not None:
        raise UsageError("--json - and --format both print to stdout.", "Use one of them, or give --json a file.")
    return "json"


def _fails(result: ScanResult, fail_on: FailOn) -> bool:
    from lowprec_check.analysis.rules.registry import SEVERITIES

    if fail_on == "never":
        return False
    if result.recommendation is None:
        return True
    if fail_on == "no-pass":
        return False
    failing = SEVERITIES[SEVERITIES.index(fail_on) :]
    return any(diagnostic.severity in failing and not diagnostic.accepted for diagnostic in result.diagnostics)
