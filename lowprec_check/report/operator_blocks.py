"""Op calls taken together, of an op, a module or a line, and the table of operators of each run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from lowprec_check.analysis.error_shares import trusted_budget
from lowprec_check.analysis.run_summary import label
from lowprec_check.report.blocks import Block, Column, ErrorOf, Fold, Row, Table
from lowprec_check.schema.op_calls import QUANTITIES
from lowprec_check.schema.run_key import EAGER
from lowprec_check.schema.scan_result import Gap, Run
from lowprec_check.schema.statements import counted, some
from lowprec_check.schema.verdict import look

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
        return None if not values else sum(values) if quantity.total == "sum" else max(values)

    def cell(self, name: str, tolerance: float | None = None) -> Any:
        """The same as a table shows it: the accumulated error beside a ``tolerance``, and infinite if values became Inf or NaN."""
        value, kind = self.total(name), QUANTITIES[name].type
        if name == "accumulated_error" and self.total("introduced_nan"):
            return ErrorOf(None, tolerance, "Inf/NaN")
        if value is None or (kind == "share" and trusted_budget(self.run) is None):
            return None
        if kind in ("number", "percent"):
            return value or None
        return ErrorOf(value, tolerance) if name == "accumulated_error" else value

    def worst_error(self) -> Any:
        """The largest accumulated error, beside the tolerance of a run that fails."""
        return self.cell("accumulated_error", None if self.run.status == "ok" else self.run.tolerance)


def calls_by(run: Run, field: Literal["op", "module", "source"]) -> dict[str, Calls]:
    """The op calls and gaps of ``run``, by their op, module or line; those without a line are left out."""
    found = defaultdict[str, Calls](lambda: Calls(run))
    for position, key in enumerate(getattr(run.op_calls, field)):
        if key is not None:
            found[key].positions.append(position)
    for gap in run.gaps:
        key = getattr(gap, field)
        if key is not None:
            found[key].gaps.append(gap)
    return found


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
    """A row per op, those without a kernel, with Inf or NaN, and with the largest share or error first; it unfolds its worst calls."""
    found = calls_by(run, "op")
    if not found:
        return None
    columns = [
        Column("op", "op"),
        Column("calls", "number"),
        *map(column_of, _MAIN),
        Column("without a kernel", "number", "Calls that fail in this precision and succeed in fp32."),
        *map(column_of, _OTHERS),
    ]
    most = max(3, min(MOST_CALLS, _ALL_CALLS // len(found)))
    rows = []
    for op, calls in sorted(found.items(), key=lambda item: _order(item[1])):
        figures = {name: calls.cell(name) for name in _OPERATORS} | {"accumulated_error": calls.worst_error()}
        main, others = ([figures[name] for name in names] for names in (_MAIN, _OTHERS))
        cells = [op, len(calls.positions), *main, calls.without_kernel or None, *others]
        rows.append(Row(cells, below=[_worst_calls(calls, most)] if calls.positions else ()))
    return Table(columns, rows, f"operators of {label(run)}", searchable=True).with_content()


def _order(calls: Calls) -> tuple[float, ...]:
    totals = (calls.total(name) or 0.0 for name in ("introduced_nan", "share", "accumulated_error"))
    return (-calls.without_kernel, *(-total for total in totals))


def _worst_calls(calls: Calls, most: int) -> Table:
    known = calls.run.op_calls

    def rank(at: int) -> tuple[float, ...]:
        lost = known.introduced_inf[at] + known.introduced_nan[at]
        return (-lost, -(known.share[at] or 0.0), -(known.accumulated_error[at] or 0.0))

    columns = [Column("module", "module"), Column("line", "source"), Column("shape")]
    names = [name for name in _OPERATORS if QUANTITIES[name].of_call != ""]
    columns += [Column(QUANTITIES[name].of_call or QUANTITIES[name].title, QUANTITIES[name].type) for name in names]
    rows = []
    for at in sorted(calls.positions, key=rank)[:most]:
        figures = map(Calls(calls.run, [at]).cell, names)
        rows.append(Row([known.module[at], known.source[at], known.shape[at], *figures], module=known.module[at]))
    return Table(columns, rows, "the worst calls", left_out=len(calls.positions) - len(rows)).with_content()
