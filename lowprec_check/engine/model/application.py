"""How each kind of precision is applied to a model: in place, undone by the caller's snapshot."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lowprec_check.engine.model.keep_fp32 import cast_except, cast_inputs, keep_out_of_autocast, put_under_autocast
from lowprec_check.schema.precisions import FloatFormat, Precision


def torch_dtype(format: FloatFormat) -> torch.dtype:
    """``torch.float16`` of fp16."""
    dtype: torch.dtype = getattr(torch, format.name)
    return dtype


class Application:
    """What a precision does to a model and around its call. This base class is the reference, fp32: it does nothing."""

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        self.dtype = torch_dtype(precision.format)
        """The narrowest dtype in play."""

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The dtype that floating inputs are cast to; ``None`` if they stay as they are."""
        return None

    def apply(self, model: nn.Module, device_type: str, keep_fp32: Sequence[str]) -> None:
        """Change ``model`` in place; the modules of those paths stay in fp32."""

    def context(self, device_type: str) -> contextlib.AbstractContextManager[Any]:
        """A new context to call the model in."""
        return contextlib.nullcontext()

    def make_standalone(self, model: nn.Module, device_type: str) -> None:
        """Make a model to which this was applied take fp32 inputs, with no context around its call."""


class Cast(Application):
    """Weights, buffers and inputs are cast, as ``model.half()`` does."""

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The dtype of the cast."""
        return self.dtype

    def apply(self, model: nn.Module, device_type: str, keep_fp32: Sequence[str]) -> None:
        """Cast ``model``, but for the modules to keep."""
        cast_except(model, self.dtype, keep_fp32, method=self.precision.method)

    def make_standalone(self, model: nn.Module, device_type: str) -> None:
        """Cast its inputs by a hook."""
        cast_inputs(model, self.dtype)


class Autocast(Application):
    """The model is called under ``torch.autocast``; its weights stay in fp32."""

    def apply(self, model: nn.Module, device_type: str, keep_fp32: Sequence[str]) -> None:
        """Take the modules to keep out of autocast."""
        keep_out_of_autocast(model, self.dtype, keep_fp32, device_type)

    def context(self, device_type: str) -> contextlib.AbstractContextManager[Any]:
        """Autocast to the dtype."""
        return torch.autocast(device_type, dtype=self.dtype)

    def make_standalone(self, model: nn.Module, device_type: str) -> None:
        """Put its ``forward`` under autocast."""
        put_under_autocast(model, self.dtype, device_type)


def application_of(precision: Precision) -> Application:
    """How ``precision`` is applied."""
    if precision.application is not None:
        module, _, attribute = precision.application.partition(":")
        custom: Application = getattr(importlib.import_module(module), attribute)(precision)
        return custom
    return {"reference": Application, "cast": Cast, "autocast": Autocast}[precision.kind](precision)
