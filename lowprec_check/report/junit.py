"""JUnit XML: one test case per run, for CI systems that show test results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from lowprec_check.analysis.run_summary import explain_status
from lowprec_check.report import run_rows, summary
from lowprec_check.report.certainty import prediction_text
from lowprec_check.report.escape import visible
from lowprec_check.schema.scan_result import Diagnostic, Run, ScanResult

_FAILURE = ("inaccurate", "nonfinite", "error")
_ERROR = ("crashed", "timeout")
_SKIPPED = ("skipped", "unjudged")
MOST_LINES = 200


def render(result: ScanResult) -> str:
    """A document with one suite, the target. A crash or timeout is an error; any other failed run, a failure."""
    root = Element("testsuites", name="lowprec-check")
    suite = SubElement(root, "testsuite", name=visible(result.target), **_counts(result))
    properties = SubElement(suite, "properties")
    for name, value in (
        ("verdict", summary.verdict(result)),
        ("model", summary.title(result)),
        ("machine", summary.machine(result)),
        ("tool", visible(result.tool)),
        *([("training", summary.scope(result))] if result.training else []),
        *([("prediction", prediction_text(result))] if result.prediction else []),
    ):
        SubElement(properties, "property", name=name, value=value)
    for row in run_rows.rows(result):
        name = f"{row.label} on {visible(row.run.device)}"
        attributes = {"classname": visible(result.model.name), "name": name} | _time([row.run], result)
        case = SubElement(suite, "testcase", attributes)
        _outcome(case, row.run, result)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _counts(result: ScanResult) -> dict[str, Any]:
    statuses = [run.status for run in result.runs]
    return {
        "tests": str(len(statuses)),
        "failures": str(sum(status in _FAILURE for status in statuses)),
        "errors": str(sum(status in _ERROR for status in statuses)),
        "skipped": str(sum(status in _SKIPPED for status in statuses)),
        **_time(result.runs, result),
    }


def _time(runs: Sequence[Run], result: ScanResult) -> dict[str, str]:
    """The attribute with the seconds of all ``runs``; a prediction has none."""
    if result.prediction is not None:
        return {}
    return {"time": f"{sum(run.latency_ms or 0.0 for run in runs) / 1000:.6f}"}


def _outcome(case: Element, run: Run, result: ScanResult) -> None:
    why = visible(explain_status(run)) if run.status != "ok" else ""
    found = [d for d in result.diagnostics if d.is_about(run) and not d.accepted]
    lines = [_line(diagnostic) for diagnostic in found[:MOST_LINES]]
    lines += [f"and {len(found) - MOST_LINES} more"] if len(found) > MOST_LINES else []
    if run.status in _SKIPPED:
        SubElement(case, "skipped", message=why)
    elif run.status in (*_FAILURE, *_ERROR):
        kind = "failure" if run.status in _FAILURE else "error"
        SubElement(case, kind, message=why, type=run.status).text = "\n".join(lines) or why
    elif lines:
        SubElement(case, "system-out").text = "\n".join(lines)


def _line(diagnostic: Diagnostic) -> str:
    parts = (diagnostic.severity, diagnostic.code, diagnostic.name, diagnostic.source, diagnostic.module, diagnostic.op)
    where = " ".join(part for part in parts if part)
    basis = f" (predicted from: {diagnostic.rests_on})" if diagnostic.rests_on else ""
    return visible(f"{where}: {diagnostic.message}{basis}", 800)
