"""What a measure of an output's meaning is, and how it decides the verdict.

A feature has its measures in its module ``measures``, as instances of :class:`OutputMeasure`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from torch import Tensor

from lowprec_check.engine.model.output_tensors import OutputForm
from lowprec_check.errors import UsageError, one_line
from lowprec_check.schema.registry import objects_of_features
from lowprec_check.schema.statements import percent
from lowprec_check.schema.verdict import Meaning
from lowprec_check.torchkit.output_comparison import OutputComparison, compare_outputs

MOST_USED = 1e9
"""JSON cannot hold infinity."""
RELATIVE_ERROR = "rel_l2"
"""The name by which no measure is asked for."""
OWN = "judge"
"""The name of the measure that the user's file defines, a function ``judge(output, reference)``."""
Part = Mapping[str, Tensor]
"""The tensors that a measure compares together, by role: ``boxes``, ``labels``, ``scores``."""


MOST_DECIBELS = 200.0
"""Of equal pictures and sounds."""
Unit = Literal["share", "cosine", "difference", "dB", "own"]
"""Of a difference the limit is the most that passes. Of the user's own figures it lies on the bad
side of fp32's. Of others it is the least.
"""


class Figure(NamedTuple):
    """One figure of a measure."""

    value: float
    words: str = ""
    """What it says, with its value in ``{}``: ``{} of the boxes are found``."""
    limit: float | None = None
    """What passes, at least or at most; ``None`` if it decides nothing."""
    unit: Unit = "share"
    best: float = 1.0
    """What fp32 itself has, of shares and of the user's own."""

    @property
    def has_least(self) -> bool:
        """Whether the limit is the least that passes."""
        if self.unit == "own":
            return self.limit is None or self.limit < self.best
        return self.unit != "difference"

    @property
    def used(self) -> float:
        """The part of the limit that is used, above 1 if it is exceeded."""
        loss = self.loss(self.value)
        if not math.isfinite(loss):
            return math.inf
        if self.limit is None or loss <= 0:
            return 0.0
        allowed = self.loss(self.limit)
        return loss / allowed if allowed > 0 else math.inf

    def loss(self, value: float) -> float:
        """What of the output is lost at this value: 0 if it is equal; NaN stays so."""
        if self.unit == "dB":
            return float(10 ** (-value / 20))
        if self.unit == "difference":
            return value
        if math.isinf(self.best):  # as of a ratio to no noise: what falls with the value, never to 0
            return math.exp(-math.asinh(math.copysign(1.0, self.best) * value))
        lost = self.best - value if self.has_least else value - self.best
        if self.unit == "own" and self.limit == self.best:  # on neither side: only an equal one passes
            return abs(lost)
        return max(lost, 0.0)

    def shown(self, value: float) -> str:
        """A value with its unit."""
        if self.unit == "share":
            return percent(value)
        if self.unit == "dB":
            return f"{value + 0.0:.3g} dB"  # not -0
        if self.unit in ("cosine", "own"):
            return f"{value:.4g}"
        return f"{value:.2g}"

    @property
    def said(self) -> str:
        """The value with its unit, which does not read as a limit that it exceeds."""
        value = self.shown(self.value)
        if self.unit == "dB" and self.value >= MOST_DECIBELS:
            return f"{value} or more"
        if self.limit is None or self.used <= 1 or value != self.shown(self.limit):
            return value
        return f"{'less' if self.value < self.limit else 'more'} than {value}"

    @property
    def text(self) -> str:
        """The value in words; the limit if it is exceeded, or is one that the user knows."""
        text = self.words.replace("{}", self.said)
        if self.limit is None:
            return text
        passes = "at least" if self.has_least else "at most"
        if self.unit == "own" and self.limit == self.best:
            passes = "only"
        passes = f"{passes} {self.shown(self.limit)}"
        if self.used > 1:
            return f"{text}; {passes} would pass"
        return f"{text} ({passes} passes)" if self.unit == "own" else text


class Measured(NamedTuple):
    """What a measure says of an output."""

    figures: Mapping[str, Figure] = {}
    cannot_tell: str = ""
    """Why the figures mean nothing, as of the boxes of random weights; empty if they do."""
    examples: Sequence[str] = ()
    """What differs, the most important first: ``box 3 (score 0.91) is lost``."""


class OutputMeasure:
    """Compares outputs by what they mean."""

    name: str
    """How it is asked for, a plural noun: ``boxes``."""
    limited: Mapping[str, Unit]
    """Its figures that have a limit."""
    is_main = True
    """Whether what it fits is what an output is for, beside which there are by-products."""
    fits_by_loss = False
    """Whether what a model is trained by can tell that it fits."""

    def parts(self, form: OutputForm, output: Sequence[Tensor]) -> list[dict[str, int]]:
        """The numbers of the tensors compared together, by role; empty if it does not fit."""
        raise NotImplementedError

    def compare(self, output: Sequence[Part], reference: Sequence[Part], tolerance: float) -> Measured:
        """Compare what :meth:`parts` chose; ``tolerance`` is that of rel_l2."""
        raise NotImplementedError


@functools.cache
def output_measures() -> dict[str, OutputMeasure]:
    """All measures by name."""
    return {measure.name: measure for measure in objects_of_features("measures", OutputMeasure)}


def check_judge(name: str | None, limits: Sequence[str]) -> None:
    """Raise :class:`UsageError` for a measure, or a limit, that there is not.

    Which figures the user's own measure has is known when it is called.
    """
    measures = output_measures()
    names = [*measures, RELATIVE_ERROR, OWN]
    if name is not None and name not in names:
        raise UsageError(f"There is no measure {name!r}.", f"Choose from: {', '.join(names)}.")
    for key, limit in parse_limits(limits):
        measure, _, figure = key.partition(".")
        if measure == OWN and figure not in measures:
            continue
        if measure == OWN:
            raise UsageError(f"The limit of {figure} needs a figure.", f"Choose from: {_figures(figure)}.")
        if measure not in measures:
            raise UsageError(
                f"There is no measure {measure!r} with limits.", f"Choose from: {', '.join([*measures, OWN])}."
            )
        units = measures[measure].limited
        if figure not in units:
            hint = f"Choose from: {_figures(measure)}."
            raise UsageError(f"The measure {measure} has no limit of a figure {figure!r}.", hint)
        most = MOST_USED
        if units[figure] in ("share", "cosine"):
            most = 1.0
        if not 0 <= limit <= most:
            raise UsageError(f"{limit:g} is no limit of {key}.", f"Give a number from 0 to {most:g}.")


def _figures(measure: str) -> str:
    """The figures of a measure that have a limit, as options name them."""
    return ", ".join(f"{measure}.{figure}" for figure in output_measures()[measure].limited)


def parse_limits(texts: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """The limits of figures, from ``boxes.found=0.98``, or ``loudness=2`` of the user's own.

    Raise :class:`UsageError` for another form.
    """
    limits = []
    for text in texts:
        key, _, value = text.partition("=")
        if "." not in key:
            key = f"{OWN}.{key}"
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        limits.append((key, limit))
        if not key.partition(".")[2] or not math.isfinite(limit):
            raise UsageError(f"{text!r} is no limit of a figure.", "Write it as boxes.found=0.98.")
    return tuple(limits)


def compare_by_meaning(
    output: Sequence[Tensor], reference: Sequence[Tensor], form: OutputForm, tolerance: float | None
) -> OutputComparison:
    """Compare two outputs by the measures that fit, and the tensors of no measure by rel_l2.

    What uses most of its limit decides. If no measure can tell, rel_l2 decides of all.
    """
    leaves: dict[int, OutputComparison] = {}
    whole = compare_outputs(output, reference, tolerance=tolerance, comparisons=leaves)
    if tolerance is None or whole.nonfinite or form.judge == RELATIVE_ERROR or len(output) != len(reference):
        return whole
    meanings, judged, has_main = _meanings(output, reference, form, tolerance)
    if not meanings:
        return whole

    meanings.sort(key=lambda meaning: (bool(meaning.cannot_tell), -meaning.used))
    worst = meanings[0]
    rest = [number for number in range(len(output)) if number not in judged]
    if has_main and "Output" in form.kind:
        rest = [number for number in rest if not _BY_PRODUCTS.match(form.paths[number])]
    others = compare_outputs(output, reference, tolerance=tolerance, among=rest, comparisons=leaves)
    # Not `>`: a distance may be NaN
    others_decide = others.compared and not others.distance <= worst.used * tolerance
    if worst.used > 1 and others.rms == 0.0:  # an error of zeros tells less
        others_decide = False
    decides = not worst.cannot_tell and not others_decide
    worst = msgspec.structs.replace(worst, decides=decides, tolerance=tolerance)
    error = msgspec.structs.replace(whole.error, meaning=worst, beside=meanings[1:])
    if decides:
        # An output is not unjudged because a tensor that does not decide is all zeros
        return whole._replace(
            error=error,
            distance=worst.loss,
            limit=worst.limit,
            compared=True,
            note=None,
            rms=whole.rms or None,
            leaf=None,
        )
    if worst.cannot_tell:
        return whole._replace(error=error)
    mismatched = others.error.mismatched
    if others.error.rel_l2 is not None:
        mismatched = whole.error.mismatched
    error = msgspec.structs.replace(others.error, meaning=worst, beside=meanings[1:], mismatched=mismatched)
    return others._replace(error=error)


_BY_PRODUCTS = re.compile(r"past_key_values|.*hidden_states?\b|.*attentions?\b|auxiliary_|intermediate_|init_ref")
"""Tensors of transformers' outputs beside what they are for, which a measure judges."""


def _meanings(
    output: Sequence[Tensor], reference: Sequence[Tensor], form: OutputForm, tolerance: float
) -> tuple[list[Meaning], set[int], bool]:
    """What each measure says that fits, the tensors that those judge which can tell, and whether
    one of these is what the output is for.
    """
    meanings: list[Meaning] = []
    taken, judged, has_main = set[int](), set[int](), False
    measures: Mapping[str, OutputMeasure] = output_measures()
    if form.judge == OWN:
        measures = {OWN: UsersMeasure(form.function, form.limits)} if form.function is not None else {}
    for name, measure in measures.items():
        if form.judge not in (None, name):
            continue
        numbers = set[int]()
        try:
            parts = [part for part in measure.parts(form, reference) if taken.isdisjoint(part.values())]
            if not parts:
                continue
            numbers = {number for part in parts for number in part.values()}
            ours, wanted = (
                [{role: side[n] for role, n in part.items()} for part in parts] for side in (output, reference)
            )
            told = _meaning(name, measure.compare(ours, wanted, tolerance), dict(form.limits))
        except UsageError:
            raise
        except Exception as error:  # rel_l2 can tell what a measure cannot
            reason = f"the measure fails: {one_line(error)}"
            told = _meaning(name, Measured(cannot_tell=reason), {})
        taken |= numbers
        why = form.kind
        if form.judge is not None:
            why = "your function" if form.judge == OWN else "asked for"
        elif measure.fits_by_loss and form.loss in ("classes", "binary"):
            why = f"{why}, trained by cross entropy"
        meanings.append(msgspec.structs.replace(told, why=why))
        if not told.cannot_tell:
            judged |= numbers
            has_main = has_main or measure.is_main
    if form.judge not in (None, OWN) and not meanings:
        words = f"The output has nothing to be judged by {form.judge}."
        raise UsageError(words, "Leave out --judge, or return logits, boxes or a picture by their usual names.")
    return meanings, judged, has_main


def _meaning(name: str, measured: Measured, limits: Mapping[str, float]) -> Meaning:
    """What is saved of a measure: its figures, and the one that uses most of its limit."""
    figures = {
        key: figure._replace(limit=limits.get(f"{name}.{key}", figure.limit))
        for key, figure in measured.figures.items()
    }
    values = {key: figure.value for key, figure in figures.items() if math.isfinite(figure.value)}
    limited = {key: figure for key, figure in figures.items() if figure.limit is not None}
    meaning = Meaning(measure=name, figures=values, cannot_tell=measured.cannot_tell, examples=[*measured.examples[:3]])
    if not limited:
        return meaning
    key = max(limited, key=lambda key: limited[key].used)
    worst = limited[key]
    text = worst.text
    if worst.used <= 1:
        text = ", ".join(figure.text for figure in figures.values() if figure.words)
    what = name
    if key != next(iter(figures)):
        what = f"{name} {key}"
    loss, limit, used = worst.loss(worst.value), worst.loss(worst.limit or 0.0), min(worst.used, MOST_USED)
    if not max(loss, limit) <= MOST_USED:  # nor NaN
        loss, limit = used, 1.0
    return msgspec.structs.replace(
        meaning,
        text=text,
        shown=f"{what} {worst.said}",
        loss=loss,
        limit=limit,
        used=used,
    )


class UsersMeasure(OutputMeasure):
    """The user's function ``judge(output, reference)``, which returns numbers by name.

    Which side of a limit passes is told by what it returns for the reference itself.
    """

    name = OWN

    def __init__(self, function: Callable[[Any, Any], Any], limits: Sequence[tuple[str, float]]) -> None:
        self._function, self._limits = function, limits

    def parts(self, form: OutputForm, output: Sequence[Tensor]) -> list[dict[str, int]]:
        """All tensors of the output, by their paths."""
        if "" in form.paths:  # beside which there is a loss
            return [{"": form.paths.index("")}]
        return [{path: number for number, path in enumerate(form.paths)}]

    def compare(self, output: Sequence[Part], reference: Sequence[Part], tolerance: float) -> Measured:
        """The numbers, with the limits that the function, the file or an option gives."""
        numbers = []
        for compared in (output[0], reference[0]):
            # Copies, because the function may work in place
            pair = ({path: tensor.clone() for path, tensor in side.items()} for side in (compared, reference[0]))
            numbers.append(self._function(*map(structured, pair)))
        if not all(isinstance(each, Mapping) for each in numbers):
            return Measured(cannot_tell=f"it returns {type(numbers[0]).__name__}, not a dict of numbers")
        own, best = map(_with_limits, numbers)
        asked = {key.removeprefix(f"{OWN}."): limit for key, limit in self._limits if key.startswith(f"{OWN}.")}
        for name in asked:
            if name not in best:
                raise UsageError(f"`judge` returns no number {name!r}.", f"It returns: {', '.join(best) or 'none'}.")
        figures = {}
        for name, (at_best, its_limit) in {**own, **best}.items():
            if math.isnan(at_best) or name not in best:
                return Measured(cannot_tell=f"it returns NaN or no {name} for fp32 itself")
            value, limit = own.get(name, (math.nan, its_limit))
            limit = asked.get(name, limit)
            if limit is not None and not math.isfinite(limit):
                return Measured(cannot_tell=f"its limit of {name} is not finite")
            figures[name] = Figure(value, f"{name} {{}}", limit, "own", at_best)
        if all(figure.limit is None for figure in figures.values()):
            return Measured(figures, "no limit is set: --limit NAME=VALUE, or limits = {NAME: VALUE} in the file")
        return Measured(figures)


def _with_limits(numbers: Mapping[Any, Any]) -> dict[str, tuple[float, float | None]]:
    """Numbers by name, with limits where they are pairs."""
    pairs = {str(name): value if isinstance(value, tuple) else (value, None) for name, value in numbers.items()}
    return {name: (float(value), None if limit is None else float(limit)) for name, (value, limit) in pairs.items()}


class NamedTensors(dict[str, Any]):
    """Tensors by name, as items and as attributes."""

    def __new__(cls, *_: Any) -> NamedTensors:
        """One whose attributes are its items; also a copy, for which ``__init__`` is not called."""
        self = super().__new__(cls)
        self.__dict__ = self
        return self


def structured(tensors: Mapping[str, Tensor]) -> Any:
    """The output of which these are the tensors by their paths: tensors, tuples, named tensors."""
    if set(tensors) == {""}:
        return tensors[""]
    groups: dict[str, dict[str, Tensor]] = {}
    for path, tensor in tensors.items():
        first, _, rest = path.partition(".")
        groups.setdefault(first, {})[rest] = tensor
    items = {first: structured(group) for first, group in groups.items()}
    if not all(name.isdecimal() for name in items):
        return NamedTensors(items)
    return tuple(items.get(str(number)) for number in range(max(map(int, items), default=-1) + 1))
