"""The operators that a test suite uses and their support in low precision, as text, JSON, Markdown and HTML. Never imports torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from tabulate import tabulate

from lowprec_check.analysis.run_summary import counted, shorten, some
from lowprec_check.catalog.aten import AtenSupport, AutocastDtype
from lowprec_check.catalog.declared import overload_name
from lowprec_check.catalog.numbers import Numbers
from lowprec_check.catalog.records import State, in_samples
from lowprec_check.report.console import screen
from lowprec_check.report.escape import workflow_command
from lowprec_check.report.template import fill
from lowprec_check.schema.base import Struct, encode
from lowprec_check.schema.precisions import PRECISIONS

SCHEMA = 1
WIDTH = 110
SHOWN_TESTS = 3
Cell = Literal["runs", "low", "fp32", "inputs", "some", "none", "unknown", "inapplicable"]
"""What a precision does to an operator; the first four run, the last three of them under autocast."""
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
_BY_POLICY: dict[AutocastDtype | None, Cell] = {"low": "low", "inputs": "inputs", "fp32": "fp32", None: "runs"}
_ORDER: tuple[State | None, ...] = ("none", "some", None, "all")


def cell_of(support: AtenSupport) -> Cell:
    """The words for an operator in one precision."""
    if not support.applies:
        return "inapplicable"
    if support.state == "all":
        return _BY_POLICY[support.autocast]
    return support.state or "unknown"


class OpUse(Struct, frozen=True, kw_only=True):
    """One operator that tests dispatched."""

    op: str
    """The overload name, ``aten.mm.default``."""
    tests: list[str]
    """The tests that dispatched it."""
    numbers: Numbers = "floating"
    """The strongest numbers that any test called it with; see :mod:`lowprec_check.catalog.numbers`."""
    support: dict[str, AtenSupport]
    """By the names in :attr:`Coverage.dtypes`."""
    sources: list[str] = []
    """Only of gaps: the lines of the project that call it, ``src/net.py:41``; else those of the tests."""

    @property
    def worst(self) -> int:
        """0 if it does not run in one of the dtypes, 3 if it runs in all, 4 if none applies."""
        states = [_ORDER.index(support.state) for support in self.support.values() if support.applies]
        return min(states, default=len(_ORDER))

    @property
    def is_gap(self) -> bool:
        """Whether it fails always or sometimes in one of the dtypes."""
        return self.worst < _ORDER.index(None)


class Coverage(Struct, frozen=True, kw_only=True):
    """The operators that a run of a test suite used."""

    schema: int = SCHEMA
    """The version of the format."""
    device: str
    """The device that support is told for."""
    torch: str
    """The torch release whose support is shown."""
    evidence: str
    """``measured`` or ``declared``."""
    recorded_torch: str
    """The torch version that the tests ran with."""
    dtypes: list[str]
    """What was asked for: the dtype of a cast (``float16``, ``bfloat16``), or autocast (``autocast-fp16``, ``autocast-bf16``)."""
    tests: int
    """Number of tests."""
    ops: list[OpUse]
    """Every operator that a test dispatched."""

    @property
    def gaps(self) -> list[OpUse]:
        """Operators that fail always or sometimes, the worst first."""
        return sorted((use for use in self.ops if use.is_gap), key=lambda use: (use.worst, use.op))

    @property
    def unknown(self) -> list[OpUse]:
        """Operators without data in the catalog."""
        return [use for use in self.ops if use.worst == _ORDER.index(None)]


def coverage_text(found: Coverage, *, every: bool = False) -> str:
    """The counts, a table of the operators with gaps (of all if ``every``), and the tests that use each gap."""
    with screen(WIDTH, color=False) as (console, printed):
        for line in _head(found):
            console.print(line)
        shown = sorted(found.ops, key=lambda use: (use.worst, use.op)) if every else found.gaps
        if shown:
            console.print()
            console.print(_table(found, shown))
        for use in found.gaps:
            _print_use(console, use)
        if found.unknown and not every:
            names = [overload_name(use.op) for use in found.unknown]
            console.print(f"Not known to the catalog: {some(names, 8)} (-v lists all)")
        for line in _not_applicable(found):
            console.print(Text(line))
    return printed.text


def _head(found: Coverage) -> list[str]:
    used = f"{counted(len(found.ops), 'operator')} used by {counted(found.tests, 'test')}"
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
    return f"{_name(dtype)}: of {counted(len(found.ops), 'operator')}, {counts}{rest}"


def _not_applicable(found: Coverage) -> list[str]:
    """For each reason why precisions do not apply, a line with the operators."""
    ops: dict[tuple[str, str], list[str]] = {}
    for use in found.ops:
        reasons: dict[str, list[str]] = {}
        for dtype, support in use.support.items():
            if not support.applies:
                reasons.setdefault(support.message or "", []).append(_name(dtype))
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


def _name(dtype: str) -> str:
    """The precision that a key of the saved coverage stands for: ``half`` for ``float16``."""
    precision = PRECISIONS.find(dtype)
    return precision.name if precision else dtype


def _low(dtype: str) -> str:
    """The 16-bit dtype of a precision, ``bfloat16`` for ``autocast-bf16``."""
    precision = PRECISIONS.find(dtype)
    return precision.format.short if precision else dtype


def _table(found: Coverage, uses: Sequence[OpUse]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="")
    for column in ("operator", *map(_name, found.dtypes), "tests"):
        table.add_column(column, overflow="fold")
    for use in uses:
        table.add_row(overload_name(use.op), *(_words(use, dtype) for dtype in found.dtypes), str(len(use.tests)))
    return table


def _words(use: OpUse, dtype: str) -> str:
    support = use.support[dtype]
    cell = cell_of(support)
    words = _phrase(_WORDS[cell], cell, dtype)
    return words + (f", from torch {support.fixed_in}" if support.fixed_in else "")


def _print_use(console: Console, use: OpUse) -> None:
    console.print()
    console.print(Text(f"{overload_name(use.op)}: {_why(use)}"))
    for test in use.tests[:SHOWN_TESTS]:
        console.print(Padding(Text(test), (0, 0, 0, 6)))
    if len(use.tests) > SHOWN_TESTS:
        console.print(Padding(Text(f"and {len(use.tests) - SHOWN_TESTS} more"), (0, 0, 0, 6)))


def _why(use: OpUse) -> str:
    """How it fails, in the first dtype in which it fails; else why a dtype does not apply or nothing is known."""
    failing = [support for support in use.support.values() if support.state in ("none", "some")]
    if failing:
        return _failure(failing[0])
    messages = dict.fromkeys(support.message for support in use.support.values() if support.message)
    return "; ".join(message for message in messages if message)


def _failure(support: AtenSupport) -> str:
    failure = f"{support.kind}: {shorten(support.message or '')}{in_samples(support.condition)}"
    return failure if support.kind else support.message or ""


# -- files


def coverage_json(found: Coverage) -> str:
    """All fields as JSON."""
    return encode(found).decode()


def coverage_markdown(found: Coverage) -> str:
    """A table of all operators, the worst first, and the tests that use each gap."""
    lines = ["# Low precision in the tests", "", *(f"{line}  " for line in _head(found)), ""]
    lines += [tabulate(_rows(found), headers=_columns(found), tablefmt="github")] if found.ops else []
    for use in found.gaps:
        lines += ["", f"## {overload_name(use.op)}", "", _why(use), "", *(f"- `{test}`" for test in use.tests)]
    return "\n".join(lines) + "\n"


def coverage_html(found: Coverage) -> str:
    """The same as a self-contained page."""
    gaps = [(overload_name(use.op), _why(use), use.tests) for use in found.gaps]
    return fill("coverage.html.jinja", head=_head(found), columns=_columns(found), rows=_rows(found), gaps=gaps)


def _columns(found: Coverage) -> list[str]:
    return ["operator", *map(_name, found.dtypes), "tests", "why"]


def _rows(found: Coverage) -> list[list[str]]:
    uses = sorted(found.ops, key=lambda use: (use.worst, use.op))
    return [
        [overload_name(use.op), *(_words(use, dtype) for dtype in found.dtypes), str(len(use.tests)), _why(use)]
        for use in uses
    ]


def coverage_github(found: Coverage) -> str:
    """A workflow command of GitHub for each gap, shown in a pull request at the first line that uses it.

    GitHub shows 10 errors and 10 warnings of a step, so the message names further lines.
    """
    return "".join(_annotation(use, found) for use in found.gaps)


def _annotation(use: OpUse, found: Coverage) -> str:
    path, _, line = use.sources[0].rpartition(":")
    failing = [dtype for dtype in found.dtypes if use.support[dtype].state in ("none", "some")]
    level = "error" if use.worst == 0 else "warning"
    verb = "does not run" if use.worst == 0 else "does not always run"
    what = f"{overload_name(use.op)} {verb} in {', '.join(map(_name, failing))} on {found.device}"
    message = f"{_why(use)} ({found.evidence}, torch {found.torch}). Used by {counted(len(use.tests), 'test')}"
    message += f"; also at {some(use.sources[1:])}" if len(use.sources) > 1 else ""
    file = path.replace("\\", "/")
    return workflow_command(level, message, file=file, line=line, title=f"lowprec: {what}") + "\n"


RENDERERS: dict[str, Callable[[Coverage], str]] = {
    ".json": coverage_json,
    ".md": coverage_markdown,
    ".html": coverage_html,
}
"""By the suffix of the file."""
