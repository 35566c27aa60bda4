"""Eager execution: the model is called as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowprec_check.schema.axes import Backend, Example
from lowprec_check.schema.run_key import EAGER


class Eager(Backend):
    """Calls the model itself."""

    name = EAGER
    summary = "the model as it is"

    def prepare(self, model: Any, example: Example) -> Callable[..., Any]:
        """The model."""
        called: Callable[..., Any] = model
        return called


AS_IT_IS = Eager()
