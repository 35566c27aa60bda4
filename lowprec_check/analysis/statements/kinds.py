"""The kinds of statements, and the statements of a result.

A kind is a function with a decorator: ``@per_run("ablation", "error", …)`` for what is said of one
run, which is joined over the runs of which the same words are true, or
``@per_scan("inputs", "inputs", …)`` for what is said once. It returns a
:class:`~lowprec_check.schema.statements.Sentence`, alone or with its tone, or ``None``. A feature
has kinds in its module ``statements``, each ``after`` one of this package.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from lowprec_check.analysis.run_summary import label
from lowprec_check.schema.registry import modules_in, modules_of_features
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import About, Evidence, Sentence, Statement, Tone, join, joined


class Said(NamedTuple):
    """A sentence with its tone."""

    sentence: Sentence
    tone: Tone = "none"


Made = Sentence | Said | None
Detail = Literal["first", "more"]


def warn_if(condition: object, sentence: Sentence) -> Said:
    """The sentence, with the tone of a warning if ``condition`` holds."""
    if condition:
        return Said(sentence, "warn")
    return Said(sentence)


class Kind(NamedTuple):
    """One kind of statement."""

    name: str
    about: About
    evidence: Evidence
    is_per_run: bool
    after: str | None  # of a feature: the kind of the core that it follows
    basis: int | None  # its place in what a recommendation rests on, if it is part of that
    place: int  # among those of features after the same kind, the first lowest; then by module
    detail: Detail  # whether the first screen says it, or only a report with more detail
    make: Callable[..., Any]


_KINDS: dict[str, Kind] = {}
_MODULES = ("status", "advice", "evidence")
"""Those of this package, in the order of their kinds, whichever was imported first."""


def per_run(
    name: str,
    about: About,
    *,
    evidence: Evidence = "measured",
    after: str | None = None,
    basis: int | None = None,
    detail: Detail = "first",
) -> Callable[[Callable[[Run, ScanResult], Made]], Callable[[Run, ScanResult], Made]]:
    """Register what is said of a run; the function gets the run and the result."""
    return _registered(Kind(name, about, evidence, True, after, basis, 0, detail, _unmade))


def per_scan(
    name: str,
    about: About,
    *,
    evidence: Evidence = "measured",
    after: str | None = None,
    place: int = 0,
    detail: Detail = "first",
) -> Callable[[Callable[[ScanResult], Iterable[Made]]], Callable[[ScanResult], Iterable[Made]]]:
    """Register what is said of the whole scan; the function yields any number of sentences."""
    return _registered(Kind(name, about, evidence, False, after, None, place, detail, _unmade))


def _unmade(*_: object) -> None:
    """Of a kind whose function is not known yet."""


def _registered(kind: Kind) -> Callable[[Any], Any]:
    def register(make: Any) -> Any:
        if kind.name in _KINDS:
            raise ValueError(f"the kind {kind.name} is registered twice")
        _KINDS[kind.name] = kind._replace(make=make)
        return make

    return register


@functools.cache
def kinds() -> Mapping[str, Kind]:
    """Every kind by its name, in order; modules of this package are loaded first, and features'."""
    modules_in(__name__.rpartition(".")[0])
    modules_of_features("statements")
    core = [kind for kind in _KINDS.values() if kind.after is None]
    core.sort(key=lambda kind: _MODULES.index(kind.make.__module__.rpartition(".")[2]))
    of_features = [kind for kind in _KINDS.values() if kind.after is not None]
    of_features.sort(key=lambda kind: (kind.place, kind.make.__module__))
    # those of features follow the one that they are after
    names = [kind.name for kind in core]
    in_order = sorted([*core, *of_features], key=lambda kind: names.index(kind.after or kind.name))
    return {kind.name: kind for kind in in_order}


def statements(result: ScanResult) -> list[Statement]:
    """All statements of ``result``, from its runs, diagnostics and recommendation."""
    return [statement for kind in kinds().values() for statement in _made(kind, result)]


def _made(kind: Kind, result: ScanResult) -> Iterator[Statement]:
    is_predicted = kind.evidence == "measured" and result.evidence == "predicted"
    evidence: Evidence = "predicted" if is_predicted else kind.evidence

    def statement(runs: list[str], sentences: Sequence[Sentence], tone: Tone) -> Statement:
        return Statement(
            kind=kind.name,
            about=kind.about,
            runs=runs,
            figures=[sentence.figures for sentence in sentences],
            template=sentences[0].template,
            text=joined(sentences),
            tone=tone,
            evidence=evidence,
        )

    if kind.is_per_run:
        made = [(label(run), kind.make(run, result)) for run in result.runs]
    else:
        made = [("", sentence) for sentence in kind.make(result)]
    said_of = []
    for name, sentence in made:
        if isinstance(sentence, Sentence):
            said_of.append((name, Said(sentence)))
        elif sentence is not None:
            said_of.append((name, sentence))
    if not kind.is_per_run:
        for _, (sentence, tone) in said_of:
            yield statement([], [sentence], tone)
        return
    # What is true of several runs is said once; what a report shows in another colour stays apart.
    tones = {name: tone for name, (_, tone) in said_of}
    for shared in join([(name, sentence) for name, (sentence, _) in said_of], same=tones):
        yield statement(shared.runs, shared.sentences, tones[shared.runs[0]])


def said(result: ScanResult, kind: str) -> str:
    """The first statement of one kind as text; empty if there is none."""
    return next((statement.text for statement in statements(result) if statement.kind == kind), "")
