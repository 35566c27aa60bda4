"""The recommendation: the best run that passed, and why the others were not chosen. Never imports torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from lowprec_check.analysis.run_summary import (
    NOISE,
    SHORT_MS,
    candidates,
    error_of,
    error_phrase,
    is_cast,
    judged_by,
    latency_of,
    missing_kernels,
    some,
    speedup,
    status_reason,
)
from lowprec_check.analysis.snippet import snippet
from lowprec_check.schema.registry import choices
from lowprec_check.schema.run_key import CONTIGUOUS, EAGER, PLAN
from lowprec_check.schema.scan_result import ModelInfo, Recommendation, Run

LONG_SETUP = 1.0
"""Seconds of set-up that the reason names."""


def recommend(
    runs: Sequence[Run], model: ModelInfo, environment: Mapping[str, Any] = MappingProxyType({})
) -> Recommendation | None:
    """The fastest run that passed; ``None`` if none passed. Among equally fast ones the one with the least set-up (eager,
    contiguous), then the most accurate.

    If only fp32 was run, on other backends, the best of those. If the output of no run could be compared, the fastest that
    ran; its reason says so.

    If a cast of the whole model lacks kernels in any dtype, autocast is preferred to every such cast: it runs these ops
    in fp32, and other inputs may need a kernel that the other dtype lacks.

    ``environment`` is that of the scan; the reason says if the device does not accelerate the recommended dtype.
    """
    low = candidates(runs)
    passed = [run for run in low if run.status == "ok"] or [run for run in low if run.status == "unjudged"]
    if not passed:
        return None
    if any(missing_kernels(run) for run in runs if is_cast(run)):
        passed = [run for run in passed if not is_cast(run)] or passed
    fastest = min(latency_of(run) or float("inf") for run in passed)
    equals = [run for run in passed if (latency_of(run) or float("inf")) <= max(NOISE * fastest, SHORT_MS)]
    best = min(equals, key=_preference)
    return Recommendation(
        precision=best.base or best.precision,
        backend=best.backend,
        memory_format=best.memory_format,
        keep_fp32=best.keep_fp32,
        evidence=best.evidence,
        reason=_reason(best, runs, environment),
        code=snippet(best.key._replace(precision=best.base or best.precision), model, best.keep_fp32, best.untied),
        speedup=speedup(best, runs),
        rel_l2=best.output_error.rel_l2 if best.output_error else None,
    )


def _preference(run: Run) -> tuple[bool, bool, float, float]:
    """For sorting equally fast runs: a compiler takes time to set up, and may fail on other inputs."""
    latency = latency_of(run) or float("inf")
    return run.backend != EAGER, run.memory_format != CONTIGUOUS, error_of(run), latency


def _reason(best: Run, runs: Sequence[Run], environment: Mapping[str, Any]) -> str:
    short = _is_short(best)
    ratio = speedup(best, runs)
    slow = _not_accelerated(best, environment) if short or (ratio is not None and ratio < NOISE) else ""
    speed = f" (too short to compare times{slow})" if short else _speed(ratio) + slow
    chosen_by_time = "" if short or best.status == "ok" else "; the choice rests on speed only"
    parts = [f"{_verdict(best)}{chosen_by_time}, measured here{speed}."]
    if (best.setup_seconds or 0.0) >= LONG_SETUP:
        parts.append(f"Setting it up took {best.setup_seconds:.1f} s.")
    if best.keep_fp32:
        parts.append(f"Kept in fp32: {some(best.keep_fp32)}.")
    parts += _faster(best, runs)
    why = defaultdict(list)
    for run in candidates(runs):
        if run.key != best.key and run.precision != PLAN and run.status not in ("ok", "skipped", best.status):
            why[status_reason(run)].append(run.key.label)
    parts += [f"Not {choices(names)}: {_sentence(reason)}" for reason, names in why.items()]
    return " ".join(parts)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "…")) else f"{text}."


def _faster(best: Run, runs: Sequence[Run]) -> Iterator[str]:
    """Which runs passed and are faster than the recommended one by more than noise."""
    others = [run for run in runs if run.status == "ok" and not run.is_reference]
    faster = [run for run in others if NOISE * (latency_of(run) or 0.0) < (latency_of(best) or 0.0)]
    casts, fp32 = [run.key.label for run in faster if is_cast(run)], [run.key.label for run in faster if not run.is_low]
    if fp32 and not _is_short(best):
        yield f"{choices(fp32, 'and')} {'is' if len(fp32) == 1 else 'are'} faster."
    if casts and not is_cast(best) and any(missing_kernels(run) for run in runs if is_cast(run)):
        verb = "is" if len(casts) == 1 else "are"
        yield f"{' and '.join(casts)} {verb} faster but less safe: some ops have no kernel in another dtype."


def _is_short(run: Run) -> bool:
    return (latency_of(run) or SHORT_MS) < SHORT_MS


def _not_accelerated(best: Run, environment: Mapping[str, Any]) -> str:
    """``; this device does not accelerate fp16``, if that is known."""
    short = best.basis.format.short if best.basis else ""
    return f"; this device does not accelerate {short}" if environment.get(f"{short}_accelerated") is False else ""


def _verdict(best: Run) -> str:
    if best.output_error is None or best.status == "unjudged":
        return status_reason(best)
    what = judged_by(best)
    judged = f"{error_phrase(best.output_error)}{f' in the {what}' if what else ''}".removeprefix("output ")
    return f"passes ({judged}, tolerance {best.tolerance or 0:.0e})"


def _times(ratio: float) -> str:
    """``1.4 times``, ``134 times``."""
    return f"{ratio:.1f} times" if ratio < 10 else f"{ratio:.0f} times"


def _speed(ratio: float | None) -> str:
    if ratio is None:
        return ""
    if ratio >= NOISE:
        return f", {_times(ratio)} as fast as fp32"
    if ratio > 1 / NOISE:
        return ", about as fast as fp32"
    return f", {_times(1 / ratio)} slower than fp32 on this machine"
