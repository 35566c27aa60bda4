"""How a backend compares with eager mode: errors, changed inputs, what it says and changes."""

from __future__ import annotations

from typing import Literal

from lowprec_check.schema.base import Struct
from lowprec_check.schema.verdict import Status

# -- Whether a compiler made the output of a run worse

FACTOR = 2.0
"""Times eager's distance from fp64 that passes, as in ``torch._dynamo.utils.same``."""

CompilerVerdict = Literal["no-worse", "harmless", "worse"]
"""``harmless``: further than :data:`FACTOR` times, but within a tenth of the tolerance."""


class CompilerCheck(Struct, frozen=True, kw_only=True):
    """The four corners of a compiled run: how far fp32 eager, its own precision in eager mode, and
    the compiled model are from fp64 eager, for the output tensor in which the compiled model does
    worst. Errors are rel_l2; ``None`` if infinite.
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
    """The verdict with ``torch._inductor.config.emulate_precision_casts``, if it was tried."""
    culprit: str | None = None
    """What ``torch._inductor.compiler_bisector`` found."""


# -- What a backend does on other inputs, to what it is given, and while it compiles

InputChange = Literal["negated", "scaled", "reversed", "larger-batch", "resampled"]

INPUT_CHANGES: dict[str, str] = {
    "negated": "negated inputs",
    "scaled": "inputs multiplied by 4",
    "reversed": "inputs in reverse order",
    "larger-batch": "a larger batch",
    "resampled": "inputs with resampled values",
}
"""By name, on what a backend is compared with eager mode besides the inputs of the scan."""


class ChangedInputs(Struct, frozen=True, kw_only=True):
    """A run on a backend, on changed inputs, compared with eager mode in the same precision."""

    change: InputChange
    """How they differ from those of the scan."""
    status: Status
    """``ok``: within the tolerance, or at most :data:`FACTOR` times as far from fp64 as eager."""
    error: float | None = None
    """rel_l2, or the share of integers that differ from eager's; ``None`` if not finite."""
    eager_error: float | None = None
    """Of eager mode against fp64, if the backend is not within the tolerance of it."""


class StateChanged(UserWarning):
    """Preparing the model for a backend has changed what the model keeps between calls."""


class CompilerRemark(Struct, frozen=True, kw_only=True):
    """What a compiler said about a line of the model."""

    kind: Literal["warning", "graph-break", "state"]
    """``graph-break``: Dynamo compiled what is before and after the line separately; ``state``:
    preparing the model changed what it keeps between calls.
    """
    text: str
    """The first sentence of the warning, or the reason of the graph break."""
    source: str | None = None
    """``model.py:41``."""
    count: int = 1
    """How often."""


class BackendCheck(Struct, frozen=True, kw_only=True):
    """What a backend does otherwise than the model in eager mode in the same precision."""

    inputs: list[ChangedInputs] = []
    """The changed inputs that it was tried on."""
    reason: str | None = None
    """Why it was not tried on more."""
    changed: list[str] = []
    """Inputs and buffers, ``buffer bn.running_mean``, that two calls leave otherwise than eager."""
    dtypes: list[tuple[str, str]] = []
    """The dtypes of output tensors in eager mode and on the backend, where they differ."""
    remarks: list[CompilerRemark] = []
    """Warnings and graph breaks, in the order in which they occurred."""
