"""Times in rounds: what is concluded from seconds, and which turns are taken. No clock is involved."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowprec_check.engine.model import plain_run
from lowprec_check.engine.model.plain_run import CallTimes
from lowprec_check.features.times.rounds import ENOUGH, MORE, MOST, RoundSchedule, TurnFailed, TurnTimed
from lowprec_check.features.times.speedups import (
    FEW,
    ONE_CALL,
    Rounds,
    Turn,
    latency_of_rounds,
    latency_outside_rounds,
    speedup_of,
)
from lowprec_check.process import system
from lowprec_check.schema.measures import Speedup

ratios = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=40)


@given(ratios)
def test_the_interval_contains_the_median_of_its_ratios(found: list[float]) -> None:
    speedup = speedup_of(found)
    assert speedup.low <= speedup.median <= speedup.high
    assert speedup.rounds == len(found)
    assert speedup.low >= min(found) / ONE_CALL
    assert speedup.high <= max(found) * ONE_CALL
    if len(found) >= 6:
        assert min(found) <= speedup.low
        assert speedup.high <= max(found)


@pytest.mark.parametrize("rounds", [2, 3, 5, 6, 9, 15, 30])
def test_the_interval_contains_the_true_ratio_as_often_as_it_says(rounds: int) -> None:
    draw, inside = random.Random(rounds), 0
    for _ in range(1000):
        speedup = speedup_of([1.7 * math.exp(draw.gauss(0, 0.1)) for _ in range(rounds)])
        inside += speedup.low <= 1.7 <= speedup.high
    assert inside >= 935  # 950 expected, three standard deviations less


@pytest.mark.parametrize(("rounds", "low", "high"), [(6, 1, 6), (8, 1, 8), (9, 2, 8), (12, 3, 10), (15, 4, 12)])
def test_the_interval_of_many_ratios_is_between_order_statistics(rounds: int, low: int, high: int) -> None:
    """The ranks that tables of the sign test give for 95 %."""
    found = speedup_of([float(number) for number in range(1, rounds + 1)])
    assert (found.low, found.high) == (low, high)


@given(st.lists(st.floats(1e-5, 10), min_size=1, max_size=30), st.floats(0.1, 10))
def test_a_run_that_is_always_so_many_times_as_fast_is_told_exactly(fp32: list[float], factor: float) -> None:
    speedup = latency_of_rounds(
        {number: Turn([second / factor]) for number, second in enumerate(fp32)},
        {number: Turn([second]) for number, second in enumerate(fp32)},
    ).speedup
    assert speedup is not None
    assert speedup.median == pytest.approx(factor)


def rounds(*seconds: float, disturbed: bool = False, alone: float | None = None) -> Rounds:
    return {
        number: Turn([each], [alone] if alone is not None else [], disturbed) for number, each in enumerate(seconds)
    }


def test_what_the_load_does_to_calls_on_several_cores_is_left_out() -> None:
    """bf16 waits 30 ms for its second thread; alone on one core it takes twice as long as fp32."""
    latency = latency_of_rounds(rounds(*[0.03] * 7, disturbed=True, alone=2e-5), rounds(*[1e-5] * 7, alone=1e-5))
    assert latency.speedup == Speedup(median=0.5, low=0.5, high=0.5, rounds=7, one_core=True)


def test_rounds_that_nothing_disturbed_are_preferred() -> None:
    fp32, mine = dict(rounds(*[1.0] * 6)), dict(rounds(*[0.5] * 6))
    fp32[6] = mine[6] = Turn([9.0], [1.0], disturbed=True)
    latency = latency_of_rounds(mine, fp32)
    assert latency.speedup == Speedup(median=2.0, low=2.0, high=2.0, rounds=6)


def test_without_undisturbed_calls_nothing_is_compared() -> None:
    assert latency_of_rounds(rounds(0.5, 0.5, disturbed=True), rounds(1.0, 1.0)).speedup is None


def test_long_calls_that_were_disturbed_are_known_within_a_factor() -> None:
    speedup = latency_of_rounds(rounds(6.0, 6.2, disturbed=True), rounds(0.3, 0.2, disturbed=True, alone=0.1)).speedup
    assert speedup is not None
    assert speedup.rounds == 1
    assert speedup.high == pytest.approx(ONE_CALL * speedup.median)
    assert speedup.high < 1


def test_a_short_call_that_was_disturbed_is_nothing_to_guess_from() -> None:
    assert latency_of_rounds(rounds(6.0, 6.2, disturbed=True), rounds(0.3, 0.2, disturbed=True)).speedup is None


def test_rounds_of_one_run_only_are_not_compared() -> None:
    assert latency_of_rounds({1: Turn([1.0])}, {0: Turn([1.0])}).speedup is None


def test_median_quartiles_and_noise_are_those_of_all_calls() -> None:
    latency = latency_of_rounds({0: Turn([0.001, 0.002, 0.003]), 1: Turn([0.004, 0.005])})
    assert (latency.median_ms, latency.quartiles_ms, latency.samples) == (3.0, (2.0, 4.0), 5)
    assert latency.noisy
    assert not latency_of_rounds({0: Turn([0.0030, 0.0031, 0.0032])}).noisy


def test_a_run_too_slow_for_rounds_is_known_within_a_factor() -> None:
    fp32 = latency_of_rounds({0: Turn([0.03])})
    latency = latency_outside_rounds(1.8, fp32)
    assert latency.samples == 1
    assert latency.median_ms == pytest.approx(1800)
    assert latency.speedup is not None
    assert latency.speedup.median == pytest.approx(1 / 60)
    assert latency.speedup.rounds == 0
    assert latency.speedup.high < 1


# -- the schedule


def turn(row: int, number: int, seconds: float, *, waited: float = 0.0, alone: bool = False) -> TurnTimed:
    return TurnTimed(
        row=row,
        round=number,
        seconds=[seconds],
        waited=waited,
        is_disturbed=waited > 0,
        on_one_core=[seconds] if alone else [],
        fixed_work=1e-3,
    )


def taken(schedule: RoundSchedule, seconds: list[float], noise: float = 0.0) -> list[list[int]]:
    """The rows timed in each round, if each call of a row takes its ``seconds``, times a random factor."""
    draw, order = random.Random(0), list[list[int]]()
    for row in schedule:
        if len(order) <= schedule.number:
            order.append([])
        order[-1].append(row)
        schedule.note(turn(row, schedule.number, seconds[row] * math.exp(draw.gauss(0, noise))))
    return order


def test_rounds_go_forth_and_back_until_every_ratio_is_known() -> None:
    order = taken(RoundSchedule(3, seconds=60), [1.0, 0.5, 1.02])
    assert order[:2] == [[0, 1, 2], [2, 1, 0]]
    assert len(order) == ENOUGH
    assert order[FEW:] == [[2, 0], [0, 2], [2, 0]]  # 2.0 is far from 1, 1.02 is not


def test_a_run_that_is_many_times_slower_is_called_in_one_round_only() -> None:
    order = taken(RoundSchedule(3, seconds=60), [0.03, 1.7, 0.031])
    assert [row for rows in order for row in rows].count(1) == 1


def test_a_run_that_is_told_to_be_slower_after_a_few_rounds_gets_no_more() -> None:
    order = taken(RoundSchedule(3, seconds=60), [0.1, 0.12, 0.101], noise=0.01)
    assert [row for rows in order for row in rows].count(1) == FEW
    assert len(order) >= ENOUGH


def test_what_varies_is_timed_longer_but_not_forever() -> None:
    order = taken(RoundSchedule(2, seconds=60), [1.0, 1.0], noise=0.5)
    assert len(order) == MOST


def test_what_fails_is_timed_in_a_few_rounds_however_it_varies() -> None:
    order = taken(RoundSchedule(3, seconds=60, on_accelerator=True, failing=[1]), [1.0, 1.0, 1.0], noise=0.5)
    assert [row for rows in order for row in rows].count(1) == FEW
    assert len(order) == MOST
    order = taken(RoundSchedule(3, seconds=60, on_accelerator=True, failing=[1, 2]), [1.0, 1.0, 1.0], noise=0.5)
    assert len(order) == FEW


@pytest.mark.parametrize(("seconds_of_a_round", "noise", "rounds"), [(100, 0.0, FEW), (1, 0.0, 4), (1, 0.4, 4 * MORE)])
def test_rounds_are_timed_as_long_as_time_is_left_and_longer_if_they_are_noisy(
    monkeypatch: pytest.MonkeyPatch, seconds_of_a_round: int, noise: float, rounds: float
) -> None:
    schedule = RoundSchedule(2, seconds=4)
    monkeypatch.setattr(system, "monotonic", lambda: schedule.number * seconds_of_a_round)
    assert len(taken(schedule, [1.0, 1.02], noise)) == rounds


def test_an_accelerator_whose_host_varies_gets_enough_rounds_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = RoundSchedule(2, seconds=4, on_accelerator=True)
    monkeypatch.setattr(system, "monotonic", lambda: schedule.number)
    assert len(taken(schedule, [1.0, 1.0], noise=0.5)) == ENOUGH


def test_a_ratio_that_cannot_be_told_gets_enough_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rounds of 2 s are more than the 4 s that rounds may take, and ratios from 0.8 to 1.6 decide nothing."""
    for fastest, count in ((0.8, ENOUGH), (1.58, FEW)):
        schedule, found = RoundSchedule(2, seconds=4), 0
        monkeypatch.setattr(system, "monotonic", lambda schedule=schedule: schedule.number * 2)
        for row in schedule:
            found += row == 0
            seconds = 1.0 if row == 0 else 1 / (fastest if schedule.number % 2 else 1.6)
            schedule.note(turn(row, schedule.number, seconds))
        assert found == count


def test_final_rounds_go_on_from_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of 4 s, of which the last decide: two more are as many as all of them need."""
    first = RoundSchedule(3, seconds=60)
    monkeypatch.setattr(system, "monotonic", lambda: first.number * 4)
    taken(first, [1.0, 0.5, 0.5], noise=0.001)
    count = len(first.turns[1])
    assert count == FEW
    final = RoundSchedule(3, seconds=12, final=True, earlier=first.turns)
    monkeypatch.setattr(system, "monotonic", lambda: final.number * 4)
    for row in final:
        final.note(turn(row, final.number, 0.5 if row else 1.0))
    assert [len(turns) for turns in final.turns] == [ENOUGH] * 3
    assert len(first.turns[1]) == count
    latency = final.latency(1)
    assert latency is not None
    assert latency.speedup is not None
    assert latency.speedup.rounds == ENOUGH


def test_final_rounds_keep_to_their_time_however_ratios_to_fp32_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = [{number: turn(row, number, 1.0) for number in range(FEW)} for row in range(3)]
    final = RoundSchedule(3, seconds=12, final=True, on_accelerator=True, earlier=earlier)
    monkeypatch.setattr(system, "monotonic", lambda: final.number * 4)
    taken(final, [1.0, 1.0, 1.0], noise=0.5)
    assert len(final.turns[1]) == FEW + 3


def test_a_run_that_fails_is_left_out_and_without_fp32_nothing_is_timed() -> None:
    schedule = RoundSchedule(3, seconds=60)
    found = []
    for row in schedule:
        found.append(row)
        if row == 1:
            schedule.note(TurnFailed(row, "it failed"))
        else:
            schedule.note(turn(row, schedule.number, 1.0))
    assert found.count(1) == 1
    assert schedule.latency(1) is None
    assert schedule.latency(2) is not None
    schedule = RoundSchedule(2, seconds=60)
    for row in schedule:
        schedule.note(TurnFailed(row, "it failed"))
    assert [schedule.latency(row) for row in range(2)] == [None, None]


def test_load_is_noticed_and_the_rounds_after_it_use_one_core() -> None:
    schedule = RoundSchedule(2, seconds=60)
    flags = []
    for row in schedule:
        flags.append(schedule.is_disturbed)
        schedule.note(turn(row, schedule.number, 1.0, waited=0.5, alone=schedule.is_disturbed))
    assert flags[0] is False
    assert all(flags[1:])
    conditions = schedule.conditions()
    assert conditions.waited == pytest.approx(0.5)
    assert conditions.speed_change == pytest.approx(1.0)
    latency = schedule.latency(1)
    assert latency is not None
    assert latency.speedup is not None
    assert latency.speedup.one_core


def test_runs_of_the_same_rounds_are_compared_with_each_other() -> None:
    """Their ratios to fp32 vary with fp32, by a third; the ratio of one to the other does not."""
    schedule, draw = RoundSchedule(4, seconds=60, final=True), random.Random(0)
    for number in range(12):
        for row, seconds in enumerate((draw.uniform(0.9, 1.2), 0.5, 0.53, 0.505)):
            schedule.note(turn(row, number, seconds))
    assert [schedule.slower_than(row) for row in range(4)] == [[], [], [1], []]
    ratios = [latency.speedup for latency in map(schedule.latency, (1, 2)) if latency is not None]
    assert all(ratio is not None for ratio in ratios)
    first, second = ratios
    assert first is not None
    assert second is not None
    assert first.low < second.high


def test_runs_are_compared_on_one_core_only_with_each_other() -> None:
    """The second run was disturbed in all rounds: the first is compared on one core too, where its ratio differs."""
    schedule = RoundSchedule(3, seconds=60)
    for number in range(6):
        for row, (seconds, alone, waited) in enumerate(((1.0, 2.0, 0.0), (0.5, 1.8, 0.0), (9.0, 1.0, 0.5))):
            made = turn(row, number, seconds, waited=waited)
            schedule.note(msgspec.structs.replace(made, on_one_core=[alone]))
    found = [latency.speedup for latency in map(schedule.latency, (1, 2)) if latency is not None]
    assert [(ratio.median, ratio.one_core) for ratio in found if ratio is not None] == [(2 / 1.8, True), (2.0, True)]


def test_a_processor_that_changes_its_speed_is_noticed() -> None:
    schedule = RoundSchedule(2, seconds=60)
    for number in range(8):
        for row in range(2):
            made = turn(row, number, 1.0)
            schedule.note(
                TurnTimed(row=row, round=number, seconds=made.seconds, waited=None, fixed_work=1e-3 * (1 + number // 4))
            )
    assert schedule.conditions().speed_change == pytest.approx(2.0)
    assert schedule.conditions().waited is None


def test_a_few_turns_after_a_long_wait_are_no_change_of_the_clock() -> None:
    """A model that slept for a minute: the first work after it took 12 times as long."""
    for turns_of_a_run, change in ((3, None), (12, pytest.approx(1.0))):
        schedule = RoundSchedule(2, seconds=60)
        for number in range(turns_of_a_run):
            for row in range(2):
                work = 12e-3 if number == 1 else 1e-3
                schedule.note(msgspec.structs.replace(turn(row, number, 60.0), fixed_work=work))
        assert schedule.conditions().speed_change == change


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.3, 3.0))
def test_the_ratio_survives_a_machine_that_changes_its_speed(seed: int, factor: float) -> None:
    """The speed drifts by a factor of 3 in the course of the rounds: as each round meets both runs, the ratio stays."""
    draw, schedule = random.Random(seed), RoundSchedule(2, seconds=60)
    for row in schedule:
        slower = 1 + 2 * schedule.number / MOST
        seconds = (1.0, 1 / factor)[row] * slower * math.exp(abs(draw.gauss(0, 0.03)))
        schedule.note(turn(row, schedule.number, seconds))
    latency = schedule.latency(1)
    assert latency is not None
    assert latency.speedup is not None
    assert latency.speedup.median == pytest.approx(factor, rel=0.15)
    center = math.sqrt(latency.speedup.low * latency.speedup.high)  # one round is known within a factor
    assert center == pytest.approx(factor, rel=0.2)


# -- the calls of a plain run


def times_of(monkeypatch: pytest.MonkeyPatch, calls: list[tuple[float, bool]], **limits: float) -> CallTimes:
    """As many ``calls`` as there are to be: seconds, and whether the call compiles."""
    frames, left = [0], iter(calls)
    monkeypatch.setattr(plain_run, "compiled_frames", lambda: frames[0])
    monkeypatch.setattr(system.CoreWaits, "longest", lambda _: 0.0)
    times = CallTimes(3, **{"seconds": 10.0, "too_slow": 2.0, "hopeless": 5.0} | limits)
    while times.goes_on:
        times.begin()
        seconds, compiles = next(left)
        frames[0] += compiles
        times.end(seconds)
    return times


@pytest.mark.parametrize(
    ("calls", "count", "fastest", "first"),
    [
        ([(1.0, False), (0.5, False), (0.6, False)], 3, 0.5, 1.0),
        ([(9.0, True), (8.0, True), (0.5, False)], 3, 0.5, 16.5),  # a model that compiles again in its second call
        ([(9.0, True), (8.0, True), (7.0, True)], 3, 7.0, 10.0),
        ([(9.0, True), (3.0, False)], 2, 3.0, 9.0),  # too slow to be called again
        ([(6.0, False)], 1, 6.0, 6.0),
        ([(1.0, False), (11.0, False)], 2, 1.0, 1.0),  # another one would take longer than there is time
    ],
)
def test_calls_that_compile_tell_nothing_of_others(
    monkeypatch: pytest.MonkeyPatch, calls: list[tuple[float, bool]], count: int, fastest: float, first: float
) -> None:
    times = times_of(monkeypatch, calls)
    assert (times.count, times.fastest, times.first) == (count, fastest, first)
    assert times.is_hopeless == (fastest > 5.0)


@pytest.mark.parametrize(("first", "hopeless", "count"), [(6.0, math.inf, 3), (6.0, 5.0, 1), (11.0, math.inf, 1)])
def test_a_first_call_that_loads_kernels_tells_nothing_of_others_where_the_format_may_be_fast(
    monkeypatch: pytest.MonkeyPatch, first: float, hopeless: float, count: int
) -> None:
    times = times_of(monkeypatch, [(first, False), (0.03, False), (0.03, False)], hopeless=hopeless)
    assert (times.count, times.fastest) == (count, 0.03 if count > 1 else first)


@pytest.mark.parametrize(
    ("waited", "used", "fastest"),
    [
        (0.0, 0.5, 6.0),
        (5.5, 0.5, 0.5),  # beside a load
        (6.5, 0.4, 0.4),  # it waited shortly before, too
        (0.0, 9.0, 6.0),  # what is made for a call is not a part of it
    ],
)
def test_what_threads_of_a_plain_call_wait_for_a_core_does_not_count(
    monkeypatch: pytest.MonkeyPatch, waited: float, used: float, fastest: float
) -> None:
    clock = iter([0.0, used])
    monkeypatch.setattr(system.CoreWaits, "longest", lambda _: waited)
    monkeypatch.setattr(system, "thread_time", lambda: next(clock))
    times = CallTimes(1, seconds=10.0, too_slow=2.0, hopeless=5.0)
    clock = iter([0.0, used])
    times.begin()
    times.end(6.0)
    assert (times.fastest, times.fastest_by_clock, times.is_hopeless) == (fastest, 6.0, fastest > 5.0)
