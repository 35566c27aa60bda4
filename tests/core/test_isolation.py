"""Models that run by themselves also run in a worker, wherever the scan is called from."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Call
from helpers import scan_here
from torch import Tensor, nn

from lowprec_check import ScanResult, UsageError, scan
from lowprec_check.core import launcher
from lowprec_check.core.scan import RUNS_AGAIN
from lowprec_check.process import Isolation
from lowprec_check.torchkit.isolation import isolated, other_threads

HEAD = """
import torch
from torch import nn
torch.manual_seed(0)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x) + extra(self, x)

def extra(model, x):
    return 0
"""
MODELS = {
    "workers of a DataLoader": """
from torch.utils.data import DataLoader, TensorDataset
def extra(model, x):
    return sum(batch.sum() for batch, in DataLoader(TensorDataset(torch.ones(4)), batch_size=2, num_workers=1))
""",
    "a pool of processes": """
import multiprocessing
def extra(model, x):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(abs, (-1,))
""",
    "an event loop of the main thread": """
import asyncio
asyncio.set_event_loop(asyncio.new_event_loop())
def extra(model, x):
    return asyncio.get_event_loop().run_until_complete(asyncio.sleep(0, result=1))
""",
    "a thread-local value": """
import threading
local = threading.local()
local.value = 1
def extra(model, x):
    return local.value
""",
    "a signal handler": """
import signal
def extra(model, x):
    signal.signal(signal.SIGALRM, signal.signal(signal.SIGALRM, lambda *_: None))
    return 1
""",
    "the name of the process": """
import multiprocessing, threading
def extra(model, x):
    assert multiprocessing.current_process().name == "MainProcess" and not multiprocessing.current_process().daemon
    assert threading.current_thread() is threading.main_thread()
    return 1
""",
    "a process that it spawns": """
import multiprocessing
made = []
def extra(model, x):
    if not made and x.dtype == torch.half:  # once: it imports this file, and torch with it
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            made.append(pool.apply(one))
    return 1
def one():
    return 1
""",
    "a process that it forks and that exits": """
import os, sys
def extra(model, x):
    child = os.fork()
    if child == 0:
        sys.exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
""",
    "a path object on the module path": """
import pathlib, sys
sys.path.insert(0, pathlib.Path(__file__).parent / "lib")
""",
    "a file read from standard input": """
import sys
def extra(model, x):
    return len(sys.stdin.read())
""",
}
STARTS_PROCESSES = ("workers of a DataLoader", "a process that it spawns", "a process that it forks and that exits")
"""In each call: these are not timed, in a hundred calls more. "a pool of processes" is."""
FRESH = {
    "threads made at import, one of which holds a lock": """
import threading, time
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(1)
pool.submit(abs, 1).result()
lock = threading.Lock()
def hold():
    with lock:
        time.sleep(2)
thread = threading.Thread(target=hold)
thread.start()
def extra(model, x):
    thread.join()
    with lock:
        return pool.submit(abs, 1).result()
""",
    "threads of torch": """
torch.set_num_threads(2)
torch.randn(1000, 1000) @ torch.randn(1000, 1000)
def extra(model, x):
    return torch.get_num_threads()
""",
}


def write(folder: Path, code: str) -> Path:
    file = folder / f"{folder.name}.py"  # its own name: a module of that name may have been imported by another test
    file.write_text(f"{HEAD}\n{code}\nmodel = Model().eval()\ninputs = torch.randn(4, 8)\n")
    return file


UNTIMED = ("--times", "off")
"""For tests that start an interpreter for each run; times need as many again (tests/features/times/test_rounds.py)."""


def scanned(call: Call, folder: Path, code: str, *options: str) -> ScanResult:
    saved = folder / "scan.json"
    few = ("-p", "half", "--no-plan", "--errors", "none", "--further-inputs", "1")
    done = call("scan", write(folder, code), "--json", saved, *few, *options)
    assert done.returncode == 0, done.stderr
    result = ScanResult.load(saved)
    assert [run.status for run in result.runs] == ["ok", "ok"]
    assert all(run.complete for run in result.runs)
    return result


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_uses_what_its_process_has_runs_in_a_fork(call: Call, tmp_path: Path, name: str) -> None:
    result = scanned(call, tmp_path, MODELS[name], *(UNTIMED if name in STARTS_PROCESSES else ()))
    assert result.options["isolation"] == "fork"
    assert not result.runs[0].notes


@pytest.mark.slow
@pytest.mark.parametrize("name", FRESH)
def test_a_file_that_starts_threads_is_loaded_in_fresh_interpreters(call: Call, tmp_path: Path, name: str) -> None:
    result = scanned(call, tmp_path, FRESH[name], *UNTIMED)
    assert result.options["isolation"] == "spawn"


SCRIPT = """
import os, sys, threading, torch
open(f"ran{{os.getpid()}}-{{os.urandom(4).hex()}}", "w").close()  # files that exist are kept as they are
threading.Thread(target=threading.Event().wait, daemon=True).start()  # as loggers have one
torch.set_num_threads(2)
torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)
    def forward(self, x):
        return self.linear(x) + torch.get_num_threads() - 2
net = Net().train({trains})
x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
{rest}
"""
TRAINS = """
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(20):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("trains", [False, True])
def test_a_script_runs_once(call: Call, tmp_path: Path, trains: bool) -> None:
    rest, options = "print(net(x))", [*UNTIMED, "--further-inputs", "2"]
    if trains:
        rest, options = TRAINS, ["--train", "--steps", "4"]
    (tmp_path / "script.py").write_text(SCRIPT.format(trains=trains, rest=rest))
    done = call("scan", "script.py", "-q", "-p", "bfloat16", "--json", "scan.json", *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("ran*"))) == 1
    result = ScanResult.load(tmp_path / "scan.json")
    assert result.environment["threads"] == 2, "what the script sets holds in the runs"
    assert RUNS_AGAIN not in result.model.notes
    if trains:
        assert result.training is not None
        assert "initial weights" in result.training.varied
    else:
        assert result.code_trial is not None
        assert result.code_trial.status == "ran"


@pytest.mark.slow
def test_a_script_whose_model_needs_a_thread_runs_again(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "IDLE_SECONDS", 1.5)
    needs = "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(1)\n"
    needs += (
        "pool.submit(abs, 1).result()\n_ = net.register_forward_pre_hook(lambda *_: pool.submit(int).result() or None)"
    )
    (tmp_path / "waits.py").write_text(SCRIPT.format(trains=False, rest=f"{needs}\nnet(x)"))
    few = ("-p", "half", "--no-plan", "--further-inputs", "0", *UNTIMED)
    call("scan", "waits.py", "-q", *few, "--json", "scan.json", folder=tmp_path)
    result = ScanResult.load(tmp_path / "scan.json")
    assert [run.status for run in result.runs] == ["ok", "ok"]
    assert RUNS_AGAIN in result.model.notes


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["fork", "spawn", "none"])
def test_the_isolation_can_be_chosen(call: Call, tmp_path: Path, isolation: str) -> None:
    assert scanned(call, tmp_path, "", "--isolation", isolation, *UNTIMED).options["isolation"] == isolation


IN_A_FORK = """
import os
loaded_in = os.getpid()
def extra(model, x):
    {}
    return 0
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "note"),
    [
        ("assert os.getpid() == loaded_in, 'not in a fork'", "AssertionError: not in a fork"),
        ("os.getpid() == loaded_in or os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("os.getpid() == loaded_in or __import__('time').sleep(600)", "a forked process stopped using the processor"),
    ],
)
def test_what_fails_in_a_fork_only_is_tried_in_a_fresh_interpreter(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str, note: str
) -> None:
    monkeypatch.setattr(launcher, "IDLE_SECONDS", 1.5)
    result = scanned(call, tmp_path, IN_A_FORK.format(failure), *UNTIMED)
    assert result.options["isolation"] == "spawn"
    assert any(note in text for text in result.runs[0].notes), result.runs[0].notes


def test_a_fork_that_works_is_not_idle_however_short_the_budget(call: Call, tmp_path: Path) -> None:
    busy = """
import time
def extra(model, x):
    end = time.process_time() + (0.15 if x.dtype == torch.half else 0)
    while time.process_time() < end:
        pass
    return 0
"""
    saved = tmp_path / "scan.json"
    call("scan", write(tmp_path, busy), "-p", "half", "--budget", "0.3", "--no-plan", "--json", saved, *UNTIMED)
    notes = [note for run in ScanResult.load(saved).runs for note in run.notes]  # it may well time out
    assert not [note for note in notes if "stopped using the processor" in note]


@pytest.mark.slow
def test_a_model_that_fails_by_itself_is_the_users(call: Call, tmp_path: Path) -> None:
    done = call("scan", write(tmp_path, "def extra(model, x):\n    raise ValueError('wrong inputs')"))
    assert done.returncode == 2
    assert "fails in fp32" in done.stderr
    assert f"{tmp_path.name}.py:18: ValueError: wrong inputs" in done.stderr


@pytest.mark.slow
def test_a_timeout_is_a_timeout_if_ended_processes_are_ignored(call: Call, tmp_path: Path) -> None:
    code = """
import signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
def extra(model, x):
    if x.dtype == torch.half:
        while True: pass
    return 0
"""
    saved = tmp_path / "scan.json"
    before = signal.getsignal(signal.SIGCHLD)
    try:
        call("scan", write(tmp_path, code), "--json", saved, "-p", "half", "--no-plan", "--budget", "1", *UNTIMED)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert [run.status for run in ScanResult.load(saved).runs] == ["ok", "timeout"]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def statuses(isolation: Isolation | None = None, model: nn.Module | None = None) -> list[str]:
    result = scan(model or Mlp(), torch.ones(2, 8), precisions="half", errors="none", isolation=isolation)
    return [run.status for run in result.runs]


def send_statuses(pipe: Any) -> None:
    pipe.send(statuses())


def test_a_scan_runs_in_a_daemonic_process() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=send_statuses, args=(theirs,), daemon=True)
    process.start()
    assert ours.poll(60)
    assert ours.recv() == ["ok", "ok"]
    process.join()


def test_scans_run_in_threads() -> None:
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda _: statuses(), range(3))) == [["ok", "ok"]] * 3


class Named(Mlp):
    """Writes its name to a file at the begin and at the end of a call."""

    def __init__(self, file: Path, name: str) -> None:
        super().__init__()
        self.file, self.name = file, name

    def forward(self, x: Tensor) -> Tensor:
        self._write()
        time.sleep(0.01)
        self._write()
        return super().forward(x)

    def _write(self) -> None:
        with self.file.open("a") as file:
            file.write(self.name)


def test_scans_without_isolation_take_turns(tmp_path: Path) -> None:
    file = tmp_path / "calls"
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda name: statuses("none", Named(file, name)), "ab"))
    assert found == [["ok", "ok"]] * 2
    calls = file.read_text()
    assert set(calls) == {"a", "b"}
    assert all(first == second for first, second in zip(calls[::2], calls[1::2], strict=True))


FEW: dict[str, Any] = {"precisions": "half", "errors": "none", "plan": False, "further_inputs": 0}


class Waits(Mlp):
    """Waits for a lock that another thread of the process holds now and then, as importing and logging do."""

    def forward(self, x: Tensor) -> Tensor:
        with LOCK:
            return super().forward(x)


LOCK = threading.Lock()


def held_lock() -> tuple[threading.Thread, threading.Event]:
    done = threading.Event()

    def hold() -> None:
        while not done.is_set():
            with LOCK:
                time.sleep(0.05)

    thread = threading.Thread(target=hold, name="trains")
    thread.start()
    return thread, done


@pytest.mark.slow
def test_a_model_that_waits_for_a_thread_is_sent_to_a_fresh_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "IDLE_SECONDS", 1.5)
    thread, done = held_lock()
    try:
        result = scan(Waits(), torch.ones(2, 8), times="off", **FEW)
    finally:
        done.set()
        thread.join()
    assert [run.status for run in result.runs] == ["ok", "ok"]
    assert result.options["isolation"] == "spawn"
    assert launcher.FORK_WAITED in result.runs[0].notes


@pytest.mark.slow
def test_a_model_that_waits_for_a_thread_and_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "IDLE_SECONDS", 1.0)
    earlier = set(other_threads())  # other tests, as those of dask, leave threads behind
    monkeypatch.setattr(launcher, "other_threads", lambda: [name for name in other_threads() if name not in earlier])
    thread, done = held_lock()
    model = Waits()
    model.generator = (number for number in range(3))  # type: ignore[assignment]
    try:
        with pytest.raises(UsageError, match=r"\(trains\) do not run.*cannot be sent.*generator"):
            scan(model, torch.ones(2, 8), precisions="half")
        assert scan_here(model, torch.ones(2, 8), **FEW).runs[1].status == "ok"
    finally:
        done.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("closed", [(0, 1), (0, 1, 2)])
def test_a_scan_runs_where_standard_streams_are_closed(tmp_path: Path, closed: tuple[int, ...]) -> None:
    code = f"""
import os
for descriptor in {closed}: os.close(descriptor)
import torch
from lowprec_check import scan
result = scan(torch.nn.Linear(8, 8).eval(), torch.randn(2, 8), precisions="half", times="off", further_inputs=1)
open({str(tmp_path / "status")!r}, "w").write(result.runs[1].status)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "status").read_text() == "ok"


REPLACES = """
import builtins, json, os, signal, sys, threading, time
import torch
for name in ("time", "monotonic", "perf_counter"):
    setattr(time, name, lambda: 0.0)
time.sleep = lambda seconds: None
os.kill = os.killpg = signal.signal = lambda *_: None
os.fork = os.waitpid = os.waitid = lambda *_: 1 / 0
os.write = lambda *_: 0
os._exit = lambda code: None
threading.Thread = json.dumps = None
builtins.print = builtins.open = None
builtins.len = lambda of: 0

class Replaced(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        assert time.monotonic() == 0.0
        while x.dtype == torch.bfloat16:
            pass
        return self.linear(x)

model = Replaced()
inputs = torch.ones(2, 4)
"""


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["fork", "spawn", "shared"])
def test_limits_and_figures_hold_where_a_file_stops_clocks_and_replaces_functions(
    isolation: str, write: Callable[..., Path], call: Call, tmp_path: Path
) -> None:
    saved = tmp_path / "scan.json"
    options = ("-p", "half,bf16", "--budget", "1.5", "--no-plan", "--fail-on", "never", "--further-inputs", "0")
    done = call("scan", write(REPLACES), "--isolation", isolation, "--json", saved, *options)
    assert done.returncode == 0, done.stderr
    result = ScanResult.load(saved)
    fp32, half, bfloat16 = (result.run(precision) for precision in ("fp32", "half", "bfloat16"))
    assert (half.status, bfloat16.status) == ("ok", "timeout")
    assert half.complete
    assert all(run.latency is not None and 0 < run.latency.median_ms < 1e3 for run in (fp32, half))


def test_threads_of_openmp_compute_in_a_fork() -> None:
    """Without what is done at each fork, a third of these fail with "Invalid thread pool!"."""
    before, values = torch.get_num_threads(), torch.ones(1 << 20, 4, dtype=torch.int64)
    torch.set_num_threads(16)
    try:
        sums = [isolated(lambda: int(values.sum(1)[0]), "fork", int) for _ in range(25)]
    finally:
        torch.set_num_threads(before)
    assert sums == [4] * 25
