"""The report of a scan as one HTML file, which opens offline; usable with mouse, keyboard, screen reader and on paper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from lowprec_check.analysis.error_shares import trusted_budget
from lowprec_check.report import summary, what_if_table
from lowprec_check.report.certainty import predicted_for, prediction_text
from lowprec_check.report.confidence import confidence
from lowprec_check.report.escape import visible
from lowprec_check.report.html import bokeh_files as bokeh
from lowprec_check.report.html import causes, charts, module_tree, training
from lowprec_check.report.html.findings import findings_section
from lowprec_check.report.html.page import render_page, static
from lowprec_check.report.html.runs_table import runs_section
from lowprec_check.report.html.tradeoff import tradeoff
from lowprec_check.report.lights import lights
from lowprec_check.report.policies_table import policy_section
from lowprec_check.report.what_if_table import what_if_rows
from lowprec_check.schema.run_key import Phase
from lowprec_check.schema.scan_result import Run, ScanResult


def render(result: ScanResult) -> str:
    """Render the page; raises :class:`UsageError` if Bokeh is not installed."""
    drawn = [run for run in result.runs if not run.is_reference and len(run.op_calls)]
    values = {
        **_head(result),
        **_advice(result),
        **runs_section(result),
        **_sections(result),
        **_op_by_op(drawn),
        **findings_section(result),
        "environment": list(_environment(result)),
        "calls": charts.pack(drawn) if drawn else "",
        "trajectories": training.pack(result),
    }
    return render_page("report.html.j2", list(_scripts(values)), **values)


def _head(result: ScanResult) -> dict[str, Any]:
    return {
        "tool": visible(result.tool),
        "title": summary.title(result),
        "target": visible(result.target),
        "machine": summary.machine(result),
        "scope": summary.scope(result),
        "prediction": prediction_text(result),
        "notes": [visible(note) for note in result.model.notes],
    }


def _advice(result: ScanResult) -> dict[str, Any]:
    """The verdict with its lights, and the code."""
    kind = "good" if summary.is_gain(result) else "bad" if result.recommendation is None else "neutral"
    return {
        "verdict": summary.verdict_with_gain(result),
        "lights": lights(result),
        "verdict_kind": kind,
        "advice": result.recommendation is not None,
        "reason": summary.reason(result, 2000),
        "code": summary.code_lines(result),
        "kept": summary.kept(result),
        "failures": summary.failures(result),
    }


def _sections(result: ScanResult) -> dict[str, Any]:
    """The parts between the runs and their op calls."""
    found = causes.run_causes(result)
    return {
        "tradeoff": tradeoff(result),
        "causes_title": causes.title(found),
        "causes": found,
        "trained": training.section(result),
        "what_if": what_if_rows(result),
        "what_if_title": what_if_table.TITLE,
        "what_if_hint": what_if_table.what_if_hint(result),
        "what_if_heads": what_if_table.HEADS,
        "policies": policy_section(result),
        "confidence": confidence(result),
    }


def _op_by_op(drawn: Sequence[Run]) -> dict[str, Any]:
    """The charts and the tree of the runs that were analyzed op by op."""
    modules = module_tree.build(drawn)
    return {
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
    }


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
        names += ["strip.js", "ribbon.js", "error_chart.js", "ops.js", "tree.js", "report.js"]
    if values["trajectories"]:
        names.append("training.js")
    yield "".join(map(static, names))


def _first_shown(runs: Sequence[Run]) -> int:
    """The run that the charts show first: one with wrong numbers, else one that fails, else the first."""
    wrong = ("nonfinite", "inaccurate", "error", "crashed", "timeout")
    order = {status: index for index, status in enumerate(wrong)}
    return min(range(len(runs)), key=lambda i: (order.get(runs[i].status, len(order)), i), default=0)


def _environment(result: ScanResult) -> Iterator[tuple[str, str]]:
    yield "target", visible(result.target)
    for name, value in (*predicted_for(result), *result.environment.items(), *result.options.items()):
        shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        yield visible(name.replace("_", " ")), visible(shown if value not in (None, [], "") else "–")
