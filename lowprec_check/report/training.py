"""The ways to train in each precision as rows of text: whether they stay near fp32, and what they cost. Never imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lowprec_check.analysis import run_summary, training_status
from lowprec_check.analysis.run_summary import bytes_text, counted, percent, some
from lowprec_check.analysis.training_status import first_way, remarks
from lowprec_check.report.escape import visible
from lowprec_check.schema.recommendation import Recommendation
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.training import BEYOND, WAYS, EpsilonCheck, TrainingSetup, TrainingWay
from lowprec_check.schema.wording import shown

TITLE = "Ways to train"
HINT = (
    "Loss: after the last step. Distance: of the weights from those of fp32, relative to how far these moved. "
    "Moved: how far in the direction of fp32, relative to fp32. Lost: updates of weights that rounding loses. State: weights, their copies and the optimizer's state."
)
JUDGED = (
    "A way fails if, up to its last step, the loss is outside the 99.5 % prediction interval of fp32 runs from other seeds, "
    f"or the weights are more than {BEYOND:g} times as far from those of fp32 as in any such run (not judged with stochastic "
    "rounding, which is right on average), or move less or further in the direction of fp32."
)
HEADS = ["precision", "way", "status", "loss", "distance", "moved", "lost", "state", "why"]
FIGURES = HEADS[3:8]
"""Columns of numbers."""


class WayRow(NamedTuple):
    """One way to train in one precision, as strings."""

    run: str
    way: str
    status: str
    loss: str
    """After the last step."""
    distance: str
    """Of the weights to those of fp32, after the last step."""
    progress: str
    """How far the weights moved in the direction of fp32, relative to fp32; 100 % is as far."""
    lost: str
    state: str
    why: str
    recommended: bool
    is_news: bool
    """Whether it tells a reader more than the table of runs and the rows before it."""


def way_rows(result: ScanResult) -> list[WayRow]:
    """What fp32 and its other seeds reach, then each way of each run; empty if nothing was trained."""
    setup = result.training
    if setup is None:
        return []
    found = [row for run in result.runs if not run.is_reference for row in _rows_of(run, setup, result.recommendation)]
    return [*_references(result, setup), *found] if found else []


def news(rows: list[WayRow]) -> list[WayRow]:
    """Those of :func:`way_rows` that a short report shows; the reference only beside others."""
    kept = [row for row in rows if row.is_news]
    return kept if any(row.status != "reference" for row in kept) else []


def _references(result: ScanResult, setup: TrainingSetup) -> Iterator[WayRow]:
    reference = run_summary.reference_of(result.runs)
    way = first_way(reference) if reference is not None else None
    state = "–" if way is None else size_text(way.state_bytes)
    loss = loss_text(setup.losses[-1]) if setup.losses else "–"
    yield WayRow("fp32", way_name(way), "reference", loss, "–", "–", "–", state, "", recommended=False, is_news=True)
    if setup.seeds:
        band = " – ".join(apart(last_band(setup)))
        distance = figure(setup.distances[-1]) if setup.distances else "–"
        seeds = counted(setup.seeds, "other seed")
        yield WayRow(
            "fp32", seeds, "reference", band or "–", distance, "–", "–", "–", "", recommended=False, is_news=True
        )


def last_band(setup: TrainingSetup) -> list[float]:
    """The lowest and the highest loss of fp32 runs from other seeds after the last step; empty if unknown."""
    if not (setup.losses and setup.loss_low and setup.loss_high):
        return []
    return [setup.losses[0] + bounds[-1] for bounds in (setup.loss_low, setup.loss_high)]


def _rows_of(run: Run, setup: TrainingSetup, advice: Recommendation | None) -> Iterator[WayRow]:
    ways = run.training.ways if run.training is not None else []
    for way, is_news in zip(ways, _news(ways, setup), strict=True):
        yield WayRow(
            visible(run_summary.label(run)),
            way_name(way),
            way.status,
            final_loss(way),
            figure(way.distances[-1]) if _ends(way) and way.distances else "–",
            f"{100 * way.progress:.0f} %" if _ends(way) and way.progress is not None else "–",
            share_figure(way.lost_updates),
            size_text(way.state_bytes),
            visible(why(way, setup), 400),
            _is_recommended(run, way, advice),
            is_news,
        )


def _is_recommended(run: Run, way: TrainingWay, advice: Recommendation | None) -> bool:
    if advice is None or advice.stay_in_fp32 or way.status != "ok" or way.name != advice.way:
        return False
    asked = (advice.precision, advice.backend, advice.memory_format, advice.keep_fp32)
    return (run.base or run.precision, run.backend, run.memory_format, run.keep_fp32) == asked


def _news(ways: Sequence[TrainingWay], setup: TrainingSetup) -> list[bool]:
    """Of a precision that passes, ways that do not; of one that fails, ways that do not fail as the first does, with that one."""
    if not ways or ways[0].status == "ok":
        return [way.status != "ok" for way in ways]
    differs = [(way.status, why(way, setup)) != (ways[0].status, why(ways[0], setup)) for way in ways]
    return [any(differs), *differs[1:]]


def left_out(rows: Sequence[WayRow], shown: Sequence[WayRow]) -> str:
    """``4 more ways to train pass, 2 fail as their precision does``: those of ``rows`` that are not ``shown``; empty if all are."""
    hidden = [row.status == "ok" for row in rows if row not in shown and row.status != "reference"]
    passing, failing = sum(hidden), len(hidden) - sum(hidden)
    more = " more" if shown else ""
    parts = (
        [f"{passing}{more} {'way' if passing == 1 else 'ways'} to train {'passes' if passing == 1 else 'pass'}"]
        if passing
        else []
    )
    if failing:
        what = "" if passing else f"{more} {'way' if failing == 1 else 'ways'} to train"
        parts.append(f"{failing}{what} {'fails as its' if failing == 1 else 'fail as their'} precision does")
    return ", ".join(parts)


def why(way: TrainingWay, setup: TrainingSetup) -> str:
    """Why it fails, in which step, what ``GradScaler`` did, and whether the time was too short for all steps."""
    found = remarks(way, setup)
    return found.text if found is not None else ""


def _ends(way: TrainingWay) -> bool:
    """Whether its last loss is that of its last step."""
    return way.status in ("ok", "inaccurate") and len(way.losses) > 1


def loss_text(loss: float | None) -> str:
    """``1.412``; ``Inf/NaN`` for ``None``."""
    return shown(loss, "loss")


def way_name(way: TrainingWay | None) -> str:
    """How the way is shown."""
    return shown_name("plain" if way is None else way.name)


def shown_name(name: str) -> str:
    """The name of a way as it is shown; one that this version does not know as it is saved."""
    return visible(WAYS.get(name, name))


def remedies(run: Run) -> str:
    """``fp32 master weights, Kahan summation``: the ways of ``run`` that pass, if the first does not.

    One that also works without a ``GradScaler`` is named once.
    """
    return some(training_status.remedies(run), most=2)


# -- steps with gradients of zero

_IMPLEMENTATIONS = {"loop": "foreach=False", "foreach": "foreach=True", "fused": "fused=True"}


def epsilon_lines(result: ScanResult) -> Iterator[str]:
    """Runs in which a step with gradients of zero makes weights NaN or Inf, with the implementations of the optimizer that do."""
    for run in result.runs:
        checks = run.training.epsilon if run.training is not None else []
        bad = [check for check in checks if check.nonfinite]
        if bad:
            share = percent(max(check.nonfinite for check in bad))
            fine = _implementations([check for check in checks if not check.nonfinite and check.error is None])
            yield visible(
                f"{visible(run_summary.label(run))}: a step with gradients of zero makes {share} of the weights NaN or Inf "
                f"({_implementations(bad)}{f'; none with {fine}' if fine else ''})",
                600,
            )


def _implementations(checks: Sequence[EpsilonCheck]) -> str:
    return ", ".join(_IMPLEMENTATIONS.get(check.implementation, "the optimizer as given") for check in checks)


# -- figures


def final_loss(way: TrainingWay) -> str:
    """The loss after the last step; ``–`` if it did not get there."""
    if way.status == "nonfinite":
        return loss_text(None)
    return loss_text(way.losses[-1]) if _ends(way) else "–"


def figure(value: float, digits: int = 2) -> str:
    """``0.021``."""
    return f"{value:.{digits}g}"


def apart(values: Sequence[float]) -> list[str]:
    """``values`` with three digits, or as many more as show that they differ."""
    for digits in range(3, 8):
        shown = [figure(value, digits) for value in values]
        if len(set(shown)) == len(set(values)):
            break
    return shown if values else []


def share_figure(share: float | None) -> str:
    """``96.2 %``; ``0 %`` for none; ``–`` if it is unknown or has no meaning."""
    return "–" if share is None else percent(share) if share else "0 %"


def size_text(size: int | None) -> str:
    """``1.5 GiB``, ``12.5 MiB``."""
    if size is None:
        return "–"
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else bytes_text(size)
