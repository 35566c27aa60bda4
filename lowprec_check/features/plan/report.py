"""A search for modules to keep in fp32, as blocks: attempts from each base, plan, reasons, code."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from lowprec_check.analysis.speed import ALIKE, TOLD, ratio_text
from lowprec_check.analysis.statements.advice import in_fp32
from lowprec_check.analysis.suspects import kept_because
from lowprec_check.report.blocks import Block, CodeBlock, Column, Detail, Document, Row, Say, Table, speed_of
from lowprec_check.report.feature_parts import Section
from lowprec_check.schema.axes import kept_in
from lowprec_check.schema.module_paths import patterns
from lowprec_check.schema.plan import Constant, Plan, Planning
from lowprec_check.schema.run_key import qualified
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.statements import Sentence, Statement, agree, chained, plain, say, say_if

_COLUMNS = [
    Column("base", "run"),
    Column("as it is", "status"),
    Column("error", "error", "Of the output against fp32, before any module is kept in fp32."),
    Column("kept", "number", "Modules that the plan keeps in fp32."),
    Column("speed", "speed", "Of the plan, against fp32."),
    Column("trials", "number"),
    Column("plan", "sentence"),
]


def plan_document(planning: Planning) -> Document:
    """The attempts, and the plan if one was found."""
    title, plan = f"lowprec-check plan · {planning.model} · {planning.device}", planning.plan
    rows = [
        Row([a.base, a.status, a.rel_l2, a.kept, speed_of(a.speedup), a.trials, a.outcome]) for a in planning.attempts
    ]
    blocks: list[Block] = [Say(title, role="title"), Table(_COLUMNS, rows, "bases")]
    # one constant often fails in several bases: it is named once, with the first of them
    constants: dict[tuple[str | None, str], tuple[str, Constant]] = {}
    for attempt in planning.attempts:
        for constant in attempt.constants:
            constants.setdefault((constant.source, constant.use), (attempt.base, constant))
    for base, constant in constants.values():
        said = say(
            "{place:text}: {value:text} exceeds the range of {base:text}; use {use:text}",
            place=constant.source or constant.module or "the model",
            value="a constant" if constant.value is None else f"{constant.value:g}",
            base=base,
            use=constant.use,
        )
        blocks.append(Say(said.text, "warn", "note"))
    if plan is not None:
        change = "as it is"
        if plan.kept:
            change = f"with {in_fp32(plan, len(plan.modules), plan)}"
        name = qualified(plan.base, plan.backend, plan.memory_format)
        verdict = Say(f"{name} passes {change}", "none", "verdict")
        if (plan.speedup or 1.0) >= TOLD:
            verdict = Say(f"Use {name} {change}", "good", "verdict")
        elif (plan.speedup or 1.0) < 1 / ALIKE:
            verdict = Say(f"{name} passes {change}, but was slower than fp32 here", "warn", "verdict")
        # the proof follows the verdict, the code is last
        proof = chained(*_proof(plan), *_course(plan)).text
        blocks += [verdict, Say(f"{proof[:1].upper()}{proof[1:]}."), *kept_modules(plan), CodeBlock(plan.code)]
    elif any(attempt.stopped_without_plan for attempt in planning.attempts):
        blocks.append(Say("No plan was found in time. More --search-seconds may find one.", "bad", "verdict"))
    else:
        search = f"search for a patch of your code: {shlex.join(['lowprec-check', 'fix', planning.target])}"
        blocks.append(Say(f"No plan passes. Stay in fp32, or {search}.", "bad", "verdict"))
    return Document(title, blocks, plan.tool if plan else "")


def kept_modules(plan: Plan, detail: Detail = "first") -> list[Block]:
    """Why each module of a plan stays in fp32."""
    by_reason: dict[str, list[str]] = {}
    for blame in plan.blame:
        by_reason.setdefault(kept_because(blame), []).append(blame.module)
    rows = [
        Row([name, reason], module=name if name in modules else modules[0])
        for reason, modules in by_reason.items()
        for name in patterns(modules, plan.modules)
    ]
    kept = f"kept in {kept_in(plan.backend, plan.base)}"
    columns = [Column(kept, "module"), Column("why", "sentence")]
    if rows:
        return [Table(columns, rows, f"modules {kept}", most=20, detail=detail)]
    return []


def _proof(plan: Plan) -> Iterator[Sentence]:
    """How the plan was verified."""
    if plan.fp32_metric is not None:
        yield say("the metric is {metric:loss}, in fp32 {fp32:loss}", metric=plan.metric, fp32=plan.fp32_metric)
        yield say("it may drop by {most:figure}", most=plan.max_drop)
    elif plan.rel_l2 is not None:
        words = "the error is predicted to be" if plan.evidence == "predicted" else "the error is"
        limit = say_if(plan.tolerance is not None, "the tolerance {limit:limit}", limit=plan.tolerance)
        yield chained(say(f"{words} {{error:error}}", error=plan.rel_l2), limit, between=", ")
        if plan.predicted is not None and plan.evidence == "measured":
            yield say("{error:error} was predicted", error=plan.predicted)
    if plan.evidence == "predicted":
        yield say("nothing ran on {device:text}", device=plan.device)
    if plan.batches > 1:
        yield say("it passes on each of {batches:count batch}", batches=plan.batches)
    if plan.speedup is not None:
        yield plain(ratio_text(plan.speedup))


def _course(plan: Plan) -> Iterator[Sentence]:
    """How far the search for the plan went, and whether fewer modules may be enough."""
    if plan.trials:
        yield say("{trials:count trial} in {seconds:seconds}", trials=plan.trials, seconds=plan.seconds)
        if plan.first_pass is not None and plan.first_pass < plan.trials:
            yield say("number {first:number} was the first to pass", first=plan.first_pass)
    # 1-minimal only if each module was tried in low precision
    tried = len(plan.keep_fp32) - plan.unconfirmed
    if plan.stopped is not None:
        yield say("the search stopped {why:text}, so fewer modules may be enough", why=plan.stopped)
    elif plan.unconfirmed:
        if tried:
            yield say("without any one of {tried:number} of them the model fails", tried=tried)
        words = "not tried alone, as predicted to be needed: {untried:count module}"
        yield say(words, untried=plan.unconfirmed)
    elif plan.kept:
        yield plain(f"without {agree(len(plan.kept), 'it', 'any one of them')} the model fails")


def _recommended_plan(result: ScanResult, said: Sequence[Statement]) -> list[Block]:
    """Why its modules stay in fp32, if the plan is recommended."""
    best, plan = result.recommendation, result.plan
    if best is None or plan is None or best.kept != plan.kept:
        return []
    return kept_modules(plan, "more")


SECTION = Section("advice", _recommended_plan)
