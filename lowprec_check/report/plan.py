"""A plan as text: the attempt from each base, the modules kept in fp32 and why, the code to paste."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from lowprec_check.analysis.run_summary import counted, in_fp32, short_op
from lowprec_check.analysis.speed import ratio_text
from lowprec_check.report.console import print_table, screen
from lowprec_check.report.escape import visible
from lowprec_check.schema.plan import Attempt, Plan, Planning
from lowprec_check.schema.run_key import qualified

SHOWN_MODULES = 20


def render(planning: Planning, *, width: int = 100, color: bool = False) -> str:
    """The screen as text, ``width`` columns wide, with ANSI colours if ``color``."""
    with screen(width, color) as (console, printed):
        console.print(Text(f"lowprec-check plan · {planning.model} · {planning.device}", style="bold"))
        console.print()
        _print_attempts(console, planning.attempts)
        console.print()
        for line in constant_lines(planning.attempts):
            console.print(line)
        if planning.plan is None:
            console.print(Text(_nothing(planning.attempts), style="bold red"))
        else:
            _print_plan(console, planning.plan)
    return printed.text


def _print_attempts(console: Console, attempts: Sequence[Attempt]) -> None:
    rows: list[list[str | Text]] = [
        [
            attempt.base,
            Text(attempt.status, style="green" if attempt.status == "ok" else "red"),
            f"{attempt.rel_l2:.1e}" if attempt.rel_l2 is not None else "–",
            str(attempt.kept) if attempt.kept is not None else "–",
            f"{attempt.speedup:.2f} ×" if attempt.speedup is not None else "–",
            str(attempt.trials),
            attempt.outcome,
        ]
        for attempt in attempts
    ]
    figures = ["error", "kept", "speed", "trials"]
    print_table(console, ["base", "as it is", *figures, "plan"], rows, right=figures, sentences=True)


def _print_plan(console: Console, plan: Plan) -> None:
    kept = f"with {in_fp32(plan.keep_fp32, len(plan.modules))}" if plan.keep_fp32 else "as it is"
    label = visible(qualified(plan.base, plan.backend, plan.memory_format))
    console.print(Text.assemble((f"Use {label} {kept}: ", "bold green"), _proof(plan)))
    for line in kept_lines(plan):
        console.print(line)
    console.print()
    for code in plan.code.splitlines():
        console.print(Text(f"    {code}"), soft_wrap=True)


def _nothing(attempts: list[Attempt]) -> str:
    if any(attempt.stopped_without_plan for attempt in attempts):
        return "No plan was found in time. Raise --max-trials or --budget."
    return "No plan passes. Stay in fp32, or fix the causes shown above."


def _proof(plan: Plan) -> str:
    if plan.fp32_metric is not None:
        parts = [f"metric {plan.metric:.4g} (fp32 {plan.fp32_metric:.4g}, may drop {plan.max_drop:.2g})"]
    else:
        predicted = f"predicted {plan.predicted:.1e}, proven " if plan.predicted is not None else ""
        if plan.evidence == "predicted":
            predicted = "predicted "
        parts = [f"error {predicted}{plan.rel_l2 or 0:.1e}, tolerance {plan.tolerance or 0:.0e}"]
    if plan.evidence == "predicted":
        parts.append(f"nothing ran on {plan.device}")
    if plan.batches > 1:
        parts.append(f"on each of {plan.batches} batches")
    if plan.speedup is not None:
        parts.append(ratio_text(plan.speedup))
    if plan.trials:
        first = f" (number {plan.first_pass} was the first to pass)" if (plan.first_pass or 1) < plan.trials else ""
        parts.append(f"{counted(plan.trials, 'trial')} in {plan.seconds:.1f} s{first}")
    if plan.stopped is not None:
        parts.append(f"the search stopped {plan.stopped}; fewer modules may suffice")
    elif plan.unconfirmed:
        tried = len(plan.keep_fp32) - plan.unconfirmed
        parts.append(
            f"moving any of {tried} of them to 16 bits fails; {plan.unconfirmed} were not tried alone, as predicted to be needed"
        )
    elif plan.keep_fp32:
        parts.append("moving any of them to 16 bits fails")
    return "; ".join(parts) + "."


def kept_lines(plan: Plan) -> Iterator[Text]:
    """One line per kept module: the op that causes the failure, and its place."""
    for blame in plan.blame[:SHOWN_MODULES]:
        what = f"{short_op(blame.op)} {blame.why}" if blame.op else blame.why
        place = f"  {visible(blame.source)}" if blame.source else ""
        yield Text.assemble(f"  {visible(blame.module)}", ("  " + visible(what), "dim"), (place, "dim"))
    if len(plan.blame) > SHOWN_MODULES:
        yield Text(f"  … and {len(plan.blame) - SHOWN_MODULES} more (--save, --json)", style="dim")


def constant_lines(attempts: list[Attempt]) -> Iterator[Text]:
    """One line per constant that exceeds the range of the dtype."""
    seen = set()
    for attempt in attempts:
        for constant in attempt.constants:
            if (constant.source, constant.use) not in seen:
                seen.add((constant.source, constant.use))
                value = f"{constant.value:g}" if constant.value is not None else "a constant"
                place = constant.source or constant.module or "the model"
                yield Text(f"{place}: {value} exceeds the range of {attempt.base}; use {constant.use}", style="yellow")
