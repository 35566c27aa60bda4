"""The operators that a test suite uses and their support in low precision, as text, JSON, Markdown and HTML. Never imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from tabulate import tabulate

from lowprec_check.analysis.run_summary import shorten, some
from lowprec_check.catalog.aten import AtenSupport
from lowprec_check.catalog.declared import overload_name
from lowprec_check.catalog.records import SHORT, Dtype, State, in_samples
from lowprec_check.report.console import screen
from lowprec_check.report.template import fill
from lowprec_check.schema.base import Struct, encode

WIDTH = 110
SHOWN_TESTS = 3
_WORDS = {"all": "yes", "some": "in part", "none": "no", None: "not known"}
_ORDER: tuple[State | None, ...] = ("none", "some", None, "all")


class OpUse(Struct, frozen=True, kw_only=True):
    """One operator that tests dispatched with floating tensors."""

    op: str
    tests: list[str]
    support: dict[Dtype, AtenSupport]

    @property
    def worst(self) -> int:
        """0 if it does not run in one of the dtypes, 3 if it runs in all."""
        return min(_ORDER.index(support.state) for support in self.support.values())


class Coverage(Struct, frozen=True, kw_only=True):
    """The operators that a run of a test suite used."""

    schema: int = 1
    device: str
    torch: str
    """The torch release whose support is shown."""
    evidence: str
    """``measured`` or ``declared``."""
    recorded_torch: str
    """The torch version that the tests ran with."""
    dtypes: list[Dtype]
    tests: int
    ops: list[OpUse]

    @property
    def gaps(self) -> list[OpUse]:
        """Operators that fail always or sometimes, the worst first."""
        return sorted((use for use in self.ops if use.worst < 2), key=lambda use: (use.worst, use.op))

    @property
    def unknown(self) -> list[OpUse]:
        """Operators that are not in the catalog."""
        return [use for use in self.ops if use.worst == 2]


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
            console.print(f"Not in the catalog: {some(names, 8)} (-v lists all)")
    return printed.text


def _head(found: Coverage) -> list[str]:
    lines = [
        f"{len(found.ops)} operators used by {found.tests} tests · {found.device}, torch {found.torch}, {found.evidence}"
    ]
    if not found.recorded_torch.startswith(f"{found.torch}."):
        lines.append(f"The tests ran with torch {found.recorded_torch}, which the catalog lacks for this device.")
    for dtype in found.dtypes:
        states = [use.support[dtype].state for use in found.ops]
        counts = ", ".join(f"{states.count(state)} {_COUNTED[state]}" for state in reversed(_ORDER))
        lines.append(f"{SHORT[dtype]}: {counts}")
    return lines


_COUNTED = {"all": "run", "some": "in part", "none": "do not run", None: "not known"}


def _table(found: Coverage, uses: Sequence[OpUse]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="")
    for column in ("operator", *(SHORT[dtype] for dtype in found.dtypes), "tests"):
        table.add_column(column, overflow="fold")
    for use in uses:
        table.add_row(overload_name(use.op), *(_words(use, dtype) for dtype in found.dtypes), str(len(use.tests)))
    return table


def _words(use: OpUse, dtype: Dtype) -> str:
    support = use.support[dtype]
    return _WORDS[support.state] + (f", from torch {support.fixed_in}" if support.fixed_in else "")


def _print_use(console: Console, use: OpUse) -> None:
    console.print()
    console.print(Text(f"{overload_name(use.op)}: {_why(use)}"))
    for test in use.tests[:SHOWN_TESTS]:
        console.print(Padding(Text(test), (0, 0, 0, 6)))
    if len(use.tests) > SHOWN_TESTS:
        console.print(Padding(Text(f"and {len(use.tests) - SHOWN_TESTS} more"), (0, 0, 0, 6)))


def _why(use: OpUse) -> str:
    """How it fails, in the first dtype in which it fails."""
    support = next((s for s in use.support.values() if s.state in ("none", "some")), None)
    if support is None:
        return ""
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
    return ["operator", *(SHORT[dtype] for dtype in found.dtypes), "tests", "why"]


def _rows(found: Coverage) -> list[list[str]]:
    uses = sorted(found.ops, key=lambda use: (use.worst, use.op))
    return [
        [overload_name(use.op), *(_words(use, dtype) for dtype in found.dtypes), str(len(use.tests)), _why(use)]
        for use in uses
    ]


RENDERERS: dict[str, Callable[[Coverage], str]] = {
    ".json": coverage_json,
    ".md": coverage_markdown,
    ".html": coverage_html,
}
"""By the suffix of the file."""
