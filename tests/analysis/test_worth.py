"""What times tell, whether a way to run is worth it, and that noise does not change the recommendation."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from helpers import screen_of
from hypothesis import assume, given
from hypothesis import strategies as st
from shared_result import latency, run, shared_result

from lowprec_check import Recommendation, Run, ScanResult, diff_scans, render
from lowprec_check.analysis.conclusion import conclude
from lowprec_check.analysis.recommend import recommend, worth_of
from lowprec_check.analysis.speed import CLEAR, is_faster, ratio_text, speed
from lowprec_check.analysis.statements.advice import verdict as verdict_of
from lowprec_check.analysis.statements.kinds import statements
from lowprec_check.compat.scan_process import Request, row_of
from lowprec_check.core.mode import Mode
from lowprec_check.features.times.rounds import RoundSchedule, TurnTimed
from lowprec_check.features.times.timed_runs import _rivals
from lowprec_check.report.blocks import SpeedOf, speed_text
from lowprec_check.report.runs_table import runs_table
from lowprec_check.schema.findings import Prefer
from lowprec_check.schema.measures import Latency, Speedup, Timing, TimingConditions
from lowprec_check.schema.op_calls import OpCall, to_columns
from lowprec_check.schema.scan_result import Gap
from lowprec_check.schema.statements import Statement, milliseconds

RESULT = shared_result()
MIB = 1 << 20
FP32 = run("fp32", latency_ms=10.0, latency=latency(10.0), peak_memory_bytes=8 * MIB, tolerance=None)


def rounds(median: float, low: float, high: float) -> Latency:
    found = Speedup(median=median, low=low, high=high, rounds=15)
    return Latency(median_ms=10.0 / median, quartiles_ms=(9.0 / median, 11.0 / median), samples=30, speedup=found)


def timed(name: str, median: float, low: float, high: float, memory: int = 8, error: float = 1e-3, **more: Any) -> Run:
    found = rounds(median, low, high)
    return run(name, "ok", error, latency=found, latency_ms=found.median_ms, peak_memory_bytes=memory * MIB, **more)


def in_one_round(ratio: float) -> Run:
    half = timed("half", ratio, ratio / 2, ratio * 2)
    assert half.latency is not None
    assert half.latency.speedup is not None
    single = msgspec.structs.replace(half.latency.speedup, rounds=1)
    return msgspec.structs.replace(half, latency=msgspec.structs.replace(half.latency, speedup=single))


def told(median: float, low: float, high: float) -> str:
    half = timed("half", median, low, high)
    return speed(half, [FP32, half]).told


@pytest.mark.parametrize(
    ("median", "low", "high", "wanted"),
    [
        (1.4, 1.2, 1.6, "faster"),
        (1.06, 1.01, 1.1, "faster"),
        (1.04, 1.01, 1.1, "same"),
        (1.4, 0.99, 1.6, "noisy"),
        (1.04, 1.01, 1.3, "noisy"),
        (1.0, 0.81, 1.24, "same"),
        (1.0, 0.79, 1.1, "noisy"),
        (0.99, 0.95, 1.0, "same"),
        (0.9, 0.85, 0.99, "slower"),
        (0.9, 0.7, 1.01, "noisy"),
        (0.001, 0.0009, 0.5, "slower"),
    ],
)
def test_a_ratio_counts_only_if_it_can_be_told_apart_from_1(
    median: float, low: float, high: float, wanted: str
) -> None:
    assert told(median, low, high) == wanted


@pytest.mark.parametrize(
    ("fp32", "mine", "wanted"),
    [
        (10.0, 9.0, "faster"),
        (10.0, 9.9, "same"),
        (10.0, 11.0, "slower"),
        (10.0, 0.5, "noisy"),
        (0.08, 0.09, "noisy"),
        (0.08, 80.0, "slower"),
        (0.9, 1.01, "noisy"),
        (None, 1.0, "unknown"),
        (1.0, None, "unknown"),
    ],
)
def test_without_rounds_medians_are_compared_if_they_are_long_enough(
    fp32: float | None, mine: float | None, wanted: str
) -> None:
    half = run("half", latency_ms=mine)
    assert speed(half, [run("fp32", latency_ms=fp32), half]).told == wanted


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (timed("half", 1.4, 1.3, 1.5), "1.4 times as fast as fp32"),
        (timed("half", 1 / 134, 1 / 140, 1 / 130), "134 times slower than fp32"),
        (timed("half", 4.4, 2.9, 6.1), "about 4 times as fast as fp32"),
        (timed("half", 1.4, 1.1, 2.3), "faster than fp32"),  # "about 1 times" says nothing
        (timed("half", 1 / 12.6, 1 / 18, 1 / 5), "about 13 times slower than fp32"),
        (in_one_round(1 / 389), "slower than fp32"),
        (in_one_round(1 / 2.5), "times too noisy to compare"),
        (in_one_round(20.0), "times too noisy to compare"),
        (timed("half", 1.0, 0.9, 1.1), "about as fast as fp32"),
        (timed("half", 1.0, 0.1, 3.0), "times too noisy to compare"),
        (run("half", latency_ms=0.1), "too short to compare times"),
        (run("half", latency_ms=None), ""),
    ],
)
def test_a_speed_in_words(found: Run, text: str) -> None:
    assert speed(found, [FP32, found]).text() == text


@given(
    st.floats(0.01, 100),
    st.floats(1.0, 3.0),
    st.floats(1.0, 3.0),
    st.floats(0.01, 100),
    st.floats(1.0, 3.0),
    st.floats(1, 3),
)
def test_of_two_runs_at_most_one_is_told_to_be_faster(
    one: float, below: float, above: float, other: float, under: float, over: float
) -> None:
    first = timed("half", one, one / below, one * above)
    second = timed("bfloat16", other, other / under, other * over)
    runs = [FP32, first, second]
    a, b = speed(first, runs), speed(second, runs)
    assert not (is_faster(a, b) and is_faster(b, a))
    assert not is_faster(a, b, CLEAR) or is_faster(a, b)


# -- the recommendation

NAMES = ("bfloat16", "autocast-bf16", "half", "autocast-fp16")
ERRORS = (6e-3, 3e-3, 8e-4, 4e-4)
MEMORY = (4, 8, 4, 8)


def ways(speeds: list[float], noise: list[float], width: float) -> list[Run]:
    """The runs of the four precisions, measured with an error of ``noise`` and an interval of ± ``width``."""
    found = [
        timed(name, true * wrong, true * wrong * (1 - width), true * wrong * (1 + width), memory, error)
        for name, true, wrong, memory, error in zip(NAMES, speeds, noise, MEMORY, ERRORS, strict=True)
    ]
    return [FP32, *found]


def advised(runs: list[Run], prefer: Prefer = "speed", **environment: bool) -> Recommendation:
    advice = recommend(runs, RESULT.model, environment, prefer)
    assert advice is not None
    return advice


LEVELS = st.sampled_from([0.02, 0.1, 0.5, 2.0, 6.0])
"""True speeds, each at least three times another or about the same, and none next to that of fp32."""


@given(
    st.lists(st.tuples(LEVELS, st.floats(0.98, 1.02)), min_size=4, max_size=4),
    st.lists(st.floats(0.92, 1.08), min_size=4, max_size=4),
    st.sampled_from(["speed", "memory", "accuracy"]),
)
def test_noise_does_not_change_the_recommendation(
    speeds: list[tuple[float, float]], noise: list[float], prefer: Prefer
) -> None:
    """A quiet machine: medians off by nothing, intervals of 2 %; under load: medians off by 8 %, intervals of 30 %."""
    true = [level * own for level, own in speeds]
    quiet = advised(ways(true, [1.0] * 4, 0.02), prefer)
    loaded = advised(ways(true, noise, 0.3), prefer)
    assert (loaded.label, loaded.stay_in_fp32, loaded.worth) == (quiet.label, quiet.stay_in_fp32, quiet.worth)


@given(st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4), st.sampled_from(["speed", "memory", "accuracy"]))
def test_times_that_cannot_be_told_decide_nothing(medians: list[float], prefer: Prefer) -> None:
    runs = [FP32] + [
        timed(name, median, 0.1, 10.0, memory, error)
        for name, median, memory, error in zip(NAMES, medians, MEMORY, ERRORS, strict=True)
    ]
    untimed = [msgspec.structs.replace(each, latency=None, latency_ms=None) for each in runs]
    advice = advised(runs, prefer)
    assert advice.label == advised(untimed, prefer).label
    assert (advice.speedup, advice.stay_in_fp32) == (None, False)


@given(st.lists(st.tuples(st.floats(0.02, 5.0), st.floats(0.01, 0.5)), min_size=4, max_size=4))
def test_nothing_slower_than_fp32_is_recommended_for_speed(found: list[tuple[float, float]]) -> None:
    runs = [FP32] + [
        timed(name, median, median * (1 - width), median * (1 + width), memory, error)
        for name, (median, width), memory, error in zip(NAMES, found, MEMORY, ERRORS, strict=True)
    ]
    advice = advised(runs)
    chosen = next(each for each in runs if each.key.label == advice.label)
    if speed(chosen, runs).told == "slower":
        assert advice.stay_in_fp32
        assert not any(speed(each, runs).told == "faster" for each in runs)


def test_a_clearly_faster_way_is_recommended_before_a_smaller_or_more_accurate_one() -> None:
    runs = ways([0.5, 1.6, 0.02, 0.9], [1.0] * 4, 0.05)
    assert advised(runs).label == "autocast-bf16"


def test_among_equals_acceleration_then_memory_then_the_simpler_way_then_accuracy_decides() -> None:
    runs = ways([2.0, 2.0, 2.0, 2.0], [1.0] * 4, 0.05)
    assert advised(runs).label == "half"
    assert advised(runs, bf16_accelerated=True, fp16_accelerated=False).label == "bfloat16"
    without = [msgspec.structs.replace(each, peak_memory_bytes=8 * MIB) for each in runs]
    assert advised(without).label == "half"  # a cast, and of these the more accurate one
    assert advised([FP32, without[2]]).label == "autocast-bf16"


def test_a_time_decides_if_it_can_be_told() -> None:
    assert advised(ways([2.0, 0.1, 1.5, 0.1], [1.0] * 4, 0.01)).label == "bfloat16"
    assert advised(ways([1.53, 0.1, 1.5, 0.1], [1.0] * 4, 0.01)).label == "half"  # the same: the more accurate one


def test_a_wide_interval_does_not_win() -> None:
    wide, narrow = timed("half", 1.9, 0.6, 5.7, 4, 8e-4), timed("bfloat16", 4.0, 3.9, 4.1, 4, 6e-3)
    assert advised([FP32, wide, narrow]).label == "bfloat16"
    assert advised([FP32, timed("half", 4.1, 3.3, 5.7, 4, 8e-4), narrow]).label == "half"  # may be as fast


def test_a_run_that_was_slower_in_the_same_rounds_says_so() -> None:
    """By less than what is worth a less accurate way, or one that depends on the load of the machine."""
    first, second = timed("half", 1.5, 1.4, 1.6, 4, 8e-4), timed("bfloat16", 1.6, 1.5, 1.7, 4, 6e-3)
    assert first.latency is not None
    slower = msgspec.structs.replace(first, latency=msgspec.structs.replace(first.latency, slower_than=["bfloat16"]))
    assert advised([FP32, slower, second]).label == "half"
    assert advised([FP32, first, timed("bfloat16", 1.9, 1.8, 2.0, 4, 6e-3)]).label == "bfloat16"
    # slower than a run that is recommended for another reason
    near = msgspec.structs.replace(slower, tolerance=9e-4)
    (found,) = said(concluded([FP32, near, second]), "slower-than")
    assert (found.runs, found.text) == (["half"], "slower than bfloat16 in the same rounds")
    failed = msgspec.structs.replace(second, status="nonfinite")
    assert not said(concluded([FP32, near, failed]), "slower-than")


def test_rivals_are_timed_again_until_they_can_be_told_apart() -> None:
    wide, narrow, slow = (
        timed("half", 4.1, 3.3, 5.7, 4, 8e-4),
        timed("bfloat16", 4.0, 3.9, 4.1, 4, 6e-3),
        timed("autocast-bf16", 2.0, 1.9, 2.1, 8, 3e-3),
    )

    def rivals(*runs: Run) -> list[str]:
        latencies = {run.key: run.latency for run in runs if run.latency}
        return [run.precision for run in _rivals(runs, latencies, Mode())]

    assert rivals(wide, narrow, slow) == ["half", "bfloat16"]
    assert rivals(narrow, slow) == []
    bound = [
        msgspec.structs.replace(
            run, latency=msgspec.structs.replace(run.latency, host_ms=run.latency_ms, device_ms=0.0)
        )
        for run in (wide, narrow)
        if run.latency is not None
    ]
    assert rivals(*bound, slow) == []  # the host limits them
    assert rivals(bound[0], narrow, slow) == ["half", "bfloat16"]
    failed = timed("half", 4.1, 3.3, 5.7, 4, 0.5)  # which decides nothing among those that pass
    assert wide.latency is not None
    marked = msgspec.structs.replace(wide, latency=msgspec.structs.replace(wide.latency, slower_than=["autocast-fp16"]))
    assert rivals(msgspec.structs.replace(failed, precision="autocast-fp16", status="inaccurate"), marked, narrow)


def test_the_last_rounds_go_on_until_each_rival_is_slower_or_as_fast() -> None:
    schedule = RoundSchedule(4, 1.0, final=True)
    settled = []
    for number in range(8):
        noise = 1 + 0.02 * (number % 2)
        for row, seconds in enumerate((0.8 * noise, 0.2, 0.2 * noise, 0.3)):
            schedule.note(TurnTimed(row=row, round=number, seconds=[seconds], waited=0.0, fixed_work=1e-3))
        settled.append([schedule._is_settled(row) for row in (1, 2, 3)])
    assert settled == [[False] * 3] * 2 + [[False, False, True]] * 3 + [[True] * 3] * 3


@pytest.mark.parametrize(
    ("prefer", "label", "stay"),
    [("speed", "autocast-bf16", False), ("memory", "half", False), ("accuracy", "autocast-fp16", True)],
)
def test_what_is_preferred_decides(prefer: Prefer, label: str, stay: bool) -> None:
    advice = advised(ways([0.5, 1.6, 0.6, 0.9], [1.0] * 4, 0.05), prefer)
    assert (advice.label, advice.prefer, advice.stay_in_fp32) == (label, prefer, stay)


def concluded(runs: list[Run], **options: Any) -> ScanResult:
    return conclude(msgspec.structs.replace(RESULT, runs=runs, options=options, plan=None, recommendation=None))


def said(result: ScanResult, kind: str) -> list[Statement]:
    return [found for found in statements(result) if found.kind == kind]


def one(median: float, low: float, high: float, memory: int, **options: Any) -> ScanResult:
    return concluded([FP32, timed("half", median, low, high, memory)], **options)


@pytest.mark.parametrize(
    ("result", "worth", "verdict", "sign"),
    [
        (one(1.4, 1.3, 1.5, 4), "faster and smaller", "Use half", "✅"),
        (one(1.4, 1.3, 1.5, 8), "faster", "Use half", "✅"),
        (one(1.0, 0.9, 1.1, 4), "smaller", "Use half", "✅"),
        (
            one(1.0, 0.3, 3.0, 4),
            "smaller",
            "half passes and saves 50 % of the memory (8.0 MiB → 4.0 MiB); speed unclear",
            "➖",
        ),
        (one(1.0, 0.3, 3.0, 4, prefer="memory"), "smaller", "Use half", "✅"),
        (one(0.5, 0.4, 0.6, 4), "smaller", "Stay in fp32 for speed; half saves 50 % of the memory", "➖"),
        (one(0.5, 0.4, 0.6, 4, prefer="memory"), "smaller", "Use half", "✅"),
        (
            one(1.4, 1.3, 1.5, 8, prefer="memory"),
            "faster",
            "Stay in fp32 for memory; half is 1.4 times as fast as fp32",
            "➖",
        ),
        (one(0.5, 0.4, 0.6, 8), "nothing", "Stay in fp32: half is 2.0 times slower and saves no memory", "➖"),
        (one(1.0, 0.9, 1.1, 8), "nothing", "Stay in fp32: half is not faster and saves no memory", "➖"),
        (one(0.9, 0.85, 0.94, 8), "nothing", "Stay in fp32: half is not faster and saves no memory", "➖"),
        (one(1.0, 0.3, 3.0, 8), "unknown", "half passes (speed unclear)", "➖"),
    ],
)
def test_worth_it_is_a_verdict_of_its_own(result: ScanResult, worth: str, verdict: str, sign: str) -> None:
    advice = result.recommendation
    assert advice is not None
    assert advice.worth == worth == worth_of(result.run("half"), result.runs)
    assert verdict_of(result) == verdict
    assert render(result, "md").startswith(f"### {sign} {verdict}.")
    assert verdict in " ".join(render(result, "text").split())
    assert "half()" in advice.code  # a way that passes, also where fp32 is better


@pytest.mark.parametrize(("saved", "worth"), [((1 << 20) - 1, "unknown"), (1 << 20, "smaller")])
def test_less_than_a_mebibyte_of_memory_is_no_gain(saved: int, worth: str) -> None:
    fp32 = msgspec.structs.replace(FP32, peak_memory_bytes=2 << 20)
    half = msgspec.structs.replace(timed("half", 1.0, 0.3, 3.0), peak_memory_bytes=(2 << 20) - saved)
    assert worth_of(half, [fp32, half]) == worth


def test_memory_that_was_not_measured_is_not_said_to_be_the_same() -> None:
    slow = msgspec.structs.replace(timed("half", 0.5, 0.4, 0.6), peak_memory_bytes=None)
    assert verdict_of(concluded([FP32, slow])) == "Stay in fp32: half is 2.0 times slower"


def test_autocast_without_an_op_in_16_bits_is_not_compared() -> None:
    in_fp32 = to_columns([OpCall(op="aten.topk.default", dtypes="f32")])
    autocast = msgspec.structs.replace(timed("autocast-bf16", 1.0, 0.3, 3.0, 8), op_calls=in_fp32)
    assert verdict_of(concluded([FP32, autocast])) == "Stay in fp32: autocast-bf16 computes nothing in 16 bits"


def cells(result: ScanResult, name: str) -> list[Any]:
    """A column of the table of runs."""
    table = runs_table(result)
    index = [column.name for column in table.columns].index(name)
    return [row.cells[index] for row in table.rows]


def test_the_table_shows_speeds_only_where_they_are_told() -> None:
    runs = [FP32, timed("half", 0.5, 0.4, 0.6), timed("bfloat16", 1, 0.9, 1.1), timed("autocast-bf16", 1, 0.2, 5)]
    found = cells(concluded([*runs, timed("autocast-fp16", 1.8, 1.7, 1.9)]), "speed")
    assert found[0] is None
    assert [speed_text(value) for value in found[1:]] == ["2.0 × slower", "≈ fp32", "noisy", "1.8 × as fast"]
    wide = cells(concluded([FP32, timed("half", 1 / 12.6, 1 / 18, 1 / 5), in_one_round(1 / 389)]), "speed")
    assert [speed_text(value) for value in wide[1:]] == ["≈ 13 × slower", "slower"]


def test_no_report_states_the_figure_of_a_single_round() -> None:
    result = concluded([FP32, in_one_round(1 / 389)])
    assert verdict_of(result) == "Stay in fp32: half is slower and saves no memory"
    assert speed(result.runs[1], result.runs).time is None
    assert result.recommendation is not None
    assert result.recommendation.speedup is None
    for name in ("text", "md", "html"):
        report = render(result, name)
        assert "slower" in report
        assert not re.search(r"0\.00257|389 times|389 ×|195|778", report), name


@given(st.floats(0.001, 1000))
def test_a_speed_is_never_said_to_be_that_of_fp32_if_it_is_not(ratio: float) -> None:
    assume(not 0.995 < ratio < 1.005)
    shown = speed_text(SpeedOf("faster" if ratio > 1 else "slower", ratio))
    assert not shown.startswith(("1.00 ", "1.0 "))
    assert ("as fast" in shown) == (ratio > 1)


def test_an_older_file_is_shown_as_it_was() -> None:
    old = msgspec.structs.replace(RESULT, recommendation=Recommendation(precision="half", reason="passes.", code="x"))
    assert verdict_of(old) == "Use half"
    assert "### ✅ Use half" in render(old, "md")


def test_the_matrix_says_fp32_where_it_is_better() -> None:
    request = Request("net.py", (), None, "net")
    for result, wanted in (
        (one(0.5, 0.4, 0.6, 4), "fp32 (half: saves 50 % of the memory)"),
        (one(2, 1.9, 2.1, 4), "half"),
    ):
        assert row_of(result, request, 1.0, {}).recommended == wanted
    assert row_of(one(0.5, 0.4, 0.6, 8), request, 1.0, {}).recommended == "fp32"


def test_without_a_kernel_in_some_dtype_autocast_is_preferred_among_equals_only() -> None:
    lacks = run("half", "error", gaps=[Gap(**msgspec.to_builtins(RESULT.run("half").gaps[0]))])
    cast, autocast = timed("bfloat16", 1.25, 1.2, 1.3, 8), timed("autocast-bf16", 1.2, 1.15, 1.25)
    assert advised([FP32, lacks, cast, autocast]).label == "autocast-bf16"
    assert advised([FP32, cast, autocast]).label == "bfloat16"
    smaller, faster = timed("bfloat16", 1.25, 1.2, 1.3, 4), timed("bfloat16", 2.0, 1.9, 2.1, 8)
    for known in (smaller, faster):
        assert advised([FP32, lacks, known, autocast]).label == "bfloat16"


@pytest.mark.parametrize(("noisy", "wanted"), [(False, "faster"), (True, "noisy")])
def test_on_a_busy_machine_medians_of_a_scenario_are_known_within_a_factor(noisy: bool, wanted: str) -> None:
    def in_scenario(name: str, milliseconds: float) -> Run:
        found = Timing(
            scenario="offline",
            batch=4,
            instances=1,
            cores=2,
            calls=9,
            median_ms=milliseconds,
            p99_ms=99.0,
            throughput=None,
        )
        known = msgspec.structs.replace(latency(milliseconds), noisy=noisy)
        return run(name, "ok", 1e-3, latency=known, latency_ms=milliseconds, timing=found)

    fp32, half = in_scenario("fp32", 13.0), in_scenario("half", 10.0)
    assert speed(half, [fp32, half]).told == wanted


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (2.1, "2.1 times as fast as fp32"),
        (0.09, "11 times slower than fp32"),
        (1.02, "about as fast as fp32"),
    ],
)
def test_a_plan_says_its_ratio_as_a_scan_does(ratio: float, text: str) -> None:
    assert ratio_text(ratio) == text


# -- what disturbed the times, and differences


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (None, []),
        (TimingConditions(waited=0.1, speed_change=1.2), []),
        (TimingConditions(waited=0.41), ["waited 41 % of the time"]),
        (TimingConditions(waited=0.02, speed_change=1.43), ["by a factor of 1.4"]),
        (TimingConditions(waited=0.2, speed_change=1.43), ["waited 20 %"]),  # whose clock may be that of waiting, too
    ],
)
def test_what_disturbed_the_times_is_said_in_a_sentence(found: TimingConditions | None, says: list[str]) -> None:
    result = msgspec.structs.replace(RESULT, timing_conditions=found)
    sentences = [its.text for its in said(result, "other-programs")]
    assert len(sentences) == len(says)
    assert all(part in sentence for part, sentence in zip(says, sentences, strict=True))
    for name in ("text", "md"):
        shown = screen_of(result, verbose=True) if name == "text" else render(result, name)
        shown = " ".join(shown.replace("&#39;", "'").split())
        assert all(sentence in shown for sentence in sentences), name


def test_times_are_shown_with_their_spread() -> None:
    noisy = msgspec.structs.replace(timed("half", 1.0, 0.3, 3.0), latency=latency(33.1, 0.5))
    result = concluded([FP32, noisy])
    shown = render(result, "md")
    assert all(part in shown for part in ("33.1 ms", "31.8 ms", "34.4 ms", "0.5 (0.475 – 0.525)", "30", "15"))
    assert "10.0 ms" in render(result, "text")
    assert "times of 15 rounds, in which fp32 varied by ±4 %" in screen_of(result, verbose=True)


@pytest.mark.parametrize(
    ("old", "new", "directions"),
    [
        ((2.0, 1.9, 2.1), (1.0, 0.9, 1.1), ["worse"]),
        ((1.0, 0.9, 1.1), (2.0, 1.9, 2.1), ["better"]),
        ((2.0, 0.9, 3.0), (1.0, 0.5, 1.1), []),
        ((2.0, 1.9, 2.1), (1.5, 1.4, 1.6), []),
    ],
)
def test_a_difference_of_times_counts_only_if_it_is_told(
    old: tuple[float, float, float], new: tuple[float, float, float], directions: list[str]
) -> None:
    before, after = (one(*found, memory=8) for found in (old, new))
    changes = [change for change in diff_scans(before, after).changes if change.kind == "speed"]
    assert [change.direction for change in changes] == directions


@given(st.floats(1.1, 5), st.floats(0.01, 0.6))
def test_the_same_times_are_no_difference(median: float, width: float) -> None:
    assume(width < 1)
    found = one(median, median * (1 - width), median * (1 + width), memory=8)
    assert not diff_scans(found, found).changes


def test_a_run_that_failed_while_it_was_timed_says_so_instead_of_noisy() -> None:
    """Its times are missing, not noisy; times that were taken before it failed still count."""
    lost = timed("half", 1.0, 1.0, 1.0)
    lost = msgspec.structs.replace(lost, latency=msgspec.structs.replace(lost.latency or rounds(1, 1, 1), speedup=None))
    why = "failed while it was timed: RuntimeError: late call"
    assert speed(lost, [FP32, lost]).told == "noisy"
    lost = msgspec.structs.replace(lost, notes=[why])
    assert speed(lost, [FP32, lost]).told == "unknown"
    early = msgspec.structs.replace(timed("bfloat16", 2.0, 1.9, 2.1), notes=[why])
    assert speed(early, [FP32, early]).told == "faster"
    result = concluded([FP32, lost, early])
    assert cells(result, "speed")[1:] == [None, SpeedOf("faster", 2.0)]
    (failed,) = said(result, "failed-while-timed")
    assert (failed.runs, failed.text) == (["half", "bfloat16"], why)


@pytest.mark.parametrize(
    ("ms", "text"), [(110.6, "111 ms"), (11.06, "11.1 ms"), (0.4, "0.4 ms"), (0.0056, "0.0056 ms")]
)
def test_short_times_are_not_rounded_to_zero(ms: float, text: str) -> None:
    assert milliseconds(ms) == text


@pytest.mark.parametrize(
    ("quartiles", "text"),
    [
        ((0.4, 0.6), "times of 15 rounds, in which fp32 varied by ±20 %"),
        ((0.4, 9.0), "times of 15 rounds, in which half of the calls of fp32 took from 0.4 ms to 9.0 ms"),
    ],
)
def test_a_spread_is_half_the_distance_of_the_quartiles_and_never_more_than_the_median(
    quartiles: tuple[float, float], text: str
) -> None:
    fp32 = msgspec.structs.replace(FP32, latency=Latency(median_ms=0.5, quartiles_ms=quartiles, samples=9))
    assert [its.text for its in said(concluded([fp32, timed("half", 2.0, 1.9, 2.1)]), "rounds")] == [text]


@pytest.mark.parametrize(
    ("ratio", "sentences"),
    [
        (0.1, ["speed is that of 1 call, not of rounds: it is too slow to call it often"]),
        (0.6, ["speed is that of 1 call, not of rounds: too few to compare it with fp32's"]),
    ],
)
def test_one_call_says_once_why_it_is_only_one(ratio: float, sentences: list[str]) -> None:
    found = Speedup(median=ratio, low=ratio / 3, high=ratio * 3, rounds=0)
    ms = 10 / ratio
    once = Latency(median_ms=ms, quartiles_ms=(ms, ms), samples=1, speedup=found)
    half = run("half", latency=once, latency_ms=ms)
    result = concluded([FP32, half])
    assert [its.text for kind in ("one-call", "noisy") for its in said(result, kind)] == sentences
    assert result.recommendation is not None
    assert "varied too much" not in result.recommendation.reason


def on_one_core(run: Run) -> Run:
    latency = run.latency
    assert latency is not None
    assert latency.speedup is not None
    ratio = msgspec.structs.replace(latency.speedup, one_core=True)
    return msgspec.structs.replace(run, latency=msgspec.structs.replace(latency, speedup=ratio))


@pytest.mark.parametrize(("ratio", "best"), [(4.3, "half"), (9.0, "fp32")])
def test_a_ratio_on_one_core_and_one_on_all_are_compared_with_care(ratio: float, best: str) -> None:
    other = timed("fp32", ratio, ratio * 0.95, ratio * 1.05)
    other = msgspec.structs.replace(other, backend="onnxruntime")
    result = concluded([FP32, on_one_core(timed("half", 2.4, 2.0, 3.0)), other])
    assert result.recommendation is not None
    assert result.recommendation.precision == best


def test_ratios_of_calls_on_one_core_are_named() -> None:
    alone = on_one_core(timed("half", 1.4, 1.3, 1.5))
    (found,) = said(concluded([FP32, alone, timed("bfloat16", 2.0, 1.9, 2.1)]), "one-core")
    assert found.runs == ["half"]
