"""Why fp32 is no reference, as message and next step of a :class:`~lowprec_check.errors.UsageError`."""

from __future__ import annotations

from lowprec_check.engine.model.inputs import describe_inputs
from lowprec_check.engine.model.plain_run import PlainResult
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.run.messages import Measures
from lowprec_check.engine.run.outcome import JobOutcome


def no_reference(outcome: JobOutcome, budget: float) -> tuple[str, str]:
    """There is no fp32 run: it took too long, or it died."""
    if outcome.ended == "timeout":
        return f"The model did not finish in fp32 within {budget:.0f} s.", "Raise --budget, or give smaller inputs."
    return (
        f"The model crashed in fp32: {outcome.reason}.",
        "Run it by itself first; a scan needs an fp32 run that works.",
    )


def failed_reference(plain: PlainResult, target: Target, device: str) -> tuple[str, str]:
    """The model raises in fp32."""
    error = plain.exception
    assert error is not None
    place = f" in {error.module}" if error.module else ""
    source = f" at {error.source}" if error.source else ""
    shapes = ", ".join(describe_inputs(target.args, target.kwargs)) or "none"
    message = f"The model fails in fp32 on {device}{place}{source}: {error.type}: {error.message}"
    if device != "cpu" and error.type == "NotImplementedError":
        kind = device.partition(":")[0].upper()
        return message, f"This op has no kernel there: try PYTORCH_ENABLE_{kind}_FALLBACK=1, or scan with --device cpu."
    return message, f"Do the inputs fit the model? They are: {shapes}."


def nonfinite_reference(measures: Measures | None) -> tuple[str, str]:
    """The fp32 output has NaN or Inf."""
    where = measures.nonfinite_at if measures else None
    if where is None:
        return "The model's fp32 output has NaN or Inf.", "A weight or an input already holds it: mend that first."
    op, module, source = where
    place = f" in {module}" if module else ""
    line = f" at {source}" if source else ""
    return f"The model's fp32 output has NaN or Inf, first made by {op}{place}{line}.", "Mend that first."


def erratic_reference(error: float) -> tuple[str, str]:
    """Two fp32 runs differ by ``error`` (rel_l2)."""
    return (
        f"Two fp32 runs from one seed and one state differ by {error:.1e}: nothing can be judged against that.",
        "Take clocks, unseeded generators and state outside the model's own attributes out of the forward.",
    )
