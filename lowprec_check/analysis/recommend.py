"""The recommendation: the best run that passed, whether it is worth it, and why the others were not chosen. Never imports torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from lowprec_check.analysis.degenerate_output import tiny_output
from lowprec_check.analysis.run_summary import (
    candidates,
    error_of,
    error_phrase,
    is_cast,
    judged_by,
    memory_ratio,
    missing_kernels,
    some,
    status_reason,
)
from lowprec_check.analysis.snippet import snippet
from lowprec_check.analysis.speed import CLEAR, Speed, is_faster, speed
from lowprec_check.schema.recommendation import Prefer, Recommendation, Worth
from lowprec_check.schema.registry import choices
from lowprec_check.schema.run_key import CONTIGUOUS, EAGER, PLAN
from lowprec_check.schema.scan_result import ModelInfo, Run

LONG_SETUP = 1.0
"""Seconds of set-up that the reason names."""

SMALLER = 0.9
"""A run saves memory if its peak is at most this part of fp32's."""

SAME_MEMORY = 1.05
"""Peaks within this factor are the same: memory is counted, but allocators differ."""


def recommend(
    runs: Sequence[Run],
    model: ModelInfo,
    environment: Mapping[str, Any] = MappingProxyType({}),
    prefer: Prefer = "speed",
) -> Recommendation | None:
    """The best run that passed; ``None`` if none passed.

    A time decides only where it can be told, and by a wide margin, so that a busy machine gets the advice of a quiet one:

    1. With ``prefer="memory"``, those with the smallest peak; with ``"accuracy"``, the one with the smallest error.
    2. Of these, none that is clearly slower than another (:data:`~lowprec_check.analysis.speed.CLEAR`); and none that is slower
       than fp32, if one is faster.
    3. Among the rest, by what does not depend on times as far as possible: the least set-up (eager, contiguous), less memory
       than fp32, a dtype that the device accelerates, not slower than fp32, the smallest error, the order of the scan.

    If only fp32 was run, on other backends, the best of those. If the output of no run could be compared, the best that
    ran; its reason says so.

    If a cast of the whole model lacks kernels in any dtype, autocast is preferred for speed to every such cast: it runs these
    ops in fp32, and other inputs may need a kernel that the other dtype lacks.

    ``environment`` is that of the scan, with the torch that the runs are about; the reason says if the device does not accelerate
    the recommended dtype.
    """
    passed = _passed(runs)
    if not passed:
        return None
    best = best_of(passed, runs, environment, prefer)
    found, worth = speed(best, runs), worth_of(best, runs)
    return Recommendation(
        precision=best.base or best.precision,
        backend=best.backend,
        memory_format=best.memory_format,
        keep_fp32=best.keep_fp32,
        evidence=best.evidence,
        reason=_reason(best, runs, environment),
        code=snippet(
            best.key._replace(precision=best.base or best.precision),
            model,
            best.keep_fp32,
            best.untied,
            torch_version=str(environment.get("torch") or ""),
        ),
        speedup=found.told_ratio,
        rel_l2=best.output_error.rel_l2 if best.output_error else None,
        prefer=prefer,
        worth=worth,
        gain=", ".join(gains(best, runs)),
        stay_in_fp32=best.status == "ok" and is_fp32_better(found, worth, prefer),
    )


def worth_of(run: Run, runs: Sequence[Run]) -> Worth:
    """What a run gains over fp32."""
    told, smaller = speed(run, runs).told, _is_smaller(run, runs)
    if told == "faster":
        return "faster and smaller" if smaller else "faster"
    if smaller:
        return "smaller"
    known = told == "slower" or (told == "same" and memory_ratio(run, runs) is not None)
    return "nothing" if known else "unknown"


def _passed(runs: Sequence[Run]) -> list[Run]:
    low = candidates(runs)
    return [run for run in low if run.status == "ok"] or [run for run in low if run.status == "unjudged"]


def best_of(
    passed: list[Run],
    runs: Sequence[Run],
    environment: Mapping[str, Any],
    prefer: Prefer,
    error_of: Callable[[Run], float] = error_of,
) -> Run:
    """The best of ``passed``, which is not empty, by the rules of :func:`recommend`; ``error_of`` says how far it is from fp32."""
    if prefer == "memory":
        least = min(run.peak_memory_bytes or float("inf") for run in passed)
        passed = [run for run in passed if (run.peak_memory_bytes or float("inf")) <= SAME_MEMORY * least]
    elif prefer == "accuracy":
        least = min(map(error_of, passed))
        passed = [run for run in passed if error_of(run) <= least]
    elif any(missing_kernels(run) for run in runs if is_cast(run)):
        passed = [run for run in passed if not is_cast(run)] or passed
    passed = not_clearly_slower(passed, runs)

    def preference(run: Run) -> tuple[object, ...]:
        return (
            run.backend != EAGER,
            run.memory_format != CONTIGUOUS,
            not _is_smaller(run, runs),
            not _is_accelerated(run, environment),
            speed(run, runs).told == "slower",
            error_of(run),
        )

    return min(passed, key=preference)


def not_clearly_slower(passed: Sequence[Run], runs: Sequence[Run]) -> list[Run]:
    """Those of ``passed`` that no time speaks against: at least one, unless there are none."""
    known = [(run, speed(run, runs)) for run in passed]
    kept = [(run, mine) for run, mine in known if not any(is_faster(other, mine, CLEAR) for _, other in known)]
    if any(mine.told == "faster" for _, mine in kept):
        kept = [(run, mine) for run, mine in kept if mine.told != "slower"]
    return [run for run, _ in kept]


def _is_smaller(run: Run, runs: Sequence[Run]) -> bool:
    ratio = memory_ratio(run, runs)
    return ratio is not None and ratio <= SMALLER


def _is_accelerated(run: Run, environment: Mapping[str, Any]) -> bool:
    return run.basis is not None and environment.get(f"{run.basis.format.short}_accelerated") is True


def is_fp32_better(found: Speed, worth: Worth, prefer: Prefer) -> bool:
    """Whether the best run in low precision loses against fp32 in what is preferred; not where that cannot be told."""
    if prefer == "speed" and found.told == "slower":
        return True
    return worth == "nothing" or (prefer == "memory" and worth == "faster")


def gains(run: Run, runs: Sequence[Run]) -> Iterator[str]:
    """``1.4 times as fast as fp32``, ``saves 50 % of the memory``."""
    found = speed(run, runs)
    if found.told == "faster":
        yield found.text()
    yield from _savings(run, runs)


def _savings(run: Run, runs: Sequence[Run]) -> Iterator[str]:
    ratio = memory_ratio(run, runs)
    if ratio is not None and _is_smaller(run, runs):
        yield f"saves {1 - ratio:.0%} of the memory".replace("%", " %")


def _reason(best: Run, runs: Sequence[Run], environment: Mapping[str, Any]) -> str:
    told = speed(best, runs).told
    chosen_by_time = "; the choice rests on speed only" if best.status != "ok" and told != "noisy" else ""
    if best.evidence == "predicted":
        chosen_by_time = ""
    parts = [f"{_verdict(best)}{chosen_by_time}{figures(best, runs, environment)}."]
    if (best.setup_seconds or 0.0) >= LONG_SETUP:
        parts.append(f"Setting it up took {best.setup_seconds:.1f} s.")
    if best.keep_fp32:
        parts.append(f"Kept in fp32: {some(best.keep_fp32)}.")
    return " ".join([*parts, *compared_with(best, runs)])


def figures(best: Run, runs: Sequence[Run], environment: Mapping[str, Any]) -> str:
    """``, measured here, 1.4 times as fast as fp32; saves 50 % of the memory``."""
    found = speed(best, runs)
    slow = _not_accelerated(best, environment) if found.told in ("same", "slower", "noisy") else ""
    compared = found.text() + (" on this machine" if found.told == "slower" else "")
    says = f" ({compared}{slow})" if found.told == "noisy" else f", {compared}{slow}" if compared else ""
    saves = "".join(f"; {saving}" for saving in _savings(best, runs))
    how = "measured here" if best.evidence == "measured" else best.evidence
    return f", {how}{says}{saves}"


def compared_with(best: Run, runs: Sequence[Run]) -> Iterator[str]:
    """Sentences: which runs passed and are faster, and why the others failed."""
    yield from _faster(best, runs)
    why = defaultdict(list)
    for run in candidates(runs):
        if run.key != best.key and run.precision != PLAN and run.status not in ("ok", "skipped", best.status):
            tiny = tiny_output(run) if run.status == "inaccurate" else None
            why[f"it cannot be judged, as {tiny}" if tiny else status_reason(run)].append(run.key.label)
    yield from (f"Not {choices(names)}: {sentence(reason)}" for reason, names in why.items())


def sentence(text: str) -> str:
    """``text`` with a full stop."""
    return text if text.endswith((".", "…")) else f"{text}."


def _faster(best: Run, runs: Sequence[Run]) -> Iterator[str]:
    """Which runs passed and are faster than the recommended one by more than noise."""
    mine = speed(best, runs)
    others = [run for run in runs if run.status == "ok" and not run.is_reference and run.key != best.key]
    faster = [run for run in others if is_faster(speed(run, runs), mine)]
    lacking = not is_cast(best) and any(missing_kernels(run) for run in runs if is_cast(run))
    unsafe = [run for run in faster if lacking and is_cast(run)]
    names = [run.key.label for run in faster if run not in unsafe and run.precision != PLAN]
    if names:
        yield f"{choices(names, 'and')} {'is' if len(names) == 1 else 'are'} faster."
    if unsafe:
        verb = "is" if len(unsafe) == 1 else "are"
        casts = " and ".join(run.key.label for run in unsafe)
        yield f"{casts} {verb} faster but less safe: some ops have no kernel in another dtype."


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
