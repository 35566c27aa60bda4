"""Figures with as many digits as a chart or a table needs, so that the file stays small."""

from __future__ import annotations


def rounded(value: float | None, digits: int = 3) -> float | None:
    """``value`` with ``digits`` significant digits."""
    return None if value is None else float(f"{value:.{digits}g}")
