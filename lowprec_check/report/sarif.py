"""SARIF 2.1.0 (OASIS standard): findings at the user's file and line, for code scanning."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

from lowprec_check.analysis.baseline import without_numbers
from lowprec_check.analysis.rules.registry import rules
from lowprec_check.errors import encodable
from lowprec_check.report.foreign_text import visible, without_folders
from lowprec_check.report.places import FileLine, Place, places, told
from lowprec_check.report.scan_document import machine, title
from lowprec_check.schema.scan_result import Diagnostic, ScanResult
from lowprec_check.schema.statements import counted, some

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
MOST_RESULTS = 5000
"""GitHub code scanning shows at most this many per run; the most severe come first."""
LONGEST_DESCRIPTION = 1024
"""Characters of a rule's description in code scanning."""
MOST_RELATED = 20
"""Lines in installed packages, and modules, that are listed for one result."""

FINGERPRINT = "lowprecCheck/v2"
OWN, PACKAGES = "%SRCROOT%", "%PACKAGES%"
_BASES = {
    OWN: {"description": {"text": "The folder in which lowprec-check ran."}},
    PACKAGES: {"description": {"text": "The folder of the installed packages."}},
}
_BY_NAME = (
    "at a line of an installed package, since the model was scanned by its name. Scan a file that makes the model."
)


def sarif(result: ScanResult) -> str:
    """The findings as JSON."""
    merged, said = places(result)[:MOST_RESULTS], told(result)
    codes = sorted({place.group.code for place in merged})
    foreign = sum(not place.is_own for place in merged)
    tool, _, version = visible(result.tool).rpartition(" ")
    home = _home_page()
    driver: dict[str, Any] = {"name": tool or version}
    if tool and version:
        driver["version"] = version
    if home:
        driver["informationUri"] = home
    driver["rules"] = []
    for code in codes:
        example = next(place.group for place in merged if place.group.code == code)
        rule, name = rules().get(code), visible(example.name)
        # a saved result may have findings of rules that this version lacks
        summary_text = manual = name or "Finding"
        severity = example.severity
        if rule:
            summary_text, manual, severity = rule.summary, rule.manual, rule.severity
        description = manual
        if len(manual) > LONGEST_DESCRIPTION:  # its first paragraphs
            first = manual[: LONGEST_DESCRIPTION + 1].rpartition("\n\n")[0]
            description = first or f"{manual[: LONGEST_DESCRIPTION - 1]}…"
        entry = {
            "id": visible(code),
            "name": "".join(part.capitalize() for part in re.findall(r"\w+", name)) or "Finding",
            "shortDescription": {"text": summary_text},
            "fullDescription": {"text": description},
            "help": {"text": manual, "markdown": manual},
            "defaultConfiguration": {"level": severity},
            "properties": {"tags": ["low-precision", "pytorch"]},
        }
        driver["rules"].append(entry)
    said_of = {"verdict": said["verdict"], "model": title(result), "machine": machine(result)}
    properties = {name: visible(text) for name, text in said_of.items()}
    if "prediction" in said:
        properties["prediction"] = visible(said["prediction"], 1000)
    run: dict[str, Any] = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "originalUriBaseIds": _BASES,
        "results": [_result(*pair, codes, result) for pair in zip(merged, fingerprints(merged), strict=True)],
        "properties": properties,
    }
    # results outside the repository: code scanning cannot show their lines
    if foreign:
        note = {"level": "warning", "message": {"text": f"{counted(foreign, 'result')} {_BY_NAME}"}}
        run["invocations"] = [{"executionSuccessful": True, "toolExecutionNotifications": [note]}]
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=2, ensure_ascii=False) + "\n"


@functools.cache
def _home_page() -> str | None:
    """The first project URL in the metadata of this package; ``None`` if it has none."""
    try:
        found = importlib.metadata.metadata("lowprec-check").get_all("Project-URL") or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    urls = (entry.rpartition(",")[2].strip() for entry in found)
    return next((url for url in urls if url.startswith("https://")), None)


def _result(place: Place, identity: str, codes: list[str], result: ScanResult) -> dict[str, Any]:
    group, rests_on = place.group, visible(without_folders("; ".join(place.group.rests_on)), 1000)
    sentences = (place.sentence(message, ". What to do: ") for message in group.messages)
    message = "\n".join(f"{sentence.rstrip('.')}." for sentence in sentences)
    if rests_on:
        message = f"{message} Predicted from: {rests_on}."
    related = []
    for number, (line, found) in enumerate(list(place.inside.items())[:MOST_RELATED], start=1):
        modules = list(dict.fromkeys(visible(d.module) for d in found if d.module))
        what = " in ".join(filter(None, (visible(found[0].op or ""), some(modules, 1)))) or "the call"
        related.append(_location(line, found, result, PACKAGES) | {"id": number, "message": {"text": what}})
    entry: dict[str, Any] = {
        "ruleId": visible(group.code),
        "ruleIndex": codes.index(group.code),
        "level": group.severity,
        "message": {"text": without_folders(message)},
        "locations": [_location(place.line, place.found, result, OWN if place.is_own else PACKAGES)],
    }
    # what is empty is left out
    if related:
        entry["relatedLocations"] = related
    # the changes of the patch that are for this finding, each with the lines that it replaces
    for change in result.fixing.changes if result.fixing is not None else ():
        inside = change.line <= place.line.number <= change.end_line
        if change.file != place.line.file or not inside or group.code not in change.codes:
            continue
        # up to the start of the next line; an insertion replaces nothing
        region = {"startLine": change.line, "startColumn": 1, "endLine": change.line, "endColumn": 1}
        if change.before:
            region["endLine"] = change.end_line + 1
        replacement = {"deletedRegion": region, "insertedContent": {"text": change.after}}
        artifact = _location(place.line, (), result, OWN)["physicalLocation"]["artifactLocation"]
        changed = [{"artifactLocation": artifact, "replacements": [replacement]}]
        fix = {"description": {"text": visible(change.why)}, "artifactChanges": changed}
        entry.setdefault("fixes", []).append(fix)
    entry["partialFingerprints"] = {FINGERPRINT: identity}
    entry["properties"] = {"precisions": list(map(visible, group.runs)), "calls": group.calls}
    if rests_on:
        entry["properties"]["predictedFrom"] = rests_on
    return entry


def _location(line: FileLine, found: Sequence[Diagnostic], result: ScanResult, base: str) -> dict[str, Any]:
    path = line.file.replace("\\", "/")
    if re.match(r"[A-Za-z]:/", path):
        path = f"/{path}"
    uri = quote(encodable(path), safe="/") or "model"
    # a path is absolute, or relative to one of the folders in originalUriBaseIds
    artifact = {"uri": uri, "uriBaseId": base}
    if path.startswith("/"):
        artifact = {"uri": f"file://{uri}"}
    names = (visible(d.module) or visible(result.model.name) or "model" for d in found if d.module is not None)
    logical = [{"fullyQualifiedName": name, "kind": "module"} for name in dict.fromkeys(names)]
    location: dict[str, Any] = {
        "physicalLocation": {"artifactLocation": artifact, "region": {"startLine": line.number}}
    }
    if logical:
        location["logicalLocations"] = logical[:MOST_RELATED]
    return location


_DTYPES = re.compile(r"\b(?:torch\.)?(?:b?float\d+\w*|half|c?double|Complex\w+|BFloat16|Half|Float)\b")
"""Those that an exception may name: it is the same one in another precision."""


def fingerprints(merged: Sequence[Place]) -> Iterator[str]:
    """16 hex digits for each place, all different, that lines moving up or down and other figures
    do not change.

    They are of the code, the file, and the op, or else the message; then of the position among
    those that are the same in all of these, counted by line. A place that several runs show keeps
    its fingerprint when one of them is fixed.
    """
    alike: dict[str, list[int]] = {}
    keys = []
    for group, file in ((place.group, place.line.file.replace("\\", "/")) for place in merged):
        words = _DTYPES.sub("dtype", without_numbers(group.messages[0].found[0].message))
        keys.append("\x1f".join((group.code, file, group.op or words)))
    for index in sorted(range(len(merged)), key=lambda index: merged[index].line.number):
        alike.setdefault(keys[index], []).append(index)
    for index, key in enumerate(keys):
        text = f"{key}\x1f{alike[key].index(index)}"
        yield hashlib.sha256(encodable(text).encode()).hexdigest()[:16]
