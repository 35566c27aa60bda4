"""Parts of a result as columns, which pandas, Polars and others take as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from lowprec_check.schema.op_calls import OpCall

if TYPE_CHECKING:
    from lowprec_check.schema.scan_result import ScanResult

Part = Literal["runs", "op_calls", "gaps", "diagnostics"]
Columns = dict[str, list[Any]]
"""Lists of equal length, by the name of the column."""

_KEY = ("precision", "backend", "memory_format")


def columns_of(result: ScanResult, part: Part) -> Columns:
    """All rows of ``part``: those of one run after those of another, with the key of the run.

    Raises ``ValueError`` for another part.
    """
    if part == "runs":
        return _transposed([dict(_flat(run)) for run in result.runs])
    if part == "op_calls":
        keys = {name: [getattr(run, name) for run in result.runs for _ in range(len(run.op_calls))] for name in _KEY}
        calls = [run.op_calls for run in result.runs]
        names = OpCall.__struct_fields__
        return keys | {name: [value for each in calls for value in getattr(each, name)] for name in names}
    if part == "gaps":
        keyed = [({name: getattr(run, name) for name in _KEY}, gap) for run in result.runs for gap in run.gaps]
        return _transposed([key | msgspec.structs.asdict(gap) for key, gap in keyed])
    if part == "diagnostics":
        return _transposed([msgspec.structs.asdict(diagnostic) for diagnostic in result.diagnostics])
    raise ValueError(f"unknown part {part!r}; known are {', '.join(get_args(Part))}")


def _flat(value: msgspec.Struct, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every number and text in ``value``, by its dotted name; lists and objects are left out."""
    for name in value.__struct_fields__:
        inner = getattr(value, name)
        if isinstance(inner, msgspec.Struct):
            yield from _flat(inner, f"{prefix}{name}.")
        elif not isinstance(inner, (list, dict, tuple)):
            yield prefix + name, inner


def _transposed(rows: list[dict[str, Any]]) -> Columns:
    """A column for each key of any row, in the order in which they first appear; ``None`` where a row lacks it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}
