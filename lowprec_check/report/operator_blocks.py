"""Sums over op calls, made once from the saved result, and the table of operators of each run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lowprec_check.analysis.error_shares import trusted_budget
from lowprec_check.analysis.run_summary import label
from lowprec_check.report.blocks import Block, Column, ErrorOf, Fold, Row, Table
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.run_key import EAGER
from lowprec_check.schema.scan_result import Run
from lowprec_check.schema.statements import counted
from lowprec_check.schema.verdict import look

MOST_CALLS = 20
"""The worst calls of an op that its row unfolds."""
_ALL_CALLS = 300
"""Such calls in one run."""

ACCUMULATED = "Error of the result against fp32, with everything that earlier ops added."
LOCAL = "Error of the op alone: on the same inputs, against the op in fp32."
SHARE = "Part of the squared error of the output that is caused here."


class Total:
    """What happens in a group of op calls: of a line, a module or an op."""

    __slots__ = ("accumulated", "calls", "dtypes", "gaps", "local", "lost", "lost_calls", "ops", "recast", "share")

    def __init__(self) -> None:
        self.calls = self.gaps = self.lost = self.lost_calls = self.recast = 0
        self.local: float | None = None
        self.accumulated: float | None = None
        self.share: float | None = None
        self.dtypes: Counter[str] = Counter()
        self.ops: dict[str, None] = {}

    def add(self, row: OpCall) -> None:
        """Count one call."""
        self.calls += 1
        self.local = larger(self.local, row.local_error)
        self.accumulated = larger(self.accumulated, row.accumulated_error)
        lost = row.introduced_inf + row.introduced_nan
        self.lost, self.lost_calls = self.lost + lost, self.lost_calls + (lost > 0)
        self.recast += row.recast
        self.dtypes[row.dtypes] += 1
        self.ops[row.op] = None
        if row.share is not None:
            self.share = (self.share or 0.0) + row.share

    def worst(self, run: Run) -> ErrorOf | None:
        """The largest accumulated error, beside the tolerance of a run that fails; infinite if values became Inf or NaN."""
        tolerance = None if run.status == "ok" else run.tolerance
        if self.lost:
            return ErrorOf(None, tolerance, "Inf/NaN")
        return None if self.accumulated is None else ErrorOf(self.accumulated, tolerance)


def larger(known: float | None, value: float | None) -> float | None:
    """The larger of those that are known."""
    return value if known is None else known if value is None else max(known, value)


def operator_folds(runs: Sequence[Run]) -> Iterator[Block]:
    """The sums over the calls of each op, a fold per run; the run to look at first is open."""
    for run in runs:
        if run.backend != EAGER and run.explained_by:
            continue
        table = operator_table(run)
        if table is not None:
            failing = look(run.status).tone == "bad"
            yield Fold(
                f"{label(run)}: {counted(len(table.rows), 'operator')}", [table], open=failing and run is runs[0]
            )


class OpTotal(NamedTuple):
    """The calls of one op."""

    total: Total
    calls: list[OpCall]


def by_op(run: Run) -> dict[str, OpTotal]:
    """The sums of each op, and its calls."""
    found: dict[str, OpTotal] = {}
    for row in run.op_calls.rows():
        known = found.setdefault(row.op, OpTotal(Total(), []))
        known.total.add(row)
        known.calls.append(row)
    for gap in run.gaps:
        found.setdefault(gap.op, OpTotal(Total(), [])).total.gaps += gap.calls
    return found


def operator_table(run: Run) -> Table | None:
    """A row per op, those that cause or have the largest error first."""
    found, trusted = by_op(run), trusted_budget(run) is not None
    if not found:
        return None
    columns = [
        Column("op", "op"),
        Column("calls", "number"),
        Column("share of the error", "share", SHARE),
        Column("worst error", "error", ACCUMULATED),
        Column("worst of the op itself", "error", LOCAL),
        Column("dtypes", "text", "Of the inputs and the output, in most of the calls."),
        Column("without a kernel", "number", "Calls that fail in this precision and succeed in fp32."),
        Column("repeated casts", "number", "Casts that repeat or undo another of the same tensor."),
        Column("Inf or NaN", "number", "Values that become Inf or NaN here and are finite in fp32."),
    ]
    most = max(3, min(MOST_CALLS, _ALL_CALLS // len(found)))
    rows = []
    for op, (total, calls) in sorted(found.items(), key=lambda item: _first(item[1].total)):
        cells = [
            op,
            total.calls,
            total.share if trusted else None,
            total.worst(run),
            total.local,
            _dtypes(total),
            total.gaps or None,
            total.recast or None,
            total.lost or None,
        ]
        rows.append(Row(cells, below=[_worst_calls(calls, most, trusted)] if calls else ()))
    return Table(columns, rows, f"operators of {label(run)}", searchable=True).with_content()


def _first(total: Total) -> tuple[float, ...]:
    """What is missing, lost, and the largest share or error come first."""
    return (-total.gaps, -total.lost, -(total.share or 0.0), -(total.accumulated or 0.0))


def _dtypes(total: Total) -> str | None:
    known = [name for name, _ in total.dtypes.most_common() if name]
    return None if not known else known[0] + (f" and {len(known) - 1} more" if len(known) > 1 else "")


def _worst_calls(calls: Sequence[OpCall], most: int, trusted: bool) -> Table:
    def rank(row: OpCall) -> tuple[float, ...]:
        return (-(row.introduced_inf + row.introduced_nan), -(row.share or 0.0), -(row.accumulated_error or 0.0))

    columns = [
        Column("module", "module"),
        Column("line", "source"),
        Column("shape"),
        Column("share", "share"),
        Column("error", "error"),
        Column("of the op itself", "error"),
    ]
    rows = []
    for row in sorted(calls, key=rank)[:most]:
        lost = row.introduced_inf + row.introduced_nan
        error = ErrorOf(None, None, "Inf/NaN") if lost else row.accumulated_error
        rows.append(
            Row(
                [row.module, row.source, row.shape, row.share if trusted else None, error, row.local_error],
                module=row.module,
            )
        )
    return Table(columns, rows, "the worst calls", left_out=len(calls) - len(rows)).with_content()
