"""Markdown for a pull request comment: the verdict and the runs visible, details folded, limited in length."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from tabulate import tabulate

from lowprec_check.analysis import findings
from lowprec_check.analysis.error_origin import origin
from lowprec_check.analysis.run_summary import counted, shorten
from lowprec_check.analysis.training_status import in_phase
from lowprec_check.report import error_budget, gradients, lost_updates, run_rows, summary, training
from lowprec_check.report.certainty import predicted_for, prediction_text
from lowprec_check.report.escape import LONGEST as LONGEST_NAME
from lowprec_check.report.escape import visible, visible_lines
from lowprec_check.report.layer_errors import TITLE as LAYERS
from lowprec_check.report.layer_errors import worst_layers
from lowprec_check.report.paths import without_folders
from lowprec_check.report.policies_table import policy_section
from lowprec_check.report.run_rows import RunRow
from lowprec_check.report.times_table import HEADS as TIMES_HEADS
from lowprec_check.report.times_table import HINT as TIMES_HINT
from lowprec_check.report.times_table import TITLE as TIMES
from lowprec_check.report.times_table import disturbances, times_rows
from lowprec_check.report.what_if_table import HEADS as WHAT_IF_HEADS
from lowprec_check.report.what_if_table import TITLE as WHAT_IF
from lowprec_check.report.what_if_table import what_if_hint, what_if_rows
from lowprec_check.schema.scan_result import Run, ScanResult

LONGEST = 60_000
"""Characters; GitHub rejects comments of more than 65,536."""

SHOWN_RUNS = 40
SHOWN_TABLES = 6
SHOWN_WAYS = 60
SHOWN_PARAMETERS = 8
_LONGEST_CODE = 12_000
_SIGNS = {"ok": "✅", "reference": "", "inaccurate": "⚠️", "unjudged": "❔", "skipped": "⏭️"}
_SEVERITY = {"error": "🔴", "warning": "🟡", "note": "🔵"}


def render(result: ScanResult, longest: int = LONGEST) -> str:
    """The report in at most ``longest`` characters; it states how many findings did not fit."""
    head = "\n\n".join(_head(result))
    tail = _environment(result)
    findings = _findings(result, longest - len(head) - len(tail) - 200)
    parts = [head, findings, tail]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(result: ScanResult) -> Iterator[str]:
    sign = (
        "✅" if summary.is_gain(result) else "➖" if summary.passes(result) else "❔" if result.recommendation else "❌"
    )
    how = "" if result.prediction is None else f" ({result.evidence})"
    yield f"### {sign} {escape(summary.verdict(result))}{how} · {code(result.model.name)}"
    yield f"{escape(summary.title(result))}  \n{escape(summary.machine(result))}  \n{escape(summary.scope(result))}"
    if result.prediction is not None:
        yield f"> {escape(prediction_text(result))}"
    for note in result.model.notes[:20]:
        yield f"> {escape(visible(note))}"
    if result.recommendation is not None:
        yield escape(summary.reason(result, 1500))
        yield fold("Code to paste", fence(result.recommendation.code))
    why = summary.kept(result)
    if why:
        more = [f"- and {len(why) - 40} more"] if len(why) > 40 else []
        yield fold("Why these modules stay in fp32", "\n".join([*(f"- {escape(line)}" for line in why[:40]), *more]))
    yield _runs(result)
    yield from map(escape, disturbances(result))
    yield from _training(result)
    times = [[*map(escape, row)] for row in times_rows(result)[:SHOWN_RUNS]]
    if times:
        yield fold(TIMES, f"{escape(TIMES_HINT)}\n\n{table(times, TIMES_HEADS, 'lrrrrr')}")
    sources = "\n\n".join(_sources(result))
    if sources:
        yield fold(error_budget.TITLE, sources)
    looks = [line for run in result.runs[:SHOWN_RUNS] for line in _first_look(run)]
    if looks:
        yield fold("Where to look first", "\n".join(looks))
    layers = [f"- {escape(line)}" for line in worst_layers(result)]
    if layers:
        yield fold(LAYERS, "\n".join(layers[:60]))
    predicted = [[*map(escape, row)] for row in what_if_rows(result)]
    if predicted:
        yield fold(WHAT_IF, f"{escape(what_if_hint(result))}\n\n{table(predicted, WHAT_IF_HEADS, 'llrl')}")
    policies = policy_section(result)
    if policies is not None:
        listed = table([[*map(escape, row)] for row in policies.rows], policies.heads, "lllrl")
        yield fold(policies.title, f"{escape(policies.hint)}\n\n{listed}")


def _runs(result: ScanResult) -> str:
    shown = run_rows.rows(result)[:SHOWN_RUNS]
    figures = run_rows.figures(result, shown)
    rows = [
        [
            escape(row.label),
            f"{_sign(row)} {escape(row.status)}".strip(),
            *(getattr(row, name) for name in figures),
            escape(shorten(row.why, 200)),
        ]
        for row in shown
    ]
    heads = [run_rows.names_head(shown), "status", *figures.values(), "why"]
    runs = table(rows, heads, f"ll{'r' * len(figures)}l")
    more = len(result.runs) - len(shown)
    return f"{runs}\n\n{counted(more, 'more run')} not shown." if more > 0 else runs


def _sign(row: RunRow) -> str:
    """A tick only for a run that passes and gains something."""
    return "➖" if row.status == "ok" and not row.gains else _SIGNS.get(row.status, "❌")


def _training(result: ScanResult) -> Iterator[str]:
    """The ways to train, gradients and updates, each folded."""
    ways = training.way_rows(result)
    if ways:
        rows = [_way_cells(row) for row in ways]
        hint = f"{training.HINT} {training.JUDGED}"
        notes = [f"- {escape(line)}" for line in training.epsilon_lines(result)]
        parts = [escape(hint), table(rows[:SHOWN_WAYS], training.HEADS, "lllrrrrrl"), "\n".join(notes)]
        yield fold(training.TITLE, "\n\n".join(filter(None, parts)))
    tables = gradients.gradient_tables(result)[:SHOWN_TABLES]
    if tables:
        scales = [f"- {escape(line)}" for line in gradients.scale_lines(result)]
        parts = [escape(gradients.HINT), "\n".join(scales), *(part for found in tables for part in _gradients(found))]
        yield fold(gradients.TITLE, "\n\n".join(filter(None, parts)))
    lost = [[*map(escape, row)] for row in lost_updates.lost_rows(result)[:SHOWN_WAYS]]
    if lost:
        yield fold(lost_updates.TITLE, f"{lost_updates.HINT}\n\n{table(lost, lost_updates.HEADS, 'llrrrrl')}")


def _way_cells(row: training.WayRow) -> list[str]:
    name = f"**{escape(row.way)}** (recommended)" if row.recommended else escape(row.way)
    status = f"{_SIGNS.get(row.status, '❌')} {escape(row.status)}".strip()
    return [escape(row.run), name, status, *map(escape, row[3:9])]


def _gradients(found: gradients.GradientTable) -> Iterator[str]:
    rows = [[code(row.parameter), *row[1:]] for row in found.rows[:SHOWN_PARAMETERS]]
    more = found.more + len(found.rows) - len(rows)
    yield f"**{escape(found.label)}**" + (f": {escape(found.text)}" if found.text else "")
    yield table(rows, gradients.HEADS, "lrrrrr") + (f"\n\n{counted(more, 'more parameter')} not shown." if more else "")


def _sources(result: ScanResult) -> Iterator[str]:
    """A table of shares for each run that fails or is recommended."""
    told = error_budget.told_runs(result)[:SHOWN_TABLES]
    for found in error_budget.tables(told):
        rows = [
            [
                code(bar.name) if bar.total else bar.name,
                bar.text,
                bar.total,
                code(bar.op) if bar.op else "",
                _line_of(bar),
            ]
            for bar in found.bars
        ]
        yield f"**{escape(found.label)}**: {escape(found.text)}"
        if rows:
            yield table(rows, ["module", "share", "sum", "largest op", "line"], "lrrll")


def _line_of(bar: error_budget.Bar) -> str:
    return code(bar.source) if bar.source else ""


def _first_look(run: Run) -> Iterator[str]:
    """A line with the op call to look at, if one stands out."""
    found = origin(run) if not run.is_reference else None
    if found is not None:
        source = f" at {code(found.op_call.source)}" if found.op_call.source else ""
        where = f"{code(found.op_call.op)} in {code(found.op_call.module or 'the model')}{source}"
        phase = in_phase(found.op_call.phase)
        yield f"- {escape(summary.label(run))}: {found.title}: {where}{phase}, {escape(found.sentence())}"


def _findings(result: ScanResult, room: int) -> str:
    found = findings.groups(result.diagnostics)
    tally = findings.tally(result.diagnostics)
    if not found:
        return tally[:1].upper() + tally[1:] + "." if result.diagnostics else "No findings."
    rows = [_row(item) for item in found if not item.harmless]
    harmless = _no_effect(found)
    kept = len(rows)
    text = _folded(tally, rows, kept, harmless)
    while len(text) > room and kept:
        kept = min(kept - 1, int(kept * room / len(text)))
        text = _folded(tally, rows, kept, harmless)
    return text


def _no_effect(groups: Sequence[findings.FindingGroup]) -> str:
    """Findings without an effect on the output, as one line."""
    found = findings.no_effect(groups)
    names = findings.folded(item for item in groups if item.harmless)
    return f"{found}: {escape(shorten(visible(names), 1000))}" if found else ""


def _folded(tally: str, rows: Sequence[list[str]], kept: int, harmless: str) -> str:
    """The first ``kept`` rows, and how many of them are not shown."""
    heads = ["", "finding", "precision", "op", "where", "what"]
    parts = [table(rows[:kept], heads, "llllll")] if kept else []
    if kept < len(rows):
        parts.append(
            f"*{len(rows) - kept} of {len(rows)} groups of findings are not shown; the most severe are above. "
            "The saved JSON has all.*"
        )
    return fold(tally, "\n\n".join([*parts, *filter(None, [harmless])]))


def _row(item: findings.FindingGroup) -> list[str]:
    basis = f" (predicted from: {escape(visible('; '.join(item.rests_on)))})" if item.rests_on else ""
    return [
        _SEVERITY[item.severity],
        escape(visible(f"{item.code} {item.name}")),
        escape(visible(", ".join(item.runs))),
        code(item.op) if item.op else "",
        escape(visible(item.where)) or "the model",
        escape(visible(" · ".join(shorten(text, 300) for text in item.what), 1200)) + basis,
    ]


def _environment(result: ScanResult) -> str:
    pairs = [
        (escape(visible(name, 80)), code(shorten(visible(str(value)), 200)))
        for name, value in (
            ("target", result.target),
            *predicted_for(result),
            *result.environment.items(),
            *result.options.items(),
        )
        if value not in (None, [], "")
    ]
    return fold("Environment", table([list(pair) for pair in pairs[:60]], ["", ""], "ll"))


# -- Markdown itself, without folders of this machine: it is published


def escape(text: str) -> str:
    """Text that Markdown shows literally; as code if GitHub would turn it into a mention, a reference or a link."""
    text = without_folders(text)
    if re.search(r"@\w|#\d|https?:", text):
        return code(text, len(text))
    return re.sub(r"([\\`*_\[\]<>#~&$])", r"\\\1", text)


def code(text: str, most: int = LONGEST_NAME) -> str:
    """A code span."""
    shown = visible(without_folders(text), most)
    ticks = "`" * (max((len(run) for run in re.findall("`+", shown)), default=0) + 1)
    space = " " if shown.startswith("`") or shown.endswith("`") or not shown.strip() else ""
    return f"{ticks}{space}{shown or ' '}{space}{ticks}"


def fence(text: str) -> str:
    """A block of Python, truncated if it is very long."""
    shown = "\n".join(visible_lines(without_folders(text), 2000))
    if len(shown) > _LONGEST_CODE:
        shown = shown[:_LONGEST_CODE].rpartition("\n")[0] + "\n# … truncated: the saved JSON has the full code"
    ticks = "`" * max(3, max((len(run) for run in re.findall("`+", shown)), default=0) + 1)
    return f"{ticks}python\n{shown}\n{ticks}"


def fold(title: str, body: str) -> str:
    """Details that a click opens."""
    shown = title.replace("&", "&amp;").replace("<", "&lt;")
    return f"<details><summary>{shown}</summary>\n\n{body}\n\n</details>"


def table(rows: Sequence[Sequence[str]], headers: Sequence[str], align: str) -> str:
    """A pipe table; ``align`` has an ``l`` or ``r`` for each column."""
    names = {"l": "left", "r": "right"}
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return tabulate(
        cells, headers, tablefmt="pipe", colalign=[names[a] for a in align] if rows else None, disable_numparse=True
    )


def fitting(sizes: Iterable[int], room: int, *, between: int = 0) -> int:
    """How many of the first items fit into ``room``, with separators of size ``between``."""
    kept = total = 0
    for size in sizes:
        if total + size > room:
            break
        kept, total = kept + 1, total + size + between
    return kept
