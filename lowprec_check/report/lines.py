"""A line per finding: workflow commands, which GitHub shows at the line of the code, and text for problem matchers."""

from __future__ import annotations

from lowprec_check.analysis.findings import SEVERITIES, Message, tally
from lowprec_check.analysis.statements.advice import verdict
from lowprec_check.analysis.statements.kinds import said
from lowprec_check.report.escape import visible, workflow_command
from lowprec_check.report.paths import without_folders
from lowprec_check.report.places import Place, places
from lowprec_check.schema.scan_result import ScanResult

_COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}


def github(result: ScanResult) -> str:
    """``::error file=net.py,line=23,title=LP101 missing-kernel::half: …`` for each place and message, then the verdict."""
    lines = [
        workflow_command(
            _COMMANDS[message.severity],
            without_folders(place.sentence(message)),
            file=visible(place.line.file),
            line=str(place.line.number),
            title=visible(f"{place.group.code} {place.group.name}"),
        )
        for place, message in _messages(result)
    ]
    return "\n".join([*lines, _verdict(result)]) + "\n"


def concise(result: ScanResult) -> str:
    """``net.py:23: LP101 error half: …`` for each place and message, then the verdict."""
    lines = [
        visible(f"{place.line}: {place.group.code} {message.severity} ") + without_folders(place.sentence(message))
        for place, message in _messages(result)
    ]
    return "\n".join([*lines, _verdict(result)]) + "\n"


def _messages(result: ScanResult) -> list[tuple[Place, Message]]:
    """The most severe first."""
    found = [(place, message) for place in places(result) for message in place.group.messages]
    return sorted(found, key=lambda its: SEVERITIES.index(its[1].severity))


def _verdict(result: ScanResult) -> str:
    prediction = said(result, "prediction")
    return visible(f"{tally(result.diagnostics)}. {verdict(result)}.{f' {prediction}.' if prediction else ''}", 1000)
