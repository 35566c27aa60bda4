"""The predictions of ``--what-if`` as rows of text."""

from __future__ import annotations

from typing import NamedTuple

from lowprec_check.analysis.error_shares import module_name, share_text
from lowprec_check.report.escape import visible
from lowprec_check.schema.error_budget import MATTERS
from lowprec_check.schema.predictions import WhatIf
from lowprec_check.schema.scan_result import ScanResult

TITLE = "What if: formats that were not run"
HINT = "Output errors predicted from fp32: matrix products and convolutions are emulated, and none of these formats was run."
HEADS = ("format", "evidence", "output error", "why")
NAMED_MODULES = 3


class WhatIfRow(NamedTuple):
    """One format, as strings."""

    format: str
    evidence: str
    error: str
    """``≈ 1.2e-02``."""
    why: str
    """The modules that most of it comes from, and what the prediction leaves out."""


def shared_note(result: ScanResult) -> str | None:
    """The note that all formats have, which is shown once."""
    notes = {entry.note for entry in result.what_if}
    return notes.pop() if len(notes) == 1 and len(result.what_if) > 1 else None


def what_if_hint(result: ScanResult) -> str:
    """What the rows are, in a sentence or two."""
    note = shared_note(result)
    return HINT if note is None else visible(f"{HINT} For all formats: {note}.", 600)


def what_if_rows(result: ScanResult) -> list[WhatIfRow]:
    """One row per format, in the order that was asked for."""
    shared = shared_note(result)
    return [
        WhatIfRow(
            visible(entry.format),
            entry.evidence,
            "–" if entry.predicted is None else f"≈ {entry.predicted:.1e}",
            visible("; ".join(filter(None, (_causes(entry), None if shared else entry.note))), 600),
        )
        for entry in result.what_if
    ]


def _causes(entry: WhatIf) -> str:
    """``24 % from fc, 4 % from conv1``."""
    totals: dict[str, float] = {}
    for place in entry.shares:
        totals[place.module] = totals.get(place.module, 0.0) + place.share
    largest = sorted(totals.items(), key=lambda item: -item[1])[:NAMED_MODULES]
    return ", ".join(f"{share_text(share)} from {module_name(name)}" for name, share in largest if share >= MATTERS)
