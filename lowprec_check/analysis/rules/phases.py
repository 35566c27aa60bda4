"""The parts of a training step, in findings: where an op ran that no line of the model calls, and what to do. Never imports torch."""

from __future__ import annotations

from lowprec_check.schema.run_key import Phase


def in_phase(phase: Phase | None) -> str:
    """``in the backward pass: ``, before a message; empty for the forward pass."""
    if phase == "backward":
        return "in the backward pass: "
    return "in the optimizer step: " if phase == "optimizer" else ""


def advice_in(phase: Phase | None) -> str | None:
    """What to do about an op outside the forward pass; ``None`` for one inside."""
    if phase == "backward":
        return "compute the op of the forward pass in fp32, on x.float()"
    return "keep the weights and the optimizer's state in fp32: fp32 master weights" if phase == "optimizer" else None
