"""Fixes of what a training script does wrong with ``GradScaler``, autocast or its loss."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from lowprec_check.features.fix.fix_kinds import keyword
from lowprec_check.features.fix.scene import SourceFix, torch_in, wrapped
from lowprec_check.features.fix.seen_values import ScriptFacts, ScriptPlace
from lowprec_check.features.fix.source_text import (
    FUNCTIONS,
    Edit,
    Locate,
    ScriptCall,
    SourceText,
    blocks_around,
    call_at,
    step_after,
)
from lowprec_check.schema.training import AmpFault, AmpUse

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
    # Without an update, a scale that is too large would skip every step
    if not script.facts.updates:
        edits.append(call.source.behind(call.statement, f"{scaler}.update()"))
    return _fixed(call, "scaler_step", "gradients are still scaled: let the scaler make the step", *edits)


def _unscaled_once(script: ScalerCalls, call: ScriptCall, use: AmpUse) -> Found:
    """The second call is removed, or one in a loop moved to the step, with what clips after it."""
    source = call.source
    why = "gradients are unscaled twice for an update: do it once, before the step"
    if not isinstance(call.statement, ast.Expr):
        return "unscale_ is not a statement"
    # Of two calls in two lines, the second is one too many
    if use.earlier not in (None, use.line):
        return _fixed(call, "unscale_once", why, *source.removals([call.statement]))
    # One line that a loop repeats: it is enough once, before the step
    step = step_after(call.statement, source, script.steps)
    if step is None:
        return "no step of a GradScaler follows in its function"
    block, _ = next(blocks_around(source, call.statement))
    around = dict(blocks_around(source, step.statement))
    if block not in around or around[block] is step.statement:
        return "it is not in a block around that of the step"
    # What clips in between needs unscaled gradients, so it moves along
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
    # Steps of several optimizers share one scale until the last is made
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
    # All losses get the scale: gradients of one update add up
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


# -- Faults of the loss and the weights

_HALF = ("float16", "half")
"""The dtype of weights that a ``GradScaler`` does not take."""

_NARROW = (*_HALF, "bfloat16")


class _Fault(NamedTuple):
    """A fault, at a call in the script."""

    facts: ScriptFacts
    locate: Locate
    use: AmpUse
    source: SourceText
    node: ast.Call


def loss_fixes(facts: ScriptFacts, locate: Locate) -> Iterator[tuple[AmpUse, ScriptPlace, Found]]:
    """A change for each fault that has one here."""
    for use in facts.amp:
        fix = _LOSS_FIXES.get(use.fault)
        if fix is None:
            continue
        place = ScriptPlace(use.source, use.caller, use.span)
        # The own call that leads to what a package does
        located = locate(ScriptPlace(use.line, None, use.span), use.op)
        if isinstance(located, str):
            yield use, place, located
        elif not isinstance(located[1], ast.Call):
            yield use, place, f"{use.op} is not called there"
        else:
            yield use, place, fix(_Fault(facts, locate, use, located[0], located[1]))


def _computed_in_fp32(fault: _Fault) -> Found:
    """A function gets fp32 values."""
    _, _, use, source, node = fault
    if not node.args or isinstance(node.args[0], ast.Starred):
        return f"{use.op} is called without a positional argument"
    why = f"{use.op} has no kernel in 16 bits: give it fp32"
    return source, SourceFix("loss_fp32", why, node, edits=tuple(_widened(source, node.args[0])))


def _widened(source: SourceText, value: ast.expr) -> list[Edit]:
    """``x.float()`` for ``x``, and for ``x.half()``."""
    cast = _cast_of(source, value)
    if cast is not None:
        return [Edit(source.span(cast)[1], source.span(value)[1], ".float()")]
    return wrapped(source, value, ".float()")


def _cast_of(source: SourceText, value: ast.AST) -> ast.expr | None:
    """What ``x.half()`` or ``x.to(torch.float16)`` casts, or those to bf16."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return None
    arguments = [source.segment(each).rpartition(".")[2] for each in value.args]
    is_cast = value.func.attr in ("half", "bfloat16") and not arguments
    is_cast |= value.func.attr == "to" and len(arguments) == 1 and arguments[0] in _NARROW and not value.keywords
    return value.func.value if is_cast else None


def _refused(fault: _Fault) -> Found:
    """The loss outside of autocast, in fp32."""
    _, _, use, source, node = fault
    statement = source.around(node, ast.stmt)
    if not isinstance(statement, ast.stmt) or not source.can_be_indented(statement) or not node.args:
        return "its statement cannot be indented"
    torch, imports = torch_in(source)
    header = f'with {torch}.autocast("{use.names[0]}", enabled=False):'
    edits = [*imports, *source.indented_under([statement], header), *_widened(source, node.args[0])]
    why = f"autocast refuses {use.op} on {use.names[0]}: compute it in fp32, outside of autocast"
    return source, SourceFix("loss_fp32", why, node, edits=tuple(edits))


def _unscaled_bf16(fault: _Fault) -> Found:
    """A ``GradScaler`` that does nothing."""
    for place in fault.facts.scalers:
        made = fault.locate(place, "GradScaler")
        if isinstance(made, str):
            return made
        where, call = made
        if not isinstance(call, ast.Call):
            return "the GradScaler is not made by a call in the script"
        # Disabled rather than removed: its calls in the script stay as they are
        argument = next((each.value for each in call.keywords if each.arg == "enabled"), None)
        edit = keyword(where, call, "enabled=False")
        if argument is not None:
            edit = Edit(*where.span(argument), "False")
        why = "bf16 has the range of fp32: its loss needs no GradScaler"
        return where, SourceFix("no_scaler", why, call, edits=(edit,))
    return "the GradScaler is not made in the script"


def _backward_outside(fault: _Fault) -> Found:
    """The block of autocast ends before the backward pass, or is switched off for it."""
    facts, locate, _, source, node = fault
    why = "autocast is for the forward pass and the loss: call backward() outside"
    statement = source.around(node, ast.stmt)
    assert isinstance(statement, ast.stmt)
    if not source.can_be_indented(statement):
        return "its statement cannot be indented"
    around = source.around(statement, (ast.With, ast.For, ast.AsyncFor, ast.While))
    if not isinstance(around, ast.With):
        return "autocast is entered around the loop: enter it around the forward pass and the loss"
    parent = source.parents[statement]
    # The block can end here if nothing in the rest of it is a forward pass
    if isinstance(parent, ast.With) and len(parent.items) == 1:
        number = parent.body.index(statement)
        moved = parent.body[number:]
        calls = [locate(place, "") for each in facts.passes for place in each.forward]
        nodes = [call[1] for call in calls if not isinstance(call, str) and call[0] is source]
        forward_follows = any(source.around_is(call, each) for call in nodes for each in moved)
        is_autocast = "autocast" in source.segment(parent.items[0].context_expr)
        if number and is_autocast and not forward_follows and all(map(source.can_be_indented, moved)):
            edits = source.dedented(moved, parent)
            return source, SourceFix("backward_outside", why, node, edits=tuple(edits))
    # Otherwise autocast is off for this statement alone
    torch, imports = torch_in(source)
    header = f'with {torch}.autocast("{facts.device}", enabled=False):'
    edits = [*imports, *source.indented_under([statement], header)]
    return source, SourceFix("backward_outside", why, node, edits=tuple(edits))


def _in_fp32_weights(fault: _Fault) -> Found:
    """Weights that stay in fp32: without the cast, or the dtype that they are made with."""
    facts, locate, _, source, node = fault
    why = "a GradScaler takes no gradients in fp16: keep the weights in fp32"
    # The cast itself, where its call was seen
    for place in facts.weight_casts:
        cast = locate(place, "half")
        if isinstance(cast, str) or not isinstance(cast[1], ast.expr):
            continue
        where, call = cast
        of = _cast_of(where, call)
        statement = where.parents[call]
        if of is not None and isinstance(statement, ast.Expr):
            return where, SourceFix("fp32_weights", why, call, edits=tuple(where.removals([statement])))
        if of is not None:
            edit = Edit(where.span(of)[1], where.span(call)[1], "")
            return where, SourceFix("fp32_weights", why, call, edits=(edit,))
    calls = [call for call in ast.walk(source.tree) if isinstance(call, ast.Call)]
    # Without one, layers were made in fp16
    edits, layers = list[Edit](), set[str]()
    for call in calls:
        changes = list(_without_dtype(source, call))
        if changes:
            edits += changes
            made = source.parents[call]
            layers |= {source.segment(target) for target in getattr(made, "targets", ())}
    # What is cast for such a layer
    for call in calls:
        if source.segment(call.func) in layers:
            casts = [(of, value) for value in call.args if (of := _cast_of(source, value)) is not None]
            edits += [Edit(source.span(of)[1], source.span(value)[1], "") for of, value in casts]
    if not edits:
        return "where these weights get fp16 is not one call of the script"
    return source, SourceFix("fp32_weights", why, node, edits=tuple(edits))


def _without_dtype(source: SourceText, call: ast.Call) -> Iterator[Edit]:
    """A layer made without ``dtype=torch.float16``."""
    # Layers are classes; a tensor with this dtype is no weight
    if not source.segment(call.func).rpartition(".")[2][:1].isupper():
        return
    values = [*call.args, *(each.value for each in call.keywords)]
    for each in call.keywords:
        if each.arg == "dtype" and source.segment(each.value).rpartition(".")[2] in _HALF:
            # From the end of the argument before it, so that the comma goes too
            earlier = [source.outer(value)[1] for value in values if source.span(value) < source.span(each)]
            start = max(earlier, default=source.span(each)[0])
            yield Edit(start, source.span(each)[1], "")


_LOSS_FIXES: dict[AmpFault, Callable[[_Fault], Found]] = {
    "no-kernel": _computed_in_fp32,
    "refused-loss": _refused,
    "scaler-for-bf16": _unscaled_bf16,
    "backward-in-autocast": _backward_outside,
    "unscaled-fp16": _in_fp32_weights,
}
"""Of faults with a change."""
