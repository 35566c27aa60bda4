"""JUnit XML: a test case per run and one for the verdict, for CI systems that show them."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from lowprec_check.analysis.conclusion import ScanFailure, failure
from lowprec_check.analysis.run_summary import fails_elsewhere, label
from lowprec_check.analysis.statements.kinds import statements
from lowprec_check.report.foreign_text import visible, without_folders
from lowprec_check.report.places import places, told
from lowprec_check.report.runs_table import shown_status
from lowprec_check.report.scan_document import machine, title
from lowprec_check.schema.scan_result import Diagnostic, Run, ScanResult
from lowprec_check.schema.statements import counted, fill

MOST_LINES = 200
"""Of one test case; viewers show all of them at once."""
VERDICT = "verdict"
"""The name of the test case that is about the scan as a whole."""


def junit(result: ScanResult) -> str:
    """The suite as a document."""
    why, texts = failure(result), told(result)
    said = (each for each in statements(result) if each.kind == "failure")
    failures = {name: each.text_of(name) for each in said for name in each.runs}
    root = Element("testsuites", name="lowprec-check")
    suite = SubElement(root, "testsuite", name=visible(without_folders(result.target)))
    properties = {"verdict": texts["verdict"], "fail-on": why.fail_on, "model": title(result)}
    properties |= {"machine": machine(result), "tool": result.tool}
    if not result.is_forward:
        properties["training"] = texts["scope"]
    if "prediction" in texts:
        properties["prediction"] = texts["prediction"]
    element = SubElement(suite, "properties")
    for name, value in properties.items():
        SubElement(element, "property", name=name, value=visible(value, 1000))
    model = visible(result.model.name)
    for run in result.runs:
        name = visible(f"{label(run)} on {run.device}")
        case = SubElement(suite, "testcase", {"classname": model, "name": name} | _time([run], result))
        _add_outcome(case, run, result, why, visible(without_folders(failures.get(label(run), ""))))
    # the case of the scan: a failure without a passing run, an error if it ended early
    case = SubElement(suite, "testcase", classname=model, name=VERDICT)
    about_all = [d for d in result.diagnostics if not any(d.is_about(run) for run in result.runs)]
    found = [d for d in about_all if not d.accepted]
    counting = [d for d in why.findings if d in about_all]
    if why.ended_early:
        SubElement(case, "error", message="the scan ended early", type="incomplete")
    if why.no_pass or counting:
        text, what = f"{counted(len(counting), 'finding')} about the whole scan", "findings"
        if why.no_pass:
            text, what = visible(texts["verdict"]), "no-pass"
        SubElement(case, "failure", message=text, type=what).text = _lines(found, result) or text
    elif found:
        SubElement(case, "system-out").text = _lines(found, result)
    # CI systems read the totals from the attributes
    suite.set("tests", str(len(suite.findall("testcase"))))
    for kind, name in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(name, str(len(suite.findall(f"testcase/{kind}"))))
    suite.attrib |= _time(result.runs, result)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _time(runs: Sequence[Run], result: ScanResult) -> dict[str, str]:
    """The attribute with the seconds of all ``runs``; a prediction has none."""
    if result.evidence == "predicted":
        return {}
    return {"time": f"{sum(run.latency_ms or 0.0 for run in runs) / 1000:.6f}"}


def _add_outcome(case: Element, run: Run, result: ScanResult, why: ScanFailure, status: str) -> None:
    """Fill the case of a run: it fails if the scan fails for its findings, or with all runs."""
    found = [d for d in result.diagnostics if d.is_about(run) and not d.accepted]
    counting = [d for d in why.findings if d.is_about(run)]
    failed = status and shown_status(run, result) not in ("skipped", "unjudged")
    if counting or (why.no_pass and failed):
        text = status or f"{counted(len(counting), 'finding')} at or over --fail-on {why.fail_on}"
        kind, what = "failure", str(run.status)
        if run.status in ("crashed", "timeout"):
            kind = "error"
        elif run.status == "ok":
            what = "input-dependent" if fails_elsewhere(run) else "findings"
        SubElement(case, kind, message=text, type=what).text = _lines(found, result) or text
        return
    # a failure that is known: skipped, as the scan as a whole does not fail for it
    if status:
        note = f"; the scan does not fail for it (--fail-on {why.fail_on})" if failed else ""
        SubElement(case, "skipped", message=f"{status}{note}", type=shown_status(run, result))
    if found:
        SubElement(case, "system-out").text = _lines(found, result)


def _lines(found: Sequence[Diagnostic], result: ScanResult) -> str:
    """``net.py:7: error LP101 missing-kernel: half: …``, one line per place and message."""
    lines = []
    for place in places(result, found):
        group = place.group
        basis = visible(fill(" (predicted from: {})", "; ".join(group.rests_on)), 400)
        for message in group.messages:
            head = visible(f"{place.line}: {message.severity} {group.code} {group.name}")
            lines.append(f"{head}: {place.sentence(message)}{basis}")
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"and {len(lines) - MOST_LINES:,} more"]
    return without_folders("\n".join(lines))
