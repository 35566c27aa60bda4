"""How much of what training changes is lost to rounding: weights, buffers, state of the optimizer, averages. Never imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lowprec_check.analysis.run_summary import shorten
from lowprec_check.report.escape import visible
from lowprec_check.report.summary import label
from lowprec_check.report.training import share_figure
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.training import LostUpdates, Values

TITLE = "Lost updates"
HINT = "Share of the updates after which the value is the same, although the same update changes an fp32 copy."
HEADS = ["precision", "values", "tensors", "elements", "lost", "weight decay", "most in"]
FIGURES = HEADS[2:6]
"""Columns of numbers."""

_NAMES: dict[Values, str] = {
    "weight": "weights",
    "buffer": "buffers",
    "optimizer state": "optimizer state",
    "average": "averages of weights",
}
_MATTERS = 0.001
_LONGEST_NAME = 80


class LostRow(NamedTuple):
    """Tensors of one kind in one run, as strings."""

    run: str
    values: str
    tensors: str
    elements: str
    lost: str
    """Over all of them, weighted by their elements."""
    decay: str
    """The same of weight decay alone."""
    worst: str
    """The one that loses most, with its share."""


def lost_rows(result: ScanResult) -> list[LostRow]:
    """A row for each kind of tensor, and for each parameter group of the optimizer, in each run."""
    return [
        LostRow(
            label(run),
            name,
            f"{len(found):,}",
            f"{sum(one.elements for one in found):,}",
            share_figure(_lost(found)),
            share_figure(_decay(found)),
            visible(_worst(found)) if _lost(found) else "",
        )
        for run in result.runs
        for name, found in _kinds(run)
    ]


def lost_lines(result: ScanResult) -> list[str]:
    """``bfloat16: weights 96.2 % (most in fc.weight, 99 %), their weight decay 100 %; buffers 22 %``, for runs that lose some."""
    lines = []
    for run in result.runs:
        kinds = [(name, found) for name, found in _kinds(run) if max(_lost(found), _decay(found) or 0.0) >= _MATTERS]
        if kinds:
            lines.append(visible(f"{label(run)}: {'; '.join(_told(name, found) for name, found in kinds)}", 600))
    return lines


def _told(name: str, found: Sequence[LostUpdates]) -> str:
    decay = _decay(found)
    most = f" (most in {_worst(found)})" if len(found) > 1 and _lost(found) else f" ({_name(found[0])})"
    decayed = f", their weight decay {share_figure(decay)}" if decay is not None and decay >= _MATTERS else ""
    return f"{name} {share_figure(_lost(found))}{most}{decayed}"


def _kinds(run: Run) -> list[tuple[str, list[LostUpdates]]]:
    """The tensors of each kind, weights by their parameter group if there are several."""
    updates = run.training.lost_updates if run.training is not None else []
    several = len({found.group for found in updates if found.values == "weight"}) > 1
    kinds: dict[str, list[LostUpdates]] = {}
    for kind, name in _NAMES.items():
        for found in updates:
            if found.values == kind:
                in_group = (
                    f" of group {found.group}" if kind == "weight" and several and found.group is not None else ""
                )
                kinds.setdefault(f"{name}{in_group}", []).append(found)
    return list(kinds.items())


def _lost(found: Sequence[LostUpdates]) -> float:
    return _mean((one.lost, one.elements) for one in found) or 0.0


def _decay(found: Sequence[LostUpdates]) -> float | None:
    return _mean((one.decay_lost, one.elements) for one in found if one.decay_lost is not None)


def _mean(shares: Iterable[tuple[float, int]]) -> float | None:
    """Weighted by the elements; ``None`` if there are none."""
    pairs = list(shares)
    total = sum(elements for _, elements in pairs)
    return sum(share * elements for share, elements in pairs) / total if total else None


def _worst(found: Sequence[LostUpdates]) -> str:
    most = max(found, key=lambda one: one.lost)
    return f"{_name(most)}, {share_figure(most.lost)}"


def _name(found: LostUpdates) -> str:
    return shorten(found.name, _LONGEST_NAME)
