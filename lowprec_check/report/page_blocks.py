"""What only pages show: lines of the user's code, modules, operators, value ranges."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from lowprec_check.analysis.error_shares import BETWEEN, fails_by_error, line_shares, module_shares, trusted_budget
from lowprec_check.analysis.recommend import recommended_run
from lowprec_check.analysis.run_summary import label
from lowprec_check.report import charts
from lowprec_check.report.blocks import Block, Column, Document, ErrorOf, Fold, Heading, Row, Say, Table
from lowprec_check.report.feature_parts import sections
from lowprec_check.report.scan_document import CONDITIONS, scan_document
from lowprec_check.schema.op_calls import QUANTITIES
from lowprec_check.schema.run_key import EAGER
from lowprec_check.schema.scan_result import Diagnostic, Gap, Run, ScanResult
from lowprec_check.schema.statements import counted, short_op, some
from lowprec_check.schema.verdict import look

# -- Op calls taken together, of an op, a module or a line, and the table of operators of each run

MOST_CALLS = 20
"""The worst calls of an op that its row unfolds."""
_ALL_CALLS = 300
"""Such calls in one run."""


class Calls:
    """Op calls of a run that are shown together."""

    def __init__(self, run: Run, positions: Sequence[int] = ()) -> None:
        self.run = run
        self.positions = [*positions]
        """In ``run.op_calls``."""
        self.gaps: list[Gap] = []

    @property
    def ops(self) -> list[str]:
        """The op of each call and gap."""
        return [*(self.run.op_calls.op[at] for at in self.positions), *(gap.op for gap in self.gaps)]

    @property
    def without_kernel(self) -> int:
        """Number of calls that fail in this precision and succeed in fp32."""
        return sum(gap.calls for gap in self.gaps)

    def total(self, name: str) -> Any:
        """A quantity of all calls, as it is declared; ``None`` if no call has it."""
        quantity, columns = QUANTITIES[name], self.run.op_calls
        column = getattr(columns, name)
        values = [column[at] for at in self.positions if column[at] is not None]
        if quantity.total == "most common":
            return some([value for value, _ in Counter(values).most_common() if value], 1) or None
        if quantity.plus:
            values += [getattr(columns, quantity.plus)[at] for at in self.positions]
        if not values:
            return None
        if quantity.total == "sum":
            return sum(values)
        return max(values)

    def cell(self, name: str, tolerance: float | None = None) -> Any:
        """The total as shown: an error with its ``tolerance``, infinite after an Inf or NaN."""
        value, kind = self.total(name), QUANTITIES[name].type
        if name == "accumulated_error" and self.total("introduced_nan"):
            return ErrorOf(None, tolerance, "Inf/NaN")
        if value is None or (kind == "share" and trusted_budget(self.run) is None):
            return None
        if kind in ("number", "percent"):
            return value or None
        if name == "accumulated_error":
            return ErrorOf(value, tolerance)
        return value

    def worst_error(self) -> Any:
        """The largest accumulated error, beside the tolerance of a run that fails."""
        if self.run.status == "ok":
            return self.cell("accumulated_error")
        return self.cell("accumulated_error", self.run.relative_tolerance)


def calls_by(run: Run, field: Literal["op", "module", "source"]) -> dict[str, Calls]:
    """The op calls and gaps of ``run`` by op, module or line; those without one are left out."""
    calls_of = defaultdict[str, Calls](lambda: Calls(run))
    for position, key in enumerate(getattr(run.op_calls, field)):
        if key is not None:
            calls_of[key].positions.append(position)
    for gap in run.gaps:
        key = getattr(gap, field)
        if key is not None:
            calls_of[key].gaps.append(gap)
    return calls_of


def column_of(name: str) -> Column:
    """The column of a quantity of op calls."""
    quantity = QUANTITIES[name]
    return Column(quantity.title, quantity.type, quantity.meaning)


def operator_folds(runs: Sequence[Run]) -> Iterator[Block]:
    """The table of operators of each run; that of the run to look at first is open."""
    for run in runs:
        if run.backend != EAGER and run.explained_by:
            continue
        table = operator_table(run)
        if table is not None:
            is_open = run is runs[0] and look(run.status).tone == "bad"
            yield Fold(f"{label(run)}: {counted(len(table.rows), 'operator')}", [table], open=is_open)


_OPERATORS = [name for name, quantity in QUANTITIES.items() if quantity.table == "operators"]
_MAIN = [name for name in _OPERATORS if QUANTITIES[name].rank < 5]
_OTHERS = [name for name in _OPERATORS if name not in _MAIN]


def operator_table(run: Run) -> Table | None:
    """A row per op, the worst first (no kernel, Inf or NaN, error); it unfolds its worst calls."""
    calls_of, op_calls = calls_by(run, "op"), run.op_calls
    if not calls_of:
        return None
    columns = [
        Column("op", "op"),
        Column("calls", "number"),
        *map(column_of, _MAIN),
        Column("without a kernel", "number", "Calls that fail in this precision and succeed in fp32."),
        *map(column_of, _OTHERS),
    ]

    def rank(item: tuple[str, Calls]) -> tuple[float, ...]:
        totals = (item[1].total(name) or 0.0 for name in ("introduced_nan", "share", "accumulated_error"))
        return (-item[1].without_kernel, *(-total for total in totals))

    def rank_of_call(at: int) -> tuple[float, ...]:
        lost = op_calls.introduced_inf[at] + op_calls.introduced_nan[at]
        return (-lost, -(op_calls.share[at] or 0.0), -(op_calls.accumulated_error[at] or 0.0))

    # a run with many ops unfolds fewer calls of each, so that the page stays small
    most = max(3, min(MOST_CALLS, _ALL_CALLS // len(calls_of)))
    shown = [name for name in _OPERATORS if QUANTITIES[name].of_call != ""]
    of_calls = [Column("module", "module"), Column("line", "source"), Column("shape")]
    of_calls += [Column(QUANTITIES[name].of_call or QUANTITIES[name].title, QUANTITIES[name].type) for name in shown]
    rows = []
    for op, calls in sorted(calls_of.items(), key=rank):
        figures = {name: calls.cell(name) for name in _OPERATORS} | {"accumulated_error": calls.worst_error()}
        main, others = ([figures[name] for name in names] for names in (_MAIN, _OTHERS))
        cells = [op, len(calls.positions), *main, calls.without_kernel or None, *others]
        worst = []
        for at in sorted(calls.positions, key=rank_of_call)[:most]:
            place = (op_calls.module[at], op_calls.source[at], op_calls.shape[at])
            worst.append(Row([*place, *map(Calls(run, [at]).cell, shown)], module=place[0]))
        left_out = len(calls.positions) - len(worst)
        below = Table(of_calls, worst, "the worst calls", left_out=left_out).with_content()
        rows.append(Row(cells, below=[below] if worst else ()))
    return Table(columns, rows, f"operators of {label(run)}", searchable=True).with_content()


# -- The sections of a page

MOST_ROWS = 1200
"""Modules shown; the deepest beyond this number are left out, so that the page stays small."""
MOST_RUNS = 4
"""Runs that have columns of their own, those to look at first."""
RANGES = ("LP201", "LP202", "LP205")
"""Findings about values at the ends of the range."""

_SHARES = (
    "A share is a part of the squared error of the output; a negative one cancels error from elsewhere. "
    "A module's share is that of its own ops and of all modules inside, so its submodules need not add up to it; "
    "lines and operators leave out the rounding between modules."
)


def scan_page(result: ScanResult) -> Document:
    """The report of a scan with charts, and with op-by-op details before its conditions."""
    document = scan_document(result)
    blocks: list[Block] = []
    for block in document.blocks:
        if isinstance(block, Heading) and block.anchor == CONDITIONS:
            blocks += page_blocks(result)
        blocks.append(block)
        if isinstance(block, Table) and block.name == "runs" and block.detail != "brief":
            blocks += [*filter(None, [charts.tradeoff(result)]), *sections("runs", result, result.statements)]
    return msgspec.structs.replace(document, blocks=blocks)


def page_blocks(result: ScanResult) -> Iterator[Block]:
    """The sections that only a page shows, for the runs that were analyzed op by op."""
    runs = analyzed(result)
    if not runs:
        return
    # the recommended run has columns too, in place of the last one
    calm, best = all(run.status == "ok" for run in runs), recommended_run(result)
    shown = runs[:MOST_RUNS]
    if best in runs and best not in shown:
        shown = [*runs[: MOST_RUNS - 1], best]
    yield Heading("Op by op", anchor="details", detail="all")
    if len(shown) < len(runs):
        hint = f"Lines and modules are shown for {len(shown)} of {len(runs)} runs, those that fail first"
        yield Say(f"{hint}; operators for all.", role="hint", detail="all")
    if any(_has_shares(run, shown) for run in shown):
        yield Say(_SHARES, role="hint", detail="all")
    code, along = source_table(result, shown), charts.error_along([run for run in result.runs if run in runs])
    parts: dict[str, Iterable[Block]] = {
        "Code: what happens at each line": [code] if code else [],
        "Modules: errors in the order of execution": [module_table(shown)],
        "The error along the model": [along] if along else [],
        "Operators": operator_folds(runs),
        "Value ranges": range_blocks(result, runs),
    }
    # where nothing fails, nobody has to look: the sections are closed
    for title, blocks in parts.items():
        inside = [*blocks]
        if inside and calm:
            yield Fold(title, inside, detail="all")
        elif inside:
            yield Heading(title, level=3, detail="all")
            yield from inside


def analyzed(result: ScanResult) -> list[Run]:
    """Runs with op calls or gaps, without the reference: wrong numbers first, then failures."""
    runs = [run for run in result.runs if not run.is_reference and (len(run.op_calls) or run.gaps)]

    def order(run: Run) -> int:
        if look(run.status).tone != "bad":
            return 2
        return 1 - (run.status in ("inaccurate", "nonfinite"))

    return sorted(runs, key=order)


# -- the user's code


def source_table(result: ScanResult, runs: Sequence[Run]) -> Table | None:
    """The lines of each file, their ops and, for each run, the error share or worst error."""
    by_line = [calls_by(run, "source") for run in runs]
    # the lines whose text was saved, by file
    files: dict[str, list[int]] = {}
    for source in dict.fromkeys(source for calls_of in by_line for source in calls_of):
        file, _, number = source.rpartition(":")
        if source in result.source_lines and number.isdigit():
            files.setdefault(file, []).append(int(number))
    if not files:
        return None
    findings: dict[str, list[Diagnostic]] = {}
    for diagnostic in result.diagnostics:
        if diagnostic.source and not diagnostic.accepted:
            findings.setdefault(diagnostic.source, []).append(diagnostic)
    shares = [{part.name: part.share for part in line_shares(run)} if _has_shares(run, runs) else None for run in runs]
    columns = [Column("line"), Column("code", "code"), Column("ops")]
    columns += map(_column, runs, ["accumulated_error" if of_run is None else "share" for of_run in shares])
    columns.append(Column("found", "sentence"))
    rows = []
    for file, numbers in files.items():
        rows.append(Row([file, *[None] * (len(columns) - 1)]))
        for source in (f"{file}:{number}" for number in sorted(numbers)):
            here = [calls_of.get(source, Calls(run)) for run, calls_of in zip(runs, by_line, strict=True)]
            ops = dict.fromkeys(short_op(op) for calls in here for op in calls.ops)
            figures: list[Any] = [
                calls.worst_error() if of_run is None else of_run.get(source)
                for calls, of_run in zip(here, shares, strict=True)
            ]
            code, remark = result.source_lines[source], _remark(here, findings.get(source, ())) or None
            rows.append(Row([source.rpartition(":")[2], code, some([*ops]), *figures, remark], depth=1))
    return Table(columns, rows, "lines of code", headings=2, searchable=True).with_content()


def _has_shares(run: Run, runs: Sequence[Run]) -> bool:
    """Whether shares of its error are shown: of runs that fail by it, and of the first."""
    return trusted_budget(run) is not None and (fails_by_error(run) or run is runs[0])


def _column(run: Run, name: str) -> Column:
    """The column of one quantity in one run: ``half error``."""
    quantity = QUANTITIES[name]
    return Column(f"{label(run)} {quantity.of_call}", quantity.type, quantity.meaning)


def _remark(here: Sequence[Calls], diagnostics: Sequence[Diagnostic]) -> str:
    """``cholesky: missing-kernel (half); LP302 op-outlier``."""
    by_gap: dict[str, list[str]] = {}
    for calls in here:
        for gap in calls.gaps:
            by_gap.setdefault(f"{short_op(gap.op)}: {gap.kind}", []).append(label(calls.run))
    gaps = [f"{text} ({', '.join(dict.fromkeys(names))})" for text, names in by_gap.items()]
    kinds = {gap.kind for calls in here for gap in calls.gaps}
    codes = {f"{d.code} {d.name}" for d in diagnostics if d.matters is not False and d.name not in kinds}
    return "; ".join([*gaps, *sorted(codes)])


# -- modules


def module_table(runs: Sequence[Run]) -> Table:
    """The tree of modules in which any of ``runs`` has an op or a gap, submodules included."""
    by_path = [calls_inside(run) for run in runs]
    # each path once, children directly below their parent, siblings in order of execution
    below: dict[str, list[str]] = {}
    for path in dict.fromkeys(path for calls_of in by_path for path in calls_of):
        if path:
            below.setdefault(path.rpartition(".")[0], []).append(path)
    paths, stack = list[str](), [""]
    while stack:
        paths.append(stack.pop())
        stack.extend(reversed(below.get(paths[-1], [])))

    def depth(path: str) -> int:
        return path.count(".") + bool(path)

    # of too many, the deepest are left out
    listed = set(sorted(paths, key=depth)[:MOST_ROWS])
    with_shares = [run for run in runs if _has_shares(run, runs)]
    shares = [_shares_inside(run) for run in with_shares]
    columns = [Column("module", "module"), *(_column(run, "accumulated_error") for run in runs)]
    columns += [_column(run, "share") for run in with_shares]
    columns.append(Column("calls without a kernel", "number"))
    rows = []
    for path in filter(listed.__contains__, paths):
        here = [calls_of.get(path, Calls(run)) for run, calls_of in zip(runs, by_path, strict=True)]
        figures = [*(calls.worst_error() for calls in here), *(of_run.get(path) for of_run in shares)]
        gaps = max(calls.without_kernel for calls in here)
        rows.append(Row([path, *figures, gaps or None], depth=depth(path), module=path))
    left_out = len(paths) - len(rows)
    return Table(columns, rows, "modules", searchable=True, left_out=left_out).with_content()


def calls_inside(run: Run) -> dict[str, Calls]:
    """Op calls and gaps by module, submodules included, also of one with only an error share."""
    calls_of: dict[str, Calls] = {}
    for module, calls in calls_by(run, "module").items():
        for path in _lineage(module):
            inside = calls_of.setdefault(path, Calls(run))
            inside.positions += calls.positions
            inside.gaps += calls.gaps
    for path in _shares_inside(run):
        calls_of.setdefault(path, Calls(run))
    return calls_of


def _shares_inside(run: Run) -> dict[str, float]:
    """The error share of each module in the budget, submodules and roundings between included."""
    shares: dict[str, float] = {}
    if trusted_budget(run) is None:
        return shares
    for part in module_shares(run):
        # a rounding between modules counts for the model itself
        for path in _lineage(part.name.replace(BETWEEN, "")):
            shares[path] = shares.get(path, 0.0) + part.share
    return shares


def _lineage(path: str) -> list[str]:
    """``["", "a", "a.b"]`` of ``a.b``."""
    parts = path.split(".") if path else []
    return [".".join(parts[:index]) for index in range(len(parts) + 1)]


# -- value ranges


def range_blocks(result: ScanResult, runs: Sequence[Run]) -> Iterator[Block]:
    """Where values leave the range of a run's format or come near its ends; nothing if none do."""
    names = [name for name, quantity in QUANTITIES.items() if quantity.table == "ranges"]
    largest, *others = map(column_of, names)
    columns = [
        Column("module", "module"),
        Column("op", "op"),
        Column("line", "source"),
        largest,
        Column("of the maximum", "percent", "The same, relative to the largest number of the format."),
        *others,
    ]
    for run in runs:
        reported = {(d.module, d.op, d.source) for d in result.diagnostics if d.code in RANGES and d.is_about(run)}
        if not reported or run.basis is None:
            continue
        # what findings are about, and calls that lose values or come close to the limit
        limit, by_place, calls = run.basis.format.largest, dict[Any, Calls](), run.op_calls
        places = zip(calls.module, calls.op, calls.source, strict=True)
        values = zip(places, calls.introduced_inf, calls.flushed, calls.absmax, strict=True)
        for position, (place, lost, flushed, most) in enumerate(values):
            if place in reported or lost or (flushed or 0.0) > 0.01 or (most or 0.0) > limit / 4:
                by_place.setdefault(place, Calls(run)).positions.append(position)
        rows = []
        for place, here in by_place.items():
            top, *figures = map(here.cell, names)
            rows.append(Row([*place, top, None if top is None else top / limit, *figures], module=place[0]))
        rows.sort(key=lambda row: (-(row.cells[5] or 0), -(row.cells[6] or 0.0), -(row.cells[4] or 0.0)))
        if rows:
            chart = charts.magnitudes(run)
            name = f"{counted(len(rows), 'op')} at the ends of the range of {run.basis.format.short}"
            table = Table(columns, rows[:40], name, left_out=max(0, len(rows) - 40)).with_content()
            yield Fold(f"{label(run)}: {name}", list(filter(None, [chart, table])))
