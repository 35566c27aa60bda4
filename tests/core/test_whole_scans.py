"""How long a scan takes: very slow runs are called once, accelerated ones come first, nothing is imported in vain."""

from __future__ import annotations

import itertools
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import ROOT
from torch import Tensor, nn

from lowprec_check import scan
from lowprec_check.analysis.statements.kinds import said
from lowprec_check.core import machine, task_workers, tasks
from lowprec_check.core.scan import scan_target
from lowprec_check.core.task_workers import SideBySide
from lowprec_check.engine.model.target_source import load_here
from lowprec_check.engine.model.target_spec import TargetSpec
from lowprec_check.features.times.timed_runs import NotTimedError
from lowprec_check.process import system
from lowprec_check.process.function_worker import FunctionWorker
from lowprec_check.schema.options import ScanOptions
from lowprec_check.torchkit.compiled import forget_compiled


class Slow(nn.Module):
    """A layer that takes 20 ms in fp32, and ``seconds`` in half; each call in half adds a letter to ``log``."""

    def __init__(self, log: Path, seconds: float = 0.6) -> None:
        super().__init__()
        self.linear, self.log, self.seconds = nn.Linear(8, 8), log, seconds

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        time.sleep(self.seconds if y.dtype == torch.half else 0.02)
        if y.dtype == torch.half:
            with self.log.open("a") as file:
                file.write("h")
        return y


@pytest.fixture(params=["fork", "shared"])
def isolation(request: pytest.FixtureRequest) -> Any:
    return request.param


def accelerating(monkeypatch: pytest.MonkeyPatch, *kinds: str) -> None:
    """As on a device that accelerates these formats only."""
    monkeypatch.setattr(machine, "_accelerates", lambda _device, kind: kind in kinds)


def test_a_hopelessly_slow_run_is_called_once_and_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, isolation: Any
) -> None:
    accelerating(monkeypatch, "bf16")
    log = tmp_path / "calls"
    result = scan(Slow(log).eval(), torch.randn(4, 8), precisions=["half"], isolation=isolation)
    half = result.run("half")
    assert log.read_text() == "hh"  # the plain part, and the instrumented part
    assert half.status == "ok"
    assert half.judged_by_one_call
    assert half.one_call_ratio is not None
    assert half.one_call_ratio > 20
    assert half.peak_memory_bytes is None
    assert half.complete
    assert half.perturbed is False
    assert len(half.op_calls)
    assert half.latency is not None
    assert half.latency.speedup is not None
    assert half.latency.speedup.high < 1
    assert "judged by one call" in said(result, "one-call")
    assert "fp16 is not accelerated here" in said(result, "one-call")


@pytest.mark.parametrize(
    ("kinds", "seconds", "options"),
    [
        pytest.param(("bf16",), 0.6, {"thorough": True}, id="thorough"),
        pytest.param(("bf16", "fp16"), 0.6, {}, id="accelerated"),
        pytest.param(("bf16",), 0.1, {}, id="few times slower"),
    ],
)
def test_other_runs_are_called_as_often_as_ever(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kinds: tuple[str, ...], seconds: float, options: dict[str, Any]
) -> None:
    accelerating(monkeypatch, *kinds)
    log = tmp_path / "calls"
    model = Slow(log, seconds).eval()
    result = scan(model, torch.randn(4, 8), precisions=["half"], isolation="fork", further_inputs=0, **options)
    half = result.run("half")
    assert not half.judged_by_one_call
    assert half.calls == 3
    assert len(log.read_text()) > 4  # memory and times
    assert not said(result, "one-call")


def test_a_slow_run_that_is_not_accelerated_is_not_timed_in_rounds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, isolation: Any
) -> None:
    accelerating(monkeypatch, "bf16")
    monkeypatch.setattr(tasks, "HOPELESS_SECONDS", 60.0)
    log = tmp_path / "calls"
    result = scan(Slow(log, 0.4).eval(), torch.randn(4, 8), precisions=["half"], isolation=isolation, further_inputs=0)
    half = result.run("half")
    assert log.read_text().count("h") == 6  # three are compared, memory, op by op, the share of the layer
    assert half.latency is not None
    assert half.latency.speedup is not None
    assert half.latency.speedup.rounds == 0
    assert half.latency.speedup.high < 1
    assert "speed is that of the fastest of 3 calls" in said(result, "one-call")
    assert said(result, "verdict").startswith("Stay in fp32: half is slower and ")
    assert "this device does not accelerate fp16" in result.recommendation.reason.lower()


def test_a_failing_run_that_is_hopelessly_slow_is_not_searched_for_a_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    accelerating(monkeypatch, "bf16")
    log = tmp_path / "calls"
    options: dict[str, Any] = {"precisions": ["half"], "tolerance": 1e-7, "isolation": "fork", "times": "off"}
    result = scan(Slow(log).eval(), torch.randn(4, 8), **options)
    assert result.run("half").status == "inaccurate"
    assert result.run("half").ablation is None
    assert log.read_text() == "hh"
    assert result.plan is None


def test_what_is_accelerated_runs_first_and_is_shown_in_the_usual_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    accelerating(monkeypatch, "fp16")
    seen: list[str] = []
    result = scan(
        nn.Linear(4, 4).eval(),
        torch.randn(2, 4),
        precisions=["bf16", "autocast-bf16", "half"],
        times="off",
        isolation="fork",
        on_progress=lambda run, _doing: seen.append(run),
    )
    assert list(dict.fromkeys(seen)) == ["fp32", "half", "bfloat16", "autocast-bf16"]
    assert [run.precision for run in result.runs] == ["fp32", "bfloat16", "autocast-bf16", "half"]


class OnOneCore(nn.Module):
    """A layer that takes ``seconds`` in 16 bits, logs each such call's start and end, and dies in half if ``dies``."""

    def __init__(self, log: Path, *, dies: bool = False) -> None:
        super().__init__()
        self.linear, self.log, self.dies = nn.Linear(8, 8), log, dies

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.dtype == torch.float32:
            return y
        started = time.monotonic()
        time.sleep(0.8)
        if self.dies and y.dtype == torch.half:
            os.kill(os.getpid(), signal.SIGSEGV)
        with self.log.open("a") as file:
            file.write(f"{started} {time.monotonic()} {torch.get_num_threads()}\n")
        return y


def calls_of(log: Path) -> list[tuple[float, float, int]]:
    """The start, the end and the number of threads of each call, by their starts."""
    return sorted((float(a), float(b), int(n)) for a, b, n in (line.split() for line in log.read_text().splitlines()))


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """As on two cores, of which a worker uses so many."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    accelerating(monkeypatch)
    monkeypatch.setattr(task_workers, "WATCHED_SECONDS", 0.2)  # calls here are short
    yield lambda used: monkeypatch.setattr(FunctionWorker, "processor_seconds", lambda _: used * time.monotonic())
    torch.set_num_threads(threads)


SLOW_RUNS: dict[str, Any] = {
    "precisions": ["bf16", "autocast-bf16", "half"],
    "isolation": "fork",
    "times": "off",
    "plan": False,
    "further_inputs": 0,
    "explain": "all",
}
TWO_SLOW_RUNS = SLOW_RUNS | {"precisions": ["bf16", "autocast-bf16"]}


def test_slow_runs_that_use_one_core_are_done_side_by_side(two_cores: Callable[[float], None], tmp_path: Path) -> None:
    """Each in its share of the cores, with the result that it has alone."""
    two_cores(1.0)
    together, alone, seen = tmp_path / "together", tmp_path / "alone", list[str]()
    x = torch.randn(4, 8)
    torch.manual_seed(0)
    model = OnOneCore(together).eval()
    result = scan(model, x, **SLOW_RUNS, on_progress=lambda run, _doing: seen.append(run))
    first, second, *others = calls_of(together)
    assert second[0] < first[1]  # it starts before the first one ends
    assert (first[2], second[2]) == (2, 2)  # as the user calls it
    assert 1 in {threads for *_, threads in others}  # the instruments
    assert list(dict.fromkeys(seen)) == ["fp32", "bfloat16", "autocast-bf16", "half"]
    model.log = alone
    expected = scan(model, x, **SLOW_RUNS | {"isolation": "shared"})
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(calls_of(alone)))
    for mine, its in zip(result.runs, expected.runs, strict=True):
        assert (mine.status, mine.output_error, mine.gaps) == (its.status, its.output_error, its.gaps)
        assert mine.op_calls.accumulated_error == its.op_calls.accumulated_error
        assert mine.op_calls.local_error == its.op_calls.local_error


class QuickInHalf(OnOneCore):
    """But in half it returns at once."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.dtype == torch.half else super().forward(x)


def test_slow_runs_are_done_side_by_side_after_an_accelerated_one(
    two_cores: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    two_cores(1.0)
    accelerating(monkeypatch, "fp16")
    result = scan(QuickInHalf(tmp_path / "log").eval(), torch.randn(4, 8), **SLOW_RUNS)
    assert [run.status for run in result.runs] == ["ok"] * 4
    first, second, *_ = calls_of(tmp_path / "log")
    assert second[0] < first[1]


class Cancels(nn.Module):
    """16 bits lose most of a difference; the process of each call whose layer gives half is written to ``log``."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self.linear, self.log = nn.Linear(8, 8), log
        self.linear.bias.data += 1000.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.dtype != torch.float32:
            time.sleep(0.6)
        if y.dtype == torch.half:
            with self.log.open("a") as file:
                file.write(f"{os.getpid()}\n")
        return y - 1000.0


def test_what_was_done_beside_a_run_is_not_done_again_after_its_ablation(
    two_cores: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    two_cores(1.0)
    monkeypatch.setattr(tasks, "HOPELESS_SECONDS", math.inf)
    options = SLOW_RUNS | {"precisions": ["autocast-bf16", "autocast-fp16"]}
    result = scan(Cancels(tmp_path / "log").eval(), torch.randn(4, 8), **options)
    for run in result.runs[1:]:
        assert (run.status, run.ablation.keep_fp32) == ("inaccurate", ["linear"])
    assert len(set((tmp_path / "log").read_text().split())) == 1


@pytest.mark.parametrize("used", [pytest.param(2.0, id="they use all cores"), pytest.param(0.5, id="others do")])
def test_slow_runs_are_done_one_by_one_where_no_core_is_idle(
    two_cores: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, used: float
) -> None:
    two_cores(used)
    asked, begun = list[Any](), list[Any]()
    outcome, begin = SideBySide.outcome, SideBySide._begin

    def asking(self: SideBySide, task: Any, limit: float) -> Any:
        asked.append(task)
        return outcome(self, task, limit)

    def beginning(self: SideBySide, task: Any, limit: float) -> None:
        begun.append(task)
        assert task is asked[-1]  # not as the one before ends, since this process may then do something else
        begin(self, task, limit)

    monkeypatch.setattr(SideBySide, "outcome", asking)
    monkeypatch.setattr(SideBySide, "_begin", beginning)
    scan(OnOneCore(tmp_path / "log").eval(), torch.randn(4, 8), **TWO_SLOW_RUNS)
    assert len(begun) == 2
    calls = calls_of(tmp_path / "log")
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(calls))
    assert {threads for *_, threads in calls} == {2}


def work(seconds: float) -> None:
    """Use a core."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


class NeverEnds(OnOneCore):
    """In 16 bits; it notes the time if the weights are in fp32, as under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        for _ in range(100) if y.dtype != torch.float32 else ():
            work(0.1)
            if self.linear.weight.dtype == torch.float32:
                with self.log.open("a") as file:
                    file.write(f"{os.getpid()} {time.monotonic()}\n")
        return y


def test_a_run_past_its_budget_ends_while_another_is_explained(
    two_cores: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    two_cores(1.0)
    monkeypatch.setattr(system.CoreWaits, "longest", lambda _: 0.0)  # for other tests
    options = TWO_SLOW_RUNS | {"budget": 2.0}
    result = scan(NeverEnds(tmp_path / "log").eval(), torch.randn(4, 8), **options)
    assert [run.status for run in result.runs] == ["ok", "timeout", "timeout"]
    noted = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    plain = [float(seconds) for process, seconds in noted if process == noted[0][0]]
    assert 1.0 < plain[-1] - plain[0] < 3.0  # it began beside the first, whose explanation took 2 s more


@pytest.mark.parametrize(("waited", "least", "most"), [(0.0, 0.75, 2.5), (0.5, 2.0, 5.0)])
def test_what_a_run_waits_for_cores_does_not_count_against_its_budget(
    two_cores: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    waited: float,
    least: float,
    most: float,
) -> None:
    two_cores(1.0)
    monkeypatch.setattr(system.CoreWaits, "longest", lambda waits: waited * (time.monotonic() - waits._since))
    options = TWO_SLOW_RUNS | {"budget": 1.5}
    result = scan(NeverEnds(tmp_path / "log").eval(), torch.randn(4, 8), **options)
    assert [run.status for run in result.runs] == ["ok", "timeout", "timeout"]
    noted = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert len({process for process, _ in noted}) == 2  # the second one explains it
    plain = [float(seconds) for process, seconds in noted if process == noted[0][0]]
    assert least < plain[-1] - plain[0] < most


def test_runs_that_are_timed_in_a_scenario_are_done_one_by_one(
    two_cores: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def untimed(*_: Any) -> Any:
        raise NotTimedError("this is about what happens beside it")

    two_cores(1.0)
    monkeypatch.setattr("lowprec_check.features.times.run.time_in_scenario", untimed)
    scan(OnOneCore(tmp_path / "log").eval(), torch.randn(4, 8), **TWO_SLOW_RUNS | {"times": "on"}, scenario="offline")
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(calls_of(tmp_path / "log")))


class SetsThreads(nn.Module):
    """Computes with one thread, as its user wants it."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self.linear, self.log = nn.Linear(8, 8), log

    def forward(self, x: Tensor) -> Tensor:
        torch.set_num_threads(1)
        y = self.linear(self.linear(x))
        with self.log.open("a") as file:
            file.write(f"{torch.get_num_threads()}\n")
        return y


def test_threads_that_a_model_sets_are_its_own(two_cores: Callable[[float], None], tmp_path: Path) -> None:
    two_cores(1.0)
    scan(SetsThreads(tmp_path / "log").eval(), torch.randn(4, 8), **SLOW_RUNS)
    assert set((tmp_path / "log").read_text().split()) == {"1"}


class AddsUp(OnOneCore):
    """Its sum in fp32 depends on the number of threads in the last bits."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:8]).float().sum() + x.float().sum()


def test_instruments_with_fewer_threads_are_not_said_to_change_the_output(
    two_cores: Callable[[float], None], tmp_path: Path
) -> None:
    two_cores(1.0)
    x = torch.rand(1 << 17, 8, generator=torch.Generator().manual_seed(0))
    result = scan(AddsUp(tmp_path / "log").eval(), x, **SLOW_RUNS | {"precisions": ["autocast-bf16", "autocast-fp16"]})
    assert "LP904" not in {found.code for found in result.diagnostics}


def test_a_run_that_uses_more_cores_than_the_first_is_done_alone(
    two_cores: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It begins beside the first one, and is ended: its time would be false."""
    two_cores(1.0)
    workers: list[FunctionWorker[Any]] = []

    def processor_seconds(worker: FunctionWorker[Any]) -> float:
        if worker not in workers:
            workers.append(worker)
        return time.monotonic() * (2.0 if workers.index(worker) == 1 else 1.0)

    monkeypatch.setattr(FunctionWorker, "processor_seconds", processor_seconds)
    result = scan(OnOneCore(tmp_path / "log").eval(), torch.randn(4, 8), **SLOW_RUNS)
    assert [run.status for run in result.runs] == ["ok"] * 4
    assert all(run.complete for run in result.runs)
    calls = calls_of(tmp_path / "log")
    assert len(calls) == 6  # two of each run: the one that was ended is none of them
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(calls))


def test_a_run_that_dies_beside_others_costs_its_row_only(two_cores: Callable[[float], None], tmp_path: Path) -> None:
    two_cores(1.0)
    result = scan(OnOneCore(tmp_path / "log", dies=True).eval(), torch.randn(4, 8), **SLOW_RUNS)
    assert [run.status for run in result.runs] == ["ok", "ok", "ok", "crashed"]
    half = result.run("half")
    assert "SIGSEGV" in (half.reason or "")
    assert "two attempts" not in (half.reason or "")  # the second one died too
    assert all(run.complete for run in result.runs[:3])


def test_what_was_begun_beside_a_run_ends_with_the_scan(two_cores: Callable[[float], None], tmp_path: Path) -> None:
    two_cores(1.0)
    log, before = tmp_path / "log", {child.pid for child in psutil.Process().children()}

    def interrupt(run: str, _doing: str) -> None:
        if run == "autocast-bf16":  # half has begun
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scan(OnOneCore(log).eval(), torch.randn(4, 8), **SLOW_RUNS, on_progress=interrupt)
    left = [child for child in psutil.Process().children() if child.pid not in before]
    assert not [child for child in left if "guardian" not in " ".join(child.cmdline())]


def test_progress_shows_the_trials_of_a_search() -> None:
    """Each run that the search makes is shown as its step, with what is kept and the time left."""
    seen: list[tuple[str, str]] = []
    source = load_here(TargetSpec(str(ROOT / "examples/t5_feed_forward.py")), 0)
    source.on_progress = lambda run, doing: seen.append((run, doing))
    how: Any = {"times": "off", "device": "cpu", "further_inputs": 0, "explain": "failing"}
    options = ScanOptions(precisions=["autocast-fp16"], plan=True, **how)
    result = scan_target(source, "fork", options)
    assert result.plan is not None
    steps = [doing for run, doing in seen if run == "plan from autocast-fp16"]
    assert steps[0].startswith("trial 1 of at most 200, ")
    assert any("modules kept" in step for step in steps)
    after = seen[next(place for place, (run, _) in enumerate(seen) if run.startswith("plan")) :]
    assert {run for run, _ in after[:-1]} == {"plan from autocast-fp16"}
    assert after[-1] == ("code", "executing it")


class SlowOps(nn.Module):
    """A product that is within the tolerance in bf16, and fails in half if ``raises``; each call takes a while."""

    def __init__(self, *, raises: bool = False) -> None:
        super().__init__()
        self.linear, self.raises = nn.Linear(8, 8), raises

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        time.sleep(0.3)
        return out @ torch.ones(8, 8) if self.raises and x.dtype == torch.half else out


@pytest.mark.parametrize(
    ("model", "precision", "words"),
    [
        (SlowOps(), "bfloat16", "ok so far, error"),
        (SlowOps(raises=True), "half", "fails"),
        (SlowOps(raises=True), "autocast-fp16", "ok so far, error"),
    ],
)
def test_progress_shows_the_verdict_before_the_explanation(model: nn.Module, precision: str, words: str) -> None:
    seen: list[str] = []
    result = scan(
        model.eval(),
        torch.randn(4, 8),
        precisions=[precision],
        plan=False,
        further_inputs=0,
        times="off",
        device="cpu",
        isolation="fork",
        on_progress=lambda run, doing: seen.append(doing) if run == precision else None,
    )
    before, _, after = "\n".join(seen).partition(words)
    assert before.replace("plain run", "").strip() == ""
    assert after, seen
    error = result.run(precision).output_error
    assert error is None or f"{error.rel_l2:.1e} · " in after.splitlines()[0]


def test_the_compiler_is_reset_only_if_it_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a GPU, a reset imports inductor."""
    dynamo: Any = pytest.importorskip("torch._dynamo")
    resets: list[int] = []
    monkeypatch.setattr(dynamo, "reset", lambda: resets.append(1))
    monkeypatch.setitem(dynamo.utils.counters, "frames", type(dynamo.utils.counters["frames"])())
    forget_compiled()
    assert not resets
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    forget_compiled()
    assert resets


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the command does not fork")
def test_the_command_does_not_import_torch(tmp_path: Path) -> None:
    """The process that loads the model does; the import would delay this one where it starts a fresh interpreter."""
    (tmp_path / "tiny.py").write_text("import torch\nmodel, inputs = torch.nn.Linear(2, 2).eval(), torch.ones(1, 2)\n")
    program = textwrap.dedent("""
        import sys
        from lowprec_check.cli.main import main
        try:
            main()
        finally:
            print("torch" in sys.modules, file=sys.__stderr__)
    """)
    command = [sys.executable, "-c", program, "scan", "tiny.py", "-q", "-p", "bf16", "--times", "off"]
    command += ["--budget", "2"]  # in which no process imports torch and this tool: only what the file does counts
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "bfloat16" in done.stdout
    assert done.stderr.split()[-1] == "False"
