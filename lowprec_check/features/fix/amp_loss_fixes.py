"""Fixes of where a training script uses autocast and 16 bits: losses, backward passes, weights."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import NamedTuple

from lowprec_check.features.fix.fix_kinds import keyword
from lowprec_check.features.fix.scene import SourceFix, torch_in, wrapped
from lowprec_check.features.fix.script_calls import Locate
from lowprec_check.features.fix.seen_values import ScriptFacts, ScriptPlace
from lowprec_check.features.fix.source_text import Edit, SourceText
from lowprec_check.schema.amp_use import AmpFault, AmpUse

Found = tuple[SourceText, SourceFix] | str
"""A change, or why there is none."""

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
        fix = _FIXES.get(use.fault)
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
    torch, imports = torch_in(source)
    header = f'with {torch}.autocast("{facts.device}", enabled=False):'
    edits = [*imports, *source.indented_under([statement], header)]
    return source, SourceFix("backward_outside", why, node, edits=tuple(edits))


def _in_fp32_weights(fault: _Fault) -> Found:
    """Weights that stay in fp32: without the cast, or the dtype that they are made with."""
    facts, locate, _, source, node = fault
    why = "a GradScaler takes no gradients in fp16: keep the weights in fp32"
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
    if not source.segment(call.func).rpartition(".")[2][:1].isupper():
        return
    values = [*call.args, *(each.value for each in call.keywords)]
    for each in call.keywords:
        if each.arg == "dtype" and source.segment(each.value).rpartition(".")[2] in _HALF:
            earlier = [source.outer(value)[1] for value in values if source.span(value) < source.span(each)]
            start = max(earlier, default=source.span(each)[0])
            yield Edit(start, source.span(each)[1], "")


_FIXES: dict[AmpFault, Callable[[_Fault], Found]] = {
    "no-kernel": _computed_in_fp32,
    "refused-loss": _refused,
    "scaler-for-bf16": _unscaled_bf16,
    "backward-in-autocast": _backward_outside,
    "unscaled-fp16": _in_fp32_weights,
}
"""Of faults with a change."""
