"""The error budget of a run: which ops, modules and lines its output error comes from. Never imports torch."""

from __future__ import annotations

from lowprec_check.schema.base import Struct

MATTERS = 0.03
"""An op matters to the error of an output if it causes at least this share of it."""


class Share(Struct, frozen=True, kw_only=True):
    """The share of the output error that one op causes at one place, over all its calls there.

    If the module, with all inside, is kept in fp32, the share goes.
    """

    module: str
    """The path of the module, ``layer1.0.conv1``; empty for the model itself."""
    op: str
    """``aten.addmm.default``; ``cast input`` for the rounding of the inputs."""
    source: str | None = None
    """``model.py:41``."""
    share: float
    """Of the squared error; negative if this op's error cancels that of others."""
    calls: int = 1
    """Number of op calls."""
    rounding: bool = False
    """Whether it is the rounding of the op's result where that leaves the op's own module. Other modules read it, so that
    keeping the op in fp32 does not help; ``module`` is the innermost one that holds the op and these readers."""


class ErrorBudget(Struct, frozen=True, kw_only=True):
    """Where the error of an output comes from, to first order: shares and ``unexplained`` add up to 1.

    The error that an op adds reaches the output through the derivatives of all later ops. A share is the part of the squared
    error of the output that is explained so. It is about the floating tensor of the output with the largest error.
    """

    predicted: float | None = None
    """rel_l2 of the output to first order; ``None`` if there is no budget."""
    measured: float | None = None
    """rel_l2 that the shares are about: of the first call, with missing kernels replaced."""
    unexplained: float | None = None
    """1 less the sum of all shares: what the first order does not explain. Negative if it predicts too much."""
    decisions: float = 0.0
    """The part of ``unexplained`` that is due to decisions (indices, comparisons) that differ from those of fp32; 0 if no op
    shows one."""
    shares: list[Share] = []
    """The largest shares, largest first."""
    others: float = 0.0
    """The sum of the shares that are not listed."""
    blocked: list[str] = []
    """Ops that no derivative passes, so that errors before them are not seen."""
    output_rms: float | None = None
    """Root mean square of the fp32 output."""
    next_error: float | None = 0.0
    """rel_l2 of the floating tensor of the output with the next largest error, which other ops may cause; 0 if there is none."""
    reason: str | None = None
    """Why there is no budget, in words."""

    @property
    def known(self) -> bool:
        """Whether shares were computed."""
        return self.predicted is not None
