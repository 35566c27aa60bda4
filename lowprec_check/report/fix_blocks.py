"""A patch of the user's source as blocks: the diff, its proof, the rest; GitHub suggestions."""

from __future__ import annotations

from collections.abc import Iterator

from lowprec_check.report.blocks import Block, CodeBlock, Column, Document, Heading, Row, Say, Table
from lowprec_check.report.foreign_text import visible_text
from lowprec_check.schema.fixing import Fixing, ScriptProof
from lowprec_check.schema.statements import Tone, counted, say

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


def fix_document(fixing: Fixing, name: str) -> Document:
    """What ``lowprec-check fix`` prints of a model or script of this ``name``."""
    title = f"lowprec-check fix · {visible_text(name)} · {fixing.device}"
    return Document(title, [Say(title, role="title"), *fix_blocks(fixing)], fixing.tool)


def fix_blocks(fixing: Fixing, *, heading: bool = False) -> Iterator[Block]:
    """The patch with its proof."""
    if heading:
        yield Heading("Patch", anchor="patch")
    if fixing.diff:
        yield CodeBlock(visible_text(fixing.diff.rstrip("\n")), "diff")
    if fixing.proven:
        rows = []
        for its in fixing.proven:
            further = None
            if its.further:
                further = f"{its.further - its.further_failed} of {its.further}"
            errors = [its.error_before, its.error_after, its.tolerance]
            rows.append(Row([its.precision, its.before, its.after, *errors, further]))
        yield Table(_PROVEN, rows, "precisions before and after the patch")
    if fixing.changes:
        columns = [Column("line", "source"), Column("change"), Column("findings"), Column("what", "sentence")]
        rows = [
            Row([f"{c.file}:{c.line}", c.kind, ", ".join(c.codes) or None, f"{c.op}: {c.why}" if c.op else c.why])
            for c in fixing.changes
        ]
        yield Table(columns, rows, "changes", headings=2)
    yield Say(*_verdict(fixing), "verdict")
    if fixing.changes:
        yield Say(_bits(fixing))
    if fixing.plan:
        yield Say(f"{fixing.plan}.")
    searched = say("{trials:count trial} in {seconds:seconds}", trials=fixing.trials, seconds=fixing.seconds).text
    if fixing.script is None:
        searched += say(", after a scan of {scan:seconds}", scan=fixing.scan_seconds).text
    stopped = ""
    if fixing.stopped:
        stopped = f"; the search stopped {fixing.stopped}"
    if fixing.trials:
        yield Say(f"{searched[:1].upper()}{searched[1:]}{stopped}.", role="hint")
    if fixing.left_alone:
        columns = [Column("left alone", "source"), Column("op"), Column("why", "sentence")]
        yield Table(
            columns, [Row([its.source, its.op, its.reason]) for its in fixing.left_alone], "left alone", most=20
        )


def _of_script(fixing: Fixing, script: ScriptProof) -> tuple[str, Tone]:
    """Where the weights of a script end."""
    before, after = (
        "not finite" if distance is None else say("{distance:error}", distance=distance).text
        for distance in (script.before, script.after)
    )
    what = f"the distance of the weights from those of fp32 after {counted(script.steps, 'step')} is"
    tolerance = ""
    if not fixing.passes:
        tolerance = f" The tolerance is {script.tolerance:g}."
    if fixing.due:
        skipped = ""
        if script.skipped:
            skipped = f", with {counted(script.skipped, 'step')} skipped"
        words = f"With {counted(len(fixing.changes), 'change')}, {what} {after}{skipped}; without, {before}.{tolerance}"
        return words, "good" if fixing.passes else "warn"
    if fixing.passes:
        return f"Nothing to fix: {what} {before}.", "good"
    found = "No change was found" if fixing.left_alone else "No known fault was seen, so nothing is changed"
    others = " lowprec-check scan --train tries other loss scales and ways to train."
    return f"{found}: {what} {before}.{tolerance}{others}", "bad"


def _verdict(fixing: Fixing) -> tuple[str, Tone]:
    if fixing.script is not None:
        return _of_script(fixing, fixing.script)
    names = ", ".join(its.precision for its in fixing.proven)
    failing = [its for its in fixing.proven if not its.passes]
    if not fixing.proven:
        return "Nothing to fix: each precision passes.", "good"
    if not fixing.due:
        return f"No change was found with which {names} {'pass' if len(fixing.proven) > 1 else 'passes'}.", "bad"
    what = counted(len(fixing.changes), "change")
    if fixing.passes:
        return f"With {what}, {names} {'pass' if len(fixing.proven) > 1 else 'passes'}.", "good"
    fail = "fail" if len(failing) > 1 else "fails"
    where = " on further inputs" if all(its.after == "ok" for its in failing) else ""
    nearest = f"{what} {'come' if len(fixing.changes) > 1 else 'comes'} nearest"
    return f"{nearest}: {', '.join(its.precision for its in failing)} still {fail}{where}.", "warn"


def _bits(fixing: Fixing) -> str:
    """What the patch does to fp32."""
    outputs, gradients = fixing.outputs_equal, fixing.gradients_equal
    if fixing.script is not None:
        return "In fp32, the weights after these steps are bit for bit those without the patch."
    if outputs and gradients:
        return "On the given inputs in fp32, the output and the gradients are bit for bit those without the patch."
    if outputs:
        return "On the given inputs in fp32, the output is bit for bit that without the patch; it has no gradients that could be compared."
    return "Two calls of the model in fp32 differ, so it cannot be checked that the patch leaves fp32 as it is."


def suggestions(fixing: Fixing) -> str:
    """Each change as a block that GitHub offers to commit, in a review comment on its lines."""
    parts = []
    for change in fixing.changes:
        last = change.end_line if change.before else change.line
        if last <= change.line:
            lines = f"{change.line}"
        else:
            lines = f"{change.line}-{last}"
        if change.after.endswith(("\n", "\r")):
            after = change.after
        else:
            after = f"{change.after}\n"
        fence = "`" * max(
            3, 1 + max((len(run) for run in after.replace("`", " `").split() if set(run) == {"`"}), default=0)
        )
        parts.append(f"{change.file}:{lines}\n{fence}suggestion\n{after}{fence}\n")
    return "\n".join(parts)
