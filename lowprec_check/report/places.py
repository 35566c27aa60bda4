"""Findings by place, for formats that point at lines of the user's files. Never imports torch."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from lowprec_check.analysis.run_summary import counted
from lowprec_check.report.escape import visible
from lowprec_check.report.summary import SEVERITY_ORDER
from lowprec_check.schema.scan_result import Diagnostic, ScanResult


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
    found: list[Diagnostic]
    """The most severe first."""
    is_own: bool = True
    """Whether the line is in a file of the user's own. If not, none of them leads there: the model was scanned by its name."""

    @property
    def first(self) -> Diagnostic:
        """The one whose message is shown."""
        return self.found[0]

    @property
    def runs(self) -> list[str]:
        """Labels of the runs, each once."""
        return list(dict.fromkeys(visible(d.run_label) for d in self.found if d.run_label))

    @property
    def inside(self) -> dict[FileLine, list[Diagnostic]]:
        """The lines in installed packages that the line leads to, and what was found there."""
        lines: dict[FileLine, list[Diagnostic]] = {}
        for d in self.found:
            if d.caller and d.source:
                lines.setdefault(line_of(d.source), []).append(d)
        return lines

    @property
    def where_text(self) -> str:
        """`` (in blocks.0.mlp, timm/layers/mlp.py:42 and 3 more places)``; empty if it is the one place on the line itself."""
        found = dict.fromkeys((d.module or "", d.source if d.caller else "") for d in self.found)
        shown = ", ".join(visible(part) for part in next(iter(found)) if part)
        if not shown or (len(found) == 1 and not self.inside):
            return ""
        more = f" and {counted(len(found) - 1, 'more place')}" if len(found) > 1 else ""
        return f" (in {shown}{more})"


def places(result: ScanResult) -> list[Place]:
    """The findings that the baseline does not accept, by place, the most severe first.

    What was found in an installed package is at the user's line that leads there. Findings without a line are at the one that makes the
    model, else at the target.
    """
    found: dict[tuple[Any, ...], list[Diagnostic]] = {}
    for d in result.diagnostics:
        if not d.accepted:
            # Without an op, the module or the message tells findings of one code apart.
            about = (d.op,) if d.op else (None, d.module, None if d.module else d.message)
            found.setdefault((d.code, _line(d, result), *about), []).append(d)
    for members in found.values():
        members.sort(key=lambda d: SEVERITY_ORDER[d.severity])
    merged = [Place(line_of(line), members, own) for (_, (line, own), *_), members in found.items()]
    return sorted(merged, key=lambda place: SEVERITY_ORDER[place.first.severity])


def _line(d: Diagnostic, result: ScanResult) -> tuple[str, bool]:
    """Where a finding is shown, and whether that is a line of the user's own."""
    model = result.model
    source, caller = (model.source, model.caller) if d.source is None else (d.source, d.caller)
    return caller or source or result.target, caller != ""


def line_of(source: str) -> FileLine:
    """The line of ``net.py:41``; the first one of ``net.py`` and ``net.py:make_model``."""
    match = re.fullmatch(r"(?s)(.*):(\d{1,9})", source)
    return FileLine(match[1], max(1, int(match[2]))) if match else FileLine(re.sub(r"(?<=\.py):\w+$", "", source), 1)
