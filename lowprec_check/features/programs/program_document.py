"""The scan of a program as blocks: a table of its models, then what was found of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lowprec_check.analysis.findings import groups
from lowprec_check.analysis.headlines import headlines
from lowprec_check.analysis.run_summary import candidates, label
from lowprec_check.analysis.statements.advice import verdict
from lowprec_check.features.programs.assignments import RECOMMENDED
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
    blocks += [Heading("Models", anchor="models"), _models_table(program.models)]
    blocks += _program_runs(program)
    for model in program.models:
        blocks += _findings(model)
    for model in program.models:
        if model.scan is not None:
            document = scan_document(model.scan)
            blocks.append(Fold(f"{model.name} in full", [*document.advice, *document.blocks], detail="all"))
    return Document(program.target, blocks, program.tool)


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
        Column("time in models", "text", "Seconds of all calls in one run; another run may take more or less."),
        Column("parts from fp32 at", "sentence", "The first call whose error exceeds the tolerance."),
    ]
    rows = []
    for run in program.runs:
        limit = max(PRECISIONS.get(name).tolerance for name in run.precisions)
        last, seconds = None, None
        if run.errors and not run.problem:
            last, seconds = ErrorOf(run.errors[-1].error, limit), f"{run.seconds:.3g} s"
        tag = "recommended" if run.name == RECOMMENDED else ""
        rows.append(Row([_name_of(run, program.models), last, seconds, _where(run, program.models, limit)], tag))
    yield Table(columns, rows, "runs of the program")


def _name_of(run: ProgramRun, models: Sequence[ScannedModel]) -> str:
    """``half: pipe.unet; fp32: pipe.vae.decode`` where models differ."""
    by_precision: dict[str, list[str]] = {}
    for model, precision in zip(models, run.precisions, strict=True):
        by_precision.setdefault(precision, []).append(model.name)
    if len(by_precision) == 1:
        return f"all {next(iter(by_precision))}"
    return "; ".join(f"{precision}: {', '.join(names)}" for precision, names in by_precision.items())


def _where(run: ProgramRun, models: Sequence[ScannedModel], limit: float) -> str | None:
    """The call at which a run parts from fp32; ``None`` if none does."""
    if run.problem:
        return run.problem
    names = {model.key: model.name for model in models}
    for error in run.errors:
        if error.nonfinite or error.error > limit:
            what = error.note or f"differs by {error.error:.1e}"
            if error.nonfinite:
                what = "has NaN or Inf"
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
