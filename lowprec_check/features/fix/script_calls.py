"""Calls in a training script at which a change is made, and the statements and blocks around."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from lowprec_check.features.fix.seen_values import ScriptPlace
from lowprec_check.features.fix.source_text import Edit, SourceText

Locate = Callable[[ScriptPlace, str], tuple[SourceText, ast.AST] | str]
"""The expression at a place that calls a function of this name, or why it is left alone."""

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class ScriptCall(NamedTuple):
    """A call in a statement that lines can be put before and behind."""

    source: SourceText
    call: ast.Call
    statement: ast.stmt
    of: ast.expr  # whose method is called

    @property
    def function(self) -> ast.AST | None:
        """That it is in."""
        return self.source.around(self.statement, FUNCTIONS)

    @property
    def of_text(self) -> str:
        """What its method is called of, as it is written."""
        return self.source.segment(self.of)

    def scaled_by(self, scaler: str) -> list[Edit]:
        """``scaler.scale(loss).backward()`` for ``loss.backward()``."""
        first, last = self.source.outer(self.of)
        # parentheses around the loss become those of the call
        opened = closed = ""
        if (first, last) == self.source.span(self.of):
            opened, closed = "(", ")"
        return [
            Edit(first, first, f"{scaler}.scale{opened}", first - last),
            Edit(last, last, closed, last - first),
        ]


def call_at(place: ScriptPlace, name: str, locate: Locate) -> ScriptCall | str:
    """The call at a place, if it can be changed as those of ``name`` are."""
    found = locate(place, name)
    if isinstance(found, str):
        return found
    source, node = found
    statement = source.around(node, ast.stmt)
    is_method = isinstance(node, ast.Call) and (isinstance(node.func, ast.Attribute) or name == "clip_grad")
    if not (isinstance(node, ast.Call) and is_method and isinstance(statement, ast.stmt)):
        return f"{name} is not called there as a method"
    is_simple = not isinstance(statement, ast.Expr) or statement.value is node
    if not is_simple or hasattr(statement, "body"):
        return f"{name} is not a statement"
    return ScriptCall(source, node, statement, getattr(node.func, "value", node.func))


def blocks_around(source: SourceText, node: ast.AST) -> Iterator[tuple[tuple[ast.AST, str], ast.stmt]]:
    """The blocks around ``node``, the innermost first, each with its statement around ``node``."""
    while (parent := source.parents.get(node)) is not None:
        for field, value in ast.iter_fields(parent):
            if isinstance(value, list) and node in value and isinstance(node, ast.stmt):
                yield (parent, field), node
        node = parent


def step_after(statement: ast.stmt, source: SourceText, steps: Sequence[ScriptCall]) -> ScriptCall | None:
    """The first of the steps behind a statement in its function."""
    function = source.around(statement, FUNCTIONS)
    here = [each for each in steps if each.source is source and each.function is function]
    behind = [each for each in here if source.span(each.statement) > source.span(statement)]
    return min(behind, key=lambda each: source.span(each.statement), default=None)
