"""The section with the shares of the error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lowprec_check.analysis.error_shares import module_shares, trusted_budget
from lowprec_check.analysis.run_summary import candidates, degenerate_output, label
from lowprec_check.report.blocks import Block, Column, Fold, Row, Table
from lowprec_check.report.feature_parts import Section
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.statements import Statement, module_name

_ESTIMATED = (
    "What goes with the module in fp32 and not with those inside it, "
    "by following each rounding error to the output. These add up to 1."
)
_MEASURED = (
    "What went in a plain run with this module alone in fp32, with all inside. "
    "These overlap, and hold chance of that run."
)
_LEAST_SHARE = 0.0005
_SHOWN_MODULES = 8


def _shares(result: ScanResult, said: Sequence[Statement]) -> Iterator[Block]:
    """The modules with the largest shares of the error, of each run that fails by it."""
    for run in candidates(result.runs):
        budget = trusted_budget(run)
        if budget is None or run.status == "ok" or degenerate_output(run, result.runs) is not None:
            continue
        predicted = max(1.0, 1.0 - (budget.unexplained or 0.0))  # more than the error of the run, which sentences say
        parts = [part._replace(share=part.share / predicted) for part in module_shares(run)]
        parts = [part for part in parts if abs(part.share) >= _LEAST_SHARE]
        measured = {module.module: module.measured for module in budget.modules}
        # the largest of either sign, then those that cancel last
        largest = sorted(
            sorted(parts, key=lambda part: -abs(part.share))[:_SHOWN_MODULES], key=lambda part: -part.share
        )
        rows = []
        for part in largest:
            name, op = part.name or module_name(part.name), part.largest
            cells = [name, part.share, measured.get(part.name), op.op, op.source]
            rows.append(Row(cells, module=part.name))
        # what is not listed, so that the column adds up to 1
        unexplained = max(0.0, budget.unexplained or 0.0)
        rest = 1.0 - sum(part.share for part in largest) - unexplained
        sums = (
            ("other modules", rest),
            ("choices that differ from fp32", budget.decisions),
            ("not explained", unexplained - budget.decisions),
        )
        rows += [Row([name, share, None, None, None]) for name, share in sums if abs(share) >= _LEAST_SHARE]
        columns = [
            Column("module", "text"),
            Column("estimated share", "share", _ESTIMATED),
            Column("measured alone", "share", _MEASURED),
            Column("largest op", "op"),
            Column("line", "source"),
        ]
        title = f"Shares of the squared output error, by module: {label(run)}"
        yield Fold(title, [Table(columns, rows, title)], detail="more")


SECTION = Section("findings", _shares)
