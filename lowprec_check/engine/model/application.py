"""Applies each kind of precision to a model, in place; the caller restores the model from a snapshot."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lowprec_check.engine.core.floating_dtypes import torch_dtype
from lowprec_check.engine.model.keep_fp32 import cast_except, cast_inputs, keep_out_of_autocast, put_under_autocast
from lowprec_check.errors import UsageError
from lowprec_check.schema.precisions import Precision


class Application:
    """Applies a precision to a model and around its call. This base class is the fp32 reference: it changes nothing."""

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        self.dtype = torch_dtype(precision.format)
        """The narrowest dtype that the precision uses."""

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The dtype that floating inputs are cast to; ``None`` if they are not cast."""
        return None

    def apply(self, model: nn.Module, device_type: str, keep_fp32: Sequence[str]) -> None:
        """Change ``model`` in place; the modules named in ``keep_fp32`` stay in fp32."""

    def context(self, device_type: str) -> contextlib.AbstractContextManager[Any]:
        """A new context to call the model in."""
        return contextlib.nullcontext()

    def make_standalone(self, model: nn.Module, device_type: str) -> None:
        """Make a model that this was applied to work with fp32 inputs and without :meth:`context`."""


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
                f"{type(error).__name__}: {error}.",
                "Upgrade or uninstall the package that registers it.",
            ) from error
        return custom
    return {"reference": Application, "cast": Cast, "autocast": Autocast}[precision.kind](precision)
