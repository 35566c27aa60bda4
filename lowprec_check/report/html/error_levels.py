"""The colours of errors: the level of an error by its ratio to the tolerance of the run, and the text of each level."""

from __future__ import annotations

from bisect import bisect_left

BOUNDS = (1e-3, 1e-2, 1e-1, 1 / 3, 1.0, 10.0)
"""Upper bounds of the levels 1 to 6, as parts of the tolerance. Above the last it is level 7."""

WITHIN = 5
"""The highest level of an error within the tolerance: the colours of higher levels are used for nothing else."""

NONFINITE = 8
"""The level of Inf and NaN, the highest."""

LEVEL_TEXTS = ("≤ 1/1000", "≤ 1/100", "≤ 1/10", "≤ 1/3", "≤ tolerance", "> tolerance", "> 10 times", "Inf/NaN")
"""What the levels 1 to 8 mean, for a legend."""


def error_level(error: float | None, tolerance: float | None, *, is_nonfinite: bool = False) -> int:
    """The level, 0 to 8, of the colour of ``error``, a rel_l2, in a run with this ``tolerance``.

    0 (no colour) for an error that is not known or exactly 0, and for a run without a tolerance.
    """
    if is_nonfinite:
        return NONFINITE
    if not error or not tolerance:
        return 0
    return 1 + bisect_left([bound * tolerance for bound in BOUNDS], error)


def ratio_text(error: float | None, tolerance: float | None) -> str:
    """``0.31 × tolerance``; empty if either is not known."""
    return "" if error is None or not tolerance else f"{error / tolerance:.2g} × tolerance"
