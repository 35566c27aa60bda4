"""``lowprec-check fix``: a patch of the user's source, tried in other processes, and applied."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from lowprec_check.cli.app import (
    FINDINGS,
    USAGE_ERROR,
    app,
    check_writable,
    last_before_end,
    load_result,
    print_document,
    print_status,
    print_text,
    stdout_kept,
)
from lowprec_check.cli.options import (
    Inputs,
    Isolation,
    Quiet,
    Target,
    Weights,
    WithScriptArguments,
    grouped,
    script_arguments,
    takes_options,
)
from lowprec_check.cli.progress import progress
from lowprec_check.cli.report import Reports, check_reports, prints_json, save_files
from lowprec_check.errors import UsageError
from lowprec_check.schema.axes import device_type
from lowprec_check.schema.base import check_file, encode, write_file
from lowprec_check.schema.options import OUTPUT, RUN, FixOptions, declared_in
from lowprec_check.schema.precisions import PRECISIONS

if TYPE_CHECKING:
    from lowprec_check.engine.model.target_spec import OnProgress, TargetSpec
    from lowprec_check.features.fix.source_text import SourceText
    from lowprec_check.process import Isolation as ProcessIsolation
    from lowprec_check.schema.fixing import Fixing
    from lowprec_check.schema.scan_result import ScanResult


_OF_SCRIPTS = ("train", "steps", "seed", "tolerance")
"""The options of :class:`FixOptions` that count with ``--train``."""


@app.command(cls=WithScriptArguments)
@takes_options
def fix(
    *,
    context: click.Context,
    target: Target,
    inputs: Inputs = None,
    weights: Weights = None,
    options: FixOptions,
    scanned: Annotated[
        Path | None, grouped(RUN, "--from", metavar="SCAN.json", help="Start from a saved scan of the same target.")
    ] = None,
    apply: Annotated[bool, grouped(OUTPUT, "--apply", help="Write the patch into the files.")] = False,
    check: Annotated[bool, grouped(OUTPUT, "--check", help="Exit 1 if there is a patch to apply.")] = False,
    format: Annotated[
        Literal["text", "diff", "json", "suggestion"] | None,
        grouped(
            OUTPUT,
            "--format",
            "-f",
            help="What to print; suggestion: blocks for review comments on GitHub. Default: text.",
        ),
    ] = None,
    json: Annotated[
        Path | None,
        grouped(OUTPUT, "--json", metavar="FILE", help="Save the scan with the patch as JSON; - for stdout."),
    ] = None,
    report: Reports = None,
    isolation: Isolation = None,
    quiet: Quiet = False,
) -> None:
    """Find a patch of the model's source with which it passes. Writes nothing unless asked to."""
    check_writable(json, "--json")
    check_reports(report or [])
    if check and apply:
        raise UsageError("--check writes nothing.", "Leave out --apply or --check.")
    file = target.rpartition(":")[0] or target
    if apply and file.endswith(".py"):
        check_file(file)  # which of the others change is known after the search
    if options.train:
        # Options about the scan of a model are refused, not ignored: a script has none.
        of_models: dict[str, object] = {"--from": scanned, "--json": json, "--report": report}
        of_models |= {"--inputs": inputs, "--weights": weights}
        for name, _, default, declared in declared_in(FixOptions):
            is_autocast = name == "precisions" and all(map(_is_autocast, options.precisions or ()))
            if name not in _OF_SCRIPTS and not is_autocast:
                flags, value = declared.flags or (f"--{name.replace('_', '-')}",), getattr(options, name)
                of_models[flags[0]] = value if declared.takes_several else value != default
        unfit = ", ".join(flag for flag, value in of_models.items() if value)
        if unfit:
            raise UsageError(f"--train has no {unfit}: a script runs by itself, without a scan.", f"Leave out {unfit}.")
    elif options.steps is not None:
        raise UsageError("--steps is the number of training steps of a script.", "Add --train.")
    printed = "scan" if prints_json(json, format) else format
    earlier = None
    if scanned is not None:
        earlier = load_result(scanned)
    with stdout_kept(), progress(quiet) as display:
        from lowprec_check.engine.model.target_spec import TargetSpec

        spec = TargetSpec(target, tuple(inputs or ()), weights, arguments=script_arguments(context))
        if earlier is not None:
            options = _as_scanned(options, target, earlier)
        result, fixing, texts = _searched(spec, options, isolation, display.step, earlier)
    try:
        _print(result, fixing, printed)
        sys.stdout.flush()
    finally:  # standard output may be full or closed
        complete = result is None or save_files(result, json, report or [])
    if apply:
        _write(texts)
    if not complete:
        raise click.exceptions.Exit(USAGE_ERROR)
    raise click.exceptions.Exit(FINDINGS if not fixing.passes or (check and fixing.due) else 0)


def _is_autocast(name: str) -> bool:
    return PRECISIONS.get(name).kind == "autocast"


# -- What is searched


def _as_scanned(options: FixOptions, target: str, scanned: ScanResult) -> FixOptions:
    """``options`` with those of a saved scan; raises :class:`UsageError` if that is not of
    ``target``, or others were asked for.
    """

    def model_in(name: str) -> tuple[str, str]:  # the scan may have run in another folder
        file, suffix, attribute = name.partition(".py")
        return re.split(r"[/\\]", file)[-1] if suffix else file, attribute.removeprefix(":") or "model"

    without = "Leave --from out, so that the target is scanned first."
    by_class = scanned.target == scanned.model.name  # a scan of the Python API
    if not by_class and model_in(scanned.target) != model_in(target):
        raise UsageError(f"The saved scan is of {scanned.target}, not of {target}.", without)
    missing = sorted({*(options.precisions or ())}.difference(run.precision for run in scanned.runs))
    if missing:
        raise UsageError(f"The saved scan did not run {', '.join(missing)}.", without)
    # The options that both commands have: those of the scan, unless others are asked for.
    scan_options = scanned.options | {"device": scanned.runs[0].device if scanned.runs else None}
    taken: dict[str, Any] = {}
    for name in ("device", "tolerance", "seed", "further_inputs", "without_kernel"):
        default = getattr(FixOptions, name)
        asked, saved = getattr(options, name), scan_options.get(name, default)
        if isinstance(saved, list):
            saved = tuple(saved)
        taken[name] = saved
        as_saved = device_type(asked or "") if name == "device" else asked
        if asked != default and as_saved != saved:
            raise UsageError(f"The saved scan used a different --{name.replace('_', '-')}.", without)
    from lowprec_check.analysis.source_lines import texts_of_lines

    # The findings name lines of the files as they were.
    now = texts_of_lines(scanned.source_lines, target)
    for place, text in scanned.source_lines.items():
        file, _, number = place.rpartition(":")
        if now.get(place, "") != text and (place in now or Path(file).is_file()):
            raise UsageError(f"{file} has changed since the saved scan, at line {number}.", without)
    return replace(options, **taken)


def _searched(
    spec: TargetSpec,
    options: FixOptions,
    isolation: ProcessIsolation | None,
    on_progress: OnProgress,
    scanned: ScanResult | None,
) -> tuple[ScanResult | None, Fixing, Mapping[SourceText, str]]:
    """The scan, unless it is a script's, the patch, and the texts of the files with it."""
    if options.train:
        from lowprec_check.features.fix.script_fixing import fix_script

        return None, *fix_script(spec, options, isolation, on_progress)
    from lowprec_check.features.fix.fixing import fix_file

    (result, texts), ended_by = last_before_end(fix_file(spec, options, isolation, on_progress, scanned))
    if ended_by is not None or result.fixing is None or texts is None:
        raise ended_by or UsageError("The search ended early.", None)
    return result, result.fixing, texts


# -- What is shown and written


def _print(result: ScanResult | None, fixing: Fixing, format: str | None) -> None:
    from lowprec_check.features.fix.report import fix_document, suggestions

    if format == "scan" and result is not None:
        print_document(result.to_json())
    elif format == "json":
        print_document(encode(fixing) + b"\n")
    elif format in ("diff", "suggestion"):
        print_document(fixing.diff if format == "diff" else suggestions(fixing))
    else:
        # The same command, and so with all that it was given.
        words, apply = sys.argv[1:], ""
        if "--apply" not in words:
            at = words.index("--") if "--" in words else len(words)
            apply = shlex.join(["lowprec-check", *words[:at], "--apply", *words[at:]])
        print_text(fix_document(fixing, result.model.name if result is not None else fixing.target, apply))


def _write(texts: Mapping[SourceText, str]) -> None:
    """Write all files or none; raises :class:`UsageError` if one changed or is not writable."""
    old = {source: source.path.read_bytes() for source in texts}
    for source, data in old.items():
        check_file(source.path)
        if data.decode(source.encoding) != source.text:
            raise UsageError(f"{source.path} has changed since it was read.", "Run the command again.")
    written = []
    try:
        for source, text in texts.items():
            written.append(source)
            write_file(source.path, text.encode(source.encoding))
    except BaseException:  # also Ctrl+C: half a patch may not run
        for source in written:
            write_file(source.path, old[source])
        raise
    for source in texts:
        print_status(f"changed {source.path}")
