"""Findings by place, for formats that point at lines of the user's files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from lowprec_check.analysis.findings import SEVERITIES, FindingGroup, Message, group_of, rank
from lowprec_check.analysis.statements.kinds import statements
from lowprec_check.report.foreign_text import visible
from lowprec_check.schema.scan_result import Diagnostic, ScanResult
from lowprec_check.schema.statements import counted


class FileLine(NamedTuple):
    """A line of a file."""

    file: str
    """As saved and unescaped: relative to the scan's folder, absolute, or from the package on."""
    number: int
    """Counted from 1; also 1 if only the file is known."""

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


class Place(NamedTuple):
    """A line of the user, and the findings of one code and op that it leads to, of all runs."""

    line: FileLine
    group: FindingGroup
    found: list[Diagnostic]
    """The most severe first."""
    is_own: bool = True
    """Whether it is in the user's own file; else no line is, as the model was named."""

    @property
    def inside(self) -> dict[FileLine, list[Diagnostic]]:
        """The lines in installed packages that the line leads to, and what was found there."""
        lines: dict[FileLine, list[Diagnostic]] = {}
        for d in self.found:
            if d.caller and d.source:
                lines.setdefault(line_of(d.source), []).append(d)
        return lines

    def sentence(self, message: Message, what_to_do: str = " → ") -> str:
        """``half, bfloat16: mul: message (in timm/x.py:7) → what to do``; no runs if about all."""
        about = "".join(f"{visible(part)}: " for part in (", ".join(message.runs), self.group.op) if part)
        # `` (in blocks.0.mlp, timm/mlp.py:42 and 3 more places)``, without the line itself
        found = dict.fromkeys((d.module or "", (d.caller and d.source) or "") for d in message.found)
        module, inside = next(iter(found))
        where, more = "", ""
        if len(found) > 1:
            more = f" and {counted(len(found) - 1, 'more place')}"
        if inside or (module and more):
            where = f" (in {', '.join(visible(part) for part in (module, inside) if part)}{more})"
        advice = message.help and f"{what_to_do}{visible(message.help, 1000)}"
        known = "" if message.known is None else f"; {visible(message.known.text, 1000)}"
        return f"{about}{visible(message.text, 1000).rstrip('.')}{where}{advice or ''}{known}"


def places(result: ScanResult, diagnostics: Iterable[Diagnostic] | None = None) -> list[Place]:
    """The findings of ``result``, or some of them, that the baseline does not accept, by place, the
    most severe first.

    What was found in an installed package is at the user's line that leads there. Findings without
    a line are at the one that makes the model, else at the target.
    """
    if diagnostics is None:
        diagnostics = result.diagnostics
    by_place: dict[tuple[str, str, bool, str | None], list[Diagnostic]] = {}
    for d in diagnostics:
        if not d.accepted:
            at = result.model if d.source is None else d
            # an empty caller: the target is a package's, so that no line of the user's leads there
            line, is_own = at.caller or at.source or result.target, at.caller != ""
            by_place.setdefault((d.code, line, is_own, d.op), []).append(d)
    merged = []
    for (_, line, is_own, _), members in by_place.items():
        members.sort(key=lambda d: SEVERITIES.index(d.severity))
        merged.append(Place(line_of(line), group_of(members), members, is_own))
    return sorted(merged, key=lambda place: rank(place.group))


def line_of(source: str) -> FileLine:
    """The line of ``net.py:41``; the first one of ``net.py`` and ``net.py:make_model``."""
    match = re.fullmatch(r"(?s)(.*):(\d{1,9})", source)
    if match:
        return FileLine(match[1], max(1, int(match[2])))
    return FileLine(re.sub(r"(?<=\.py):\w+$", "", source), 1)


def told(result: ScanResult) -> dict[str, str]:
    """The first statement of each kind as text."""
    return {said.kind: said.text for said in reversed(statements(result))}
