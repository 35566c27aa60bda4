"""Fixes of a training script: a missing ``GradScaler``, clipping, autocast's weight cache."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from lowprec_check.features.fix.fix_kinds import keyword
from lowprec_check.features.fix.scene import SourceFix, torch_in, unused_name
from lowprec_check.features.fix.seen_values import ScriptFacts, ScriptPlace
from lowprec_check.features.fix.source_text import Edit, SourceText

Locate = Callable[[ScriptPlace, str], tuple[SourceText, ast.AST] | str]
"""The expression at a place that calls a function of this name, or why it is left alone."""

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_REPEATS = (*_LOOPS, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Fault(NamedTuple):
    """What a script does wrong, and what to change, or why that is left alone."""

    op: str
    place: ScriptPlace
    found: tuple[SourceText, SourceFix] | str


def faults(facts: ScriptFacts, locate: Locate, scale: float | None = None) -> Iterator[Fault]:
    """The faults that a script's steps show; a new ``GradScaler`` starts at ``scale``."""
    if "float16" in facts.autocast and facts.backward and not facts.scaled_backward:
        yield Fault("backward", facts.backward[0], _scaled(facts, locate, scale))
    unscaled = _Unscaled()
    for place in facts.scaled_clips:
        yield Fault("clip_grad", place, _unscaled(place, facts, locate, unscaled))
    for place in facts.around_steps:
        yield Fault("autocast", place, _uncached(place, locate))


class _Call(NamedTuple):
    """A call that is a statement with lines of its own."""

    source: SourceText
    call: ast.Call
    statement: ast.stmt
    of: ast.expr  # whose method is called

    @property
    def function(self) -> ast.AST | None:
        """That it is in."""
        return self.source.around(self.statement, _FUNCTIONS)


def _call(place: ScriptPlace, name: str, locate: Locate) -> _Call | str:
    """The call at a place, if it can be changed as those of ``name`` are."""
    found = locate(place, name)
    if isinstance(found, str):
        return found
    source, node = found
    statement = source.around(node, ast.stmt)
    is_method = isinstance(node, ast.Call) and (isinstance(node.func, ast.Attribute) or name == "clip_grad")
    if not (isinstance(node, ast.Call) and is_method and isinstance(statement, ast.stmt)):
        return f"{name} is not called there as a method"
    # lines can be put before and behind only such a statement
    is_alone = not isinstance(statement, ast.Expr) or statement.value is node
    if not is_alone or not source.can_be_indented(statement):
        return f"{name} is not a statement with lines of its own"
    return _Call(source, node, statement, getattr(node.func, "value", node.func))


def _scaled(facts: ScriptFacts, locate: Locate, scale: float | None) -> tuple[SourceText, SourceFix] | str:
    """A ``GradScaler``: the loss scaled, gradients unscaled before they are clipped."""
    backward = [_call(place, "backward", locate) for place in facts.backward]
    made = [_call(place, "step", locate) for place in facts.made_steps]
    clips = [_call(place, "clip_grad", locate) for place in facts.clips]
    calls = [*backward, *made, *clips]
    located = [each for each in calls if isinstance(each, _Call)]
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
        first, last = source.outer(each.of)
        if each in backward:
            # parentheses around the loss become those of the call
            opened = closed = ""
            if (first, last) == source.span(each.of):
                opened, closed = "(", ")"
            edits.append(Edit(first, first, f"{scaler}.scale{opened}", first - last))
            edits.append(Edit(last, last, closed, last - first))
        elif each in made:
            edits.append(Edit(*source.span(each.call), f"{scaler}.step({source.segment(each.of)})"))
            # once for all optimizers
            if facts.optimizers == 1 or each is last_step:
                update = f"{source.indent_of(each.statement)}{scaler}.update()"
                edits.append(source.lines_behind(each.statement, [update]))
    # whatever reads gradients needs them unscaled
    readers = [each.statement for each in located if each in clips]
    readers += _naming_gradients(source, [each for each in located if each in backward], steps)
    unscaled = _Unscaled()
    for statement in sorted(readers, key=lambda each: each.lineno):
        step = _step_after(statement, source, steps)
        if step is None:
            return "no step follows in the function that clips gradients"
        edits += unscaled.before(statement, step, f"{scaler}.unscale_({source.segment(step.of)})")
    why = "gradients of the loss in fp16 become zero: scale it"
    return source, SourceFix("grad_scaler", why, located[0].call, edits=tuple(edits))


def _why_not_scaled(
    facts: ScriptFacts, located: list[_Call], made: Sequence[_Call | str], clips: Sequence[_Call | str]
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


def _naming_gradients(source: SourceText, backward: list[_Call], steps: list[_Call]) -> Iterator[ast.stmt]:
    """Statements between ``backward()`` and ``step()`` that name ``.grad`` and don't clear it."""
    lines = sorted((each.statement.lineno, each in backward) for each in (*backward, *steps))
    for node in [each for each in ast.walk(source.tree) if isinstance(each, ast.Attribute) and each.attr == "grad"]:
        parent, statement = source.parents[node], source.around(node, ast.stmt)
        is_called = isinstance(parent, ast.Call) and parent.func is node  # torch.autograd.grad
        if is_called or not isinstance(statement, ast.stmt):
            continue
        before = [is_backward for line, is_backward in lines if line < node.lineno]
        clears = isinstance(statement, ast.Assign) and source.segment(statement.value) == "None"
        step = _step_after(statement, source, steps)
        if before[-1:] == [True] and not clears and step is not None:
            # in another block it may be read more often than a step follows
            block, _ = next(_blocks(source, step.statement))
            if block in [around for around, _ in _blocks(source, statement)]:
                yield statement


class _Unscaled:
    """The lines that unscale gradients, by block: torch allows one for each step."""

    def __init__(self) -> None:
        self._lines: list[tuple[str, object]] = []

    def before(self, statement: ast.stmt, step: _Call, line: str) -> list[Edit]:
        """``line`` before ``statement``, in a block that ``step`` is in; once per block."""
        source, of_step = step.source, {block for block, _ in _blocks(step.source, step.statement)}
        around = [(block, node) for block, node in _blocks(source, statement) if block in of_step]
        if any((line, block) in self._lines for block, _ in around):
            return []
        block, node = around[0]
        self._lines.append((line, block))
        return [source.line_before(node, line)]


def _blocks(source: SourceText, node: ast.AST) -> Iterator[tuple[object, ast.stmt]]:
    """The blocks around ``node``, the innermost first, each with its statement around ``node``."""
    while (parent := source.parents.get(node)) is not None:
        for field, value in ast.iter_fields(parent):
            if isinstance(value, list) and node in value and isinstance(node, ast.stmt):
                yield (parent, field), node
        node = parent


def _step_after(statement: ast.stmt, source: SourceText, steps: Sequence[_Call]) -> _Call | None:
    """The first of the steps behind a statement in its function."""
    function = source.around(statement, _FUNCTIONS)
    here = [each for each in steps if each.source is source and each.function is function]
    behind = (each for each in here if each.statement.lineno > statement.lineno)
    return min(behind, key=lambda each: each.statement.lineno, default=None)


def _before_all(calls: list[_Call], facts: ScriptFacts, locate: Locate) -> ast.stmt:
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


def _runs_once(call: _Call, facts: ScriptFacts, locate: Locate) -> bool:
    """Whether the function around ``call`` is named once, and its callers are in no loop."""
    function = call.function
    if not isinstance(function, _FUNCTIONS):
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
    clip = _call(place, "clip_grad", locate)
    steps = [_call(each, "step", locate) for each in facts.scaled_steps]
    if isinstance(clip, str):
        return clip
    with_optimizer = [each for each in steps if isinstance(each, _Call) and each.call.args]
    step = _step_after(clip.statement, clip.source, with_optimizer)
    if step is None:
        none = "no step of a GradScaler follows in the function that clips gradients"
        return next((each for each in steps if isinstance(each, str)), none)
    optimizer = clip.source.segment(step.call.args[0])
    edits = unscaled.before(clip.statement, step, f"{clip.source.segment(step.of)}.unscale_({optimizer})")
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
