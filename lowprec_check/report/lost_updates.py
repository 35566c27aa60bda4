"""How much of what training changes is lost to rounding: weights, buffers, state of the optimizer, averages. Never imports torch."""

from __future__ import annotations

from typing import NamedTuple

from lowprec_check.analysis.run_summary import shorten
from lowprec_check.report.escape import visible
from lowprec_check.report.summary import label
from lowprec_check.report.training import share_figure
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.training import LostUpdates, Values, decay_lost_of, lost_of

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
_KEY = " · "
"""Between a parameter and the key of its state in a name."""
_MATTERS = 0.001
_LONGEST_NAME = 80


class LostRow(NamedTuple):
    """Tensors of one kind in one run, as strings."""

    run: str
    values: str
    tensors: str
    elements: str
    lost: str
    """Over all of them."""
    decay: str
    """The same of weight decay alone."""
    worst: str
    """The one that loses most, with its share."""


def lost_rows(result: ScanResult) -> list[LostRow]:
    """A row for each kind of tensor, for each parameter group and each key of the optimizer's state, in each run."""
    return [
        LostRow(
            label(run),
            kind.name,
            f"{len(kind.tensors):,}",
            f"{sum(one.elements for one in kind.tensors):,}",
            share_figure(kind.lost),
            share_figure(kind.decay),
            visible(_worst(kind)) if kind.lost else "",
        )
        for run in result.runs
        for kind in _kinds(run)
    ]


def lost_lines(result: ScanResult) -> list[str]:
    """``bfloat16: weights 96.2 % (most in fc.weight, 99 %), their weight decay 100 %; buffers 22 %``, for runs that lose some."""
    lines = []
    for run in result.runs:
        kinds = [kind for kind in _kinds(run) if max(kind.lost, kind.decay or 0.0) >= _MATTERS]
        if kinds:
            lines.append(visible(f"{label(run)}: {'; '.join(map(_told, kinds))}", 600))
    return lines


class _Kind(NamedTuple):
    """Tensors that belong together."""

    name: str
    tensors: list[LostUpdates]
    lost: float
    decay: float | None


def _kinds(run: Run) -> list[_Kind]:
    """Weights by their parameter group if there are several, buffers, the optimizer's state by its key, averages."""
    updates = run.training.lost_updates if run.training is not None else []
    several = len({found.group for found in updates if found.values == "weight"}) > 1
    kinds: dict[str, list[LostUpdates]] = {}
    for kind in _NAMES:
        for found in updates:
            if found.values == kind:
                kinds.setdefault(_kind_name(found, several), []).append(found)
    return [_Kind(name, tensors, lost_of(tensors) or 0.0, decay_lost_of(tensors)) for name, tensors in kinds.items()]


def _kind_name(found: LostUpdates, several: bool) -> str:
    """``weights of group 1``, ``optimizer state exp_avg``."""
    name = _NAMES[found.values]
    if found.values == "optimizer state":
        return f"{name} {visible(shorten(found.name.rpartition(_KEY)[2], _LONGEST_NAME))}"
    return (
        f"{name} of group {found.group}" if found.values == "weight" and several and found.group is not None else name
    )


def _told(kind: _Kind) -> str:
    alone = len(kind.tensors) == 1
    most = f" ({_name(kind.tensors[0])})" if alone else f" (most in {_worst(kind)})" if kind.lost else ""
    decayed = f", their weight decay {share_figure(kind.decay)}" if (kind.decay or 0.0) >= _MATTERS else ""
    return f"{kind.name} {share_figure(kind.lost)}{most}{decayed}"


def _worst(kind: _Kind) -> str:
    most = max(kind.tensors, key=lambda one: one.lost)
    return f"{_name(most)}, {share_figure(most.lost)}"


def _name(found: LostUpdates) -> str:
    """Of the optimizer's state, the parameter."""
    parameter = found.name.rpartition(_KEY)[0] if found.values == "optimizer state" else ""
    return shorten(parameter or found.name, _LONGEST_NAME)
