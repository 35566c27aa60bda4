"""What only pages show: the user's code with what happens at each line, modules, operators, value ranges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from lowprec_check.analysis.error_shares import (
    BETWEEN,
    fails_by_error,
    line_shares,
    module_shares,
    trusted_budget,
)
from lowprec_check.analysis.recommend import recommended_run
from lowprec_check.analysis.run_summary import label
from lowprec_check.report import charts
from lowprec_check.report.blocks import Block, Column, Document, Fold, Heading, Row, Say, Table
from lowprec_check.report.operator_blocks import ACCUMULATED, SHARE, Total, larger, operator_folds
from lowprec_check.report.scan_document import CONDITIONS, scan_document
from lowprec_check.schema.scan_result import Diagnostic, Run, ScanResult
from lowprec_check.schema.statements import counted, short_op, some
from lowprec_check.schema.verdict import look

MOST_ROWS = 1200
"""Modules shown; the deepest beyond this number are left out, so that the page stays small."""
MOST_RUNS = 4
"""Runs that have columns of their own, those to look at first."""
RANGES = ("LP201", "LP202", "LP205")
"""Findings about values at the ends of the range."""


def scan_page(result: ScanResult) -> Document:
    """The report of a scan with its charts, and with what happened op by op before the conditions of the scan."""
    document = scan_document(result)
    blocks: list[Block] = []
    for block in document.blocks:
        if isinstance(block, Heading) and block.anchor == CONDITIONS:
            blocks += page_blocks(result)
        blocks.append(block)
        if isinstance(block, Table) and block.name == "runs":
            blocks += filter(None, (charts.tradeoff(result), charts.training(result)))
    return replace(document, blocks=blocks)


def page_blocks(result: ScanResult) -> Iterator[Block]:
    """The sections of a page that other formats leave out, for the runs that were analyzed op by op."""
    runs = analyzed(result)
    if not runs:
        return
    calm, best = all(run.status == "ok" for run in runs), recommended_run(result)
    shown = runs[:MOST_RUNS]
    if best in runs and best not in shown:
        shown = [*runs[: MOST_RUNS - 1], best]
    yield Heading("Op by op", anchor="details", detail="all")
    if len(shown) < len(runs):
        hint = f"Lines and modules are shown for {len(shown)} of {len(runs)} runs, those that fail first; operators for all."
        yield Say(hint, role="hint", detail="all")
    code = source_table(result, shown)
    parts: dict[str, Iterable[Block]] = {
        "Code: what happens at each line": [code] if code else [],
        "Modules: errors in the order of execution": [module_table(shown)],
        "The error along the network": _charts(shown),
        "Operators": operator_folds(runs),
        "Value ranges": range_blocks(result, runs),
    }
    for title, blocks in parts.items():
        inside = [*blocks]
        if not inside:
            continue
        if calm:
            yield Fold(title, inside, detail="all")
        else:
            yield Heading(title, level=3, detail="all")
            yield from inside


def analyzed(result: ScanResult) -> list[Run]:
    """The runs with op calls or gaps but the reference: first those that fail by wrong numbers, then those that fail otherwise."""
    runs = [run for run in result.runs if not run.is_reference and (len(run.op_calls) or run.gaps)]
    wrong = {"inaccurate": 0, "nonfinite": 0}
    return sorted(runs, key=lambda run: wrong.get(run.status, 1) if look(run.status).tone == "bad" else 2)


def _charts(runs: Sequence[Run]) -> Iterator[Block]:
    """The error along the network, a fold per run; the first is open."""
    for run in runs:
        chart = charts.error_along(run)
        if chart is not None:
            yield Fold(label(run), [chart], open=run is runs[0])


# -- the user's code


def source_table(result: ScanResult, runs: Sequence[Run]) -> Table | None:
    """The lines of each file with the ops run there, and for each run the share of the error or the worst error; ``None`` without lines."""
    totals = [_by_line(run) for run in runs]
    findings: dict[str, list[Diagnostic]] = {}
    for diagnostic in result.diagnostics:
        if diagnostic.source and not diagnostic.accepted:
            findings.setdefault(diagnostic.source, []).append(diagnostic)
    files: dict[str, list[int]] = {}
    for source in dict.fromkeys(source for found in totals for source in found):
        file, _, number = source.rpartition(":")
        if source in result.source_lines and number.isdigit():
            files.setdefault(file, []).append(int(number))
    if not files:
        return None
    shares = {
        label(run): {part.name: part.share for part in line_shares(run)} for run in runs if _has_shares(run, runs)
    }
    columns = [Column("line"), Column("code", "code"), Column("ops")]
    columns += [_share_column(run) if label(run) in shares else _error_column(run) for run in runs]
    columns.append(Column("found", "sentence"))
    rows = []
    for file, numbers in files.items():
        rows.append(Row([file, *[None] * (len(columns) - 1)]))
        for line in sorted(numbers):
            source = f"{file}:{line}"
            here = [found.get(source, Total()) for found in totals]
            ops = dict.fromkeys(short_op(op) for total in here for op in total.ops)
            figures: list[Any] = [
                shares[label(run)].get(source) if label(run) in shares else total.worst(run)
                for run, total in zip(runs, here, strict=True)
            ]
            remark = _found(source, runs, findings) or None
            rows.append(Row([str(line), result.source_lines[source], some([*ops]), *figures, remark], depth=1))
    return Table(columns, rows, "lines of code", headings=2, searchable=True).with_content()


def _has_shares(run: Run, runs: Sequence[Run]) -> bool:
    """Whether shares of its error are shown: of runs that fail by it, and of the first."""
    return trusted_budget(run) is not None and (fails_by_error(run) or run is runs[0])


def _share_column(run: Run) -> Column:
    return Column(f"{label(run)} share", "share", SHARE)


def _error_column(run: Run) -> Column:
    return Column(f"{label(run)} error", "error", ACCUMULATED)


def _by_line(run: Run) -> dict[str, Total]:
    found: dict[str, Total] = {}
    for row in run.op_calls.rows():
        if row.source:
            found.setdefault(row.source, Total()).add(row)
    for gap in run.gaps:
        if gap.source:
            total = found.setdefault(gap.source, Total())
            total.gaps += gap.calls
            total.ops[gap.op] = None
    return found


def _found(source: str, runs: Sequence[Run], findings: dict[str, list[Diagnostic]]) -> str:
    """``half: cholesky has no kernel; LP302``."""
    by_gap: dict[str, list[str]] = {}
    for run in runs:
        for gap in run.gaps:
            if gap.source == source:
                by_gap.setdefault(f"{short_op(gap.op)}: {gap.kind}", []).append(label(run))
    gaps = [f"{text} ({', '.join(dict.fromkeys(names))})" for text, names in by_gap.items()]
    kinds = {gap.kind for run in runs for gap in run.gaps if gap.source == source}
    known = [one for one in findings.get(source, ()) if one.matters is not False and one.name not in kinds]
    codes = sorted({f"{one.code} {one.name}" for one in known})
    return "; ".join([*gaps, *codes])


# -- modules


def module_table(runs: Sequence[Run]) -> Table:
    """The tree of modules in which an op of any of ``runs`` ran or a kernel is missing, each with all inside."""
    totals = [by_module(run) for run in runs]
    kept, left_out = _shallowest(_in_order(path for found in totals for path in found))
    shares = [run for run in runs if _has_shares(run, runs)]
    columns = [Column("module", "module"), *map(_error_column, runs), *map(_share_column, shares)]
    columns.append(Column("calls without a kernel", "number"))
    by_run = dict(zip(map(label, runs), totals, strict=True))
    nothing = Total()
    rows = []
    for path in kept:
        errors = [found.get(path, nothing).worst(run) for run, found in zip(runs, totals, strict=True)]
        parts = [by_run[label(run)].get(path, nothing).share for run in shares]
        gaps = max(found.get(path, nothing).gaps for found in totals)
        rows.append(Row([path, *errors, *parts, gaps or None], depth=path.count(".") + 1 if path else 0, module=path))
    return Table(columns, rows, "modules", searchable=True, left_out=left_out).with_content()


def by_module(run: Run) -> dict[str, Total]:
    """The sums of each module, submodules included."""
    found: dict[str, Total] = {}
    for row in run.op_calls.rows():
        for path in _lineage(row.module):
            found.setdefault(path, Total()).add(row)
    for total in found.values():
        total.share = None  # that of a module is in the budget, which knows the roundings between modules
    for part in module_shares(run) if trusted_budget(run) else ():
        for path in _lineage("" if part.name == BETWEEN else part.name):
            total = found.setdefault(path, Total())
            total.share = (total.share or 0.0) + part.share
    for gap in run.gaps:
        for path in _lineage(gap.module):
            found.setdefault(path, Total()).gaps += gap.calls
    return found


def _lineage(path: str) -> list[str]:
    """``["", "a", "a.b"]`` of ``a.b``."""
    parts = path.split(".") if path else []
    return [".".join(parts[:index]) for index in range(len(parts) + 1)]


def _in_order(paths: Iterable[str]) -> list[str]:
    """Each path once, children directly below their parent, siblings in the order in which they first ran."""
    below: dict[str, list[str]] = {}
    for path in dict.fromkeys(paths):
        if path:
            below.setdefault(path.rpartition(".")[0], []).append(path)
    ordered, stack = [], [""]
    while stack:
        path = stack.pop()
        ordered.append(path)
        stack.extend(reversed(below.get(path, [])))
    return ordered


def _shallowest(paths: list[str]) -> tuple[list[str], int]:
    """At most :data:`MOST_ROWS` of ``paths``, whole upper levels first, and how many are left out."""
    if len(paths) <= MOST_ROWS:
        return paths, 0
    kept = set(sorted(paths, key=lambda path: path.count(".") + bool(path))[:MOST_ROWS])
    return [path for path in paths if path in kept], len(paths) - len(kept)


# -- value ranges


def range_blocks(result: ScanResult, runs: Sequence[Run]) -> Iterator[Block]:
    """Where values leave the range of a run's format or come near its ends; nothing if none do."""
    columns = [
        Column("module", "module"),
        Column("op", "op"),
        Column("line", "source"),
        Column("largest", "figure", "The largest finite magnitude of the results."),
        Column("of the maximum", "percent", "The same, relative to the largest number of the format."),
        Column("Inf", "number", "Values that overflow."),
        Column("become zero", "percent", "Share of fp32's non-zeros that are zero here."),
        Column("subnormal", "percent", "Share of fp32's non-zeros below the smallest normal number."),
    ]
    for run in runs:
        places = {
            (one.module, one.op, one.source) for one in result.diagnostics if one.code in RANGES and one.is_about(run)
        }
        if not places or run.basis is None:
            continue
        limit = run.basis.format.largest
        worst: dict[tuple[str, str, str | None], list[Any]] = {}
        for row in run.op_calls.rows():
            key = (row.module, row.op, row.source)
            if key in places or row.introduced_inf or (row.flushed or 0.0) > 0.01 or (row.absmax or 0.0) > limit / 4:
                known = worst.setdefault(key, [None, 0, None, None])
                known[0] = larger(known[0], row.absmax)
                known[1] += row.introduced_inf
                known[2], known[3] = larger(known[2], row.flushed), larger(known[3], row.subnormal)
        rows = [
            Row(
                [*key, top, None if top is None else top / limit, lost or None, flushed or None, small or None],
                module=key[0],
            )
            for key, (top, lost, flushed, small) in worst.items()
        ]
        rows.sort(key=lambda row: (-(row.cells[5] or 0), -(row.cells[6] or 0.0), -(row.cells[4] or 0.0)))
        chart = charts.magnitudes(run)
        if rows:
            name = f"{counted(len(rows), 'op')} at the ends of the range of {run.basis.format.short}"
            table = Table(columns, rows[:40], name, left_out=max(0, len(rows) - 40)).with_content()
            yield Fold(f"{label(run)}: {name}", [chart, table] if chart else [table])
