"""Findings by place, as lines, for formats that point at the user's files; without folders of this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import NamedTuple

from lowprec_check.analysis.findings import SEVERITIES, FindingGroup, Message, group_of, rank, tally
from lowprec_check.analysis.statements.advice import verdict
from lowprec_check.analysis.statements.kinds import said
from lowprec_check.report.blocks import visible, workflow_command
from lowprec_check.schema.scan_result import Diagnostic, ScanResult
from lowprec_check.schema.statements import counted

# -- Leaves folders of the machine out of reports that are published: a comment, a log, an upload

_PART = r"[^\s/\\'\"`:;,()\[\]{}<>|*?]+"
_PATH = rf"(?<![\w/\\.~@-])(?:file://)?(?:[A-Za-z]:[/\\]|/)(?!(?:dev|proc|sys)/|/)(?:{_PART}[/\\])+(?:{_PART})?"
_QUOTED = r"(?<=(['\"`]))(?:[A-Za-z]:[/\\]|/)(?:[^'\"`\n/\\]+[/\\])+[^'\"`\n/\\]*(?=\1)"
_ABSOLUTE = re.compile(f"{_QUOTED}|{_PATH}")
"""Paths of at least two parts, with spaces only within quotes; not URLs, and not `/dev/shm`, which is the same everywhere."""

_PACKAGES = re.compile(r".*[/\\](?:site|dist)-packages[/\\](?=.)|.*[/\\]lib[/\\]python3\.\d+[/\\](?=.)")


def without_folders(text: str) -> str:
    """``text`` with each absolute path replaced by what means the same elsewhere.

    That is the path from an installed package on (``timm/layers/mlp.py:42``), relative to the current folder, or else the name alone.
    """
    return _ABSOLUTE.sub(_short, text) if "/" in text or "\\" in text else text


def _short(match: re.Match[str]) -> str:
    path = match[0].removeprefix("file://")
    installed = _PACKAGES.match(path)
    if installed is not None:
        return path[installed.end() :].replace("\\", "/")
    try:
        here = os.path.join(os.getcwd(), "")
    except OSError:  # it was removed
        here = os.sep
    if len(here) > 1 and path.startswith(here) and path != here:
        return path[len(here) :]
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


# -- Findings by place, for formats that point at lines of the user's files


class FileLine(NamedTuple):
    """A line of a file."""

    file: str
    """As saved, relative to where the scan ran or absolute; of an installed package, from the package on. Not yet escaped."""
    number: int
    """Counted from 1; also 1 if only the file is known."""

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


class Place(NamedTuple):
    """A line of the user's, and the findings with the same code about the same op that it leads to, in all precisions and modules."""

    line: FileLine
    group: FindingGroup
    found: list[Diagnostic]
    """The most severe first."""
    is_own: bool = True
    """Whether the line is in a file of the user's own. If not, none of them leads there: the model was scanned by its name."""

    @property
    def inside(self) -> dict[FileLine, list[Diagnostic]]:
        """The lines in installed packages that the line leads to, and what was found there."""
        lines: dict[FileLine, list[Diagnostic]] = {}
        for d in self.found:
            if d.caller and d.source:
                lines.setdefault(line_of(d.source), []).append(d)
        return lines

    def sentence(self, message: Message, what_to_do: str = " → ") -> str:
        """``half, bfloat16: mul: message (in timm/x.py:7) → what to do`` of one of the group's; without runs of the whole scan."""
        about = "".join(f"{visible(part)}: " for part in (", ".join(message.runs), self.group.op) if part)
        advice = f"{what_to_do}{visible(message.help, 1000)}" if message.help else ""
        return f"{about}{visible(message.text, 1000).rstrip('.')}{self._where(message.runs)}{advice}"

    def _where(self, runs: list[str]) -> str:
        """`` (in blocks.0.mlp, timm/layers/mlp.py:42 and 3 more places)``; empty if it is the one place on the line itself."""
        shown = [d for d in self.found if not runs or d.run_label in runs]
        found = dict.fromkeys((d.module or "", (d.source or "") if d.caller else "") for d in shown)
        first = next(iter(found))
        if not any(first) or (len(found) == 1 and not first[1]):
            return ""
        more = f" and {counted(len(found) - 1, 'more place')}" if len(found) > 1 else ""
        return f" (in {', '.join(visible(part) for part in first if part)}{more})"


def places(result: ScanResult, diagnostics: Iterable[Diagnostic] | None = None) -> list[Place]:
    """The findings of ``result``, or some of them, that the baseline does not accept, by place, the most severe first.

    What was found in an installed package is at the user's line that leads there. Findings without a line are at the one that makes the
    model, else at the target.
    """
    found: dict[tuple[str, tuple[str, bool], str | None], list[Diagnostic]] = {}
    for d in result.diagnostics if diagnostics is None else diagnostics:
        if not d.accepted:
            found.setdefault((d.code, _line(d, result), d.op), []).append(d)
    for members in found.values():
        members.sort(key=lambda d: SEVERITIES.index(d.severity))
    merged = [Place(line_of(line), group_of(its), its, own) for (_, (line, own), _), its in found.items()]
    return sorted(merged, key=lambda place: rank(place.group))


def _line(d: Diagnostic, result: ScanResult) -> tuple[str, bool]:
    """Where a finding is shown, and whether that is a line of the user's own."""
    model = result.model
    source, caller = (model.source, model.caller) if d.source is None else (d.source, d.caller)
    return caller or source or result.target, caller != ""


def line_of(source: str) -> FileLine:
    """The line of ``net.py:41``; the first one of ``net.py`` and ``net.py:make_model``."""
    match = re.fullmatch(r"(?s)(.*):(\d{1,9})", source)
    return FileLine(match[1], max(1, int(match[2]))) if match else FileLine(re.sub(r"(?<=\.py):\w+$", "", source), 1)


# -- A line per finding: workflow commands, which GitHub shows at the line of the code, and text for problem
# matchers

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
