"""A model, or a function as one, and how to call it; the check that it can be scanned."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from lowprec_check.engine.model import torchvision_ops
from lowprec_check.engine.model.inputs import BatchMaker, NoBatchError, as_call, call_code, is_function, take_batch
from lowprec_check.engine.model.observed_training import ObservedTraining
from lowprec_check.engine.model.output_tensors import OutputForm
from lowprec_check.engine.model.prepared import converted_dtypes
from lowprec_check.engine.model.training import LossInputs, MakeOptimizer, loss_of
from lowprec_check.engine.model.user_code import (
    call_function,
    call_user_code,
    class_line,
    is_own_class,
    required_arguments,
)
from lowprec_check.engine.model.whole_optimizer import OptimizerLike
from lowprec_check.errors import UsageError, message_of, type_name
from lowprec_check.schema.axes import Call
from lowprec_check.schema.scan_result import WeightsOrigin
from lowprec_check.schema.scanned_model import IN_TRAINING_MODE
from lowprec_check.torchkit.compiled import in_training_mode
from lowprec_check.torchkit.devices import kept_generators
from lowprec_check.torchkit.output_comparison import same_values
from lowprec_check.torchkit.pytree import leaves
from lowprec_check.torchkit.source_location import own_line, show_line, traceback_line


class FunctionModule(nn.Module):
    """Calls ``function``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function
        self.name: str = getattr(_without_partials(function), "__name__", type(function).__name__)
        self.eval()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; one that returns a module makes a model, and is none."""
        output = super().__call__(*args, **kwargs)
        if isinstance(output, nn.Module):
            returned = f"{self.name} was called with the inputs and returned a {type(output).__name__}"
            raise TypeError(f"{returned}: a function that makes a model must need no arguments")
        return output


def is_plain_function(value: Any) -> bool:
    """Whether ``value`` is a function with an argument that it must get, so it makes no model.

    Also one with some of its arguments (``functools.partial``), or an object that can be called.
    """
    if isinstance(value, nn.Module) or isinstance(_without_partials(value), type) or not callable(value):
        return False
    return required_arguments(value) > 0


def _without_partials(value: Any) -> Any:
    """What a ``functools.partial`` calls."""
    while isinstance(value, functools.partial):
        value = value.func
    return value


def function_module(function: Callable[..., Any]) -> FunctionModule:
    """The module that calls ``function``; raises :class:`UsageError` if that uses a module.

    A cast of the function would leave that one as it is.
    """
    model = FunctionModule(function)
    module = next(_modules_used(function, set()), None)
    if module is not None:
        name = model.name
        raise UsageError(
            f"`{name}` uses the module `{module}` and is no torch.nn.Module, so that no cast reaches `{module}`.",
            f"Scan `{module}`, or a torch.nn.Module that has it as a child and does in `forward` what `{name}` does.",
        )
    return model


def _modules_used(function: Callable[..., Any], seen: set[int]) -> Iterator[str]:
    """The names of modules that a function reads outside itself, or functions that it calls."""
    seen.add(id(function))
    if isinstance(function, functools.partial):
        given = {**{str(index): value for index, value in enumerate(function.args)}, **function.keywords}
        yield from (name for name, value in given.items() if isinstance(value, nn.Module))
        yield from _modules_used(function.func, seen)
    if inspect.ismethod(function):
        if isinstance(function.__self__, nn.Module):
            yield type(function.__self__).__name__
        yield from _modules_held(function.__self__)
        yield from _modules_used(function.__func__, seen)
    elif not inspect.isroutine(function) and not isinstance(function, functools.partial):
        yield from _modules_held(function)
        yield from _modules_used(type(function).__call__, seen)
    if not inspect.isfunction(function):
        return
    outer = inspect.getclosurevars(function)
    for name, value in (*outer.nonlocals.items(), *outer.globals.items()):
        if isinstance(value, nn.Module):
            yield name
        elif inspect.isfunction(value) and id(value) not in seen and value.__module__ == function.__module__:
            yield from _modules_used(value, seen)


def _modules_held(owner: Any) -> Iterator[str]:
    """The attributes of an object that are modules, or lists of them."""
    for name, value in getattr(owner, "__dict__", {}).items():
        items = value if isinstance(value, (list, tuple)) else [value]
        if not isinstance(owner, nn.Module) and any(isinstance(item, nn.Module) for item in items):
            yield name


def function_line(function: Callable[..., Any]) -> str | None:
    """Where a function is defined; ``None`` for one without Python source."""
    function = _without_partials(function)
    if not inspect.isroutine(function):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    return show_line(code.co_filename, code.co_firstlineno)


NOT_TRAINED = (
    "the script computes no gradients: its model is trained with a `loss` and an `optimizer` that it defines outside "
    "functions, else with those shown as default"
)
"""A note on a script that is trained, and does not train."""

_PASTE_BATCHES = """Make `inputs` a function of the batch number:

    def inputs(batch=0):
        generator = torch.Generator().manual_seed(batch)
        return torch.randn(1, 3, 224, 224, generator=generator)"""


class WithLoss(NamedTuple):
    """The result of a call if the file defines a loss: the output and its loss."""

    output: Any
    loss: Tensor


class Target(NamedTuple):
    """A model and how to call it."""

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[..., Tensor] | None = None
    """``loss(output)``; of a scan of training, it may require the targets, or the inputs, too."""
    optimizer: MakeOptimizer | torch.optim.Optimizer | None = None
    """``optimizer(parameters)``, for training; :func:`check` replaces an optimizer by its maker."""
    average: Callable[[nn.Module], Any] | None = None
    """``average(model)``: an average of weights to update, such as ``AveragedModel``."""
    targets: tuple[Any, ...] = ()
    """The elements of the batch that the model does not take, for the loss."""
    batch_code: str = ""
    """Code for the batch, if it has targets; empty if ``setup`` names it."""
    targets_code: str = ""
    """Code for the targets, from ``batch``."""
    metric: Callable[[nn.Module], float] | None = None
    judge: str | None = None
    """The measure that the file asks for; :data:`OWN` if that is its own."""
    judge_function: Callable[[Any, Any], Any] | None = None
    """Its own, ``judge(output, reference)``, which returns numbers by name."""
    limits: tuple[tuple[str, float], ...] = ()
    """Limits of its figures that the file sets."""
    taken: str = ""
    """What of the user's file is the target, and why; empty if it was not taken from a file."""
    source: str | None = None
    """The line that makes the model or defines its class, for ops that no user's line calls."""
    caller: str | None = None
    """The user's own line that makes or scans the model, if ``source`` is not; empty if unknown."""
    form: str = "model(*inputs)"
    """How ``inputs`` are given to the model, as code."""
    setup: tuple[str, ...] = ()
    """Lines of code that set ``model`` and ``inputs``, from what the file defines."""
    names: dict[str, str] = {}
    """The expressions for ``model`` and ``inputs`` in the script that calls the model."""
    namespace: dict[str, Any] | None = None
    """What names mean where printed code belongs; ``None`` if it stands alone."""
    folder: str | None = None
    """Where printed code imports the user's file, if it does."""
    notes: tuple[str, ...] = ()
    make_batch: Callable[[int], Any] | None = None
    """The inputs of batch 0, 1, 2, …, seeded or from torch's generator; ``None`` if fixed."""
    default_inputs: bool = False
    """Whether the inputs were made for a model by name, without being asked for."""
    calibrate: Any = None
    """The file's ``calibration``: a function that returns batches, or the batches; or ``None``."""
    first_inputs: Call | None = None
    """Those of the first batch, if the inputs are of another one: backends prepare for them."""
    weights: WeightsOrigin = "unknown"
    """Where the values of the weights come from."""
    remake: Callable[[int], nn.Module] | None = None
    """Makes the model again from another seed, as the file does; ``None`` if that takes long."""
    observed: ObservedTraining | None = None
    """The training of a script, with the loss, the optimizer and batches like the inputs."""
    compiled: nn.Module | None = None
    """The model as its user compiled it, by ``torch.compile(model)``: what the plain part calls."""

    @property
    def inputs(self) -> Call:
        """Everything that is given to the model."""
        return self.args, self.kwargs

    @property
    def of_script(self) -> bool:
        """Whether a script was run to its call of the model, or for steps of its training."""
        return self.namespace is not None or self.observed is not None

    @property
    def rewound(self) -> tuple[Any, ...]:
        """What a call may change besides the model: the inputs, the state of the user's loss."""
        return (*self.inputs, self.loss if self.observed is None else None)

    def calibration(self) -> Iterator[Call]:
        """Yield inputs to calibrate a quantized model on: of ``calibration()``, else the inputs."""
        if self.calibrate is None:
            yield self.first_inputs or self.inputs
            return
        number = 0
        batches: Any = self.calibrate
        if is_function(batches):
            batches = call_function("calibration", batches)
        if not _are_batches(batches):
            problem = f"`calibration` returned an object of type {type_name(batches)}, not a list of batches."
            raise UsageError(problem, _PASTE_CALIBRATION)
        source, end = iter(batches), object()
        while (batch := call_user_code("Reading `calibration`", lambda: next(source, end))) is not end:
            number += 1
            args, kwargs, form = as_call(batch, forward_of(self.model))
            expected, places = (sorted(path for path, _ in leaves(call)) for call in (self.inputs, (args, kwargs)))
            if form != self.form or places != expected:
                count, wanted = (f"{len(paths)} tensor{'s' * (len(paths) != 1)}" for paths in (places, expected))
                what = f"Batch {number} of `calibration` has type {type_name(batch)} with {count}"
                hint = "Yield batches in the form of `inputs`, without targets."
                raise UsageError(f"{what}; the inputs are {wanted}, given by {self.form}.", hint)
            yield args, kwargs
        if not number:
            raise UsageError("`calibration` is empty: it has no batch.", _PASTE_CALIBRATION)

    @property
    def calibration_code(self) -> str:
        """Code for the batches of ``calibration``; empty if the file defines none."""
        if self.calibrate is None:
            return ""
        if is_function(self.calibrate):
            return "calibration()"
        return "calibration"

    def batch(self, index: int) -> Target:
        """This target with the inputs of another batch; raises :class:`UsageError` without one."""
        if index == 0:
            return self
        if self.observed is not None and index < len(self.observed.batches):
            return self._replace(**self.observed.batches[index]._asdict())
        if self.make_batch is None:
            problem = "`inputs` is neither a function nor a loader, so there is only one batch."
            raise NoBatchError(problem, _PASTE_BATCHES)
        batch = take_batch(self.make_batch(index), forward_of(self.model))
        args, kwargs, _ = as_call(batch.inputs, forward_of(self.model))
        if same_values(self.inputs, (args, kwargs)):
            raise NoBatchError(f"`inputs` returns the same values for batch {index} as for batch 0.", _PASTE_BATCHES)
        first = self.first_inputs or self.inputs
        return self._replace(args=args, kwargs=kwargs, targets=batch.targets, first_inputs=first)

    @property
    def called(self) -> nn.Module:
        """The model, as its user compiled it."""
        return self.model if self.compiled is None else self.compiled

    def output_form(self, judge: str | None, limits: tuple[tuple[str, float], ...]) -> OutputForm:
        """How its output is judged if this measure is asked for, and limits beside the file's."""
        form = OutputForm(judge=judge, limits=(*self.limits, *limits), loss=loss_kind(self.loss))
        return form._replace(function=self.judge_function)

    def call(self, model: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """The function to call: ``model``, by default the target's, then the loss if any."""
        loss, called = self.loss, self.called if model is None else model
        if loss is None:
            return called

        def model_and_loss(*args: Any, **kwargs: Any) -> WithLoss:
            output = called(*args, **kwargs)
            device = next((tensor.device for _, tensor in leaves(output)), None)
            targets = tree_map_only(Tensor, lambda target: target.to(device), self.targets)
            return WithLoss(output, loss_of(loss, output, LossInputs(args, kwargs, targets)))

        return model_and_loss


def loss_kind(loss: Any) -> str:
    """What an output with this loss is: ``classes``, ``binary``, ``other``; empty without one."""
    if loss is None:
        return ""
    loss = _without_partials(loss)
    function, owner = loss, getattr(loss, "__self__", loss)
    if not inspect.isroutine(loss):
        function = getattr(loss, "forward", type(loss).__call__)
    names, parts = {getattr(loss, "__name__", "")}, [loss, *getattr(owner, "__dict__", {}).values()]
    if isinstance(owner, nn.Module):
        parts += owner.modules()
    function = inspect.unwrap(function)
    if inspect.isfunction(function) or inspect.ismethod(function):
        names |= {*function.__code__.co_names}
        with contextlib.suppress(ValueError):  # a variable of its closure that is not set yet
            used = inspect.getclosurevars(function)
            parts += [*used.globals.values(), *used.nonlocals.values()]
    if "cross_entropy" in names or any(isinstance(part, nn.CrossEntropyLoss) for part in parts):
        return "classes"
    if "binary_cross_entropy_with_logits" in names or any(isinstance(part, nn.BCEWithLogitsLoss) for part in parts):
        return "binary"
    return "other"


def make_target(model: nn.Module, inputs: Any, *, calibration: Any = None, **functions: Any) -> Target:
    """A target of the API, from a model, inputs, and ``functions`` that a file may define."""
    make_batch = BatchMaker.of(inputs)
    first = inputs
    if make_batch is not None:
        first = make_batch(0)
    calibrate = check_calibration(calibration, "calibration")
    scanned_at = own_line(sys._getframe(1))
    functions |= {"calibrate": calibrate, "setup": call_code(inputs)}
    target = unchecked_target(model, first, made_at=scanned_at, make_batch=make_batch, **functions)
    return check(target)


def unchecked_target(
    model: Any,
    given: Any,
    *,
    name: str | None = None,
    source: str | None = None,
    made_at: str | None = None,
    **fields: Any,
) -> Target:
    """A target from a model and inputs, of which a batch is taken; :func:`check` it before use.

    ``source`` is the user's own line that makes the model; if unknown, that of its class counts,
    with the user's line ``made_at`` for a class of others. ``fields`` are those of :class:`Target`.
    """
    if is_plain_function(model):
        source = function_line(model)
        model = function_module(model)
        name = name or model.name
    forward = forward_of(model)
    batch = take_batch(given, forward)
    args, kwargs, form = as_call(batch.inputs, forward)
    fields["setup"] = (*fields.get("setup", ()), *batch.setup)
    fields["notes"] = (*fields.get("notes", ()), *batch.notes)
    fields |= {"targets": batch.targets, "batch_code": batch.code, "targets_code": batch.targets_code}
    return Target(
        name or type(model).__name__,
        model,
        args,
        kwargs,
        source=source or class_line(model),
        caller=None if source or is_own_class(model) else made_at or "",
        form=form,
        **fields,
    )


def check(target: Target) -> Target:
    """Raise :class:`UsageError` if ``target`` cannot be scanned; look inside a compiled model."""
    target = _unwrapped(target)
    if not isinstance(target.model, nn.Module):
        raise UsageError(
            f"The target has type {type(target.model).__name__}, not torch.nn.Module.",
            "Give a model; a file may also define a function that returns one.",
        )
    # What can be scanned after a change is changed, with a note
    if any(map(is_lazy, _state(target.model))):
        target = _initialized(target)
    if any(tensor.is_inference() for tensor in _state(target.model)):
        note = "the model was made under torch.inference_mode(): a copy is scanned, which can be changed outside"
        code = "model = copy.deepcopy(model)  # it was made under torch.inference_mode()"
        target = _noted(target, note, "import copy", code)._replace(model=copy.deepcopy(target.model))
    model, state = target.model, _state(target.model)
    if any(tensor.is_meta for tensor in state):
        hint = "Call model.to_empty(device='cpu'), then load or initialize its weights."
        raise UsageError("The model has parameters on the meta device, which have no values.", hint)
    if not any(tensor.is_floating_point() for tensor in state):
        # Integer buffers may be indices and masks; integer parameters are quantized weights.
        quantized = next(model.parameters(), None) is not None or any(tensor.is_quantized for tensor in state)
        if quantized or not any(tensor.is_floating_point() for _, tensor in leaves(target.inputs)):
            hint = "Pass floating-point inputs. If the model is quantized, scan the one that it was made from."
            raise UsageError("The model has no floating-point parameters or inputs to cast.", hint)
        target = _noted(target, "the model has no floating-point parameters: only its inputs are cast")
    # What the reader of the result needs to know
    dtypes = sorted(str(dtype).removeprefix("torch.") for dtype in converted_dtypes(model))
    if dtypes:
        names = " and ".join(dtypes)
        note = f"the model has {names} weights: the fp32 run converts them, autocast runs the model unchanged"
        target = _noted(target, note)
    if isinstance(target.optimizer, torch.optim.Optimizer):
        target = target._replace(optimizer=OptimizerLike(target.optimizer, model))
    if torchvision_ops.replaced_in(model):
        target = _noted(target, torchvision_ops.NOTE)
    if in_training_mode(model):
        return _noted(target, IN_TRAINING_MODE)
    return target


_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def _unwrapped(target: Target) -> Target:
    """The module inside a compiled model, which the plain part calls, and inside a parallel one."""
    model: Any = target.model
    if isinstance(model, torch.jit.ScriptModule):
        if not hasattr(model, "training"):
            problem = "The model is a frozen ScriptModule: its weights are constants, which no cast changes."
            raise UsageError(problem, "Scan the module before torch.jit.freeze.")
        note = (
            "the model is a ScriptModule: its ops are analyzed one by one, not fused, without the modules they are in"
        )
        return _noted(target, note)
    original = inside(model, "_orig_mod")
    if isinstance(original, nn.Module):
        status = "status and time are those of compiled code, the op-by-op analysis runs in eager mode"
        target = _noted(target, f"the model is compiled: {status}")._replace(compiled=model, model=original)
        model = original
    if not isinstance(model, _PARALLEL):
        return target
    kind, module = type(model).__name__, model.module
    target = _noted(target, f"the module inside {kind} is scanned, on one device", f"model = model.module  # of {kind}")
    target = target._replace(model=module, compiled=None)
    if target.name == kind:
        target = target._replace(name=type(module).__name__)
    # The line of the class was that of the wrapper
    if target.caller is not None or target.source is None:
        source = class_line(module)
        target = target._replace(source=source, caller=None if source and is_own_class(module) else target.caller)
    return target


def _initialized(target: Target) -> Target:
    """A copy of a model with lazy modules, initialized; the model itself if it cannot be copied."""
    model = target.model
    with contextlib.suppress(ValueError):  # it cannot copy a buffer without values: of a LazyBatchNorm2d
        model = copy.deepcopy(model)
    try:
        with torch.no_grad(), kept_generators():
            model(*target.args, **target.kwargs)
    except Exception as error:
        line = traceback_line(error.__traceback__)
        place = f" at {line}" if line else ""
        what = f"The model has lazy modules, and the call that initializes them failed{place}"
        hint = "Check that the inputs fit the model, or call the model once in your file."
        raise UsageError(f"{what}: {type_name(error)}: {message_of(error)}", hint) from None
    if any(map(is_lazy, _state(model))):
        hint = "Remove the modules that are not used, or call them once in your file."
        raise UsageError("The model has lazy modules that a call on the inputs does not initialize.", hint)
    code = f"{target.form}  # initializes the lazy modules"
    return _noted(target, "the lazy modules were initialized by a call on the inputs", code)._replace(model=model)


def _noted(target: Target, note: str, *setup: str) -> Target:
    return target._replace(notes=(*target.notes, note), setup=(*target.setup, *setup))


def _state(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def forward_of(model: Any) -> Callable[..., Any]:
    """The ``forward`` with the signature of the model, which may be compiled or parallel."""
    original = inside(model, "_orig_mod")
    module = model if original is None else original
    if isinstance(module, _PARALLEL):
        module = module.module
    forward: Callable[..., Any] = getattr(module, "forward", module)
    return forward


def inside(model: Any, name: str) -> Any:
    """The child of that name, if there is one."""
    # Without the model's own `__getattr__`, which may raise anything
    children = getattr(model, "__dict__", {}).get("_modules")
    if isinstance(children, dict):
        return children.get(name)
    return None


# -- The inputs that a quantized model is calibrated on

Calibration = Iterable[Any] | Callable[[], Iterable[Any]]
"""Batches, each in the form of the inputs, or a function that returns or yields them."""

_PASTE_CALIBRATION = """Make `calibration` a function that yields batches like `inputs`:

    def calibration():
        for batch in range(8):
            yield torch.randn(1, 3, 224, 224)"""


def check_calibration(given: Any, name: str) -> Any:
    """``given``, if it is ``None``, a function, or batches that can be read repeatedly."""
    if given is None or (is_function(given) and not isinstance(given, nn.Module)):
        return given
    if isinstance(given, Iterator):
        raise UsageError(f"{name} can be read only once, and several runs need it.", _PASTE_CALIBRATION)
    if not _are_batches(given):
        problem = f"{name} has type {type_name(given)}, not a function or a list of batches."
        raise UsageError(problem, _PASTE_CALIBRATION)
    return given


def _are_batches(given: Any) -> bool:
    return isinstance(given, Iterable) and not isinstance(given, (Tensor, Mapping, str, bytes))
