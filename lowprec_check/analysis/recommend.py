"""The recommendation: the best run that passed, and whether it is worth it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from lowprec_check.analysis.run_summary import (
    CLOSE,
    candidates,
    degenerate_output,
    error_of,
    is_cast,
    is_hopeless,
    is_unjudged,
    lacked_time,
    memory_ratio,
    missing_kernels,
    part_of_tolerance,
    passes_all,
    saves_memory,
)
from lowprec_check.analysis.snippet import snippet
from lowprec_check.analysis.speed import ALIKE, ONE_CORE, TOLD, speed
from lowprec_check.analysis.training_status import passing_ways
from lowprec_check.schema.findings import Prefer, Recommendation, Worth
from lowprec_check.schema.run_key import CONTIGUOUS, EAGER
from lowprec_check.schema.scan_result import ModelInfo, Run, ScanResult

SAME_MEMORY = 1.05  # peaks within this factor are the same: allocators differ, and processes vary a little
APART = 1.15  # two runs are about as fast if their medians, or the safe ends of their intervals, are no further apart
WIDEST = 4.0  # a ratio on neither side of 1 says nothing if its interval spans more than this factor
VERY_SLOW, SLOW = 0.1, 0.5  # at most so fast is a run whose first call was its only one: 20 times slower, or twice


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

    What is known decides, one criterion after another. The width of an interval decides little (see
    :func:`assumed_speed`): a busy machine changes what can be claimed, but not what is named.

    1. With ``prefer="memory"``, those with the smallest peak; with ``"accuracy"``, the one with the
       smallest error; else, if any is told to be faster than fp32, none that is told to be slower.
    2. Those below :data:`~lowprec_check.analysis.run_summary.CLOSE` on every input, unless they are
       slower than fp32.
    3. Those that gain most, by :func:`gain_rank`.
    4. Those that are about as fast as the fastest, within :data:`APART`.
    5. Those in a dtype that the device accelerates; then with the least memory, if that matters.
    6. The simpler way: a cast, unless a cast of this model lacks kernels (other inputs may need
       one), then autocast, then another memory format or backend; the smallest error; the order of
       the scan.

    fp32 on another backend, or in another memory format, takes part if it is told to be faster than
    eager fp32, or if no lower precision was run; unless it is known to be faster or smaller, the
    advice is then to stay in eager fp32. If the output of no run could be compared, the best that
    ran; its reason says so.

    ``environment`` is that of the scan, with the torch of the runs. The reason is left empty:
    :func:`lowprec_check.analysis.statements.advice.basis` says it of the whole result.
    """
    best = best_run(runs, environment, prefer)
    if best is None:
        return None
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


# -- The best of those that passed


def best_run(runs: Sequence[Run], environment: Mapping[str, Any], prefer: Prefer = "speed") -> Run | None:
    """The run that :func:`recommend` recommends of ``runs``; ``None`` if it recommends none."""
    # what was emulated has no kernels here
    tried = [run for run in candidates(runs) if run.without_kernels is None]
    if any(run.is_low for run in tried):
        tried = [run for run in tried if run.is_low or speed(run, runs).told == "faster"]
    passed = [run for run in tried if passes_all(run, runs)] or [run for run in tried if is_unjudged(run, runs)]
    if not passed:
        return None
    return best_of(passed, runs, environment, prefer)


def best_of(
    passed: Sequence[Run],
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
    elif any(speed(run, runs).told == "faster" for run in passed):
        passed = [run for run in passed if speed(run, runs).told != "slower"]
    safe = [run for run in passed if part_of_tolerance(run) < CLOSE]
    if safe and (all(loses_time(run, runs) for run in passed) or not all(loses_time(run, runs) for run in safe)):
        passed = safe
    ranks = [(run, gain_rank(run, runs)) for run in passed]
    first = min(rank for _, rank in ranks)
    passed = fastest([run for run, rank in ranks if rank == first], runs)
    passed = [run for run in passed if is_accelerated(run, environment)] or passed
    passed = smallest(passed, runs)
    lacks_kernels = any(missing_kernels(run) for run in runs if is_cast(run))

    def difficulty(run: Run) -> tuple[object, ...]:
        is_unsafe = lacks_kernels and is_cast(run)
        changes_dtypes = run.backend_check is not None and bool(run.backend_check.dtypes)
        is_set_up = (run.backend != EAGER, run.memory_format != CONTIGUOUS)
        return changes_dtypes, *is_set_up, bool(run.kept), is_unsafe, run.is_autocast, error_of(run)

    return min(passed, key=difficulty)


def gain_rank(run: Run, runs: Sequence[Run]) -> int:
    """What a run is known to gain over fp32: 0, speed, or memory without a loss of speed; 1, memory
    only; 2, nothing. 3: it takes more time or memory, and is not known to be faster.
    """
    if saves_memory(run, runs):
        return 1 if loses_time(run, runs) else 0
    against_fp32 = speed(run, runs)
    # calls that are too short to be told may be known to be faster all the same
    if against_fp32.low > 1 and (against_fp32.ratio or 0.0) >= TOLD:
        return 0
    costs = (memory_ratio(run, runs) or 1.0) >= SAME_MEMORY
    return 3 if costs or loses_time(run, runs) else 2


class AssumedSpeed(NamedTuple):
    """What a choice rests on: times as fast as fp32, and the safe end of that."""

    ratio: float
    low: float
    one_core: bool = False


def assumed_speed(run: Run, runs: Sequence[Run]) -> AssumedSpeed:
    """The speed of ``run`` for a choice; of one that is not known, that of fp32.

    The median counts however wide its interval is, up to :data:`WIDEST`: on a busy machine the
    intervals grow and the medians stay.
    """
    against_fp32 = speed(run, runs)
    ratio, low, high = against_fp32.ratio, against_fp32.low, against_fp32.high
    if ratio is not None and (against_fp32.told != "noisy" or high <= WIDEST * low):
        rounds = run.latency.speedup if run.latency else None
        return AssumedSpeed(ratio, low, rounds is not None and rounds.one_core)
    if run.judged_by_one_call:
        ratio = VERY_SLOW if is_hopeless(run) else SLOW
        return AssumedSpeed(ratio, ratio)
    # the end of the interval that is next to 1
    ratio = min(max(1.0, low), high)
    return AssumedSpeed(ratio, min(low, ratio) if against_fp32.ratio is not None else ratio)


def loses_time(run: Run, runs: Sequence[Run]) -> bool:
    """Whether ``run`` is clearly slower than fp32."""
    return assumed_speed(run, runs).ratio <= 1 / ALIKE


def fastest(passed: Sequence[Run], runs: Sequence[Run]) -> list[Run]:
    """Those of ``passed`` that are about as fast as the fastest, by medians or by safe ends."""
    speeds = [(run, assumed_speed(run, runs)) for run in passed]

    def is_slower(own: AssumedSpeed, other: AssumedSpeed) -> bool:
        factor = ONE_CORE if own.one_core != other.one_core else APART
        return other.ratio >= factor * own.ratio and other.low >= factor * own.low

    return [run for run, own in speeds if not any(is_slower(own, other) for _, other in speeds)]


def is_accelerated(run: Run, environment: Mapping[str, Any]) -> bool:
    """Whether the device is known to accelerate the format of ``run``."""
    return run.format is not None and environment.get(f"{run.format.short}_accelerated") is True


def smallest(passed: Sequence[Run], runs: Sequence[Run]) -> list[Run]:
    """Those of ``passed`` with about the least memory, if a saving of it matters; all else."""
    ratios = [(run, memory_ratio(run, runs)) for run in passed if saves_memory(run, runs)]
    least = min((ratio for _, ratio in ratios if ratio is not None), default=None)
    if least is None:
        return list(passed)
    return [run for run, ratio in ratios if ratio is not None and ratio <= SAME_MEMORY * least]


# -- What a result advises


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


Action = Literal["use", "stay", "passes", "not judged", "no pass"]
"""``use`` the recommended run; ``stay`` in fp32; it ``passes``, and that it gains is not known."""


def action(result: ScanResult) -> Action:
    """What all advice of a result says of the recommended run: verdict, findings, matrix."""
    best = result.recommendation
    if best is None:
        return "no pass"
    if not passes(result):
        return "not judged"
    if missing_runs(result) or result.evidence == "predicted":
        return "passes"
    if best.stay_in_fp32:
        return "stay"
    return "use" if is_known_gain(result) else "passes"


def missing_runs(result: ScanResult) -> int:
    """The number of runs that a scan did not make because it ended early, or lacked time."""
    skipped = [run for run in result.runs if run.status == "skipped"]
    if result.complete:
        return sum(map(lacked_time, skipped))
    return len(skipped)


def is_known_gain(result: ScanResult) -> bool:
    """Whether a figure says that the recommended run, which passed, gains what matters.

    Less memory alone is a gain where the run is not slower: by its times, or on a device that
    accelerates its format. An older file does not say what is gained.
    """
    best, run = result.recommendation, recommended_run(result)
    if best is None or best.worth in ("nothing", "unknown"):
        return False
    if best.worth != "smaller" or best.prefer == "memory" or run is None:
        return True
    told = speed(run, result.runs).told
    return told == "same" or (told == "noisy" and is_accelerated(run, result.environment))


def tag(run: Run, result: ScanResult) -> str:
    """``recommended`` beside a run's name; ``the alternative`` where fp32 is preferable."""
    advised, is_best = action(result), run is recommended_run(result)
    if (advised == "use" and is_best) or (advised == "stay" and run.is_reference):
        return "recommended"
    return "the alternative" if advised == "stay" and is_best else ""
