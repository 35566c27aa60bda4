"""SARIF 2.1.0 (OASIS standard): findings at the user's file and line, for code scanning."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import quote

from lowprec_check.analysis.baseline import fingerprint
from lowprec_check.analysis.rules.registry import rules
from lowprec_check.errors import encodable
from lowprec_check.report import summary
from lowprec_check.report.certainty import prediction_text
from lowprec_check.report.escape import visible
from lowprec_check.report.places import Place, places
from lowprec_check.schema.scan_result import ScanResult

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
MOST_RESULTS = 5000
"""GitHub code scanning shows at most this many per run; the most severe come first."""


def render(result: ScanResult) -> str:
    """One SARIF run, with one result per finding and place, even if several precisions show it."""
    merged = places(result)
    codes = sorted({place.first.code for place in merged})
    tool, _, version = visible(result.tool).rpartition(" ")
    driver: dict[str, Any] = {
        "name": tool or version,
        "rules": [_rule(code, merged) for code in codes],
    }
    if tool and version:
        driver["version"] = version
    run: dict[str, Any] = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "originalUriBaseIds": {"%SRCROOT%": {"description": {"text": "The folder in which lowprec-check ran."}}},
        "results": [_result(place, codes, result) for place in merged[:MOST_RESULTS]],
        "properties": {
            "verdict": summary.verdict(result),
            "model": summary.title(result),
            "machine": summary.machine(result),
            **({"prediction": prediction_text(result)} if result.prediction else {}),
        },
    }
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=2, ensure_ascii=False) + "\n"


def _rule(code: str, merged: list[Place]) -> dict[str, Any]:
    rule = rules().get(code)
    example = next(place.first for place in merged if place.first.code == code)
    described: dict[str, Any] = {
        "id": visible(code),
        "name": "".join(part.capitalize() for part in re.findall(r"\w+", visible(example.name))) or "Finding",
        "defaultConfiguration": {"level": rule.severity if rule else example.severity},
        "properties": {"tags": ["low-precision", "pytorch"]},
    }
    if rule is not None:
        described |= {
            "shortDescription": {"text": rule.summary},
            "fullDescription": {"text": rule.manual},
            "help": {"text": rule.manual, "markdown": rule.manual},
        }
    return described


def _result(place: Place, codes: list[str], result: ScanResult) -> dict[str, Any]:
    first, runs = place.first, place.runs
    message = visible(first.message, 1000)
    if first.help:
        message = f"{message.rstrip('.')}. What to do: {visible(first.help, 1000)}."
    if first.rests_on:
        message = f"{message.rstrip('.')}. Predicted from: {visible(first.rests_on, 1000)}."
    where = f"{', '.join(runs)}: " if runs else ""
    op = f"{visible(first.op)}: " if first.op else ""
    described: dict[str, Any] = {
        "ruleId": visible(first.code),
        "ruleIndex": codes.index(first.code),
        "level": first.severity,
        "message": {"text": f"{where}{op}{message}"},
        "locations": [_location(place, result)],
        "partialFingerprints": {"lowprecCheck/v1": fingerprint(first)},
        "properties": {
            "precisions": runs,
            "calls": sum(d.calls for d in place.found),
            **({"predictedFrom": visible(first.rests_on, 1000)} if first.rests_on else {}),
        },
    }
    if all(d.accepted for d in place.found):
        described["suppressions"] = [{"kind": "external", "justification": "in the baseline"}]
    return described


def _location(place: Place, result: ScanResult) -> dict[str, Any]:
    location: dict[str, Any] = {
        "physicalLocation": {
            "artifactLocation": _artifact(place.file),
            "region": {"startLine": place.line},
        }
    }
    if place.first.module is not None:
        name = visible(place.first.module) or visible(result.model.name) or "model"
        location["logicalLocations"] = [{"fullyQualifiedName": name, "kind": "module"}]
    return location


def _artifact(file: str) -> dict[str, str]:
    """A URI relative to where the scan ran, or an absolute one."""
    path = file.replace("\\", "/")
    if re.match(r"[A-Za-z]:/", path):
        path = f"/{path}"
    uri = quote(encodable(path), safe="/") or "model"
    return {"uri": f"file://{uri}"} if path.startswith("/") else {"uri": uri, "uriBaseId": "%SRCROOT%"}
