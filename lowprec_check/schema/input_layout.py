"""Where the tensors are in the inputs of a model. Never imports torch."""

from __future__ import annotations

from typing import Literal

from lowprec_check.schema.base import Struct


class InputLayout(Struct, frozen=True, kw_only=True):
    """Where the tensors are in the inputs, so that code can cast and move them."""

    kind: Literal["tensor", "sequence", "mapping", "nested"]
    """``inputs`` is one tensor; a sequence or mapping of tensors and other values; or one with tensors deeper inside."""
    tensors: list[str] = []
    """Positions or keys of the tensors."""
    floating: list[str] = []
    """Positions or keys of those with floating-point values; for one tensor, one empty key."""
    images: list[str] = []
    """Positions or keys of those with 4 dimensions, which have a memory format; for one tensor, one empty key."""
