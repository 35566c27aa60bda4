"""What the operator table shows beside the packed op calls: sums of a run too long to be packed whole, and what is no op call."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

from lowprec_check.analysis.error_shares import place_shares, trusted_budget
from lowprec_check.report.escape import visible
from lowprec_check.report.html.digits import rounded
from lowprec_check.report.html.module_tree import larger, lineage
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.run_key import Phase
from lowprec_check.schema.scan_result import Run

MOST_SUMS = 12_000
"""Sums (module × op × phase) kept of all runs that are not packed whole; those of the deepest modules are left out."""


def changes_dtype(dtypes: str) -> bool:
    """Whether an op call has another floating dtype out than in, ``f32→bf16``; not ``bf16+f32→bf16+f32`` nor ``→``."""
    before, _, after = dtypes.partition("→")
    return bool(before and after) and set(before.split("+")) != set(after.split("+"))


def pack_operators(run: Run, most_sums: int, *, whole: bool) -> dict[str, Any]:
    """What the table needs of ``run``: whether autocast chose the dtypes, the time of all calls, extra rows.

    If not all op calls are packed, ``whole`` is false, and about ``most_sums`` sums over all of them are added.
    """
    calls = run.op_calls
    times = [time for time in calls.time_ms if time is not None]
    packed: dict[str, Any] = {
        "autocast": run.basis is not None and run.basis.kind == "autocast",
        "time_ms": round(sum(times), 4) if times else None,
        "extras": [extra._asdict() for extra in _extras(run)],
    }
    if not whole:
        packed["sums"] = _sums(run, most_sums)
    return packed


class ExtraRow(NamedTuple):
    """What belongs to an op although no op call holds it: calls without a kernel, or a share of the output error."""

    op: str
    module: str
    phase: str
    source: str
    dtypes: str
    gaps: int = 0
    """Calls without a kernel: of ops refused above dispatch, such as ``torch.fft.rfft``, and of ops that have op calls."""
    share: float | None = None
    """Of the squared output error: that of the rounding of the inputs."""


def _extras(run: Run) -> Iterator[ExtraRow]:
    for gap in run.gaps:
        # In a scan without training, no op call has a phase.
        phase = gap.phase if any(run.op_calls.phase) else ""
        dtypes = "+".join(gap.dtypes)
        yield ExtraRow(*_place(gap.op, gap.module, phase, gap.source, dtypes), gaps=gap.calls)
    if trusted_budget(run) is None:
        return
    held = {(row.module, row.op) for row in run.op_calls.rows() if row.share is not None}
    for (module, op, source), found in place_shares(run).items():
        if (module, op) not in held:
            phase = "forward" if any(run.op_calls.phase) else ""
            yield ExtraRow(*_place(op, module, phase, source, ""), share=found.share)


def _place(op: str, module: str, phase: str, source: str | None, dtypes: str) -> tuple[str, str, str, str, str]:
    return visible(op), visible(module) or "(model)", phase, visible(source or ""), visible(dtypes)


# -- sums over all calls


_Key = tuple[str, str, Phase | None]
"""Module, submodules included; op; phase."""


class OperatorSum:
    """The calls of one op in one module and its submodules."""

    def __init__(self) -> None:
        self.calls = self.timed = self.recast = self.nonfinite = self.nonfinite_calls = 0
        self.time_ms = self.paired_ms = self.reference_ms = 0.0
        self.ratios: list[float] = []
        self.local: float | None = None
        self.accumulated: float | None = None
        self.share: float | None = None
        self.dtypes: Counter[str] = Counter()

    def add(self, row: OpCall) -> None:
        """Count one call."""
        self.calls += 1
        self.dtypes[row.dtypes] += 1
        self.recast += row.recast
        lost = row.introduced_inf + row.introduced_nan
        self.nonfinite += lost
        self.nonfinite_calls += lost > 0
        self.local = larger(self.local, row.local_error)
        self.accumulated = larger(self.accumulated, row.accumulated_error)
        if row.share is not None:
            self.share = (self.share or 0.0) + row.share
        if row.time_ms is None:
            return
        self.timed += 1
        self.time_ms += row.time_ms
        if row.reference_ms:
            self.paired_ms += row.time_ms
            self.reference_ms += row.reference_ms
            self.ratios.append(row.time_ms / row.reference_ms)

    def columns(self, has_share: bool) -> dict[str, Any]:
        """The figures of a row."""
        low, high = quartiles(self.ratios)
        dtypes, _ = self.dtypes.most_common(1)[0]
        return {
            "calls": self.calls,
            "time_ms": rounded(self.time_ms, 6) if self.timed else None,
            "ratio": rounded(self.paired_ms / self.reference_ms, 6) if self.reference_ms else None,
            "low": rounded(low, 6),
            "high": rounded(high, 6),
            "paired": len(self.ratios),
            "local": rounded(self.local, 6),
            "accumulated": rounded(self.accumulated, 6),
            "share": rounded(self.share, 6) if has_share else None,
            "changes": sum(count for dtypes, count in self.dtypes.items() if changes_dtype(dtypes)),
            "recast": self.recast,
            "dtypes": visible(dtypes),
            "others": len(self.dtypes) - 1,
            "nonfinite": self.nonfinite,
            "nonfinite_calls": self.nonfinite_calls,
        }


def quartiles(values: list[float]) -> tuple[float | None, float | None]:
    """The first and third quartile, interpolated between the values; ``None`` of fewer than two."""
    if len(values) < 2:
        return None, None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _sums(run: Run, most: int) -> dict[str, list[Any]]:
    """The sums of the modules closest to the root, whole levels of them, as columns."""
    calls = run.op_calls
    depth = _deepest(set(zip(calls.module, calls.op, calls.phase, strict=True)), most)
    above = {module: lineage(module)[: depth + 1] for module in set(calls.module)}
    found: dict[_Key, OperatorSum] = {}
    for row in calls.rows():
        for module in above[row.module]:
            key = module, row.op, row.phase
            known = found.get(key)
            if known is None:
                known = found[key] = OperatorSum()
            known.add(row)
    columns: dict[str, list[Any]] = {}
    has_share = trusted_budget(run) is not None
    for (module, op, phase), total in found.items():
        names = {"module": visible(module) or None, "op": visible(op), "phase": phase or ""}
        for name, value in (names | total.columns(has_share)).items():
            columns.setdefault(name, []).append(value)
    return columns


def _deepest(keys: set[_Key], most: int) -> int:
    """The number of levels of modules below the model that have at most ``most`` sums with it; 0 if even one has more."""
    by_depth = Counter(
        len(path.split(".")) if path else 0
        for path, _, _ in {(path, op, phase) for module, op, phase in keys for path in lineage(module)}
    )
    totals = accumulate(by_depth[depth] for depth in range(max(by_depth, default=0) + 1))
    return max(0, sum(total <= most for total in totals) - 1)
