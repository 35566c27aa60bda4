"""Findings for people, grouped by code and op; a sentence is true of every run it names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lowprec_check.schema.findings import Diagnostic, ReportedCase, Severity
from lowprec_check.schema.statements import counted, fill, joined, module_name, some, words

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")  # the most severe first
CHOICES = "LP304"  # the code of choices that differ from fp32's
MOST = 0.5  # from this share of the error on, other findings are effects of choices, or small


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
    decides = group.code == CHOICES and group.matters and share >= MOST
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
