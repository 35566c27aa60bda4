"""A scan as blocks: conditions, runs, causes of errors, findings, advice; also as ``repr``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from lowprec_check.analysis.findings import MOST, FindingGroup, Headline, groups, headlines, tally
from lowprec_check.analysis.recommend import missing_runs, recommended_run
from lowprec_check.analysis.rules.registry import rules
from lowprec_check.analysis.run_summary import PREDICTED, candidates, label, shorten
from lowprec_check.analysis.statements.advice import basis, sentences
from lowprec_check.analysis.statements.kinds import kinds, statements
from lowprec_check.catalog.versions import release_of
from lowprec_check.report.blocks import (
    Block,
    CodeBlock,
    Column,
    Detail,
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
from lowprec_check.schema.registry import choices
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.scanned_model import is_decisive
from lowprec_check.schema.statements import Statement, agree, counted, fill, say

_SHOWN_REASONS, _MOST_REASONS = 2, 3
"""Reasons why other runs fail that follow the verdict on the first screen, and elsewhere."""
_LONGEST_REASON = 190
"""Characters: two lines of 100 columns."""

CONDITIONS = "conditions"
"""The anchor of the last section of a page."""


def scan_document(result: ScanResult) -> Document:
    """The report: a first screen, which is brief, and what reports with more detail have in place
    of it.
    """
    said = statements(result)
    of_kind: dict[str, list[Statement]] = {}
    for each in said:
        of_kind.setdefault(each.kind, []).append(each)
    findings = groups(result.diagnostics)
    best = result.recommendation
    brief = headlines(findings, best.label if best is not None else None)
    reasons = of_kind.get("not-chosen", [])
    explained = {run for reason in reasons[:_SHOWN_REASONS] for run in reason.runs}
    conditions = [each for each in said if each.about in ("inputs", "weights", "times") and not each.runs]
    hints = [each.text for each in conditions if each.kind != "note" and not _is_warning(each)]
    blocks: list[Block] = []
    notes = [each for each in said if each.kind == "note" or each.about in ("model", "prediction")]
    blocks += [Say(each.text, "warn", "note", detail="more") for each in notes if not _is_warning(each)]
    if hints:
        blocks.append(Say(sentences(["; ".join(hints)]), role="hint", detail="more"))
    blocks += [Heading("", detail="brief"), runs_table(result, said, "brief", explained)]
    blocks += [Heading("Runs", anchor="runs", detail="more"), runs_table(result, said, "more")]
    times = [each for each in said if each.about == "times" and each.runs]
    blocks += [Say(each.text, "warn", "note", ", ".join(each.runs), detail=_detail(each)) for each in times]
    blocks += sections("times", result, said)
    # causes in the order of the runs that they are about
    causes = [each for each in said if each.about == "error"]
    if causes:
        blocks.append(Heading("Where the error comes from", anchor="causes", detail="more"))
        order = {label(run): index for index, run in enumerate(result.runs)}
        causes.sort(key=lambda cause: min(order[name] for name in cause.runs))
        blocks += [
            Say(cause.text, cause.tone, "item", ", ".join(cause.runs), detail=_detail(cause)) for cause in causes
        ]
    blocks += [*sections("causes", result, said), *_headlines(brief), *_findings(result, findings)]
    blocks += sections("findings", result, said)
    blocks += [Heading("About this scan", anchor=CONDITIONS, detail="all"), *_about(result, said)]
    advice = [*_verdict(of_kind), *_reasons(result, said, of_kind), *sections("advice", result, said)]
    code = [*_code(result), Say(_where_to_look(result, findings, brief), role="prompt", detail="brief")]
    return Document(result.target, blocks, result.tool, [*_head(result, said)], advice, code)


def _detail(statement: Statement) -> Detail:
    """Whether the first screen has it."""
    return kinds()[statement.kind].detail


def _is_warning(statement: Statement) -> bool:
    """Whether it may change what to do, so that the first screen has it above the verdict."""
    if statement.kind == "note":
        return is_decisive(statement.text)
    return _detail(statement) == "first" and statement.tone == "warn"


def _head(result: ScanResult, said: Sequence[Statement]) -> Iterator[Block]:
    """What was scanned and where, and what may change the decision."""
    named = f"lowprec-check · {title(result, taken=result.model.taken)}"
    of_model = [each for each in said if each.about == "model" and _detail(each) == "first" and not _is_warning(each)]
    first = [title(result, taken=result.model.taken), machine(result).partition(": ")[0]]
    first += [each.text for each in of_model]
    yield Say(" · ".join(first), role="title", detail="brief")
    yield Say(named, role="title", detail="more")
    yield Say(machine(result), role="hint", detail="more")
    about = ("model", "prediction", "inputs", "weights", "times")
    warnings = [each for each in said if each.about in about and not each.runs and _is_warning(each)]
    yield from (Say(each.text, "warn", "note") for each in warnings)


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
    formats = []
    for is_accelerated, how in ((True, "accelerated"), (False, "not accelerated")):
        names = [low.short for low in LOW_FORMATS if env.get(f"{low.short}_accelerated") is is_accelerated]
        if names:
            formats.append(f"{choices(names, 'and')} {how}")
    device_text = ""
    if env.get("device"):
        device_text = f" · {env['device']}{fill(': {}', ', '.join(formats))}"
    return f"torch {result.torch.partition('+')[0]}{device_text}"


def _headlines(brief: Sequence[Headline]) -> Iterator[Block]:
    """The findings of the first screen, and one report of the like."""
    shown = brief[:MOST]
    if shown:
        yield Heading("Findings", detail="brief")
    yield from (Say(each.text, role="item", lead=each.lead, detail="brief") for each in shown)
    known = next((each.known for each in shown if each.known is not None), None)
    if known is not None:
        yield Say(known.text, role="hint", detail="brief")


def _where_to_look(result: ScanResult, findings: Sequence[FindingGroup], listed: Sequence[Headline]) -> str:
    """What has the conditions, the notes, the findings and the code that are not shown."""
    parts, best = ["conditions"], result.recommendation
    if best is not None and best.stay_in_fp32 and best.code:
        parts.append(f"code of {best.label}")
    notes = sum(group.size for group in findings if group.severity == "note")
    if len(listed) > MOST:
        parts.append(f"{len(listed) - MOST} more {agree(len(listed) - MOST, 'finding', 'findings')}")
    elif not listed and len(findings) > notes:
        parts.append("findings")
    if notes:
        parts.append(counted(notes, "note"))
    if accepted := sum(diagnostic.accepted for diagnostic in result.diagnostics):
        parts.append(f"{counted(accepted, 'finding')} accepted by the baseline")
    options = [f"-v ({', '.join(parts)})", "--report FILE.html"]
    if listed:
        options.insert(0, f"lowprec-check explain {listed[0].code}")
    return f"More: {', '.join(options)}"


def _findings(result: ScanResult, findings: Sequence[FindingGroup]) -> Iterator[Block]:
    """The findings in full, for reports with more detail."""
    if not findings:
        none = tally(result.diagnostics) if result.diagnostics else "No findings"
        ran = " in the runs that were made" if missing_runs(result) else ""
        yield Say(f"{none}{ran}.", detail="more")
        return
    yield Heading("Findings", anchor="findings", detail="more")
    listed = [group for group in findings if group.severity != "note"]
    notes = [group for group in findings if group.severity == "note"]
    # where nothing fails, tables of findings would hide the verdict
    if listed and all(run.status in ("ok", "skipped") for run in candidates(result.runs)):
        for group in listed:
            lead = " ".join([group.code, ", ".join(group.runs)]).strip()
            yield Say(f"{group.said} ({group.where or 'model'})", role="item", lead=lead, detail="more")
        yield Fold("Findings in full", [findings_table(listed)], detail="more")
    elif listed:
        yield msgspec.structs.replace(findings_table(listed), detail="more")
    yield Say(tally(result.diagnostics), role="hint", detail="more")
    if notes:
        yield Fold("Notes", [findings_table(notes)], detail="more")
    for code in sorted({group.code for group in findings} & rules().keys()):
        manual = [*manual_blocks(rules()[code])]
        yield Fold(f"What {code} means, and what to do", manual, detail="all")


def findings_table(found: Sequence[FindingGroup]) -> Table:
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
    return Table(columns, rows, "findings", headings=5, searchable=True)


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


def _verdict(of_kind: Mapping[str, Sequence[Statement]]) -> Iterator[Block]:
    """What to do, what it gains, and how sure that is."""
    verdict = of_kind["verdict"][0]
    said = [each for each_kind in of_kind.values() for each in each_kind]
    # the first screen has all in one paragraph
    lead, _, reason = verdict.text.partition(": ")
    rests_on = basis(said, ["first"])
    if reason:
        text = f"{reason}. {rests_on}".strip()
    elif rests_on and "; " not in verdict.text:
        lead, text = verdict.text, f"{rests_on[:1].lower()}{rests_on[1:]}"
        name = lead.removesuffix(" passes (predicted)")
        if name != lead:  # what it rests on begins with that it is predicted to pass
            lead, text = "", f"{name} is {text}"
    else:
        lead, text = "", f"{verdict.text}. {rests_on}".strip()
    yield Say(text, verdict.tone, "verdict", lead, detail="brief")
    yield Say(f"{verdict.text}.", verdict.tone, "verdict", detail="more")
    for text in (rests_on, basis(said, ["more"])):
        if text:
            yield Say(text, detail="more")


def _whole_clauses(text: str, most: int) -> str:
    """``text`` without its last clauses, as far as the rest has at most ``most`` characters."""
    clauses = text.split("; ")
    while len(clauses) > 1 and len("; ".join(clauses)) > most:
        clauses.pop()
    return shorten("; ".join(clauses), most)


def _reasons(
    result: ScanResult, said: Sequence[Statement], of_kind: Mapping[str, Sequence[Statement]]
) -> Iterator[Block]:
    """What features say of the verdict, why other runs fail, and what others gain."""
    of_features = [each for each in said if kinds()[each.kind].after == "verdict"]
    yield from (Say(each.text, each.tone, "text", ", ".join(each.runs)) for each in of_features if each.runs)
    yield from (Say(f"{each.text[:1].upper()}{each.text[1:]}.", each.tone) for each in of_features if not each.runs)
    fail, against = "Not " if result.recommendation else "", of_kind.get("not-chosen", ())
    most = _LONGEST_REASON // min(_SHOWN_REASONS, max(1, len(against)))
    for number, reason in enumerate(against):
        lead = f"{fail}{', '.join(reason.runs)}"
        if number < _MOST_REASONS:
            yield Say(reason.text, role="item", lead=lead, detail="more")
        if number < _SHOWN_REASONS:
            lead = lead.replace(PREDICTED, "")
            yield Say(_whole_clauses(reason.text, most - len(lead)), role="item", lead=lead, detail="brief")
    if others := sum(len(reason.runs) for reason in against[_MOST_REASONS:]):
        rest = f"The table of runs says why the {agree(others, 'other fails', 'others fail')}."
        yield Say(rest, role="item", detail="more")
    for gain in (*of_kind.get("also-faster", ()), *of_kind.get("also-smaller", ())):
        yield Say(gain.text, role="item", lead=", ".join(gain.runs), detail="more")


def _code(result: ScanResult) -> Iterator[Block]:
    """The code to paste."""
    best, run = result.recommendation, recommended_run(result)
    if best is None:
        return
    if best.stay_in_fp32:
        name = best.label if run is not None else "it"
        yield Fold(f"To use {name} nevertheless", code_blocks(result), detail="more")
    elif best.code:
        yield from code_blocks(result)


def code_blocks(result: ScanResult) -> list[Block]:
    """The recommended code, and what happened when it was executed."""
    best, trial = result.recommendation, result.code_trial
    if best is None:
        return []
    blocks: list[Block] = [CodeBlock(best.code)]
    if trial is None or trial.code != best.code:
        return blocks
    if trial.status == "ran":
        error = say("{error:error}", error=trial.rel_l2).text if trial.rel_l2 is not None else ""
        ran = Say(f"This code ran in a process of its own{fill(', error {}', error)}.")
        blocks.append(Fold("Whether the code runs", [ran], detail="more"))
    elif trial.status == "not run":
        blocks.append(Say(f"This code was not executed: {trial.reason}.", "warn", "note"))
    else:
        did = "fails" if trial.status == "failed" else "does otherwise"
        reason = trial.reason.rstrip(".")
        blocks.append(Say(f"This code {did} in a process of its own: {reason}.", "warn", "note"))
    return blocks


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
        f"{verdict}. {basis(said, ['first'])}".strip(),
    ]
    return "\n".join(visible(line, 400) for line in lines)


def html(result: ScanResult) -> str:
    """The first screen of the report, without scripts and styles of its own."""
    return fragment(scan_document(result))
