"""However the program ends, no process and no file of it remain."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from conftest import HEARS_SIGNALS

from lowprec_check import ScanResult
from lowprec_check.schema import matrix

MODEL = """
import os, pathlib, subprocess, tempfile, time
import torch

def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", "600"])
        os._exit(0)
    os.wait()

class Hangs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        if x.dtype == torch.half:
            subprocess.Popen(["sleep", "600"])
            daemon()
            tempfile.mkdtemp()
            pathlib.Path(__file__).with_suffix(".started").touch()
            time.sleep(600)
        return self.linear(x)

model = Hangs()
inputs = torch.ones(2, 4)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start the command, in a process of its own, with a temporary folder of its own; wait until the model hangs."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "temporary").mkdir()
    mark, started = uuid.uuid4().hex, list[subprocess.Popen[str]]()
    own = {"TMPDIR": str(tmp_path / "temporary"), "LOWPREC_TEST_MARK": mark}

    def start_command(*arguments: str, before: str = HEARS_SIGNALS) -> subprocess.Popen[str]:
        code = f"{before}from lowprec_check.cli.main import main; main()"
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            cwd=tmp_path,
            env=os.environ | own,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        wait_until((tmp_path / "model.started").exists)
        return process

    yield start_command
    for process in started:
        with process:  # which a test that failed may have left
            process.kill()
    wait_until(lambda: not marked(mark))
    assert not list((tmp_path / "temporary").iterdir())


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def marked(mark: str) -> list[str]:
    """The processes that inherited the mark, whoever their parent is now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("LOWPREC_TEST_MARK") == mark:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


FAST = ("--times", "off", "--errors", "none", "--no-plan")
SCAN = ("scan", "model.py", "-p", "half", "--json", "scan.json", "-q", *FAST)
COMPAT = ("--scan-options", "--times off --errors none --no-plan")


# Ctrl-C: the next test.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "exit_code", "message"),
    [
        (signal.SIGTERM, 143, "ended by SIGTERM"),
        (signal.SIGHUP, 129, "ended by SIGHUP"),
        (signal.SIGKILL, -9, ""),
    ],
)
def test_a_signal_to_a_scan_ends_all_its_processes(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, number: int, exit_code: int, message: str
) -> None:
    process = start(*SCAN)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors.strip()) == (exit_code, message)
    assert not (tmp_path / "scan.json").exists()


@pytest.mark.slow
def test_ctrl_c_twice_ends_without_a_traceback(start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start(*SCAN)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    shown = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, more = process.communicate(timeout=30)
    assert (shown, more, process.returncode) == ("interrupted\n", "", 130)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "jobs"), [(signal.SIGTERM, "1"), (signal.SIGTERM, "2"), (signal.SIGKILL, "1")])
def test_a_signal_to_compat_ends_all_its_processes(
    start: Callable[..., subprocess.Popen[str]], number: int, jobs: str
) -> None:
    process = start("compat", "model.py", "-o", "reports", "-p", "half", "--jobs", jobs, *COMPAT)
    process.send_signal(number)
    lines = process.communicate(timeout=30)[1].splitlines()
    if number == signal.SIGTERM:
        assert (process.returncode, lines[-1]) == (143, "ended by SIGTERM")
        assert "same command" in lines[-2]


@pytest.mark.slow
def test_the_end_of_a_timeout_ends_what_a_model_started(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """That of a budget: the next tests."""
    process = start("compat", "model.py", "-o", "reports", "-p", "half", "--timeout", "12", *COMPAT)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 1, errors
    [row] = matrix.load(tmp_path / "reports" / "matrix.json").rows
    assert row.reason == "timed out after 12 s"


@pytest.mark.slow
def test_a_guardian_that_is_killed_is_replaced(start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start("scan", "model.py", "-p", "half", "-p", "bfloat16", "--budget", "1", *FAST)
    [guardian] = [child for child in psutil.Process(process.pid).children() if "-I" in child.cmdline()]
    guardian.kill()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors


@pytest.mark.slow
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_shows_and_saves_the_runs_that_are_finished(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, number: int, exit_code: int
) -> None:
    files = ("--json", "scan.json", "--report", "scan.md", "--update-baseline", "--baseline", "base.json")
    process = start("scan", "model.py", "-p", "bf16,amp-bf16,half,amp-fp16", *files, *FAST)
    process.send_signal(number)
    screen, errors = process.communicate(timeout=30)
    assert process.returncode == exit_code, errors
    result = ScanResult.load(tmp_path / "scan.json")
    statuses = [(run.precision, run.status) for run in result.runs]
    assert statuses[1:3] == [("bfloat16", "ok"), ("autocast-bf16", "ok")]
    assert statuses[3:] == [("half", "skipped"), ("autocast-fp16", "skipped")]
    assert result.recommendation is not None
    assert result.recommendation.precision in ("bfloat16", "autocast-bf16")
    assert screen.count("the scan was") >= 2
    for shown in (screen, (tmp_path / "scan.md").read_text(encoding="utf-8")):
        assert re.search(r"After 3 of 5 runs: (autocast-bf|bfloat)16 passes \(not timed\)", shown)
    assert not (tmp_path / "base.json").exists()


@pytest.mark.slow
def test_a_lost_process_loses_no_finished_run(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = start("scan", "model.py", "-p", "bf16,half", "--json", "scan.json", *FAST)
    [session] = [child for child in psutil.Process(process.pid).children() if "-I" not in child.cmdline()]
    session.kill()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 3
    assert "error: The scan ended early: the process was killed by SIGKILL" in errors
    assert [run.status for run in ScanResult.load(tmp_path / "scan.json").runs[1:]] == ["ok", "skipped"]


@pytest.mark.slow
def test_a_signal_to_a_search_shows_the_bases_that_are_finished(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    process = start("plan", "model.py", "--base", "cast", "--search-seconds", "30")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in errors


@pytest.mark.slow
def test_signals_that_are_ignored_at_the_start_stay_ignored(start: Callable[..., subprocess.Popen[str]]) -> None:
    """As of a command that a script starts in the background, or ``nohup``."""
    ignored = "import signal as s; s.signal(s.SIGINT, s.SIG_IGN); s.signal(s.SIGHUP, s.SIG_IGN)\n"
    process = start("scan", "model.py", "-p", "half", "--budget", "1", "--fail-on", "never", *FAST, before=ignored)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGHUP)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors


COMPILED = """
import pathlib
import torch

class Compiled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu().sum()

model = Compiled().eval()
inputs = torch.ones(2, 4)
pathlib.Path(__file__).with_suffix(".started").touch()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("moment", ["a destructor", "an exit handler", "an error is shown"])
def test_a_signal_at_any_moment_ends_the_command_without_a_traceback(number: int, moment: str) -> None:
    code = f"""
import atexit, os, time
import click
from lowprec_check.cli import main

def send(*_):
    os.kill(os.getpid(), {number})
    time.sleep(0.1)

class WrongOption(click.ClickException):
    exit_code, show = 2, send

def command(**_):
    if {moment == "an error is shown"}:
        raise WrongOption('')
    if {moment == "an exit handler"}:
        atexit.register(send)
    else:
        type("Dies", (), {{"__del__": send}})()
        time.sleep(60)

main.app = command
main.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", HEARS_SIGNALS + code], capture_output=True, text=True, timeout=50, check=False
    )
    assert "Traceback" not in done.stderr
    assert done.returncode in ((128 + number,) if moment == "a destructor" else (128 + number, -number))


def test_an_interrupt_that_a_destructor_raises_in_a_worker_is_no_signal() -> None:
    """As in plain Python, where such an exception is printed and ignored: the model does not fail of it."""
    code = """
import os, time
from lowprec_check.cli import main

class Dies:
    def __del__(self):
        raise KeyboardInterrupt

def command(**_):
    worker = os.fork()
    if worker == 0:
        Dies()
        time.sleep(0.5)
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])

main.app = command
main.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr.count("Exception ignored")) == (7, 1), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "victim"), [("inductor", "worker"), ("int8", "command")])
def test_a_compiler_that_is_killed_leaves_nothing(
    backend: str,
    victim: str,
    start: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")  # with a pool of processes, as users have it
    (tmp_path / "model.py").write_text(COMPILED)
    process = start("scan", "model.py", "-p", "fp32", "--backend", backend, *FAST)
    command = psutil.Process(process.pid)

    def compiles() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):  # one that ends meanwhile
            return process.poll() is not None or any(
                "cc1plus" in child.name() for child in command.children(recursive=True)
            )
        return False

    wait_until(compiles)
    assert process.poll() is None, process.communicate()[1]
    assert list((tmp_path / "temporary").rglob("*"))
    if victim == "worker":
        [session] = [child for child in command.children() if "-I" not in child.cmdline()]
        session.kill()
    else:
        process.kill()
    process.communicate(timeout=30)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_dask_in_this_process_ends_at_once_and_leaves_no_folder(
    number: int, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    pytest.importorskip("distributed")
    process = start("compat", "model.py", "-o", "reports", "-p", "half", "--engine", "dask", *COMPAT)
    process.send_signal(number)
    signalled = time.monotonic()
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - signalled < 3, errors
    assert not list(tmp_path.glob("dask*"))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no limit of address space")
@pytest.mark.parametrize("mebibytes", [150, 400])
def test_a_limit_of_address_space_in_which_torch_does_not_fit(tmp_path: Path, mebibytes: int) -> None:
    tmp_path.joinpath("model.py").write_text(MODEL)
    command = f"ulimit -v {mebibytes << 10}; exec {sys.executable} -m lowprec_check scan model.py"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    first = f"error: torch cannot be imported with a limit of {mebibytes}.0 MiB of address space: "
    assert first in done.stderr  # behind what C++ prints when it aborts
    assert done.stderr.endswith("Raise the limit: ulimit -v unlimited.\n")
