"""The report of a scan as one HTML file, which opens offline; usable with mouse, keyboard, screen reader and on paper."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_args

from lowprec_check.analysis.error_shares import trusted_budget
from lowprec_check.analysis.run_summary import memory_ratio
from lowprec_check.analysis.speed import speed
from lowprec_check.analysis.training_status import first_way
from lowprec_check.report import run_rows, summary, times_table, what_if_table
from lowprec_check.report.certainty import predicted_for, prediction_text
from lowprec_check.report.escape import visible
from lowprec_check.report.html import bokeh_files as bokeh
from lowprec_check.report.html import causes, charts, module_tree, training
from lowprec_check.report.html.page import render_page, static
from lowprec_check.report.html.tradeoff import tradeoff
from lowprec_check.report.layer_errors import TITLE as LAYERS
from lowprec_check.report.layer_errors import worst_layers
from lowprec_check.report.lights import lights
from lowprec_check.report.policies_table import policy_section
from lowprec_check.report.run_rows import RunRow
from lowprec_check.report.summary import Group
from lowprec_check.report.times_table import times_rows
from lowprec_check.report.what_if_table import what_if_rows
from lowprec_check.schema.run_key import Phase
from lowprec_check.schema.scan_result import Run, ScanResult

MATTERS = 0.5
"""A share of lost updates from which its bar has the colour of a warning."""
MOST_PLACES = 100
MOST_GROUPS = 500
"""Groups of findings shown; more would make the file too large."""


def render(result: ScanResult) -> str:
    """Render the page; raises :class:`UsageError` if Bokeh is not installed."""
    drawn = [run for run in result.runs if not run.is_reference and len(run.op_calls)]
    advice, shown = result.recommendation, run_rows.rows(result)
    modules = module_tree.build(drawn)
    groups, found = summary.group(result.diagnostics), causes.run_causes(result)
    values: dict[str, Any] = {
        "tool": visible(result.tool),
        "title": summary.title(result),
        "target": visible(result.target),
        "machine": summary.machine(result),
        "scope": summary.scope(result),
        "prediction": prediction_text(result),
        "names_head": run_rows.names_head(shown),
        "figures": run_rows.figures(result, shown),
        "trained": training.section(result),
        "notes": [visible(note) for note in result.model.notes],
        "verdict": summary.verdict_with_gain(result),
        "lights": lights(result),
        "verdict_kind": "good" if summary.is_gain(result) else "neutral" if advice else "bad",
        "advice": advice is not None,
        "reason": summary.reason(result, 2000),
        "code": summary.code_lines(result),
        "kept": summary.kept(result),
        "failures": summary.failures(result),
        "runs": list(_runs(result, shown)),
        "times": times_rows(result),
        "times_title": times_table.TITLE,
        "times_hint": times_table.HINT,
        "times_heads": times_table.HEADS,
        "disturbed": times_table.disturbances(result),
        "layers_title": LAYERS,
        "layers": list(worst_layers(result)),
        "what_if": what_if_rows(result),
        "what_if_title": what_if_table.TITLE,
        "what_if_hint": what_if_table.what_if_hint(result),
        "what_if_heads": what_if_table.HEADS,
        "policies": policy_section(result),
        "charts": [
            {"label": summary.label(run), "status": run.status, "tolerance": module_tree.tolerance_text(run)}
            for run in drawn
        ],
        "first": _first_shown(drawn),
        "phases": [phase for phase in get_args(Phase) if any(phase in run.op_calls.phase for run in drawn)],
        "nodes": modules.nodes,
        "left_out": modules.left_out,
        "legends": {"error": module_tree.ERRORS, "t": module_tree.TIMES, "s": module_tree.PARTS},
        "has_shares": any(trusted_budget(run) for run in drawn),
        "tradeoff": tradeoff(result),
        "causes_title": causes.title(found),
        "causes": found,
        "no_effect": summary.no_effect(groups),
        "findings": [_finding(item) for item in groups[:MOST_GROUPS]],
        "groups": len(groups),
        "groups_left_out": max(0, len(groups) - MOST_GROUPS),
        "tally": summary.tally(result.diagnostics),
        "environment": list(_environment(result)),
    }
    values["calls"], values["trajectories"] = charts.pack(drawn) if drawn else "", training.pack(result)
    return render_page("report.html.j2", list(_scripts(values)), **values)


def _scripts(values: dict[str, Any]) -> Iterator[str]:
    """Those of the charts, if there are any, and the page's own as one."""
    has_charts = values["calls"] or values["trajectories"] or values["tradeoff"]
    names = ["theme.js", "data.js", "copy.js", "findings.js"]
    if has_charts:
        yield from bokeh.scripts()
        names.append("charts.js")
    if values["tradeoff"]:
        names.append("tradeoff.js")
    if values["calls"]:
        names += ["strip.js", "error_chart.js", "ribbon.js", "tree.js", "report.js"]
    if values["trajectories"]:
        names.append("training.js")
    yield "".join(map(static, names))


def _first_shown(runs: list[Run]) -> int:
    """The run that the charts show first: one with wrong numbers, else one that fails, else the first."""
    wrong = ("nonfinite", "inaccurate", "error", "crashed", "timeout")
    order = {status: index for index, status in enumerate(wrong)}
    return min(range(len(runs)), key=lambda i: (order.get(runs[i].status, len(order)), i), default=0)


# -- the table of runs

_KIND = {"ok": "ok", "reference": "none", "skipped": "none", "inaccurate": "warn", "unjudged": "warn"}


def _widest(result: ScanResult) -> float:
    """The ratio at the full width of a bar: slightly above the largest, at most 3."""
    pairs = [(speed(run, result.runs).time, memory_ratio(run, result.runs)) for run in result.runs]
    ratios = [ratio for pair in pairs for ratio in pair]
    return min(3.0, max([1.25, *(1.1 * ratio for ratio in ratios if ratio)]))


def _runs(result: ScanResult, shown: Sequence[RunRow]) -> Iterator[dict[str, Any]]:
    widest = _widest(result)
    for row in shown:
        time, memory = speed(row.run, result.runs).time, memory_ratio(row.run, result.runs)
        tag = summary.tag(row.run, result)
        tick = 100 / widest
        yield {
            **row._asdict(),
            "bars": {
                "error": _error_bar(row),
                "gradient": _gradient_bar(row),
                "lost": _lost_bar(row),
                "time": FigureBar(_width(time, widest), row.time, _ratio_kind(time, worse=1.05, better=0.95), tick),
                "memory": FigureBar(
                    _width(memory, widest), row.memory, _ratio_kind(memory, worse=1.05, better=0.95), tick
                ),
            },
            "kind": "none" if row.status == "ok" and not row.gains else _KIND.get(row.status, "bad"),
            "recommended": tag == "recommended",
            "tag": tag,
        }


class FigureBar(NamedTuple):
    """A figure and its bar: the arguments of the template's macro."""

    width: float
    """Per cent."""
    text: str
    kind: str
    tick: float | None = None


def _width(ratio: float | None, widest: float) -> float:
    return min(100.0, 100 * (ratio or 0) / widest)


def _error_bar(row: RunRow) -> FigureBar:
    error = row.run.output_error.distance if row.run.output_error else None
    if error is None:
        infinite = row.run.status == "nonfinite" or row.error == "∞"
        return FigureBar(100.0 if infinite else 0.0, row.error, "bad" if infinite else "none")
    tolerance = row.run.tolerance
    over = tolerance is not None and error > tolerance
    return FigureBar(_decades(error), row.error, "bad" if over else "good", _decades(tolerance) if tolerance else None)


def _gradient_bar(row: RunRow) -> FigureBar:
    """Without a verdict: how far gradients may be off is judged by the run of all steps."""
    error = row.run.training.gradient_error if row.run.training is not None else None
    if row.gradient == "–" or error is None:
        return FigureBar(0.0 if row.gradient == "–" else 100.0, row.gradient, "none" if row.gradient == "–" else "bad")
    return FigureBar(_decades(error), row.gradient, "")


def _lost_bar(row: RunRow) -> FigureBar:
    way = first_way(row.run)
    lost = way.lost_updates if way is not None else None
    return FigureBar(100 * (lost or 0.0), row.lost, "none" if lost is None else "warn" if lost >= MATTERS else "")


def _decades(value: float) -> float:
    """Position on a log scale from 1e-6 to 1, in per cent."""
    return 100 * min(1.0, max(0.0, (math.log10(value) + 6) / 6)) if value > 0 else 0.0


def _ratio_kind(ratio: float | None, *, worse: float, better: float) -> str:
    if ratio is None:
        return "none"
    return "warn" if ratio > worse else "good" if ratio < better else ""


# -- findings and environment


def _finding(item: Group) -> dict[str, Any]:
    first = item.first
    places = [(module or "the model", source) for module, source in item.places]
    return {
        "severity": first.severity,
        "harmless": summary.is_harmless(first),
        "code": first.code,
        "name": first.name,
        "op": first.op,
        "runs": ", ".join(item.runs),
        "message": first.message,
        "help": first.help,
        "rests_on": first.rests_on,
        "url": first.url if first.url and first.url.startswith("https://") else None,
        "places": places[:MOST_PLACES],
        "more": max(0, len(places) - MOST_PLACES),
    }


def _environment(result: ScanResult) -> Iterator[tuple[str, str]]:
    yield "target", visible(result.target)
    for name, value in (*predicted_for(result), *result.environment.items(), *result.options.items()):
        shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        yield visible(name.replace("_", " ")), visible(shown if value not in (None, [], "") else "–")
