"""Whether a compiler made the output of a run worse. Never imports torch."""

from __future__ import annotations

from typing import Literal

from lowprec_check.schema.base import Struct

FACTOR = 2.0
"""The compiled output may be this many times as far from fp64 as eager's. That of ``torch._dynamo.utils.same``."""

CompilerVerdict = Literal["no-worse", "harmless", "worse"]
"""``harmless``: further than :data:`FACTOR` times, but within a tenth of the tolerance."""


class CompilerCheck(Struct, frozen=True, kw_only=True):
    """The four corners of a compiled run: how far fp32 eager, its own precision in eager mode, and the compiled model are from
    fp64 eager, for the output tensor in which the compiled model does worst. Errors are rel_l2; ``None`` if infinite.
    """

    verdict: CompilerVerdict
    """Whether the compiler made the output worse."""
    tensor: int
    """Which tensor of the output, counted from 0."""
    tensors: int
    """Number of tensors in the output."""
    calls: int
    """Calls, on other inputs each, that the errors are taken over."""
    exact: Literal["fp64", "fp32"]
    """The reference: fp32 if the model cannot run in fp64."""
    fp32_error: float | None
    """Of fp32 in eager mode."""
    eager_error: float | None
    """Of its own precision in eager mode."""
    compiled_error: float | None
    """Of the compiled model."""
    nonfinite: int = 0
    """Values that are NaN or Inf in the compiled output, and neither in eager's nor in fp64's."""
    decisions: int = 0
    """Integers and booleans in the tensor."""
    eager_changed: int = 0
    """Those that differ from fp64's in eager mode."""
    compiled_changed: int = 0
    """Those that differ from fp64's in the compiled model."""
    emulated: CompilerVerdict | None = None
    """The verdict with ``torch._inductor.config.emulate_precision_casts``; ``None`` if it was not tried."""
    culprit: str | None = None
    """What ``torch._inductor.compiler_bisector`` found."""
