"""``lowprec-check scan`` and ``plan``, which run a model in a session."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from lowprec_check.cli.app import (
    FINDINGS,
    USAGE_ERROR,
    app,
    check_writable,
    interrupts_ignored_after,
    last_before_end,
    load_result,
    print_status,
    stdout_kept,
)
from lowprec_check.cli.options import (
    Inputs,
    Isolation,
    Quiet,
    Stream,
    Target,
    Weights,
    WithScriptArguments,
    grouped,
    script_arguments,
    takes_options,
)
from lowprec_check.cli.progress import progress
from lowprec_check.cli.report import Reports, Saves, Verbose, check_reports, print_report, prints_json, save_files
from lowprec_check.errors import Terminated, UsageError
from lowprec_check.report.foreign_text import visible
from lowprec_check.report.registry import FORMATS
from lowprec_check.schema.options import FAIL_BY_DEFAULT, OUTPUT, FailOn, ScanOptions
from lowprec_check.schema.registry import choices, modules_of_features
from lowprec_check.schema.statements import agree, counted

if TYPE_CHECKING:
    from lowprec_check.analysis.baseline import Baseline
    from lowprec_check.schema.measures import Explain
    from lowprec_check.schema.run_key import RunKey
    from lowprec_check.schema.scan_result import ScanResult


@app.command(cls=WithScriptArguments)
@takes_options
def scan(
    *,
    context: click.Context,
    target: Target,
    inputs: Inputs = None,
    weights: Weights = None,
    stream: Stream = False,
    options: ScanOptions,
    save_plan: Annotated[
        Path | None,
        grouped(
            OUTPUT, "--save-plan", listed=False, metavar="FILE", help="Save the plan found, for lowprec_check.apply."
        ),
    ] = None,
    json: Annotated[
        Path | None, grouped(OUTPUT, "--json", metavar="FILE", help="Save the full result as JSON; - for stdout.")
    ] = None,
    report: Reports = None,
    baseline: Annotated[
        Path | None,
        grouped(OUTPUT, "--baseline", metavar="FILE", help="File of accepted findings, which --fail-on ignores."),
    ] = None,
    update_baseline: Annotated[
        bool, grouped(OUTPUT, "--update-baseline", help="Write all findings of this scan to the baseline.")
    ] = False,
    fail_on: Annotated[
        FailOn,
        grouped(
            OUTPUT,
            "--fail-on",
            help="Exit 1 if no precision passes (no-pass), or also on findings of this severity or higher.",
        ),
    ] = FAIL_BY_DEFAULT,
    format: Annotated[
        str | None,
        grouped(
            OUTPUT, "--format", "-f", metavar="NAME", help=f"What to print: {choices(FORMATS.names())}. Default: text."
        ),
    ] = None,
    observe: Annotated[
        bool,
        grouped(
            OUTPUT, "--observe", listed=False, help="With --train, only show what the training step of a script is."
        ),
    ] = False,
    verbose: Verbose = False,
    isolation: Isolation = None,
    quiet: Quiet = False,
) -> None:
    """Run a model in fp32, half, bfloat16 and autocast. Shows which of them run, how accurate and
    fast they are, and what to do.
    """
    from lowprec_check.analysis.conclusion import asked_to_fail_on, failure
    from lowprec_check.analysis.rules.registry import check_codes, rules
    from lowprec_check.analysis.statements.kinds import kinds

    # What can be wrong is checked first: a scan takes minutes.
    check_writable(json, "--json")
    check_reports(report or [])
    is_printed = prints_json(json, format)
    printed = FORMATS.get("json" if is_printed else format or "text")
    printed.check_available()
    accepted = _accepted(baseline, update_baseline=update_baseline)
    check_writable(save_plan, "--save-plan")
    check_codes([*options.select, *options.ignore])
    reads_findings = update_baseline or accepted is not None or fail_on not in (FAIL_BY_DEFAULT, "never")
    writes = json is not None or bool(report) or printed.name != "text"
    options = _explaining_what_is_read(options, reads_findings=reads_findings, writes=writes)
    if observe:
        _observe(target, script_arguments(context), options, isolation, quiet=quiet)
        return
    with stdout_kept(), progress(quiet) as display:
        from lowprec_check.core.session import scan_file
        from lowprec_check.engine.model.target_spec import TargetSpec

        arguments, steps = script_arguments(context), options.training_steps
        spec = TargetSpec(target, tuple(inputs or ()), weights, stream, arguments, steps)
        earlier = _unfinished(json)

        def grown(so_far: ScanResult) -> None:
            keys = options.keys(so_far.runs[0].device)
            display.done(so_far, len(keys))
            # While runs go on: the report need not wait for what concludes and prints it.
            for load in (rules, kinds, partial(modules_of_features, "advice"), partial(modules_of_features, "report")):
                load()
            for module in ("scan_document", "layout.text") if printed.name == "text" else ():
                importlib.import_module(f"lowprec_check.report.{module}")
            if json is not None and not is_printed:
                _save_so_far(so_far, keys, json)

        result, ended_by = last_before_end(
            scan_file(spec, options, isolation, display.step, earlier, display.judged), grown
        )
    # What was finished is reported and saved, also if the scan ended early.
    saves: Saves = []
    with interrupts_ignored_after(ended_by):
        concluded = asked_to_fail_on(_conclude(result, options, ended_by), fail_on, with_baseline=baseline is not None)
        if ended_by is None:
            concluded, saves = _apply_baseline(concluded, accepted, baseline, update_baseline)
    try:
        print_report(concluded, printed.name, verbose=verbose)
        sys.stdout.flush()
    finally:  # standard output may be full or closed, or Ctrl+C be pressed in a pager
        with interrupts_ignored_after(ended_by):
            if save_plan is not None and concluded.plan is None:
                print_status("no plan was needed or found; nothing saved")
            elif save_plan is not None and concluded.plan is not None:
                saves = [*saves, (concluded.plan.save, save_plan)]
            complete = save_files(concluded, json, report or [], saves, verbose=verbose)
    if not complete:
        raise click.exceptions.Exit(USAGE_ERROR)
    raise ended_by or click.exceptions.Exit(FINDINGS if failure(concluded).fails else 0)


def _explaining_what_is_read(options: ScanOptions, *, reads_findings: bool, writes: bool) -> ScanOptions:
    """``options`` with the runs to explain, if they do not say: what nobody reads is left out."""
    explain: Explain = "failing"
    if reads_findings:
        explain = "all"
    elif writes:
        explain = "recommended"
    return dataclasses.replace(options, explain=options.explain or explain)


# -- The baseline, the scan so far, and its conclusion


def _apply_baseline(
    result: ScanResult, accepted: Baseline | None, path: Path | None, update: bool
) -> tuple[ScanResult, Saves]:
    """``result`` with accepted findings marked, and what saves the baseline; prints stale ones."""
    from lowprec_check.analysis.baseline import accept, baseline_of, save

    saves: Saves = []
    if update and path is not None:
        accepted = baseline_of(result, accepted)
        saves = [(partial(save, accepted), path)]
        print_status(f"{counted(len(accepted.findings), 'finding')} accepted in {path}")
    if accepted is None:
        return result, saves
    result, stale = accept(result, accepted)
    if stale:
        what = agree(len(stale), "finding in the baseline no longer occurs", "findings in the baseline no longer occur")
        print_status(f"{len(stale)} {what}; --update-baseline removes them")
    return result, saves


def _unfinished(path: Path | None) -> ScanResult | None:
    """The scan saved at ``path``, if it ended early."""
    if path is None or str(path) == "-" or not path.is_file():
        return None
    try:
        earlier = load_result(path)
    except UsageError:  # it is another file, and replaced
        return None
    if earlier.complete:
        return None
    return earlier


def _accepted(baseline: Path | None, *, update_baseline: bool) -> Baseline | None:
    """The accepted findings; ``None`` without a file, or if that is still to be made."""
    from lowprec_check.analysis.baseline import load

    is_new = False
    if update_baseline:
        if baseline is None:
            raise UsageError("--update-baseline needs a file to write.", "Add --baseline FILE.")
        check_writable(baseline, "--baseline")
        is_new = not baseline.exists() or not baseline.stat().st_size
    if baseline is None or is_new:
        return None
    return load(baseline)  # also if it is updated: another file is never overwritten


def _observe(
    target: str, arguments: tuple[str, ...], options: ScanOptions, isolation: Isolation | None, *, quiet: bool
) -> None:
    """Print what the training step of a script is."""
    if not options.train:
        raise UsageError("--observe shows the training step of a script.", "Add --train.")
    with stdout_kept(), progress(quiet) as display:
        from lowprec_check.core.observation import observe_file
        from lowprec_check.engine.model.target_spec import TargetSpec

        observed = observe_file(TargetSpec(target, arguments=arguments, steps=1), options, isolation, display.step)
    print(*map(visible, observed.lines), sep="\n")


def _save_so_far(result: ScanResult, keys: Sequence[RunKey], path: Path) -> None:
    """Save the finished runs of a scan whose runs take long: one with streamed weights."""
    from lowprec_check.analysis.conclusion import conclude_early
    from lowprec_check.schema.scanned_model import STREAMED

    if STREAMED not in result.model.notes:
        return
    so_far = conclude_early(result, keys)
    if so_far is not None:
        with contextlib.suppress(UsageError):  # the whole result is saved at the end, or that says why it cannot be
            so_far.save(path)


def _conclude(result: ScanResult, options: ScanOptions, ended_by: BaseException | None) -> ScanResult:
    """The result with its conclusion; raises ``ended_by`` if that ended it before any run."""
    from lowprec_check.analysis.conclusion import conclude, conclude_early

    if ended_by is None:
        return conclude(result)
    why = "the scan ended early"
    if isinstance(ended_by, KeyboardInterrupt):
        why = "the scan was interrupted"
    elif isinstance(ended_by, Terminated):
        why = f"the scan was ended by {ended_by.name}"
    concluded = conclude_early(result, options.keys(result.runs[0].device), why)
    if concluded is None:
        raise ended_by
    return concluded
