"""Loads a target from a file, a dotted name or a zoo: the model, its weights, its inputs, and an optional loss."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import pickle
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lowprec_check.engine.model.batch import BatchMaker, check_calibration
from lowprec_check.engine.model.huggingface_zoo import load_folder, load_transformers
from lowprec_check.engine.model.inputs import (
    PASTE_INPUTS,
    accepts,
    bind,
    inputs_code,
    is_function,
    parse_inputs,
)
from lowprec_check.engine.model.target import Target, check, forward_of, unchecked_target
from lowprec_check.engine.model.torchvision_ops import torchvision_works
from lowprec_check.engine.model.user_module import (
    ScriptCall,
    attribute_of,
    call_function,
    call_user_code,
    definition_line,
    display_name,
    file_start,
    first_call,
    import_file,
    import_name,
)
from lowprec_check.engine.model.zoo import load_timm, load_torchvision
from lowprec_check.errors import UsageError, encodable, first_line, message_of
from lowprec_check.schema.options import FORMS

# -- Loads a state dict from a file into a model: tensors only, no code in the file is run

_INSIDE = ("state_dict", "model_state_dict", "model", "module", "params")
"""Keys under which training scripts save a state dict beside other values."""

_SAVE = "Only weights are loaded. Save them with torch.save(model.state_dict(), FILE), or as .safetensors."

_PREFIXES = ("module.", "_orig_mod.", "model.")
"""Prefixes that ``DataParallel``, ``torch.compile`` and Lightning add to names."""


def load_weights(model: nn.Module, path: str) -> list[str]:
    """Load the state dict in ``path`` into ``model``, and return the code that does it.

    Raises :class:`UsageError` if the file cannot be read, or does not fit the model.
    """
    found, code = _read(path)
    key = None if _is_state(found) else next((key for key in _INSIDE if _is_state(found.get(key))), None)
    if key is not None:
        found, code = found[key], [*code[:-1], f"{code[-1]}[{json.dumps(key)}]"]
    if not _is_state(found):
        raise UsageError(
            f"{path} holds no state dict: names with tensors.", "Save one: torch.save(model.state_dict(), FILE)."
        )
    expected, load = model.state_dict(), "model.load_state_dict(state)"
    for prefix in _PREFIXES:
        if expected.keys().isdisjoint(found) and all(name.startswith(prefix) for name in found):
            found = {name.removeprefix(prefix): value for name, value in found.items()}
            load = f'model.load_state_dict({{name.removeprefix("{prefix}"): value for name, value in state.items()}})'
    _check_fit(path, expected, found)
    model.load_state_dict(found)
    return [*code, load]


def _read(path: str) -> tuple[dict[str, Any], list[str]]:
    """What the file holds, and the code that reads it."""
    if not Path(path).is_file():
        problem = f"{path} is a folder" if Path(path).is_dir() else f"No such file: {path}"
        raise UsageError(f"{problem}.", "Give --weights the path of a saved state dict.")
    name = json.dumps(path)
    try:
        if path.endswith(".safetensors"):
            load_file = _safetensors_loader()
            return load_file(path), ["from safetensors.torch import load_file", f"state = load_file({name})"]
        found = torch.load(path, map_location="cpu", weights_only=True)
        code = [f'state = torch.load({name}, map_location="cpu", weights_only=True)']
        return found if isinstance(found, dict) else {}, code
    except UsageError:
        raise
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", message_of(error))
        why = f"it holds an object of {named[1]}" if named else "torch.load does not accept it with weights_only=True"
        raise UsageError(f"{path} is not a file of weights: {why}.", _SAVE) from None
    except Exception as error:
        raise UsageError(f"Cannot read weights from {path}: {first_line(message_of(error))}", _SAVE) from None


def _safetensors_loader() -> Callable[[str], dict[str, Tensor]]:
    try:
        return importlib.import_module("safetensors.torch").load_file  # type: ignore[no-any-return]
    except ModuleNotFoundError:
        raise UsageError("safetensors is not installed.", "pip install safetensors") from None


def _is_state(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(item, Tensor) for item in value.values())


def _check_fit(path: str, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Raise :class:`UsageError` if names or shapes differ; a lazy parameter fits any shape."""
    missing = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in expected]
    other = [
        f"{name}: {tuple(found[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found and not is_lazy(tensor) and found[name].shape != tensor.shape
    ]
    problems = [
        f"{len(names)} of {total} {what} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
        for names, total, what in (
            (missing, len(expected), "names of the model are missing in the file"),
            (unknown, len(found), "names in the file are unknown to the model"),
            (other, len(expected), "tensors have another shape"),
        )
        if names
    ]
    if problems:
        raise UsageError(
            f"{path} does not fit the model: {'; '.join(problems)}.", "Make the model as it was when it was saved."
        )


# -- Loads a target from a file, a dotted name or a zoo: the model, its inputs, and an optional loss, metric and
# calibration

FACTORIES = ("make_model", "build_model", "create_model", "get_model")


ZOOS: dict[str, Callable[[str, tuple[str, ...]], Target]] = {
    "torchvision": load_torchvision,
    "timm": load_timm,
    "transformers": load_transformers,
    "hf": load_folder,
}
"""Loaders of models by name: ``torchvision:resnet50``."""


def load_target(spec: str, inputs: tuple[str, ...] = (), weights: str | None = None) -> Target:
    """Load ``file.py``, ``file.py:attr``, ``package.module:attr`` or a name in one of the :data:`ZOOS`.

    ``inputs`` are shapes (``1x3x224x224``, ``ids=1x128:int64``) that replace the inputs of the file; ``weights`` is a file
    with a state dict. Raises :class:`UsageError` for everything the user can fix.
    """
    zoo, _, name = spec.partition(":")
    if zoo in ZOOS and not name:
        raise UsageError(f"{spec!r} does not name a model.", f"Pass {FORMS}.")
    with contextlib.redirect_stdout(sys.stderr), _without_our_arguments(spec), torchvision_works():
        target = ZOOS[zoo](name, inputs) if zoo in ZOOS else _load_from_module(spec, inputs)
        if weights is not None:
            setup = (*target.setup, *load_weights(target.model, weights))
            target = target._replace(setup=setup, weights="loaded")
        return call_user_code(f"Reading {type(target.model).__name__}", lambda: check(target))


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
    try:
        found_name, found = _find_model(module, attribute)
        model, source = _make(module, found_name, found)
        given = _given_inputs(module, inputs)
        if given is None:
            raise _UndefinedError(f"{display_name(module)} defines no `inputs`.", PASTE_INPUTS)
    except _UndefinedError as error:
        is_script = path.endswith(".py") and attribute is None
        call = first_call(Path(path), module.__package__) if is_script else None
        if call is None:
            raise error from None
        return _target_of_call(call, module, inputs)
    title = f"{Path(path).stem if path.endswith('.py') else path}:{found_name}" if attribute else type(model).__name__
    imported = None if path.endswith(".py") else path
    made_at = file_start(module)
    return unchecked_target(
        model,
        given,
        name=encodable(title),
        **_functions(module),
        source=source if made_at else None,
        made_at=made_at,
        make_batch=_make_batch(module, inputs),
        setup=_setup(module, found_name, found, inputs, imported),
        calibrate=_calibration(module),
    )


class _UndefinedError(UsageError):
    """The module does not define a model and its inputs; a script may call one."""


def _target_of_call(call: ScriptCall, module: types.ModuleType, inputs: tuple[str, ...]) -> Target:
    """The target of the first call of a model in a script."""
    given = _given_inputs(module, inputs)
    if given is None:
        is_tensor = len(call.args) == 1 and isinstance(call.args[0], Tensor)
        given = call.kwargs if not call.args else call.args[0] if is_tensor else call.args
        if call.args and call.kwargs:
            given = bind(forward_of(call.model), call.args, call.kwargs)
    note = f"model and inputs are those of the first call of a model in the script, at {call.line}"
    return unchecked_target(
        call.model,
        given,
        **_functions(module),
        source=call.line,
        make_batch=_make_batch(module, inputs),
        setup=(f"# before {call.line}: `model` is the model that this line calls, `inputs` what it is called with",),
        notes=(note,),
        calibrate=_calibration(module),
    )


def _split(spec: str) -> tuple[str, str | None]:
    path, colon, attribute = spec.rpartition(":")
    if not colon or attribute.endswith(".py") or "/" in attribute or "\\" in attribute:
        path, attribute = spec, ""
    is_file = path.endswith(".py")
    if not is_file and not attribute and os.path.lexists(path):
        raise UsageError(f"{spec} is {_kind_of_path(path)}, not a Python file.", f"Pass {FORMS}.")
    if not is_file and not (attribute and all(part.isidentifier() for part in path.split("."))):
        raise UsageError(f"{spec!r} is neither a Python file nor an attribute of a module.", f"Pass {FORMS}.")
    return path, attribute or None


def _kind_of_path(path: str) -> str:
    if os.path.isdir(path):
        has_config = os.path.exists(os.path.join(path, "config.json"))
        return f"a folder (with hf:{path} its config.json is loaded)" if has_config else "a folder"
    if path.endswith(".ipynb"):
        return "a notebook (jupyter nbconvert --to script makes a Python file of it)"
    return "a file with another suffix" if os.path.isfile(path) else "no regular file"


# -- finding


_MISSING = object()


def _find_model(module: types.ModuleType, attribute: str | None) -> tuple[str, Any]:
    if attribute is not None:
        found = attribute_of(module, attribute, _MISSING)
        if found is _MISSING:
            names = ", ".join(_candidates(module))
            hint = f"Choose from: {names}." if names else "It defines nothing that makes a model."
            raise UsageError(f"{display_name(module)} has no attribute {attribute!r}.", hint)
        return attribute, found
    model = attribute_of(module, "model", _MISSING)
    if model is not _MISSING:
        return "model", model
    candidates = _candidates(module)
    if len(candidates) == 1:
        return candidates[0], vars(module)[candidates[0]]
    name = display_name(module)
    if candidates:
        choices = "\n".join(f"    lowprec-check scan {name}:{choice}" for choice in candidates)
        raise _UndefinedError(f"{name} defines several models.", f"Choose one:\n{choices}")
    raise _UndefinedError(
        f"{name} defines no model.", "Define `model`: a torch.nn.Module, or a function that returns one."
    )


def _candidates(module: types.ModuleType) -> list[str]:
    """Names of modules at the top level; if none, of factory functions; if none, of classes that need no argument."""
    names = [name for name in vars(module) if not name.startswith("_")]
    instances = [name for name in names if isinstance(vars(module)[name], nn.Module)]
    factories = [name for name in names if name in FACTORIES and callable(vars(module)[name])]
    classes = [name for name in names if _is_zero_argument_module(vars(module)[name], module)]
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
    made = call_function(name, found)
    if not isinstance(made, nn.Module):
        raise UsageError(
            f"{display_name(module)}:{name} returned an object of type {type(made).__name__}, not a torch.nn.Module.",
            f"Return the model from `{name}`.",
        )
    return made, source


def _setup(
    module: types.ModuleType, name: str, found: Any, inputs: tuple[str, ...], imported: str | None
) -> tuple[str, ...]:
    """Code that makes ``model`` and ``inputs`` from what the module, which may be ``imported`` by that name, defines."""
    lines = []
    if imported is not None:
        own_inputs = [] if inputs else ["inputs"]
        own_calibration = [] if attribute_of(module, "calibration") is None else ["calibration"]
        lines.append(f"from {imported} import {', '.join([name, *own_inputs, *own_calibration])}")
    if not isinstance(found, nn.Module) and callable(found):
        lines.append(f"model = {name}()")
    elif name != "model":
        lines.append(f"model = {name}")
    if inputs:
        lines.append(f"inputs = {inputs_code(parse_inputs(inputs))}")
    elif is_function(given := attribute_of(module, "inputs")):
        lines.append("inputs = inputs()" if accepts(given) else "inputs = inputs(0)")
    return tuple(lines)


def _given_inputs(module: types.ModuleType, inputs: tuple[str, ...]) -> Any:
    """The inputs asked for, or those that the module defines; ``None`` if there are none."""
    make_batch = _make_batch(module, inputs)
    return attribute_of(module, "inputs") if make_batch is None else make_batch(0)


def _make_batch(module: types.ModuleType, inputs: tuple[str, ...]) -> Callable[[int], Any] | None:
    if inputs:
        return lambda index: parse_inputs(inputs, seed=index)
    maker = BatchMaker.of(attribute_of(module, "inputs"))
    return maker and (lambda index: call_function("inputs", lambda: maker(index)))


def _functions(module: types.ModuleType) -> dict[str, Any]:
    """The functions that a file may define besides its model and inputs; ``None`` for the others.

    A training script has an optimizer: one like it is used. If it trains at import, it also has the loss of its last step, which
    is no function.
    """
    is_value = isinstance(attribute_of(module, "loss"), Tensor)
    found = {name: None if name == "loss" and is_value else _optional(module, name) for name in ("loss", "metric")}
    for name, kind in (("optimizer", Optimizer), ("average", ())):
        value = attribute_of(module, name)
        found[name] = value if is_function(value) or isinstance(value, kind) else None
    return found


def _optional(module: types.ModuleType, name: str) -> Any:
    value = attribute_of(module, name)
    if value is not None and not callable(value):
        raise UsageError(
            f"`{name}` in {display_name(module)} has type {type(value).__name__}, not a function.",
            f"Make `{name}` a function, or rename it.",
        )
    return value


def _calibration(module: types.ModuleType) -> Any:
    name = f"`calibration` in {display_name(module)}"
    return check_calibration(attribute_of(module, "calibration"), name)
