"""Loads a target from a file, a dotted name or torchvision: the model, its inputs, and an optional loss and metric."""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from lowprec_check.engine.model.inputs import (
    PASTE_INPUTS,
    as_call,
    call_form,
    call_with_number,
    is_function,
    parse_inputs,
)
from lowprec_check.engine.model.target import Target, check, class_line
from lowprec_check.engine.model.torchvision_zoo import load_torchvision
from lowprec_check.engine.model.user_module import (
    call_user_code,
    definition_line,
    display_name,
    import_file,
    import_name,
)
from lowprec_check.errors import UsageError, encodable

FACTORIES = ("make_model", "build_model", "create_model", "get_model")


def load_target(spec: str, inputs: tuple[str, ...] = ()) -> Target:
    """Load ``file.py``, ``file.py:attr``, ``package.module:attr`` or ``torchvision:name``.

    ``inputs`` are shapes (``1x3x224x224``, ``ids=1x128:int64``) that replace the inputs of the file. Raises
    :class:`UsageError` for everything the user can fix.
    """
    if spec.startswith("torchvision:"):
        target = load_torchvision(spec.partition(":")[2], inputs)
    else:
        with contextlib.redirect_stdout(sys.stderr), _without_our_arguments(spec):
            target = _load_from_module(spec, inputs)
    return check(target)


@contextlib.contextmanager
def _without_our_arguments(spec: str) -> Iterator[None]:
    """Hide the options of this tool from a file that parses ``sys.argv``."""
    kept, sys.argv = sys.argv, [spec.rpartition(":")[0] or spec]
    try:
        yield
    finally:
        sys.argv = kept


def _load_from_module(spec: str, inputs: tuple[str, ...]) -> Target:
    path, attribute = _split(spec)
    module = import_file(Path(path)) if path.endswith(".py") else import_name(path)
    found_name, found = _find_model(module, attribute)
    model, source = _make(module, found_name, found)
    given = parse_inputs(inputs) if inputs else _inputs_of(module)
    args, kwargs = as_call(given)
    title = f"{Path(path).stem if path.endswith('.py') else path}:{found_name}" if attribute else type(model).__name__
    return Target(
        encodable(title),
        model,
        args,
        kwargs,
        loss=_optional(module, "loss"),
        metric=_optional(module, "metric"),
        source=source or class_line(model),
        form=call_form(given),
        make_batch=_make_batch(module, inputs),
        setup=_setup(module, found_name, found, given_by_file=not inputs),
    )


def _split(spec: str) -> tuple[str, str | None]:
    path, colon, attribute = spec.rpartition(":")
    if not colon or attribute.endswith(".py") or "/" in attribute or "\\" in attribute:
        path, attribute = spec, ""
    if not path.endswith(".py"):
        if not attribute and (path.endswith(("/", "\\")) or Path(path).exists()):
            raise UsageError(
                f"{spec} is not a Python file.", "Pass a .py file, package.module:attr or torchvision:name."
            )
        if not attribute:
            raise UsageError(
                f"{spec!r} is neither a Python file nor an attribute of a module.",
                "Pass mymodel.py, mymodel.py:make_model, package.module:attr or torchvision:resnet50.",
            )
    return path, attribute or None


# -- finding


def _find_model(module: types.ModuleType, attribute: str | None) -> tuple[str, Any]:
    if attribute is not None:
        if not hasattr(module, attribute):
            names = ", ".join(_candidates(module))
            hint = f"Choose from: {names}." if names else "It defines nothing that makes a model."
            raise UsageError(f"{display_name(module)} has no attribute {attribute!r}.", hint)
        return attribute, getattr(module, attribute)
    if hasattr(module, "model"):
        return "model", module.model
    found = _candidates(module)
    if len(found) == 1:
        return found[0], getattr(module, found[0])
    name = display_name(module)
    if found:
        choices = "\n".join(f"    lowprec-check scan {name}:{choice}" for choice in found)
        raise UsageError(f"{name} defines several models.", f"Choose one:\n{choices}")
    raise UsageError(f"{name} defines no model.", "Define `model`: a torch.nn.Module, or a function that returns one.")


def _candidates(module: types.ModuleType) -> list[str]:
    """Names of modules at the top level; if none, of factory functions; if none, of classes that need no argument."""
    names = [name for name in vars(module) if not name.startswith("_")]
    instances = [name for name in names if isinstance(getattr(module, name), nn.Module)]
    factories = [name for name in names if name in FACTORIES and callable(getattr(module, name))]
    classes = [name for name in names if _is_zero_argument_module(getattr(module, name), module)]
    return instances or factories or classes


def _is_zero_argument_module(value: Any, module: types.ModuleType) -> bool:
    if not (isinstance(value, type) and issubclass(value, nn.Module)) or value.__module__ != module.__name__:
        return False
    try:
        inspect.signature(value).bind()
    except (TypeError, ValueError):
        return False
    return True


def _make(module: types.ModuleType, name: str, found: Any) -> tuple[Any, str | None]:
    source = definition_line(module, name)
    if isinstance(found, nn.Module) or not callable(found):
        return found, source
    made = call_user_code(name, found)
    if not isinstance(made, nn.Module):
        raise UsageError(
            f"{display_name(module)}:{name} returned an object of type {type(made).__name__}, not a torch.nn.Module.",
            f"Return the model from `{name}`.",
        )
    return made, source


def _setup(module: types.ModuleType, name: str, found: Any, *, given_by_file: bool) -> tuple[str, ...]:
    lines = []
    if not isinstance(found, nn.Module):
        lines.append(f"model = {name}()")
    elif name != "model":
        lines.append(f"model = {name}")
    if given_by_file and is_function(getattr(module, "inputs", None)):
        lines.append("inputs = inputs()")
    return tuple(lines)


def _inputs_of(module: types.ModuleType) -> Any:
    given = getattr(module, "inputs", None)
    if given is None:
        raise UsageError(f"{display_name(module)} defines no `inputs`.", PASTE_INPUTS)
    return call_user_code("inputs", given) if is_function(given) else given


def _make_batch(module: types.ModuleType, inputs: tuple[str, ...]) -> Callable[[int], Any] | None:
    if inputs:
        return lambda index: parse_inputs(inputs, seed=index)
    given: Any = getattr(module, "inputs", None)
    if not is_function(given):
        return None
    return lambda index: call_user_code("inputs", lambda: call_with_number(given, index))


def _optional(module: types.ModuleType, name: str) -> Any:
    value = getattr(module, name, None)
    if value is not None and not callable(value):
        raise UsageError(
            f"`{name}` in {display_name(module)} has type {type(value).__name__}, not a function.",
            f"Make `{name}` a function, or rename it.",
        )
    return value
