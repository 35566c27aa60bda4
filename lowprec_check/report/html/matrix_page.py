"""The matrix of many models as one page, which can be sorted and filtered."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from lowprec_check.report.escape import visible
from lowprec_check.report.html.page import render_page, static
from lowprec_check.report.matrix import (
    WEIGHTS,
    WORDS,
    Names,
    about_predictions,
    cells,
    counted,
    machines,
    missing_ops,
    outcome,
    precisions,
    recommended,
    word,
)
from lowprec_check.report.summary import format_count, format_ratio
from lowprec_check.schema.matrix import Matrix, MatrixCell, MatrixRow

_NOT_SCANNED = "not scanned"
"""The word for a model that could not be scanned."""

_MARKS = {"✅": "✓", "➖": "–", "⚠️": "!", "❔": "?", "⏭️": ""}
"""Signs that every font has, for those of Markdown."""

_KINDS = {"✅": "ok", "➖": "none", "⚠️": "warn", "❔": "none", "⏭️": "none"}

_LAST = 1e12
"""The sort key of what has no figure."""


def matrix_page(matrix: Matrix, title: str = "Compatibility", *, linked: bool = True, note: str = "") -> str:
    """The page; each model links to ``models/<slug>.html``, unless not ``linked``. ``note`` follows the title."""
    columns, names = precisions(matrix), Names(matrix)
    found = _Found(matrix)
    missing = missing_ops(matrix)
    failed = sum(row.state == "failed" for row in matrix.rows)
    return render_page(
        "matrix.html.j2",
        [static("theme.js"), static("matrix.js")],
        tool=f"lowprec-check {next((visible(tool) for row in matrix.rows if (tool := row.made_with.get('tool'))), '')}",
        title=visible(title),
        note=visible(note, 2000),
        machines=machines(matrix),
        columns=columns,
        words=WORDS,
        totals=[counted(matrix, column) for column in columns],
        rows=[_row(row, columns, names, found, linked) for row in matrix.rows],
        missing=[(name, quote(name), precision, number) for name, precision, number in missing],
        scanned=len(matrix.rows) - failed,
        failed=failed,
        chosen_words=found.words,
        chosen_ops=found.ops,
        chosen_codes=found.codes,
        about_predictions=about_predictions(matrix),
    )


class _Found:
    """What the rows can be filtered by: the words, ops without a kernel and codes that occur."""

    def __init__(self, matrix: Matrix) -> None:
        every = [cell for row in matrix.rows for cell in row.cells]
        states = {word(cell) for cell in every}
        failed = [_NOT_SCANNED] if any(row.state == "failed" for row in matrix.rows) else []
        self.words = [*(known for known in WORDS if known in states), *failed]
        self.ops = sorted({visible(op) for cell in every for op in _ops(cell)})
        self.codes = sorted({visible(code) for cell in every for code in cell.codes} | _of_rows(matrix))

    def positions(self, known: list[str], values: list[str]) -> str:
        """Where ``values`` are in ``known``, for an attribute of the page."""
        return " ".join(str(known.index(visible(value))) for value in dict.fromkeys(values))


def _ops(cell: MatrixCell) -> list[str]:
    first = [cell.first_gap] if cell.first_gap else []
    return [*cell.gaps, *first]


def _of_rows(matrix: Matrix) -> set[str]:
    return {visible(code) for row in matrix.rows for code in row.codes}


def _row(row: MatrixRow, columns: list[str], names: Names, found: _Found, linked: bool) -> dict[str, Any]:
    scanned = row.state == "scanned"
    name, more = names.parts(row)
    by_column = cells(row)
    return {
        "name": name,
        "more": more,
        "facts": " · ".join(_facts(row)),
        "reason": visible(row.reason or ""),
        "href": f"models/{row.slug}.html" if scanned and linked else None,
        "parameters_key": row.parameters or 0,
        "word": "" if scanned else _NOT_SCANNED,
        "codes": found.positions(found.codes, row.codes),
        "cells": [_cell(by_column.get(column), found) for column in columns],
        "recommended": recommended(row) if scanned else "",
    }


def _facts(row: MatrixRow) -> list[str]:
    parameters = [format_count(row.parameters)] if row.parameters else []
    weights = {"unknown": [], "loaded": ["loaded weights"]}.get(row.weights, [f"{WEIGHTS[row.weights]} weights"])
    return [*parameters, *weights]


def _cell(cell: MatrixCell | None, found: _Found) -> dict[str, Any]:
    """What a cell shows and is filtered by, and its three sort keys."""
    if cell is None:
        return {
            "text": "–",
            "kind": "none",
            "keys": [_LAST] * 3,
            "word": "",
            "ops": "",
            "codes": "",
            "ratios": [],
            "remarks": [],
        }
    state, (sign, _, text) = word(cell), outcome(cell).partition(" ")
    figures = state in ("ok", "inaccurate")
    time, memory = (cell.time, cell.memory) if figures else (None, None)
    ratios = [(name, format_ratio(value)) for name, value in (("time", time), ("memory", memory)) if value is not None]
    error = WORDS.index(state) * 1e6 + (cell.rel_l2 if cell.rel_l2 is not None else 1e5)
    return {
        "text": f"{_MARKS.get(sign, '✗')} {text}",
        "kind": _KINDS.get(sign, "bad"),
        "ratios": ratios,
        "remarks": [*([visible(cell.degenerate)] if cell.degenerate else []), *_evidence(cell)],
        "keys": [error, time if time is not None else _LAST, memory if memory is not None else _LAST],
        "word": state,
        "ops": found.positions(found.ops, _ops(cell)),
        "codes": found.positions(found.codes, cell.codes),
    }


def _evidence(cell: MatrixCell) -> list[str]:
    return [] if cell.evidence == "measured" else [cell.evidence]
