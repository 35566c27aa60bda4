"""The scan of a program as blocks: a table of its models, then what was found of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from lowprec_check.analysis.findings import groups
from lowprec_check.analysis.headlines import headlines
from lowprec_check.analysis.run_summary import candidates, label
from lowprec_check.analysis.statements.advice import verdict
from lowprec_check.features.programs.assignments import AGAIN, RECOMMENDED
from lowprec_check.features.programs.program_scan import ProgramRun, ProgramScan, ScannedModel
from lowprec_check.report.blocks import Block, Column, Document, ErrorOf, Fold, Heading, Row, Say, Table
from lowprec_check.report.runs_table import shown_status
from lowprec_check.report.scan_document import machine, scan_document
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import counted

SHOWN = 3
"""Findings of each model that a terminal shows."""


def program_document(program: ProgramScan) -> Document:
    """The report: one row per model, findings by model, and each scan in full."""
    calls = sum(model.calls for model in program.models)
    title = f"lowprec-check · {program.target} · {counted(len(program.models), 'model')}, {counted(calls, 'call')}"
    blocks: list[Block] = [Say(title, role="title")]
    scans = [model.scan for model in program.models if model.scan is not None]
    if scans:
        blocks.append(Say(machine(scans[0]), role="hint"))
    if not program.complete:
        blocks.append(Say(f"{counted(len(scans), 'model')} of {len(program.models)} scanned", "warn", "note"))
    blocks += [Say(note, "warn", "note") for note in program.notes]
    head = len(blocks)
    blocks += [Heading("Models", anchor="models"), _models_table(program.models)]
    blocks += _program_runs(program)
    for model in program.models:
        blocks += _findings(model)
    for model in program.models:
        if model.scan is not None:
            document = scan_document(model.scan)
            blocks.append(Fold(f"{model.name} in full", [*document.advice, *document.blocks], detail="all"))
    return Document(program.target, blocks[head:], program.tool, blocks[:head], [*_verdict(program)])


def _models_table(models: Sequence[ScannedModel]) -> Table:
    """A row per model: its calls, the status in each precision, and what to do."""
    names = dict.fromkeys(label(run) for model in models if model.scan for run in _low_runs(model.scan))
    columns = [
        Column("model", "run"),
        Column("calls", "text", "How often the program calls it, and how many of the calls were scanned."),
        *(Column(name, "status") for name in names),
        Column("worst call", "text", "The first of the scanned calls on which a precision fails."),
        Column("what to do", "sentence"),
    ]
    rows = []
    for model in models:
        calls = f"{model.calls}"
        if len(model.kept) < model.calls:
            calls = f"{len(model.kept)} of {model.calls}"
        if model.scan is None:
            rows.append(Row([model.name, calls, *(None for _ in names), None, model.problem or "not scanned yet"]))
            continue
        runs = {label(run): run for run in _low_runs(model.scan)}
        statuses = [shown_status(runs[name], model.scan) if name in runs else None for name in names]
        rows.append(Row([model.name, calls, *statuses, _worst_call(model, model.scan), f"{verdict(model.scan)}."]))
    return Table(columns, rows, "models")


def _program_runs(program: ProgramScan) -> Iterator[Block]:
    """A row per run of the program: how far its last output is from fp32, where it parts."""
    if not program.runs:
        return
    yield Heading("The program", anchor="program")
    columns = [
        Column("run", "run"),
        Column("last output", "error", "The error of the last call that no other model makes, against fp32."),
        Column("parts from fp32 at", "sentence", "The first call whose error exceeds the tolerance."),
    ]
    rows = []
    for run in program.runs:
        last = None
        if run.errors and not run.problem:
            error = run.errors[-1].error
            last = ErrorOf(math.inf if error is None else error, _limit(run))
        tag = "recommended" if run.name == RECOMMENDED else ""
        rows.append(Row([_name_of(run, program.models), last, _where(run, program.models)], tag))
    yield Table(columns, rows, "runs of the program")


def _verdict(program: ProgramScan) -> Iterator[Block]:
    """What the program returns with each model in its recommended precision."""
    run = next((run for run in program.runs if run.name == RECOMMENDED), None)
    if run is None:
        if program.complete:
            yield Say("Stay in fp32: no model passes in 16 bits.", "bad", "verdict")
        return
    name, last = _name_of(run, program.models), run.errors[-1] if run.errors else None
    if run.problem or last is None or last.error is None or last.exceeds(_limit(run)):
        yield Say(f"{name}: not the result of fp32.", "bad", "verdict")
        return
    part = f"{100 * last.error / _limit(run):.0f} % of the tolerance"
    yield Say(f"{name}: the last output is as in fp32, error {last.error:.1e}, {part}.", "good", "verdict")


def _limit(run: ProgramRun) -> float:
    """The largest tolerance of the precisions in a run."""
    return max(PRECISIONS.get(name).tolerance for name in run.precisions)


def _name_of(run: ProgramRun, models: Sequence[ScannedModel]) -> str:
    """``half: pipe.unet; fp32: pipe.vae.decode`` where models differ."""
    if run.name == AGAIN:
        return run.name
    by_precision: dict[str, list[str]] = {}
    for model, precision in zip(models, run.precisions, strict=True):
        by_precision.setdefault(precision, []).append(model.name)
    if len(by_precision) == 1:
        return f"all {next(iter(by_precision))}"
    return "; ".join(f"{precision}: {', '.join(names)}" for precision, names in by_precision.items())


def _where(run: ProgramRun, models: Sequence[ScannedModel]) -> str | None:
    """The call at which a run parts from fp32; ``None`` if none does."""
    if run.problem:
        return run.problem
    names = {model.key: model.name for model in models}
    for error in run.errors:
        if error.exceeds(_limit(run)):
            what = error.note
            if error.nonfinite:
                what = "has NaN or Inf"
            elif error.error is not None:
                what = f"differs by {error.error:.1e}"
            return f"{names.get(error.model, error.model)}, call {error.call}: {what}"
    return None


def _low_runs(scan: ScanResult) -> list[Run]:
    return [run for run in candidates(scan.runs) if run.base is None]


def _worst_call(model: ScannedModel, scan: ScanResult) -> str | None:
    """The number of the first call on which a run fails; ``None`` if each passes on all."""
    failing = [run.failed_batch or 0 for run in _low_runs(scan) if run.status not in ("ok", "skipped", "unjudged")]
    if not failing:
        return None
    return str(model.kept[min(failing)])


def _findings(model: ScannedModel) -> Iterator[Block]:
    """What makes runs of a model fail, in a line or two each."""
    if model.scan is None:
        return
    found = groups(model.scan.diagnostics)
    errors = [group for group in found if group.severity == "error"]
    brief = headlines(errors, passes=model.scan.recommendation is not None)
    if brief:
        yield Heading(f"Findings in {model.name}", anchor=f"findings-{model.name}")
        yield from (Say(each.text, role="item", lead=each.lead) for each in brief[:SHOWN])
