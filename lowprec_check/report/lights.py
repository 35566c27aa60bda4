"""The four lights of a scan: does it run, is it right, is it worth it, what to do. Never imports torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from lowprec_check.analysis.degenerate_output import degenerate_output
from lowprec_check.analysis.recommend import SMALLER, sentence, worth_of
from lowprec_check.analysis.run_summary import candidates, error_text, memory_ratio, status_reason
from lowprec_check.analysis.speed import Speed, speed
from lowprec_check.analysis.training_status import passing_ways
from lowprec_check.report import summary
from lowprec_check.report.escape import visible
from lowprec_check.schema.registry import choices
from lowprec_check.schema.scan_result import Run, ScanResult

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
    """The ways that the scan was asked to try; a plan is an answer, not a question."""
    return [run for run in candidates(result.runs) if run.base is None and run.status != "skipped"]


def _runs(result: ScanResult) -> Light:
    asked = _asked(result)
    failed = [run for run in asked if run.status not in _RAN and not passing_ways(run)]
    ran = len(asked) - len(failed)
    if not asked:
        return Light("Does it run?", "none", "Nothing was run.")
    if not failed:
        return Light("Does it run?", "good", f"{_all(len(asked))} {_verb(asked, result)}.")
    why = " ".join(_reasons(failed))
    return Light("Does it run?", "warn" if ran else "bad", f"{_part(ran, len(asked))} {_verb(asked, result)}. {why}")


def _verb(asked: Sequence[Run], result: ScanResult) -> str:
    what = "run" if len(asked) > 1 else "runs"
    return what if result.prediction is None else f"{'are' if len(asked) > 1 else 'is'} predicted to run"


def _all(number: int) -> str:
    return "The way that was tried" if number == 1 else "Both ways" if number == 2 else f"All {number} ways"


def _part(number: int, total: int) -> str:
    return f"{number or 'None'} of {total} {'way' if total == 1 else 'ways'}"


def _reasons(failed: Sequence[Run]) -> Iterator[str]:
    """``half and bfloat16: 4 of 21 ops have no kernel: dot, inv.``, runs with the same reason together."""
    why: dict[str, list[str]] = defaultdict(list)
    for run in failed:
        why[visible(_reason(run), 160)].append(summary.label(run))
    yield from (f"{choices(names, 'and')}: {sentence(reason)}" for reason, names in why.items())


def _reason(run: Run) -> str:
    """Why it fails; the light names the tolerance itself."""
    too_far = run.status == "inaccurate" and run.training is None and run.output_error is not None
    return f"error {_error(run)}" if too_far and run.tolerance else status_reason(run)


# -- is it right


def _right(result: ScanResult) -> Light:
    question = "Is it right?"
    ran = [run for run in _asked(result) if run.status in _RAN or passing_ways(run)]
    odd = {summary.label(run): reason for run in ran if (reason := _not_judged(run, result))}
    judged = [run for run in ran if summary.label(run) not in odd]
    passed = [run for run in judged if run.status == "ok" or passing_ways(run)]
    if not judged:
        return Light(question, "none", _cannot(odd) if odd else "Nothing ran that could be compared.")
    more = f" {_cannot(odd)}" if odd else ""
    within = "stays close to fp32" if result.training is not None else "is within the tolerance"
    if len(passed) == len(judged):
        best = "" if result.training is not None else f" The largest error is {_largest(passed)}."
        what = _all(len(judged)) if not odd else _part(len(judged), len(ran))
        return Light(question, "good" if not odd else "warn", f"{what} {_plural(within, len(judged))}.{best}{more}")
    wrong = " ".join(_reasons([run for run in judged if run not in passed]))
    plan = _passing_plan(result)
    helped = f" {summary.label(plan)} is within it: {_error(plan)}." if plan is not None and not passed else ""
    color: Color = "warn" if passed or plan is not None else "bad"
    count = _plural(within, max(1, len(passed)))
    return Light(question, color, f"{_part(len(passed), len(judged))} {count}. {wrong}{helped}{more}")


def _cannot(odd: Mapping[str, str]) -> str:
    """``half cannot be judged: the output is all zeros.``."""
    why = "; ".join(dict.fromkeys(odd.values()))
    return f"{choices(list(odd), 'and')} cannot be judged: {sentence(visible(why, 200))}"


def _not_judged(run: Run, result: ScanResult) -> str | None:
    if run.status == "unjudged":
        return "; ".join(run.notes) or "its output holds nothing to compare with fp32's"
    return degenerate_output(run, result)


def _plural(words: str, number: int) -> str:
    return words if number == 1 else words.replace("is ", "are ", 1).replace("stays ", "stay ", 1)


def _passing_plan(result: ScanResult) -> Run | None:
    return next((run for run in result.runs if run.base is not None and run.status == "ok"), None)


def _largest(runs: Sequence[Run]) -> str:
    worst = max(runs, key=lambda run: _distance(run) / (run.tolerance or 1.0))
    return _error(worst)


def _error(run: Run) -> str:
    """``4.0e-03 of 5e-02 allowed``."""
    told = error_text(run.output_error) if run.output_error is not None else "–"
    return f"{told}, {run.tolerance:.0e} is allowed" if run.tolerance else told


def _distance(run: Run) -> float:
    return (run.output_error.distance if run.output_error is not None else None) or 0.0


# -- is it worth it


def _worth(result: ScanResult) -> Light:
    question, best = "Is it worth it?", result.recommendation
    if best is None:
        return Light(question, "none", "Nothing passed, so there is nothing to gain.")
    if result.prediction is not None:
        return Light(question, "none", "Times and memory are not predicted.")
    run = next((run for run in result.runs if summary.is_recommended(run, result)), None)
    if run is None:
        return Light(question, "none", "That is not known.")
    found, memory = speed(run, result.runs), memory_ratio(run, result.runs)
    parts = [_speed_text(found), _memory_text(memory)]
    told = f"{visible(best.label)}: {', '.join(filter(None, parts))}."
    if not summary.passes(result):
        return Light(question, "none", f"{told} Its output could not be judged.")
    if worth_of(run, result.runs) in ("nothing", "unknown"):
        return Light(question, "none", told)
    return Light(question, "warn" if best.stay_in_fp32 or found.told == "slower" else "good", told)


def _speed_text(found: Speed) -> str:
    if found.told == "noisy":
        return f"{found.text()} on this machine"
    return found.text() or "not timed"


def _memory_text(ratio: float | None) -> str:
    if ratio is None:
        return ""
    percent = f"{abs(1 - ratio):.0%}".replace("%", " %")
    if ratio <= SMALLER:
        return f"saves {percent} of the memory"
    return f"takes {percent} more memory" if ratio > 2 - SMALLER else "about as much memory"


# -- what to do


def _do_this(result: ScanResult) -> Light:
    gains = summary.is_gain(result) and _worth(result).color != "none"
    color: Color = "bad" if result.recommendation is None else "good" if gains else "none"
    return Light("What to do?", color, sentence(summary.verdict(result)))
