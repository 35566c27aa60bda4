"""Fixes of a training script: a missing ``GradScaler``, clipping, autocast's weight cache."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lowprec_check.features.fix.amp_fixes import ScalerCalls, amp_fixes, loss_fixes
from lowprec_check.features.fix.fix_kinds import keyword
from lowprec_check.features.fix.scene import SourceFix, torch_in, unused_name
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

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_REPEATS = (*_LOOPS, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Fault(NamedTuple):
    """What a script does wrong, and what to change, or why that is left alone."""

    op: str
    place: ScriptPlace
    found: tuple[SourceText, SourceFix] | str
    is_harmless: bool = False
    """Whether the script trains all the same."""


def faults(facts: ScriptFacts, locate: Locate, scale: float | None = None) -> Iterator[Fault]:
    """The faults that a script's steps show; a new ``GradScaler`` starts at ``scale``."""
    if "float16" in facts.autocast and facts.backward and not facts.scaled_backward:
        yield Fault("backward", facts.backward[0], scaled(facts, locate, scale))
    for use, place, found in (*amp_fixes(facts, locate), *loss_fixes(facts, locate)):
        yield Fault(use.op, place, found, use.is_harmless)
    unscaled = _Unscaled()
    for place in facts.scaled_clips:
        yield Fault("clip_grad", place, _unscaled(place, facts, locate, unscaled))
    for place in facts.around_steps:
        yield Fault("autocast", place, _uncached(place, locate))


def scaled(facts: ScriptFacts, locate: Locate, scale: float | None) -> tuple[SourceText, SourceFix] | str:
    """A ``GradScaler``: the loss scaled, gradients unscaled before they are clipped."""
    backward = [call_at(place, "backward", locate) for place in facts.backward]
    made = [call_at(place, "step", locate) for place in facts.made_steps]
    clips = [call_at(place, "clip_grad", locate) for place in facts.clips]
    calls = [*backward, *made, *clips]
    located = [each for each in calls if isinstance(each, ScriptCall)]
    steps = [each for each in located if each in made]
    reasons = [each for each in calls if isinstance(each, str)]
    unfit = _why_not_scaled(facts, located, made, clips)
    # a framework or a disabled scaler explains why calls are not found
    if unfit is not None and (facts.framework or facts.disabled_scaler or not reasons):
        return unfit
    if reasons:
        return reasons[0]
    source, scaler = located[0].source, unused_name(located[0].source, "scaler")
    torch, imports = torch_in(source)
    start = "" if scale is None else f", init_scale={scale!r}"
    new_scaler = f'{scaler} = {torch}.amp.GradScaler("{facts.device}"{start})'
    edits = [*imports, source.line_before(_before_all(located, facts, locate), new_scaler)]
    last_step = max(steps, key=lambda each: each.statement.lineno)
    for each in located:
        if each in backward:
            edits += each.scaled_by(scaler)
        elif each in made:
            edits.append(Edit(*source.span(each.call), f"{scaler}.step({source.segment(each.of)})"))
            # once for all optimizers
            if facts.optimizers == 1 or each is last_step:
                edits.append(source.behind(each.statement, f"{scaler}.update()"))
    # whatever reads gradients needs them unscaled
    readers = [each.statement for each in located if each in clips]
    readers += _naming_gradients(source, [each for each in located if each in backward], steps)
    unscaled = _Unscaled()
    for statement in sorted(readers, key=lambda each: each.lineno):
        step = step_after(statement, source, steps)
        if step is None:
            return "no step follows in the function that clips gradients"
        edits += unscaled.before(statement, step, f"{scaler}.unscale_({source.segment(step.of)})")
    why = "gradients of the loss in fp16 become zero: scale it"
    return source, SourceFix("grad_scaler", why, located[0].call, edits=tuple(edits))


def _why_not_scaled(
    facts: ScriptFacts, located: list[ScriptCall], made: Sequence[ScriptCall | str], clips: Sequence[ScriptCall | str]
) -> str | None:
    """What a ``GradScaler`` cannot be added to; ``None`` if it can."""
    blocks = {id(each.source.parents[each.statement]) for each in located if each in made}
    if facts.framework:
        return f"{facts.framework} calls backward(): use its own switch for fp16, which makes a GradScaler"
    if facts.disabled_scaler:
        return "the script makes a GradScaler with enabled=False: enable it"
    if facts.optimizers > len(made) or (facts.optimizers > 1 and len(blocks) > 1):
        return "several optimizers make their steps in one call, or in different blocks"
    if not made or any(each.source is not located[0].source for each in located):
        return "backward() and step() are not called in one file"
    if any(each.call.args or each.call.keywords for each in located if each not in clips):
        return "backward() or step() is called with arguments"
    return None


def _naming_gradients(source: SourceText, backward: list[ScriptCall], steps: list[ScriptCall]) -> Iterator[ast.stmt]:
    """Statements between ``backward()`` and ``step()`` that name ``.grad`` and don't clear it."""
    lines = sorted((each.statement.lineno, each in backward) for each in (*backward, *steps))
    for node in [each for each in ast.walk(source.tree) if isinstance(each, ast.Attribute) and each.attr == "grad"]:
        parent, statement = source.parents[node], source.around(node, ast.stmt)
        is_called = isinstance(parent, ast.Call) and parent.func is node  # torch.autograd.grad
        if is_called or not isinstance(statement, ast.stmt):
            continue
        before = [is_backward for line, is_backward in lines if line < node.lineno]
        clears = isinstance(statement, ast.Assign) and source.segment(statement.value) == "None"
        step = step_after(statement, source, steps)
        if before[-1:] == [True] and not clears and step is not None:
            # in another block it may be read more often than a step follows
            block, _ = next(blocks_around(source, step.statement))
            if block in [around for around, _ in blocks_around(source, statement)]:
                yield statement


class _Unscaled:
    """The lines that unscale gradients, by block: torch allows one for each step."""

    def __init__(self) -> None:
        self._lines: list[tuple[str, object]] = []

    def before(self, statement: ast.stmt, step: ScriptCall, line: str) -> list[Edit]:
        """``line`` before ``statement``, in a block that ``step`` is in; once per block."""
        source, of_step = step.source, {block for block, _ in blocks_around(step.source, step.statement)}
        around = [(block, node) for block, node in blocks_around(source, statement) if block in of_step]
        if any((line, block) in self._lines for block, _ in around):
            return []
        block, node = around[0]
        self._lines.append((line, block))
        return [source.before(node, line)]


def _before_all(calls: list[ScriptCall], facts: ScriptFacts, locate: Locate) -> ast.stmt:
    """The outermost loop around ``calls`` in a function that runs once, else their statement."""
    source, node = calls[0].source, calls[0].statement
    around: list[ast.AST] = []
    at: ast.AST = node
    while at is not source.tree:
        around.append(at)
        at = source.parents[at]
    same = all(each.function is calls[0].function for each in calls)
    if calls[0].function is not None:
        around = around[: around.index(calls[0].function)]
    loops = [each for each in around if isinstance(each, _LOOPS)]
    if same and loops and _runs_once(calls[0], facts, locate):
        return loops[-1]
    first = min(calls, key=lambda each: each.statement.lineno).statement
    while source.parents[first] is not source.tree:
        first = source.parents[first]  # type: ignore[assignment]
    return first


def _runs_once(call: ScriptCall, facts: ScriptFacts, locate: Locate) -> bool:
    """Whether the function around ``call`` is named once, and its callers are in no loop."""
    function = call.function
    if not isinstance(function, FUNCTIONS):
        return True
    # the trees in which it may be called
    trees = {call.source.tree: None}
    for place in facts.step_callers:
        caller = locate(place, function.name)
        if isinstance(caller, str) or caller[0].around(caller[1], _REPEATS) is not None:
            return False
        trees[caller[0].tree] = None
    is_method = isinstance(call.source.parents[function], ast.ClassDef)
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = [node.attr for node in nodes if is_method and isinstance(node, ast.Attribute)]
    names += [node.id for node in nodes if not is_method and isinstance(node, ast.Name)]
    return names.count(function.name) <= 1


def _unscaled(
    place: ScriptPlace, facts: ScriptFacts, locate: Locate, unscaled: _Unscaled
) -> tuple[SourceText, SourceFix] | str:
    """``scaler.unscale_(optimizer)`` before gradients are clipped."""
    clip = call_at(place, "clip_grad", locate)
    if isinstance(clip, str):
        return clip
    unscaling = ScalerCalls(facts, locate).unscaling
    step = step_after(clip.statement, clip.source, list(unscaling))
    if step is None:
        none = "no step of a GradScaler follows in the function that clips gradients"
        steps = [call_at(each, "step", locate) for each in facts.scaled_steps]
        return next((each for each in steps if isinstance(each, str)), none)
    edits = unscaled.before(clip.statement, step, unscaling[step])
    if not edits:
        return "unscaling them before the first clipping is enough"
    why = "gradients are clipped while they are scaled: unscale them first"
    return clip.source, SourceFix("unscale", why, clip.call, edits=tuple(edits))


def _uncached(place: ScriptPlace, locate: Locate) -> tuple[SourceText, SourceFix] | str:
    """``cache_enabled=False`` for autocast around several steps."""
    found = locate(ScriptPlace(place.source, place.caller), "autocast")  # the interpreter knows the whole block only
    if isinstance(found, str):
        return found
    source, node = found
    if not isinstance(node, ast.Call) or "autocast" not in source.segment(node.func):
        where = "give it cache_enabled=False where it is made, as in @torch.autocast(...)"
        return f"autocast is not called where it is entered: {where}"
    argument = next((each.value for each in node.keywords if each.arg == "cache_enabled"), None)
    if argument is None:
        edit = keyword(source, node, "cache_enabled=False")
    else:
        edit = Edit(*source.span(argument), "False")
    why = "autocast around several steps keeps the casts of the first weights: do not cache them"
    return source, SourceFix("autocast_cache", why, node, edits=(edit,))
