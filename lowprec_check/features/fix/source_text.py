"""One file of the user's: its expressions by their positions, and its text with changes, in which
everything else stays as it is.

Changes are insertions and replacements at the positions that Python's own parser gives, which are
also those of the interpreter's instructions: formatting and comments cannot change, and nothing
else has to be installed.
"""

from __future__ import annotations

import ast
import difflib
import io
import itertools
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from lowprec_check.features.fix.seen_values import ScriptPlace

Span = tuple[int, int]
"""Start and end, in characters from the start of the text."""

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)")
_OPEN, _CLOSED = ("(", "[", "{"), (")", "]", "}")
_NO_CODE = (*(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT), tokenize.ENDMARKER)


class Edit(NamedTuple):
    """Text in place of that from ``start`` to ``end``; an insertion where these are equal."""

    start: int
    end: int
    text: str
    size: int = 0  # length of an insertion's expression: negative before it, positive behind it

    @property
    def order(self) -> tuple[int, bool, int]:
        """At one place ends come before starts: inner ends first, inner starts last."""
        return self.start, self.size <= 0, self.size


class SourceText:
    """The parsed text of the file; raises ``OSError``, ``SyntaxError`` or ``ValueError``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        data = path.read_bytes()
        self.encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
        self.text = data.decode(self.encoding)
        self.tree = ast.parse(self.text)
        self._places = lines_of(self.text)
        self._starts, self._lines = self._places
        self.newline = "\r\n" if "\r\n" in self.text else "\n"
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        # of nodes with one span, the outermost stays
        expressions = [node for node in ast.walk(self.tree) if isinstance(node, ast.expr)]
        self.nodes = {self.span(node): node for node in reversed(expressions)}
        """The expressions by their place."""
        self._strings, self._pairs = list[Span](), dict[int, int]()
        """Multi-line strings, and matching parentheses."""
        self._before, self._behind = dict[int, int](), dict[int, int]()
        """Grouping parentheses before and behind an expression, which those of calls are not."""
        calls = {self.call_opens(node) for node in ast.walk(self.tree) if isinstance(node, ast.Call)}
        stack, last_open, last_end = list[int](), -1, -1
        for token in tokenize.generate_tokens(io.StringIO(self.text, newline="").readline):
            if token.type in _NO_CODE:
                continue
            start, end = (self._starts[row - 1] + column for row, column in (token.start, token.end))
            if token.start[0] != token.end[0]:
                self._strings.append((start, end))
            if last_open >= 0:
                self._before[start] = last_open
            if token.string in _CLOSED and stack:
                self._pairs[stack.pop()] = start
                self._behind[last_end] = start
            last_open = -1
            if token.string == "(" and start not in calls:
                last_open = start
            if token.string in _OPEN:
                stack.append(start)
            last_end = end

    def span(self, node: ast.AST) -> Span:
        """Where ``node`` starts and ends, without parentheses around it."""
        at: ast.expr = node  # type: ignore[assignment]
        offset = self._places.offset
        return offset(at.lineno, at.col_offset), offset(at.end_lineno or 0, at.end_col_offset or 0)

    def outer(self, node: ast.expr) -> Span:
        """Where it starts and ends with the parentheses that only group it."""
        start, end = self.span(node)
        # a pair that belongs together, with nothing but it around the expression
        while True:
            opened, closed = self._before.get(start), self._behind.get(end)
            if opened is None or closed is None or self._pairs.get(opened) != closed:
                return start, end
            start, end = opened, closed + 1

    def segment(self, node: ast.AST) -> str:
        """Its text."""
        start, end = self.span(node)
        return self.text[start:end]

    def around(self, node: ast.AST, kind: type[ast.AST] | tuple[type[ast.AST], ...]) -> ast.AST | None:
        """The innermost node of this ``kind`` that ``node`` is in, or is itself."""
        at: ast.AST | None = node
        while at is not None and not isinstance(at, kind):
            at = self.parents.get(at)
        return at

    def can_be_indented(self, statement: ast.stmt) -> bool:
        """Whether it has its own lines, and no multi-line string, which would be indented too."""
        start, end = self.span(statement)
        last = statement.end_lineno or 1
        behind = self.text[end : self._starts[last - 1] + len(self._lines[last - 1])].strip()
        alone = not self.text[self._starts[statement.lineno - 1] : start].strip() and behind[:1] in ("", "#")
        return alone and not any(start <= string[0] < end for string in self._strings)

    def indented_under(self, statements: Sequence[ast.stmt], header: str) -> list[Edit]:
        """The lines of ``statements``, which follow each other, as the body of a compound statement
        with this ``header``.
        """
        first, last = statements[0], statements[-1]
        more = self.more_indent(first)
        numbers = range(first.lineno, (last.end_lineno or 0) + 1)
        starts = [self._starts[number - 1] for number in numbers if self._lines[number - 1].strip()]
        return [self.line_before(first, header), *(Edit(at, at, more, -1) for at in starts)]

    def more_indent(self, statement: ast.stmt) -> str:
        """What a block inside that of ``statement`` is indented by more."""
        own, outer = self.indent_of(statement), self.parents[statement]
        if own.startswith("\t"):
            return "\t"
        more = ""
        if isinstance(outer, ast.stmt):
            more = own[len(self.indent_of(outer)) :]
        return more if 0 < len(more) < 4 else "    "

    def dedented(self, statements: Sequence[ast.stmt], block: ast.stmt) -> list[Edit]:
        """The last statements of a compound statement behind it, with the comments before them."""
        less = len(self.indent_of(statements[0])) - len(self.indent_of(block))
        first = statements[0].lineno
        while self._lines[first - 2].strip()[:1] in ("", "#"):
            first -= 1
        numbers = range(first, (statements[-1].end_lineno or 0) + 1)
        starts = [self._starts[number - 1] for number in numbers if self._lines[number - 1].strip()]
        return [Edit(at, at + less, "") for at in starts]

    def around_is(self, node: ast.AST, outer: ast.AST) -> bool:
        """Whether ``node`` is ``outer``, or in it."""
        at: ast.AST | None = node
        while at is not None and at is not outer:
            at = self.parents.get(at)
        return at is outer

    def line_before(self, node: ast.stmt, text: str) -> Edit:
        """A line in front of a statement, as far indented as that is."""
        at = self._starts[min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1]
        return Edit(at, at, f"{self.indent_of(node)}{text}{self.newline}", -(1 << 40))

    def before(self, statement: ast.stmt, text: str) -> Edit:
        """A simple statement in front of another, in the same line if that is not its own."""
        start, _ = self.span(statement)
        if self.indent_of(statement).strip():
            return Edit(start, start, f"{text}; ", -(1 << 40))
        return self.line_before(statement, text)

    def behind(self, statement: ast.stmt, text: str) -> Edit:
        """A simple statement behind another, in the same line if that is not its own."""
        _, end = self.span(statement)
        if self.can_be_indented(statement):
            return self.lines_behind(statement, [f"{self.indent_of(statement)}{text}"])
        return Edit(end, end, f"; {text}", 1 << 40)

    def removals(self, statements: Sequence[ast.stmt]) -> Iterator[Edit]:
        """What leaves simple statements of one block out, with lines of their own."""
        parent = self.parents[statements[0]]
        values = [value for _, value in ast.iter_fields(parent)]
        block = next(value for value in values if isinstance(value, list) and statements[0] in value)
        if len(block) == len(statements):
            yield Edit(self.span(block[0])[0], self.span(block[-1])[1], "pass")
            return
        # Those that follow each other are left out together
        left_out = [statement in statements for statement in block]
        for is_out, group in itertools.groupby(range(len(block)), left_out.__getitem__):
            numbers = list(group)
            if is_out:
                yield self._removal(block, numbers[0], numbers[-1])

    def _removal(self, block: Sequence[ast.stmt], first: int, last: int) -> Edit:
        (start, _), (_, end) = self.span(block[first]), self.span(block[last])
        first_line, last_line = block[first].lineno - 1, (block[last].end_lineno or 1) - 1
        line_end = self._starts[last_line] + len(self._lines[last_line])
        starts_line = not self.text[self._starts[first_line] : start].strip()
        behind = self.text[end:line_end].strip()
        if starts_line and behind.removeprefix(";").lstrip()[:1] in ("", "#"):
            return Edit(self._starts[first_line], line_end, "")
        # The semicolon behind goes too, or else that before
        if behind.startswith(";") and last + 1 < len(block) and block[last + 1].lineno == last_line + 1:
            return Edit(start, self.span(block[last + 1])[0], "")
        return Edit(self.span(block[first - 1])[1] if not starts_line else start, end, "")

    def lines_behind(self, node: ast.stmt | ast.expr, texts: Iterable[str]) -> Edit:
        """Lines behind the last of a statement, as they are."""
        at = self._starts[(node.end_lineno or 1) - 1] + len(self._lines[(node.end_lineno or 1) - 1])
        text = "".join(line + self.newline for line in texts)
        if self.text[at - 1 : at] not in ("\r", "\n"):  # the last line of a file may not end
            text = self.newline + text.removesuffix(self.newline)
        return Edit(at, at, text, 1 << 40)

    def indent_of(self, node: ast.stmt) -> str:
        """The white space in front of a statement."""
        return self.text[self._starts[node.lineno - 1] : self.span(node)[0]]

    def call_opens(self, call: ast.Call) -> int:
        """Where the parenthesis of a call is: the first behind its function in no comment."""
        at, comment = self.span(call.func)[1], False
        while self.text[at] != "(" or comment:
            comment = (comment or self.text[at] == "#") and self.text[at] not in "\r\n"
            at += 1
        return at


class Lines(NamedTuple):
    """The lines of a text with their ends, and where each starts, as Python counts them."""

    starts: list[int]
    texts: list[str]

    def offset(self, line: int, column: int) -> int:
        """Of a position as ``ast`` counts it: lines from 1, columns in bytes of UTF-8."""
        content = self.texts[line - 1]
        if not content.isascii():
            column = len(content.encode()[:column].decode(errors="ignore"))
        return self.starts[line - 1] + column


def lines_of(text: str) -> Lines:
    """The lines of ``text``."""
    lines = [line for line in _LINE.findall(text) if line]
    starts = [0, *itertools.accumulate(map(len, lines))]
    return Lines(starts[: len(lines)], lines)


def edited(text: str, edits: Iterable[Edit]) -> str:
    """The text with ``edits``, equal ones once; raises ``ValueError`` if two overlap."""
    parts, at = [], 0
    for edit in sorted(dict.fromkeys(edits), key=lambda edit: edit.order):
        if edit.start < at:
            raise ValueError("two changes overlap")
        parts += [text[at : edit.start], edit.text]
        at = edit.end
    return "".join([*parts, text[at:]])


def moved(span: Span, edits: Iterable[Edit]) -> Span:
    """The place of ``span`` in the text with ``edits``, with insertions inside."""
    (start, end), size = span, span[1] - span[0]
    new_start, new_end = start, end
    for edit in dict.fromkeys(edits):
        grown = len(edit.text) - (edit.end - edit.start)
        outside = edit.start == edit.end and edit.size <= -size
        # an insertion of a larger expression at the same place is outside of this one
        if edit.start < start or (edit.start == start and outside):
            new_start += grown
        if edit.start < end or (edit.start == end and 0 < edit.size < size):
            new_end += grown
    return new_start, new_end


def unified_diff(old: str, new: str, name: str) -> str:
    """What changes between two texts of a file, as ``git apply`` takes it."""
    lines = difflib.unified_diff(lines_of(old).texts, lines_of(new).texts, f"a/{name}", f"b/{name}")
    no_newline = "\n\\ No newline at end of file\n"
    return "".join(line if line.endswith("\n") else f"{line}{no_newline}" for line in lines)


# -- Calls in a training script

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
