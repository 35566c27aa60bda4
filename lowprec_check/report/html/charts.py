"""The data of the charts, packed for the page: columns, with strings replaced by numbers, compressed."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Sequence
from typing import Any

import msgspec

from lowprec_check.analysis.error_origin import Origin, origin
from lowprec_check.analysis.error_shares import fails_by_error, trusted_budget
from lowprec_check.report.escape import visible
from lowprec_check.report.html import operator_table
from lowprec_check.report.html.digits import rounded
from lowprec_check.report.html.error_levels import BOUNDS, LEVEL_TEXTS
from lowprec_check.report.html.ribbon import pack_magnitudes
from lowprec_check.report.html.strip import pack_strip
from lowprec_check.report.summary import label
from lowprec_check.schema.base import encoded
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.precisions import FP32, FloatFormat, formats
from lowprec_check.schema.scan_result import Run

MOST_CALLS = 20_000
"""Op calls drawn per run; of a longer run, the worst of each segment."""

MOST_CALLS_IN_ALL = 160_000

EXACT_CALLS = 40_000
"""Up to this number of op calls in all, figures have six digits, so that a sum on the page is that of the saved JSON."""

_TEXTS = ("op", "module", "source", "dtypes", "shape")


def limits() -> dict[str, dict[str, float]]:
    """The smallest subnormal, smallest normal and largest number of each format."""
    return {
        known.short: {"subnormal": known.smallest_subnormal, "normal": known.smallest_normal, "max": known.largest}
        for known in formats()
    }


def format_of(run: Run) -> FloatFormat:
    """The narrowest format of a run; fp32 for a precision that this installation does not know."""
    return run.basis.format if run.basis else FP32


def pack(runs: Sequence[Run]) -> str:
    """Op calls and ranges of ``runs`` as base64 of gzipped JSON."""
    limit = min(MOST_CALLS, MOST_CALLS_IN_ALL // max(1, len(runs)))
    numbers: dict[str, dict[str, int]] = {name: {} for name in _TEXTS}
    digits = 6 if sum(len(run.op_calls) for run in runs) <= EXACT_CALLS else 3
    packed = [_run(run, limit, numbers, digits) for run in runs]
    for run, found in zip(runs, packed, strict=True):
        whole = found["total"] == len(found["calls"]["index"])
        found["operators"] = operator_table.pack_operators(run, operator_table.MOST_SUMS // len(runs), whole=whole)
    strings = {name: list(known) for name, known in numbers.items()}
    data = encoded(
        {"strings": strings, "runs": packed, "limits": limits(), "levels": BOUNDS, "level_texts": LEVEL_TEXTS},
        msgspec.json.encode,
    )
    return base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()


def _run(run: Run, limit: int, numbers: dict[str, dict[str, int]], digits: int) -> dict[str, Any]:
    rows = list(run.op_calls.rows())
    found = origin(run)
    kept = _thin(rows, limit, found.position if found else -1)
    columns: dict[str, Any] = {"index": kept}
    for name in _TEXTS:
        column, known = getattr(run.op_calls, name), numbers[name]
        columns[name] = [known.setdefault(visible(column[index] or ""), len(known)) for index in kept]
    for name in ("local_error", "accumulated_error", "absmax", "time_ms", "reference_ms"):
        column = getattr(run.op_calls, name)
        columns[name] = [rounded(column[index], digits) for index in kept]
    shares = run.op_calls.share if trusted_budget(run) else [None] * len(rows)
    columns["share"] = [rounded(shares[index], digits) for index in kept] if any(shares) else []
    if any(run.op_calls.phase):
        columns["phase"] = [rows[index].phase for index in kept]
    columns["nonfinite"] = [rows[index].introduced_inf + rows[index].introduced_nan for index in kept]
    columns["recast"] = [rows[index].recast for index in kept]
    columns["rescued"] = [int(rows[index].outcome == "rescued") for index in kept]
    names = numbers["module"]

    def number(name: str) -> int:
        return names.setdefault(name, len(names))

    return {
        "label": label(run),
        "format": format_of(run).short,
        "tolerance": run.tolerance,
        "roundoff": run.basis.format.roundoff if run.basis else None,
        "total": len(rows),
        "origin": _origin(found, run),
        "calls": columns,
        "ranges": _ranges(rows),
        "strip": pack_strip(run, number),
        "magnitudes": pack_magnitudes(run, number),
    }


def _origin(found: Origin | None, run: Run) -> dict[str, Any] | None:
    if found is None:
        return None
    calm = not fails_by_error(run)
    return {"call": found.position, "title": found.title, "sentence": found.sentence(), "calm": calm}


def _thin(rows: list[OpCall], limit: int, origin_index: int) -> list[int]:
    """Indices to draw: all, or the worst of each segment and the one that is marked."""
    if len(rows) <= limit:
        return list(range(len(rows)))
    size = -(-len(rows) // (limit - 1))
    kept = {
        max(range(start, min(start + size, len(rows))), key=lambda i: _weight(rows[i]))
        for start in range(0, len(rows), size)
    }
    return sorted(kept | ({origin_index} if origin_index >= 0 else set()))


def _weight(row: OpCall) -> tuple[int, float]:
    return row.introduced_inf + row.introduced_nan, row.accumulated_error or 0.0


_NO_RANGE = {"low": None, "high": 0.0, "flushed": 0.0, "small": 0.0, "calls": 0, "overflow": 0}


def _ranges(rows: list[OpCall]) -> dict[str, list[Any]]:
    """Per module, in the order of execution: typical and largest magnitude of its outputs, shares flushed and subnormal."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if not row.absmax and not row.rms:
            continue
        known = found.setdefault(row.module, dict(_NO_RANGE))
        known["high"] = max(known["high"], row.absmax or 0.0)
        typical = row.rms or row.absmax
        known["low"] = typical if known["low"] is None else min(known["low"], typical)
        known["flushed"] = max(known["flushed"], row.flushed or 0.0)
        known["small"] = max(known["small"], row.subnormal or 0.0)
        known["overflow"] += row.introduced_inf
        known["calls"] += 1
    columns: dict[str, list[Any]] = {"module": [visible(module) or "(model)" for module in found]}
    for name in _NO_RANGE:
        columns[name] = [rounded(known[name]) for known in found.values()]
    return columns
