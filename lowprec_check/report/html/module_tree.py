"""The heat map of modules and precisions: each cell holds the worst op call in a module and its submodules, or their sum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lowprec_check.analysis.error_shares import BETWEEN, module_shares, share_text, trusted_budget
from lowprec_check.report.escape import visible
from lowprec_check.report.html.error_levels import LEVEL_TEXTS, error_level
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.run_key import Phase
from lowprec_check.schema.scan_result import Run

MOST_ROWS = 1200
"""The deepest modules beyond this number are left out, so that the page opens quickly."""

OPEN_ROWS = 36
"""At first, as many levels are open as fit into about this number of rows."""


class Shade(NamedTuple):
    """A figure and the level of its colour: 0 (none) to 8 (worst). Errors, shares and times have levels of their own."""

    text: str
    level: int


class ModuleCell(NamedTuple):
    """One module in one run."""

    accumulated: Shade
    local: Shade
    time: Shade
    share: Shade
    """The sum over its ops."""
    gaps: int
    phases: dict[Phase, Shade]
    """The accumulated error in each phase of a training step; empty if only the forward pass was run."""


class Node(NamedTuple):
    """One row of the tree."""

    path: str
    name: str
    depth: int
    parent: int
    """The row of the parent; -1 for the model."""
    has_children: bool
    open: bool
    hidden: bool
    """Whether an ancestor is collapsed at first."""
    cells: list[ModuleCell]


class Tree(NamedTuple):
    """Rows in the order in which the modules first ran, and the number of modules left out."""

    nodes: list[Node]
    left_out: int


class _Worst:
    __slots__ = ("accumulated", "calls", "gaps", "local", "nonfinite", "phases", "reference_ms", "share", "time_ms")

    def __init__(self) -> None:
        self.accumulated: float | None = None
        self.local: float | None = None
        self.share: float | None = None
        self.time_ms = self.reference_ms = 0.0
        self.nonfinite = False
        self.gaps = self.calls = 0
        self.phases: dict[Phase, tuple[bool, float | None]] = {}

    def add(self, row: OpCall) -> None:
        self.calls += 1
        self.accumulated = larger(self.accumulated, row.accumulated_error)
        self.local = larger(self.local, row.local_error)
        is_nonfinite = bool(row.introduced_inf or row.introduced_nan)
        self.nonfinite = self.nonfinite or is_nonfinite
        if row.phase is not None:
            lost, error = self.phases.get(row.phase, (False, None))
            self.phases[row.phase] = (lost or is_nonfinite, larger(error, row.accumulated_error))
        if row.time_ms is not None and row.reference_ms is not None:
            self.time_ms += row.time_ms
            self.reference_ms += row.reference_ms

    def cell(self, tolerance: float | None) -> ModuleCell:
        accumulated = error_shade(self.accumulated, tolerance, is_nonfinite=self.nonfinite)
        time = _time_shade(self.time_ms, self.reference_ms)
        phases = {
            phase: error_shade(error, tolerance, is_nonfinite=lost) for phase, (lost, error) in self.phases.items()
        }
        local = error_shade(self.local, tolerance)
        return ModuleCell(accumulated, local, time, _share_shade(self.share), self.gaps, phases)


def larger(known: float | None, value: float | None) -> float | None:
    """The larger of those that are known."""
    return value if known is None else known if value is None else max(known, value)


def error_shade(error: float | None, tolerance: float | None, *, is_nonfinite: bool = False) -> Shade:
    """A rel_l2 and its level, by its ratio to ``tolerance``."""
    level = error_level(error, tolerance, is_nonfinite=is_nonfinite)
    return Shade("Inf/NaN" if is_nonfinite else "–" if error is None else f"{error:.1e}" if error else "0", level)


SLOWER = (0.5, 0.8, 1.25, 2.0, 5.0, 10.0, 50.0)


def _time_shade(here: float, reference: float) -> Shade:
    if here <= 0 or reference <= 0:
        return Shade("–", 0)
    ratio = here / reference
    text = f"{ratio:.2f} ×" if ratio < 10 else f"{ratio:.0f} ×"
    return Shade(text, 1 + sum(ratio > limit for limit in SLOWER))


SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)


def _share_shade(share: float | None) -> Shade:
    if share is None:
        return Shade("–", 0)
    return Shade(share_text(share), 0 if abs(share) < 0.005 else 1 + sum(share > limit for limit in SHARES))


def tolerance_text(run: Run) -> str:
    """``tolerance 1e-2``; empty if the run has none."""
    return f"tolerance {run.tolerance:.2g}" if run.tolerance else ""


class Legend(NamedTuple):
    """What the levels of one colour scale mean."""

    scale: str
    """The prefix of its classes in the style sheet: ``h`` of errors, whose last colours mean "over the tolerance"; ``q`` of amounts."""
    texts: Sequence[str]
    """From level 1 on."""


ERRORS = Legend("h", LEVEL_TEXTS)
TIMES = Legend("q", [*(f"≤ {limit:g} ×" for limit in SLOWER), f"> {SLOWER[-1]:g} ×"])
PARTS = Legend("q", [*(f"≤ {limit * 100:g} %" for limit in SHARES), f"> {SHARES[-1] * 100:g} %"])


def build(runs: Sequence[Run]) -> Tree:
    """The tree of all modules in which an op of any of ``runs`` ran or a gap was found."""
    worst = [_worst_by_path(run) for run in runs]
    paths = _in_order(path for found in worst for path in found)
    kept, left_out = _shallowest(paths)
    children = {parent_of(path) for path in kept if path}
    depth_open = _depth_to_open(kept)
    rows = {path: index for index, path in enumerate(kept)}
    nodes, nothing = [], _Worst()
    for path in kept:
        depth = path.count(".") + 1 if path else 0
        nodes.append(
            Node(
                path=visible(path) or "(model)",
                name=visible(path.rpartition(".")[2]) or "(model)",
                depth=depth,
                parent=rows[parent_of(path)] if path else -1,
                has_children=path in children,
                open=depth < depth_open,
                hidden=depth > depth_open,
                cells=[found.get(path, nothing).cell(run.tolerance) for found, run in zip(worst, runs, strict=True)],
            )
        )
    return Tree(nodes, left_out)


def parent_of(path: str) -> str:
    """The path of the module that holds ``path``."""
    return path.rpartition(".")[0]


def _worst_by_path(run: Run) -> dict[str, _Worst]:
    """The worst values by path, submodules included."""
    found: dict[str, _Worst] = {}
    for row in run.op_calls.rows():
        for path in lineage(row.module):
            found.setdefault(path, _Worst()).add(row)
    for part in module_shares(run) if trusted_budget(run) else ():
        for path in lineage("" if part.name == BETWEEN else part.name):
            known = found.setdefault(path, _Worst())
            known.share = (known.share or 0.0) + part.share
    for gap in run.gaps:
        for path in lineage(gap.module):
            found.setdefault(path, _Worst()).gaps += gap.calls
    return found


def lineage(path: str) -> list[str]:
    """``["", "a", "a.b"]`` of ``a.b``."""
    parts = path.split(".") if path else []
    return ["", *(".".join(parts[: index + 1]) for index in range(len(parts)))]


def _in_order(paths: Iterable[str]) -> list[str]:
    """Each path once, children directly below their parent, siblings in the order in which they first ran."""
    below: dict[str, list[str]] = {}
    seen = {""}
    for path in paths:
        if path not in seen:
            seen.add(path)
            below.setdefault(parent_of(path), []).append(path)
    ordered, stack = [], [""]
    while stack:
        path = stack.pop()
        ordered.append(path)
        stack.extend(reversed(below.get(path, [])))
    return ordered


def _shallowest(paths: list[str]) -> tuple[list[str], int]:
    if len(paths) <= MOST_ROWS:
        return paths, 0
    depths = sorted(path.count(".") for path in paths)
    limit = depths[MOST_ROWS - 1]
    kept = [path for path in paths if path.count(".") <= limit][:MOST_ROWS]
    whole = set(kept)
    kept = [path for path in kept if not path or parent_of(path) in whole]
    return kept, len(paths) - len(kept)


def _depth_to_open(paths: list[str]) -> int:
    """The number of levels to open so that about ``OPEN_ROWS`` rows are visible."""
    depths = [path.count(".") + 1 if path else 0 for path in paths]
    best = 1
    for depth in range(1, max(depths, default=0) + 1):
        if sum(d <= depth for d in depths) <= OPEN_ROWS:
            best = depth
    return best
