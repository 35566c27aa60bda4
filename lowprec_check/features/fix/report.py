"""A patch of the user's source as blocks: the diff, its proof, the rest; GitHub suggestions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lowprec_check.analysis.next_steps import command
from lowprec_check.features.fix.fix_sites import culprits, fails
from lowprec_check.report.blocks import Block, CodeBlock, Column, Document, Heading, Row, Say, Table
from lowprec_check.report.feature_parts import Section
from lowprec_check.report.foreign_text import visible_text
from lowprec_check.schema.fixing import Fixing, ScriptProof
from lowprec_check.schema.registry import choices
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.statements import Statement, Tone, agree, counted, fill, say

_PROVEN = [
    Column("precision", "run"),
    Column("before", "status"),
    Column("after", "status"),
    Column("error before", "error"),
    Column("error after", "error"),
    Column("tolerance", "error"),
    Column(
        "further inputs",
        "text",
        "Further inputs on which the source passes with the patch, of those tried; without it if there is none.",
    ),
]


_BY_INPUT = [
    Column("precision", "run"),
    Column("in fp32", "text", "The inputs that are not cast."),
    Column("error before", "error"),
    Column("error after", "error"),
]


def fix_document(fixing: Fixing, name: str, apply: str = "") -> Document:
    """What ``lowprec-check fix`` prints of a model or script of this ``name``; ``apply`` is the
    command that writes the patch.
    """
    title = f"lowprec-check fix · {visible_text(name)} · {fixing.device}"
    blocks = [Say(title, role="title"), *fix_blocks(fixing)]
    if fixing.changes and apply:
        blocks.append(Say(f"Write the patch: {visible_text(apply)}", role="prompt"))
    return Document(title, blocks, fixing.tool)


def _section(result: ScanResult, said: Sequence[Statement]) -> Iterator[Block]:
    if result.fixing is not None:
        yield Heading("Patch", anchor="patch")
        yield from fix_blocks(result.fixing)


PATCH = Section("causes", _section)


def _search(result: ScanResult, said: Sequence[Statement]) -> Iterator[Block]:
    """How to search for a patch, if runs fail at lines of the user's own file."""
    is_tried = result.fixing is not None or result.evidence == "predicted" or not result.is_forward
    if is_tried or ".py" not in result.target:
        return
    failing = [run for run in result.runs if fails(run)]
    own = any(culprit.row.source and culprit.row.caller is None for run in failing for culprit in culprits(run))
    if own:
        yield Say(f"Search for a patch: {command(result, 'fix')}", role="prompt")


SEARCH = Section("findings", _search)


def fix_blocks(fixing: Fixing) -> Iterator[Block]:
    """The patch with its proof."""
    if fixing.diff:
        yield CodeBlock(visible_text(fixing.diff.rstrip("\n")), "diff")
    if fixing.proven:
        rows = []
        for proof in fixing.proven:
            further = None
            if proof.further:
                further = f"{proof.further - proof.further_failed} of {proof.further}"
            errors = [proof.error_before, proof.error_after, proof.tolerance]
            rows.append(Row([proof.precision, proof.before, proof.after, *errors, further]))
        yield Table(_PROVEN, rows, "precisions before and after the patch")
    if fixing.by_input:
        rows = [
            Row([repair.precision, choices(repair.inputs, "and"), repair.error_before, repair.error_after])
            for repair in fixing.by_input
        ]
        yield Table(_BY_INPUT, rows, "precisions that pass with an input in fp32")
        yield from (CodeBlock(repair.code) for repair in fixing.by_input if repair.code)
    if fixing.changes:
        columns = [Column("line", "source"), Column("change"), Column("findings"), Column("what", "sentence")]
        rows = [
            Row([f"{c.file}:{c.line}", c.kind, ", ".join(c.codes) or None, f"{fill('{}: ', c.op)}{c.why}"])
            for c in fixing.changes
        ]
        yield Table(columns, rows, "changes", headings=2)
    yield Say(*_verdict(fixing), "verdict")
    if fixing.changes and (fixing.script is None or fixing.outputs_equal is not None):
        yield Say(_bits(fixing))
    if fixing.plan:
        yield Say(f"{fixing.plan}.")
    if fixing.trials:
        yield Say(_searched(fixing), role="hint")
    if fixing.left_alone:
        columns = [Column("left alone", "source"), Column("op"), Column("why", "sentence")]
        rows = [Row([place.source, place.op, place.reason]) for place in fixing.left_alone]
        yield Table(columns, rows, "left alone", most=20)


def _searched(fixing: Fixing) -> str:
    """How long the search took, and what it could not do."""
    searched = say("{trials:count trial} in {seconds:seconds}", trials=fixing.trials, seconds=fixing.seconds).text
    if fixing.script is None:
        searched += say(", after a scan of {scan:seconds}", scan=fixing.scan_seconds).text
    elif fixing.script.runs_again:
        searched += "; each trial ran the script again from its start for fp32: its process could not be copied"
    stopped = fill("; the search stopped {}", fixing.stopped)
    return f"{searched[:1].upper()}{searched[1:]}{stopped}."


def _verdict(fixing: Fixing) -> tuple[str, Tone]:
    """Whether the patch is enough; for a script, where its weights end."""
    what, script = counted(len(fixing.changes), "change"), fixing.script
    if script is not None and script.precision:
        return _adopted(fixing, script, what), "good"
    if script is not None:
        before, after = (
            "not finite" if distance is None else say("{distance:error}", distance=distance).text
            for distance in (script.before, script.after)
        )
        ends = f"the distance of the weights from those of fp32 after {counted(script.steps, 'step')} is"
        tolerance, skipped = "", fill(", with {} skipped", script.skipped and counted(script.skipped, "step"))
        if not fixing.passes:
            tolerance = f" The tolerance is {script.tolerance:g}."
        if fixing.due:
            without = f"the script fails: {script.failure.rstrip('.')}" if script.failure else before
            words = f"With {what}, {ends} {after}{skipped}; without, {without}.{tolerance}"
            return words, "good" if fixing.passes else "warn"
        # no change: either none is needed, or none helps
        if fixing.passes and fixing.left_alone and fixing.left_alone[0].source is None:
            none = "no switch or change was found with which it trains in low precision as in fp32"
            return f"The script trains in fp32, and {none}.", "warn"
        if fixing.passes:
            return f"Nothing to fix: {ends} {before}.", "good"
        if script.failure:
            return f"No change was found: the script fails: {script.failure.rstrip('.')}.", "bad"
        reason = "No change was found" if fixing.left_alone else "No known fault was seen, so nothing is changed"
        others = " lowprec-check scan --train tries other loss scales and ways to train."
        return f"{reason}: {ends} {before}.{tolerance}{others}", "bad"
    if not fixing.proven:
        if fixing.by_input:
            names = choices([repair.precision for repair in fixing.by_input], "and")
            passes = agree(len(fixing.by_input), "passes", "pass")
            return f"No patch is needed: {names} {passes} without the cast of the input named.", "good"
        return "Nothing to fix: each precision passes.", "good"
    names = ", ".join(proof.precision for proof in fixing.proven)
    passes = agree(len(fixing.proven), "passes", "pass")
    if not fixing.due:
        return f"No change was found with which {names} {passes}.", "bad"
    if fixing.passes:
        return f"With {what}, {names} {passes}.", "good"
    # the best patch that was found is worth showing, even if it is not enough
    failing = [proof for proof in fixing.proven if not proof.passes]
    fail = agree(max(1, len(failing)), "fails", "fail")
    where = " on further inputs" if all(proof.after == "ok" for proof in failing) else ""
    nearest = f"{what} {agree(max(1, len(fixing.changes)), 'comes', 'come')} nearest"
    return f"{nearest}: {', '.join(proof.precision for proof in failing)} still {fail}{where}.", "warn"


def _adopted(fixing: Fixing, script: ScriptProof, what: str) -> str:
    """With what a script that trains in fp32 trains in low precision, as its steps showed."""
    how = f"With {what}"
    if script.command:
        how = f"Nothing to change in the source: run the script with {script.command}. With it"
    words = (
        "{how:text}, it trains in {precision:text}: after {steps:count step}, the distance of the weights from those "
        "of fp32 is {after:error} (limit {limit:error}), that of the losses {losses:error}."
    )
    figures = {"steps": script.steps, "after": script.after, "limit": script.tolerance, "losses": script.losses}
    skipped = fill(" {} skipped.", script.skipped and counted(script.skipped, "step"))
    return say(words, how=how, precision=script.precision, **figures).text + skipped


def _bits(fixing: Fixing) -> str:
    """What the patch does to fp32."""
    outputs, gradients = fixing.outputs_equal, fixing.gradients_equal
    if fixing.script is not None and not outputs:
        why = "gradients are clipped once they are complete"
        if any(change.kind != "unscale_once" for change in fixing.changes):
            why = "what was in 16 bits without autocast too is in fp32"
        return f"In fp32, the weights differ from those without the patch: {why}."
    if fixing.script is not None:
        return "In fp32, the weights after these steps are bit for bit those without the patch."
    if outputs and gradients:
        return "On the given inputs in fp32, the output and the gradients are bit for bit those without the patch."
    if outputs:
        same = "On the given inputs in fp32, the output is bit for bit that without the patch"
        return f"{same}; it has no gradients that could be compared."
    return "Two calls of the model in fp32 differ, so it cannot be checked that the patch leaves fp32 as it is."


def suggestions(fixing: Fixing) -> str:
    """Each change as a block that GitHub offers to commit, in a review comment on its lines."""
    parts = []
    for change in fixing.changes:
        # an insertion has no lines that it replaces
        lines, after = f"{change.line}", change.after
        if change.before and change.end_line > change.line:
            lines = f"{change.line}-{change.end_line}"
        if not after.endswith(("\n", "\r")):
            after = f"{after}\n"
        # longer than any run of backticks in it
        fence = "`" * max(
            3, 1 + max((len(run) for run in after.replace("`", " `").split() if set(run) == {"`"}), default=0)
        )
        parts.append(f"{change.file}:{lines}\n{fence}suggestion\n{after}{fence}\n")
    return "\n".join(parts)
