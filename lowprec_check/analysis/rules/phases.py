"""The parts of a training step, in findings. Never imports torch."""

from __future__ import annotations

from lowprec_check.schema.run_key import Phase


def in_phase(phase: Phase | None) -> str:
    """``in the backward pass: ``, before a message; empty for the forward pass."""
    if phase == "backward":
        return "in the backward pass: "
    return "in the optimizer step: " if phase == "optimizer" else ""
