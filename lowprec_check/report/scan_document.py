"""A scan as blocks: conditions, runs, causes of errors, findings, advice; also as ``repr``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lowprec_check.analysis.findings import FindingGroup, folded, groups, no_effect, tally
from lowprec_check.analysis.recommend import recommended_run
from lowprec_check.analysis.rules.registry import rules
from lowprec_check.analysis.run_summary import candidates, label
from lowprec_check.analysis.statements.advice import basis, sentences
from lowprec_check.analysis.statements.kinds import kinds, statements
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
from lowprec_check.report.feature_parts import sections
from lowprec_check.report.foreign_text import visible
from lowprec_check.report.layout.html import fragment
from lowprec_check.report.manual import manual_blocks
from lowprec_check.report.runs_table import runs_table
from lowprec_check.schema.precisions import LOW_FORMATS
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.statements import Statement, agree, fill

SHOWN_FINDINGS = 12
"""Groups of findings that a terminal shows."""

_SHOWN_OTHERS = 3
"""Reasons against other runs that follow the verdict; the table of runs has them all."""

CONDITIONS = "conditions"
"""The anchor of the last section of a page."""


def scan_document(result: ScanResult) -> Document:
    """The report; a terminal shows at most :data:`SHOWN_FINDINGS` groups of findings."""
    said = statements(result)
    blocks: list[Block] = [Say(f"lowprec-check · {title(result, taken=result.model.taken)}", role="title")]
    blocks.append(Say(machine(result), role="hint"))
    blocks += [Say(each.text, "warn", "note") for each in said if each.about in ("model", "prediction")]
    conditions = [each for each in said if each.about in ("inputs", "weights", "times")]
    hints = [each.text for each in conditions if not each.runs and each.kind != "note"]
    if hints:
        blocks.append(Say(sentences(["; ".join(hints)]), role="hint"))
    blocks += [Say(each.text, "warn", "note") for each in conditions if each.kind == "note"]
    blocks += [Heading("Runs", anchor="runs"), runs_table(result, said)]
    times = [each for each in said if each.about == "times" and each.runs]
    blocks += [Say(each.text, "warn", "note", ", ".join(each.runs)) for each in times]
    blocks += sections("times", result, said)
    # causes in the order of the runs that they are about
    causes = [each for each in said if each.about == "error"]
    if causes:
        blocks.append(Heading("Where the error comes from", anchor="causes"))
        order = {label(run): index for index, run in enumerate(result.runs)}
        causes.sort(key=lambda cause: min(order[name] for name in cause.runs))
        blocks += [Say(cause.text, cause.tone, "item", ", ".join(cause.runs)) for cause in causes]
    blocks += [*sections("causes", result, said), *_findings(result), *sections("findings", result, said)]
    blocks += [Heading("About this scan", anchor=CONDITIONS, detail="all"), *_about(result, said)]
    return Document(result.target, blocks, result.tool, tuple(_advice(result, said)))


def title(result: ScanResult, taken: str = "") -> str:
    """First line of a report: model, what of the user's file was ``taken``, size, inputs."""
    model = result.model
    inputs = f"input {', '.join(model.inputs[:3])}{', …' if model.inputs[3:] else ''}"
    parameters = f"{format_count(model.parameters)} {agree(model.parameters, 'parameter', 'parameters')}"
    return " · ".join([f"{model.name}{fill(' ({})', taken)}", parameters, inputs])


def format_count(number: int) -> str:
    """``11.7 M`` of 11 689 512."""
    for least, size, unit in ((1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if number >= least:
            return f"{number / size:.1f} {unit}"
    return f"{number:,}"


def machine(result: ScanResult) -> str:
    """Second line of a report: torch and the device, with the formats it accelerates."""
    env, device = result.environment, result.prediction
    if device is not None:
        other = release_of(str(env.get("torch")))
        where = "predicted"
        if device.name != "cpu":
            where = "predicted on a CPU"
        elif device.torch != other:
            where = f"predicted with torch {other}"
        return f"torch {result.torch} · {device.name}, {where}"
    # older results do not say what the device accelerates
    words = {True: "accelerated", False: "not"}
    accelerated = [(low.short, env.get(f"{low.short}_accelerated")) for low in LOW_FORMATS]
    formats = ", ".join(f"{name} {words[bool(yes)]}" for name, yes in accelerated if yes is not None)
    device_text = ""
    if env.get("device"):
        device_text = f" · {env['device']}{fill(': {}', formats)}"
    return f"torch {result.torch.partition('+')[0]}{device_text}"


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
            lead = " ".join([group.code, ", ".join(group.runs)]).strip()
            yield Say(f"{group.said} ({group.where or 'model'})", role="item", lead=lead)
        yield Fold("Findings in full", [findings_table(listed)], detail="more")
    elif listed:
        yield findings_table(listed, SHOWN_FINDINGS)
    # notes that no run fails for are only counted
    shown_notes = folded(group for group in notes if not group.harmless)
    parts = [tally(result.diagnostics), no_effect(found), fill("Notes: {}", shown_notes)]
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
        manual = [*manual_blocks(rules()[code])]
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
    rows, reported = [], set[str]()
    for group in found:
        said = "; ".join([group.what, *(f"predicted from: {source}" for source in group.rests_on)])
        below = [Say(place.text, role="item", lead=", ".join(place.runs)) for place in group.places[:100]]
        module = next((place.module for place in group.places), None)
        runs, name = ", ".join(group.runs), f"{group.code} {group.name}"
        cells = [group.severity, name, runs, group.op, group.where or "model", said]
        line = ""
        if group.known is not None and group.known.link not in reported:
            line = group.known.text
            reported.add(group.known.link)
            below.append(Say(group.known.repair, role="item", lead="repair in the similar report"))
        rows.append(Row(cells, below=below, module=module, line=line))
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
            latency, speedup = run.latency, run.latency.speedup
            ratio = None
            if speedup is not None and speedup.rounds > 1:
                ratio = f"{speedup.median:.3g} ({speedup.low:.3g} – {speedup.high:.3g})"
            cells = [label(run), latency.median_ms, *latency.quartiles_ms, latency.samples, ratio]
            rows.append(Row([*cells, speedup and speedup.rounds]))
    if rows:
        yield Fold("Times", [Table(columns, rows, "times")], detail="more")
    unseen = [each for each in said if each.about in ("analysis", "not run")]
    if unseen:
        items = [Say(each.text, "none", "item", ", ".join(each.runs)) for each in unseen]
        yield Fold("What was not seen", items, detail="more")
    conditions: dict[str, Any] = {"target": result.target}
    if result.prediction:
        conditions["predicted for"] = f"{result.prediction.name}, torch {result.prediction.torch}"
    pairs = []
    for name, value in (*conditions.items(), *result.environment.items(), *result.options.items()):
        # options that were not set say nothing
        if value not in (None, [], "", False):
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            pairs.append((name.replace("_", " "), text))
    yield Fold("Environment", [Pairs(pairs, "environment")], detail="more")


def _advice(result: ScanResult, said: Sequence[Statement]) -> Iterator[Block]:
    best, run = result.recommendation, recommended_run(result)
    of_kind: dict[str, list[Statement]] = {}
    for each in said:
        of_kind.setdefault(each.kind, []).append(each)
    verdict, against = of_kind["verdict"][0], of_kind.get("not-chosen", [])
    yield Say(f"{verdict.text}.", verdict.tone, "verdict")
    if rests_on := basis(said):
        yield Say(rests_on)
    # what features say of it: of runs, then of all
    of_features = [each for each in said if kinds()[each.kind].after == verdict.kind]
    yield from (Say(each.text, each.tone, "text", ", ".join(each.runs)) for each in of_features if each.runs)
    yield from (Say(f"{each.text[:1].upper()}{each.text[1:]}.", each.tone) for each in of_features if not each.runs)
    # why others were not chosen: the first few reasons
    for reason in against[:_SHOWN_OTHERS]:
        yield Say(reason.text, role="item", lead=f"{'Not ' if best else ''}{', '.join(reason.runs)}")
    if more := sum(len(reason.runs) for reason in against[_SHOWN_OTHERS:]):
        yield Say(f"The table of runs says why the {agree(more, 'other fails', 'others fail')}.", role="item")
    for gain in (*of_kind.get("also-faster", ()), *of_kind.get("also-smaller", ())):
        yield Say(gain.text, role="item", lead=", ".join(gain.runs))
    yield from sections("advice", result, said)
    # the code to paste
    if best is None:
        return
    if best.stay_in_fp32:
        name = best.label if run is not None else "it"
        yield Fold(f"To use {name} nevertheless", [CodeBlock(best.code)])
    elif best.code:
        yield CodeBlock(best.code)


# -- A result at a prompt and in a notebook: ``repr(result)``, and its first screen as HTML


def text(result: ScanResult) -> str:
    """Three lines: what was scanned, the status of each run, the recommendation."""
    said = statements(result)
    table, runs = runs_table(result, said), []
    names = [column.name for column in table.columns]
    for row in table.rows:
        cells = [cell_text(value, column.type) for value, column in zip(row.cells, table.columns, strict=True)]
        figures = dict(zip(names, cells, strict=True))
        error = figures.get("output error", figures.get("loss", "–"))
        runs.append(f"{cells[0]} {cells[1]}" + fill(" ({})", error.strip("–")))
    verdict = next(each.text for each in said if each.kind == "verdict")
    lines = [
        f"ScanResult: {title(result)} · {machine(result)}",
        ", ".join(runs) or "no runs",
        f"{verdict}. {basis(said)}".strip(),
    ]
    return "\n".join(visible(line, 400) for line in lines)


def html(result: ScanResult) -> str:
    """The first screen of the report, without scripts and styles of its own."""
    return fragment(scan_document(result))
