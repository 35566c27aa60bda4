"""What to do about a finding: what ran and passed in the same scan, else something to try."""

from __future__ import annotations

from collections.abc import Collection

from lowprec_check.analysis.blamed_modules import is_confirmed, is_disproved
from lowprec_check.analysis.rules.registry import uses_autocast
from lowprec_check.schema.findings import Recommendation
from lowprec_check.schema.module_paths import is_inside
from lowprec_check.schema.precisions import LOW_FORMATS, FloatFormat
from lowprec_check.schema.run_key import Phase
from lowprec_check.schema.scan_result import Gap, Run, ScanResult
from lowprec_check.schema.statements import Sentence, chained, say


def advice_in(phase: Phase | None) -> str | None:
    """What to do about an op outside the forward pass; ``None`` for one inside."""
    if phase == "backward":
        return "compute the op of the forward pass in fp32, on x.float()"
    return "keep the weights and the optimizer's state in fp32: fp32 master weights" if phase == "optimizer" else None


def keep_in_fp32(run: Run, result: ScanResult, module: str) -> Sentence:
    """The modules that a plan of this run keeps, or that an ablation kept with success; else the one of the op, to try."""
    plan, ablation = result.plan, run.ablation
    made = (run.precision, run.backend, run.memory_format)
    if plan is not None and plan.keep_fp32 and (plan.base, plan.backend, plan.memory_format) == made:
        return say("keep {modules:modules} in fp32, as the plan does", modules=plan.keep_fp32)
    if ablation is not None and is_confirmed(run) and _is_in(module, ablation.keep_fp32):
        kept = f"keep {{modules:modules}} in fp32, with which the error is {{error:error}} ({run.evidence})"
        return say(kept, modules=ablation.keep_fp32, error=ablation.rel_l2)
    return say("try this module in fp32" if module else "try this op in fp32")


def disproof(run: Run, module: str) -> Sentence | None:
    """What happened with ``module`` in fp32, if that did not help."""
    ablation = run.ablation
    if ablation is None or not _is_in(module, ablation.keep_fp32):
        return None
    if ablation.status == run.status == "nonfinite":
        return say("with {modules:modules} in fp32 the output still has NaN or Inf", modules=ablation.keep_fp32)
    if not is_disproved(run):
        return None
    return say(
        "with {modules:modules} in fp32 the error is still {error:error}",
        modules=ablation.keep_fp32,
        error=ablation.rel_l2,
    )


def _is_in(module: str, kept: Collection[str]) -> bool:
    return any(is_inside(module, path) for path in kept)


def or_autocast(gap: Gap, run: Run, result: ScanResult) -> str:
    """``, or use autocast, where it runs`` of the run's own dtype in this scan, else of the one named; empty if the op fails there too."""
    if uses_autocast(run):
        return ""
    tried = [other for other in _without_plan(result) if uses_autocast(other) and other.status != "skipped"]
    if not tried:
        return ", or try autocast"
    found = [other for other in tried if _runs(gap, other)]
    if any(_format_of(other) == _format_of(run) for other in found):
        return ", or use autocast, where it runs"
    return f", or use {found[0].key.label}, where it runs" if found else ""


def wider_range(run: Run, result: ScanResult, module: str) -> Sentence:
    """The advice for a value that the run's format cannot hold; a format with more range only if it passes or was not tried."""
    wider, passing = _wider(run), passing_elsewhere(run, result)
    if passing is None and wider and not any(_in_format(result, known) for known in wider):
        passing = say("try {dtype:text}, which has a larger range", dtype=wider[0].short)
    return chained(keep_in_fp32(run, result, module), passing, between=", or ")


def passing_elsewhere(run: Run, result: ScanResult) -> Sentence | None:
    """``use autocast-bf16, which passes``: a format with more range that passes in this scan, autocast first."""
    passing = [other for known in _wider(run) for other in _in_format(result, known) if other.status == "ok"]
    best = min(passing, key=lambda other: not uses_autocast(other), default=None)
    return say("use {run:text}, which passes", run=best.key.label) if best is not None else None


def _wider(run: Run) -> list[FloatFormat]:
    here = _format_of(run)
    return [known for known in LOW_FORMATS if here is not None and known.max_exponent > here.max_exponent]


def faster(run: Run, result: ScanResult, slow_in: Collection[FloatFormat]) -> str:
    """The advice for an op that is slow in ``run``, and in runs of the formats ``slow_in``: by what the device accelerates."""
    keep = "try the modules with this op in fp32: lowprec-check plan"
    accelerated = {known: result.environment.get(f"{known.short}_accelerated") for known in LOW_FORMATS}
    here = _format_of(run)
    if here is not None and accelerated.get(here):
        return f"the device accelerates {here.short}, but not this op; {keep}"
    for known, yes in accelerated.items():
        tried = _in_format(result, known)
        if yes and known not in slow_in and (not tried or any(other.status == "ok" for other in tried)):
            return f"try {known.short}, which this device accelerates"
    if all(yes is None for yes in accelerated.values()):
        return f"use a dtype that the device accelerates, or {keep}"
    return keep


def recommended_instead(run: Run, result: ScanResult) -> Recommendation | None:
    """What the scan recommends, if that passed and is not ``run`` as it is."""
    best = result.recommendation
    if best is None:
        return None
    same = (best.precision, best.backend, best.memory_format) == (run.precision, run.backend, run.memory_format)
    is_itself = same and not best.keep_fp32 and best.way in (None, "plain")
    return None if is_itself or not any(other.status == "ok" for other in result.runs if other.is_low) else best


def planning_command(result: ScanResult) -> str:
    """The command that searches for modules to keep in fp32; ``plan`` needs the device."""
    return "lowprec-check plan" if result.prediction is None else "lowprec-check scan --plan"


def _format_of(run: Run) -> FloatFormat | None:
    return run.basis.format if run.basis else None


def _without_plan(result: ScanResult) -> list[Run]:
    return [run for run in result.runs if run.is_low and run.base is None]


def _in_format(result: ScanResult, wanted: FloatFormat) -> list[Run]:
    """The runs that were made in a format, without plans."""
    return [run for run in _without_plan(result) if _format_of(run) == wanted and run.status != "skipped"]


def _runs(gap: Gap, run: Run) -> bool:
    """Whether ``run`` reached the op of ``gap``, and neither that nor a function at its line, which may call it, needed help."""
    place = (gap.module, gap.source)
    fails = any(
        other.op == gap.op or (other.layer == "function" and (other.module, other.source) == place)
        for other in run.gaps
    )
    return not fails and (run.complete or gap.op in run.op_calls.op)
