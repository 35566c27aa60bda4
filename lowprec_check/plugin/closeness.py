"""How far an output is from its reference, as something to assert."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from lowprec_check.numerics import compare_outputs
from lowprec_check.plain import output_tensors
from lowprec_check.results import ErrorStats


class Closeness(NamedTuple):
    """True where the output is close enough; its ``repr`` says how close it is."""

    passed: bool
    error: ErrorStats
    tolerance: float
    said: str

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        return self.said


def closeness(y: Any, reference: Any, tolerance: float, precision: str) -> Closeness:
    """Compare as a scan does: rel_l2, the worst over the floating leaves; NaN and Inf are never close."""
    outputs, references = ([tensor.cpu() for tensor in output_tensors(value)] for value in (y, reference))
    compared = compare_outputs(outputs, references)
    passed = not compared.nonfinite and compared.rel_l2 <= tolerance and bool(references)
    return Closeness(passed, compared.error, tolerance, _in_words(compared, tolerance, precision, passed, references))


def _in_words(compared: Any, tolerance: float, precision: str, passed: bool, references: list[Tensor]) -> str:
    if not references:
        return f"<{precision}: nothing to compare: the reference holds no tensor>"
    if compared.nonfinite:
        return f"<{precision}: NaN or Inf where the reference is finite>"
    if compared.note:
        return f"<{precision}: {compared.note}>"
    sign = "within" if passed else "over"
    return (
        f"<{precision}: error {compared.rel_l2:.1e} is {sign} the tolerance {tolerance:.0e} (rel_l2; "
        f"max_abs {compared.error.max_abs:.1e})>"
    )
