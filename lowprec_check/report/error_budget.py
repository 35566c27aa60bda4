"""Where the error of a run comes from, in words: a line per run for a screen, and the parts with their shares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from lowprec_check.analysis.blamed_modules import is_confirmed
from lowprec_check.analysis.degenerate_output import output_rms, tiny_output
from lowprec_check.analysis.error_shares import (
    PartShare,
    cumulative,
    fails_by_error,
    is_over_tolerance,
    line_shares,
    main_causes,
    module_name,
    module_shares,
    share_text,
    trusted_budget,
    unlisted,
)
from lowprec_check.analysis.run_summary import candidates, short_op
from lowprec_check.report.ablation import ablation_text
from lowprec_check.report.escape import visible
from lowprec_check.report.summary import is_recommended, label
from lowprec_check.schema.error_budget import MATTERS, ErrorBudget
from lowprec_check.schema.scan_result import Run, ScanResult

TITLE = "Where the error comes from"
SHOWN_LINES = 3
NAMED_MODULES = 3
SHOWN_MODULES = 8
_LEAST = 0.0005
"""Parts with smaller shares are left out."""
ALIKE = 0.05
"""Runs have one line if the same modules cause their errors, and no share differs by more."""


# -- lines


class _Answer(NamedTuple):
    runs: list[Run]
    causes: list[PartShare]
    remarks: list[str]
    texts: list[str]


def budget_lines(result: ScanResult) -> list[str]:
    """``half: 46 % lm_head (linear, model.py:41), 12 % ln_f; 5 % not explained``, for runs that fail, then the best one.

    Runs with the same answer share a line; at most :data:`SHOWN_LINES`.
    """
    answers: list[_Answer] = []
    for run in told_runs(result):
        text, causes = _told(run)
        remarks = _remarks(run)
        known = next((answer for answer in answers if _same(answer, causes, remarks, text)), None)
        if known is not None:
            known.runs.append(run)
            known.texts.append(text)
        elif text:
            answers.append(_Answer([run], causes, remarks, [text]))
    return [_line(answer) for answer in answers[:SHOWN_LINES]]


def told_runs(result: ScanResult) -> list[Run]:
    """The runs whose budget a reader needs: those that fail by their error or cannot be judged, then the recommended one."""
    runs = [run for run in candidates(result.runs) if run.budget is not None]
    failing = [run for run in runs if fails_by_error(run) or _is_empty(run)]
    return failing + [run for run in runs if is_recommended(run, result) and run not in failing]


def _is_empty(run: Run) -> bool:
    return run.status == "unjudged" and run.output_is_zero


def _same(answer: _Answer, causes: Sequence[PartShare], remarks: Sequence[str], text: str) -> bool:
    if text in answer.texts:
        return True
    if list(remarks) != answer.remarks:
        return False
    pairs = list(zip(answer.causes, causes, strict=False))
    is_alike = all(one.name == other.name and abs(one.share - other.share) <= ALIKE for one, other in pairs)
    return len(answer.causes) == len(causes) > 0 and is_alike


def _remarks(run: Run) -> list[str]:
    """What the answer of ``run`` says beside shares: runs share a line only if it is true of all."""
    budget = run.budget
    if budget is None or not fails_by_error(run):
        return []
    return [*filter(None, (_degenerate(run, budget), _not_the_failure(run, budget)))]


def _line(answer: _Answer) -> str:
    names = ", ".join(label(run) for run in answer.runs)
    about = "about " if len(set(answer.texts)) > 1 else ""
    return visible(f"{names}: {about}{answer.texts[0]}", 600)


def _told(run: Run) -> tuple[str, list[PartShare]]:
    """What the budget of ``run`` says, and the causes named; empty if it says nothing that a reader needs."""
    budget = run.budget
    if budget is None:
        return "", []
    odd = _degenerate(run, budget)
    fails = fails_by_error(run) or _is_empty(run)
    if budget.measured == 0.0 and not fails:
        return "", []
    if trusted_budget(run) is None:
        return ("; ".join(filter(None, _without_shares(run, budget, odd))), []) if fails else ("", [])
    modules = module_shares(run)
    causes = main_causes(modules, NAMED_MODULES)
    parts = (
        [odd, _shares(run, budget, modules, causes), ablation_text(run)]
        if fails_by_error(run)
        else [_shares(run, budget, modules, causes)]
    )
    return "; ".join(filter(None, parts)), causes


def _without_shares(run: Run, budget: ErrorBudget, odd: str) -> list[str]:
    """What is known of a failing run whose budget names no cause."""
    return [odd or ("" if is_confirmed(run) else _unknown(run, budget)), ablation_text(run)]


def _degenerate(run: Run, budget: ErrorBudget) -> str:
    """What is odd about the output itself."""
    rms = output_rms(run)
    if rms == 0 or (rms is None and run.output_is_zero and not budget.known):
        return "the fp32 output is all zeros, so a relative error has no meaning"
    tiny = tiny_output(run)
    return f"{tiny}; usual with random weights" if tiny else ""


def _unknown(run: Run, budget: ErrorBudget) -> str:
    """Why no cause can be named."""
    if not budget.known:
        return f"not known: {budget.reason or 'it was not computed'}"
    if trusted_budget(run) is not None:
        return ""
    unexplained = budget.unexplained or 0.0
    choices = f"; {share_text(budget.decisions)} choices that differ from fp32" if budget.decisions >= MATTERS else ""
    if unexplained > 0:
        return f"not known: first order explains only {share_text(1 - unexplained)} of the error{choices}"
    ratio = (budget.predicted or 0.0) / (budget.measured or 1.0)
    return f"not known: first order predicts an error {ratio:.1f} times as large as that of the run{choices}"


def _shares(run: Run, budget: ErrorBudget, modules: Sequence[PartShare], causes: Sequence[PartShare]) -> str:
    named = ", ".join(_cause(part, is_first=index == 0) for index, part in enumerate(causes))
    parts = [named or _spread(modules)]
    if budget.decisions >= MATTERS:
        parts.append(f"{share_text(budget.decisions)} choices that differ from fp32")
    rest = (budget.unexplained or 0.0) - budget.decisions
    if rest >= MATTERS:
        parts.append(f"{share_text(rest)} not explained")
    elif rest <= -MATTERS:
        parts.append(f"first order predicts {share_text(-rest)} too much")
    return "; ".join([*parts, *filter(None, [_not_the_failure(run, budget)])])


def _not_the_failure(run: Run, budget: ErrorBudget) -> str:
    """What the shares are about, if not the error that makes the run fail."""
    if is_over_tolerance(run) or not fails_by_error(run):
        return ""
    where = "in eager mode" if not run.is_eager else "in the first call" if run.failed_call else "op by op"
    return f"{where}, where the error of {budget.measured or 0.0:.1e} is within the tolerance"


def _cause(part: PartShare, is_first: bool) -> str:
    """``46 % lm_head (linear, model.py:41)``; the op and line only of the first."""
    text = f"{share_text(part.share)} {module_name(part.name)}"
    if not is_first:
        return text
    what = f"rounding of {short_op(part.largest.op)}" if part.largest.rounding else short_op(part.largest.op)
    where = ", ".join(filter(None, (what, part.largest.source)))
    return f"{text} ({where})"


def _spread(modules: Sequence[PartShare]) -> str:
    """For an error to which every module adds a little."""
    parts = [part for part in modules if part.share > 0]
    if not parts:
        return "no module stands out"
    first = parts[0]
    count = f"{len(parts):,} modules" if len(parts) > 1 else "1 module"
    return f"spread over {count}; the largest is {share_text(first.share)} {module_name(first.name)}"


# -- parts with their shares, for tables and bars


class Bar(NamedTuple):
    """One part of the error: a module, the sum of the others, or what is not explained."""

    name: str
    share: float
    text: str
    total: str
    """This part and all above it; empty for those that are not modules."""
    op: str
    source: str


def module_bars(run: Run) -> list[Bar]:
    """The modules with the largest shares, the others, the choices, and what is not explained."""
    budget = trusted_budget(run)
    if budget is None:
        return []
    parts = [part for part in module_shares(run) if abs(part.share) >= _LEAST]
    shown = _largest(parts)
    found = _bars(shown, module_name)
    more = len(parts) - len(shown)
    rest = (budget.unexplained or 0.0) - budget.decisions
    sums = [
        (f"{more:,} other modules" if more > 1 else "others", unlisted(run, shown)),
        ("choices that differ", budget.decisions),
    ]
    found += [_sum(name, share) for name, share in sums if abs(share) >= _LEAST]
    return [*found, _sum("not explained", rest)]


def line_bars(run: Run) -> list[Bar]:
    """The lines with the largest shares."""
    parts = line_shares(run) if trusted_budget(run) else []
    return _bars(_largest([part for part in parts if abs(part.share) >= _LEAST]), lambda line: line)


def _largest(parts: Sequence[PartShare]) -> list[PartShare]:
    """Those to show, also negative ones if they are large."""
    kept = sorted(parts, key=lambda part: -abs(part.share))[:SHOWN_MODULES]
    return sorted(kept, key=lambda part: -part.share)


def _bars(parts: Sequence[PartShare], name_of: Callable[[str], str]) -> list[Bar]:
    return [
        Bar(
            visible(name_of(part.name)),
            part.share,
            share_text(part.share),
            share_text(total),
            visible(short_op(part.largest.op)),
            visible(part.largest.source or ""),
        )
        for part, total in zip(parts, cumulative(parts), strict=True)
    ]


def _sum(name: str, share: float) -> Bar:
    return Bar(name, share, share_text(share), "", "", "")


class BudgetTable(NamedTuple):
    """The budget of one run, as a report shows it."""

    label: str
    text: str
    """The line of the run, without its label."""
    predicted: str
    bars: list[Bar]
    lines: list[Bar]


def tables(runs: Iterable[Run]) -> Iterator[BudgetTable]:
    """A table for each of ``runs`` whose budget says something."""
    for run in runs:
        (text, _), found = _told(run), module_bars(run)
        if text or found:
            yield BudgetTable(label(run), visible(text, 600), predicted(run.budget), found, line_bars(run))


def all_tables(result: ScanResult) -> list[BudgetTable]:
    """The tables of all runs: first those of :func:`told_runs`."""
    first = told_runs(result)
    rest = [run for run in candidates(result.runs) if run.budget is not None and run not in first]
    return list(tables([*first, *rest]))


def predicted(budget: ErrorBudget | None) -> str:
    """``error 2.3e-01 op by op, 1.9e-01 predicted to first order``; empty if there is none."""
    if budget is None or budget.predicted is None:
        return ""
    measured = "" if budget.measured is None else f"error {budget.measured:.1e} op by op, "
    return f"{measured}{budget.predicted:.1e} predicted to first order"
