"""The section about formats that were not run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lowprec_check.report.blocks import Block, Column, ErrorOf, Heading, Row, Say, Table
from lowprec_check.report.feature_parts import Section
from lowprec_check.schema.measures import MATTERS
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.statements import Sentence, Statement, chained, fill, plain, say
from lowprec_check.schema.what_if import WhatIf


def predicted_errors(result: ScanResult, said: Sequence[Statement]) -> Iterator[Block]:
    """The predictions of ``--what-if``."""
    predictions = result.what_if
    if not predictions:
        return
    # a note that all predictions share is said once, below the table
    notes = {entry.note for entry in predictions}
    shared = None
    if len(notes) == 1 and len(predictions) > 1:
        shared = notes.pop()
    rows = []
    for entry in predictions:
        error = None
        if entry.predicted is not None:
            error = ErrorOf(entry.predicted, None, f"≈ {entry.predicted:.1e}")
        note = None
        if entry.note and not shared:
            note = plain(entry.note)
        rows.append(Row([entry.format, entry.evidence, error, chained(_causes(entry), note).text]))
    meaning = "The modules with the largest shares of the squared error, and what the prediction leaves out."
    columns = [
        Column("format"),
        Column("evidence"),
        Column("output error", "error", "Relative L2 error that is predicted."),
        Column("why", "sentence", meaning),
    ]
    yield Heading("What if: formats that were not run", anchor="what-if")
    yield Table(columns, rows, "predicted output errors")
    hint = "Predicted from fp32: matrix products and convolutions are emulated, and none of these formats was run."
    yield Say(f"{hint}{fill(' For all formats: {}.', shared)}", role="hint")


def _causes(entry: WhatIf) -> Sentence | None:
    """``24 % from fc, 4 % from conv1``."""
    totals: dict[str, float] = {}
    for place in entry.shares:
        totals[place.module] = totals.get(place.module, 0.0) + place.share
    named = [
        say("{share:share} from {module:module}", share=share, module=name)
        for name, share in sorted(totals.items(), key=lambda item: -item[1])[:3]
        if share >= MATTERS
    ]
    if named:
        return chained(*named, between=", ")
    return None


SECTION = Section("causes", predicted_errors)
