"""Advice does not depend on the noise of times, and all advice of a result agrees with its verdict."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_result import latency, run, shared_result

from lowprec_check import Run, ScanResult, render
from lowprec_check.analysis.conclusion import conclude, conclude_early
from lowprec_check.analysis.recommend import action
from lowprec_check.analysis.statements.advice import verdict
from lowprec_check.compat.scan_process import Request, row_of
from lowprec_check.schema.measures import InputsTried, Latency, Speedup

RESULT = shared_result()
MIB = 1 << 20
FP32 = run("fp32", latency_ms=10.0, latency=latency(10.0), peak_memory_bytes=8 * MIB, tolerance=None)
NAMES = ("bfloat16", "autocast-bf16", "half", "autocast-fp16")
ERRORS = (6e-3, 3e-3, 8e-4, 4e-4)
ACCELERATED = {"bf16_accelerated": True, "fp16_accelerated": True}


def timed(name: str, median: float, width: float, **more: Any) -> Run:
    """A run that passes, with an interval from ``median / width`` to ``median * width``."""
    rounds = Speedup(median=median, low=median / width, high=median * width, rounds=15)
    times = Latency(median_ms=10.0 / median, quartiles_ms=(9.0 / median, 11.0 / median), samples=30, speedup=rounds)
    error = ERRORS[NAMES.index(name)]
    return run(name, "ok", error, latency=times, latency_ms=times.median_ms, **more)


def runs_of(medians: Sequence[float], memory: Sequence[float], width: float) -> list[Run]:
    rows = zip(NAMES, medians, memory, strict=True)
    return [timed(name, median, width, peak_memory_bytes=int(mib * MIB)) for name, median, mib in rows]


def concluded(runs: Sequence[Run], environment: dict[str, Any] | None = None, **options: Any) -> ScanResult:
    result = msgspec.structs.replace(
        RESULT,
        runs=[FP32, *runs],
        plan=None,
        options=options,
        environment=RESULT.environment | (environment or {}),
    )
    return conclude(result)


def untimed(runs: Sequence[Run]) -> list[Run]:
    return [msgspec.structs.replace(each, latency=None, latency_ms=None) for each in runs]


def label(result: ScanResult) -> str:
    assert result.recommendation is not None
    return result.recommendation.label


MEDIANS = st.lists(st.sampled_from([0.02, 0.3, 0.7, 0.9, 1.0, 1.04, 1.3, 2.0, 4.0]), min_size=4, max_size=4)
MEMORY = st.lists(st.sampled_from([4.0, 6.0, 8.0, 10.0]), min_size=4, max_size=4)
ENVIRONMENTS = st.sampled_from([{}, ACCELERATED, {"bf16_accelerated": True}, {"bf16_accelerated": False}])


def is_told_faster(median: float, width: float) -> bool:
    return median / width > 1 and median >= 1.05


@given(MEDIANS, MEMORY, st.floats(1.001, 1.03), st.floats(1.03, 1.9), ENVIRONMENTS)
def test_load_that_widens_intervals_changes_a_claim_but_not_the_row(
    medians: list[float], memory: list[float], quiet: float, loaded: float, environment: dict[str, Any]
) -> None:
    before = concluded(runs_of(medians, memory, quiet), environment)
    after = concluded(runs_of(medians, memory, loaded), environment)
    if [is_told_faster(median, quiet) for median in medians] == [is_told_faster(median, loaded) for median in medians]:
        assert label(after) == label(before)
    # what is known no more is claimed no more
    if action(after) == "use":
        assert action(before) in ("use", "stay")
    if action(before) == "use":
        assert action(after) in ("use", "passes")
        if action(after) == "passes":
            assert "speed unclear" in verdict(after)


@given(st.sampled_from([0.3, 1.0, 2.0]), st.permutations([0.94, 0.98, 1.02, 1.06]), st.sampled_from([4.0, 8.0]))
def test_noise_between_runs_that_are_about_as_fast_does_not_choose_among_them(
    median: float, noise: list[float], memory: float
) -> None:
    """What is left decides: here the simpler way, then the error."""
    runs = runs_of([median * each for each in noise], [memory] * 4, 1.2)
    assert label(concluded(runs, ACCELERATED)) == "half"


def test_the_order_of_runs_does_not_matter() -> None:
    runs = runs_of([1.3, 1.0, 1.31, 0.9], [4.0, 9.0, 4.1, 9.0], 1.1)
    assert {label(concluded(order, ACCELERATED)) for order in permutations(runs)} == {"half"}


def test_memory_is_not_paid_for_a_speed_that_is_not_known() -> None:
    costly = timed("autocast-fp16", 1.4, 1.6, peak_memory_bytes=10 * MIB)
    plain = timed("bfloat16", 1.0, 1.6, peak_memory_bytes=8 * MIB)
    assert label(concluded([costly, plain])) == "bfloat16"
    assert label(concluded(untimed([costly, plain]))) == "bfloat16"
    known = timed("autocast-fp16", 1.4, 1.1, peak_memory_bytes=10 * MIB)
    assert label(concluded([known, plain])) == "autocast-fp16"


def test_a_safe_margin_comes_before_speed_unless_the_safe_way_is_slower_than_fp32() -> None:
    near = timed("half", 3.0, 1.1, peak_memory_bytes=4 * MIB, tolerance=9e-4)
    assert label(concluded([near, timed("autocast-bf16", 1.0, 1.1, peak_memory_bytes=8 * MIB)])) == "autocast-bf16"
    assert label(concluded([near, timed("autocast-bf16", 0.5, 1.1, peak_memory_bytes=8 * MIB)])) == "half"


@pytest.mark.parametrize(
    ("runs", "environment", "wanted"),
    [
        (untimed([timed("bfloat16", 1, 1, peak_memory_bytes=8 * MIB)]), ACCELERATED, "bfloat16 passes (not timed)"),
        (
            untimed([timed("bfloat16", 1, 1, peak_memory_bytes=4 * MIB)]),
            ACCELERATED,
            "bfloat16 passes and saves 50 % of the memory (8.0 MiB → 4.0 MiB); not timed",
        ),
        (
            [timed("bfloat16", 1, 1.7, peak_memory_bytes=4 * MIB)],
            {"bf16_accelerated": False},
            "bfloat16 passes and saves 50 % of the memory (8.0 MiB → 4.0 MiB); speed unclear",
        ),
        ([timed("bfloat16", 1, 1.7, peak_memory_bytes=4 * MIB)], ACCELERATED, "Use bfloat16"),
        ([timed("bfloat16", 1, 1.1, peak_memory_bytes=4 * MIB)], {"bf16_accelerated": False}, "Use bfloat16"),
        ([timed("bfloat16", 1, 1.7, peak_memory_bytes=8 * MIB)], ACCELERATED, "bfloat16 passes (speed unclear)"),
        ([timed("bfloat16", 2, 1.1, peak_memory_bytes=8 * MIB)], {"bf16_accelerated": False}, "Use bfloat16"),
        (
            [
                timed("autocast-bf16", 0.9, 1.01, peak_memory_bytes=10 * MIB),
                timed("bfloat16", 0.02, 1.1, peak_memory_bytes=4 * MIB),
            ],
            {},
            "Stay in fp32 for speed; bfloat16 saves 50 % of the memory",
        ),
    ],
)
def test_use_is_said_only_with_a_known_gain(runs: list[Run], environment: dict[str, Any], wanted: str) -> None:
    result = concluded(runs, environment)
    assert verdict(result) == wanted
    assert (action(result) == "use") == wanted.startswith("Use")
    assert result.recommendation is not None
    reason = result.recommendation.reason
    assert ("not timed" in wanted) <= ("ot timed" not in reason)
    assert ("passes and saves" in wanted) <= ("less memory" not in reason)


# -- all advice of a result


def wrong(name: str) -> Run:
    return run(name, "inaccurate", 0.5)


@given(MEDIANS, MEMORY, st.floats(1.001, 2.5), ENVIRONMENTS, st.sampled_from(NAMES), st.booleans())
def test_findings_and_the_matrix_advise_what_the_verdict_says(
    medians: list[float],
    memory: list[float],
    width: float,
    environment: dict[str, Any],
    failing: str,
    without_times: bool,
) -> None:
    runs = runs_of(medians, memory, width)
    if without_times:
        runs = untimed(runs)
    runs = [wrong(failing) if each.precision == failing else each for each in runs]
    result = concluded(runs, environment)
    helps = [finding.help or "" for finding in result.diagnostics if finding.code == "LP301"]
    assert len(helps) == 1
    advised = re.findall(rf"\buse ({'|'.join(NAMES)})\b", helps[0])
    name = label(result)
    row = row_of(result, Request("net.py", (), None, "net"), 1.0, {}).recommended or ""
    if action(result) == "use":
        assert advised == [name]
        assert row == name
        assert verdict(result) == f"Use {name}"
    else:
        assert not advised
        assert f"{name} passes" in helps[0]
        assert row != name
        assert not verdict(result).startswith("Use")
    tags = [line for line in render(result, "md").splitlines() if "**recommended**" in line]
    assert all(name in line for line in tags) or action(result) == "stay"
    assert bool(tags) == (action(result) in ("use", "stay"))


def test_a_scan_that_ended_early_says_after_how_many_runs() -> None:
    half = timed("half", 2.0, 1.1, peak_memory_bytes=4 * MIB)
    keys = [msgspec.structs.replace(half, precision=name).key for name in ("fp32", *NAMES)]
    result = msgspec.structs.replace(RESULT, plan=None, timing_conditions=None, runs=[FP32, half])
    early = conclude_early(result, keys)
    assert early is not None
    assert verdict(early).startswith("After 2 of 5 runs: half passes")
    failed = msgspec.structs.replace(result, runs=[FP32, wrong("half")])
    early = conclude_early(failed, keys)
    assert early is not None
    assert verdict(early) == "After 2 of 5 runs: half did not pass here"
    whole = conclude(msgspec.structs.replace(result, complete=False))
    assert "After" not in verdict(whole)


LATE, WRONG, GOOD = ("timeout", None), ("inaccurate", None), ("ok", None)
NOT_MADE = ("skipped", "the 8 minutes of this scan are over: a call takes 30 s")


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        ([LATE] * 4, "Stay in fp32 or raise --budget: no low precision ended in time"),
        ([LATE], "Stay in fp32 or raise --budget: bfloat16 did not end in time"),
        (
            [WRONG, LATE, WRONG, LATE],
            "Stay in fp32 or raise --budget: no low precision passed here; autocast-bf16 and autocast-fp16 did not "
            "end in time",
        ),
        ([WRONG] * 4, "Stay in fp32: no low precision passed here"),
        ([WRONG, NOT_MADE], "After 2 of 3 runs: bfloat16 did not pass here"),
        ([NOT_MADE] * 4, "After 1 of 5 runs: nothing else could be run"),
        (
            [GOOD, NOT_MADE],
            "After 2 of 3 runs: bfloat16 passes and saves 62 % of the memory (8.0 MiB → 3.0 MiB); not timed",
        ),
    ],
)
def test_a_limit_of_time_that_was_reached_is_said_in_the_verdict(ends: list[tuple[str, str | None]], says: str) -> None:
    runs = [
        run(name, status, 0.5, reason=why, time_was_over=status == "skipped")
        for name, (status, why) in zip(NAMES, ends, strict=False)
    ]
    assert verdict(concluded(untimed(runs))) == says


def test_a_limit_that_ended_a_further_input_is_said_in_the_verdict() -> None:
    tried = InputsTried(kind="resampled", tried=2, failed=1, statuses={"ok": 1, "timeout": 1})
    result = concluded([run("half", "ok", 1e-4, further_inputs=tried)])
    assert verdict(result) == "Stay in fp32 or raise --budget: half did not end in time on every input"
