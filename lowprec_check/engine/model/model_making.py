"""Whether a call is part of making a model, as a dry run is: told from the code that the functions on the stack have not yet run."""

from __future__ import annotations

import ast
import builtins
import collections
import functools
import inspect
import linecache
import types
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from torch import nn
from torch.nn.parameter import is_lazy

from lowprec_check.engine.core.source_location import PACKAGE, is_own_file, is_user_code
from lowprec_check.engine.model.user_code import parsing

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSION_CODE = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
_ADDS_A_PART = ("add_module", "register_module", "append", "insert", "extend")
"""Methods of modules that take another one in."""


class Making(NamedTuple):
    """Why a call is part of making a model."""

    why: str
    """``initializes lazy layers``: it follows "the call at train.py:12"."""
    is_model: bool
    """Whether the module may be the whole model, which no other call is waited for if it is trained or the script ends."""


def made_by_constructor(frame: FrameType | None) -> bool:
    """Whether the constructor of a module is on the stack: a call in it may find out the shape of an output."""
    while frame is not None:
        code = frame.f_code
        is_constructor = code.co_name == "__init__" and code.co_argcount > 0
        if is_constructor and _is_module(frame.f_locals.get(code.co_varnames[0])):
            return True
        frame = frame.f_back
    return False


def part_of_making(module: nn.Module, frame: FrameType | None, *, loops: bool = True) -> Making | None:
    """Why the call of ``module`` that ``frame`` makes is part of making a model; ``None`` if it is a call of one.

    Without ``loops``, no call in a loop is part of making one.
    """
    if any(map(is_lazy, module.parameters())):
        return Making("initializes lazy layers", is_model=True)
    in_loop = False
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        if frame.f_code.co_name in _COMPREHENSION_CODE:
            in_loop = True
        elif is_user_code(frame.f_code.co_filename):
            rest = _Rest.of(frame)
            if rest is not None:
                making = None if rest.in_loop else _part_later(module, rest)
                if making is None and not (in_loop or rest.in_loop):
                    making = _returned_later(module, rest) or _loop_calls_another(module, rest)
                if making is not None and (loops or not in_loop):
                    return making
                in_loop |= rest.in_loop
        frame = frame.f_back
    return None


# -- What the code that is left says


def _part_later(module: nn.Module, rest: _Rest) -> Making | None:
    """Whether ``module`` becomes a part of another one: given to its constructor, or to a function whose result is called."""
    for node in rest.nodes(ast.Call):
        function = rest.value_of(node.func)
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if not any(rest.refers_to(argument, module) for argument in given):
            continue
        if _makes_module(function):
            return Making(f"is of a part of {_class_of(function).__name__}", is_model=False)
        if isinstance(node.func, ast.Attribute) and node.func.attr in _ADDS_A_PART:
            owner = rest.value_of(node.func.value)
            if _is_module(owner) and owner is not module:
                return Making(f"is of a part of {type(owner).__name__}", is_model=False)
    called = {_root(node.func) for node in rest.nodes(ast.Call)}
    for assignment in rest.nodes(ast.Assign):
        made = assignment.value
        if isinstance(made, ast.Call) and rest.is_own_function(made.func):
            given = [*made.args, *(keyword.value for keyword in made.keywords)]
            names = {target.id for target in assignment.targets if isinstance(target, ast.Name)} & called
            if names and any(rest.refers_to(argument, module) for argument in given):
                return Making(f"is of a part of `{min(names)}`", is_model=False)
        for target in assignment.targets:
            if isinstance(target, ast.Attribute) and rest.refers_to(made, module):
                owner = rest.value_of(target.value)
                if _is_module(owner) and owner is not module:
                    return Making(f"is of a part of {type(owner).__name__}", is_model=False)
    return None


def _returned_later(module: nn.Module, rest: _Rest) -> Making | None:
    """Whether the function of the frame makes the module and returns it, or says that it returns a model."""
    if rest.function is None or any(_holds(value, module) for value in rest.arguments):
        return None
    returned = [node.value for node in rest.nodes(ast.Return) if node.value is not None]
    if any(rest.refers_to(value, module) for value in returned):
        return Making(f"is made by {rest.function.name}(), which returns the model", is_model=True)
    annotation = rest.function.returns
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.Name(annotation.value)
    if annotation is not None and _is_module_class(rest.value_of(annotation)):
        return Making(f"is made by {rest.function.name}(), which returns a model", is_model=True)
    return None


def _loop_calls_another(module: nn.Module, rest: _Rest) -> Making | None:
    """Whether loops of the user's own code call a model that is still to be made, and not this one."""
    if not is_own_file(rest.file):
        return None
    called = rest.called_in_loops()
    if any(_holds(rest.value_of(ast.Name(name)), module) for name in called):
        return None
    for assignment in rest.nodes(ast.Assign):
        for target in assignment.targets:
            name = target.id if isinstance(target, ast.Name) else None
            if name in called and not rest.is_bound(name) and rest.may_make_module(assignment.value):
                return Making(f"comes before `{name}`, which a loop calls, is made", is_model=True)
    return None


def _is_module(value: Any) -> bool:
    return issubclass(type(value), nn.Module)  # not `isinstance`, which asks the user's object for its class


def _is_module_class(value: Any) -> bool:
    return issubclass(type(value), type) and issubclass(value, nn.Module)


_NO_WHOLES = ("torch.nn.modules.loss", "torch.nn.parallel", "torch.optim", "torch.distributed")
"""Where torch has classes of modules that get a model and are no larger model: losses, wrappers for several devices, averages."""


def _makes_module(function: Any) -> bool:
    """Whether it is a class of modules that may be models, or a function of such a class."""
    kind = _class_of(function)
    return _is_module_class(kind) and not kind.__module__.startswith(_NO_WHOLES)


def _class_of(function: Any) -> Any:
    """The class that is called itself, or by one of its functions."""
    return function.__self__ if issubclass(type(function), types.MethodType) else function


def _holds(value: Any, module: nn.Module) -> bool:
    """Whether a value is ``module``, a module with it inside, or a container of one."""
    if _is_module(value):
        return any(part is module for part in value.modules())
    if type(value) in (list, tuple, dict):
        parts = value.values() if type(value) is dict else value
        return any(_is_module(part) and _holds(part, module) for part in parts)
    return False


# -- What a function has still to run


_UNKNOWN = object()
Node = TypeVar("Node", bound=ast.AST)


class _Rest:
    """The statements of a function, or of a file, that may run after the place where its ``frame`` is, that statement included."""

    def __init__(self, frame: FrameType, tree: ast.Module, function: Any) -> None:
        self.file, self.function = frame.f_code.co_filename, function
        self._locals, self._globals = frame.f_locals, frame.f_globals
        code = frame.f_code
        count = code.co_argcount + code.co_kwonlyargcount
        self.arguments = [self._locals.get(name) for name in code.co_varnames[:count]]
        self.in_loop = False
        self.statements: list[ast.stmt] = []
        self._collect(tree.body if function is None else function.body, frame.f_lineno)

    @classmethod
    def of(cls, frame: FrameType) -> _Rest | None:
        """What is left of the frame's code; ``None`` if it has no source."""
        tree = _tree(frame.f_code.co_filename)
        if tree is None:
            return None
        if frame.f_code.co_name == "<module>":
            return cls(frame, tree, None)
        function = _definition(frame.f_code)
        return None if function is None else cls(frame, tree, function)

    def _collect(self, block: list[ast.stmt], line: int) -> None:
        """Add what is left of a block in which ``line`` is being run."""
        for index, statement in enumerate(block):
            if not statement.lineno <= line <= (statement.end_lineno or statement.lineno):
                continue
            self.statements = [*block[index + 1 :], *self.statements]
            inner = _inner_block(statement, line)
            if isinstance(statement, ast.Try):
                self.statements = [*statement.orelse, *statement.finalbody, *self.statements]
            if isinstance(statement, _LOOPS) and (inner is not None or isinstance(statement, ast.While)):
                self.in_loop = True
            if inner is None or isinstance(statement, _LOOPS):  # all of a loop may run again
                self.statements = [statement, *self.statements]
                self.in_loop |= inner is None and _is_in_comprehension(statement, line)
            if inner is not None:
                self._collect(inner, line)
            return

    @functools.cached_property
    def _all_nodes(self) -> list[ast.AST]:
        """Those of the statements, but not of functions and classes that are defined there."""
        found: list[ast.AST] = []
        waiting = collections.deque[ast.AST](self.statements)
        while waiting:
            node = waiting.popleft()
            if not isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.Lambda)):
                found.append(node)
                waiting.extend(ast.iter_child_nodes(node))
        return found

    def nodes(self, kind: type[Node]) -> Iterator[Node]:
        """Those of a kind, the outer ones first."""
        return (node for node in self._all_nodes if isinstance(node, kind))

    # -- What expressions are worth now; none of the user's code runs to find out

    def is_bound(self, name: str) -> bool:
        """Whether the name has a value."""
        return any(name in names for names in (self._locals, self._globals, vars(builtins)))

    def value_of(self, node: ast.expr) -> Any:
        """The value of a name or an attribute now, and :data:`_UNKNOWN` of anything else."""
        if isinstance(node, ast.Name):
            for names in (self._locals, self._globals, vars(builtins)):
                if node.id in names:
                    return names[node.id]
        if isinstance(node, ast.Attribute):
            owner = self.value_of(node.value)
            if _is_module(owner) and node.attr in owner._modules:
                return owner._modules[node.attr]
            if issubclass(type(owner), type):
                found = inspect.getattr_static(owner, node.attr, _UNKNOWN)
                return types.MethodType(found.__func__, owner) if isinstance(found, classmethod) else found
            if owner is not _UNKNOWN:
                return inspect.getattr_static(owner, node.attr, _UNKNOWN)
        return _UNKNOWN

    def refers_to(self, node: ast.expr, module: nn.Module) -> bool:
        """Whether an expression gives ``module`` on, alone or in a container or another module, and not only what it computes."""
        if isinstance(node, ast.Starred):
            return self.refers_to(node.value, module)
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return any(self.refers_to(element, module) for element in node.elts)
        if isinstance(node, ast.Dict):
            return any(self.refers_to(value, module) for value in node.values)
        if isinstance(node, ast.Call):  # model.eval()
            method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            is_own = method != "forward" and callable(getattr(nn.Module, method, None))
            return is_own and isinstance(node.func, ast.Attribute) and self.refers_to(node.func.value, module)
        return _holds(self.value_of(node), module)

    def is_own_function(self, node: ast.expr) -> bool:
        """Whether the expression is a function of the user's own files."""
        value = self.value_of(node)
        return type(value) is types.FunctionType and is_own_file(value.__code__.co_filename)

    def definition_of(self, node: ast.expr) -> Any:
        """The definition of a function of the user's own files, which may be still to come; ``None`` of anything else."""
        later = [found for found in self.statements if isinstance(found, _FUNCTIONS)]
        if isinstance(node, ast.Name) and any(found.name == node.id for found in later):
            return next(found for found in later if found.name == node.id)
        return _definition(self.value_of(node).__code__) if self.is_own_function(node) else None

    def may_make_module(self, node: ast.expr) -> bool:
        """Whether an expression may make a module: a call of a class of modules, or of a function."""
        while (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and hasattr(nn.Module, node.func.attr)
        ):
            node = node.func.value  # Net().eval()
        if not isinstance(node, ast.Call):
            return False
        function = self.value_of(node.func)
        return _makes_module(function) or type(function) is types.FunctionType

    def called_in_loops(self) -> set[str]:
        """The names that loops call, also loops of the user's functions that get what a name stands for."""
        return set(_called(self.statements, self, in_loop=False, above=()))


def _called(body: Iterable[ast.AST], rest: _Rest, *, in_loop: bool, above: tuple[Any, ...]) -> Iterator[str]:
    """The names that loops in ``body`` call, those of its functions by the names that they are given as."""
    for node in body:
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.Lambda)):
            continue
        repeats = in_loop or isinstance(node, (*_LOOPS, *_COMPREHENSIONS))
        if isinstance(node, ast.Call):
            name = _root(node.func)
            if in_loop and name is not None:
                yield name
            function = rest.definition_of(node.func)
            if function is not None and function not in above:
                inside = _called(function.body, rest, in_loop=in_loop, above=(*above, function))
                yield from _as_the_caller_says(inside, function, node)
        yield from _called(ast.iter_child_nodes(node), rest, in_loop=repeats, above=above)


def _as_the_caller_says(called: Iterable[str], function: Any, call: ast.Call) -> Iterator[str]:
    """Names that a function has called: of its parameters, as the names that ``call`` gives; its local variables are left out."""
    parameters = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    given = dict(zip(parameters, call.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    stored = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for name in called:
        argument = given.get(name)
        if isinstance(argument, ast.Name):
            yield argument.id
        elif argument is None and name not in stored:
            yield name


def _root(node: ast.expr) -> str | None:
    """The name of what is called, or of which an attribute is: ``model`` of ``model.encode``."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


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


def _is_in_comprehension(statement: ast.stmt, line: int) -> bool:
    """Whether a comprehension of a statement has a call in ``line``; from Python 3.12 on, it has no frame of its own."""
    return any(
        isinstance(part, ast.Call) and part.lineno <= line <= (part.end_lineno or part.lineno)
        for node in ast.walk(statement)
        if isinstance(node, _COMPREHENSIONS)
        for part in ast.walk(node)
    )


def _definition(code: types.CodeType) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Where the function with this code is defined; ``None`` if it has no source."""
    tree = _tree(code.co_filename)
    for node in () if tree is None else ast.walk(tree):
        if not isinstance(node, _FUNCTIONS) or node.name != code.co_name:
            continue
        if code.co_firstlineno in (node.lineno, *(decorator.lineno for decorator in node.decorator_list)):
            return node
    return None


def _tree(file: str) -> ast.Module | None:
    """The syntax tree of a file; ``None`` if it cannot be read."""
    linecache.checkcache(file)
    return _parsed("".join(linecache.getlines(file)))


@functools.lru_cache(64)
def _parsed(text: str) -> ast.Module | None:
    try:
        with parsing:
            return ast.parse(text) if text else None
    except (SyntaxError, ValueError, SystemError, RecursionError):
        return None
