"""The recommendation: the best run that passed, and whether it is worth it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from lowprec_check.analysis.run_summary import (
    CLOSE,
    candidates,
    degenerate_output,
    error_of,
    is_cast,
    is_unjudged,
    memory_ratio,
    missing_kernels,
    part_of_tolerance,
    passes_all,
    saves_memory,
)
from lowprec_check.analysis.snippet import snippet
from lowprec_check.analysis.speed import ALIKE, CLEAR, ONE_CORE, TOLD, Speed, is_faster, speed
from lowprec_check.analysis.training_status import passing_ways
from lowprec_check.schema.findings import Prefer, Recommendation, Worth
from lowprec_check.schema.run_key import CONTIGUOUS, EAGER
from lowprec_check.schema.scan_result import ModelInfo, Run, ScanResult

SAME_MEMORY = 1.05  # peaks within this factor are the same: allocators differ, and processes vary a little


class Advisor(NamedTuple):
    """How a feature recommends for scans of its own; an object in its module ``advice``."""

    advises: Callable[[ScanResult], bool]
    recommend: Callable[[ScanResult, Mapping[str, Any], Prefer], Recommendation | None]
    """In place of :func:`recommend`, with the same environment and preference."""


def recommend(
    runs: Sequence[Run],
    model: ModelInfo,
    environment: Mapping[str, Any] = MappingProxyType({}),
    prefer: Prefer = "speed",
) -> Recommendation | None:
    """The best run that passed on every input that it was tried on; ``None`` if none did.

    A time decides where it can be told, or by the safe end of its interval, so that noise never
    wins:

    1. With ``prefer="memory"``, those with the smallest peak; with ``"accuracy"``, the one with the
       smallest error.
    2. Of these, none that is slower than another, by ratios to fp32 or in the same rounds, and none
       whose safe end is far below that of another (:data:`~lowprec_check.analysis.speed.ALIKE`).
    3. Of the rest, one below :data:`~lowprec_check.analysis.run_summary.CLOSE` on every input.
    4. Then what depends least on times: the least set-up (eager, contiguous), less memory than
       fp32, an accelerated dtype, not slower than fp32, the smallest error, the order of the scan.

    fp32 on another backend, or in another memory format, takes part if it is told to be faster than
    eager fp32, or if no lower precision was run; unless it is known to be faster or smaller, the
    advice is then to stay in eager fp32. If the output of no run could be compared, the best that
    ran; its reason says so.

    If a cast of the whole model lacks kernels in any dtype, autocast is preferred for speed to
    every such cast: it runs these ops in fp32, and other inputs may need a kernel that the other
    dtype lacks.

    ``environment`` is that of the scan, with the torch of the runs. The reason is left empty:
    :func:`lowprec_check.analysis.statements.advice.basis` says it of the whole result.
    """
    tried = candidates(runs)
    if any(run.is_low for run in tried):
        tried = [run for run in tried if run.is_low or speed(run, runs).told == "faster"]
    passed = [run for run in tried if passes_all(run, runs)] or [run for run in tried if is_unjudged(run, runs)]
    if not passed:
        return None
    best = best_of(passed, runs, environment, prefer)
    key = best.key._replace(precision=best.base or best.precision)
    code = snippet(
        key,
        model,
        best.keep_fp32,
        best.untied,
        keep_fp32_inputs=best.keep_fp32_inputs,
        torch_version=str(environment.get("torch") or ""),
    )
    return recommendation_of(best, runs, prefer, code)


def recommendation_of(
    run: Run, runs: Sequence[Run], prefer: Prefer, code: str, *, way: str | None = None, is_timed: bool = True
) -> Recommendation:
    """Recommend ``run``, or a ``way`` to train, whose times it may not have (``is_timed``)."""
    times, ratio, gains = speed(run, runs), memory_ratio(run, runs), []
    worth: Worth = worth_of(run, runs) if is_timed else "unknown"
    if is_timed and times.told == "faster":
        gains.append(times.text())
    if is_timed and ratio is not None and saves_memory(run, runs):
        gains.append(f"saves {1 - ratio:.0%} of the memory".replace("%", " %"))
    # whether fp32 is better in what is preferred
    is_slower = prefer == "speed" and times.told == "slower"
    gains_nothing = worth == "nothing" or (worth == "unknown" and way is None and not run.is_low)
    loses = is_slower or gains_nothing or (prefer == "memory" and worth == "faster")
    passed = run.status == "ok" or way is not None
    return Recommendation(
        precision=run.base or run.precision,
        backend=run.backend,
        memory_format=run.memory_format,
        keep_fp32=run.keep_fp32,
        keep_fp32_inputs=run.keep_fp32_inputs,
        way=way,
        evidence=run.evidence,
        reason="",
        code=code,
        speedup=times.told_ratio if is_timed else None,
        rel_l2=run.rel_l2,
        prefer=prefer,
        worth=worth,
        gain=", ".join(gains),
        stay_in_fp32=is_timed and passed and loses,
    )


def worth_of(run: Run, runs: Sequence[Run]) -> Worth:
    """What a run gains over fp32."""
    told, smaller = speed(run, runs).told, saves_memory(run, runs)
    if told == "faster" and smaller:
        return "faster and smaller"
    if told == "faster":
        return "faster"
    if smaller:
        return "smaller"
    # without both figures, a gain may only not have been seen
    is_measured = told == "slower" or (told == "same" and memory_ratio(run, runs) is not None)
    return "nothing" if is_measured or changes_nothing(run) else "unknown"


def changes_nothing(run: Run) -> bool:
    """Whether autocast is seen to compute no op in 16 bits."""
    is_seen = run.evidence == "measured" and run.complete
    if not is_seen or not run.is_autocast or run.format is None:
        return False
    # further inputs are not analyzed: there the output must equal that of fp32
    inputs = run.batch_count
    if run.further_inputs is not None:
        inputs += run.further_inputs.tried
    if run.is_forward and part_of_tolerance(run) and inputs > 1:
        return False
    ops = run.op_calls.dtypes
    return bool(ops) and not any(run.format.mark in dtypes for dtypes in ops)


def best_of(
    passed: list[Run],
    runs: Sequence[Run],
    environment: Mapping[str, Any],
    prefer: Prefer,
    error_of: Callable[[Run], float] = error_of,
) -> Run:
    """The best of ``passed`` (not empty) by :func:`recommend`; ``error_of``: distance to fp32."""
    if prefer == "memory":
        ratios = [(run, memory_ratio(run, runs) or math.inf) for run in passed]
        least = min(ratio for _, ratio in ratios)
        passed = [run for run, ratio in ratios if ratio <= SAME_MEMORY * least]
    elif prefer == "accuracy":
        least = min(map(error_of, passed))
        passed = [run for run in passed if error_of(run) <= least]
    # other inputs may need a kernel that another dtype lacks too
    elif any(missing_kernels(run) for run in runs if is_cast(run)):
        passed = [run for run in passed if not is_cast(run)] or passed
    # times narrow the choice, the rest decides
    passed = fastest(passed, runs)

    def preference(run: Run) -> tuple[object, ...]:
        return (
            part_of_tolerance(run) >= CLOSE,
            run.backend_check is not None and bool(run.backend_check.dtypes),
            run.backend != EAGER,
            run.memory_format != CONTIGUOUS,
            not saves_memory(run, runs),
            run.format is None or environment.get(f"{run.format.short}_accelerated") is not True,
            speed(run, runs).told == "slower",
            error_of(run),
        )

    return min(passed, key=preference)


def fastest(passed: Sequence[Run], runs: Sequence[Run]) -> list[Run]:
    """Those of ``passed`` that may be the fastest; all if none was timed."""
    labels = {run.key.label for run in passed}
    rivals = [run for run in passed if run.latency is None or labels.isdisjoint(run.latency.slower_than)] or passed
    speeds = [(run, speed(run, runs)) for run in rivals]

    def is_slower(run: Run, own: Speed, other: Run, others: Speed) -> bool:
        """Whether ``run`` is told to be slower than ``other``, or not told to be nearly as fast."""
        rounds, of_other = (each.latency.speedup if each.latency else None for each in (run, other))
        # times of one kind of rounds compare best
        margin, slack = CLEAR, ALIKE
        if rounds is not None and of_other is not None:
            margin = TOLD
            if rounds.one_core != of_other.one_core:
                margin, slack = ONE_CORE, ONE_CORE
        return is_faster(others, own, margin) or own.low < others.low / slack

    return [run for run, own in speeds if not any(is_slower(run, own, *other) for other in speeds)]


def recommended_run(result: ScanResult) -> Run | None:
    """The run that is recommended; ``None`` if none is."""
    best = result.recommendation
    if best is None:
        return None
    wanted = (best.precision, best.backend, best.memory_format, best.kept)
    for run in candidates(result.runs):
        choice = (run.base or run.precision, run.backend, run.memory_format, run.kept)
        if choice == wanted and (run.status in ("ok", "unjudged") or passing_ways(run)):
            return run
    return None


def passes(result: ScanResult) -> bool:
    """Whether the recommended run or way passed; else no output could be judged."""
    run, best = recommended_run(result), result.recommendation
    if best is None or (run is not None and degenerate_output(run, result.runs) is not None):
        return False
    if run is None:
        return bool(best.kept) or any(passes_all(other, result.runs) for other in candidates(result.runs))
    return passes_all(run, result.runs) or bool(passing_ways(run)) or bool(best.kept)


def is_gain(result: ScanResult) -> bool:
    """Whether the recommendation gains something over fp32; an older file does not say."""
    best = result.recommendation
    return best is not None and passes(result) and not best.stay_in_fp32 and best.worth not in ("nothing", "unknown")


def tag(run: Run, result: ScanResult) -> str:
    """``recommended`` beside a run's name; ``the alternative`` where fp32 is preferable."""
    best = result.recommendation
    if best is None or not passes(result):
        return ""
    is_best = run is recommended_run(result)
    if best.stay_in_fp32 and run.is_reference:
        return "recommended"
    if is_best:
        return "the alternative" if best.stay_in_fp32 else "recommended"
    return ""
