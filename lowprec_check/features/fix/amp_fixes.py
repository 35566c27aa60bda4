"""Fixes of what a training script does wrong with ``GradScaler``: calls that are moved or added."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence

from lowprec_check.features.fix.scene import SourceFix
from lowprec_check.features.fix.script_calls import (
    FUNCTIONS,
    Locate,
    ScriptCall,
    blocks_around,
    call_at,
    step_after,
)
from lowprec_check.features.fix.seen_values import ScriptFacts, ScriptPlace
from lowprec_check.features.fix.source_text import Edit, SourceText
from lowprec_check.schema.amp_use import AmpFault, AmpUse

Found = tuple[SourceText, SourceFix] | str
"""A change, or why there is none."""


def amp_fixes(facts: ScriptFacts, locate: Locate) -> Iterator[tuple[AmpUse, ScriptPlace, Found]]:
    """A change for each fault that has one."""
    for use in facts.amp:
        fix = _FIXES.get(use.fault)
        if fix is not None:
            place = ScriptPlace(use.source, use.caller, use.span)
            call = call_at(place, use.op, locate)
            found = call if isinstance(call, str) else fix(ScalerCalls(facts, locate), call, use)
            yield use, place, found


class ScalerCalls:
    """The calls of a script that a change needs."""

    def __init__(self, facts: ScriptFacts, locate: Locate) -> None:
        self.facts, self._locate = facts, locate

    def calls(self, places: Sequence[ScriptPlace], name: str) -> list[ScriptCall]:
        """Those at ``places`` that can be changed."""
        calls = [call_at(place, name, self._locate) for place in places]
        return [call for call in calls if isinstance(call, ScriptCall)]

    @property
    def steps(self) -> list[ScriptCall]:
        """Of a scaler, with their optimizers."""
        return [call for call in self.calls(self.facts.scaled_steps, "step") if call.call.args]

    def scaler_at(self, call: ScriptCall) -> str | None:
        """What the scaler is called in the function of ``call``."""
        for place in self.facts.scales:
            found = self._locate(place, "scale")
            if isinstance(found, str):
                continue
            source, node = found
            is_here = source is call.source and source.around(node, FUNCTIONS) is call.function
            if is_here and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                return source.segment(node.func.value)
        return None

    @property
    def unscaling(self) -> dict[ScriptCall, str]:
        """What unscales gradients before each step, also before one without its scaler."""
        lines = {step: f"{step.of_text}.unscale_({step.source.segment(step.call.args[0])})" for step in self.steps}
        passed_over = [
            ScriptPlace(use.source, use.caller, use.span) for use in self.facts.amp if use.fault == "scaled-step"
        ]
        for step in self.calls(passed_over, "step"):
            scaler = self.scaler_at(step)
            if scaler is not None:
                lines[step] = f"{scaler}.unscale_({step.of_text})"
        return lines


def _fixed(call: ScriptCall, kind: str, why: str, *edits: Edit) -> Found:
    return call.source, SourceFix(kind, why, call.call, edits=edits)


def _scaled_step(script: ScalerCalls, call: ScriptCall, _use: AmpUse) -> Found:
    """The scaler makes the step."""
    scaler = script.scaler_at(call)
    if scaler is None:
        return "no loss is scaled in its function"
    if call.call.args or call.call.keywords:
        return "step() is called with arguments"
    edits = [Edit(*call.source.span(call.call), f"{scaler}.step({call.of_text})")]
    if not script.facts.updates:
        edits.append(call.source.behind(call.statement, f"{scaler}.update()"))
    return _fixed(call, "scaler_step", "gradients are still scaled: let the scaler make the step", *edits)


def _unscaled_once(script: ScalerCalls, call: ScriptCall, use: AmpUse) -> Found:
    """The second call is removed, or one in a loop moved to the step, with what clips after it."""
    source = call.source
    why = "gradients are unscaled twice for an update: do it once, before the step"
    if not isinstance(call.statement, ast.Expr):
        return "unscale_ is not a statement"
    if use.earlier not in (None, use.line):
        return _fixed(call, "unscale_once", why, *source.removals([call.statement]))
    step = step_after(call.statement, source, script.steps)
    if step is None:
        return "no step of a GradScaler follows in its function"
    block, _ = next(blocks_around(source, call.statement))
    around = dict(blocks_around(source, step.statement))
    if block not in around or around[block] is step.statement:
        return "it is not in a block around that of the step"
    moved: list[ast.stmt] = [call.statement]
    for clip in script.calls((*script.facts.clips, *script.facts.scaled_clips), "clip_grad"):
        is_between = call.statement.lineno <= clip.statement.lineno <= step.statement.lineno
        in_block = clip.source is source and next(blocks_around(source, clip.statement))[0] == block
        if is_between and in_block and clip.statement not in moved:
            moved.append(clip.statement)
    removed = list(source.removals(moved))
    added = [source.before(step.statement, source.segment(statement)) for statement in moved]
    return _fixed(call, "unscale_once", why, *removed, *added)


def _updated(script: ScalerCalls, call: ScriptCall, _use: AmpUse) -> Found:
    """``scaler.update()`` behind the last step."""
    steps = [step for step in script.steps if step.source is call.source and step.function is call.function]
    if not steps:
        return "no step of a GradScaler is in its function"
    last = max(steps, key=lambda step: step.source.span(step.statement))
    update = last.source.behind(last.statement, f"{last.of_text}.update()")
    return _fixed(last, "scaler_update", "the scaler is never updated: do it after the step", update)


def _updated_after_step(script: ScalerCalls, call: ScriptCall, _use: AmpUse) -> Found:
    """``scaler.update()`` where the step is."""
    source = call.source
    steps = [step for step in script.steps if step.source is source and step.function is call.function]
    if not steps or not isinstance(call.statement, ast.Expr):
        return "no step of a GradScaler is in its function"
    last = max(steps, key=lambda step: source.span(step.statement))
    moved = source.behind(last.statement, source.segment(call.statement))
    why = "the scaler is updated without a step: do it after the step"
    return _fixed(call, "scaler_update", why, *source.removals([call.statement]), moved)


def _scaled_loss(script: ScalerCalls, call: ScriptCall, _use: AmpUse) -> Found:
    """The loss is scaled."""
    source, edits = call.source, list[Edit]()
    for backward in script.calls(script.facts.backward, "backward"):
        if backward.source is not source or backward.function is not call.function:
            return "backward() is called in another function"
        edits += backward.scaled_by(call.of_text)
    if not edits:
        return "backward() is not called as a method"
    return _fixed(call, "scaled_loss", "the loss is never scaled", *edits)


_FIXES: dict[AmpFault, Callable[[ScalerCalls, ScriptCall, AmpUse], Found]] = {
    "scaled-step": _scaled_step,
    "unscaled-twice": _unscaled_once,
    "no-update": _updated,
    "no-inf-checks": _updated_after_step,
    "never-scaled": _scaled_loss,
}
"""Of faults with a change; ``scaled-clip`` is among those of all scripts."""
