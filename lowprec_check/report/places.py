"""Findings by place, for formats that point at lines of the user's files. Never imports torch."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from lowprec_check.report.escape import visible
from lowprec_check.report.summary import SEVERITY_ORDER
from lowprec_check.schema.scan_result import Diagnostic, ScanResult


class Place(NamedTuple):
    """A line of a file, and the findings with the same code about the same op there, one per precision."""

    file: str
    """As saved, relative to where the scan ran or absolute; not yet escaped."""
    line: int
    """Counted from 1; also 1 if only the file is known."""
    found: list[Diagnostic]

    @property
    def first(self) -> Diagnostic:
        """The one whose message is shown."""
        return self.found[0]

    @property
    def runs(self) -> list[str]:
        """Labels of the runs, each once."""
        return list(dict.fromkeys(visible(d.run_label) for d in self.found if d.run_label))


def places(result: ScanResult) -> list[Place]:
    """All findings by place, the most severe first; those without a line are at the class of the model, or the target."""
    found: dict[tuple[Any, ...], list[Diagnostic]] = {}
    for d in result.diagnostics:
        key = (d.code, d.op, d.module, d.source, "" if d.op or d.module else d.message)
        found.setdefault(key, []).append(d)
    for members in found.values():
        members.sort(key=lambda d: SEVERITY_ORDER[d.severity])
    merged = sorted(found.values(), key=lambda members: SEVERITY_ORDER[members[0].severity])
    return [Place(*_split(members[0].source or result.model.source or result.target), members) for members in merged]


def _split(source: str) -> tuple[str, int]:
    match = re.fullmatch(r"(?s)(.*):(\d{1,9})", source)
    return (match[1], max(1, int(match[2]))) if match else (source, 1)
