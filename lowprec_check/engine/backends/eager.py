"""Eager execution: the model is called as it is."""

from __future__ import annotations

from typing import Any

from lowprec_check.schema.axes import Backend, Example
from lowprec_check.schema.run_key import EAGER


class Eager(Backend):
    """Calls the model itself."""

    name = EAGER
    summary = "the model as it is"

    def prepare(self, model: Any, example: Example) -> Any:
        """The model."""
        return model


AS_IT_IS = Eager()
