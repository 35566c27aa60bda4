"""A line per finding: workflow commands, which GitHub shows at the line of the code, and text for problem matchers."""

from __future__ import annotations

from lowprec_check.report import summary
from lowprec_check.report.certainty import prediction_in_brief
from lowprec_check.report.escape import visible, workflow_command
from lowprec_check.report.places import Place, places
from lowprec_check.schema.scan_result import ScanResult

_COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}


def github(result: ScanResult) -> str:
    """``::error file=net.py,line=23,title=LP101 missing-kernel::half: …`` per finding, then the verdict."""
    lines = [_command(place) for place in _reported(result)]
    return "\n".join([*lines, _verdict(result)]) + "\n"


def _command(place: Place) -> str:
    title = visible(f"{place.first.code} {place.first.name}")
    command = _COMMANDS[place.first.severity]
    return workflow_command(command, _text(place), file=visible(place.file), line=str(place.line), title=title)


def concise(result: ScanResult) -> str:
    """``net.py:23: LP101 error half: …`` per finding, then the verdict."""
    lines = []
    for place in _reported(result):
        first = place.first
        lines.append(visible(f"{place.file}:{place.line}: {first.code} {first.severity} ") + _text(place))
    return "\n".join([*lines, _verdict(result)]) + "\n"


def _reported(result: ScanResult) -> list[Place]:
    """The places of findings that the baseline does not accept."""
    kept = [place._replace(found=[d for d in place.found if not d.accepted]) for place in places(result)]
    return [place for place in kept if place.found]


def _text(place: Place) -> str:
    """``half, bfloat16: message → what to do``; the precisions are left out if it concerns the whole scan."""
    first = place.first
    message = visible(first.message) + (f" → {visible(first.help)}" if first.help else "")
    op = f"{visible(first.op)}: " if first.op else ""
    return f"{', '.join(place.runs)}: {op}{message}" if place.runs else f"{op}{message}"


def _verdict(result: ScanResult) -> str:
    told = f"{summary.tally(result.diagnostics)}. {summary.verdict(result).rstrip('.')}."
    return f"{told} {prediction_in_brief(result)}".rstrip()
