"""A scan of a model with long calls: what it announces is what it keeps to. No clock is involved."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from helpers import begun, runs_here
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lowprec_check.analysis.run_summary import lacked_time
from lowprec_check.core import launcher as launchers
from lowprec_check.core.launcher import FORK_WAITED, Launcher
from lowprec_check.core.long_calls import LEAST_CALLS, MOST_SECONDS, LongCalls
from lowprec_check.core.mode import Mode
from lowprec_check.core.outcome import Outcome
from lowprec_check.core.tasks import LONG_CALL, ModelTask
from lowprec_check.engine.model.target import make_target
from lowprec_check.engine.model.target_source import TargetSource
from lowprec_check.process import system


def test_two_runs_of_a_minute_a_call_take_at_most_eight_minutes() -> None:
    long_calls = LongCalls(system.monotonic(), 60.0, 2)
    assert long_calls.notice == (
        "A call takes 60 s: each precision is called once, and once op by op. The scan takes at most 8 minutes."
    )


@given(call=st.floats(LONG_CALL, 600.0), runs=st.integers(1, 8), slower=st.lists(st.floats(0.2, 50.0), min_size=8))
def test_a_scan_ends_when_it_says_however_slow_its_runs_are(call: float, runs: int, slower: list[float]) -> None:
    """A part that takes longer than its budget is ended; runs that begin too late are skipped."""
    now = [call * 1.5]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(system, "monotonic", lambda: now[0])
        long_calls = LongCalls(0.0, call, runs)
        limit = max(MOST_SECONDS, call * (2 + LEAST_CALLS * runs))
        for factor in slower[:runs]:
            if long_calls.begin_run() is not None:
                continue
            assert long_calls.plain_seconds >= call  # as fast as fp32, it passes
            plain, explained = long_calls.plain_seconds, long_calls.explain_seconds
            now[0] += min(plain, call * factor) + min(explained, 2 * call * factor)
        assert now[0] <= limit + LEAST_CALLS * call


def test_a_run_that_is_skipped_for_want_of_time_says_so_in_a_field() -> None:
    with runs_here(torch.nn.Linear(2, 2), torch.ones(1, 2)) as runs:
        runs.reference()
        runs.long_calls = LongCalls(-1e9, 60.0, 1)
        run = runs.run("half")
    assert (run.status, run.time_was_over) == ("skipped", True)
    assert lacked_time(run)


def test_calls_that_are_not_long_are_repeated() -> None:
    def slow_seconds(fp32_ms: float | None) -> float:
        files = cast("Any", None)
        return ModelTask(precision="half", device="cpu", mode=Mode(), files=files, fp32_ms=fp32_ms).slow_seconds

    assert slow_seconds(None) == LONG_CALL
    assert slow_seconds(100.0) == 2.5
    assert slow_seconds(60_000.0) == LONG_CALL


@pytest.mark.parametrize(("fresh", "forks"), [("idle", True), ("done", False)])
def test_a_model_that_sleeps_is_not_said_to_wait_for_a_lock(
    fresh: Any, forks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a fresh interpreter it leaves the processor unused as well: then it is not because of the fork."""
    made: list[tuple[str, float]] = []

    def execute(task: Any, source: Any, isolation: str, *, idle_limit: float = math.inf) -> Outcome:
        made.append((isolation, idle_limit))
        if isolation == "fork" and idle_limit < math.inf:
            return Outcome(ended="idle")
        return Outcome(ended=fresh if isolation == "spawn" else "done", so_far=begun("half"))

    monkeypatch.setattr(launchers, "execute", execute)
    launcher = Launcher(TargetSource(make_target(nn.Linear(2, 2), torch.zeros(1, 2))), "fork")
    task = ModelTask(precision="half", device="cpu", mode=Mode(), files=cast("Any", None))
    outcome = launcher.do(task)
    assert (launcher.isolation == "fork") == forks
    assert (FORK_WAITED in outcome.notes) != forks
    assert made[-1] == (("fork", math.inf) if forks else ("spawn", 5.0))
