"""Output errors that were predicted, for formats in which nothing was run. Never imports torch."""

from __future__ import annotations

from typing import Literal

from lowprec_check.schema.base import Struct
from lowprec_check.schema.error_budget import Share


class WhatIf(Struct, frozen=True, kw_only=True):
    """The output error that a format is predicted to cause; nothing was run in it."""

    format: str
    """A name in :data:`~lowprec_check.schema.what_if_formats.WHAT_IF_FORMATS`."""
    evidence: Literal["predicted"] = "predicted"
    """Always ``predicted``."""
    predicted: float | None = None
    """rel_l2 of the output to first order; ``None`` if it is not known."""
    shares: list[Share] = []
    """The places with the largest shares of the squared error, largest first."""
    note: str | None = None
    """What the prediction leaves out, or why there is none."""
