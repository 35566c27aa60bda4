"""A scan as blocks: conditions, runs, causes of errors, findings, advice; also as ``repr``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import dedent

from lowprec_check.analysis.error_shares import module_shares, trusted_budget
from lowprec_check.analysis.findings import FindingGroup, folded, groups, no_effect, tally
from lowprec_check.analysis.recommend import recommended_run
from lowprec_check.analysis.rules.registry import rules
from lowprec_check.analysis.run_summary import candidates, degenerate_output, label
from lowprec_check.analysis.statements.advice import basis, sentences
from lowprec_check.analysis.statements.kinds import statements
from lowprec_check.catalog.versions import release_of
from lowprec_check.report.blocks import (
    Block,
    CodeBlock,
    Column,
    Document,
    Fold,
    Heading,
    Pairs,
    Row,
    Say,
    Table,
    cell_text,
)
from lowprec_check.report.fix_blocks import fix_blocks
from lowprec_check.report.foreign_text import visible
from lowprec_check.report.layout.html import fragment
from lowprec_check.report.plan import kept_modules
from lowprec_check.report.runs_table import extra_blocks, runs_table
from lowprec_check.report.training_blocks import training_blocks
from lowprec_check.schema.precisions import LOW_FORMATS
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.statements import Statement, module_name

SHOWN_FINDINGS = 12
"""Groups of findings that a terminal shows."""

_SHOWN_OTHERS = 3
"""Reasons against other runs that follow the verdict; more of them are only in the table of runs."""

CONDITIONS = "conditions"
"""The anchor of the last section of a page."""
_ESTIMATED = "What goes with the module in fp32 and not with those inside it, by following each rounding error to the output. These add up to 1."
_MEASURED = "What went in a plain run with this module alone in fp32, with all inside. These overlap, and hold chance of that run."
_LEAST_SHARE = 0.0005
_SHOWN_MODULES = 8


def scan_document(result: ScanResult) -> Document:
    """The report; a terminal shows at most :data:`SHOWN_FINDINGS` groups of findings."""
    said = statements(result)
    blocks = [*_head(result, said), Heading("Runs", anchor="runs"), runs_table(result, said)]
    times = [found for found in said if found.about == "times" and found.runs]
    blocks += [Say(found.text, "warn", "note", ", ".join(found.runs)) for found in times]
    blocks += training_blocks(result, said)
    causes = [found for found in said if found.about == "error"]
    if causes:
        blocks.append(Heading("Where the error comes from", anchor="causes"))
        order = {label(run): index for index, run in enumerate(result.runs)}
        causes.sort(key=lambda found: min(order[name] for name in found.runs))
        blocks += [Say(found.text, found.tone, "item", ", ".join(found.runs)) for found in causes]
    if result.fixing is not None:
        blocks += fix_blocks(result.fixing, heading=True)
    blocks += [*extra_blocks(result), *_findings(result), *_shares(result)]
    blocks += [Heading("About this scan", anchor=CONDITIONS, detail="all"), *_about(result, said)]
    return Document(result.target, blocks, result.tool, tuple(_advice(result, said)))


def _head(result: ScanResult, said: Sequence[Statement]) -> Iterator[Block]:
    yield Say(f"lowprec-check · {title(result, taken=result.model.taken)}", role="title")
    yield Say(machine(result), role="hint")
    notes = [Say(found.text, "warn", "note") for found in said if found.about == "prediction"]
    conditions = [found for found in said if found.about in ("inputs", "weights", "times")]
    shown = [found.text for found in conditions if not found.runs and found.kind != "note"]
    yield from notes
    if shown:
        yield Say(sentences(["; ".join(shown)]), role="hint")
    yield from (Say(found.text, "warn", "note") for found in conditions if found.kind == "note")


def title(result: ScanResult, taken: str = "") -> str:
    """First line of a report: model, what of the user's file was ``taken``, size, inputs."""
    model = result.model
    if taken:
        name = f"{model.name} ({taken})"
    else:
        name = model.name
    inputs = f"input {', '.join(model.inputs[:3])}{', …' if len(model.inputs) > 3 else ''}"
    parameters = f"{format_count(model.parameters)} parameter{'' if model.parameters == 1 else 's'}"
    return " · ".join([name, parameters, inputs])


def format_count(number: int) -> str:
    """``11.7 M`` of 11 689 512."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            return f"{number / (1e3 if unit == 'k' else size):.1f} {unit}"
    return f"{number:,}"


def machine(result: ScanResult) -> str:
    """Second line of a report: torch and the device, with the formats it accelerates."""
    env, device = result.environment, result.prediction
    if device is not None:
        other = release_of(str(env.get("torch")))
        where = "predicted"
        if device.torch != other:
            where = f"predicted with torch {other}"
        return f"torch {result.torch} · {device.name}, {where if device.name == 'cpu' else 'predicted on a CPU'}"
    accelerated = [(low.short, env.get(f"{low.short}_accelerated")) for low in LOW_FORMATS]
    formats = ", ".join(f"{name} {'accelerated' if yes else 'not'}" for name, yes in accelerated if yes is not None)
    device_text = ""
    if env.get("device"):
        device_text = f" · {env['device']}{f': {formats}' if formats else ''}"
    return f"torch {result.torch.partition('+')[0]}{device_text}"


def _shares(result: ScanResult) -> Iterator[Block]:
    """The modules with the largest shares of the error, of each run that fails by it."""
    for run in candidates(result.runs):
        budget = trusted_budget(run)
        if budget is None or run.status == "ok" or degenerate_output(run, result.runs) is not None:
            continue
        predicted = max(1.0, 1.0 - (budget.unexplained or 0.0))  # more than the error of the run, which sentences say
        parts = [part._replace(share=part.share / predicted) for part in module_shares(run)]
        parts = [part for part in parts if abs(part.share) >= _LEAST_SHARE]
        measured = {its.module: its.measured for its in budget.modules}
        kept = sorted(sorted(parts, key=lambda part: -abs(part.share))[:_SHOWN_MODULES], key=lambda part: -part.share)
        rows = [
            Row(
                [
                    part.name or module_name(part.name),
                    part.share,
                    measured.get(part.name),
                    part.largest.op,
                    part.largest.source,
                ],
                module=part.name,
            )
            for part in kept
        ]
        unexplained = max(0.0, budget.unexplained or 0.0)
        rest = 1.0 - sum(part.share for part in kept) - unexplained
        sums = (
            ("other modules", rest),
            ("choices that differ from fp32", budget.decisions),
            ("not explained", unexplained - budget.decisions),
        )
        rows += [Row([name, share, None, None, None]) for name, share in sums if abs(share) >= _LEAST_SHARE]
        columns = [
            Column("module", "text"),
            Column("estimated share", "share", _ESTIMATED),
            Column("measured alone", "share", _MEASURED),
            Column("largest op", "op"),
            Column("line", "source"),
        ]
        title = f"Shares of the squared output error, by module: {label(run)}"
        yield Fold(title, [Table(columns, rows, title)], detail="more")


def _findings(result: ScanResult) -> Iterator[Block]:
    found = groups(result.diagnostics)
    if not found:
        yield Say(f"{tally(result.diagnostics)}." if result.diagnostics else "No findings.")
        return
    yield Heading("Findings", anchor="findings")
    listed = [group for group in found if group.severity != "note"]
    notes = [group for group in found if group.severity == "note"]
    if listed and all(run.status in ("ok", "skipped") for run in candidates(result.runs)):  # they are in the way then
        for group in listed[:SHOWN_FINDINGS]:
            lead = f"{group.code} {', '.join(group.short_runs)}"
            yield Say(f"{group.said} ({group.where or 'model'})", role="item", lead=lead)
        yield Fold("Findings in full", [findings_table(listed)], detail="more")
    elif listed:
        yield findings_table(listed, SHOWN_FINDINGS)
    shown = [group for group in notes if not group.harmless]
    parts = [tally(result.diagnostics), no_effect(found), f"Notes: {folded(shown)}" if shown else ""]
    yield Say(" · ".join(filter(None, parts)), role="hint")
    options = [f"lowprec-check explain {found[0].code}", "--report FILE.html"]
    if len(listed) > SHOWN_FINDINGS:
        options.append("-v lists all findings")
    elif notes:
        options.append("-v lists the notes")
    yield Say(f"More: {', '.join(options)}", role="prompt")
    if notes:
        yield Fold("Notes", [findings_table(notes, 0)], detail="more")
    for code in sorted({group.code for group in found} & rules().keys()):
        manual = [
            CodeBlock(dedent(paragraph)) if paragraph.startswith("    ") else Say(" ".join(paragraph.split()))
            for paragraph in rules()[code].manual.split("\n\n")
        ]
        yield Fold(f"What {code} means, and what to do", manual, detail="all")


def findings_table(found: Sequence[FindingGroup], most: int = 0) -> Table:
    """A row per finding; the runs that say it in other words follow each other in its last cell."""
    columns = [
        Column("severity", "severity"),
        Column("finding"),
        Column("runs"),
        Column("op", "op"),
        Column("where", "text"),
        Column("what", "sentence"),
    ]
    rows = []
    for group in found:
        said = "; ".join([group.what, *(f"predicted from: {known}" for known in group.rests_on)])
        below = [Say(place.text, role="item", lead=", ".join(place.runs)) for place in group.places[:100]]
        module = next((place.module for place in group.places), None)
        runs, name = ", ".join(group.short_runs), f"{group.code} {group.name}"
        cells = [group.severity, name, runs, group.op, group.where or "model", said]
        rows.append(Row(cells, below=below, module=module))
    return Table(columns, rows, "findings", headings=5, searchable=True, most=most)


def _about(result: ScanResult, said: Sequence[Statement]) -> Iterator[Block]:
    """The times, what the analysis did not see, and the environment."""
    columns = [
        Column("run", "run"),
        Column("median", "ms"),
        Column("first quartile", "ms"),
        Column("third quartile", "ms"),
        Column("calls", "number"),
        Column(
            "times as fast as fp32",
            "text",
            "The median of the rounds, and the interval that holds it with a probability of at least 95 %.",
        ),
        Column("rounds", "number"),
    ]
    rows = []
    for run in result.runs:
        if run.latency is not None:
            its, found = run.latency, run.latency.speedup
            ratio = None
            if found is not None:
                ratio = f"{found.median:.3g} ({found.low:.3g} – {found.high:.3g})"
            cells = [label(run), its.median_ms, *its.quartiles_ms, its.samples, ratio, found and found.rounds]
            rows.append(Row(cells))
    if rows:
        yield Fold("Times", [Table(columns, rows, "times")], detail="more")
    unseen = [found for found in said if found.about in ("analysis", "not run")]
    if unseen:
        items = [Say(found.text, "none", "item", ", ".join(found.runs)) for found in unseen]
        yield Fold("What was not seen", items, detail="more")
    device = result.prediction
    predicted = []
    if device:
        predicted = [("predicted for", f"{device.name}, torch {device.torch}")]
    pairs = [("target", result.target), *predicted, *result.environment.items(), *result.options.items()]
    shown = [
        (name.replace("_", " "), ", ".join(map(str, value)) if isinstance(value, list) else str(value))
        for name, value in pairs
        if value not in (None, [], "", False)
    ]
    yield Fold("Environment", [Pairs(shown, "environment")], detail="more")


def _advice(result: ScanResult, said: Sequence[Statement]) -> Iterator[Block]:
    best, run = result.recommendation, recommended_run(result)
    of_kind: dict[str, list[Statement]] = {}
    for found in said:
        of_kind.setdefault(found.kind, []).append(found)
    verdict, against = of_kind["verdict"][0], of_kind.get("not-chosen", [])
    yield Say(f"{verdict.text}.", verdict.tone, "verdict")
    if rests_on := basis(said):
        yield Say(rests_on)
    for its in (*of_kind.get("way-out", ()), *of_kind.get("no-plan", ())):
        yield Say(its.text, its.tone, "text", ", ".join(its.runs))
    for its in of_kind.get("patch", ()):
        yield Say(f"{its.text[:1].upper()}{its.text[1:]}.", its.tone)
    for its in against[:_SHOWN_OTHERS]:
        yield Say(its.text, role="item", lead=f"{'Not ' if best is not None else ''}{', '.join(its.runs)}")
    if more := sum(len(its.runs) for its in against[_SHOWN_OTHERS:]):
        yield Say(f"The table of runs says why the {'other fails' if more == 1 else 'others fail'}.", role="item")
    for its in (*of_kind.get("also-faster", ()), *of_kind.get("also-smaller", ())):
        yield Say(its.text, role="item", lead=", ".join(its.runs))
    if best is None:
        return
    if result.plan is not None and best.keep_fp32 == result.plan.keep_fp32:
        yield from kept_modules(result.plan)
    if best.stay_in_fp32:
        title = "To use it nevertheless"
        if run is not None:
            title = f"To use {best.label} nevertheless"
        yield Fold(title, [CodeBlock(best.code)])
    elif best.code:
        yield CodeBlock(best.code)


# -- A result at a prompt and in a notebook: ``repr(result)``, and the first screen of its report as HTML


def text(result: ScanResult) -> str:
    """Three lines: what was scanned, the status of each run, the recommendation."""
    said = statements(result)
    table, runs = runs_table(result, said), []
    names = [column.name for column in table.columns]
    for row in table.rows:
        shown = [cell_text(value, column.type) for value, column in zip(row.cells, table.columns, strict=True)]
        figures = dict(zip(names, shown, strict=True))
        error = figures.get("output error", figures.get("loss", "–"))
        runs.append(f"{shown[0]} {shown[1]}{f' ({error})' if error != '–' else ''}")
    verdict = next(its.text for its in said if its.kind == "verdict")
    lines = [
        f"ScanResult: {title(result)} · {machine(result)}",
        ", ".join(runs) or "no runs",
        f"{verdict}. {basis(said)}".strip(),
    ]
    return "\n".join(visible(line, 400) for line in lines)


def html(result: ScanResult) -> str:
    """The first screen of the report, without scripts and styles of its own."""
    return fragment(scan_document(result))
