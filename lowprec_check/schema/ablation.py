"""What became of a failing run when the modules blamed for its error were kept in fp32. Never imports torch."""

from __future__ import annotations

from typing import Literal

from lowprec_check.schema.base import Struct
from lowprec_check.schema.verdict import Status

BlamedFor = Literal["share", "nonfinite", "tolerance"]
"""``share``: the largest shares of the error; ``nonfinite``: their ops turn finite values into Inf or NaN; ``tolerance``: the
output of one is the first to be over the tolerance, which need not be the cause.
"""


class Ablation(Struct, frozen=True, kw_only=True):
    """A plain run like the one that failed, with some modules in fp32: the test of what the analysis blames."""

    keep_fp32: list[str]
    """The modules blamed, none inside another, in the order of the analysis."""
    blamed_for: BlamedFor
    """Why they are blamed."""
    status: Status
    """How the run with them in fp32 ended."""
    rel_l2: float | None = None
    """Error of the output; ``None`` if it is not finite, or the run gave no output."""
    predicted: float | None = None
    """``rel_l2`` that the shares predict to first order; ``None`` if the modules are not blamed for their shares."""
