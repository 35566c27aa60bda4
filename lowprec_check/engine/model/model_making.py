"""Whether a call is part of making a model, by the code that the functions on the stack still run.

Only where that code shows that the model is not complete does the script run on; any doubt makes a
call the first one, after which nothing runs.
"""

from __future__ import annotations

import ast
import traceback
from collections.abc import Iterable
from types import FrameType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from lowprec_check.engine.model.rest_of_code import UNKNOWN, RestOfCode, is_module, repeats_in_comprehension, root_of
from lowprec_check.engine.model.user_code import bound_names, statements_of
from lowprec_check.torchkit.source_location import PACKAGE, is_user_code

_ADDS_A_PART = ("add_module", "register_module", "append", "insert", "extend")
"""Methods of modules that take another one in."""
_SHAPES = ("shape", "size", "numel", "dim", "ndim", "dtype", "device")
"""What a dry run is made for."""


class Making(NamedTuple):
    """Why a call is part of making a model."""

    why: str
    """``initializes lazy layers``: it follows "the call at train.py:12"."""
    is_model: bool
    """Whether it may be the whole model: this call is taken if the script makes no other one."""


def made_by_constructor(frame: FrameType) -> bool:
    """Whether the constructor of a module is on the stack, which may try a part for its shape."""
    for at, _ in traceback.walk_stack(frame):
        code = at.f_code
        is_constructor = code.co_name == "__init__" and code.co_argcount > 0
        if is_constructor and is_module(at.f_locals.get(code.co_varnames[0])):
            return True
    return False


def part_of_making(module: nn.Module, frame: FrameType) -> Making | None:
    """Why the call of ``module`` by ``frame`` is part of making a model; else ``None``."""
    if any(map(is_lazy, module.parameters())):
        return Making("initializes lazy layers", is_model=True)
    # A loop that calls the same module again and again uses a model; nothing around it makes one
    is_repeated, is_innermost = False, True
    for at, _ in traceback.walk_stack(frame):
        if at.f_code.co_filename.startswith(PACKAGE):
            break
        rest = None
        if is_user_code(at.f_code.co_filename):
            rest = RestOfCode.of(at)
        is_repeated |= repeats_in_comprehension(at, module)
        if rest is None:
            continue
        is_repeated |= rest.repeats(module) and not _reads_shape(module, rest)
        making = _incomplete(module, rest)
        if making is None and not is_repeated:
            making = _part_later(module, rest) or _loop_calls_another(module, rest)
        if making is None and not is_repeated and is_innermost:
            making = _tried_by_its_maker(module, rest, at.f_back)
        if making is not None:
            return making
        is_innermost = False
    return None


def still_defines(frame: FrameType, model: str, parts: Iterable[str]) -> bool:
    """Whether the file that ``frame`` runs still changes its ``model`` or defines ``parts``."""
    rest = RestOfCode.of(frame)
    if rest is None:
        return False
    missing = set(parts) - frame.f_globals.keys()
    return any(
        not missing.isdisjoint(bound_names(statement)) or _configures(statement, model)
        for statement in statements_of(rest.after, loops=False)
    )


_CONFIGURE = (
    *("apply", "load", "init", "reset", "requires_grad", "freeze", "unfreeze", "set_", "enable", "disable", "fuse"),
    *("merge", "tie_", "add_", "remove_", "register_"),
)
"""How names of methods start, besides ``eval`` and ``train``, that change a model for good."""


def _configures(statement: ast.stmt, model: str) -> bool:
    """Whether a statement changes that model: ``model = model.eval()``, ``model.head = …``."""
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    if any(isinstance(target, (ast.Attribute, ast.Subscript)) and root_of(target) == model for target in targets):
        return True
    value = getattr(statement, "value", None)
    # Otherwise a call of a method, whose result is dropped or is the model again
    is_bare = isinstance(statement, ast.Expr)
    is_rebound = any(isinstance(target, ast.Name) and target.id == model for target in targets)
    if not (is_bare or is_rebound) or not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    method = value.func.attr
    if method.endswith("_"):  # nn.init.zeros_(model.head.weight)
        return model in (root_of(value.func), *map(root_of, value.args))
    return root_of(value.func) == model and (method in ("eval", "train") or method.startswith(_CONFIGURE))


# -- What the code that is left says


def _incomplete(module: nn.Module, rest: RestOfCode) -> Making | None:
    """Whether it gets more parts later, or is already a part of a model that is called later."""
    for call in rest.nodes(ast.Call):
        if not isinstance(call.func, ast.Attribute) or call.func.attr not in _ADDS_A_PART or not call.args:
            continue
        if rest.value_of(call.func.value) is module:
            return Making("is of a model that gets more parts", is_model=True)
    # Or it is inside a module that the code goes on to call
    for name in rest.called():
        whole = rest.value_of(ast.Name(name))
        if is_module(whole) and whole is not module and rest.holds(whole, module):
            return Making(f"is of a part of {type(whole).__name__}", is_model=False)
    return None


def _part_later(module: nn.Module, rest: RestOfCode) -> Making | None:
    """Whether ``module`` becomes a part of another one, which the code goes on to use."""
    for call in rest.nodes(ast.Call):
        if not any(rest.refers_to(argument, module) for argument in _arguments_of(call)):
            continue
        # A method of another module takes it in
        function = rest.value_of(call.func)
        if isinstance(call.func, ast.Attribute) and call.func.attr in _ADDS_A_PART:
            owner = rest.value_of(call.func.value)
            if is_module(owner) and owner is not module:
                return Making(f"is of a part of {type(owner).__name__}", is_model=False)
        # A class, or a function of the user's, makes another model of it
        is_class = _is_class_of_models(_class_of(function))
        if (is_class or rest.definition_of(call.func) is not None) and _is_used(call, rest, is_class=is_class):
            whole = f"what {ast.unparse(call.func)}() makes"
            if is_class:
                whole = _class_of(function).__name__
            return Making(f"is of a part of {whole}", is_model=False)
    # It is assigned to an attribute of another module
    for assignment in rest.nodes(ast.Assign):
        for target in assignment.targets:
            if isinstance(target, ast.Attribute) and rest.refers_to(assignment.value, module):
                owner = rest.value_of(target.value)
                if is_module(owner) and owner is not module:
                    return Making(f"is of a part of {type(owner).__name__}", is_model=False)
    return None


def _is_used(made: ast.Call, rest: RestOfCode, *, is_class: bool) -> bool:
    """Whether the code calls, returns or hands on the model that a call makes."""
    statement = rest.statement_of[made]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    if names & rest.called():
        return True
    if not is_class:
        return False
    if isinstance(statement, ast.Return) or any(isinstance(target, ast.Attribute) for target in targets):
        return True
    for call in rest.nodes(ast.Call):
        if not any(_is_of(argument, made, names) for argument in _arguments_of(call)):
            continue
        # Functions and classes of torch that get it export or trace it
        owner = _class_of(rest.value_of(call.func))
        is_named = issubclass(type(owner), (type, FunctionType))
        if not is_named or str(owner.__module__).partition(".")[0] != "torch":
            return True
    return any(_is_of(value, made, names) for value in _returned(rest.nodes(ast.Return)))


def _arguments_of(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _returned(statements: Iterable[ast.Return]) -> list[ast.expr]:
    return [statement.value for statement in statements if statement.value is not None]


def _is_of(expression: ast.expr, made: ast.Call, names: set[str]) -> bool:
    """Whether an expression is the call, a name that it was assigned to, or a method of these."""
    while isinstance(expression, ast.Call) and expression is not made and isinstance(expression.func, ast.Attribute):
        expression = expression.func.value
    return expression is made or (isinstance(expression, ast.Name) and expression.id in names)


def _tried_by_its_maker(module: nn.Module, rest: RestOfCode, caller: FrameType | None) -> Making | None:
    """Whether a function makes the module, tries it, and returns it to its ``caller``."""
    is_given = any(rest.holds(value, module) or rest.holds_in_attributes(value, module) for value in rest.arguments)
    if rest.function is None or is_given or not (_is_dropped(rest) or _reads_shape(module, rest)):
        return None
    around = None
    if caller is not None:
        around = RestOfCode.of(caller)
    if around is not None and _is_dropped(around):
        return None  # what it returns is dropped: it is a main program
    if any(rest.refers_to(value, module) for value in _returned(rest.nodes(ast.Return))):
        return Making(f"is made by {rest.function.name}(), which returns the model", is_model=True)
    return None


def _is_dropped(rest: RestOfCode) -> bool:
    """Whether the running statement is a call whose result is dropped."""
    return isinstance(rest.current, ast.Expr) and isinstance(rest.current.value, ast.Call)


def _reads_shape(module: nn.Module, rest: RestOfCode) -> bool:
    """Whether the statement reads the shape of an output of ``module``: ``encoder(x).shape[1]``."""
    for node in ast.walk(rest.current or ast.Pass()):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Call):
            continue
        if node.attr in _SHAPES and rest.value_of(node.value.func) is module:
            return True
    return False


def _loop_calls_another(module: nn.Module, rest: RestOfCode) -> Making | None:
    """Whether loops of the user's code call a model that is still to be made, and not this one."""
    called = set()
    if rest.is_own:
        called = rest.called(in_loops=True)
    if any(rest.holds(rest.value_of(ast.Name(name)), module) for name in called):
        return None
    for assignment in rest.nodes(ast.Assign):
        for target in assignment.targets:
            is_called = isinstance(target, ast.Name) and target.id in called
            if is_called and rest.value_of(target) is UNKNOWN and _makes_model(assignment.value, rest):
                return Making(f"comes before `{ast.unparse(target)}`, which a loop calls, is made", is_model=True)
    return None


def _makes_model(made: ast.expr, rest: RestOfCode) -> bool:
    """Whether an expression calls a class of models, or a function that returns a model."""
    while isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute) and hasattr(nn.Module, made.func.attr):
        made = made.func.value  # Net().eval()
    if not isinstance(made, ast.Call):
        return False
    function = rest.value_of(made.func)
    annotation = None
    if type(function) is FunctionType:
        annotation = function.__annotations__.get("return")
    if isinstance(annotation, str):
        annotation = function.__globals__.get(annotation)
    if _is_class_of_models(_class_of(function)) or _is_class_of_models(annotation):
        return True
    # By its code: what it returns, or assigns to names that it returns
    definition = rest.definition_of(made.func)
    if definition is None:
        return False
    returned = _returned(node for node in ast.walk(definition) if isinstance(node, ast.Return))
    names = {value.id for value in returned if isinstance(value, ast.Name)}
    assignments = [node for node in ast.walk(definition) if isinstance(node, ast.Assign)]
    for node in assignments:
        if any(isinstance(part, ast.Name) and part.id in names for part in node.targets):
            returned.append(node.value)
    return any(
        isinstance(part, ast.Call) and _is_class_of_models(_class_of(rest.value_of(part.func)))
        for value in returned
        for part in ast.walk(value)
    )


_NO_MODELS = ("torch.nn.modules.loss", "torch.nn.parallel", "torch.optim", "torch.distributed")
"""Where torch has modules that get a model and are no larger model: losses, wrappers, averages."""


def _is_class_of_models(kind: Any) -> bool:
    is_class = issubclass(type(kind), type) and issubclass(kind, nn.Module)
    return is_class and not str(kind.__module__).startswith(_NO_MODELS)


def _class_of(function: Any) -> Any:
    """The class that is called itself, or by one of its class methods."""
    return function.__self__ if type(function) is MethodType else function
