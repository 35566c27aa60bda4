"""Applies each kind of precision to a model, in place; modules kept in fp32 get exact weights and casts at their borders."""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lowprec_check.engine.core.floating_dtypes import NARROW, torch_dtype
from lowprec_check.engine.core.pytree import map_tensors
from lowprec_check.errors import UsageError, message_of, type_name
from lowprec_check.schema.precisions import Precision

# -- Keeps modules in fp32 inside a low-precision model: exact weights, casts at their borders, no autocast inside
#
# This uses module hooks and wrapped ``forward`` methods. They survive ``deepcopy``, do not change ``state_dict`` and are
# traced by ``torch.compile``. A module with hooks does not use its fused fast path (``TransformerEncoderLayer``), so its
# children are called. The code written by :mod:`lowprec_check.analysis.snippet` does the same.

_KNOWN = (Tensor, int, float, bool, str, type(None))
"""Types that torch's own pytree handles as leaves."""


def cast_except(model: nn.Module, low: torch.dtype, keep_fp32: Sequence[str], *, method: str | None = None) -> None:
    """Cast ``model`` in place as ``model.half()`` does; the modules in ``keep_fp32`` keep their exact fp32 values.

    ``method`` is the name of the model's own method that casts to ``low``, ``half``, if there is one.
    """
    untie(model, shared_weights(model, keep_fp32))
    kept = [model.get_submodule(name) for name in keep_fp32]
    exact = [[tensor.detach().clone() for tensor in _state(module)] for module in kept]
    if isinstance(model, torch.jit.ScriptModule):
        model.to(low)  # it lacks bfloat16()
    elif method is not None:
        getattr(model, method)()
    else:
        model._apply(lambda tensor: tensor.to(low) if tensor.is_floating_point() else tensor)
    for module, values in zip(kept, exact, strict=True):
        module.float()
        for tensor, value in zip(_state(module), values, strict=True):
            tensor.detach().copy_(value)
        borders = Borders(low)
        module.register_forward_pre_hook(borders.enter, with_kwargs=True, prepend=True)
        module.register_forward_hook(borders.leave)


def keep_out_of_autocast(model: nn.Module, low: torch.dtype, keep_fp32: Sequence[str], device_type: str) -> None:
    """Make the modules in ``keep_fp32`` run outside autocast, on inputs widened to fp32; their outputs stay fp32."""
    for name in keep_fp32:
        module = model.get_submodule(name)
        module.forward = functools.partial(_outside_autocast, device_type, module.forward)
        module.register_forward_pre_hook(Borders(low).enter, with_kwargs=True, prepend=True)


def put_under_autocast(model: nn.Module, low: torch.dtype, device_type: str) -> None:
    """Make ``model``, with the hooks it has, run under autocast without a ``with`` block around its call."""
    model.forward = functools.partial(_under_autocast, low, device_type, model.forward)
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key, hook in hooks.items():
            hooks[key] = functools.partial(_under_autocast, low, device_type, hook)


def cast_inputs(model: nn.Module, low: torch.dtype) -> None:
    """Make ``model``, which is cast to ``low``, accept fp32 inputs."""
    model.register_forward_pre_hook(Borders(low).cast, with_kwargs=True, prepend=True)


def is_planned(model: nn.Module) -> bool:
    """Whether :func:`put_under_autocast` or :func:`cast_inputs` has already been applied to ``model``."""
    hooks = (getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values())
    return getattr(model.forward, "func", None) is _under_autocast or any(isinstance(hook, Borders) for hook in hooks)


# Used as partial objects over bound methods, which survive ``deepcopy`` and pickling; Dynamo traces their ``with`` blocks.


def _outside_autocast(device_type: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(device_type, enabled=False):
        return forward(*args, **kwargs)


def _under_autocast(low: torch.dtype, device_type: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(device_type, dtype=low):
        return forward(*args, **kwargs)


class Borders:
    """Hooks between modules in ``low`` and modules in fp32."""

    def __init__(self, low: torch.dtype) -> None:
        self.low = low

    def enter(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Widen inputs in ``low`` to fp32."""
        return tree_map_only(Tensor, lambda t: t.float() if t.dtype == self.low else t, (args, kwargs))

    def leave(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Narrow fp32 outputs to ``low``."""
        return tree_map_only(Tensor, lambda t: t.to(self.low) if t.dtype == torch.float32 else t, output)

    def cast(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Cast all floating inputs to ``low``, including those inside user objects."""
        if all(isinstance(leaf, _KNOWN) for leaf in tree_leaves((args, kwargs))):
            return tree_map_only(Tensor, self._narrow, (args, kwargs))
        return map_tensors(args, self._narrow), map_tensors(kwargs, self._narrow)

    def _narrow(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.low) if tensor.is_floating_point() else tensor


def shared_weights(model: nn.Module, keep_fp32: Sequence[str]) -> list[str]:
    """Parameters of kept modules that other modules share: ``["head.weight"]`` for a weight tied to an embedding."""
    kept = [(name, model.get_submodule(name)) for name in keep_fp32]
    inside = {id(module) for _, root in kept for module in root.modules()}
    elsewhere = {
        id(parameter)
        for module in model.modules()
        if id(module) not in inside
        for parameter in module.parameters(recurse=False)
    }
    return [
        f"{name}.{path}" for name, module in kept for path, parameter in _every(module) if id(parameter) in elsewhere
    ]


def _every(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(remove_duplicate=False))


def untie(model: nn.Module, parameters: Sequence[str]) -> None:
    """Replace each named parameter with a copy."""
    for path in parameters:
        owner, _, name = path.rpartition(".")
        module = model.get_submodule(owner)
        shared = getattr(module, name)
        setattr(module, name, nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad))


def _state(module: nn.Module) -> list[Tensor]:
    return [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.is_floating_point()]


# -- Applies each kind of precision to a model, in place; the caller restores the model from a snapshot


class Application:
    """Applies a precision to a model and around its call. This base class changes nothing."""

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
        return self.input_dtype if self.input_dtype is not None and tensor.is_floating_point() else tensor.dtype

    def apply(self, model: nn.Module, device_type: str, keep_fp32: Sequence[str]) -> None:
        """Change ``model`` in place; the modules named in ``keep_fp32`` stay in fp32."""

    def context(self, device_type: str) -> contextlib.AbstractContextManager[Any]:
        """A new context to call the model in."""
        return contextlib.nullcontext()

    def make_standalone(self, model: nn.Module, device_type: str) -> None:
        """Make a model that this was applied to work with fp32 inputs and without :meth:`context`."""


class Reference(Application):
    """fp32: a model in fp32 is not changed; one with other floating dtypes is converted, and its inputs with it."""

    def __init__(self, precision: Precision) -> None:
        super().__init__(precision)
        self._converted: set[torch.dtype] = set()

    def apply(self, model: nn.Module, device_type: str, keep_fp32: Sequence[str]) -> None:
        """Convert narrow parameters and buffers; fp64 only in a model with fp64 parameters."""
        self._converted = converted_dtypes(model)
        if self._converted:
            model._apply(lambda tensor: tensor.float() if tensor.dtype in self._converted else tensor)

    def dtype_of_input(self, tensor: Tensor) -> torch.dtype:
        """The dtype of ``tensor``, or fp32 if the model's tensors of that dtype were converted."""
        return torch.float32 if tensor.dtype in self._converted else tensor.dtype


def converted_dtypes(model: nn.Module) -> set[torch.dtype]:
    """The dtypes in ``model`` that the fp32 reference converts to fp32; empty for a model in fp32."""
    in_parameters = {parameter.dtype for parameter in model.parameters()}
    return (in_parameters & {torch.float64}) | ((in_parameters | {b.dtype for b in model.buffers()}) & NARROW)


class Cast(Application):
    """Casts weights, buffers and inputs, as ``model.half()`` does."""

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The dtype of the cast."""
        return self.dtype

    def apply(self, model: nn.Module, device_type: str, keep_fp32: Sequence[str]) -> None:
        """Cast ``model``, except the modules in ``keep_fp32``."""
        cast_except(model, self.dtype, keep_fp32, method=self.precision.method)

    def make_standalone(self, model: nn.Module, device_type: str) -> None:
        """Add a hook that casts the inputs."""
        cast_inputs(model, self.dtype)


class Autocast(Application):
    """Calls the model under ``torch.autocast``; its weights stay in fp32."""

    def apply(self, model: nn.Module, device_type: str, keep_fp32: Sequence[str]) -> None:
        """Disable autocast inside the modules in ``keep_fp32``."""
        keep_out_of_autocast(model, self.dtype, keep_fp32, device_type)

    def context(self, device_type: str) -> contextlib.AbstractContextManager[Any]:
        """Autocast to the dtype; raises :class:`UsageError` if torch would ignore it."""
        found = torch.autocast(device_type, dtype=self.dtype)
        if not found._enabled:
            raise UsageError(
                f"torch's autocast does not support {self.precision.format.name} on {device_type}: it would compute in fp32.",
                "Choose another precision.",
            )
        return found

    def make_standalone(self, model: nn.Module, device_type: str) -> None:
        """Wrap its ``forward`` in autocast."""
        put_under_autocast(model, self.dtype, device_type)


def autocast_problem(precision: Precision, device_type: str) -> str | None:
    """Why autocast would compute in fp32, where torch only warns: it does not support the dtype; ``None`` if it does."""
    if precision.kind != "autocast":
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            Autocast(precision).context(device_type)
        except UsageError as error:
            return error.message.rstrip(".")
        except RuntimeError:  # the run itself raises it
            return None
    return None


def application_of(precision: Precision) -> Application:
    """The :class:`Application` of ``precision``; raises :class:`UsageError` if that of another package cannot be made."""
    if precision.method is not None and not hasattr(nn.Module, precision.method):
        raise UsageError(
            f"The precision {precision.name!r} casts by the method {precision.method!r}, which torch.nn.Module lacks.",
            "Upgrade or uninstall the package that registers it.",
        )
    if precision.application is not None:
        module, _, attribute = precision.application.partition(":")
        try:
            custom: Application = getattr(importlib.import_module(module), attribute)(precision)
        except Exception as error:
            raise UsageError(
                f"The application {precision.application} of the precision {precision.name!r} fails: "
                f"{type_name(error)}: {message_of(error)}.",
                "Upgrade or uninstall the package that registers it.",
            ) from error
        return custom
    return {"reference": Reference, "cast": Cast, "autocast": Autocast}[precision.kind](precision)
