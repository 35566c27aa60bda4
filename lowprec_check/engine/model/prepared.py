"""A model in one precision and memory format, applied in place, and ready to be called."""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lowprec_check.engine.model.inputs import tensors_named
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.engine.model.user_code import parameters_of, reraise_interrupt
from lowprec_check.errors import UsageError, message_of, type_name
from lowprec_check.schema.precisions import BF16, FP16, Precision
from lowprec_check.schema.run_key import CONTIGUOUS, MemoryFormat
from lowprec_check.torchkit.floating_dtypes import NARROW, torch_dtype
from lowprec_check.torchkit.pytree import leaves, map_tensors
from lowprec_check.torchkit.source_location import traceback_line

IMAGE_DIMENSIONS = 4
"""Of the tensors that a memory format applies to."""


@contextlib.contextmanager
def prepared(
    model: nn.Module,
    precision: Precision,
    device: torch.device,
    *,
    memory_format: MemoryFormat = CONTIGUOUS,
    keep_fp32: Sequence[str] = (),
    keep_fp32_inputs: Sequence[str] = (),
    call: Callable[..., Any] | None = None,
    inputs: Iterable[Any] = (),
    changes_parameters: bool = False,
    snapshot: Snapshot | None = None,
) -> Iterator[Prepared]:
    """Apply ``precision`` to ``model`` in place, without gradients, and restore it afterwards.

    ``keep_fp32`` names modules that stay in fp32, ``keep_fp32_inputs`` tensors of the inputs that
    are not cast. The model must already be on ``device``. ``call`` is the function to call instead
    of the model, such as the model and a loss. If the model's own code fails then, the call raises
    its exception. Mutable objects in ``inputs`` are restored too, and the values of parameters if
    ``changes_parameters``: to the state of now, or of ``snapshot``, which saves time if the model
    is prepared several times.
    """
    if snapshot is None:
        snapshot = Snapshot(model, inputs, parameters=changes_parameters)
    else:
        snapshot.rewind()
    application = application_of(precision)
    application.keep_fp32_inputs = tuple(keep_fp32_inputs)
    called = model if call is None else call
    try:
        try:
            application.apply(model, device.type, keep_fp32)
            if memory_format != CONTIGUOUS:
                model.to(memory_format=getattr(torch, memory_format))  # type: ignore[call-overload]
        except BaseException as error:
            reraise_interrupt(error)
            # The model's own code failed, or torch in a module that contains itself
            of_model = isinstance(error, RecursionError)
            if not of_model and traceback_line(error.__traceback__) is None:
                raise
            called = FailedCast(error)
        with torch.no_grad():
            yield Prepared(model, application, device, called, memory_format)
    finally:
        snapshot.restore()


class Prepared(NamedTuple):
    """A model ready for one precision; call it with :meth:`inputs`."""

    model: nn.Module
    application: Application
    device: torch.device
    call: Callable[..., Any]
    """The function to call: the model, or the model and the user's loss."""
    memory_format: MemoryFormat = CONTIGUOUS
    enters_context: bool = False
    """Whether the function enters the context itself, as a training step does for its forward."""

    @property
    def precision(self) -> Precision:
        """The precision that was applied."""
        return self.application.precision

    def calling(self, call: Callable[..., Any]) -> Prepared:
        """The same with another function to call, unless the model could not be cast."""
        if isinstance(self.call, FailedCast):
            return self
        return self._replace(call=call)

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Fresh copies on the device, in the memory format and in the dtypes of the precision."""
        fp32 = tensors_named(self.application.keep_fp32_inputs, args, kwargs)

        def ready(tensor: Tensor) -> Tensor:
            dtype = self.application.dtype_of_input(tensor)
            if any(tensor is other for other in fp32):
                dtype = tensor.dtype
            fresh = tensor.detach().to(self.device, dtype, copy=True)
            if self.memory_format != CONTIGUOUS and fresh.ndim == IMAGE_DIMENSIONS and fresh.layout == torch.strided:
                fresh = fresh.contiguous(memory_format=getattr(torch, self.memory_format))
            if tensor.requires_grad:
                return fresh.requires_grad_()
            return fresh

        return map_tensors(args, ready), map_tensors(kwargs, ready)

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """A new context for the call: autocast or nothing."""
        if self.enters_context:
            return contextlib.nullcontext()
        return self.application.context(self.device.type)


@dataclass(frozen=True)
class FailedCast:
    """Takes the place of a model whose own code (``half()``) raised when it was cast."""

    error: BaseException

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Raise its exception, as the model's user sees it."""
        raise self.error


def format_problem(memory_format: MemoryFormat, model: nn.Module, inputs: Iterable[Any]) -> str | None:
    """Why ``memory_format`` does not apply to ``model``, for a skipped run; else ``None``."""
    if memory_format == CONTIGUOUS:
        return None
    weights = {tensor.ndim for tensor in (*model.parameters(), *model.buffers())}
    if IMAGE_DIMENSIONS + 1 in weights:
        return f"{memory_format} is for tensors of 4 dimensions, and the model has weights of 5 (channels_last_3d)"
    if IMAGE_DIMENSIONS not in weights | {tensor.ndim for _, tensor in leaves(tuple(inputs))}:
        return f"neither weights nor inputs have 4 dimensions, so {memory_format} changes nothing"
    return None


# -- How each kind of precision is applied


class Application:
    """Applies a precision to a model and around its call. This base changes nothing."""

    keep_fp32_inputs: tuple[str, ...] = ()
    """Names of tensors in the inputs that a cast leaves as they are."""

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        self.dtype = torch_dtype(precision.format)
        """The narrowest dtype that the precision uses."""

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The dtype that floating inputs are cast to; ``None`` if they are not cast."""
        return None

    def dtype_of_input(self, tensor: Tensor) -> torch.dtype:
        """The dtype that the input ``tensor`` is given in."""
        if self.input_dtype is not None and tensor.is_floating_point():
            return self.input_dtype
        return tensor.dtype

    def apply(self, model: nn.Module, device_type: str, keep_fp32: Sequence[str]) -> None:
        """Change ``model`` in place; the modules named in ``keep_fp32`` stay in fp32."""

    def context(self, device_type: str) -> contextlib.AbstractContextManager[Any]:
        """A new context to call the model in."""
        return contextlib.nullcontext()

    def make_standalone(self, model: nn.Module, device_type: str) -> None:
        """Make a model that this was applied to work on fp32 inputs without :meth:`context`."""


class Reference(Application):
    """fp32: converts a model with other floating dtypes, and its inputs with it."""

    def __init__(self, precision: Precision) -> None:
        super().__init__(precision)
        self._converted: set[torch.dtype] = set()

    def apply(self, model: nn.Module, device_type: str, keep_fp32: Sequence[str]) -> None:
        """Convert narrow parameters and buffers; fp64 only in a model with fp64 parameters."""
        self._converted = converted_dtypes(model)
        if self._converted:
            model._apply(lambda tensor: tensor.float() if tensor.dtype in self._converted else tensor)

    def dtype_of_input(self, tensor: Tensor) -> torch.dtype:
        """The dtype of ``tensor``, or fp32 if the model was converted from that dtype."""
        return torch.float32 if tensor.dtype in self._converted else tensor.dtype


def converted_dtypes(model: nn.Module) -> set[torch.dtype]:
    """The dtypes in ``model`` that the reference converts to fp32; none if it is in fp32."""
    in_parameters = {parameter.dtype for parameter in model.parameters()}
    return (in_parameters & {torch.float64}) | ((in_parameters | {b.dtype for b in model.buffers()}) & NARROW)


class Cast(Application):
    """Casts weights, buffers and inputs, as ``model.half()`` does."""

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The dtype of the cast."""
        return self.dtype

    def apply(self, model: nn.Module, device_type: str, keep_fp32: Sequence[str]) -> None:
        """Cast ``model``; the modules in ``keep_fp32`` keep their exact fp32 values."""
        # A weight that is tied to one outside gets its own values, in fp32
        for path in shared_weights(model, keep_fp32):
            owner, _, name = path.rpartition(".")
            module = model.get_submodule(owner)
            shared = getattr(module, name)
            setattr(module, name, nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad))
        # The whole model is cast, so that the user's own `half()` runs, and values are put back
        fp32_modules = [model.get_submodule(name) for name in keep_fp32]
        exact = [[tensor.detach().clone() for tensor in _floating_state(module)] for module in fp32_modules]
        if isinstance(model, torch.jit.ScriptModule):
            model.to(self.dtype)  # it lacks bfloat16()
        elif self.precision.method is not None:
            getattr(model, self.precision.method)()
        else:
            model._apply(lambda tensor: tensor.to(self.dtype) if tensor.is_floating_point() else tensor)
        for module, values in zip(fp32_modules, exact, strict=True):
            module.float()
            for tensor, value in zip(_floating_state(module), values, strict=True):
                tensor.data.copy_(value)  # not counted as a write to the parameter, which gets its own data back
            borders = Borders(self.dtype)
            module.register_forward_pre_hook(borders.enter, with_kwargs=True, prepend=True)
            module.register_forward_hook(borders.leave)

    def make_standalone(self, model: nn.Module, device_type: str) -> None:
        """Add a hook that casts the inputs."""
        borders = Borders(self.dtype, self.keep_fp32_inputs, tuple(parameters_of(model.forward)))
        model.register_forward_pre_hook(borders.cast, with_kwargs=True, prepend=True)


class Autocast(Application):
    """Calls the model under ``torch.autocast``; its weights stay in fp32."""

    def apply(self, model: nn.Module, device_type: str, keep_fp32: Sequence[str]) -> None:
        """Run the modules in ``keep_fp32`` without autocast, on fp32 weights and inputs."""
        for name in keep_fp32:
            module = model.get_submodule(name)
            module._apply(Borders(self.dtype).widened)
            module.forward = functools.partial(_outside_autocast, device_type, module.forward)
            module.register_forward_pre_hook(Borders(self.dtype).enter, with_kwargs=True, prepend=True)

    def context(self, device_type: str) -> contextlib.AbstractContextManager[Any]:
        """Autocast to the dtype; raises :class:`UsageError` if torch would ignore it."""
        autocast = torch.autocast(device_type, dtype=self.dtype)
        if not autocast._enabled:
            name = self.precision.format.name
            problem = f"torch's autocast does not support {name} on {device_type}: it would compute in fp32."
            raise UsageError(problem, "Choose another precision.")
        return autocast

    def make_standalone(self, model: nn.Module, device_type: str) -> None:
        """Wrap its ``forward`` and the hooks that it has in autocast."""
        model.forward = functools.partial(_under_autocast, self.dtype, device_type, model.forward)
        for hooks in (model._forward_pre_hooks, model._forward_hooks):
            for key, hook in hooks.items():
                hooks[key] = functools.partial(_under_autocast, self.dtype, device_type, hook)


def autocast_problem(precision: Precision, device_type: str) -> str | None:
    """Why autocast would compute in fp32, where torch only warns: it does not support the dtype."""
    # Asking for bf16 would initialize a GPU in this process
    if precision.kind != "autocast" or precision.format in (BF16, FP16):
        return None
    with warnings.catch_warnings(), contextlib.suppress(RuntimeError):  # which the run itself raises
        warnings.simplefilter("ignore")
        try:
            Autocast(precision).context(device_type)
        except UsageError as error:
            return error.message.rstrip(".")
    return None


def application_of(precision: Precision) -> Application:
    """How to apply ``precision``; raises :class:`UsageError` if the code of a package fails."""
    method, hint = precision.method, "Upgrade or uninstall the package that registers it."
    if method is not None and not hasattr(nn.Module, method):
        lacks = f"casts by the method {method!r}, which torch.nn.Module lacks"
        raise UsageError(f"The precision {precision.name!r} {lacks}.", hint)
    if precision.application is None:
        return {"reference": Reference, "cast": Cast, "autocast": Autocast}[precision.kind](precision)
    module, _, attribute = precision.application.partition(":")
    try:
        custom: Application = getattr(importlib.import_module(module), attribute)(precision)
    except Exception as error:
        what = f"The application {precision.application} of the precision {precision.name!r}"
        raise UsageError(f"{what} fails: {type_name(error)}: {message_of(error)}.", hint) from error
    return custom


def is_planned(model: nn.Module) -> bool:
    """Whether :meth:`Application.make_standalone` has already changed ``model``."""
    hooks = (getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values())
    return getattr(model.forward, "func", None) is _under_autocast or any(isinstance(hook, Borders) for hook in hooks)


def shared_weights(model: nn.Module, keep_fp32: Sequence[str]) -> list[str]:
    """Parameters of kept modules that other modules share, such as tied ``["head.weight"]``."""
    roots = [(name, model.get_submodule(name)) for name in keep_fp32]
    inside = {id(module) for _, root in roots for module in root.modules()}
    outside = [module for module in model.modules() if id(module) not in inside]
    elsewhere = {id(parameter) for module in outside for parameter in module.parameters(recurse=False)}
    return [
        f"{name}.{path}"
        for name, module in roots
        for path, parameter in module.named_parameters(remove_duplicate=False)
        if id(parameter) in elsewhere
    ]


# -- The borders of modules that stay in fp32
#
# Hooks and wrapped ``forward`` methods survive ``deepcopy``, do not change ``state_dict`` and are
# traced by ``torch.compile``. A module with hooks does not use its fused fast path
# (``TransformerEncoderLayer``), so its children are called. The code written by
# :mod:`lowprec_check.analysis.snippet` does the same.


class Borders:
    """Hooks between modules in ``low`` and modules in fp32."""

    def __init__(self, low: torch.dtype, keep_fp32_inputs: Sequence[str] = (), parameters: Sequence[str] = ()) -> None:
        self.low, self.keep_fp32_inputs, self.parameters = low, keep_fp32_inputs, parameters

    def enter(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Widen inputs in ``low`` to fp32."""
        return tree_map_only(Tensor, self.widened, (args, kwargs))

    def widened(self, tensor: Tensor) -> Tensor:
        """``tensor``, in fp32 if it is in ``low``."""
        if tensor.dtype == self.low:
            return tensor.float()
        return tensor

    def leave(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Narrow fp32 outputs to ``low``."""
        return tree_map_only(Tensor, lambda t: t.to(self.low) if t.dtype == torch.float32 else t, output)

    def cast(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Cast all floating inputs to ``low``, including those inside user objects; not those to be
        kept in fp32.
        """
        if self.keep_fp32_inputs:
            fp32 = tensors_named(self.keep_fp32_inputs, args, kwargs, self.parameters)

            def cast(tensor: Tensor) -> Tensor:
                return tensor if any(tensor is other for other in fp32) else self._narrow(tensor)

            return map_tensors(args, cast), map_tensors(kwargs, cast)
        if all(isinstance(leaf, _PYTREE_LEAVES) for leaf in tree_leaves((args, kwargs))):
            return tree_map_only(Tensor, self._narrow, (args, kwargs))
        return map_tensors(args, self._narrow), map_tensors(kwargs, self._narrow)

    def _narrow(self, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor.to(self.low)
        return tensor


_PYTREE_LEAVES = (Tensor, int, float, bool, str, type(None))
"""Types that torch's own pytree handles as leaves."""


# Used as partial objects over bound methods, which survive ``deepcopy`` and pickling; Dynamo traces
# their ``with`` blocks.


def _outside_autocast(device_type: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(device_type, enabled=False):
        return forward(*args, **kwargs)


def _under_autocast(low: torch.dtype, device_type: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(device_type, dtype=low):
        return forward(*args, **kwargs)


def _floating_state(module: nn.Module) -> list[Tensor]:
    return [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.is_floating_point()]
