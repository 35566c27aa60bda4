"""Runs timed in rounds, in forks and in one process: what is timed, what fails, what is left behind."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import torch
from conftest import Call, Register
from torch import Tensor, nn
from user_files import NET

from lowprec_check import Backend, Run, ScanResult, scan
from lowprec_check.core import target_runs
from lowprec_check.core.feature_hooks import TimedRuns
from lowprec_check.core.launcher import Launcher
from lowprec_check.core.machine import Machine
from lowprec_check.core.messages import TaskAnswer
from lowprec_check.core.mode import Mode
from lowprec_check.core.outcome import Outcome
from lowprec_check.core.target_runs import open_runs
from lowprec_check.core.tasks import ModelTask
from lowprec_check.engine.model.target import make_target
from lowprec_check.engine.model.target_source import TargetSource
from lowprec_check.features.times import event_times, rounds, timed_runs, turns
from lowprec_check.features.times.rounds import TurnTimed
from lowprec_check.process import Isolation, system
from lowprec_check.schema.measures import TimingConditions
from lowprec_check.schema.options import ScanOptions
from lowprec_check.torchkit.compiled import compiled_frames, own_compiled_code

Write = Callable[..., Path]

ISOLATIONS = get_args(Isolation)


@pytest.fixture
def whole_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that waited for a core or a disk does not end its turn: samples are counted."""
    monkeypatch.setattr(event_times, "ENOUGH_SECONDS", float("inf"))


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without load, in forks and this process."""
    monkeypatch.setattr(system.CoreWaits, "longest", lambda _: None)


def timed(
    model: nn.Module,
    inputs: Any,
    *precisions: str,
    isolation: Isolation = "fork",
    progress: list[str] | None = None,
    slow: tuple[str, ...] = (),
) -> tuple[list[Run], TimedRuns]:
    """The runs as their plain parts leave them, and with times."""

    def on_progress(name: str, doing: str) -> None:
        if progress is not None:
            progress.append(f"{name}: {doing}")

    source = TargetSource(make_target(model, inputs))
    source.on_progress = on_progress
    machine = Machine(environment={"device": "cpu", **{f"{low}_accelerated": False for low in slow}})
    with open_runs(source, ScanOptions(errors="none", further_inputs=0), machine, isolation) as target_runs:
        target_runs.reference()
        runs = [target_runs.run(name, instrumented=False) for name in precisions]
        return runs, target_runs.time(runs)


class Counts(nn.Module):
    """Appends the dtype of each call to a file, across processes; ``fails`` from a call on, in half."""

    def __init__(self, file: Path, fails_after: int | None = None, *, dies: bool = False) -> None:
        super().__init__()
        self.linear, self.file, self.fails_after, self.dies = nn.Linear(8, 8), str(file), fails_after, dies

    def forward(self, x: Tensor) -> Tensor:
        with open(self.file, "a", encoding="ascii") as file:
            file.write(f"{str(x.dtype).removeprefix('torch.')}\n")
        if self.fails_after is not None and x.dtype == torch.half and self._calls_in_half() > self.fails_after:
            if self.dies:
                os._exit(3)
            raise RuntimeError("enough of it")
        return self.linear(x)

    def _calls_in_half(self) -> int:
        return Path(self.file).read_text(encoding="ascii").split().count("float16")


@pytest.mark.usefixtures("whole_turns")
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_all_runs_are_called_in_the_same_rounds(isolation: Isolation, tmp_path: Path) -> None:
    progress: list[str] = []
    model = Counts(tmp_path / "calls")
    weight, threads = model.linear.weight.detach().clone(), torch.get_num_threads()
    _, found = timed(model, torch.randn(4, 8), "half", "bfloat16", isolation=isolation, progress=progress)
    assert [run.precision for run in found.runs] == ["fp32", "half", "bfloat16"]
    for run in found.runs:
        assert run.latency is not None
        assert run.latency_ms == run.latency.median_ms
        low, high = run.latency.quartiles_ms
        assert 0 < low <= run.latency_ms <= high
        assert run.latency.samples >= 9
    assert found.runs[0].latency is not None
    assert found.runs[0].latency.speedup is None
    assert found.conditions is not None
    assert "times: round 1" in progress
    calls = (tmp_path / "calls").read_text(encoding="ascii").split()
    changes = sum(1 for before, after in itertools.pairwise(calls) if before != after)
    assert changes > 6  # in turns, not one run after the other
    assert torch.get_num_threads() == threads
    assert torch.equal(model.linear.weight, weight)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    # Without a death, a fresh interpreter times them as this process does.
    ("isolation", "dies"),
    [("fork", False), ("shared", False), ("none", False), ("fork", True), ("spawn", True)],
)
def test_a_run_that_fails_while_it_is_timed_costs_only_its_own_times(
    isolation: Isolation, dies: bool, tmp_path: Path
) -> None:
    """In one process, what comes after a death is lost too, but each run keeps the time of its plain part."""
    model = Counts(tmp_path / "calls", fails_after=4, dies=dies)
    runs, found = timed(model, torch.randn(4, 8), "bfloat16", "half", isolation=isolation)
    assert [run.status for run in found.runs] == ["ok", "ok", "ok"]
    fp32, bfloat16, half = found.runs
    assert fp32.latency is not None
    assert bfloat16.latency is not None
    assert half.latency_ms == runs[1].latency_ms
    if isolation == "none":
        assert "failed while it was timed: RuntimeError: enough of it" in half.notes
    if isolation == "fork":
        reason = "its process ended" if dies else "RuntimeError: enough of it"
        assert f"failed while it was timed: {reason}" in half.notes
        assert bfloat16.latency.speedup is not None
        assert bfloat16.latency.speedup.rounds >= 3


class FillsCache(nn.Module):
    """Its first call makes a table that the others use, which takes 0.3 s; in bf16 a call takes 30 ms, else 120."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(8, 8), None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            time.sleep(0.3)
            self.table = torch.zeros(8)
        time.sleep(0.03 if x.dtype == torch.bfloat16 else 0.12)
        return self.linear(x) + self.table.to(x.dtype)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("isolation", ["fork", "none"])
def test_what_a_first_call_makes_for_others_is_part_of_no_time(
    isolation: Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isolation == "none":  # there, each turn makes the table several times
        monkeypatch.setattr(rounds, "MOST", 3)
    slow = ("fp16", "bf16")
    _, found = timed(FillsCache(), torch.randn(4, 8), "half", "bfloat16", isolation=isolation, slow=slow)
    fp32, half, bfloat16 = found.runs
    assert not half.judged_by_one_call
    for run in (fp32, half, bfloat16):
        assert run.latency is not None
        assert run.latency.median_ms < 200
    assert bfloat16.latency is not None
    assert bfloat16.latency.speedup is not None
    assert bfloat16.latency.speedup.median > 2


@pytest.mark.slow
def test_a_call_on_one_core_that_compiles_again_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "ALONE", math.inf)  # other programs may work meanwhile
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    task = ModelTask(precision="fp32", device="cpu", files=None, mode=Mode())  # type: ignore[arg-type]
    target = make_target(torch.compile(nn.Linear(8, 8), backend="eager"), torch.randn(4, 8))
    with own_compiled_code(autocast=False), task.mode.ready(task, target) as ready:
        calls = turns.TimedCalls(task, target, ready)
        calls.warm_up()
        frames = compiled_frames()
        assert calls._call_alone() is None
        assert compiled_frames() > frames  # else this test shows nothing
        assert calls._call_alone() is not None
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("worked", "waited", "by_others", "seconds"),
    [
        (0.004, 0.0, 0.0, 0.004),
        (0.004, 0.9, 0.0, 0.004),  # beside a load
        (0.004, 0.0, 0.5, None),
        (0.004, None, 0.0, None),  # a system that does not say how long threads wait
        (0.004, 0.5, 0.0, None),  # it sleeps
    ],
)
def test_the_processor_time_of_a_call_on_one_core_is_the_same_beside_a_load(
    monkeypatch: pytest.MonkeyPatch, worked: float, waited: float | None, by_others: float, seconds: float | None
) -> None:
    clocks = {"thread_time": worked, "own_wait": waited, "time_of_other_threads": by_others}
    passed = dict.fromkeys(clocks, 0.0)

    def call_once(*_: Any) -> tuple[None, float]:
        for name, after in clocks.items():
            passed[name] = after or 0.0
        return None, 0.904 if waited else 0.004

    monkeypatch.setattr(turns, "call_once", call_once)
    for name, after in clocks.items():
        monkeypatch.setattr(system, name, lambda name=name, after=after: None if after is None else passed[name])
    task = ModelTask(precision="fp32", device="cpu", files=None, mode=Mode())  # type: ignore[arg-type]
    target = make_target(nn.Linear(8, 8), torch.randn(4, 8))
    with task.mode.ready(task, target) as ready:
        assert turns.TimedCalls(task, target, ready)._call_alone() == seconds


def test_a_run_that_is_much_slower_is_not_called_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_runs, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(timed_runs, "SLOW_RATIO", 0.0)
    model = Counts(tmp_path / "calls")
    runs, found = timed(model, torch.randn(4, 8), "half")
    half = found.runs[1]
    assert (tmp_path / "calls").read_text(encoding="ascii").split().count("float16") == half.calls + 1  # for memory
    assert half.latency is not None
    assert half.latency.samples == 1  # the fastest
    assert half.latency.speedup is not None
    assert half.latency.speedup.rounds == 0
    assert half.latency_ms == runs[0].latency_ms


def test_rounds_that_would_take_too_long_are_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_runs, "MOST_SECONDS", 0.0)
    model = Counts(tmp_path / "calls")
    runs, found = timed(model, torch.randn(4, 8), "half")
    assert (tmp_path / "calls").read_text(encoding="ascii").split().count("float16") == runs[0].calls + 1  # for memory
    assert found.conditions is not None
    assert found.conditions.reason == "3 rounds would take 0 minutes"
    assert [run.latency.speedup.rounds for run in found.runs[1:] if run.latency and run.latency.speedup] == [0]


@pytest.mark.parametrize(("ended", "reason"), [("crashed", "signal 9"), ("timeout", None)])
def test_a_process_that_times_all_runs_and_ends_early_says_which_turn_it_was_in(
    ended: Any, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first round of fp32 and half was noted, and then that of half, which comes first in the second."""
    answers = [
        TaskAnswer.of(TurnTimed(row=row, round=number, seconds=[1.0], waited=None, fixed_work=1e-3))
        for row, number in ((0, 0), (1, 0), (1, 1))
    ]
    outcome = Outcome(ended=ended, reason=reason, answers=answers)
    source = TargetSource(make_target(nn.Linear(8, 8), torch.randn(2, 8)))
    launcher = Launcher(source, "shared")
    monkeypatch.setattr(launcher, "do", lambda task: outcome)
    tasks = [ModelTask(precision=name, device="cpu", mode=Mode(), files=cast("Any", None)) for name in ("fp32", "half")]
    schedule = timed_runs.time_in_rounds(tasks, launcher, in_forks=False)
    assert schedule.failures == {0: reason or "a turn took longer than the time budget"}
    assert schedule.latency(1) is not None


def test_runs_that_gave_no_output_are_not_timed(tmp_path: Path) -> None:
    model = Counts(tmp_path / "calls", fails_after=0)
    _, found = timed(model, torch.randn(4, 8), "half", "bfloat16")
    assert [run.status for run in found.runs] == ["ok", "error", "ok"]
    assert found.runs[1].latency is None
    assert found.runs[2].latency is not None


@pytest.mark.usefixtures("quiet")
def test_many_runs_are_timed_in_groups_each_beside_fp32(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(timed_runs, "AT_ONCE", 1)
    _, found = timed(Counts(tmp_path / "calls"), torch.randn(4, 8), "half", "bfloat16", "autocast-bf16")
    assert all(run.latency is not None and run.latency.speedup is not None for run in found.runs[1:])


@pytest.mark.usefixtures("quiet")
def test_weights_too_large_for_copies_are_cast_in_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []
    time_in_rounds = timed_runs.time_in_rounds

    def spy(*args: Any, in_forks: bool, **more: Any) -> Any:
        seen.append(in_forks)
        return time_in_rounds(*args, in_forks=in_forks, **more)

    monkeypatch.setattr(timed_runs, "time_in_rounds", spy)
    for free in (10_000, 100):
        monkeypatch.setattr(turns, "free_memory", lambda device, free=free: free)
        _, found = timed(Counts(tmp_path / "calls"), torch.randn(4, 8), "half")
        assert found.runs[1].latency is not None
        assert found.runs[1].latency.speedup is not None
    assert seen == [True, False]


class Copies(Backend):
    """Prepares copies, and counts them."""

    name = "copies"
    summary = "copies of the model"
    prepared = 0

    def prepare(self, model: Any, example: Any) -> Any:
        type(self).prepared += 1
        return copy.deepcopy(model)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("fits", [True, False])
def test_in_one_process_a_backend_prepares_once_for_all_rounds_if_copies_fit(
    register: Register, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    register(Copies())
    monkeypatch.setattr(Copies, "prepared", 0)
    monkeypatch.setattr(turns, "free_memory", lambda device: 10_000 if fits else 100)
    source = TargetSource(make_target(nn.Linear(8, 8), torch.randn(4, 8)))
    machine = Machine(environment={"device": "cpu"})
    with open_runs(source, ScanOptions(errors="none", further_inputs=0), machine, "none") as target_runs:
        target_runs.reference()
        run = target_runs.run("bfloat16", "copies", instrumented=False)
        before = Copies.prepared
        latency = target_runs.time([run]).runs[1].latency
    assert latency is not None
    assert latency.speedup is not None
    rounds_timed = latency.speedup.rounds
    assert rounds_timed >= 3
    if fits:
        assert Copies.prepared - before == 1
    else:
        assert Copies.prepared - before >= rounds_timed


class Setting(Copies):
    """Sets something for the whole process."""

    name = "setting"

    def prepare(self, model: Any, example: Any) -> Any:
        torch.backends.mha.set_fastpath_enabled(False)
        return super().prepare(model, example)


class Asks(nn.Linear):
    """Writes what is set to a file, which is not rewound."""

    def __init__(self, path: Path) -> None:
        super().__init__(8, 8)
        self.path = path

    def forward(self, x: Tensor) -> Tensor:
        with self.path.open("a", encoding="ascii") as file:
            file.write(f"{x.dtype} {torch.backends.mha.get_fastpath_enabled()}\n")
        return super().forward(x)


@pytest.mark.usefixtures("quiet")
def test_in_one_process_a_setting_of_a_backend_counts_in_its_own_turns_only(register: Register, tmp_path: Path) -> None:
    register(Setting())
    path = tmp_path / "set"
    source = TargetSource(make_target(Asks(path), torch.randn(4, 8)))
    options = ScanOptions(errors="none", further_inputs=0)
    try:
        with open_runs(source, options, Machine(environment={"device": "cpu"}), "none") as target_runs:
            target_runs.reference()
            run = target_runs.run("bfloat16", "setting", instrumented=False)
            torch.backends.mha.set_fastpath_enabled(True)
            path.unlink()
            target_runs.time([run])
        assert torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert set(path.read_text(encoding="ascii").splitlines()) == {"torch.float32 True", "torch.bfloat16 False"}


class Grows(nn.Module):
    """Keeps what it was called with: a model that survives few calls in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(8, 8), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        if len(self.seen) > 8:
            raise RuntimeError("called too often")
        return self.linear(x)


@pytest.mark.usefixtures("whole_turns")
@pytest.mark.parametrize("isolation", ["fork", "none"])
def test_the_state_is_rewound_between_calls(isolation: Isolation) -> None:
    model = Grows()
    _, found = timed(model, torch.randn(4, 8), "half", isolation=isolation)
    assert found.runs[1].latency is not None
    assert found.runs[1].latency.samples >= 9
    assert not found.runs[1].notes
    assert not model.seen


def test_the_command_saves_times_and_op_calls(call: Any, tmp_path: Path) -> None:
    """The command gets each run from a process of its own, and its times later."""
    (tmp_path / "model.py").write_text(f"{NET}\nmodel, inputs = Net(), torch.ones(2, 3)\n", encoding="utf-8")
    call("scan", "model.py", "-p", "bfloat16", "--json", "scan.json", "--no-plan", folder=tmp_path)
    result = ScanResult.load(tmp_path / "scan.json")
    assert result.timing_conditions is not None
    assert [run.precision for run in result.runs] == ["fp32", "bfloat16"]
    for run in result.runs:
        assert run.latency is not None
        assert run.latency_ms == run.latency.median_ms
        assert run.op_calls


def test_long_calls_of_fp32_with_nothing_beside_them_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timed_runs, "LONG_SECONDS", 0.0)
    model = Counts(tmp_path / "calls")
    _, found = timed(model, torch.randn(4, 8))
    [fp32] = found.runs
    calls = (tmp_path / "calls").read_text(encoding="ascii").split()
    assert calls.count("float32") == fp32.calls + 2  # for memory, and op by op
    assert found.conditions is not None
    assert found.conditions.reason == "no run is fast enough to be called again"
    assert fp32.latency is not None
    assert (fp32.latency.median_ms, fp32.latency.samples) == (fp32.latency_ms, 1)


def test_a_scan_without_times_has_none(call: Any, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(f"{NET}\nmodel, inputs = Net(), torch.ones(2, 3)\n", encoding="utf-8")
    options = ["-p", "bfloat16", "--times", "off", "--json", "scan.json", "--no-plan"]
    result = call("scan", "model.py", *options, folder=tmp_path)
    assert " ms" not in result.stdout
    saved = ScanResult.load(tmp_path / "scan.json")
    assert saved.timing_conditions == TimingConditions(reason="times are off")
    assert all(run.latency_ms is None for run in saved.runs)
    assert saved.recommendation is not None
    assert "fast" not in saved.recommendation.reason


def test_a_scan_saves_times_and_what_disturbed_them() -> None:
    result = scan(nn.Linear(8, 8), torch.randn(2, 8), precisions="half", plan=False)
    assert result.timing_conditions is not None
    assert all(run.latency is not None for run in result.runs)
    assert type(result).from_json(result.to_json()) == result


class SlowCompiler(Backend):
    """Takes seconds to prepare a model."""

    name, summary, setup_budget = "slow-compiler", "planted", 60.0

    def prepare(self, model: Any, example: Any) -> Any:
        until = time.perf_counter() + 2.0
        while time.perf_counter() < until:
            pass
        return functools.partial(model)


def test_fp32_waits_until_another_run_is_compiled(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own calls may take one and a half seconds."""
    register(SlowCompiler())
    monkeypatch.setattr(target_runs, "BUDGET", 0.5)
    options: dict[str, Any] = {"precisions": "half", "backends": "slow-compiler", "plan": False}
    result = scan(nn.Linear(8, 8), torch.randn(2, 8), errors="none", further_inputs=0, **options)
    assert [run.latency is not None and run.status == "ok" for run in result.runs] == [True] * len(result.runs)


FILE = """
import torch
model = torch.nn.Linear(8, 8)
inputs = torch.randn(2, 8)
"""


@pytest.mark.parametrize("times", ["on", "off"])
def test_the_command_saves_the_times_of_rounds_and_none_without_them(write: Write, call: Call, times: str) -> None:
    """Runs are sent to the command when they finish; their times come later."""
    path = write(FILE)
    json = path.with_suffix(".json")
    assert call("scan", path, "-p", "half", "-p", "bfloat16", "--times", times, "--json", json).returncode == 0
    result = ScanResult.load(json)
    assert [run.precision for run in result.runs] == ["fp32", "half", "bfloat16"]
    if times == "on":
        assert all(run.latency is not None for run in result.runs)
        assert all(run.latency_ms == run.latency.median_ms for run in result.runs if run.latency)
    else:
        assert all(run.latency_ms is None and run.latency is None for run in result.runs)
