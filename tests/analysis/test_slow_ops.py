"""LP106: an op is called slow only where its time was measured, never because a budget ended in it."""

from __future__ import annotations

import math
import time
from typing import Any, cast

import helpers
import msgspec
import pytest
import torch
from helpers import begun
from shared_result import run, shared_result
from torch import Tensor, nn

from lowprec_check import scan
from lowprec_check.analysis.rules.registry import diagnose
from lowprec_check.core.launcher import MAX_SUSPECTS, Attempts
from lowprec_check.core.mode import Mode
from lowprec_check.core.outcome import Outcome
from lowprec_check.core.tasks import RunTask
from lowprec_check.core.trace import lockstep, op_times
from lowprec_check.process import system
from lowprec_check.process.breadcrumb import AFTER_OP, IN_OP, Position
from lowprec_check.schema.measures import TimingConditions
from lowprec_check.schema.op_calls import OpCall, killed_reason, seconds_killed, to_columns
from lowprec_check.schema.scan_result import Run

SLOW = "mylib.slow.default"


def a_task() -> RunTask:
    return RunTask(
        precision="half",
        device="cpu",
        mode=Mode(),
        files=cast("Any", None),
        so_far=begun("half"),
        errors="both",
        reference="fp32",
        tolerance=1e-2,
        seed=0,
        budget=20.0,
        explain_budget=20.0,
    )


def ended(how: str, op: str, seconds: float) -> Outcome:
    position = Position(state=IN_OP, started=0.0, ops=3, op=op, module="layers.0", source="net.py:7")
    return Outcome(ended=cast("Any", how), position=position, seconds_in_op=seconds)


def test_an_op_in_which_a_budget_ended_once_is_tried_again() -> None:
    attempts = Attempts(a_task())
    assert attempts.learn(ended("timeout", "aten.relu.default", 3.0))
    assert attempts.task.measure_once
    assert not attempts.task.slow
    assert not attempts.learn(Outcome(ended="done"))
    assert not attempts.task.slow


@pytest.mark.parametrize(("state", "words"), [(IN_OP, "at op 3"), (AFTER_OP, "after op 3")])
def test_what_ended_after_an_op_is_not_said_to_be_at_it(state: int, words: str) -> None:
    position = Position(state=state, started=0.0, ops=3, op=SLOW, module="", source="net.py:7")
    found = Outcome(ended="timeout", position=position).why_incomplete(0.5)
    assert found == f"the budget of 0.5 s ended, {words}: {SLOW} (net.py:7)"


def test_an_op_that_takes_too_long_twice_is_emulated() -> None:
    attempts = Attempts(a_task())
    assert attempts.learn(ended("stuck", SLOW, 1.1))
    assert not attempts.task.slow
    assert attempts.learn(ended("stuck", SLOW, 1.2))
    assert attempts.task.slow == ((SLOW, "a call took more than 1.2 s, twice"),)


def test_ops_that_take_long_once_each_are_not_blamed_for_ever() -> None:
    attempts = Attempts(a_task())
    learned = [attempts.learn(ended("stuck", f"mylib.op{number}.default", 2.0)) for number in range(MAX_SUSPECTS)]
    assert learned == [True] * (MAX_SUSPECTS - 1) + [False]
    assert not attempts.task.slow


@pytest.mark.parametrize("seconds", [0.0, 1.0, 3.25, 61.04])
def test_the_seconds_of_a_killed_op_can_be_read_again(seconds: float) -> None:
    assert seconds_killed(killed_reason(seconds)) == round(seconds, 1)
    assert seconds_killed(f"one call took until the budget ended, for {seconds:.0f} s") is None


def found(emulated: str, *others: Run, fp32_ms: float | None = 10.0) -> list[str]:
    half = run("half", "timeout", latency_ms=None, emulated={SLOW: emulated})
    runs = [run("fp32", latency_ms=fp32_ms, tolerance=None), half, *others]
    return [d.message for d in diagnose(msgspec.structs.replace(RESULT, runs=runs), ["LP106"]) if d.op == SLOW]


RESULT = shared_result()


def timed(milliseconds: float) -> Run:
    calls = [OpCall(SLOW, time_ms=1.0, reference_ms=value) for value in (0.1, milliseconds)]
    return run("autocast-bf16", op_calls=to_columns(calls))


def test_a_killed_op_is_compared_with_its_longest_fp32_call() -> None:
    assert found(killed_reason(3.0), timed(20.0)) == [
        "more than 150 times slower than in fp32: over 3.0 s instead of 20.0 ms"
    ]
    assert found(killed_reason(3.0), timed(700.0)) == []


def test_without_a_time_of_the_op_it_is_compared_with_all_of_fp32() -> None:
    [message] = found(killed_reason(3.0))
    assert message == "more than 300 times slower than in fp32: over 3.0 s instead of 10.0 ms, the time of all of fp32"
    assert found(killed_reason(3.0), fp32_ms=1000.0) == []
    assert found(killed_reason(3.0), fp32_ms=None) == []


def test_a_reason_without_a_measurement_is_no_finding() -> None:
    assert found("one call took until the budget ended, for 3 s", timed(0.1)) == []


def slow_ops(*times: tuple[float, float], waited: float | None = None) -> int:
    calls = to_columns([OpCall(SLOW, time_ms=here, reference_ms=fp32) for here, fp32 in [(1.0, 1.0), *times]])
    runs = [run("fp32", latency_ms=10.0, tolerance=None), run("half", latency_ms=500.0, op_calls=calls)]
    timing = TimingConditions(waited=waited)
    return len(diagnose(msgspec.structs.replace(RESULT, runs=runs, timing_conditions=timing), ["LP106"]))


def test_calls_that_had_to_wait_do_not_make_an_op_slow() -> None:
    even = (1.0, 1.0)
    assert slow_ops(*[(10.0, 1.0)] * 5) == 1
    assert slow_ops((200.0, 1.0), even, even, even) == 0
    assert slow_ops((200.0, 1.0), (150.0, 1.0), even, even) == 0
    assert slow_ops((200.0, 20.0), (0.1, 0.1), (0.1, 0.1), (0.1, 0.1)) == 1  # nearly all of its work


def test_an_op_that_is_a_small_part_of_the_run_is_not_slow() -> None:
    assert slow_ops(*[(3.0, 0.1)] * 9) == 1
    assert slow_ops(*[(3.0, 0.1)] * 8) == 0


def test_many_short_calls_do_not_make_an_op_slow() -> None:
    assert slow_ops(*[(0.09, 0.005)] * 400) == 0
    assert slow_ops(*[(0.2, 0.005)] * 200) == 1


CLOCK = {"now": 0.0}
CALLS = {torch.half: 0, torch.float32: 0}


@torch.library.custom_op("slow_ops::costs", mutates_args=())
def costs(x: Tensor) -> Tensor:
    """Every other call takes longer, as those that take new memory."""
    CALLS[x.dtype] += 1
    fast, slow = (3.0, 8.0) if x.dtype == torch.half else (0.125, 1.0)
    CLOCK["now"] += slow if CALLS[x.dtype] % 2 else fast
    return x.clone()


@costs.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


costs.register_autograd(lambda _context, gradient: gradient)


class Costs(nn.Module):
    """Two equal calls of a slow op."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        called = torch.ops.slow_ops.costs
        return cast("Tensor", called(called(self.linear(x)))).relu()


@pytest.mark.parametrize("budget", [True, False])
@pytest.mark.parametrize("longest", [10.0, 0.5])
def test_times_are_those_of_the_op_alone_or_are_not_saved(
    budget: bool, longest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mapping the arguments to those of the reference and recording the op on the tape took longer than small ops."""
    recorded = lockstep.map_args

    def slowly(*given: Any) -> Any:
        CLOCK["now"] += 1.0
        return recorded(*given)

    monkeypatch.setattr(op_times, "LONG_SECONDS", longest)
    monkeypatch.setattr(op_times, "MOST_SECONDS", math.inf)
    monkeypatch.setattr(lockstep, "map_args", slowly)
    monkeypatch.setattr(system, "perf_counter", lambda: CLOCK["now"])
    calls = helpers.run(Costs(), (torch.randn(2, 8),), "half", budget=budget)[1].op_calls
    timed_calls = [(row.op, row.time_ms, row.reference_ms) for row in calls.rows() if row.time_ms is not None]
    assert [op for op, _, _ in timed_calls] == ["slow_ops.costs.default"] * 2
    assert {reference for _, _, reference in timed_calls} == {125.0}
    # What takes longer than that is not called again.
    wanted = {3000.0} if longest == 10.0 else {3000.0, 8000.0}
    assert {time for _, time, _ in timed_calls} == wanted
    assert all(row.reference_ms is None for row in calls.rows() if row.time_ms is None)


def test_while_cores_are_used_only_long_calls_make_an_op_slow() -> None:
    """Measured with a load of 12 on 2 cores: aten.mv in bf16, which uses threads, beside fp32, which does not."""
    waiting = [(21.7, 0.14), (29.8, 0.16), (23.9, 0.15), (43.2, 0.14), (23.0, 0.15)]
    assert slow_ops(*waiting) == slow_ops(*waiting, waited=0.05) == 1
    assert slow_ops(*waiting, waited=0.41) == 0
    assert slow_ops(*[(300.0, 0.2)] * 3, waited=0.41) == 1


@torch.library.custom_op("slow_ops::waits", mutates_args=())
def waits(x: Tensor, seconds: float) -> Tensor:
    if x.dtype == torch.half:
        time.sleep(seconds)
    return x.clone()


class Waits(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(8, 8), seconds

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", torch.ops.slow_ops.waits(self.linear(x), self.seconds)).relu()


@pytest.mark.slow
def test_a_kernel_that_does_not_end_is_found_and_the_rest_is_analyzed() -> None:
    torch.ops.slow_ops.waits(torch.ones(1), 0.0)  # the first call imports, which every worker would do again
    result = scan(Waits(300.0), torch.randn(4, 8), precisions="half", budget=2.0, plan=False, isolation="fork")
    half = result.run("half")
    assert (half.status, half.complete) == ("timeout", True)
    assert [row.outcome for row in half.op_calls.rows() if row.op.startswith("slow_ops")] == ["emulated"]
    slow = [d for d in result.diagnostics if d.code == "LP106"]
    assert [d.op for d in slow] == ["slow_ops.waits.default"]
    assert slow[0].message.endswith("the time of all of fp32")


def test_without_times_nothing_is_concluded_from_times() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Scaled(), nn.Linear(8, 8)).eval()
    result = scan(model, torch.randn(4, 8), precisions=["half"], times="off", plan=True, isolation="none")
    assert "plan" in {run.precision for run in result.runs}
    for its in result.runs:
        assert (its.latency_ms, its.latency) == (None, None), its.precision
        assert its.op_calls.op
        assert not its.op_calls.are_timed


class Scaled(nn.Module):
    """Overflows in fp16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1e6 * 1e-6
