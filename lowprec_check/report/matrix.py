"""The matrix of models, precisions and devices as Markdown and HTML, with the ops that most often lack a kernel."""

from __future__ import annotations

import itertools
import shlex
from collections import Counter
from collections.abc import Iterable
from typing import Any

from lowprec_check.analysis.recommend import SMALLER
from lowprec_check.analysis.run_summary import short_op, shorten
from lowprec_check.analysis.speed import TOLD
from lowprec_check.report.escape import visible
from lowprec_check.report.markdown import code, escape, table
from lowprec_check.report.summary import format_count, format_ratio
from lowprec_check.schema.matrix import Matrix, MatrixCell, MatrixRow
from lowprec_check.schema.run_key import PLAN

_SIGNS = {"ok": "✅", "inaccurate": "⚠️", "unjudged": "❔", "skipped": "⏭️"}
_MOST_OPS = 30


def markdown(matrix: Matrix, title: str = "Compatibility") -> str:
    """The index page; each model links to ``models/<slug>.md``."""
    columns = precisions(matrix)
    common = len(_common_options(matrix))
    rows = [_row(row, columns, common) for row in matrix.rows]
    parts = [
        f"# {escape(visible(title))}",
        *_machines(matrix),
        f"{_legend()}{_about_predictions(matrix)}",
        _totals(matrix, columns),
    ]
    missing = _missing(matrix)
    if missing:
        parts += ["## Ops without a kernel", table(missing, ["op", "precision", "models"], "llr")]
    parts += [
        "## Models",
        table(rows, ["model", "parameters", *map(escape, columns), "recommended"], "lr" + "l" * (len(columns) + 1)),
    ]
    return "\n\n".join(parts) + "\n"


def page(matrix: Matrix, title: str = "Compatibility") -> str:
    """The index as HTML, which can be sorted and filtered; each model links to ``models/<slug>.html``."""
    from lowprec_check.report.html.page import render_page, static

    columns, shared = precisions(matrix), shared_options(matrix)
    common = len(_common_options(matrix))
    scanned = [row for row in matrix.rows if row.state == "scanned"]
    return render_page(
        "matrix.html.j2",
        [static("theme.js"), static("matrix.js")],
        tool=f"lowprec-check {_first(row.made_with.get('tool') for row in matrix.rows)}",
        title=visible(title),
        machines=[*map(_machine, _one_of_each(matrix)), *([f"scanned with {shared}"] if shared else [])],
        columns=columns,
        totals=[_counted(matrix, column) for column in columns],
        rows=[_html_row(row, columns, common) for row in matrix.rows],
        missing=[[name, precision, number] for name, precision, number in _missing_ops(matrix)],
        scanned=len(scanned),
        failed=len(matrix.rows) - len(scanned),
        about_predictions=_about_predictions(matrix),
    )


def precisions(matrix: Matrix) -> list[str]:
    """The columns, each once, in the order of the scans; all plans share one column."""
    return list(dict.fromkeys(visible(column_of(cell)) for row in matrix.rows for cell in row.cells))


def column_of(cell: MatrixCell) -> str:
    """``plan`` of ``plan (half)``; backends have columns of their own."""
    if cell.column is not None:
        return cell.column
    return PLAN if cell.precision.startswith(f"{PLAN} (") else cell.precision


def _cells(row: MatrixRow) -> dict[str, MatrixCell]:
    return {visible(column_of(cell)): cell for cell in row.cells}


def describe(cell: MatrixCell | None) -> str:
    """``✅ 1.2e-03 · 0.62 ×``, or why it fails; ``➖ 1.2e-03 · predicted``."""
    if cell is None:
        return "–"
    return _described(cell) + ("" if cell.evidence == "measured" else f" · {cell.evidence}")


def _described(cell: MatrixCell) -> str:
    sign = _SIGNS.get(cell.status, "❌") if cell.status != "ok" or _gains(cell) else "➖"
    if cell.status == "error" and cell.gaps:
        more = f" +{len(cell.gaps) - 1}" if len(cell.gaps) > 1 else ""
        return visible(f"{sign} no {short_op(cell.gaps[0])}{more}")
    if cell.status == "error" and cell.first_gap:
        return visible(f"{sign} {cell.first_gap_kind}: {short_op(cell.first_gap)}")
    if cell.status not in ("ok", "inaccurate"):
        return f"{sign} {cell.status}"
    error = f"{cell.rel_l2:.1e}" if cell.rel_l2 is not None else "∞"
    speed = f" · {format_ratio(cell.time)}" if cell.time is not None else ""
    return f"{sign} {error}{speed}"


def _gains(cell: MatrixCell) -> bool:
    """Whether it is faster or smaller than fp32."""
    return (cell.time or 1.0) <= 1 / TOLD or (cell.memory or 1.0) <= SMALLER


# -- Markdown


def _row(row: MatrixRow, columns: list[str], common: int) -> list[str]:
    name = _name(row, common)
    if row.state == "failed":
        return [code(name), "", *([""] * len(columns)), f"❌ {escape(shorten(visible(row.reason or ''), 160))}"]
    cells = _cells(row)
    shown = [escape(describe(cells.get(column))) for column in columns]
    link = f"[{escape(name)}](models/{row.slug}.md)"
    return [link, format_count(row.parameters or 0), *shown, escape(visible(row.recommended or "fp32"))]


def _name(row: MatrixRow, common: int) -> str:
    """The target, the options that not all rows share, and the device."""
    own = f" {shlex.join(row.options[common:])}" if row.options[common:] else ""
    return visible(f"{row.target}{own}{f' on {row.device}' if row.device else ''}")


def _legend() -> str:
    return (
        "✅ passes and is faster or smaller than fp32, with its error and time · ➖ passes · ⚠️ error over tolerance · ❌ fails, with the first op that has no kernel and the "
        "number of further ones, or with another reason · error: relative L2 error of the output against fp32 · ×: time "
        "relative to fp32, timed while other work may have run"
    )


def _about_predictions(matrix: Matrix) -> str:
    """What ``predicted`` means in a matrix that has such cells."""
    if all(cell.evidence == "measured" for row in matrix.rows for cell in row.cells):
        return ""
    return " · predicted: emulated on a CPU, nothing ran on that device"


def _machines(matrix: Matrix) -> list[str]:
    if not matrix.rows:
        return ["No models."]
    options = shared_options(matrix)
    lines = [*map(_machine, _one_of_each(matrix)), *([f"scanned with {options}"] if options else [])]
    return ["  \n".join(map(escape, lines))]


def _one_of_each(matrix: Matrix) -> list[MatrixRow]:
    found = {(tuple(row.environment.items()), _device(row)): row for row in matrix.rows if row.state == "scanned"}
    return list(found.values())


def shared_options(matrix: Matrix) -> str:
    """The ``scan`` options that all rows start with."""
    return visible(shlex.join(_common_options(matrix)))


def _common_options(matrix: Matrix) -> list[str]:
    lists = [row.options for row in matrix.rows]
    common = [words[0] for words in itertools.takewhile(lambda words: len(set(words)) == 1, zip(*lists, strict=False))]
    following = [words[len(common)] for words in lists if len(words) > len(common)]
    if common and common[-1].startswith("-") and any(not word.startswith("-") for word in following):
        common.pop()  # an option whose value differs
    return common


def _device(row: MatrixRow) -> str:
    return row.cells[0].device if row.cells else ""


def _machine(row: MatrixRow) -> str:
    env = row.environment
    parts = [
        f"torch {env.get('torch', '?')}",
        *([f"torchvision {env['torchvision']}"] if "torchvision" in env else []),
        f"{_device(row)}: {env.get('device_name', '?')}",
        f"{env.get('threads', '?')} thread{'' if env.get('threads') == '1' else 's'}",
    ]
    return visible(" · ".join(parts))


def _totals(matrix: Matrix, columns: list[str]) -> str:
    rows = []
    for column in columns:
        counted = _counted(matrix, column)
        rows.append([escape(column), *(str(counted[name] or "") for name in _STATUSES)])
    failed = sum(row.state == "failed" for row in matrix.rows)
    note = f"\n\n{failed} of {len(matrix.rows)} models could not be scanned; their rows show why." if failed else ""
    return table(rows, ["precision", *_STATUSES], "l" + "r" * len(_STATUSES)) + note


_STATUSES = ("ok", "unjudged", "inaccurate", "nonfinite", "error", "crashed", "timeout", "skipped")


def _counted(matrix: Matrix, column: str) -> Counter[str]:
    return Counter(cell.status for row in matrix.rows for name, cell in _cells(row).items() if name == column)


def _missing_ops(matrix: Matrix) -> list[tuple[str, str, int]]:
    found = Counter((op, column) for row in matrix.rows for column, cell in _cells(row).items() for op in cell.gaps)
    return [(visible(op), column, number) for (op, column), number in found.most_common(_MOST_OPS)]


def _missing(matrix: Matrix) -> list[list[str]]:
    return [[code(op), escape(column), str(number)] for op, column, number in _missing_ops(matrix)]


# -- HTML


def _html_row(row: MatrixRow, columns: list[str], common: int) -> dict[str, Any]:
    cells = _cells(row)
    shown = [
        (describe(cells.get(column)), _kind(cells.get(column)), _sort_key(cells.get(column))) for column in columns
    ]
    return {
        "name": _name(row, common),
        "reason": visible(row.reason or ""),
        "href": f"models/{row.slug}.html" if row.state == "scanned" else None,
        "parameters": format_count(row.parameters) if row.parameters else "",
        "parameters_key": row.parameters or 0,
        "cells": shown if row.state == "scanned" else [],
        "recommended": visible(row.recommended or "fp32") if row.state == "scanned" else "",
    }


def _kind(cell: MatrixCell | None) -> str:
    if cell is None or cell.status == "skipped":
        return "none"
    return {"ok": "ok", "inaccurate": "warn", "unjudged": "warn"}.get(cell.status, "bad")


def _sort_key(cell: MatrixCell | None) -> float:
    if cell is None:
        return 1e9
    return _STATUSES.index(cell.status) * 1e6 + (cell.rel_l2 if cell.rel_l2 is not None else 1e5)


def _first(values: Iterable[str | None]) -> str:
    return next((visible(value) for value in values if value), "")
