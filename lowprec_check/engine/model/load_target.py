"""Loads a target from a file, a dotted name or a zoo: model, weights, inputs, an optional loss."""

from __future__ import annotations

import contextlib
import functools
import inspect
import keyword
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from lowprec_check.engine.model.inputs import (
    PASTE_INPUTS,
    BatchMaker,
    as_call,
    as_inputs,
    call_code,
    inputs_code,
    is_function,
    parse_inputs,
)
from lowprec_check.engine.model.observed_training import DEFINE_PARTS, ObservedBatch, ObservedTraining, ScriptStep
from lowprec_check.engine.model.output_measures import OWN, check_judge, parse_limits
from lowprec_check.engine.model.streamed_weights import unread_weights
from lowprec_check.engine.model.target import (
    NOT_TRAINED,
    Target,
    check,
    check_calibration,
    forward_of,
    is_plain_function,
    unchecked_target,
)
from lowprec_check.engine.model.torchvision_ops import torchvision_works
from lowprec_check.engine.model.user_code import (
    attribute_of,
    call_function,
    call_user_code,
    definition_line,
    display_name,
    file_start,
    required_arguments,
)
from lowprec_check.engine.model.user_module import UserModule, import_file, import_name, run_script
from lowprec_check.engine.model.user_script import Definitions, ModelCall
from lowprec_check.engine.model.weights import load_weights, stream_file
from lowprec_check.engine.model.without_extension import without_extension
from lowprec_check.engine.model.zoo import load_folder, load_timm, load_torchvision, load_transformers, with_labels
from lowprec_check.errors import UsageError, encodable
from lowprec_check.schema.options import FORMS
from lowprec_check.schema.scanned_model import STREAMED
from lowprec_check.torchkit.autocast_rules import noting_autocasts

FACTORIES = ("make_model", "build_model", "create_model", "get_model")

ZOOS: dict[str, Callable[[str, tuple[str, ...]], Target]] = {
    "torchvision": load_torchvision,
    "timm": load_timm,
    "transformers": load_transformers,
    "hf": load_folder,
}
"""Loaders of models by name: ``torchvision:resnet50``."""


def load_target(
    spec: str,
    inputs: tuple[str, ...] = (),
    weights: str | None = None,
    arguments: tuple[str, ...] = (),
    steps: int = 0,
    *,
    stream: bool = False,
) -> Target:
    """Load ``file.py``, ``file.py:attr``, ``package.module:attr`` or a name in :data:`ZOOS`.

    ``inputs`` are shapes (``1x3x224x224``, ``ids=1x128:int64``) that replace the inputs of the
    file; ``weights`` is a file with a state dict; ``arguments`` are those of a script, of whose
    training ``steps`` steps are observed; with ``stream``, weights stay in their files.
    """
    zoo, _, name = spec.partition(":")
    if zoo in ZOOS and not name:
        raise UsageError(f"{spec!r} does not name a model.", f"Pass {FORMS}.")
    if weights is None:
        can_stream = zoo == "hf"
    else:
        can_stream = zoo not in ZOOS and weights.endswith(".safetensors")
    if stream and not can_stream:
        hint = "Pass hf:FOLDER, or a file that makes the model and --weights FILE.safetensors."
        raise UsageError(f"--stream reads weights from files of safetensors, and {spec} has none.", hint)
    # What the user's code prints must not mix with the report on stdout
    argv, sys.argv = sys.argv, [spec.rpartition(":")[0] or spec, *arguments]
    try:
        # Decorators make autocast when the file is imported.
        redirected = contextlib.redirect_stdout(sys.stderr)
        with redirected, torchvision_works(), noting_autocasts(), without_extension() as left_out:
            if zoo == "hf":
                target = load_folder(name, inputs, stream=stream)
            else:
                with unread_weights() if stream else contextlib.nullcontext():
                    if zoo in ZOOS:
                        target = ZOOS[zoo](name, inputs)
                    else:
                        target = _load_from_module(spec, inputs, steps)
            if steps and zoo in ("transformers", "hf"):
                target = with_labels(target)
            if weights is not None:
                load = stream_file if stream else load_weights
                setup = (*target.setup, *load(target.model, weights))
                notes = (*target.notes, *([STREAMED] if stream else []))
                target = target._replace(setup=setup, weights="loaded", notes=notes)
            target = target._replace(notes=(*target.notes, *left_out.notes))
            return call_user_code(f"Reading {type(target.model).__name__}", lambda: check(target))
    finally:
        sys.argv = argv


# -- The target that a module defines


class _UndefinedError(UsageError):
    """The module does not define a model and its inputs; a script may call one."""


def _load_from_module(spec: str, inputs: tuple[str, ...], steps: int) -> Target:
    path, attribute = _split(spec)
    is_file = path.endswith(".py")
    is_script = is_file and attribute is None
    names = Definitions(attribute or "model", _PARTS)
    if is_file:
        imported = import_file(Path(path), names, steps if is_script else 0)
    else:
        imported = import_name(path, names)
    module, (call, notes, _, was_left) = imported
    # What only the script does below its main guard needs another run, as the main program; not if
    # the file defines a loss or an optimizer
    script = None
    may_train = steps and is_script and call is None
    has_parts = may_train and any(attribute_of(module, name) is not None for name in ("loss", "criterion", "optimizer"))
    if may_train and not has_parts and _MAIN_GUARD.search(Path(path).read_text("utf-8", "replace")):
        script = run_script(Path(path), module.__package__, steps)
    for run in (imported, script):
        if run is not None and run.ran.training is not None:
            return _target_of_training(run.ran.training, run, inputs)
    other_inputs = ", --inputs" if inputs else ""
    try:
        model_inputs = _given_inputs(module, inputs)
        if call is not None and attribute is None and (model_inputs is None or "model" not in vars(module)):
            return _target_of_call(call, imported, inputs, steps)
        name, definition = _find_model(module, attribute)
        model, model_inputs, code = _made(module, name, definition, model_inputs)
        if model_inputs is None and call is not None and call.model is model:
            model_inputs = as_inputs(forward_of(call.model), call.args, call.kwargs)
            other_inputs = f", called at {call.line}"
        if model_inputs is None:
            raise _UndefinedError(f"{display_name(module)} defines no `inputs`.", PASTE_INPUTS)
    except _UndefinedError as error:
        # The script may call a model that it does not define at its top level
        if is_script and script is None:
            script = run_script(Path(path), module.__package__, steps)
        if script is None or not script.ran.uses_model:
            raise error from None
        return _target_of_call(script.ran.call, script, inputs, steps)
    made_at = file_start(module)
    place = _place_of_code(module, name, None if is_file else path, was_left=was_left)
    title = None
    if attribute:
        title = f"{Path(path).stem if is_file else path}:{name}"
    return unchecked_target(
        model,
        model_inputs,
        name=title and encodable(title),
        source=definition_line(module, name) if made_at else None,
        made_at=made_at,
        taken=f"{name} of {os.path.basename(display_name(module))}{other_inputs}",
        setup=_setup(module, name, code, inputs, place, steps),
        namespace=vars(module) if place.is_inside else None,
        folder=place.folder,
        notes=(*notes, *_stopped(None if steps else call, module)),
        **_other_parts(module, inputs),
    )


class _Made(NamedTuple):
    """A model, its inputs if there are any, and code that makes what the file only defines."""

    model: Any
    inputs: Any
    code: str


def _made(module: types.ModuleType, name: str, definition: Any, inputs: Any) -> _Made:
    """What ``definition`` is, or returns, perhaps with inputs if there are no ``inputs`` yet."""
    if isinstance(definition, nn.Module) or not callable(definition) or is_plain_function(definition):
        return _Made(definition, inputs, "" if name == "model" else f"model = {name}")
    model, names = call_function(name, definition), "model"
    if isinstance(model, tuple) and len(model) == 2:
        model, returned = model
        names = "model, _"
        if inputs is None:
            inputs, names = returned, _BOTH
    if not isinstance(model, nn.Module):
        problem = f"returned an object of type {type(model).__name__}, not a torch.nn.Module"
        raise UsageError(f"{display_name(module)}:{name} {problem}.", f"Return the model from `{name}`.")
    return _Made(model, inputs, f"{names} = {name}()")


_BOTH = "model, inputs"
"""What a function returns with which the file needs no inputs of its own."""

_MAIN_GUARD = re.compile(r"^if __name__ ==", re.MULTILINE)


def _target_of_training(training: ObservedTraining, script: UserModule, inputs: tuple[str, ...]) -> Target:
    """The target of the training step of a script."""
    if inputs:
        problem = f"{display_name(script.module)} is trained on its own batches, which --inputs cannot replace."
        raise UsageError(problem, DEFINE_PARTS)
    forward = forward_of(training.model)
    # Each batch in the form of inputs that a user gives, and from that in the form of a call
    calls = [as_inputs(forward, *batch[:2]) for batch in training.batches]
    pairs = zip(calls, training.batches, strict=True)
    batches = [ObservedBatch(*as_call(call, forward)[:2], batch.targets) for call, batch in pairs]
    # What the names of code to paste mean in this script
    if len(training.optimizers) > 1:
        made = ", ".join(training.optimizers)
        names = (
            f"`model(...)` stands for all that it computes up to its next loss, `optimizers` for those made at {made}"
        )
    elif isinstance(training.model, ScriptStep):
        which = "next loss" if len(training.model.start(training.batches[0].args)) > 1 else "loss"
        names = f"`model(...)` stands for all that it computes up to its {which}, `optimizer` for its optimizer"
    else:
        names = "`model` is the model that it calls, `inputs` what it is called with, `optimizer` its optimizer"
    target = unchecked_target(
        training.model,
        calls[0],
        source=training.line,
        taken=f"the training step that the script makes at {training.line}",
        setup=tuple(filter(None, [f"# in the step at {training.line}: {names}", training.optimizer_code])),
        notes=(*training.notes, *script.ran.notes),
        loss=training.loss,
        optimizer=training.optimizer,
        observed=training._replace(batches=batches),
    )
    return target._replace(targets=training.batches[0].targets)


def _target_of_call(call: ModelCall | None, script: UserModule, inputs: tuple[str, ...], steps: int) -> Target:
    """The target of the first call in a script, or of its ``steps`` of training if it makes any."""
    if script.ran.training is not None:
        return _target_of_training(script.ran.training, script, inputs)
    assert call is not None
    module, notes = script.module, script.ran.notes
    new_inputs, parts = _given_inputs(module, inputs), _other_parts(module, inputs)
    if not steps and parts["loss"] is not None and required_arguments(parts["loss"]) > 1:
        parts["loss"] = None  # a call of the model has no targets
    return unchecked_target(
        call.model,
        as_inputs(forward_of(call.model), call.args, call.kwargs) if new_inputs is None else new_inputs,
        source=call.line,
        taken="; ".join([f"called at {call.line}, the first call of a model in the script", *call.passed_over]),
        setup=_setup_of_call(call, module, new_inputs is not None),
        names=_names_of_call(call, new_inputs is not None),
        namespace=call.namespace,
        notes=(*notes, *([NOT_TRAINED] if steps else [])),
        **parts,
    )


def _setup_of_call(call: ModelCall, module: types.ModuleType, other_inputs: bool) -> tuple[str, ...]:
    """Where code belongs that runs the model of a script, in its own names if it has such."""
    file, _, number = (call.line or "the script").rpartition(":")
    if not call.names or other_inputs:
        return (f"# in {file}, line {number}: `model` is the model that it calls, `inputs` what it is called with",)
    model, inputs = call.names["model"], call.names["inputs"]
    made_at = definition_line(module, model)
    made = f", made in line {made_at.rpartition(':')[2]}," if made_at else ""
    setup = [f"# in {file}, line {number}, where `{model}`{made} is called:"]
    if not inputs.isidentifier():
        setup.append(f"inputs = {inputs}")
    return tuple(setup)


def _names_of_call(call: ModelCall, other_inputs: bool) -> dict[str, str]:
    """The names of the model and the inputs in a script; without other inputs than its own."""
    if other_inputs:
        return {}
    return {name: code for name, code in call.names.items() if name == "model" or code.isidentifier()}


_PARTS = ("loss", "criterion", "optimizer", "average", "metric", "judge", "calibration")
"""What a file may define besides its model and inputs."""


def _stopped(call: ModelCall | None, module: types.ModuleType) -> Iterator[str]:
    """A note on a file that calls a model when imported, and on what it defines after that."""
    if call is None:
        return
    later = [name for name in _PARTS if name not in vars(module) and definition_line(module, name, loops=False)]
    passed_over = ""
    if later:
        passed_over = f": {', '.join(later)} below is not used"
    yield f"the file was run up to its first call of a model, at {call.line}{passed_over}"


def _split(spec: str) -> tuple[str, str | None]:
    """The path or the dotted name of a module, and the attribute, if one is named."""
    path, colon, attribute = spec.rpartition(":")
    if not colon or attribute.endswith(".py") or "/" in attribute or "\\" in attribute:
        path, attribute = spec, ""
    if path.endswith(".py"):
        return path, attribute or None
    if not attribute and os.path.lexists(path):
        # A path that exists, and that was probably given by mistake
        if os.path.exists(os.path.join(path, "config.json")):
            kind = f"a folder (with hf:{path} its config.json is loaded)"
        elif os.path.isdir(path):
            kind = "a folder"
        elif path.endswith(".ipynb"):
            kind = "a notebook (jupyter nbconvert --to script makes a Python file of it)"
        else:
            kind = "a file with another suffix" if os.path.isfile(path) else "no regular file"
        raise UsageError(f"{spec} is {kind}, not a Python file.", f"Pass {FORMS}.")
    if not (attribute and all(part.isidentifier() for part in path.split("."))):
        raise UsageError(f"{spec!r} is neither a Python file nor an attribute of a module.", f"Pass {FORMS}.")
    return path, attribute


_MISSING = object()


def _find_model(module: types.ModuleType, attribute: str | None) -> tuple[str, Any]:
    """What is or makes a model, with its name: ``attribute``, ``model``, or the only candidate."""
    value = attribute_of(module, attribute or "model", _MISSING)
    if value is not _MISSING:
        return attribute or "model", value
    name = display_name(module)
    public = {key: value for key, value in vars(module).items() if not key.startswith("_")}

    def needs_no_argument(kind: Any) -> bool:
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)) or kind.__module__ != module.__name__:
            return False
        try:
            inspect.signature(kind).bind()
        except (TypeError, ValueError):
            return False
        return True

    instances = [key for key, value in public.items() if isinstance(value, nn.Module)]
    factories = [key for key, value in public.items() if key in FACTORIES and callable(value)]
    classes = [key for key, value in public.items() if needs_no_argument(value)]
    if attribute is not None:
        candidates = list(dict.fromkeys([*instances, *factories, *classes]))
        hint = "It defines nothing that makes a model."
        if candidates:
            hint = f"Choose from: {', '.join(candidates)}."
        raise UsageError(f"{name} has no attribute {attribute!r}.", hint)
    # A model at the top level is meant rather than what could make another one
    candidates = instances or factories or classes
    if len(candidates) == 1:
        return candidates[0], public[candidates[0]]
    if candidates:
        choices = "\n".join(f"    lowprec-check scan {name}:{choice}" for choice in candidates)
        raise _UndefinedError(f"{name} defines several models.", f"Choose one:\n{choices}")
    problem = f"{name} defines no model."
    raise _UndefinedError(problem, "Define `model`: a torch.nn.Module, or a function that returns one.")


class _Place(NamedTuple):
    """Where printed code belongs: in a file that imports the user's module, or inside that."""

    imported: str
    """The name to import; empty inside the file."""
    said: str
    """As a comment."""
    folder: str | None = None
    """Where it is imported."""

    @property
    def is_inside(self) -> bool:
        """Whether the code belongs into the user's file."""
        return not self.imported


def _place_of_code(module: types.ModuleType, name: str, dotted: str | None, *, was_left: bool) -> _Place:
    """Where code belongs that uses what ``module`` defines; an import runs what ``was_left``."""
    if dotted is not None:
        return _Place(dotted, "", os.getcwd())
    words = module.__name__.split(".")
    is_name = all(word.isidentifier() and not keyword.iskeyword(word) for word in words)
    file = display_name(module)
    if was_left or not is_name or words[0].startswith("_lowprec_target_"):
        # An import would run the rest of the file, or cannot name it.
        lines = filter(None, (definition_line(module, defined) for defined in (name, "inputs")))
        numbers = [int(line.rpartition(":")[2]) for line in lines]
        if was_left and numbers:
            return _Place("", f"# in {file}, after line {max(numbers)}:")
        return _Place("", f"# in {file}, at its end:")
    folder = Path(module.__file__ or "").resolve()
    for _ in words:  # the user's file, which has run, may have replaced `len`
        folder = folder.parent
    if folder == Path.cwd():
        return _Place(module.__name__, "", str(folder))
    return _Place(module.__name__, f"  # in the folder {os.path.relpath(folder)}", str(folder))


def _setup(
    module: types.ModuleType, name: str, made: str, inputs: tuple[str, ...], place: _Place, steps: int
) -> tuple[str, ...]:
    """Code that makes ``model``, by the line ``made``, and ``inputs``, at its ``place``."""
    lines = [place.said] if place.is_inside else []
    uses_inputs = not inputs and not made.startswith(_BOTH)
    uses_criterion = _criterion(module) is not None and not callable(attribute_of(module, "loss"))
    if not place.is_inside:
        names = [name]
        if uses_inputs:
            names.append("inputs")
        parts = ["calibration"]
        if steps:
            parts += ["criterion" if uses_criterion else "loss", "optimizer", "average"]
        names += [part for part in parts if attribute_of(module, part) is not None]
        lines.append(f"from {place.imported} import {', '.join(names)}{place.said}")
    if made:
        lines.append(made)
    if inputs:
        lines.append(f"inputs = {inputs_code(parse_inputs(inputs))}")
    elif uses_inputs:
        lines += call_code(attribute_of(module, "inputs"))
    if uses_criterion and (steps or place.is_inside):
        lines.append("loss = criterion")
    return tuple(lines)


def _judged_by(module: types.ModuleType) -> dict[str, Any]:
    """The file's `judge`, a name or a function of two outputs, and its `limits`."""
    judge, limits = attribute_of(module, "judge"), attribute_of(module, "limits")
    if is_plain_function(judge):
        # A function of other arguments is something else's
        required = [each for each in inspect.signature(judge).parameters.values() if each.default is each.empty]
        if len(required) != 2:
            return {}
        parts, of_measure = {"judge": OWN, "judge_function": judge}, f"{OWN}."
    elif isinstance(judge, str):
        parts, of_measure = {"judge": judge}, ""
    else:
        return {}
    if isinstance(limits, Mapping):
        texts = [f"{of_measure}{str(name).removeprefix(of_measure)}={limit}" for name, limit in limits.items()]
        if not of_measure:  # numbers of a function may be called as a measure is
            check_judge(None, texts)
        parts["limits"] = parse_limits(texts)
    return parts


def _given_inputs(module: types.ModuleType, inputs: tuple[str, ...]) -> Any:
    """The inputs asked for, or those that the module defines; ``None`` if there are none."""
    make_batch = _make_batch(module, inputs)
    if make_batch is not None:
        return make_batch(0)
    # The variable of a loop may hold anything
    is_loop_variable = definition_line(module, "inputs") and not definition_line(module, "inputs", loops=False)
    return None if is_loop_variable else attribute_of(module, "inputs")


def _criterion(module: types.ModuleType) -> Any:
    """The file's ``criterion``, another name of the loss, if it can be called."""
    criterion = attribute_of(module, "criterion")
    return criterion if is_function(criterion) and not isinstance(criterion, type) else None


def _make_batch(module: types.ModuleType, inputs: tuple[str, ...]) -> Callable[[int], Any] | None:
    if inputs:
        return lambda index: parse_inputs(inputs, seed=index)
    return BatchMaker.of(attribute_of(module, "inputs"), functools.partial(call_function, "inputs"))


def _other_parts(module: types.ModuleType, inputs: tuple[str, ...]) -> dict[str, Any]:
    """What a file may define besides its model and inputs; ``None`` for what it does not define."""
    parts = {name: attribute_of(module, name) for name in ("loss", "metric", "optimizer", "average")}
    # The `loss` of a training script may be a number, such as a sum that it starts from
    if parts["loss"] is None or isinstance(parts["loss"], (Tensor, int, float)):
        parts["loss"] = _criterion(module)
    for name in ("loss", "metric"):
        if parts[name] is not None and not callable(parts[name]):
            problem = f"`{name}` in {display_name(module)} has type {type(parts[name]).__name__}, not a function."
            raise UsageError(problem, f"Make `{name}` a function, or rename it.")
    parts |= _judged_by(module)
    # One like an optimizer is made
    for name, kind in (("optimizer", Optimizer), ("average", ())):
        if not is_function(parts[name]) and not isinstance(parts[name], kind):
            parts[name] = None
    calibration = attribute_of(module, "calibration")
    parts["calibrate"] = check_calibration(calibration, f"`calibration` in {display_name(module)}")
    return parts | {"make_batch": _make_batch(module, inputs)}
