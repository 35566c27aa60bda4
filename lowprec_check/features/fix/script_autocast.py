"""Puts the forward passes and the losses of a training script under autocast, in its own loop."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from typing import Literal, NamedTuple

from lowprec_check.features.fix.scene import SourceFix, torch_in, unused_name, wrapped
from lowprec_check.features.fix.script_calls import FUNCTIONS, Locate, blocks_around
from lowprec_check.features.fix.seen_values import ForwardPass, ScriptFacts
from lowprec_check.features.fix.source_text import Edit, SourceText

Change = tuple[SourceText, SourceFix]


Widened = Literal["nothing", "outputs", "read later"]
"""What models return is cast to fp32: at once, for a loss that needs it, or behind the block."""


def autocast_changes(facts: ScriptFacts, locate: Locate, dtype: str, widens: Widened = "nothing") -> list[Change] | str:
    """Autocast around what each backward pass follows from, or why not."""
    if not facts.passes:
        return "no call of a model leads to its backward passes in its own code"
    passes = list[_Pass]()
    for forward_pass in facts.passes:
        located = _located(forward_pass, locate)
        if isinstance(located, str):
            return located
        passes.append(located)
    changes = list[Change]()
    for source in dict.fromkeys(located.source for located in passes):
        torch, imports = torch_in(source)
        header = f'with {torch}.autocast("{facts.device}", {torch}.{dtype}):'
        own = [located for located in passes if located.source is source]
        covered = _covered(own, list(_events(facts, source, locate)))
        if isinstance(covered, str):
            return covered
        edits = [*imports]
        for located in own:
            edits += located.split(header, scales=dtype == "float16") if located.in_loss else []
        edits += _indented(source, covered, header, own, widens)
        changes.append((source, SourceFix("autocast", _WHY.format(dtype), own[0].backward, edits=tuple(edits))))
    return changes


def _covered(passes: list[_Pass], events: list[ast.AST]) -> list[ast.stmt] | str:
    """The statements of a file that are put under autocast."""
    covered = list[ast.stmt]()
    for located in passes:
        region = located.region(events)
        if isinstance(region, str):
            return region
        covered += [statement for statement in region if statement not in covered]
    unfit = next((each for each in covered if not passes[0].source.can_be_indented(each)), None)
    return covered if unfit is None else f"line {unfit.lineno} cannot be indented"


def _indented(
    source: SourceText, covered: list[ast.stmt], header: str, passes: list[_Pass], widens: Widened
) -> Iterator[Edit]:
    """What puts statements under autocast, and casts what models return to fp32."""
    # What a new statement gets a copy of is left as it is
    forward = [call for each in passes for call in each.forward if call not in each.in_loss]
    calls = [call for call in dict.fromkeys(forward) if isinstance(call, ast.expr)]
    for run in _runs(source, covered):
        yield from source.indented_under(run, header)
        if widens == "read later":
            indent = source.indent_of(run[-1]) + source.more_indent(run[0])
            lines = [f"{indent}{name} = {name}.float()" for name in _read_later(source, run, calls)]
            yield from [source.lines_behind(run[-1], lines)] if lines else []
    if widens == "outputs":
        for call in calls:
            yield from wrapped(source, call, ".float()")


_WHY = "the forward pass and the loss are computed under autocast to {}"


class _Pass(NamedTuple):
    """The calls of a pass in the function that makes it."""

    source: SourceText
    backward: ast.AST
    forward: list[ast.AST]

    @property
    def in_loss(self) -> list[ast.AST]:
        """Those of ``criterion(model(x), y).backward()``."""
        method = getattr(self.backward, "func", None)
        if not isinstance(method, ast.Attribute) or not isinstance(self.source.parents[self.backward], ast.Expr):
            return []
        return [call for call in self.forward if self.source.around_is(call, method.value)]

    def split(self, header: str, *, scales: bool) -> list[Edit]:
        """The loss in a statement of its own, under autocast; a call that ``scales`` it needs the
        parentheses around it.
        """
        source, statement = self.source, self.source.around(self.backward, ast.stmt)
        loss: ast.expr = self.backward.func.value  # type: ignore[attr-defined]
        name = unused_name(source, "loss")
        assert isinstance(statement, ast.stmt)
        more = source.more_indent(statement)
        start, end = source.span(loss) if scales else source.outer(loss)
        lines = [header, f"{more}{name} = {source.segment(loss)}"]
        return [*(source.line_before(statement, line) for line in lines), Edit(start, end, name)]

    def region(self, events: list[ast.AST]) -> list[ast.stmt] | str:
        """The statements from the first forward pass on, but for those that train, and those before
        the backward pass that do something else than the loss.
        """
        source = self.source
        behind = dict(blocks_around(source, self.backward))
        shared = []
        earlier = [call for call in self.forward if call not in self.in_loss]
        if not earlier:
            return []
        for call in earlier:
            common = next((block for block, _ in blocks_around(source, call) if block in behind), None)
            if common is None:
                return "the forward and the backward pass are in different functions"
            shared.append(common)
        # The outermost block that one of them shares with the backward pass
        order = list(behind)
        parent, field = max(shared, key=order.index)
        statements: list[ast.stmt] = getattr(parent, field)
        around = behind[parent, field]
        end = statements.index(around)
        starts = [self._number_in(statements, call) for call in earlier]
        if any(start >= end for start in starts):
            return f"line {around.lineno} makes both the forward and the backward pass"
        # Between two events: a generator's forward pass may come before the critic's step
        region = list[ast.stmt]()
        has_forward = False
        for number in range(min(starts), end):
            statement = statements[number]
            if any(source.around_is(event, statement) for event in events):
                has_forward = False
                continue
            has_forward |= number in starts
            if has_forward:
                region.append(statement)
        computing = {id(statements[number]) for number in starts}
        used = set(_names(around))
        while region and id(region[-1]) not in computing and used.isdisjoint(_names(region[-1])):
            region.pop()
        return region

    def _number_in(self, statements: list[ast.stmt], call: ast.AST) -> int:
        return next(number for number, each in enumerate(statements) if self.source.around_is(call, each))


def _read_later(source: SourceText, run: list[ast.stmt], calls: list[ast.expr]) -> Iterator[str]:
    """The variables that get what models return, and that are read behind these statements."""
    scope = source.around(run[0], FUNCTIONS) or source.tree
    end = source.span(run[-1])[1]
    reads = [node for node in ast.walk(scope) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    later = {node.id for node in reads if source.span(node)[0] >= end}
    bound: dict[str, None] = {}
    for statement in itertools.chain(*map(ast.walk, run)):
        if isinstance(statement, ast.Assign) and any(source.around_is(call, statement) for call in calls):
            names = [node for target in statement.targets for node in ast.walk(target)]
            bound |= dict.fromkeys(node.id for node in names if isinstance(node, ast.Name))
    yield from (name for name in bound if name in later)


def _names(statement: ast.stmt) -> Iterator[str]:
    """The variables in a statement, and the attributes of ``self``."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield f"self.{node.attr}"
        elif isinstance(node, ast.Name) and node.id != "self":
            yield node.id


def _located(forward_pass: ForwardPass, locate: Locate) -> _Pass | str:
    """The expressions of a pass in their file."""
    found = locate(forward_pass.backward, "backward")
    if isinstance(found, str):
        return found
    source, backward = found
    forward = list[ast.AST]()
    for place in forward_pass.forward:
        call = locate(place, "forward")
        if isinstance(call, str):
            return call
        if call[0] is not source or call[1] is backward:
            return "the loop is not in the script's own code: use the switch for mixed precision of what runs it"
        forward.append(call[1])
    return _Pass(source, backward, forward)


def _events(facts: ScriptFacts, source: SourceText, locate: Locate) -> Iterator[ast.AST]:
    """The calls in a file that lead to backward passes, steps or clipping."""
    for place in facts.events:
        found = locate(place, "step")
        if not isinstance(found, str) and found[0] is source:
            yield found[1]


def _runs(source: SourceText, statements: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """Those that follow each other in one block; without those inside another one."""
    outer = [s for s in statements if not any(o is not s and source.around_is(s, o) for o in statements)]
    blocks: dict[int, list[ast.stmt]] = {}
    for statement in sorted(outer, key=source.span):
        (parent, field), _ = next(blocks_around(source, statement))
        block: list[ast.stmt] = getattr(parent, field)
        run = blocks.setdefault(id(block), [])
        if run and block.index(statement) != block.index(run[-1]) + 1:
            yield run
            run = blocks[id(block)] = []
        run.append(statement)
    yield from blocks.values()
