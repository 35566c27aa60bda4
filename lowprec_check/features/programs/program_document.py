"""The scan of a program as blocks: a table of its models, then what was found of each."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from lowprec_check.analysis.findings import groups, headlines
from lowprec_check.analysis.run_summary import candidates, label
from lowprec_check.analysis.statements.advice import verdict
from lowprec_check.errors import UsageError
from lowprec_check.features.programs.program_scan import (
    AGAIN,
    NOTHING,
    OTHER_INTEGERS,
    RECOMMENDED,
    CallError,
    ProgramRun,
    ProgramScan,
    ScannedModel,
    VariableError,
    recommended_assignment,
)
from lowprec_check.report import charts
from lowprec_check.report.blocks import (
    Block,
    Chart,
    CodeBlock,
    Column,
    Document,
    ErrorOf,
    Fold,
    Heading,
    Row,
    Say,
    Table,
)
from lowprec_check.report.charts import CellRow, StepLine
from lowprec_check.report.foreign_text import visible
from lowprec_check.report.registry import ReportFormat, format_of
from lowprec_check.report.runs_table import shown_status
from lowprec_check.report.scan_document import machine, scan_document
from lowprec_check.schema.op_calls import PRODUCTS
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import counted, fill

_LONGEST_RUN = 20
"""Letters of the name of a run beside a chart."""


def program_document(program: ProgramScan) -> Document:
    """The report: one row per model, findings by model, and each scan in full."""
    calls = sum(model.calls for model in program.models)
    title = f"lowprec-check · {program.target} · {counted(len(program.models), 'model')}, {counted(calls, 'call')}"
    blocks: list[Block] = [Say(title, role="title")]
    scans = [model.scan for model in program.models if model.scan is not None]
    if scans:
        blocks.append(Say(machine(scans[0]), role="hint"))
    if not program.complete:
        done = f"{counted(len(scans), 'model')} of {len(program.models)} scanned"
        if all(model.scan is not None or model.problem for model in program.models):
            done = f"the program ran again {counted(len(program.runs), 'time')}, then it was stopped"
        blocks.append(Say(done, "warn", "note"))
    blocks += [Say(note, "warn", "note") for note in program.notes]
    # Code that was put into the script has moved its lines
    drawing = (run for run in program.runs if run.name != AGAIN and not run.code)
    lines = dict.fromkeys(line for run in drawing for line in run.other_draws)
    if lines:
        drawn = f"in 16 bits torch draws other random numbers from a seed than in fp32 ({', '.join(lines)})"
        blocks.append(Say(f"{drawn}: runs of the program got those of fp32, rounded", "warn", "note"))
    head = len(blocks)
    blocks += _code(program)
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
        failing = [run for run in runs.values() if run.status not in ("ok", "skipped", "unjudged")]
        worst = str(model.kept[min(run.failed_batch or 0 for run in failing)]) if failing else None
        rows.append(Row([model.name, calls, *statuses, worst, f"{verdict(model.scan)}."]))
    return Table(columns, rows, "models")


def _program_runs(program: ProgramScan) -> Iterator[Block]:
    """A row per run of the program: how far its last output is from fp32, where it parts."""
    if not program.runs:
        return
    yield Heading("The program", anchor="program")
    names = dict.fromkeys(each.name for run in program.runs for each in run.variables)
    columns = [
        Column("run", "run"),
        Column("last output", "error", "The error of the last call that no other model makes, against fp32."),
        *(Column(name, "error", "The variable of the script at its end, against fp32.") for name in names),
        Column("parts from fp32 at", "sentence", "The first call whose error exceeds the tolerance."),
    ]
    rows = []
    for run in program.runs:
        last = None
        error = run.last
        if error is not None and not run.problem:
            limit = run.tolerance if error.limit is None else error.limit
            last = ErrorOf(math.inf if error.error is None else error.error, limit, error.shown)
        tag = "recommended" if run.name == RECOMMENDED else ""
        variables = {each.name: _cell(each, run.tolerance) for each in run.variables}
        cells = [variables.get(name) for name in names]
        rows.append(Row([_name_of(run, program.models), last, *cells, where_it_parts(run, program.models)], tag))
    yield Table(columns, rows, "runs of the program")
    yield from _charts(program)


def _charts(program: ProgramScan) -> Iterator[Chart]:
    """Which calls of each model differ from fp32 in each run, and by how much, call by call."""
    runs = [(_name_of(run, program.models), run) for run in program.runs if run.name != AGAIN and run.errors]
    rows: list[CellRow] = []
    lines: list[StepLine] = []
    for number, (name, run) in enumerate(runs, start=1):
        by_model: dict[str, list[tuple[bool, str]]] = {}
        for error in run.errors:
            figure = error.meaning or ("not finite" if error.error is None else f"error {error.error:.1e}")
            tip = f"{name}: call {error.call}: {error.note or figure}"
            by_model.setdefault(_model_called(error, program.models), []).append(
                (not error.exceeds(run.tolerance), tip)
            )
        short = name if len(name) <= _LONGEST_RUN else "recommended"
        rows += [CellRow(f"{model} · {short}", cells) for model, cells in by_model.items()]
        lines.append(StepLine(short, f"s{number % 6 or 6}", [None, *(error.error for error in run.errors)]))
    title = "Calls of each model against fp32"
    if rows:
        yield Chart(title, lambda: charts.cells(title, rows, "calls, in order"), detail="all")
    if any(value for line in lines for value in line.values):
        steps, by_call = max(len(line.values) for line in lines) - 1, "Error of each call against fp32"
        yield Chart(by_call, lambda: charts.by_step(by_call, lines, steps, "error", step="call"), detail="all")


def _cell(variable: VariableError, tolerance: float) -> ErrorOf:
    shown = ""
    if variable.error is None or variable.is_black:
        shown = "black" if variable.is_black else variable.note
    elif variable.psnr is not None:
        shown = f"{variable.error:.1e} ({variable.psnr:.0f} dB)"
    return ErrorOf(variable.error, tolerance, shown)


def _why_no_mixture(program: ProgramScan) -> str:
    """Why the program did not run with its models in lower precisions; empty if that may come."""
    failed = next((run for run in program.runs if run.name == "fp32"), None)
    scanned = [model for model in program.models if model.scan is not None]
    if failed is not None:
        return f"The program cannot run again in fp32: {failed.problem.rstrip('.')}"
    if program.stay_in_fp32 and program.complete:
        return "Stay in fp32: models pass in 16 bits, but the program parts from fp32 with them"
    if scanned and program.complete and all(recommended_assignment(each).precision == "fp32" for each in scanned):
        of_which = " that could be scanned" if len(scanned) < len(program.models) else ""
        return f"Stay in fp32: no model{of_which} passes in 16 bits"
    return ""


def _verdict(program: ProgramScan) -> Iterator[Block]:
    """What the program returns with each model in its recommended precision."""
    run = next((run for run in program.runs if run.name == RECOMMENDED), None)
    if run is None:
        why = _why_no_mixture(program)
        if why:
            yield Say(f"{why}.", "bad", "verdict")
        return
    name, last = _name_of(run, program.models), run.last
    compared = ", ".join(f"{each.name} {_difference(each)}" for each in run.variables)
    memory = ""
    fp32_bytes = next((other.weight_bytes for other in program.runs if other.name == AGAIN), 0)
    if 0 < run.weight_bytes < fp32_bytes and not run.too_few:  # some models may not be called
        memory = f", {run.weight_bytes / fp32_bytes:.2f} of the memory of weights"
    if run.speed is not None:
        pace = f"{run.speed:.1f} times as fast" if run.speed > 1 else f"{1 / run.speed:.1f} times as slow"
        memory = f", about {pace}{memory}"
    if run.is_late:
        yield Say(f"{name}: not compared with fp32: {run.problem}.", "bad", "verdict")
    elif last is None and not compared and run.errors and not run.problem:
        yield Say(f"{name}: no model {NOTHING}; pass --compare.", "bad", "verdict")
    elif not run.passes:
        yield Say(f"{name}: not the result of fp32{fill(': {}', compared or run.too_few)}.", "bad", "verdict")
    elif compared or last is None or last.error is None:
        yield Say(f"{name}: {compared}{memory}.", "good", "verdict")
    elif last.meaning:
        yield Say(f"{name}: the last output is as in fp32: {last.meaning}{memory}.", "good", "verdict")
    else:
        part = f"{100 * last.error / run.tolerance:.0f} % of the tolerance"
        yield Say(f"{name}: the last output is as in fp32, error {last.error:.1e}, {part}{memory}.", "good", "verdict")
    for other in program.runs:
        black = [each.name for each in other.variables if each.is_black]
        first = other.first_error
        if black and first is not None and other is not run:
            where = f" from {_model_called(first, program.models)} on"
            yield Say(f"{_name_of(other, program.models)}: {', '.join(black)} is black{where}.", "bad", "item")


def _code(program: ProgramScan) -> Iterator[Block]:
    """The code by which the program ran as recommended, or why there is none."""
    run = next((run for run in program.runs if run.name == RECOMMENDED), None)
    if run is None or not run.passes:
        return
    if run.no_code:
        yield Say(run.no_code, "warn", "note")
        return
    for code in run.code:
        where = "before"
        if code.is_around or code.is_instead:
            where = "around" if code.is_around else "in place of"
        yield CodeBlock(f"# {where} {code.line}\n{code.text}".rstrip())
    yield Say("The program ran again with this code in it: its figures are those of this run.", role="hint")


def _difference(variable: VariableError) -> str:
    """``differs by 1.1e-02 (41 dB)``."""
    if variable.error is None:
        return f"differs: {variable.note or 'infinite'}"
    if variable.error == 0:
        return "is equal"
    return f"differs by {variable.error:.1e}{fill(' ({} dB)', variable.psnr and f'{variable.psnr:.0f}')}"


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


def where_it_parts(run: ProgramRun, models: Sequence[ScannedModel]) -> str | None:
    """The call at which a run parts from fp32; ``None`` if none does."""
    if run.problem:
        return run.problem
    error = run.first_error
    if error is None:
        return run.too_few or None
    what = error.note
    if error.nonfinite:
        what = "has NaN or Inf"
    elif error.choice is not None and not error.exceeds(run.tolerance):
        choice = error.choice
        what = f"prefers {choice.chosen} to {choice.of_fp32}; in fp32 their logits are {choice.apart:.1e} apart"
        what += fill(" ({})", _maker(error, models))
    elif error.error is not None and error.note != OTHER_INTEGERS:
        what = error.meaning or f"differs by {error.error:.1e}"
    return f"{_model_called(error, models)}, call {error.call}: {what}"


def _maker(error: CallError, models: Sequence[ScannedModel]) -> str:
    """The module and op that make the logits of a call: the last product with so many; empty if
    that is not known.
    """
    for model in models:
        if (model.key, model.method) == (error.model, error.method) and model.scan and error.choice:
            for run in model.scan.runs:
                for row in reversed([*run.op_calls.rows()] if run.op_calls else []):
                    if PRODUCTS.search(row.op) and row.shape.rpartition("×")[2] == f"{error.choice.among}":
                        return f"{row.module} {row.op}".strip()
    return ""


def _model_called(error: CallError, models: Sequence[ScannedModel]) -> str:
    names = {(model.key, model.method): model.name for model in models}
    return names.get((error.model, error.method), error.model)


def _low_runs(scan: ScanResult) -> list[Run]:
    return [run for run in candidates(scan.runs) if run.base is None]


SHOWN = 3
"""Findings of each model that a terminal shows."""


def _findings(model: ScannedModel) -> Iterator[Block]:
    """What makes runs of a model fail, in a line or two each."""
    if model.scan is None:
        return
    found = groups(model.scan.diagnostics)
    errors = [group for group in found if group.severity == "error"]
    best = model.scan.recommendation
    brief = headlines(errors, best.label if best is not None else None)
    if brief:
        yield Heading(f"Findings in {model.name}", anchor=f"findings-{model.name}")
        yield from (Say(each.text, role="item", lead=each.lead) for each in brief[:SHOWN])


# -- The files of ``--report``: pages, and SARIF with a run per model

_BY_MODEL = "sarif"
"""The format whose report of a program is that of each model, one after another."""


def check_format(file: Path) -> None:
    """Raise :class:`UsageError` for a file whose format has no report of a program."""
    chosen = format_of(file)
    if chosen.name != _BY_MODEL and type(chosen).lay_out is ReportFormat.lay_out:
        raise UsageError(f"{file}: a program has no report in this format.", "Give .html, .md, .txt or .sarif.")
    chosen.check_available()


def program_report(program: ProgramScan, file: Path) -> str:
    """The report in the format of ``file``."""
    chosen = format_of(file)
    if chosen.name != _BY_MODEL:
        return chosen.lay_out(program_document(program))
    log, runs = {}, []
    for model in program.models:
        if model.scan is not None:
            log = json.loads(chosen.render(model.scan))
            # Code scanning tells runs of one tool apart by it
            runs += [run | {"automationDetails": {"id": f"{visible(model.name)}/"}} for run in log["runs"]]
    if not runs:
        log = {"version": "2.1.0"}
    return json.dumps(log | {"runs": runs}, indent=2, ensure_ascii=False) + "\n"
