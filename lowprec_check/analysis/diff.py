"""The difference of two results: what is worse, better, or only different."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from lowprec_check.analysis.baseline import file_of, without_numbers
from lowprec_check.analysis.conclusion import OPTION, WITH_BASELINE
from lowprec_check.analysis.run_summary import effective_status, failing_gaps, label, memory_ratio, was_checked
from lowprec_check.analysis.speed import SHORT_MS, is_faster, speed
from lowprec_check.analysis.statements.advice import in_fp32
from lowprec_check.analysis.statements.status import error_text, passes_but, why_not
from lowprec_check.analysis.training_status import way_text
from lowprec_check.schema.findings import Recommendation
from lowprec_check.schema.module_paths import role_of
from lowprec_check.schema.registry import objects_of_features
from lowprec_check.schema.run_key import EAGER, RunKey
from lowprec_check.schema.scan_diff import DiffSide, Direction, Kind, RunPair, ScanChange, ScanDiff
from lowprec_check.schema.scan_result import Gap, Run, ScanResult
from lowprec_check.schema.statements import chained, counted, milliseconds, percent, plain, say
from lowprec_check.schema.verdict import look

ERROR_FACTOR = 2.0
"""One bit. The same kernels give the same error to the last digit; others (another blocking,
another thread count) sum in another order, which changes rel_l2 by tens of per cent, but not by a
factor of 2.
"""

TIME_FACTOR = 1.5
"""The medians must differ by this factor, and the intervals of the two scans must not overlap:
kernels and their order in memory change a little between any two builds. Older files have no
intervals: their medians vary by about 10 per cent between processes on a shared machine, and a
ratio of two ratios by 20.
"""

MEMORY_FACTOR, PROCESS_FACTOR = 1.05, 1.15
"""Counted memory of tensors differs by a few per cent; measured memory of processes by more."""

ERROR_FLOOR = 1e-7  # errors below fp32's own rounding carry no information


class Comparison(NamedTuple):
    """What a feature compares in two results; an object in its module ``diff``."""

    of_runs: Callable[[Run, Run], Iterable[ScanChange]]
    """What changed from a run to the same one of the new scan."""
    conditions: Callable[[ScanResult], Mapping[str, object]]
    """What a scan was made with, by name; empty if it was made without the feature."""


def diff_scans(old: ScanResult, new: ScanResult) -> ScanDiff:
    """Compare run by run, matched by precision and backend; ignore errors and times that change by
    less than :data:`ERROR_FACTOR` and :data:`TIME_FACTOR`.

    Each change between a measured and a predicted result says so. Predictions have no times, so
    none are compared.
    """
    # runs of the new scan first, then those that it lacks
    before, after = _by_key(old), _by_key(new)
    pairs = [(before.get(key), after.get(key)) for key in dict.fromkeys([*after, *before])]
    changes: list[ScanChange] = []
    direction: Direction
    for was, is_now in pairs:
        if was is not None and is_now is not None:
            changes += _changes(was, is_now, old, new)
        elif is_now is not None:
            status, what = effective_status(is_now, new.runs), "not in the old scan"
            changes.append(ScanChange(kind="run", direction="other", run=label(is_now), what=what, new=status))
        elif was is not None:
            # worse if it passed before and was requested now: it may fail
            status, asked, why = effective_status(was, old.runs), _was_asked(was, new), ""
            if was.base is not None:
                why = ": the plan is another one" if new.plan is not None else ": no plan was made"
            elif not asked:
                why = ": not requested"
            is_lost = status == "ok" and asked and was.base is None
            direction, what = "worse" if is_lost else "other", f"missing from the new scan{why}"
            changes.append(ScanChange(kind="run", direction=direction, run=label(was), what=what, old=status))
    recommended, recommends = _recommended(old), _recommended(new)
    if recommended != recommends:
        untried = old.recommendation is not None and not _was_asked(old.recommendation, new)
        direction = "better" if recommended is None else "other"
        if recommends is None and not untried:
            direction = "worse"
        what = f"the recommendation changed{': the new scan did not run the old one' if untried else ''}"
        best, best_now = recommended or "none", recommends or "none"
        changes.append(
            ScanChange(kind="recommendation", direction=direction, run="", what=what, old=best, new=best_now)
        )
    if old.evidence != new.evidence:  # one side did not run: the prediction may be wrong
        known_from = f" ({old.evidence} before, {new.evidence} now)"
        changes = [msgspec.structs.replace(change, what=f"{change.what}{known_from}") for change in changes]
    order = {"worse": 0, "better": 1, "other": 2}
    changes.sort(key=lambda change: order[change.direction])
    return ScanDiff(
        old=_side(old),
        new=_side(new),
        warnings=list(_warnings(old, new)),
        runs=[
            RunPair(run=label(run), **_figures("old", was, old), **_figures("new", is_now, new))
            for was, is_now in pairs
            if (run := is_now or was)
        ],
        changes=changes,
        regressions=sum(change.direction == "worse" for change in changes),
        improvements=sum(change.direction == "better" for change in changes),
    )


def _figures(which: str, run: Run | None, result: ScanResult) -> dict[str, Any]:
    """The fields of a :class:`RunPair` for the ``old`` or ``new`` run; none if a scan lacks it."""
    if run is None:
        return {}
    figures: dict[str, Any] = {
        "status": effective_status(run, result.runs),
        "time": speed(run, result.runs).time,
        "memory": memory_ratio(run, result.runs),
    }
    if run.is_forward:
        figures["error"] = run.relative_error
    return {f"{which}_{name}": value for name, value in figures.items()}


def _by_key(result: ScanResult) -> dict[tuple[RunKey, str | None, int], Run]:
    """Runs by key without device, by base of a plan, and by number among those with the same."""
    runs: dict[tuple[RunKey, str | None, int], Run] = {}
    for run in result.runs:
        key = run.key._replace(device=""), run.base
        runs[(*key, sum(other[:2] == key for other in runs))] = run
    return runs


def _side(result: ScanResult) -> DiffSide:
    env = result.environment
    return DiffSide(
        target=result.target,
        model=result.model.name,
        tool=result.tool,
        torch=result.torch,
        device=f"{env.get('device')} ({env.get('device_name')})",
        evidence=result.evidence,
    )


# -- what changed


def _was_asked(run: Run | Recommendation, result: ScanResult) -> bool:
    """Whether the scan was asked to run it; true if the result does not record what was asked."""
    axes = {"precisions": run.precision, "backends": run.backend, "memory_formats": run.memory_format}
    lists = [(result.options.get(axis), name) for axis, name in axes.items()]
    return all(not isinstance(names, list) or name in names for names, name in lists)


def _changes(before: Run, after: Run, old: ScanResult, new: ScanResult) -> Iterator[ScanChange]:
    was, is_now = effective_status(before, old.runs), effective_status(after, new.runs)
    if before.status == after.status == "ok" and "unjudged" not in (was, is_now):
        yield from _elsewhere(before, after)
    elif was != is_now:
        directions: dict[int, Direction] = {1: "worse", 0: "other", -1: "better"}
        worse = look(is_now).rank - look(was).rank
        direction = directions[(worse > 0) - (worse < 0)]
        fails = why_not(after, new.runs)
        what = fails.sentence.text if fails else "passes now"
        yield ScanChange(kind="status", direction=direction, run=label(after), what=what, old=was, new=is_now)
    # new and fixed failures, a change per op; matched without lines and indices, which move
    failed, failing = (
        {(gap.op, gap.kind, gap.phase, role_of(gap.module), file_of(gap.source)): gap for gap in failing_gaps(run)}
        for run in (before, after)
    )
    state: tuple[Direction, str] = ("worse", "new") if was_checked(before) else ("other", "not checked before")
    gaps = list(_gap_changes(after, [gap for place, gap in failing.items() if place not in failed], *state))
    if was_checked(after):
        fixed = [gap for place, gap in failed.items() if place not in failing]
        gaps += _gap_changes(before, fixed, "better", "fixed")
    yield from gaps
    # another exception without another gap: the model fails otherwise
    raised = [run.exception and without_numbers(run.exception.text) for run in (before, after)]
    if was == is_now == "error" and raised[0] != raised[1] and not gaps:
        reasons = filter(None, (why_not(after, new.runs), why_not(before, old.runs)))
        what = "; before: ".join(fails.sentence.text for fails in reasons)
        yield ScanChange(kind="status", direction="other", run=label(after), what=what)
    # errors are of the same output
    same_output = before.compared_module == after.compared_module and before.output_is_zero == after.output_is_zero
    same_output = same_output and before.is_forward and after.is_forward  # else it is that of the first step
    if same_output and not after.is_reference:
        yield from _errors(before, after)
    for comparison in objects_of_features("diff", Comparison):
        yield from comparison.of_runs(before, after)
    yield from _speed(before, after, old, new)
    # memory of the same kind, relative to fp32
    of_fp32, now_of_fp32 = memory_ratio(before, old.runs), memory_ratio(after, new.runs)
    of_processes = [run.process_memory_bytes is not None for run in (before, after)]  # an older file counts tensors
    if of_fp32 and now_of_fp32 and not after.is_reference and of_processes[0] == of_processes[1]:
        ratio = now_of_fp32 / of_fp32
        factor = PROCESS_FACTOR if of_processes[0] else MEMORY_FACTOR
        if not 1 / factor <= ratio <= factor:
            what = _compared("the peak memory is {times:times}", ratio, "as large as before", "smaller than before")
            shares = f"{percent(of_fp32)} of fp32's", f"{percent(now_of_fp32)} of fp32's"
            yield _moved("memory", after, ratio, what, *shares)


def _errors(before: Run, after: Run) -> Iterator[ScanChange]:
    """That the output error changed, or what the measure says that decides in both scans."""
    meaning, new_meaning = before.by_meaning, after.by_meaning
    if meaning is not None and new_meaning is not None and meaning.measure == new_meaning.measure:
        # Figures with units of their own are compared by the parts of their limits
        used = max(meaning.used, LEAST_USED), max(new_meaning.used, LEAST_USED)
        words = (
            f"the part of the limit of {meaning.measure} is {{times:times}}",
            "as large as before",
            "smaller than before",
        )
        yield from error_changes(after, used, words, (meaning.shown, new_meaning.shown))
        return
    error, new_error = before.relative_error, after.relative_error
    if error is not None and new_error is not None:
        words = "the output error is {times:times}", "as large as before", "smaller than before"
        yield from error_changes(after, (error, new_error), words, (error_text(before) or "", error_text(after) or ""))


LEAST_USED = 0.01
"""The part of a measure's limit below which a change is none."""


def error_changes(
    run: Run, errors: tuple[float, float], words: tuple[str, str, str], texts: tuple[str, str]
) -> Iterator[ScanChange]:
    """That an error of ``run`` changed by :data:`ERROR_FACTOR` between two scans.

    ``words`` are what is compared and how it changed, if it grew and if not; ``texts`` show both.
    """
    before, after = (max(error, ERROR_FLOOR) for error in errors)
    ratio = after / before
    if not 1 / ERROR_FACTOR <= ratio <= ERROR_FACTOR:
        yield _moved("error", run, ratio, _compared(words[0], ratio, *words[1:]), *texts)


def _elsewhere(before: Run, after: Run) -> Iterator[ScanChange]:
    """Whether a passing run also passes on further inputs, of which one scan may have more."""
    failed, fails = passes_but(before), passes_but(after)
    if (failed is None) == (fails is None):
        return
    tried, tries = (run.further_inputs.tried if run.further_inputs else 0 for run in (before, after))
    # more inputs find more failures: that alone is no change of the model
    direction: Direction = "other"
    if fails is not None and tried >= tries:
        direction = "worse"
    elif fails is None and tries >= tried:
        direction = "better"
    sides = []
    for why, number in ((fails, tries), (failed, tried)):
        passes = f"passes on {counted(number, 'further input')}" if number else "passes"
        sides.append(why.text if why is not None else passes)
    yield ScanChange(kind="status", direction=direction, run=label(after), what="; before: ".join(sides))


def _gap_changes(run: Run, gaps: list[Gap], direction: Direction, state: str) -> Iterator[ScanChange]:
    by_op: dict[tuple[str, str], list[Gap]] = {}
    for gap in gaps:
        by_op.setdefault((gap.op, gap.kind), []).append(gap)
    for (op, kind), places in by_op.items():
        first, fails = places[0], "{kind:text}: {op:op} in {module:module}"
        parts = [say(fails, kind=f"{kind} ({state})", op=op, module=first.module or "")]
        if first.source:
            parts.append(plain(f"at {first.source}"))
        if len(places) > 1:
            parts.append(say("and {more:count more place}", more=len(places) - 1))
        what = chained(*parts, between=" ")
        yield ScanChange(kind="gap", direction=direction, run=label(run), what=what.text)


_MACHINE = ("device", "device_name", "cpu_capability", "threads", "platform")


def _speed(before: Run, after: Run, old: ScanResult, new: ScanResult) -> Iterator[ScanChange]:
    """Slower only if relative to fp32, and on the same machine by the absolute time too."""
    # a busy machine changes the absolute time, a faster fp32 the relative one
    was, is_now = before.latency_ms, after.latency_ms
    # with --times off, times that are there were not taken beside fp32's
    is_off = "off" in (old.options.get("times"), new.options.get("times"))
    if was is None or is_now is None or is_off:
        return
    absolute = is_now / was
    same_machine = all(old.environment.get(key) == new.environment.get(key) for key in _MACHINE)
    if after.is_reference:
        if same_machine and min(was, is_now) >= SHORT_MS and not 1 / TIME_FACTOR <= absolute <= TIME_FACTOR:
            what = _compared("{times:times}", absolute, "slower than before", "as fast as before")
            yield _moved("speed", after, absolute, what, milliseconds(was), milliseconds(is_now), "other")
        return
    first, second = speed(before, old.runs), speed(after, new.runs)
    slower, faster = is_faster(first, second, TIME_FACTOR), is_faster(second, first, TIME_FACTOR)
    if same_machine:
        slower, faster = slower and absolute > TIME_FACTOR, faster and absolute < 1 / TIME_FACTOR
    has_figures = first.has_figure and second.has_figure
    if (slower or faster) and has_figures and first.ratio and second.ratio:
        relative = first.ratio / second.ratio
        what = _compared("relative to fp32 {times:times}", relative, "slower than before", "as fast as before")
        yield _moved("speed", after, relative, what, first.text(), second.text())


def _moved(
    kind: Kind, run: Run, ratio: float, what: str, old: str, new: str, direction: Direction | None = None
) -> ScanChange:
    """A figure that grew is worse, unless ``direction`` is given."""
    direction = direction or ("worse" if ratio > 1 else "better")
    return ScanChange(kind=kind, direction=direction, run=label(run), what=what, old=old, new=new, ratio=ratio)


def _compared(what: str, ratio: float, more: str, less: str) -> str:
    return say(f"{what} {more if ratio > 1 else less}", times=max(ratio, 1 / ratio)).text


def _recommended(result: ScanResult) -> str | None:
    advice = result.recommendation
    if advice is None:
        return None
    name = advice.label + way_text(advice.way)
    if advice.kept:
        name += f" with {in_fp32(advice, result.model.modules, result.plan)}"
    if advice.stay_in_fp32:
        return f"fp32 (rather than {name})"
    return name


# -- conditions that differ

_DEFAULTS = {"backends": [EAGER]}
"""What scans used before an option was saved."""


def _warnings(old: ScanResult, new: ScanResult) -> Iterator[str]:
    if old.prediction != new.prediction:
        yield f"evidence: {_evidence(old)} → {_evidence(new)}"
    for name in ("target", "tool"):
        if getattr(old, name) != getattr(new, name):
            yield f"{name}: {getattr(old, name)} → {getattr(new, name)}"
    for name in ("name", "parameters", "inputs", "training"):
        was, is_now = getattr(old.model, name), getattr(new.model, name)
        if was != is_now:
            yield f"model {name}: {_shown(was)} → {_shown(is_now)}"
    for comparison in objects_of_features("diff", Comparison):
        made_with, is_made_with = comparison.conditions(old), comparison.conditions(new)
        for name in made_with:
            if name in is_made_with and made_with[name] != is_made_with[name]:
                yield f"{name}: {_shown(made_with[name])} → {_shown(is_made_with[name])}"
    for title, before, after in (("", old.environment, new.environment), ("option ", old.options, new.options)):
        # which runs are explained changes nothing that is compared
        for key in sorted((before.keys() | after.keys()) - {OPTION, WITH_BASELINE, "explain"}):
            was, is_now = (options.get(key, _DEFAULTS.get(key)) for options in (before, after))
            # the order in which options were given does not matter
            unordered = [sorted(value) if isinstance(value, list) else value for value in (was, is_now)]
            if unordered[0] != unordered[1]:
                yield f"{title}{key}: {_shown(was)} → {_shown(is_now)}"


def _evidence(result: ScanResult) -> str:
    """``measured``; ``predicted for xpu, torch 2.13 (declared for xpu, torch 2.13)``."""
    device = result.prediction
    if device is None:
        return result.evidence
    return f"predicted for {device.name}, torch {device.torch} ({device.kernels})"


def _shown(value: Any) -> str:
    if value in (None, [], ""):
        return "–"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)
