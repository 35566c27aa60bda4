"""The numbers that an op computes with, and whether a low precision applies to them."""

from __future__ import annotations

from typing import Literal

from lowprec_check.catalog.records import Dtype, Mode

Numbers = Literal["integer", "complex", "float64", "floating"]
"""``integer``: integers and booleans; ``floating``: floating-point numbers other than float64, or both."""
NUMBERS: tuple[Numbers, ...] = ("integer", "complex", "float64", "floating")
"""From weakest to strongest: an op that was called with several counts as the strongest, since more precisions apply to it."""

COMPLEX_OPERATORS = frozenset({"imag", "istft", "nn.functional.silu.complex", "view_as_real"})
"""Operators of the catalog whose samples are complex: they stay complex64 in bfloat16."""


def stronger(one: Numbers, other: Numbers) -> Numbers:
    """The stronger of two."""
    return max(one, other, key=NUMBERS.index)


def why_not_applicable(numbers: Numbers, dtype: Dtype, mode: Mode = "forward") -> str | None:
    """Why a low precision changes nothing for an op that computes with ``numbers``; ``None`` if it applies.

    A cast to half makes complex numbers complex32. Autocast casts neither complex numbers nor float64.
    """
    under_autocast = mode.startswith("autocast")
    if numbers == "integer":
        return "only integers and booleans"
    if numbers == "complex" and under_autocast:
        return "only complex numbers, which autocast does not cast"
    if numbers == "complex" and dtype == "bfloat16":
        return "only complex numbers, and there is no complex bfloat16 dtype"
    if numbers == "float64" and under_autocast:
        return "only float64, which autocast does not cast"
    return None


def why_operator_not_applicable(op: str, dtype: Dtype) -> str | None:
    """The same for an operator of the catalog, whose samples were cast, under autocast too."""
    return why_not_applicable("complex", dtype) if op in COMPLEX_OPERATORS and dtype != "float32" else None
