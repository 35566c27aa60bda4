"""What a search chose at each place: changed lines, proof of plain runs, comparison with a plan."""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowprec_check.analysis.snippet import snippet
from lowprec_check.features.fix.scene import Site, SourceFix, compose
from lowprec_check.features.fix.source_text import edited, lines_of
from lowprec_check.schema.fixing import InputInFp32, Proven, SourceChange
from lowprec_check.schema.measures import InputTrial
from lowprec_check.schema.module_paths import number_of
from lowprec_check.schema.plan import Plan
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import counted, short_op


@dataclass
class Chosen:
    """What could be changed at one place, and which of it is tried."""

    site: Site
    options: list[SourceFix]
    option: int = 0
    round: int = 0  # of the search, in which it was added
    raises: bool = False
    """Whether the line raises an exception without it, given the changes of earlier rounds."""

    @property
    def fix(self) -> SourceFix:
        """The change that is tried."""
        return self.options[self.option]


State = dict[ast.AST, Chosen]


def next_option(places: Iterable[Chosen]) -> bool:
    """Take the next option of each of these places that has another one; whether any has."""
    others = [chosen for chosen in places if chosen.option + 1 < len(chosen.options)]
    for chosen in others:
        chosen.option += 1
    return bool(others)


def compute_instead(state: State) -> bool:
    """Compute in fp32 where a number was changed; whether there is such a place."""
    return next_option(chosen for chosen in state.values() if chosen.fix.kind in ("constant", "scale"))


# -- What is told


def shown_path(path: Path) -> str:
    """The path as a diff names it, relative to the current folder."""
    relative = os.path.relpath(path)
    if relative.startswith(".."):
        return str(path).lstrip(os.sep)
    return relative


def change_of(site: Site, fix: SourceFix, beside: Iterable[SourceFix] = ()) -> SourceChange:
    """The lines of one change; a cast that one ``beside`` it undoes is not named."""
    stays = fix.back is not None and any(fix.back[0] in other.widened for other in beside)
    changed = edited(site.source.text, compose(site.source, [fix]))
    old, new = lines_of(site.source.text).texts, lines_of(changed).texts
    # all lines from the first to the last that differ
    blocks = [b for b in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes() if b[0] != "equal"]
    first, last = (blocks[0], blocks[-1]) if blocks else (("", 0, 0, 0, 0),) * 2
    op: str | None = short_op(site.op)
    if op in ("", "to_copy"):  # a cast is not what is computed in fp32
        op = None
    why = fix.why
    if stays:
        why = why.replace(" and cast back", "")
    return SourceChange(
        kind=fix.kind,
        file=shown_path(site.source.path),
        line=first[1] + 1,
        end_line=max(last[2], first[1] + 1),
        before="".join(old[first[1] : last[2]]),
        after="".join(new[first[3] : last[4]]),
        why=why,
        codes=tuple(sorted(site.codes)),
        op=op,
        precisions=tuple(sorted(site.precisions)),
    )


def proven_by(before: Run, after: Run | None) -> Proven:
    """A precision before and after."""
    # without a run after the patch, it changes nothing
    last, tried, failed = after or before, 0, 0
    if last.further_inputs is not None:
        tried, failed = last.further_inputs.tried, last.further_inputs.failed
    return Proven(
        precision=before.precision,
        before=before.status,
        after=last.status,
        error_before=before.relative_error,
        error_after=last.relative_error,
        tolerance=before.relative_tolerance,
        further=tried,
        further_failed=failed,
    )


def proven_by_input(run: Run, trial: InputTrial, scan: ScanResult) -> InputInFp32:
    """A precision of a scan that passes with inputs in fp32."""
    return InputInFp32(
        precision=run.precision,
        inputs=trial.inputs,
        code=snippet(run.key, scan.model, keep_fp32_inputs=trial.inputs, torch_version=scan.torch),
        error_before=run.relative_error,
        error_after=trial.rel_l2,
        tolerance=run.relative_tolerance,
    )


def compared_with_plan(plan: Plan | None, changes: Sequence[SourceChange]) -> str | None:
    """How much a plan keeps in fp32, and how much a patch changes; ``None`` if there is no plan."""
    if plan is None:
        return None
    lines = sum(change.end_line - change.line + 1 for change in changes)
    modules, changed = counted(number_of(plan.keep_fp32, plan.modules), "module"), counted(lines, "line")
    return f"A plan from {plan.base} keeps {modules} in fp32; the patch changes {changed}"
