"""Parts of a result as columns, which pandas, Polars and others take as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import msgspec

from lowprec_check.schema.findings import Diagnostic, Gap
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
        return _transposed([dict(_flat(run, type(run))) for run in result.runs])
    if part == "op_calls":
        # They are columns already; there may be 100,000 rows in each run.
        keys = {name: [getattr(run, name) for run in result.runs for _ in range(len(run.op_calls))] for name in _KEY}
        calls = [run.op_calls for run in result.runs]
        names = OpCall.__struct_fields__
        return keys | {name: [value for columns in calls for value in getattr(columns, name)] for name in names}
    if part == "gaps":
        keyed = [({name: getattr(run, name) for name in _KEY}, gap) for run in result.runs for gap in run.gaps]
        return _transposed([key | msgspec.structs.asdict(gap) for key, gap in keyed], _KEY + Gap.__struct_fields__)
    if part == "diagnostics":
        rows = [msgspec.structs.asdict(diagnostic) for diagnostic in result.diagnostics]
        return _transposed(rows, Diagnostic.__struct_fields__)
    raise ValueError(f"unknown part {part!r}; known are {', '.join(get_args(Part))}")


def _flat(value: Any, kind: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Numbers and texts in ``value`` by dotted name, ``None`` too; no lists and no objects."""
    for field in msgspec.structs.fields(kind):
        inner, kinds = getattr(value, field.name, None), (field.type, *get_args(field.type))
        if isinstance(inner, (list, dict, tuple)) or any(get_origin(kind) in (list, dict, tuple) for kind in kinds):
            continue
        # A column is there whether the run has the part or not: its type says so.
        within = next((kind for kind in kinds if isinstance(kind, msgspec.StructMeta)), None)
        if within is not None:
            yield from _flat(inner, within, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, inner


def _transposed(rows: list[dict[str, Any]], names: Sequence[str] = ()) -> Columns:
    """A column for each of ``names`` and each key, in order; ``None`` where a row lacks it."""
    all_names = dict.fromkeys([*names, *(name for row in rows for name in row)])
    return {name: [row.get(name) for row in rows] for name in all_names}
