"""What a result means, as typed statements: sentences that are templates with typed figures."""

from __future__ import annotations

import functools
import itertools
import math
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from lowprec_check.schema.base import Struct

# -- Sentences with typed figures; those of several runs are joined where one is true of each
#
# A template names its figures and their types: ``"error {error:error} is over the tolerance
# {limit:limit}"``. What a user, a file or an exception wrote is always a figure (of type ``text``),
# never part of a template.

Figure = float | int | str | list[Any] | None
"""A number, a text, names, or ``[part, total]`` of type ``of``."""

NAMED = 3
"""Names that a sentence lists before it counts the others."""


def some(names: Sequence[str], most: int = NAMED) -> str:
    """The first few names, and how many more there are."""
    listed = ", ".join(names[:most])
    if len(names) <= most:
        return listed
    return f"{listed} and {len(names) - most} more"


def counted(number: int, noun: str) -> str:
    """``1 trial``, ``2,000 trials``, ``2 batches``."""
    if number == 1:
        ending = ""
    elif noun.endswith(("s", "x", "ch")):
        ending = "es"
    else:
        ending = "s"
    return f"{number:,} {noun}{ending}"


def agree(number: int, singular: str, plural: str) -> str:
    """The form of a word for ``number``: ``agree(2, "passes", "pass")``."""
    if number == 1:
        return singular
    return plural


def fill(template: str, value: object) -> str:
    """``template`` with ``value`` in it; empty without one: ``fill(" at {}", "net.py:7")``."""
    if value:
        return template.format(value)
    return ""


_AS_LARGE, _HUGE = 0.995, 1e4  # relative errors that read better as a share, and whose digits say nothing


def error_figure(error: float | None) -> str:
    """``1.3e-03``; ``120 %`` of one that is as large as the values; ``infinite`` for ``None``."""
    if error is None or math.isinf(error):
        return "infinite"
    if error >= _AS_LARGE:
        return f"{error * 100:,.0f} %" if error < _HUGE else f"> {_HUGE * 100:,.0f} %"
    if error:
        return f"{error:.1e}"
    return "0"


def share_figure(share: float | None) -> str:
    """``46 %``; ``< 1 %``; ``> 99 %`` for less than all; ``0 %``; ``–`` if it is unknown."""
    if share is None:
        return "–"
    if 0.995 <= share < 1 - 1e-9:
        return "> 99 %"
    if 0 < abs(share) < 0.005:
        return "< 1 %"
    return f"{share * 100:.0f} %".replace("-", "−")


def percent(share: float | None) -> str:
    """``0.2 %`` of 0.002; ``< 0.1 %`` and ``> 99.9 %`` for the ends; ``–`` if unknown."""
    if share is None:
        return "–"
    if 0 < abs(share) < 0.0005:
        return "< 0.1 %"
    if 0.9995 <= share < 1:
        return "> 99.9 %"
    return f"{share:.1%}".replace(".0%", "%").replace("%", " %").replace("-", "−")


def out_of(pair: Sequence[int], noun: str) -> str:
    """``417 of 200,704 values (0.2 %)``; without a known total ``417 values``."""
    number, total = pair
    if total < number or not total:
        return counted(number, noun)
    return f"{number:,} of {counted(total, noun)} ({percent(number / total)})"


def bytes_figure(number: float | None) -> str:
    """``1.5 GiB``, ``12.5 MiB``, ``3 KiB``, ``1 byte``."""
    if number is None:
        return "–"
    if number < 2**10:
        return counted(int(number), "byte")
    size, unit = next((size, unit) for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if number >= size)
    if unit == "KiB":
        return f"{number / size:.0f} {unit}"
    return f"{number / size:.1f} {unit}"


def milliseconds(duration: float | None) -> str:
    """``134 ms``, ``13.1 ms``, ``0.4 ms``, ``0.0056 ms``."""
    if duration is None:
        return "–"
    if duration >= 100:
        return f"{duration:,.0f} ms"
    if duration >= 0.1:
        return f"{duration:.1f} ms"
    return f"{duration:.2g} ms"


def times(ratio: float) -> str:
    """``1.4 times``, ``134 times``; two digits below 1.1, so that it never says 1.0."""
    if ratio < 1.095:
        return f"{ratio:.2f} times"
    if ratio < 9.95:
        return f"{ratio:.1f} times"
    return f"{ratio:,.0f} times"


def short_op(op: str) -> str:
    """``linalg_cholesky_ex`` of ``aten.linalg_cholesky_ex.default``; functions as they are."""
    parts = op.split(".")
    is_overload = len(parts) == 3 and parts[0] != "torch" and " " not in op
    if is_overload:
        return parts[1].removeprefix("_")
    return op


def module_name(path: str) -> str:
    """The path, or words for the model; quoted if it could be read as a number."""
    if not path:
        return "the model itself"
    if path.replace(".", "").isdigit():
        return f'"{path}"'
    return path


def limit_figure(limit: float) -> str:
    """``5e-02``, ``1.5e-02``: with up to three digits, as many as it has."""
    return next(
        (text for text in (f"{limit:.0e}", f"{limit:.1e}") if math.isclose(float(text), limit, rel_tol=1e-3)),
        f"{limit:.2e}",
    )


_TYPES: dict[str, Callable[[Any], str]] = {
    "error": error_figure,
    "limit": limit_figure,
    "share": share_figure,
    "percent": percent,
    "number": lambda value: f"{value:,}",
    "figure": lambda value: f"{value:.2g}",
    "three": lambda value: f"{value:.3g}",
    "loss": lambda value: "Inf/NaN" if value is None else f"{value:.4g}",
    "scale": lambda value: f"{value:g}",
    "times": times,
    "seconds": lambda value: f"{value:.1f} s",
    "ms": milliseconds,
    "bytes": bytes_figure,
    "op": short_op,
    "module": module_name,
    "text": str,
    "names": some,
    "modules": lambda names: some([module_name(name) for name in names]),
    "ops": lambda names: some([short_op(name) for name in names], 4),
}
"""What each type makes of a figure; ``count NOUN`` and ``of NOUN`` beside them."""

_TEXTS = ("limit", "op", "module", "text", "names", "modules", "ops")
"""Types without an order: runs with different ones do not share a sentence."""


def shown(figure: Figure, kind: str) -> str:
    """A figure of a type as text."""
    name, _, noun = kind.partition(" ")
    if name == "count":
        return counted(int(figure), noun)  # type: ignore[arg-type]
    return out_of(figure, noun) if name == "of" else _TYPES[name](figure)  # type: ignore[arg-type]


class Sentence(Struct, frozen=True, kw_only=True):
    """What is said of one run."""

    template: str
    """The words, with ``{name:type}`` for each figure; a literal brace is doubled."""
    figures: dict[str, Figure] = {}
    """By name."""

    @property
    def text(self) -> str:
        """The sentence."""
        return joined([self])


def say(template: str, **figures: Figure) -> Sentence:
    """A sentence; raises ``ValueError`` if a figure is missing or is not in the template."""
    named = {name for _, name, _, _ in string.Formatter().parse(template) if name}
    if named != figures.keys():
        raise ValueError(f"{template!r} does not name {sorted(named ^ figures.keys())}")
    return Sentence(template=template, figures=figures)


def say_if(condition: object, template: str, **figures: Figure) -> Sentence | None:
    """:func:`say` if ``condition`` holds, else ``None``, which :func:`chained` leaves out."""
    if condition:
        return say(template, **figures)
    return None


def plain(text: str) -> Sentence:
    """A text that is no template, such as the message of an older file."""
    return Sentence(template="{text:text}", figures={"text": text})


def chained(*sentences: Sentence | None, between: str = "; ") -> Sentence:
    """Sentences in one; figures of the same name are numbered."""
    templates: list[str] = []
    figures: dict[str, Figure] = {}
    for sentence in filter(None, sentences):
        # Figures of the same name are numbered; one of a chained sentence may be already.
        names: dict[str, str] = {}
        for name in sentence.figures:
            free = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(1)))
            names[name] = next(new for new in free if new not in figures and new not in names.values())
        template = ""
        for text, field, kind, _ in string.Formatter().parse(sentence.template):
            template += text.replace("{", "{{").replace("}", "}}")
            if field is not None:
                template += f"{{{names[field]}:{kind}}}"
        templates.append(template)
        figures |= {names[name]: value for name, value in sentence.figures.items()}
    return Sentence(template=between.join(templates), figures=figures)


_DTYPES = re.compile(r"\b(?:BFloat16|Half|(?:torch\.)?b?float16|torch\.half)\b")
"""16-bit dtypes as torch names them in messages."""


def words(sentence: Sentence) -> tuple[str, ...]:
    """Its words and names, whatever the numbers and the 16-bit dtypes in messages are: sentences
    with the same can be joined.
    """
    named = ((sentence.figures.get(name), kind) for name, kind in _fields(sentence.template) if kind in _TEXTS)
    return sentence.template, *(_DTYPES.sub("dtype", shown(figure, kind)) for figure, kind in named)


def joined(sentences: Sequence[Sentence]) -> str:
    """One sentence true of all, which have the same :func:`words`: figures become ranges."""
    first = sentences[0]
    parts = []
    for text, name, kind, _ in string.Formatter().parse(first.template):
        figure = ""
        if name is not None:
            figure = _range([sentence.figures.get(name) for sentence in sentences], kind or "text")
        is_bound = figure.startswith(("<", ">"))  # which is not "about" a number
        parts.append((text.removesuffix("about ") if is_bound else text) + figure)
    return "".join(parts)


@functools.lru_cache(maxsize=1024)
def _fields(template: str) -> list[tuple[str, str]]:
    return [(name, kind or "text") for _, name, kind, _ in string.Formatter().parse(template) if name]


def _range(figures: Sequence[Figure], kind: str) -> str:
    """``44 – 48 %``; the one text if all are shown alike."""
    texts = [shown(figure, kind) for figure in figures]
    if len(set(texts)) == 1:
        return texts[0]
    if kind in _TEXTS:
        # ``not implemented for 'BFloat16/Half'`` of texts that differ in their dtypes alone.
        in_order = zip(*map(_DTYPES.findall, texts), strict=True)
        alternatives = iter(["/".join(dict.fromkeys(names)) for names in in_order])
        return _DTYPES.sub(lambda _: next(alternatives), texts[0])
    name, _, noun = kind.partition(" ")
    if name == "of":
        # ``417 – 884 of 200,704 values (0.2 – 0.4 %)``; totals that differ become a range too.
        pairs = [figure for figure in figures if isinstance(figure, list)]
        numbers, totals, count = [number for number, _ in pairs], [total for _, total in pairs], f"count {noun}"
        if any(not total or total < number for number, total in pairs):
            return _range(numbers, count)
        share = _range([number / total for number, total in pairs], "percent")
        return f"{_range(numbers, 'number')} of {_range(totals, count)} ({share})"
    # What is unknown is shown last.
    order = sorted((math.inf if isinstance(figure, list | str) or figure is None else figure) for figure in figures)
    if name == "count":
        return f"{order[0]:,} – {shown(order[-1], kind)}"
    low, high = (shown(None if end == math.inf else end, kind) for end in (order[0], order[-1]))
    # A unit that both ends have is shown once.
    unit = low.rpartition(" ")[2]
    if " " in low and high.endswith(f" {unit}"):
        return f"{low.removesuffix(f' {unit}')} – {high}"
    return f"{low} – {high}"


class Joined(NamedTuple):
    """One sentence and the runs that it is true of."""

    runs: list[str]
    sentences: list[Sentence]
    """One for each run."""

    @property
    def text(self) -> str:
        """The sentence."""
        return joined(self.sentences)


def join(said: Sequence[tuple[str, Sentence]], same: Mapping[str, object] | None = None) -> list[Joined]:
    """The sentences of ``(label, sentence)``, joined where equal; ``same`` keeps runs apart."""
    by_words: dict[object, Joined] = {}
    for label, sentence in said:
        key = (same.get(label) if same else None, words(sentence))
        group = by_words.setdefault(key, Joined([], []))
        group.runs.append(label)
        group.sentences.append(sentence)
    return list(by_words.values())


# -- What a result means, as typed statements
#
# :mod:`lowprec_check.analysis.statements` makes them from the saved result alone.

Evidence = Literal["measured", "derived", "predicted", "declared"]
"""By running it; computed from that; emulated for a device that is not here; or as declared."""

Tone = Literal["good", "warn", "bad", "none"]
"""What a statement means to its reader: the colour and the sign of a report."""

About = Literal[
    "advice",
    "margin",
    "runs",
    "error",
    "training",
    "inputs",
    "weights",
    "times",
    "analysis",
    "not run",
    "prediction",
    "model",
]
"""The part of a report that it belongs to."""


class Statement(Struct, frozen=True, kw_only=True):
    """One sentence about one or more runs, or about the whole scan."""

    kind: str
    """The kind of statement, e.g. ``ablation``."""
    about: About
    """The part of a report that it belongs to."""
    runs: list[str] = []
    """Labels of the runs that it is true of, each; empty for the whole scan."""
    figures: list[dict[str, Figure]] = []
    """Its figures for each of ``runs``, in their order, or once for the whole scan."""
    template: str
    """Its words, with ``{name:type}`` in place of the figures."""
    text: str
    """The sentence. Figures that differ between ``runs`` are a range."""
    tone: Tone = "none"
    """What it means to its reader."""
    evidence: Evidence = "measured"
    """What it rests on."""

    def text_of(self, run: str) -> str:
        """The sentence with the figures of one of its ``runs`` alone, by its label."""
        return Sentence(template=self.template, figures=self.figures[self.runs.index(run)]).text
