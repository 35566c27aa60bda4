"""A line per finding: workflow commands, which GitHub shows at the line of the code, and text for problem matchers."""

from __future__ import annotations

from lowprec_check.report import summary
from lowprec_check.report.certainty import prediction_in_brief
from lowprec_check.report.escape import visible, workflow_command
from lowprec_check.report.paths import without_folders
from lowprec_check.report.places import Place, places
from lowprec_check.schema.scan_result import ScanResult

_COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}


def github(result: ScanResult) -> str:
    """``::error file=net.py,line=23,title=LP101 missing-kernel::half: …`` per finding, then the verdict."""
    lines = [_command(place) for place in places(result)]
    return "\n".join([*lines, _verdict(result)]) + "\n"


def _command(place: Place) -> str:
    title = visible(f"{place.first.code} {place.first.name}")
    command = _COMMANDS[place.first.severity]
    return workflow_command(
        command, _text(place), file=visible(place.line.file), line=str(place.line.number), title=title
    )


def concise(result: ScanResult) -> str:
    """``net.py:23: LP101 error half: …`` per finding, then the verdict."""
    lines = []
    for place in places(result):
        first = place.first
        lines.append(visible(f"{place.line}: {first.code} {first.severity} ") + _text(place))
    return "\n".join([*lines, _verdict(result)]) + "\n"


def _text(place: Place) -> str:
    """``half, bfloat16: message (in timm/x.py:7) → what to do``; the precisions are left out if it concerns the whole scan."""
    first = place.first
    message = visible(first.message) + place.where_text + (f" → {visible(first.help)}" if first.help else "")
    op = f"{visible(first.op)}: " if first.op else ""
    return without_folders(f"{', '.join(place.runs)}: {op}{message}" if place.runs else f"{op}{message}")


def _verdict(result: ScanResult) -> str:
    told = f"{summary.tally(result.diagnostics)}. {summary.verdict(result).rstrip('.')}."
    return f"{told} {prediction_in_brief(result)}".rstrip()
