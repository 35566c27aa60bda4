"""Findings for people, grouped by code and op; a sentence is true of every run it names."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from lowprec_check.analysis.run_summary import shorten
from lowprec_check.schema.findings import Diagnostic, ReportedCase, Severity
from lowprec_check.schema.statements import Sentence, counted, fill, joined, module_name, short_op, some, words

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")  # the most severe first
CHOICES = "LP304"  # the code of choices that differ from fp32's
MOST_OF_ERROR = 0.5  # from this share of the error on, other findings are effects of choices, or small


class Message(NamedTuple):
    """What is true of each of its runs, and what to do in them."""

    runs: list[str]  # labels; none of a finding about the whole scan
    text: str  # figures that differ between its findings are ranges
    help: str | None
    severity: Severity
    found: Sequence[Diagnostic]  # the findings that it is about

    @property
    def full(self) -> str:
        """``message → what to do``."""
        return f"{self.text}{fill(' → {}', self.help)}"

    @property
    def known(self) -> ReportedCase | None:
        """A public report that a finding of the message is like."""
        return next((diagnostic.known for diagnostic in self.found if diagnostic.known is not None), None)


class FindingPlace(NamedTuple):
    """Where findings are, and in which runs."""

    module: str | None
    source: str | None
    runs: list[str]

    @property
    def text(self) -> str:
        """``blocks.0.mlp, net.py:42``."""
        if self.module is None:
            return self.source or ""
        return ", ".join(filter(None, (module_name(self.module), self.source)))


class FindingGroup(NamedTuple):
    """Findings of one code and severity about one op, over runs and places. Not escaped."""

    code: str
    name: str
    severity: Severity
    op: str | None
    runs: list[str]  # labels of the runs, `half · inductor`
    messages: list[Message]  # the most severe first; several if no sentence is true of all runs
    places: list[FindingPlace]
    harmless: bool  # whether it is known that no run fails for them
    matters: bool  # whether they are known to affect the output of a run
    share: float | None
    """The largest share of the squared output error that one of them has, if one is known."""
    rests_on: list[str]  # of a prediction: what it is known from
    size: int  # number of findings
    calls: int  # number of op calls

    @property
    def where(self) -> str:
        """``blocks.0.mlp, net.py:42 and 3 more places``; empty if they are about no place."""
        if len(self.places) > 1:
            return f"{self.places[0].text} and {counted(len(self.places) - 1, 'more place')}"
        return "".join(place.text for place in self.places)

    @property
    def what(self) -> str:
        """The messages with their advice; advice that is the same for all is at the end."""
        advice = self.advice
        if len(advice) > 1 and len(self.messages) > 1 and not self._in_same_words:
            return self._said(with_advice=True)
        return self.said + fill(" → {}", self.what_to_do)

    @property
    def what_to_do(self) -> str:
        """The advice; that of each run if it differs."""
        advice = self.advice
        if len(advice) == 1:
            return next(iter(advice))
        return "; ".join(f"{', '.join(runs)}: {text}" for text, runs in advice.items() if text)

    @property
    def advice(self) -> dict[str, list[str]]:
        """Each advice with its runs; empty text for those without."""
        advice: dict[str, list[str]] = {}
        for message in self.messages:
            runs = advice.setdefault(message.help or "", [])
            runs += [run for run in message.runs if run not in runs]
        return advice

    @property
    def said(self) -> str:
        """The messages alone."""
        return self._said(with_advice=False)

    @property
    def known(self) -> ReportedCase | None:
        """What users reported of the like, of the first message about which something is known."""
        return next((message.known for message in self.messages if message.known is not None), None)

    @property
    def _in_same_words(self) -> bool:
        return len({words(d.sentence) for message in self.messages for d in message.found}) == 1

    def _said(self, *, with_advice: bool) -> str:
        """The messages, each with its runs, or with its modules where the runs are the same."""
        if self._in_same_words and not with_advice:
            return joined([d.sentence for message in self.messages for d in message.found])
        same = len({tuple(message.runs) for message in self.messages}) == 1
        said = []
        for message in self.messages:
            modules = dict.fromkeys(module_name(d.module) for d in message.found if d.module is not None)
            about = some(list(modules)) if same else ", ".join(message.runs)
            text = message.full if with_advice else message.text
            # several messages are told apart by their runs or modules
            if len(self.messages) > 1:
                text = f"{fill('{}: ', about)}{text}"
            said.append(text)
        return "; ".join([*(text.rstrip(".") for text in said[:-1]), *said[-1:]])


def groups(diagnostics: Iterable[Diagnostic]) -> list[FindingGroup]:
    """Findings that the baseline does not accept, by :func:`rank`."""
    # harmless findings are groups of their own, so that they can be folded
    merged: dict[tuple[object, ...], list[Diagnostic]] = {}
    for d in diagnostics:
        if not d.accepted:
            merged.setdefault((d.code, d.op, d.severity, is_harmless(d)), []).append(d)
    return sorted(map(group_of, merged.values()), key=rank)


def rank(group: FindingGroup) -> tuple[object, ...]:
    """Choices that cause most of the error first; then severity, effect on the output, code."""
    # an effect whose share is not known may be all of it
    share = 1.0 if group.share is None else group.share
    decides = group.code == CHOICES and group.matters and share >= MOST_OF_ERROR
    return not decides, SEVERITIES.index(group.severity), -share * group.matters, group.code


def group_of(members: Sequence[Diagnostic]) -> FindingGroup:
    """Findings of one code about one op as a group with the severity of the most severe."""
    members = sorted(members, key=lambda d: SEVERITIES.index(d.severity))
    first = members[0]

    said: dict[object, list[Diagnostic]] = {}  # by words, advice and severity: one message for all that share these
    places: dict[tuple[str | None, str | None], list[Diagnostic]] = {}
    for d in members:
        said.setdefault((words(d.sentence), d.advice and words(d.advice), d.severity), []).append(d)
        if d.module is not None or d.source:
            places.setdefault((d.module, d.source), []).append(d)
    messages = []
    for found in said.values():
        text, to_do = joined([d.sentence for d in found]), None
        if found[0].advice:
            to_do = joined([d.advice for d in found if d.advice])
        messages.append(Message(_runs(found), text, to_do, found[0].severity, found))
    return FindingGroup(
        code=first.code,
        name=first.name,
        severity=first.severity,
        op=first.op,
        runs=_runs(members),
        messages=messages,
        places=[FindingPlace(module, source, _runs(found)) for (module, source), found in places.items()],
        harmless=all(map(is_harmless, members)),
        matters=any(d.matters for d in members),
        share=max((d.share for d in members if d.share is not None), default=None),
        rests_on=list(dict.fromkeys(d.rests_on for d in members if d.rests_on)),
        size=len(members),
        calls=sum(d.calls for d in members),
    )


def _runs(members: Iterable[Diagnostic]) -> list[str]:
    return list(dict.fromkeys(d.run_label for d in members if d.run_label))


def is_harmless(diagnostic: Diagnostic) -> bool:
    """Whether it is known that its run does not fail for it."""
    return diagnostic.severity == "note" and diagnostic.matters is False


def tally(diagnostics: Sequence[Diagnostic]) -> str:
    """``12 findings: 8 errors, 4 notes``; those that the baseline accepts are counted apart."""
    reported = [d for d in diagnostics if not d.accepted]
    counts = [(severity, sum(d.severity == severity for d in reported)) for severity in SEVERITIES]
    by_severity = ", ".join(counted(number, severity) for severity, number in counts if number)
    # what the baseline accepts is not part of the total
    accepted = fill(" · {:,} accepted by the baseline", len(diagnostics) - len(reported))
    return f"{counted(len(reported), 'finding')}{fill(': {}', by_severity)}{accepted}"


# -- Lines of the first screen

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
