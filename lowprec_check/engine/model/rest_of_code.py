"""What a running function or file has still to run, by its source, and what its names refer to."""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import functools
import inspect
import linecache
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, TypeVar

from torch import Tensor, nn

from lowprec_check.engine.model.user_code import parsing
from lowprec_check.torchkit.pytree import attributes_of
from lowprec_check.torchkit.source_location import is_own_file

Node = TypeVar("Node", bound=ast.AST)

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_COMPREHENSION_CODE = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
"""Names of the code of comprehensions, which have frames of their own before Python 3.12."""
_COMPREHENSIONS_ARE_INLINED = sys.version_info >= (3, 12)  # but those of generators
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_FILLS = ("append", "insert", "extend", "add", "update")

UNKNOWN = object()
"""The value of an expression that only running it would tell."""


class RestOfCode:
    """What is left of a ``frame``'s code, with the running statement; found without running any."""

    def __init__(self, frame: FrameType, tree: ast.Module, function: Any) -> None:
        code = frame.f_code
        self._locals, self._globals = frame.f_locals, frame.f_globals
        self.is_own = is_own_file(code.co_filename)  # whether it is in a file of the user's own
        self.function = function
        """The definition of the function; ``None`` for a file and for a comprehension."""
        count = code.co_argcount + code.co_kwonlyargcount
        self.arguments = [self._locals.get(name) for name in code.co_varnames[:count]]
        """The values of its parameters now."""
        self.current: ast.stmt | None = None  # the innermost statement that is running
        self.after: list[ast.stmt] = []
        """The statements behind it, but not those of loops that run again."""
        self._holds: dict[tuple[int, int], bool] = {}
        self._filled: dict[int, set[str | None]] = {}
        self._names: dict[bool, set[str]] = {}
        # The loops and comprehensions that the call is in
        self._loops: list[ast.AST] = []
        self.statements: list[ast.stmt] = []
        """All that may run: what is running, the loops around it, and what is behind it."""
        self._collect(tree.body if function is None else function.body, frame)

    @classmethod
    def of(cls, frame: FrameType) -> RestOfCode | None:
        """What is left of the frame's code; ``None`` if it has no source, or is a comprehension."""
        tree = source_tree(frame.f_code.co_filename)
        if tree is None or frame.f_code.co_name in _COMPREHENSION_CODE:
            return None
        if frame.f_code.co_name == "<module>":
            return cls(frame, tree, None)
        function = _definition(frame.f_code)
        if function is None:
            return None
        return cls(frame, tree, function)

    def _collect(self, block: list[ast.stmt], frame: FrameType) -> None:
        line = frame.f_lineno
        for index, statement in enumerate(block):
            if not statement.lineno <= line <= (statement.end_lineno or statement.lineno):
                continue
            behind = block[index + 1 :]
            if isinstance(statement, ast.Try):
                behind = [*statement.orelse, *statement.finalbody, *behind]
            self.current = statement
            self.after = [*behind, *self.after]
            self.statements = [*behind, *self.statements]
            inner = _inner_block(statement, line)
            is_loop = isinstance(statement, _LOOPS)
            if is_loop and (inner is not None or isinstance(statement, ast.While)):
                self._loops.append(statement)
            if inner is None or is_loop:  # all of a loop may run again
                self.statements = [statement, *self.statements]
            if inner is None:
                self._loops += _comprehensions_around(statement, frame)
            else:
                self._collect(inner, frame)
            return

    def repeats(self, module: nn.Module) -> bool:
        """Whether the call is in a loop that calls this ``module`` each time, and no other."""
        for loop in self._loops:
            names = _stored(loop)
            is_variable = any(self._locals.get(name) is module for name in names)
            # The variable of a comprehension has no value in this frame
            if isinstance(loop, _COMPREHENSIONS):
                calls = (part for part in ast.walk(loop) if isinstance(part, ast.Call))
                is_variable = is_variable or any(root_of(call.func) in names for call in calls)
            if not is_variable:
                return True
        return False

    @functools.cached_property
    def statement_of(self) -> dict[ast.AST, ast.stmt]:
        """By node outside functions and classes, outer ones first, the innermost statement."""
        nodes: dict[ast.AST, ast.stmt] = {}
        waiting = collections.deque[tuple[ast.AST, ast.stmt]]((statement, statement) for statement in self.statements)
        while waiting:
            node, around = waiting.popleft()
            if not isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.Lambda)):
                around = node if isinstance(node, ast.stmt) else around
                nodes[node] = around
                waiting.extend((child, around) for child in ast.iter_child_nodes(node))
        return nodes

    def nodes(self, kind: type[Node]) -> Iterator[Node]:
        """The statements and expressions of a kind."""
        return (node for node in self.statement_of if isinstance(node, kind))

    # -- What expressions are worth now

    def value_of(self, node: ast.expr) -> Any:
        """The value of a name or an attribute; :data:`UNKNOWN` of anything else."""
        if isinstance(node, ast.Name):
            for names in (self._locals, self._globals, vars(builtins)):
                if node.id in names:
                    return names[node.id]
        if isinstance(node, ast.Attribute):
            owner = self.value_of(node.value)
            if is_module(owner) and node.attr in owner._modules:
                return owner._modules[node.attr]
            if owner is UNKNOWN:
                return UNKNOWN
            value = inspect.getattr_static(owner, node.attr, UNKNOWN)
            if isinstance(value, classmethod):
                return MethodType(value.__func__, owner)
            return value
        return UNKNOWN

    def holds(self, value: Any, module: nn.Module) -> bool:
        """Whether a value is ``module``, contains it, or is a container of such modules."""
        if is_module(value):
            place = id(value), id(module)
            if place not in self._holds:
                self._holds[place] = any(part is module for part in value.modules())
            return self._holds[place]
        if type(value) is dict:
            value = list(value.values())
        if type(value) in (list, tuple):
            return any(is_module(part) and self.holds(part, module) for part in value)
        return False

    def holds_in_attributes(self, value: Any, module: nn.Module) -> bool:
        """Whether ``module`` is in an attribute of an object that is no module."""
        return not is_module(value) and any(self.holds(part, module) for part in (attributes_of(value) or {}).values())

    def refers_to(self, node: ast.expr, module: nn.Module) -> bool:
        """Whether an expression gives ``module`` on, alone, in a module or in a container."""
        if self._refers_to(node, module):
            return True
        # Or a container that gets it later: by `layers.append(layer)`, `parts["encoder"] = encoder`
        if id(module) not in self._filled:
            names = self._filled[id(module)] = set()
            for call in self.nodes(ast.Call):
                fills = isinstance(call.func, ast.Attribute) and call.func.attr in _FILLS
                if fills and any(self._refers_to(argument, module) for argument in call.args):
                    names.add(root_of(call.func))
            for assignment in self.nodes(ast.Assign):
                filled = [root_of(target) for target in assignment.targets if isinstance(target, ast.Subscript)]
                if filled and self._refers_to(assignment.value, module):
                    names.update(filled)
        if isinstance(node, ast.Starred):
            node = node.value
        return isinstance(node, ast.Name) and node.id in self._filled[id(module)]

    def _refers_to(self, node: ast.expr, module: nn.Module) -> bool:
        if isinstance(node, ast.Starred):
            return self._refers_to(node.value, module)
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return any(self._refers_to(element, module) for element in node.elts)
        if isinstance(node, ast.Dict):
            return any(self._refers_to(value, module) for value in node.values)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):  # model.eval()
            returns_it = node.func.attr != "forward" and callable(getattr(nn.Module, node.func.attr, None))
            return returns_it and self._refers_to(node.func.value, module)
        return self.holds(self.value_of(node), module)

    # -- What is called

    def definition_of(self, node: ast.expr) -> Any:
        """The definition of a function of the user's files, maybe still to come; else ``None``."""
        if isinstance(node, ast.Name) and node.id in self._later_functions:
            return self._later_functions[node.id]
        function = self.value_of(node)
        if type(function) is FunctionType and is_own_file(function.__code__.co_filename):
            return _definition(function.__code__)
        return None

    @functools.cached_property
    def _later_functions(self) -> dict[str, Any]:
        """The functions that are still to be defined, by name; the first of each."""
        later = [statement for statement in self.statements if isinstance(statement, _FUNCTIONS)]
        return {function.name: function for function in reversed(later)}

    def called(self, *, in_loops: bool = False) -> set[str]:
        """The names that are called later, by the user's functions too; perhaps in loops only."""
        if in_loops not in self._names:
            self._names[in_loops] = self._called(self.statements, {}, counts=not in_loops)
        return self._names[in_loops]

    def _called(self, body: Iterable[ast.AST], by_function: dict[Any, set[str]], *, counts: bool) -> set[str]:
        """Those in ``body``; ``by_function`` has those of functions, by whether all calls count."""
        names: set[str] = set()
        waiting = [(node, counts) for node in body]
        while waiting:
            node, counted = waiting.pop()
            if isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.Lambda)):
                continue
            if isinstance(node, ast.Call):
                if counted and isinstance(node.func, ast.Name):
                    names.add(node.func.id)
                function = self.definition_of(node.func)
                if function is not None:
                    key = function, counted
                    if key not in by_function:
                        by_function[key] = set()  # of a function that calls itself
                        by_function[key] = self._called(function.body, by_function, counts=counted)
                    names |= _as_the_caller_says(by_function[key], function, node)
            # What a loop goes over is computed once
            once = []
            if isinstance(node, (ast.For, ast.AsyncFor)):
                once = [node.iter]
            if isinstance(node, _COMPREHENSIONS):
                once = [node.generators[0].iter]
            repeated = counted or isinstance(node, (*_LOOPS, *_COMPREHENSIONS))
            waiting += [(child, counted if child in once else repeated) for child in ast.iter_child_nodes(node)]
        return names


def is_module(value: Any) -> bool:
    """Whether it is a module; unlike ``isinstance``, this asks nothing of the user's object."""
    return issubclass(type(value), nn.Module)


def root_of(node: ast.expr) -> str | None:
    """The name in front of attributes and indices: ``model`` of ``model.layers[0].weight``."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def repeats_in_comprehension(frame: FrameType, module: nn.Module) -> bool:
    """Whether the frame is that of a comprehension, whose variable is not the ``module`` itself."""
    values = frame.f_locals.values()
    return frame.f_code.co_name in _COMPREHENSION_CODE and not any(value is module for value in values)


def _as_the_caller_says(called: Iterable[str], function: Any, call: ast.Call) -> set[str]:
    """Names that a function calls, as its caller names its arguments; local ones are left out."""
    parameters = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    arguments = dict(zip(parameters, call.args, strict=False))
    arguments |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    stored, names = _stored(function), set()
    for name in called:
        argument = arguments.get(name)
        if isinstance(argument, ast.Name):
            names.add(argument.id)
        elif argument is None and name not in stored and name not in parameters:
            names.add(name)
    return names


def _stored(node: ast.AST) -> set[str]:
    """The names that are assigned inside."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}


def _inner_block(statement: ast.stmt, line: int) -> list[ast.stmt] | None:
    """The block of a compound statement that ``line`` is in; ``None`` if it is in none."""
    if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
        return None
    parts = [getattr(statement, part, []) for part in ("body", "orelse", "finalbody")]
    parts += [handler.body for handler in getattr(statement, "handlers", [])]
    parts += [case.body for case in getattr(statement, "cases", [])]
    for block in parts:
        if block and block[0].lineno <= line <= (block[-1].end_lineno or block[-1].lineno):
            return list(block)
    return None


def _comprehensions_around(statement: ast.stmt, frame: FrameType) -> list[ast.AST]:
    """The comprehensions of a statement around the call, if they have no frames of their own."""
    if not _COMPREHENSIONS_ARE_INLINED:
        return []
    place = _place_of(frame)
    comprehensions: list[ast.AST] = []
    for node in ast.walk(statement):
        if isinstance(node, _COMPREHENSIONS):
            # The first iterable is computed once
            once = {id(part) for part in ast.walk(node.generators[0].iter)}
            calls = (part for part in ast.walk(node) if isinstance(part, ast.Call) and id(part) not in once)
            if any((c.lineno, c.end_lineno, c.col_offset, c.end_col_offset) == place for c in calls):
                comprehensions.append(node)
    return comprehensions


def expressions_of_call(
    frame: FrameType, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, Any] | None]:
    """How the user's code that calls a model in ``frame`` writes it and its inputs, and what names
    mean there; nothing if another's code calls it, or Python does not know where in the line.
    """
    tree, place = source_tree(frame.f_code.co_filename), _place_of(frame)
    if tree is None or not is_own_file(frame.f_code.co_filename) or None in place:
        return {}, None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    node = next((c for c in calls if (c.lineno, c.end_lineno, c.col_offset, c.end_col_offset) == place), None)
    if node is None or not isinstance(node.func, (ast.Name, ast.Attribute)):
        return {}, None
    written = [ast.unparse(argument) for argument in node.args]
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if any(isinstance(argument, ast.Starred) for argument in node.args) or len(written) != len(args):
        return {}, None
    if not keywords and len(written) == 1 and isinstance(args[0], Tensor):
        inputs = written[0]
    elif written and not keywords:
        inputs = f"({', '.join(written)}{',' * (len(written) == 1)})"
    elif keywords.keys() == {None} and not written:
        inputs = keywords[None]
    elif not written and keywords.keys() == kwargs.keys():
        inputs = "{" + ", ".join(f'"{name}": {value}' for name, value in keywords.items()) + "}"
    else:
        return {}, None
    return {"model": ast.unparse(node.func), "inputs": inputs}, {**frame.f_globals, **frame.f_locals}


def _place_of(frame: FrameType) -> tuple[int | None, ...]:
    """First and last line, first and last column of what a frame computes; Python 3.11 knows."""
    if not hasattr(frame.f_code, "co_positions"):
        return (None,) * 4
    return next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)


def _definition(code: CodeType) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Where the function with this code is defined; ``None`` if it has no source."""
    tree = source_tree(code.co_filename)
    if tree is None:
        return None
    return _definitions(tree).get((code.co_name, code.co_firstlineno))


@functools.lru_cache(64)
def _definitions(tree: ast.Module) -> dict[tuple[str, int], Any]:
    """The functions of a file, by their names and first lines, also those of their decorators."""
    return {
        (node.name, line): node
        for node in ast.walk(tree)
        if isinstance(node, _FUNCTIONS)
        for line in (node.lineno, *(decorator.lineno for decorator in node.decorator_list))
    }


def source_tree(file: str) -> ast.Module | None:
    """The syntax tree of a file; ``None`` if it cannot be read."""
    linecache.checkcache(file)
    return _parsed("".join(linecache.getlines(file)))


@functools.lru_cache(64)
def _parsed(text: str) -> ast.Module | None:
    with parsing, contextlib.suppress(SyntaxError, ValueError, SystemError, RecursionError):
        if text:
            return ast.parse(text)
    return None
