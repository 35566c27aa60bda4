"""The findings of a first screen: those that matter for a decision, each in one or two lines."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from lowprec_check.analysis.findings import FindingGroup, group_of
from lowprec_check.analysis.run_summary import shorten
from lowprec_check.schema.findings import Diagnostic, ReportedCase
from lowprec_check.schema.statements import Sentence, fill, joined, module_name, short_op, some, words

MOST = 5
_WIDTH = 98  # columns of a line: 100, indented by two
_TO_DO = " → "
_RESTATES = "LP301"  # the code of what the row of a run in the table says too


class Headline(NamedTuple):
    """Findings of one code in the same runs, with the same advice."""

    lead: str
    """``LP101 missing-kernel (bfloat16, half)``."""
    text: str
    code: str
    known: ReportedCase | None


def headlines(found: Sequence[FindingGroup], recommended: str | None) -> list[Headline]:
    """All but notes, the most important first; :data:`MOST` of them are shown. That the
    ``recommended`` run passes, which the verdict says, is left out of what to do.
    """
    groups = [part for group in found if group.severity != "note" for part in _by_place(group)]
    explained = {run for group in groups if group.code != _RESTATES for run in group.runs}
    merged: dict[object, list[FindingGroup]] = {}
    for group in groups:
        if group.code != _RESTATES or not (recommended or explained.issuperset(group.runs)):
            key = group.code, group.severity, tuple(group.runs), tuple(group.advice)
            merged.setdefault(key, []).append(group)
    return [_headline(members, recommended) for members in merged.values()]


def _by_place(group: FindingGroup) -> list[FindingGroup]:
    """The group; if what to do in a run differs from place to place, one for each place."""
    runs = [run for text, of_text in group.advice.items() if text for run in of_text]
    if len(runs) == len(set(runs)):
        return [group]
    places: dict[tuple[str | None, str | None], list[Diagnostic]] = {}
    for message in group.messages:
        for diagnostic in message.found:
            places.setdefault((diagnostic.module, diagnostic.source), []).append(diagnostic)
    return [group_of(members) for members in places.values()]


def _headline(groups: Sequence[FindingGroup], recommended: str | None) -> Headline:
    first = groups[0]
    lead = f"{first.code} {first.name}{fill(' ({})', ', '.join(first.runs))}"
    known = next((group.known for group in groups if group.known is not None), None)
    shorter = list(_texts(groups, recommended))
    text = next((text for text in shorter if len(textwrap.wrap(f"{lead}: {text}", _WIDTH)) <= 2), None)
    if text is None:
        text = _cut(shorter[-1], max(20, 2 * _WIDTH - len(lead) - 20))
    return Headline(lead, text, first.code, known)


def _cut(text: str, most: int) -> str:
    """``text`` with at most ``most`` characters: whole options of what to do, if a third of them
    is left for the rest.
    """
    said, arrow, to_do = text.rpartition(_TO_DO)
    options = to_do.split("; ")
    while len(options) > 1 and len("; ".join(options)) > most // 2:
        options.pop()
    end = arrow + "; ".join(options)
    if arrow and len(end) <= 2 * most // 3:
        return _whole_words(said, most - len(end)) + end
    return _whole_words(text, most)


def _whole_words(text: str, most: int) -> str:
    """``text``, cut behind a word; in one only if it is too long by itself."""
    cut = textwrap.shorten(text, most, placeholder=" …")
    return shorten(text, most) if cut == "…" else cut


def _texts(groups: Sequence[FindingGroup], recommended: str | None) -> Iterator[str]:
    """Where, what and what to do, in fewer and fewer words."""
    where, what = _where(groups), _what(groups)
    if len(groups) == 1 and groups[0].op:  # it begins the place
        what = what.removeprefix(f"{short_op(groups[0].op)} ")
    advice: dict[str, list[str]] = {}
    for text, runs in groups[0].advice.items():
        name = re.escape(recommended or "")
        restated = rf"(^|; |, or )(use {name}, which passes|{name} passes)(?=$|;)"
        advice.setdefault(re.sub(restated, "", text).removeprefix("; "), []).extend(runs)
    # in full, then only the first option, then without how it went
    ends = (r"(?!)", r", or |; ", r", |: |; ")
    for end in ends:
        shown = {text: re.split(end, text, maxsplit=1)[0] for text in advice}
        to_do = next(iter(shown.values()))
        # runs whose advice differs in what is not shown share an option
        runs_of: dict[str, list[str]] = {}
        for text_, option in shown.items():
            runs_of.setdefault(option, []).extend(advice[text_])
        if len(runs_of) > 1:
            to_do = "; ".join(f"{', '.join(runs)}: {option}" for option, runs in runs_of.items() if option)
        yield ": ".join(filter(None, (where, what))) + fill(f"{_TO_DO}{{}}", to_do)
        # the name of the finding says what, too
        if where and end is not ends[0]:
            yield where + fill(f"{_TO_DO}{{}}", to_do)


def _what(groups: Sequence[FindingGroup]) -> str:
    """What all their messages begin with; empty if they do not begin alike."""
    sentences = [_first_clause(d.sentence) for group in groups for m in group.messages for d in m.found]
    if len({words(sentence) for sentence in sentences}) == 1:
        return joined(sentences)
    if len(groups) > 1:
        return ""
    said = []
    for message in groups[0].messages:
        text = joined([_first_clause(d.sentence) for d in message.found])
        said.append(f"{fill('{}: ', ', '.join(message.runs))}{text}")
    return "; ".join(said)


def _first_clause(sentence: Sentence) -> Sentence:
    """What is before the first semicolon: what was observed, without the proof."""
    template = sentence.template.partition("; ")[0]
    figures = {name: figure for name, figure in sentence.figures.items() if f"{{{name}:" in template}
    return Sentence(template=template, figures=figures)


def _where(groups: Sequence[FindingGroup]) -> str:
    """``mm, bmm of encoder.0 (net.py:23, 24)``; empty for the whole model."""
    ops = some(list(dict.fromkeys(short_op(group.op) for group in groups if group.op)), 4)
    places = [place for group in groups for place in group.places]
    modules = dict.fromkeys(place.module for place in places if place.module)
    module = some([module_name(name) for name in modules], 2)
    named, lines = " of ".join(filter(None, (ops, module))), _lines(place.source for place in places)
    return f"{named}{fill(' ({})', lines)}" if named else lines


def _lines(sources: Iterable[str | None]) -> str:
    """``net.py:23, 24, layers.py:7``."""
    numbers: dict[str, list[str]] = {}
    for source in dict.fromkeys(filter(None, sources)):
        file, _, number = source.rpartition(":")
        numbers.setdefault(file or source, []).append(number)
    return some([f"{file}:{some(lines)}" for file, lines in numbers.items()], 2)
