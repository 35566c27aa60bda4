"""A limit that load alone exceeds is put in doubt: by fp32, which is called again. No clock is involved."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest
import torch
from helpers import runs_here
from torch import nn

from lowprec_check.core import launcher as launchers
from lowprec_check.core.launcher import OF_A_RUN, Launcher
from lowprec_check.core.messages import Started
from lowprec_check.core.mode import Mode
from lowprec_check.core.outcome import Outcome, finished
from lowprec_check.core.target_runs import MOST_SLOWDOWN
from lowprec_check.core.tasks import RunTask
from lowprec_check.engine.model.target import make_target
from lowprec_check.engine.model.target_source import TargetSource

MODEL, INPUTS = nn.Linear(2, 2), torch.ones(1, 2)


@pytest.mark.parametrize(
    ("slowdown", "seconds", "budgets", "status"),
    [
        pytest.param(2.5, 30.0, [20.0, 50.0], "ok", id="the machine is slower now"),
        pytest.param(1.0, 30.0, [20.0, 20.0], "timeout", id="the precision is slow"),
        pytest.param(2.5, 10.0, [20.0], "ok", id="it is in time"),
        pytest.param(None, 30.0, [20.0], "timeout", id="the limit is the user's"),
    ],
)
def test_a_run_past_its_limit_gets_as_much_more_time_as_fp32_needs_now(
    monkeypatch: pytest.MonkeyPatch, slowdown: float | None, seconds: float, budgets: list[float], status: str
) -> None:
    made: list[float] = []

    def execute(task: RunTask, *_: Any, **__: Any) -> Outcome:
        made.append(task.budget)
        begun = task.begun()
        if seconds > task.budget:
            return Outcome(so_far=begun, ended="timeout", started=Started(seconds=task.budget, call=1))
        return Outcome(so_far=msgspec.structs.replace(begun.with_fields(status="ok"), is_judged=True))

    monkeypatch.setattr(launchers, "execute", execute)
    launcher = Launcher(TargetSource(make_target(MODEL, INPUTS)), "spawn")
    if slowdown is not None:
        launcher.slowdown = lambda: slowdown
    task = RunTask(precision="half", device="cpu", mode=Mode(), files=cast("Any", None))
    run = finished(task, launcher.do(task, OF_A_RUN))
    assert (made, run.status) == (budgets, status)
    if status == "timeout":
        assert run.reason == "exceeded the budget of 20 s"
        launcher.do(task, OF_A_RUN)
        assert made == [*budgets, 20.0]  # it is not the machine: no other is repeated


@pytest.mark.parametrize(
    ("first", "later", "factor"),
    [(1.0, 1.0, 1.0), (0.5, 0.5, 1.0), (4.0, 2.0, 4.0), (1.0, 3.0, 3.0), (99.0, 1.0, MOST_SLOWDOWN)],
)
def test_fp32_says_how_much_slower_the_machine_is_now(
    monkeypatch: pytest.MonkeyPatch, first: float, later: float, factor: float
) -> None:
    with runs_here(MODEL, INPUTS) as runs:
        runs.reference()
        was = {"first_seconds": 0.5, "seconds": 0.1}
        monkeypatch.setattr(runs, "_first_seconds", was["first_seconds"])
        monkeypatch.setattr(runs, "_fp32_ms", was["seconds"] * 1e3)

        def do(task: RunTask, *_: Any) -> Outcome:
            assert (task.precision, task.measured, task.instrumented) == ("fp32", False, False)
            now = {"first_seconds": first * was["first_seconds"], "seconds": later * was["seconds"]}
            return Outcome(so_far=msgspec.structs.replace(task.begun(), is_judged=True, **now))

        monkeypatch.setattr(runs.launcher, "do", do)
        assert runs.launcher.slowdown is not None
        assert runs.launcher.slowdown() == pytest.approx(factor)


@pytest.mark.parametrize(("options", "may"), [({}, True), ({"budget": 5.0}, False)])
def test_a_limit_of_the_user_is_not_put_in_doubt(options: dict[str, Any], may: bool) -> None:
    with runs_here(MODEL, INPUTS, **options) as runs:
        runs.reference()
        assert (runs.launcher.slowdown is not None) is may


@pytest.mark.parametrize(("seconds", "counts"), [(9.0, False), (12.0, True)])
def test_the_time_that_a_scan_of_long_calls_announces_holds_beside_a_load(
    monkeypatch: pytest.MonkeyPatch, seconds: float, counts: bool
) -> None:
    """A call that takes so long by the clock is long, whatever it waited for."""
    with runs_here(MODEL, INPUTS) as runs:
        runs.reference()
        monkeypatch.setattr(runs, "_seconds_by_clock", seconds)
        runs.in_order([])
        assert runs._task("half").waits_count is counts
