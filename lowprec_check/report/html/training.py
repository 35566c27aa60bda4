"""What a training scan adds to the page: the ways to train, their trajectories as data of two charts, gradients, lost updates."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from lowprec_check.report import gradients, lost_updates
from lowprec_check.report import training as ways
from lowprec_check.report.escape import visible
from lowprec_check.report.html.digits import rounded
from lowprec_check.report.summary import label
from lowprec_check.report.training import way_name
from lowprec_check.schema.base import encoded
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.training import BEYOND, TrainingSetup, TrainingWay

MOST_POINTS = 600
"""Steps drawn of each run; of a longer one, every second, third, …"""
MOST_WAYS = 12
"""Lines in a chart."""
EVERY_PRECISION = "every precision, each in its first way"
_KIND = {"ok": "ok", "reference": "none", "skipped": "none", "inaccurate": "warn", "unjudged": "warn"}


def section(result: ScanResult) -> dict[str, Any] | None:
    """The values of the template; ``None`` if the model was not trained."""
    rows = ways.way_rows(result)
    if result.training is None:
        return None
    return {
        "title": ways.TITLE,
        "hint": f"{ways.HINT} {ways.JUDGED}",
        "heads": ways.HEADS,
        "ways": [row._asdict() | {"kind": _KIND.get(row.status, "bad")} for row in rows],
        "notes": list(ways.epsilon_lines(result)),
        "groups": [name for name, _ in _groups(result)],
        "gradients_title": gradients.TITLE,
        "gradients_hint": gradients.HINT,
        "gradients_heads": gradients.HEADS,
        "gradients": gradients.gradient_tables(result),
        "scales": gradients.scale_lines(result),
        "lost_title": lost_updates.TITLE,
        "lost_hint": lost_updates.HINT,
        "lost_heads": lost_updates.HEADS,
        "lost": lost_updates.lost_rows(result),
    }


def _groups(result: ScanResult) -> list[tuple[str, list[tuple[str, TrainingWay]]]]:
    """The ways that a chart shows together: the first of each precision, then all of each precision."""
    trained = [run for run in result.runs if not run.is_reference and run.training is not None and run.training.ways]
    first = [(f"{label(run)}, {way_name(way)}", way) for run in trained for way in _ways(run)[:1]]
    each = [(label(run), [(way_name(way), way) for way in _ways(run)][:MOST_WAYS]) for run in trained]
    return [(EVERY_PRECISION, first[:MOST_WAYS]), *each] if first else []


def _ways(run: Run) -> Sequence[TrainingWay]:
    return run.training.ways if run.training is not None else []


def pack(result: ScanResult) -> str:
    """The trajectories as base64 of gzipped JSON; empty if there are none, or of one step only."""
    setup, groups = result.training, _groups(result)
    if setup is None or setup.steps < 2 or not groups:
        return ""
    data = {
        **_reference(setup),
        "groups": [{"label": name, "ways": [_way(*pair, setup) for pair in found]} for name, found in groups],
    }
    return base64.b64encode(gzip.compress(encoded(data, msgspec.json.encode), 6, mtime=0)).decode()


def shown_steps(steps: int) -> list[int]:
    """The steps that are drawn, 0 for the state before the first: at most about :data:`MOST_POINTS`, with the first and the last."""
    every = -(-(steps + 1) // MOST_POINTS)
    return sorted({*range(0, steps + 1, every), steps})


def _reference(setup: TrainingSetup) -> dict[str, Any]:
    """fp32, the range of its other seeds, and the limits of the loss, by step."""
    at = shown_steps(setup.steps)
    first = setup.losses[0] if setup.losses else 0.0
    bounds = (setup.loss_low, setup.loss_high, setup.limit_low, setup.limit_high)
    low, high, limit_low, limit_high = ([first + bound for bound in known] for known in bounds)
    return {
        "steps": at,
        "seeds": setup.seeds,
        "losses": _at(setup.losses, at),
        "low": _at(low, at),
        "high": _at(high, at),
        "limit_low": _at(limit_low, at),
        "limit_high": _at(limit_high, at),
        "farthest": _at(_from_first_step(setup.distances), at),
        "beyond": BEYOND,
    }


def _from_first_step(distances: Sequence[float]) -> list[float | None]:
    """With an entry before the first step, where the weights of all runs are those of fp32."""
    return [None, *distances] if distances else []


def _at(values: Sequence[float | None], steps: Sequence[int]) -> list[float | None]:
    """Those at ``steps``, with enough digits for a chart; ``None`` after the end."""
    return [rounded(values[step], 5) if step < len(values) else None for step in steps]


def _way(name: str, way: TrainingWay, setup: TrainingSetup) -> dict[str, Any]:
    at = shown_steps(setup.steps)
    return {
        "label": name,
        "status": way.status,
        "kind": _KIND.get(way.status, "bad"),
        "why": visible(ways.why(way, setup), 400),
        "losses": _at(way.losses, at),
        "distances": _at(_from_first_step(way.distances), at),
        "marks": list(_marks(way, visible(ways.why(way, setup), 400))),
    }


def _marks(way: TrainingWay, note: str) -> Iterator[dict[str, Any]]:
    """Where it leaves the range of the seeds, and where its loss is no longer finite."""
    found = way.divergence
    values = [] if found is None else way.losses if found.what == "loss" else _from_first_step(way.distances)
    if found is not None and found.step < len(values) and values[found.step] is not None:
        chart = "losses" if found.what == "loss" else "distances"
        yield {"chart": chart, "step": found.step, "value": values[found.step], "note": note}
    if None in way.losses:
        yield {"chart": "losses", "step": way.losses.index(None), "value": None, "note": note}
