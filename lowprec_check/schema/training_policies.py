"""What ``scan --train --policies N`` saves: the gradients that policies of distributed training accumulate."""

from __future__ import annotations

from typing import Literal

from lowprec_check.schema.base import Struct
from lowprec_check.schema.verdict import ExceptionInfo, Status

ComputesIn = Literal["fp32", "bf16", "autocast bf16"]
Reduced = Literal["once", "each time"]


class PolicyGradient(Struct, frozen=True, kw_only=True):
    """The gradient that one policy accumulates over several micro-batches on one rank, compared with that of plain fp32.

    The loss of each micro-batch is divided by their number. Nothing is summed over ranks, so that all of the error is that of one
    rank: more ranks add the rounding of their sums.
    """

    policy: str
    """The policy, as code: ``FSDP2 MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16)``."""
    computes_in: ComputesIn
    """What the forward and the backward pass compute in."""
    reduced: Reduced
    """When ranks would sum their gradients: ``once``, after the last micro-batch (``set_requires_gradient_sync(False)`` or
    ``no_sync()`` before it), or ``each time``, after each of them.
    """
    micro_batches: int
    """Number of micro-batches over which gradients are accumulated."""
    batches: str = ""
    """How the micro-batches were made, in words; empty if none was run."""
    status: Status
    """``ok`` if it was measured; ``nonfinite`` if the gradient has NaN or Inf."""
    reason: str | None = None
    """Why it was not measured, in words."""
    exception: ExceptionInfo | None = None
    """What it raised; ``None`` if it did not."""
    gradient_error: float | None = None
    """rel_l2 of the gradients of all parameters together; ``None`` if it is not finite, or not measured."""
    worst_parameter: str | None = None
    """The parameter with the largest rel_l2, among those whose gradient has at least a thousandth of the norm of all."""
    worst_error: float | None = None
    """Its rel_l2."""
    underflow: float | None = None
    """Share (0 to 1) of the elements that are not zero in fp32 and zero here; ``None`` if no gradient is cast to fp16."""
    overflow: float | None = None
    """Share of the elements that are NaN or Inf here; ``None`` as above."""
