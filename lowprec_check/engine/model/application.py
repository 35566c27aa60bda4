"""Applies each kind of precision to a model, in place; the caller restores the model from a snapshot."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowprec_check.engine.core.floating_dtypes import NARROW, torch_dtype
from lowprec_check.engine.model.keep_fp32 import cast_except, cast_inputs, keep_out_of_autocast, put_under_autocast
from lowprec_check.errors import UsageError, message_of, type_name
from lowprec_check.schema.precisions import Precision


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
        """Autocast to the dtype."""
        return torch.autocast(device_type, dtype=self.dtype)

    def make_standalone(self, model: nn.Module, device_type: str) -> None:
        """Wrap its ``forward`` in autocast."""
        put_under_autocast(model, self.dtype, device_type)


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
