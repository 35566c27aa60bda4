"""What else the scan tried: advice must not name a dtype or a precision that fails in the same scan. Never imports torch."""

from __future__ import annotations

from collections.abc import Collection

from lowprec_check.analysis.rules.registry import uses_autocast
from lowprec_check.schema.precisions import LOW_FORMATS, FloatFormat
from lowprec_check.schema.scan_result import Gap, Run, ScanResult


def or_autocast(gap: Gap, run: Run, result: ScanResult) -> str:
    """``, or use autocast`` if the op of ``gap`` runs under autocast in this scan; empty if it fails there too."""
    if uses_autocast(run):
        return ""
    tried = [other for other in _without_plan(result) if uses_autocast(other) and other.status != "skipped"]
    if not tried:
        return ", or try autocast"
    passing = [other for other in tried if _runs(gap, other)]
    same_format = [other for other in tried if other.basis and run.basis and other.basis.format == run.basis.format]
    if any(other in passing for other in same_format):
        return ", or use autocast"
    return f", or use {passing[0].precision}" if passing else ""


def wider_range(run: Run, result: ScanResult) -> str:
    """The advice for a value that the run's format cannot hold; a format with more range only if it passes or was not tried."""
    advice = "keep this module in fp32"
    if run.basis is None:
        return advice
    wider = [known for known in LOW_FORMATS if known.max_exponent > run.basis.format.max_exponent]
    tried = [other for known in wider for other in _in_format(result, known)]
    passing = next((other.precision for other in tried if other.status == "ok"), None)
    if passing is not None:
        return f"{advice}, or use {passing}, which passes"
    return advice if tried or not wider else f"{advice}, or try {wider[0].short}, which has a larger range"


def passing_elsewhere(run: Run, result: ScanResult) -> str:
    """``, or use autocast-bf16, which passes``: a format with more range that passes in this scan, autocast first; else empty."""
    if run.basis is None:
        return ""
    wider = [known for known in LOW_FORMATS if known.max_exponent > run.basis.format.max_exponent]
    passing = [other for known in wider for other in _in_format(result, known) if other.status == "ok"]
    best = min(passing, key=lambda other: not uses_autocast(other), default=None)
    return f", or use {best.precision}, which passes" if best is not None else ""


def faster(run: Run, result: ScanResult, slow_in: Collection[FloatFormat]) -> str:
    """The advice for an op that is slow in ``run``, and in runs of the formats ``slow_in``: by what the device accelerates."""
    keep = "keep the modules with this op in fp32: lowprec-check plan"
    accelerated = {known: result.environment.get(f"{known.short}_accelerated") for known in LOW_FORMATS}
    here = run.basis.format if run.basis else None
    if here is not None and accelerated.get(here):
        return f"the device accelerates {here.short}, but not this op; {keep}"
    for known, yes in accelerated.items():
        tried = _in_format(result, known)
        if yes and known not in slow_in and (not tried or any(other.status == "ok" for other in tried)):
            return f"use {known.short}, which this device accelerates"
    if all(yes is None for yes in accelerated.values()):
        return f"use a dtype that the device accelerates, or {keep}"
    return keep


def planning_command(result: ScanResult) -> str:
    """The command that searches for modules to keep in fp32; ``plan`` needs the device."""
    return "lowprec-check plan" if result.prediction is None else "lowprec-check scan --plan"


def _without_plan(result: ScanResult) -> list[Run]:
    return [run for run in result.runs if run.is_low and run.base is None]


def _in_format(result: ScanResult, wanted: FloatFormat) -> list[Run]:
    """The runs that were made in a format, without plans."""
    found = [run for run in _without_plan(result) if run.basis is not None and run.basis.format == wanted]
    return [run for run in found if run.status != "skipped"]


def _runs(gap: Gap, run: Run) -> bool:
    """Whether ``run`` reached the op of ``gap``, and neither that nor a function at its line, which may call it, needed help."""
    place = (gap.module, gap.source)
    fails = any(
        other.op == gap.op or (other.layer == "function" and (other.module, other.source) == place)
        for other in run.gaps
    )
    return not fails and (run.complete or gap.op in run.op_calls.op)
