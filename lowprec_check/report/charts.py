"""Charts as SVG without scripts: colours are page variables, tooltips native; tables repeat all."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from markupsafe import Markup, escape

from lowprec_check.analysis.run_summary import candidates, degenerate_output, is_plan_of, label, memory_ratio
from lowprec_check.analysis.speed import speed
from lowprec_check.report.blocks import Chart, ratio_text, shown_speed, speed_text
from lowprec_check.report.foreign_text import visible
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.precisions import LOW_FORMATS
from lowprec_check.schema.run_key import RunKey
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import error_figure, module_name, short_op
from lowprec_check.schema.verdict import look

MOST_POINTS = 700
"""Points of a line; of more op calls, the worst of each segment is drawn."""
MOST_TIPS = 240
"""Tooltips of a chart, each about a strip of it."""
_LETTER = 6.6
"""Width of a letter of a label."""


class _Area(NamedTuple):
    """The size of a chart, and the place of its axes in it."""

    wide: int
    high: int
    left: int
    right: int
    top: int
    bottom: int
    is_wide: bool = True


_WIDE = _Area(760, 300, 66, 742, 16, 258)
_NARROW = _Area(350, 300, 62, 344, 16, 258, is_wide=False)
"""For a phone: as wide as its screen, so that letters keep their size."""


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


def _svg(name: str, draw: Callable[[_Area], Iterable[Markup]]) -> str:
    """The chart twice, of which the page shows the one that fits its width."""

    def drawn(area: _Area) -> str:
        size = f"0 0 {area.wide} {area.high}"
        kind = "wide" if area.is_wide else "narrow"
        return _tag("svg", Markup("").join(draw(area)), class_=kind, viewBox=size, role="img", aria_label=name)

    return drawn(_WIDE) + drawn(_NARROW)


def _frame(
    area: _Area, x: _Axis, y: _Axis, x_ticks: Sequence[tuple[float, str]], y_name: str, x_name: str
) -> Iterator[Markup]:
    ticks, form = y.steps, ".4g"
    if y.log:
        ticks, form = y.decades, ".0e"
    for value in ticks():
        yield _line(area.left, y(value), area.right, y(value))
        yield _text(area.left - 6, y(value) + 4, f"{value:{form}}", "end")
    # of ticks whose labels would overlap, the first
    end = -math.inf
    for value, shown in x_ticks:
        width = len(shown) * _LETTER
        middle = min(max(x(value), width / 2), area.wide - width / 2)
        if middle - width / 2 > end:
            end = middle + width / 2 + 2 * _LETTER
            yield _line(x(value), area.bottom, x(value), area.bottom + 4)
            yield _text(middle, area.bottom + 17, shown)
    yield _line(area.left, area.bottom, area.right, area.bottom, "dim")
    yield _text((area.left + area.right) / 2, area.bottom + 36, x_name)
    middle = (area.top + area.bottom) / 2
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
        error = run.relative_error
        if times.ratio is None or error is None or run.status not in ("ok", "unjudged", "inaccurate"):
            continue
        status = look("unjudged" if degenerate_output(run, result.runs) else run.status)
        memory = memory_ratio(run, result.runs)
        size = memory and f", {ratio_text(memory)} the memory"
        speed_of_run = speed_text(shown_speed(times))
        tip = f"{visible(label(run))}: {speed_of_run}, error {error_figure(error)}{size or ''}, {status.word}"
        dots.append(_Dot(run, times.ratio, times.low, times.high, error, status.tone, tip))
    if len(dots) < 2 or result.evidence == "predicted" or not result.is_forward:
        return None
    name = "Speed and output error of each run. Area: peak memory; line: interval of the speed; dashed: tolerance."
    return Chart(name, lambda: _svg(name, lambda area: _tradeoff(dots, result, area)), detail="all")


def _tradeoff(dots: Sequence[_Dot], result: ScanResult, area: _Area) -> Iterator[Markup]:
    limits = sorted({dot.run.relative_tolerance for dot in dots if dot.run.relative_tolerance})
    errors = [max(dot.error, 1e-9) for dot in dots] + limits
    slowest = min(0.8, *(max(dot.low, dot.ratio / 4) for dot in dots)) / 1.1
    fastest = max(1.25, *(min(dot.high, dot.ratio * 4) for dot in dots)) * 1.1
    x = _Axis(slowest, fastest, area.left, area.right, log=True)  # a wider interval ends at the edge
    y = _Axis(min(errors) / 3, max(errors) * 3, area.bottom, area.top, log=True)
    # fp32 always has its tick, the others where there is room
    ticks = [(1.0, "fp32")]
    for factor in (2, 4, 10, 30, 100, 300, 1.5, 1.2):
        for value, text in ((float(factor), f"{factor} × as fast"), (1 / factor, f"{factor} × slower")):
            if area.left + 40 < x(value) < area.right - 40 and all(abs(x(value) - x(tick)) > 85 for tick, _ in ticks):
                ticks.append((value, text))
    yield from _frame(area, x, y, sorted(ticks), "output error", "speed")
    yield _line(x(1), area.top, x(1), area.bottom, "dim", stroke_dasharray="2 3")
    # boxes that labels must not cover: dots and their intervals, then each label itself
    places = {dot.run.key: (x(dot.ratio), y(dot.error)) for dot in dots}
    taken: list[tuple[float, ...]] = [(px - 11, py - 11, px + 11, py + 11) for px, py in places.values()]
    taken += [(x(dot.low), y(dot.error) - 1, x(dot.high), y(dot.error) + 1) for dot in dots]
    for limit in limits:
        formats = {d.run.basis.format.short for d in dots if d.run.relative_tolerance == limit and d.run.basis}
        text = f"tolerance of {' and '.join(sorted(formats))}"
        width = len(text) * _LETTER
        near = [
            (left, y(limit) + up)
            for up in (-17, 2)
            for left in (area.right - width, area.left + 4, area.right - 2 * width)
        ]
        at = _first_free(near, width, taken, area)
        taken += [at, (area.left, y(limit) - 1, area.right, y(limit) + 1)]
        yield _line(area.left, y(limit), area.right, y(limit), "bad", stroke_dasharray="6 4")
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
        at = _first_free(near, width, taken, area)
        taken.append(at)
        yield _text(at[0], at[3] - 3, text, "start", "ink")


def _first_free(
    places: Sequence[tuple[float, float]], width: float, taken: Sequence[tuple[float, ...]], area: _Area
) -> tuple[float, ...]:
    """The first box at ``places`` that covers none of ``taken``; the first one if there is none."""
    boxes = [(left, top, left + width, top + 15) for left, top in places]
    fits = [
        box for box in boxes if box[0] >= area.left and box[2] <= area.wide and box[1] >= 0 and box[3] <= area.bottom
    ]
    for left, top, right, bottom in fits:
        if not any(left < box[2] and box[0] < right and top < box[3] and box[1] < bottom for box in taken):
            return left, top, right, bottom
    return (fits or boxes)[0]


# -- the error along the model

_LINES = (("s1", ""), ("s2", "7 3"), ("s3", ""), ("s4", "2 3"), ("s5", "7 3 2 3"), ("s6", "12 4"))
"""Colour and dashes of each line: colours that look different to the colour-blind too, and lines
that lie on each other are both seen."""
_SHORTEST = 4
"""Letters of a module's name, with its dots, that are still worth showing."""
_LONGEST = 16
"""Letters of a module's name from which on it may be shortened."""

_Place = tuple[str | None, str, str | None, str, int]
"""Phase, module, line and op of an op call, and which of those that share them it is."""


_NEAREST = 4
"""Units between two ticks of modules."""


class _Segment(NamedTuple):
    """Neighbouring places on the axis that are inside one module."""

    name: str
    first: int
    last: int


def error_along(runs: Sequence[Run]) -> Chart | None:
    """The error of each op's result in each run, in the order of execution; ``None`` if no run has
    three.
    """
    rows_of = {run.key: _calls_by_place(run) for run in runs}
    counts = {run.key: sum(bool(row.accumulated_error) for _, row in rows_of[run.key]) for run in runs}
    if max(counts.values(), default=0) < 3:
        return None
    measured = [run for run in runs if counts[run.key] or any(row.gives_nonfinite for _, row in rows_of[run.key])]
    drawn = measured[: len(_LINES)]
    places = _places([[place for place, _ in rows_of[run.key]] for run in drawn])
    number_of = {place: number for number, place in enumerate(places)}
    lines = {run.key: [(number_of[place], row) for place, row in rows_of[run.key]] for run in drawn}
    name = "The error of each op's result against fp32, in the order of execution; a tooltip names the op."
    if len(drawn) < len(measured):
        name += f" {len(drawn)} of {len(measured)} runs are drawn."
    casts = {label(run): error for run in drawn if (error := _worst_cast(run))}
    if casts:
        worst = max(casts, key=casts.__getitem__)
        name += f" Casts of weights are left out: their error is at most {error_figure(casts[worst])} ({worst})."

    def draw(area: _Area) -> Iterator[Markup]:
        return _error_along(drawn, lines, places, area)

    return Chart(visible(name), lambda: _svg(visible(name), draw), detail="all")


def _calls_by_place(run: Run) -> list[tuple[_Place, OpCall]]:
    """The op calls of a run without the casts of weights, which autocast makes beside the model."""
    calls, counts = list[tuple[_Place, OpCall]](), Counter[tuple[str | None, ...]]()
    knows_reads = any(run.op_calls.reads)
    for row in run.op_calls.rows():
        if knows_reads and row.casts_weight:
            continue
        key = row.phase, row.module, row.source, row.op
        calls.append(((*key, counts[key]), row))
        counts[key] += 1
    return calls


def _worst_cast(run: Run) -> float:
    """The largest error of a cast of a weight; 0 if there is none."""
    if not any(run.op_calls.reads):
        return 0.0
    return max((row.accumulated_error or 0.0 for row in run.op_calls.rows() if row.casts_weight), default=0.0)


def _places(runs: Sequence[Sequence[_Place]]) -> list[_Place]:
    """The places of all runs in one order: what an earlier run lacks follows what was before it."""
    order: dict[_Place, tuple[int, ...]] = {}
    before: tuple[int, ...]
    for number, places in enumerate(runs):
        known, before = set(order), (0,)
        for position, place in enumerate(places, 1):
            if place in known:
                before = order[place]
            elif number:
                order[place] = (*before, number, position)
            else:
                order[place] = (position,)
    return sorted(order, key=order.__getitem__)


def _segments(places: Sequence[_Place], letters: int) -> list[_Segment]:
    """The modules along the axis: the outermost, or as deep as their names fit into ``letters``."""
    paths = [tuple(filter(None, module.split("."))) for _, module, *_ in places]
    if len({phase for phase, *_ in places}) > 1:  # of a training step
        paths = [(str(phase),) for phase, *_ in places]
    chosen = list[_Segment]()
    for depth in range(1, 1 + max(map(len, paths), default=0)):
        segments = _segments_at(paths, depth)
        needed = sum(2 + min(len(segment.name), _LONGEST) for segment in segments)
        if chosen and needed > letters:
            break
        if len(segments) > len(chosen):
            chosen = segments
    return chosen


def _segments_at(paths: Sequence[tuple[str, ...]], depth: int) -> list[_Segment]:
    """A segment per module of this depth; a few ops between modules belong to what they follow."""
    stretches = list[tuple[tuple[str, ...], int, int]]()
    for path, group in groupby(range(len(paths)), lambda number: paths[number][:depth]):
        numbers = [*group]
        stretches.append((path, numbers[0], numbers[-1]))
    few, segments, before = len(paths) / 12, list[_Segment](), tuple[str, ...]()
    for path, first, last in stretches:
        is_between = len(path) < len(before) and path == before[: len(path)] and last + 1 - first < few
        if segments and (is_between or path == before):
            segments[-1] = segments[-1]._replace(last=last)
        else:
            segments.append(_Segment(".".join(path), first, last))
            before = path
    return segments


def _module_ticks(segments: Sequence[_Segment], x: _Axis, area: _Area) -> Iterator[Markup]:
    """A tick where each module begins, with its name, shortened if others are near; the widest
    modules come first.
    """
    starts = [x(segment.first) for segment in segments]
    drawn = -math.inf
    for start in starts:
        if start - drawn >= _NEAREST:
            yield _line(start, area.top, start, area.bottom + 4)
            drawn = start
    ends, names = [*starts[1:], area.right], [module_name(segment.name) for segment in segments]
    taken = list[tuple[float, float]]()
    by_width = sorted(range(len(segments)), key=lambda index: starts[index] - ends[index])
    for index in by_width[: area.wide // _NEAREST]:
        # to the right of its tick, unless the chart ends there
        name, start = names[index], starts[index]
        # a long name stays in its own segment, a short one may be wider
        letters_inside = int((ends[index] - start) / _LETTER) - 1
        longest = len(name) if letters_inside < 3 * _SHORTEST else min(len(name), letters_inside)
        for letters in range(longest, min(_SHORTEST, len(name)) - 1, -1):
            width = (letters + 1.5) * _LETTER
            left = min(start, area.wide - width)
            if not any(left < other[1] and other[0] < left + width for other in taken):
                taken.append((left, left + width))
                yield _text(left, area.bottom + 17, visible(_shortened(name, letters, names)), "start")
                break


def _shortened(name: str, letters: int, names: Sequence[str]) -> str:
    """``layers…coder``: with its beginning, unless others begin so too."""
    if len(name) <= letters:
        return name
    kept = letters - 1
    if kept >= 10:
        return f"{name[: kept // 2]}…{name[kept // 2 - kept :]}"
    if sum(other.startswith(name[:kept]) for other in names) == 1:
        return f"{name[:kept]}…"
    return f"…{name[-kept:]}"


def _error_along(
    runs: Sequence[Run], lines: dict[RunKey, list[tuple[int, OpCall]]], places: Sequence[_Place], area: _Area
) -> Iterator[Markup]:
    rows = [row for line in lines.values() for _, row in line]
    limits = {run.basis.format.short: run.relative_tolerance for run in runs if run.relative_tolerance and run.basis}
    if any(phase for phase, *_ in places):  # which is that of an output, not of gradients and weights
        limits = {}
    ends = [row.accumulated_error for row in rows if row.accumulated_error] + list(limits.values())
    legend = [(label(run), *style) for run, style in zip(runs, _LINES, strict=False)]
    marks = [("✕ Inf or NaN", any(row.gives_nonfinite for row in rows))]
    marks.append(("▲ missing kernel", any(row.outcome == "rescued" for row in rows)))
    # the legend takes as many lines as it needs
    at, line_of_legend, entries = area.left, 0, list[Markup]()
    for text, color, dashes in [*legend, *((text, "ink", None) for text, occurs in marks if occurs)]:
        width = (len(visible(text, 40)) + 2) * _LETTER + 26 * (dashes is not None)
        if at > area.left and at + width > area.wide:
            at, line_of_legend = area.left, line_of_legend + 1
        height = 10 + 16 * line_of_legend
        if dashes is None:
            entries.append(_text(at, height, text, "start", color))
        else:
            sample = {"stroke_width": 2.5, "stroke_dasharray": dashes or "none"}
            entries.append(_line(at, height - 4, at + 22, height - 4, color, **sample))
            entries.append(_text(at + 26, height, visible(text, 40), "start", "ink"))
        at += round(width)
    area = area._replace(top=area.top + 8 + 16 * line_of_legend)
    x = _Axis(0, len(places) - 1, area.left + 6, area.right - 6, log=False)
    y = _Axis(max(min(ends), max(ends) * 1e-9) / 1.5, max(ends) * 2, area.bottom, area.top, log=True)
    segments = _segments(places, int((area.right - area.left) / _LETTER))
    name_of_axis = "modules, in the order of execution"
    if len(segments) < 2 or any(phase for phase, *_ in places):
        name_of_axis = "op calls, in the order of execution"
    yield from _frame(area, x, y, (), "relative error", name_of_axis)
    yield from _module_ticks(segments, x, area)
    # names stand above their lines, or below where another line is near
    above = -math.inf
    for limit in sorted(set(limits.values()), reverse=True):
        formats = " and ".join(sorted(name for name, value in limits.items() if value == limit))
        shift = -5 if y(limit) - above > 20 else 13
        above = y(limit)
        yield _line(area.left, above, area.right, above, "bad", stroke_dasharray="6 4")
        yield _text(area.right, above + shift, f"tolerance of {formats}", "end", "bad")
    for index, (run, (color, dashes)) in enumerate(zip(runs, _LINES, strict=False)):
        drawn = list(worst_of_segments(lines[run.key], min(MOST_POINTS, area.right - area.left)))
        points = [
            (x(at), y(row.accumulated_error)) if row.accumulated_error else None
            for at, row in drawn
            if row.accumulated_error or row.gives_nonfinite
        ]
        yield _path(points, color, stroke_width=1.8, stroke_dasharray=dashes or "none")
        for at, row in drawn:
            if row.gives_nonfinite:
                yield _text(x(at), area.top + 10 + 11 * index, "✕", color=color)
            elif row.outcome == "rescued":
                yield _text(x(at), area.bottom - 4 - 9 * index, "▲", color=color)
    yield from entries
    if area.is_wide:
        yield from _tips(runs, lines, places, x, area)


def _tips(
    runs: Sequence[Run],
    lines: dict[RunKey, list[tuple[int, OpCall]]],
    places: Sequence[_Place],
    x: _Axis,
    area: _Area,
) -> Iterator[Markup]:
    """Transparent strips over the whole height that carry tooltips, each about its worst place."""
    at_place: dict[int, list[tuple[Run, OpCall]]] = {}
    for run in runs:
        for number, row in lines[run.key]:
            at_place.setdefault(number, []).append((run, row))
    size = -(-len(places) // MOST_TIPS)
    width = round((area.right - area.left) * size / len(places), 1)
    for start in range(0, len(places), size):
        numbers = range(start, min(start + size, len(places)))
        worst = max(numbers, key=lambda number: max(_badness(row) for _, row in at_place[number]))
        row = at_place[worst][0][1]
        text = [f"{short_op(row.op)} · {', '.join(filter(None, (module_name(row.module), row.source)))}"]
        for run, row in at_place[worst]:
            figures = ["Inf or NaN"] if row.gives_nonfinite else []
            if row.accumulated_error is not None:
                figures.append(error_figure(row.accumulated_error))
            if row.local_error is not None:
                figures.append(f"{error_figure(row.local_error)} by the op itself")
            text.append(f"{label(run)}: {', '.join(figures) or '–'}")
        tip = _tag("title", "\n".join(map(visible, text)))
        middle = (x(numbers[0]) + x(numbers[-1])) / 2
        box = {"x": round(middle - width / 2, 1), "y": area.top, "width": width, "height": area.bottom - area.top}
        yield _tag("rect", tip, **box, fill="transparent")


def _badness(row: OpCall) -> tuple[bool, float]:
    return row.gives_nonfinite, row.accumulated_error or 0.0


def worst_of_segments(rows: Sequence[tuple[int, OpCall]], most: int) -> Iterator[tuple[int, OpCall]]:
    """At most ``most`` of ``rows``, in order: of each segment the worst."""
    size = -(-len(rows) // most) or 1
    for start in range(0, len(rows), size):
        segment = rows[start : start + size]
        yield max(segment, key=lambda pair: _badness(pair[1]))


# -- lines by step


class StepLine(NamedTuple):
    """What is drawn for one run."""

    name: str
    color: str
    values: Sequence[float | None]
    """From before the first step on."""


def by_step(
    title: str,
    lines: Sequence[StepLine],
    steps: int,
    name: str,
    band: Sequence[Sequence[float]] = (),
    step: str = "step",
) -> str:
    """Lines from step to step as SVG, of a quantity of that name; on a log scale without a band."""
    return _svg(title, lambda area: _by_step(lines, band, steps, (name, step), area))


def _by_step(
    lines: Sequence[StepLine], band: Sequence[Sequence[float]], steps: int, names: tuple[str, str], area: _Area
) -> Iterator[Markup]:
    log = not band
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
    x, y = _Axis(0, steps, area.left, area.right - 110, log=False), _Axis(low, high, area.bottom, area.top + 6, log=log)
    ticks = [(step, f"{step:g}") for step in x.steps() if step == int(step)]
    yield from _frame(area, x, y, ticks, *names)
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
            at = _first_free(near, 0.9 * len(text) * _LETTER, taken, area)
            taken.append(at)
            ended = " ✕ Inf/NaN" if line[-1] is None else ""
            yield _text(at[0], at[3] - 3, f"{text[:24]}{ended}", "start", color)


# -- cells in rows


class CellRow(NamedTuple):
    """A row of cells, each good or bad."""

    name: str
    cells: Sequence[tuple[bool, str]]
    """Whether each is good, and its tooltip."""


def cells(title: str, rows: Sequence[CellRow], name: str) -> str:
    """Rows of cells of one width as SVG; ``name`` is what a cell stands for."""
    return _svg(title, lambda area: _cells(rows, name, area))


def _cells(rows: Sequence[CellRow], name: str, area: _Area) -> Iterator[Markup]:
    left = min(0.4 * area.wide, max(len(row.name) for row in rows) * _LETTER + 12)
    high = min(28.0, (area.bottom - area.top) / len(rows))
    # Of more cells than fit, neighbours are one, as bad as the worst
    most = max(len(row.cells) for row in rows)
    together = -(-most // int((area.right - left) / 4))
    wide = min(28.0, (area.right - left) / -(-most // together))
    for number, row in enumerate(rows):
        top = area.top + number * high
        yield _text(left - 8, top + high / 2 + 4, row.name[: int(left / _LETTER)], "end")
        for place, start in enumerate(range(0, len(row.cells), together)):
            is_good, tip = min(row.cells[start : start + together], key=lambda cell: cell[0])
            color = "good-bar" if is_good else "bad-bar"
            box = {"x": round(left + place * wide, 1), "y": round(top, 1)}
            size = {"width": round(max(wide - 1.5, 1.0), 1), "height": round(high - 3, 1)}
            yield _tag("rect", _tag("title", tip), **box, **size, fill=f"var(--{color})")
    yield _text((left + area.right) / 2, area.top + len(rows) * high + 18, name)


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

    def parts(area: _Area) -> Iterator[Markup]:
        total, most = sum(counts.values()), max(counts.values())
        low, high = min(-26, *counts) - 1, max(17, *counts) + 2
        x, y = (
            _Axis(low, high, area.left, area.right, log=False),
            _Axis(0, most / total, area.bottom, area.top + 40, log=False),
        )
        ticks = [(e * math.log2(10), f"1e{e:+d}") for e in range(-45, 40, 3) if low < e * math.log2(10) < high]
        yield from _frame(area, x, y, ticks, "share of the values", "magnitude in fp32")
        for exponent, count in sorted(counts.items()):
            top = y(count / total)
            outside = not -24 <= exponent < 16
            tip = _tag("title", f"2^{exponent}: {count:,} of {total:,} sampled values")
            size = {"width": round(x(exponent + 1) - x(exponent) - 0.5, 1), "height": round(area.bottom - top, 1)}
            yield _tag("rect", tip, x=x(exponent), y=top, **size, fill=f"var(--{'bad-bar' if outside else 'bar'})")
        # above the bars a line for each format: thick where it is precise, dashed for subnormals
        for row, low_format in enumerate(dict.fromkeys((*LOW_FORMATS, own))):
            height = area.top + 6 + 18 * row
            limits = (low_format.smallest_subnormal, low_format.smallest_normal, low_format.largest)
            ends = [x(math.log2(value)) for value in limits]
            yield _line(ends[0], height, ends[1], height, "dim", stroke_width=2, stroke_dasharray="2 3")
            yield _line(ends[1], height, ends[2], height, "dim", stroke_width=5)
            yield _text(ends[1] + 4, height + 13, f"{low_format.short}: full precision; dashed: subnormal", "start")

    return Chart(name, lambda: _svg(name, parts), detail="all")
