"""Charts as SVG without scripts: colours are page variables, tooltips native; tables repeat all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

from lowprec_check.analysis.run_summary import candidates, degenerate_output, is_plan_of, label, memory_ratio
from lowprec_check.analysis.speed import speed
from lowprec_check.report.blocks import Chart, SpeedOf, ratio_text, speed_text
from lowprec_check.report.foreign_text import visible
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.precisions import LOW_FORMATS
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import error_figure, limit_figure, module_name, short_op
from lowprec_check.schema.verdict import look

MOST_POINTS = 1500
"""Op calls drawn of a run; of a longer one, the worst of each segment."""
MOST_TIPS = 240
"""Tooltips of a line, each of the worst op call in a strip of the chart."""
_WIDE, _HIGH = 760, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 742, 16, 258
_LETTER = 6.6
"""Width of a letter of a label."""


class _Axis:
    """Places values along one side of a chart."""

    def __init__(self, low: float, high: float, start: float, end: float, *, log: bool) -> None:
        if log:
            low, high = math.log10(low), math.log10(high)
        if high <= low:  # a single value gets an axis too
            high = low + 1
        self.low, self.high, self.start, self.end, self.log = low, high, start, end, log

    def __call__(self, value: float) -> float:
        if self.log:
            value = math.log10(max(value, 1e-300))
        # what lies outside is drawn at the edge
        part = min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))
        return round(self.start + part * (self.end - self.start), 1)

    def decades(self) -> list[float]:
        """The powers of ten in the range, at most 8."""
        exponents = range(math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9) + 1)
        return [10.0**exponent for exponent in exponents[:: max(1, -(-len(exponents) // 8))]]

    def steps(self) -> list[float]:
        """About six round values in the range."""
        size = (self.high - self.low) / 6
        unit = 10.0 ** math.floor(math.log10(size))
        step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= size)
        first = math.ceil(self.low / step)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _tag(name: str, inside: object = "", **attributes: object) -> Markup:
    shown = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items())
    return Markup(f"<{name}{shown}>{escape(inside)}</{name}>")


def _line(x1: float, y1: float, x2: float, y2: float, color: str = "line", **more: object) -> Markup:
    return _tag("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=f"var(--{color})", **more)


def _text(x: float, y: float, text: str, anchor: str = "middle", color: str = "dim", **more: object) -> Markup:
    return _tag("text", text, x=round(x, 1), y=round(y, 1), text_anchor=anchor, fill=f"var(--{color})", **more)


def _svg(name: str, parts: Iterable[Markup]) -> str:
    return _tag("svg", Markup("").join(parts), viewBox=f"0 0 {_WIDE} {_HIGH}", role="img", aria_label=name)


def _frame(x: _Axis, y: _Axis, x_ticks: Sequence[tuple[float, str]], y_name: str, x_name: str) -> Iterator[Markup]:
    ticks, form = y.steps, ".4g"
    if y.log:
        ticks, form = y.decades, ".0e"
    for value in ticks():
        yield _line(_LEFT, y(value), _RIGHT, y(value))
        yield _text(_LEFT - 6, y(value) + 4, f"{value:{form}}", "end")
    for value, shown in x_ticks:
        yield _line(x(value), _BOTTOM, x(value), _BOTTOM + 4)
        yield _text(x(value), _BOTTOM + 17, shown)
    yield _line(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, "dim")
    yield _text((_LEFT + _RIGHT) / 2, _BOTTOM + 36, x_name)
    middle = (_TOP + _BOTTOM) / 2
    yield _text(14, middle, y_name, transform=f"rotate(-90 14 {middle})")


def _path(points: Iterable[tuple[float, float] | None], color: str, **more: object) -> Markup:
    """A line, broken at ``None``."""
    steps, pen = [], "M"
    for point in points:
        if point is None:
            pen = "M"
        else:
            steps.append(f"{pen}{point[0]:g} {point[1]:g}")
            pen = "L"
    if steps:
        return _tag("path", d="".join(steps), fill="none", stroke=f"var(--{color})", **more)
    return Markup()


# -- speed and error of all runs


class _Dot(NamedTuple):
    run: Run
    ratio: float
    low: float
    high: float
    error: float
    tone: str
    tip: str


def tradeoff(result: ScanResult) -> Chart | None:
    """Speed against output error, a dot per run; ``None`` if fewer than two runs have both."""
    dots = []
    for run in candidates(result.runs):
        times = speed(run, result.runs)
        error = run.distance
        if times.ratio is None or error is None or run.status not in ("ok", "unjudged", "inaccurate"):
            continue
        status = look("unjudged" if degenerate_output(run, result.runs) else run.status)
        memory = memory_ratio(run, result.runs)
        size = memory and f", {ratio_text(memory)} the memory"
        speed_of_run = speed_text(SpeedOf(times.told, times.ratio))
        tip = f"{visible(label(run))}: {speed_of_run}, error {error_figure(error)}{size or ''}, {status.word}"
        dots.append(_Dot(run, times.ratio, times.low, times.high, error, status.tone, tip))
    if len(dots) < 2 or result.evidence == "predicted" or not result.is_forward:
        return None
    name = "Speed and output error of each run. Area: peak memory; line: interval of the speed; dashed: tolerance."
    return Chart(name, lambda: _svg(name, _tradeoff(dots, result)), detail="all")


def _tradeoff(dots: Sequence[_Dot], result: ScanResult) -> Iterator[Markup]:
    limits = sorted({dot.run.tolerance for dot in dots if dot.run.tolerance})
    errors = [max(dot.error, 1e-9) for dot in dots] + limits
    slowest = min(0.8, *(max(dot.low, dot.ratio / 4) for dot in dots)) / 1.1
    fastest = max(1.25, *(min(dot.high, dot.ratio * 4) for dot in dots)) * 1.1
    x = _Axis(slowest, fastest, _LEFT, _RIGHT, log=True)  # a wider interval ends at the edge
    y = _Axis(min(errors) / 3, max(errors) * 3, _BOTTOM, _TOP, log=True)
    # fp32 always has its tick, the others where there is room
    ticks = [(1.0, "fp32")]
    for factor in (2, 4, 10, 30, 100, 300, 1.5, 1.2):
        for value, text in ((float(factor), f"{factor} × as fast"), (1 / factor, f"{factor} × slower")):
            if _LEFT + 40 < x(value) < _RIGHT - 40 and all(abs(x(value) - x(tick)) > 85 for tick, _ in ticks):
                ticks.append((value, text))
    yield from _frame(x, y, ticks, "output error", "speed")
    yield _line(x(1), _TOP, x(1), _BOTTOM, "dim", stroke_dasharray="2 3")
    # boxes that labels must not cover: dots and their intervals, then each label itself
    places = {dot.run.key: (x(dot.ratio), y(dot.error)) for dot in dots}
    taken: list[tuple[float, ...]] = [(px - 11, py - 11, px + 11, py + 11) for px, py in places.values()]
    taken += [(x(dot.low), y(dot.error) - 1, x(dot.high), y(dot.error) + 1) for dot in dots]
    for limit in limits:
        formats = {d.run.basis.format.short for d in dots if d.run.tolerance == limit and d.run.basis}
        text = f"tolerance of {' and '.join(sorted(formats))}"
        width = len(text) * _LETTER
        near = [(left, y(limit) + up) for up in (-17, 2) for left in (_RIGHT - width, _LEFT + 4, _RIGHT - 2 * width)]
        at = _first_free(near, width, taken)
        taken += [at, (_LEFT, y(limit) - 1, _RIGHT, y(limit) + 1)]
        yield _line(_LEFT, y(limit), _RIGHT, y(limit), "bad", stroke_dasharray="6 4")
        yield _text(at[0], at[3] - 3, text, "start", "bad")
    # a plan is joined with the run from which its search started
    for dot in dots:
        for base in dots:
            if is_plan_of(dot.run, base.run):
                yield _line(*places[base.run.key], *places[dot.run.key], "dim", stroke_dasharray="1 3", stroke_width=2)
    for dot in dots:
        px, py = x(dot.ratio), y(dot.error)
        color = f"var(--{dot.tone.replace('none', 'dim')})"
        yield _line(x(dot.low), py, x(dot.high), py, "dim", stroke_width=1.5)
        radius = round(9 * math.sqrt(min(2.0, max(0.1, memory_ratio(dot.run, result.runs) or 1.0))), 1)
        tip = _tag("title", dot.tip)
        yield _tag("circle", tip, cx=px, cy=py, r=radius, fill=color, fill_opacity=0.55, stroke=color)
        text = visible(label(dot.run), 40)
        width = len(text) * _LETTER
        near = [(px + 14, py - 8), (px - 14 - width, py - 8), (px - width / 2, py - 28), (px - width / 2, py + 14)]
        near += [(px + 14, py + step * 16 - 8) for step in (-1, 1, -2, 2, -3, 3, -4, 4)]
        at = _first_free(near, width, taken)
        taken.append(at)
        yield _text(at[0], at[3] - 3, text, "start", "ink")


def _first_free(
    places: Sequence[tuple[float, float]], width: float, taken: Sequence[tuple[float, ...]]
) -> tuple[float, ...]:
    """The first box at ``places`` that covers none of ``taken``; the first one if there is none."""
    boxes = [(left, top, left + width, top + 15) for left, top in places]
    fits = [box for box in boxes if box[0] >= _LEFT and box[2] <= _WIDE and box[1] >= 0 and box[3] <= _BOTTOM]
    for left, top, right, bottom in fits:
        if not any(left < box[2] and box[0] < right and top < box[3] and box[1] < bottom for box in taken):
            return left, top, right, bottom
    return (fits or boxes)[0]


# -- the error along the network


def error_along(run: Run) -> Chart | None:
    """The accumulated and the local error of each op call; ``None`` if none was measured."""
    rows = list(enumerate(run.op_calls.rows(), 1))
    errors = [error for _, row in rows for error in (row.accumulated_error, row.local_error) if error]
    if len(errors) < 3:
        return None
    name = f"{visible(label(run))}: error of each op call, in their order; a tooltip names the op"

    def parts() -> Iterator[Markup]:
        limit = run.tolerance
        ends = [*errors, *filter(None, [limit])]
        x = _Axis(1, len(rows), _LEFT + 6, _RIGHT - 6, log=False)
        y = _Axis(max(min(ends), max(ends) * 1e-9) / 1.5, max(ends) * 2, _BOTTOM, _TOP, log=True)
        drawn = list(worst_of_segments(rows, MOST_POINTS))
        yield from _frame(x, y, [(step, f"{step:g}") for step in x.steps() if step >= 1], "relative error", "op call")
        if limit:
            yield _line(_LEFT, y(limit), _RIGHT, y(limit), "bad", stroke_dasharray="6 4")
            yield _text(_RIGHT, y(limit) - 5, f"tolerance {limit_figure(limit)}", "end", "bad")
        # one path for all dots, each a line of no length with round ends, keeps the page small
        local = ((x(at), y(row.local_error)) for at, row in drawn if row.local_error)
        dots = "".join(f"M{px:g} {py:g}h0" for px, py in local)
        yield _tag("path", d=dots, stroke="var(--s2)", stroke_width=3, stroke_linecap="round", stroke_opacity=0.55)
        line = [
            (x(at), y(row.accumulated_error)) if row.accumulated_error else None
            for at, row in drawn
            if row.accumulated_error or row.gives_nonfinite
        ]
        yield _path(line, "s1", stroke_width=1.8)
        for at, row in drawn:
            if row.gives_nonfinite:
                yield _text(x(at), _TOP + 10, "✕", color="bad")
            elif row.outcome == "rescued":
                yield _text(x(at), _BOTTOM - 4, "▲", color="warn")
        # transparent strips over the whole height carry the tooltips
        width = round((_RIGHT - _LEFT) / min(len(rows), MOST_TIPS), 1)
        for at, row in worst_of_segments(rows, MOST_TIPS):
            figures = ["Inf or NaN"] if row.gives_nonfinite else []
            if row.accumulated_error is not None:
                figures.append(f"accumulated {error_figure(row.accumulated_error)}")
            if row.local_error is not None:
                figures.append(f"local {error_figure(row.local_error)}")
            place = ", ".join(filter(None, (module_name(row.module), row.source)))
            tip = _tag("title", visible(f"{at}: {short_op(row.op)} · {place} · {', '.join(figures)}"))
            size = {"width": width, "height": _BOTTOM - _TOP}
            yield _tag("rect", tip, x=round(x(at) - width / 2, 1), y=_TOP, **size, fill="transparent")
        yield _text(_LEFT + 4, 10, "— accumulated", "start", "s1")
        yield _text(_LEFT + 100, 10, "• of the op itself", "start", "s2")
        yield _text(_LEFT + 210, 10, "✕ Inf or NaN", "start", "bad")
        yield _text(_LEFT + 300, 10, "▲ missing kernel", "start", "warn")

    return Chart(name, lambda: _svg(name, parts()), detail="all")


def worst_of_segments(rows: Sequence[tuple[int, OpCall]], most: int) -> Iterator[tuple[int, OpCall]]:
    """At most ``most`` of ``rows``, in order: of each segment the worst."""
    size = -(-len(rows) // most) or 1
    for start in range(0, len(rows), size):
        segment = rows[start : start + size]
        yield max(segment, key=lambda pair: (pair[1].gives_nonfinite, pair[1].accumulated_error or 0.0))


# -- lines by step


class StepLine(NamedTuple):
    """What is drawn for one run."""

    name: str
    color: str
    values: Sequence[float | None]
    """From before the first step on."""


def by_step(title: str, lines: Sequence[StepLine], steps: int, name: str, band: Sequence[Sequence[float]] = ()) -> str:
    """Lines from step to step as SVG, of a quantity of that name; on a log scale without a band."""
    return _svg(title, _by_step(lines, band, steps, name, log=not band))


def _by_step(
    lines: Sequence[StepLine], band: Sequence[Sequence[float]], steps: int, name: str, *, log: bool
) -> Iterator[Markup]:
    values = [v for *_, line in lines for v in line if v is not None and (v > 0 or not log)]
    values += [v for bounds in band for v in bounds]
    low, high = min(values), max(values)
    if not log and lines[0].values:  # a line that explodes does not flatten the others
        reference = [v for v in [*lines[0].values, *(v for bounds in band for v in bounds)] if v is not None]
        room = max(max(reference) - min(reference), 1e-12)
        low, high = max(low, min(reference) - 3 * room), min(high, max(reference) + 3 * room)
        low, high = low - 0.06 * (high - low), high + 0.06 * (high - low)
    if log:
        low, high = low / 1.2, high * 1.2
    x, y = _Axis(0, steps, _LEFT, _RIGHT - 110, log=False), _Axis(low, high, _BOTTOM, _TOP + 6, log=log)
    ticks = [(step, f"{step:g}") for step in x.steps() if step == int(step)]
    yield from _frame(x, y, ticks, name, "step")
    every = max(1, steps // 500)
    if band and band[0]:
        there = [f"{x(step)},{y(value)}" for step, value in enumerate(band[0])]
        back = [f"{x(step)},{y(value)}" for step, value in reversed(list(enumerate(band[1])))]
        yield _tag("polygon", points=" ".join(there + back), fill="var(--dim)", fill_opacity=0.18)
    taken: list[tuple[float, ...]] = []
    for text, color, line in lines:
        points = [
            None if v is None else (x(s), y(v)) for s, v in enumerate(line) if s % every == 0 or s == len(line) - 1
        ]
        tip = _tag("title", text)
        yield _tag("g", tip + _path(points, color, stroke_width=2))
        last = next((point for point in reversed(points) if point is not None), None)
        if last is not None:
            # the name stands behind the end of the line, or above or below others there
            near = [(last[0] + 8, last[1] + 14 * step - 8) for step in (0, -1, 1, -2, 2, -3, 3, -4, -5, -6, -7)]
            at = _first_free(near, 0.9 * len(text) * _LETTER, taken)
            taken.append(at)
            ended = " ✕ Inf/NaN" if line[-1] is None else ""
            yield _text(at[0], at[3] - 3, f"{text[:24]}{ended}", "start", color)


# -- magnitudes


def magnitudes(run: Run) -> Chart | None:
    """Histogram of fp32's magnitudes against the ranges of fp16, bf16 and the run's format."""
    counts: dict[int, int] = {}
    for module in run.magnitudes:
        for exponent, count in enumerate(module.counts, module.lowest):
            counts[exponent] = counts.get(exponent, 0) + count
    # the smallest numbers of fp32 lie at 2**-149
    counts = {exponent: count for exponent, count in counts.items() if count and exponent > -160}
    if not counts or run.basis is None:
        return None
    own = run.basis.format
    name = f"Magnitudes of fp32's values, and the range of {own.short}"

    def parts() -> Iterator[Markup]:
        total, most = sum(counts.values()), max(counts.values())
        low, high = min(-26, *counts) - 1, max(17, *counts) + 2
        x, y = _Axis(low, high, _LEFT, _RIGHT, log=False), _Axis(0, most / total, _BOTTOM, _TOP + 40, log=False)
        ticks = [(e * math.log2(10), f"1e{e:+d}") for e in range(-45, 40, 3) if low < e * math.log2(10) < high]
        yield from _frame(x, y, ticks, "share of the values", "magnitude in fp32")
        for exponent, count in sorted(counts.items()):
            top = y(count / total)
            outside = not -24 <= exponent < 16
            tip = _tag("title", f"2^{exponent}: {count:,} of {total:,} sampled values")
            size = {"width": round(x(exponent + 1) - x(exponent) - 0.5, 1), "height": round(_BOTTOM - top, 1)}
            yield _tag("rect", tip, x=x(exponent), y=top, **size, fill=f"var(--{'bad-bar' if outside else 'bar'})")
        # above the bars a line for each format: thick where it is precise, dashed for subnormals
        for row, low_format in enumerate(dict.fromkeys((*LOW_FORMATS, own))):
            height = _TOP + 6 + 18 * row
            limits = (low_format.smallest_subnormal, low_format.smallest_normal, low_format.largest)
            ends = [x(math.log2(value)) for value in limits]
            yield _line(ends[0], height, ends[1], height, "dim", stroke_width=2, stroke_dasharray="2 3")
            yield _line(ends[1], height, ends[2], height, "dim", stroke_width=5)
            yield _text(ends[1] + 4, height + 13, f"{low_format.short}: full precision; dashed: subnormal", "start")

    return Chart(name, lambda: _svg(name, parts()), detail="all")
