"""The range of each op at one place, over all its calls and over batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lowprec_check.schema.measures import PlaceRange
from lowprec_check.schema.op_calls import OpCall, OpCalls


class _Range(NamedTuple):
    """The range on one batch."""

    largest: float | None = None
    overflows: int = 0
    flushed: float | None = None
    subnormal: float | None = None

    def with_call(self, row: OpCall) -> _Range:
        """The range with that of one more call."""
        return _Range(
            _larger(self.largest, row.absmax),
            self.overflows + row.introduced_inf,
            _larger(self.flushed, row.flushed),
            _larger(self.subnormal, row.subnormal),
        )


def _larger(one: float | None, other: float | None) -> float | None:
    return max((value for value in (one, other) if value is not None), default=None)


def ranges_by_place(batches: Sequence[OpCalls]) -> list[PlaceRange]:
    """The ranges in the forward passes of one run on one or more batches, in the order of the first calls."""
    found: dict[tuple[str, str, str | None, str], list[_Range]] = {}
    for number, op_calls in enumerate(batches):
        for row in op_calls.rows():
            if row.absmax is not None and row.is_forward:
                place = found.setdefault((row.module, row.op, row.source, row.dtypes), [_Range()] * len(batches))
                place[number] = place[number].with_call(row)
    return [
        PlaceRange(
            module=module,
            op=op,
            source=source,
            dtypes=dtypes,
            largest=[known.largest for known in ranges],
            overflows=[known.overflows for known in ranges],
            flushed=[known.flushed for known in ranges],
            subnormal=[known.subnormal for known in ranges],
        )
        for (module, op, source, dtypes), ranges in found.items()
    ]
