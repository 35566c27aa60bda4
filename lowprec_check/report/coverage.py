"""The operators that a test suite uses and their support in low precision as text; the words of all formats. Never imports torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lowprec_check.analysis.coverage_changes import reason_of
from lowprec_check.analysis.run_summary import counted, some
from lowprec_check.analysis.suite_coverage import Cell, Coverage, OpUse, cell_of, precision_of
from lowprec_check.catalog.declared import overload_name
from lowprec_check.report.console import screen
from lowprec_check.schema.precisions import PRECISIONS

WIDTH = 110
SHOWN_TESTS = 3
_WORDS: dict[Cell, str] = {
    "runs": "yes",
    "low": "in {dtype}",
    "fp32": "in fp32",
    "inputs": "as its inputs",
    "some": "in part",
    "none": "no",
    "unknown": "not known",
    "inapplicable": "does not apply",
}
_COUNTED: dict[Cell, str] = {
    "runs": "run",
    "low": "run in {dtype}",
    "fp32": "run in fp32",
    "inputs": "run in the dtype of their inputs",
    "some": "run in part",
    "none": "do not run",
    "unknown": "not known",
}


def coverage_text(found: Coverage, *, every: bool = False) -> str:
    """The counts, a table of the operators with gaps (of all if ``every``), and the tests that use each gap."""
    with screen(WIDTH, color=False) as (console, printed):
        for line in head_lines(found):
            console.print(line)
        shown = sorted(found.ops, key=lambda use: (use.worst, use.op)) if every else found.gaps
        if shown:
            console.print()
            console.print(_table(found, shown))
        for use in found.gaps:
            _print_use(console, found, use)
        if found.unknown and not every:
            names = [overload_name(use.op) for use in found.unknown]
            console.print(f"Not known to the catalog: {some(names, 8)} (-v lists all)")
        for line in _not_applicable(found):
            console.print(Text(line))
    return printed.text


def head_lines(found: Coverage) -> list[str]:
    """What was recorded and looked up, and the counts of each precision."""
    used = f"{counted(len(found.ops), 'operator')} used by {counted(len(found.tests), 'test')}"
    lines = [f"{used} · {found.device}, torch {found.torch}, {found.evidence}"]
    if not found.recorded_torch.startswith(f"{found.torch}."):
        lines.append(f"The tests ran with torch {found.recorded_torch}, which the catalog lacks for this device.")
    return lines + [_counts(found, dtype) for dtype in found.dtypes]


def _counts(found: Coverage, dtype: str) -> str:
    """How many operators of all run, and how many do not."""
    cells = Counter(cell_of(use.support[dtype]) for use in found.ops)
    running = {"low", "fp32", "inputs"} if dtype.startswith("autocast") else {"runs"}
    shown = [cell for cell in _COUNTED if cells[cell] or cell in running | {"some", "none", "unknown"}]
    counts = ", ".join(f"{cells[cell]} {_phrase(_COUNTED[cell], cell, dtype)}" for cell in shown)
    rest = f"; does not apply to {cells['inapplicable']}" if cells["inapplicable"] else ""
    return f"{precision_of(dtype)}: of {counted(len(found.ops), 'operator')}, {counts}{rest}"


def _not_applicable(found: Coverage) -> list[str]:
    """For each reason why precisions do not apply, a line with the operators."""
    ops: dict[tuple[str, str], list[str]] = {}
    for use in found.ops:
        reasons: dict[str, list[str]] = {}
        for dtype, support in use.support.items():
            if not support.applies:
                reasons.setdefault(support.message or "", []).append(precision_of(dtype))
        for reason, names in reasons.items():
            ops.setdefault((", ".join(names), reason), []).append(overload_name(use.op))
    return [
        f"{names} {'do' if ',' in names else 'does'} not apply to {some(uses, 8)}: {reason}"
        for (names, reason), uses in ops.items()
    ]


def _phrase(words: str, cell: Cell, dtype: str) -> str:
    """The words for a cell; under autocast, operators that fail were called with 16-bit inputs, and run on fp32 ones."""
    low = _low(dtype)
    on = f" on {low} inputs" if cell in ("some", "none") and dtype.startswith("autocast") else ""
    return words.format(dtype=low) + on


def _low(dtype: str) -> str:
    """The 16-bit dtype of a precision, ``bfloat16`` for ``autocast-bf16``."""
    precision = PRECISIONS.find(dtype)
    return precision.format.short if precision else dtype


def _table(found: Coverage, uses: Sequence[OpUse]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="")
    for column in ("operator", *map(precision_of, found.dtypes), "tests"):
        table.add_column(column, overflow="fold")
    for use in uses:
        table.add_row(overload_name(use.op), *(words_of(use, dtype) for dtype in found.dtypes), str(len(use.tests)))
    return table


def words_of(use: OpUse, dtype: str) -> str:
    """What a precision does to an operator, in words."""
    support = use.support[dtype]
    cell = cell_of(support)
    words = _phrase(_WORDS[cell], cell, dtype)
    return words + (f", from torch {support.fixed_in}" if support.fixed_in else "")


def _print_use(console: Console, found: Coverage, use: OpUse) -> None:
    console.print()
    console.print(Text(f"{overload_name(use.op)}: {why(use)}"))
    for test in found.tests_of(use)[:SHOWN_TESTS]:
        console.print(Padding(Text(test), (0, 0, 0, 6)))
    if len(use.tests) > SHOWN_TESTS:
        console.print(Padding(Text(f"and {len(use.tests) - SHOWN_TESTS} more"), (0, 0, 0, 6)))


def why(use: OpUse) -> str:
    """How it fails, in the first dtype in which it fails; else why a dtype does not apply or nothing is known."""
    failing = [support for support in use.support.values() if support.state in ("none", "some")]
    if failing:
        return reason_of(failing[0])
    messages = dict.fromkeys(support.message for support in use.support.values() if support.message)
    return "; ".join(message for message in messages if message)
