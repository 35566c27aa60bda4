"""The four lights of a scan: does it run, is it right, is it worth it, what to do. Never imports torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from lowprec_check.analysis.degenerate_output import degenerate_output
from lowprec_check.analysis.recommend import SMALLER, worth_of
from lowprec_check.analysis.run_summary import (
    NOTHING_TO_COMPARE,
    candidates,
    error_phrase,
    judged_by,
    memory_ratio,
    short_op,
    some,
    status_reason,
)
from lowprec_check.analysis.speed import Speed, speed
from lowprec_check.analysis.training_status import passing_ways, remedies
from lowprec_check.report import summary
from lowprec_check.report.escape import visible
from lowprec_check.schema.registry import choices
from lowprec_check.schema.scan_result import Run, ScanResult


def sentence(text: str) -> str:
    """``text`` with a full stop."""
    return text if text.endswith((".", "…")) else f"{text}."


Color = Literal["good", "warn", "bad", "none"]
"""``none``, grey: nothing is gained, or it cannot be told."""

_RAN = ("ok", "unjudged", "inaccurate", "nonfinite")


class Light(NamedTuple):
    """The answer to one question."""

    question: str
    color: Color
    answer: str
    """One short sentence, or a few."""

    @property
    def sign(self) -> str:
        """What the color says, for readers who do not see it."""
        return {"good": "✓", "warn": "!", "bad": "✕", "none": "–"}[self.color]


def lights(result: ScanResult) -> list[Light]:
    """The four lights, in the order of the questions."""
    return [_runs(result), _right(result), _worth(result), _do_this(result)]


# -- does it run


def _asked(result: ScanResult) -> list[Run]:
    """The runs that the scan was asked to make; a plan is an answer, not a question."""
    return [run for run in candidates(result.runs) if run.base is None and run.status != "skipped"]


def _runs(result: ScanResult) -> Light:
    question, asked = "Does it run?", _asked(result)
    failed = [run for run in asked if run.status not in _RAN and not passing_ways(run)]
    ran = len(asked) - len(failed)
    if not asked:
        return Light(question, "none", "Nothing was run.")
    told = _told(ran, asked, _RUN if result.prediction is None else _MAY_RUN, _kind(asked))
    if not failed:
        return Light(question, "good", f"{told}.")
    return Light(question, "warn" if ran else "bad", " ".join([f"{told}.", *_reasons(failed)]))


class _Verb(NamedTuple):
    one: str
    many: str
    negated: str


_RUN = _Verb("runs", "run", "does not run")
_MAY_RUN = _Verb("is predicted to run", "are predicted to run", "is predicted not to run")
_PASS = _Verb("is within the tolerance", "are within the tolerance", "is not within the tolerance")
_MAY_PASS = _Verb(
    "is predicted to be within the tolerance",
    "are predicted to be within the tolerance",
    "is predicted not to be within the tolerance",
)
_TRAIN = _Verb("stays close to fp32", "stay close to fp32", "does not stay close to fp32")


def _told(number: int, runs: Sequence[Run], verb: _Verb, which: str) -> str:
    """``2 of 4 precisions run``, ``None of the 3 precisions that run is within the tolerance``; one run is named.

    ``which`` are the runs, of which ``number`` do what the verb says.
    """
    total = len(runs)
    if total == 1:
        return f"{summary.label(runs[0])} {verb.one if number else verb.negated}"
    if number == total:
        return f"{'Both' if total == 2 else f'All {total}'} {which} {verb.many}"
    if not number:
        return f"{'Neither' if total == 2 else 'None'} of the {total} {which} {verb.one}"
    return f"{number} of {total} {which} {verb.one if number == 1 else verb.many}"


def _kind(asked: Sequence[Run]) -> str:
    """How runs are called: ``ways`` if one precision has several."""
    return "precisions" if len({run.precision for run in asked}) == len(asked) else "ways"


def _reasons(failed: Sequence[Run]) -> Iterator[str]:
    """``half and bfloat16: 4 of 21 ops have no kernel: dot, inv.``, runs with the same reason together."""
    why = _by_reason((summary.label(run), visible(_reason(run), 160)) for run in failed)
    yield from (f"{names}: {sentence(reason)}" for reason, names in why)


def _by_reason(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Each reason once, with the names that have it: ``half and bfloat16``."""
    why: dict[str, list[str]] = defaultdict(list)
    for name, reason in pairs:
        why[reason].append(name)
    return [(reason, choices(names, "and")) for reason, names in why.items()]


def _reason(run: Run) -> str:
    """Why it fails: by its error, by constants that are too large, or as every report says."""
    if run.status == "inaccurate" and run.training is None and run.tolerance:
        return _error(run) or status_reason(run)
    return too_large(run) or status_reason(run)


def too_large(run: Run) -> str:
    """``the constant -1e+09 in masked_fill is outside the range of fp16``, if nothing else fails; the exception does not say it."""
    constants = {f"{gap.constant:g} in {short_op(gap.op)}": gap for gap in run.gaps if gap.constant is not None}
    if run.status != "error" or run.failed_call or run.basis is None or not constants:
        return ""
    if any(gap.kind != "scalar-overflow" or gap.constant is None for gap in run.gaps):
        return ""
    many = len(constants) > 1
    what = f"the constant{'s' if many else ''} {some(list(constants))}"
    return f"{what} {'are' if many else 'is'} outside the range of {run.basis.format.short}"


# -- is it right


def _right(result: ScanResult) -> Light:
    question, asked = "Is it right?", _asked(result)
    ran = [run for run in asked if run.status in _RAN or passing_ways(run)]
    odd = {summary.label(run): reason for run in ran if (reason := _not_judged(run, result))}
    judged = [run for run in ran if summary.label(run) not in odd]
    passed = [run for run in judged if run.status == "ok" or passing_ways(run)]
    changed = [run for run in passed if run.status != "ok"]  # trained, and only in another way than the plain one
    if not judged:
        return Light(question, "none", _cannot(odd) if odd else "Nothing ran that could be compared.")
    verb = _TRAIN if result.training is not None else _PASS if result.prediction is None else _MAY_PASS
    which = _kind(asked) + (" that can be judged" if odd else " that run" if len(ran) < len(asked) else "")
    plan = _passing_plan(result) if not passed else None
    told = _told(len(passed), judged, verb, which)
    parts = [
        _with_closest(told, passed) if len(passed) == len(judged) and result.training is None else f"{told}.",
        *_reasons([run for run in judged if run not in passed]),
        *(f"{summary.label(run)} does so only with {some(remedies(run), most=2)}." for run in changed),
        *([_helped(plan)] if plan is not None else []),
        *([_cannot(odd)] if odd else []),
    ]
    good = len(passed) == len(judged) and not odd and not changed
    color: Color = "good" if good else "warn" if passed or plan is not None else "bad"
    return Light(question, color, " ".join(filter(None, parts)))


def _cannot(odd: Mapping[str, str]) -> str:
    """``half cannot be judged: the output is all zeros.``, runs with the same reason together."""
    why = _by_reason((name, visible(reason, 200)) for name, reason in odd.items())
    return " ".join(f"{names} cannot be judged: {sentence(reason)}" for reason, names in why)


def _not_judged(run: Run, result: ScanResult) -> str | None:
    if run.status == "unjudged":
        return "; ".join(run.notes) or NOTHING_TO_COMPARE
    return degenerate_output(run, result)


def _passing_plan(result: ScanResult) -> Run | None:
    return next((run for run in result.runs if run.base is not None and run.status == "ok"), None)


def _helped(plan: Run) -> str:
    error = _error(plan)
    return f"{summary.label(plan)}, which keeps {some(plan.keep_fp32)} in fp32, passes{f': {error}' if error else ''}."


def _with_closest(told: str, runs: Sequence[Run]) -> str:
    """``told`` with the error that is closest to its tolerance, if one is known."""
    worst = max(runs, key=lambda run: _distance(run) / (run.tolerance or 1.0))
    error = _error(worst)
    if not error:
        return f"{told}."
    return (
        f"{told}: {error}."
        if len(runs) == 1
        else f"{told}. {summary.label(worst)} is closest to its tolerance: {error}."
    )


def _error(run: Run) -> str:
    """``error 4.0e-03 (tolerance 5e-02)``, ``0.8 % of the integers differ (tolerance 5e-02)``; empty if there is none."""
    if run.output_error is None or run.output_error.distance is None:
        return ""
    compared = judged_by(run)
    where = f" in the {compared}" if compared else ""
    limit = f" (tolerance {run.tolerance:.0e})" if run.tolerance else ""
    return f"{error_phrase(run.output_error).removeprefix('output ')}{where}{limit}"


def _distance(run: Run) -> float:
    return (run.output_error.distance if run.output_error is not None else None) or 0.0


# -- is it worth it


def _worth(result: ScanResult) -> Light:
    question, best = "Is it worth it?", result.recommendation
    if best is None:
        return Light(question, "none", "Nothing passed, so there is nothing to gain.")
    if result.prediction is not None:
        return Light(question, "none", "Times and memory are not predicted.")
    run = _recommended(result)
    if run is None:
        return Light(question, "none", "It was not measured.")
    found, memory = speed(run, result.runs), memory_ratio(run, result.runs)
    parts = [_speed_text(found), _memory_text(memory)]
    told = f"{summary.label(run)}: {', '.join(filter(None, parts))}."
    if not summary.passes(result) or _not_judged(run, result):
        return Light(question, "none", f"{told} Its output could not be judged.")
    if worth_of(run, result.runs) in ("nothing", "unknown"):
        return Light(question, "none", told)
    return Light(question, "warn" if best.stay_in_fp32 or found.told == "slower" else "good", told)


def _recommended(result: ScanResult) -> Run | None:
    return next((run for run in result.runs if summary.is_recommended(run, result)), None)


def _speed_text(found: Speed) -> str:
    text = found.text()
    if text.startswith("too short"):
        return f"calls {text}"
    return f"{text} on this machine" if found.told == "noisy" else text or "not timed"


def _memory_text(ratio: float | None) -> str:
    if ratio is None:
        return ""
    percent = f"{abs(1 - ratio):.0%}".replace("%", " %")
    if ratio <= SMALLER:
        return f"saves {percent} of the memory"
    return f"takes {percent} more memory" if ratio > 2 - SMALLER else "takes about as much memory"


# -- what to do


def _do_this(result: ScanResult) -> Light:
    question, best = "What to do?", result.recommendation
    if best is None:
        return Light(question, "bad", sentence(summary.verdict(result)))
    run = _recommended(result)
    if run is not None and _not_judged(run, result):
        return Light(question, "none", f"{summary.label(run)} runs, but its output could not be judged.")
    if summary.is_gain(result) and _worth(result).color != "none":
        return Light(question, "good", sentence(summary.verdict(result)))
    unknown = best.worth == "unknown" and not best.stay_in_fp32 and result.prediction is None
    more = "; whether that gains anything cannot be told" if unknown and summary.passes(result) else ""
    return Light(question, "none", sentence(f"{summary.verdict(result)}{more}"))
