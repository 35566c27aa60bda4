"""Fixtures of several tests: small models, their gaps as known by hand, a scan of one, and the command."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
from hypothesis import HealthCheck, settings

if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    # Each takes its share of the cores, its own processes included: threads that wait for a core spin, which makes
    # the models of torchvision ten times as slow.
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // int(workers)))

# Kernels are compiled in the process that asks: with a pool of compile processes, each of them imports torch.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

# What the tests expect holds for the CPU, and scans would choose the GPU of the machine.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.pop("COLUMNS", None)  # screens have 100 columns where there is no terminal

import torch
from torch import Tensor, nn

from lowprec_check.cli.main import main
from lowprec_check.core.feature_hooks import features
from lowprec_check.core.launcher import Launcher
from lowprec_check.features.printed_code import run as printed_code
from lowprec_check.features.times import event_times, rounds, turns
from lowprec_check.report.registry import render
from lowprec_check.schema.axes import BACKENDS, Backend
from lowprec_check.schema.scan_result import ScanResult

pytest_plugins = ["pytester"]

# An example may take any time: the machine may be busy. All machines draw the same ones: a failure is the change's.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same everywhere", settings.get_profile("explore"), derandomize=True)
settings.load_profile("same everywhere")

ROOT = Path(__file__).parent.parent
_ALL_EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TRAINED = [path for path in _ALL_EXAMPLES if path.stem.startswith("train_")]
"""Examples of training, which is what is scanned of them."""
EXAMPLES = [path for path in _ALL_EXAMPLES if path not in TRAINED]

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # the helpers beside this file
sys.path.extend(
    sorted({str(path.parent) for path in HERE.glob("*/**/test_*.py")})
)  # a test module that imports from another


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="Write tests/goldens/ anew; then read the diff.")
    parser.addoption("--no-scans", action="store_true", help="Skip each test that would scan or start a process.")


NO_SCANS = "--no-scans"
STARTS = ("os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen")
"""The events by which Python tells that a process is started."""
PROCESS_FIXTURES = ("browser", "pytester")
"""What starts a process, or runs pytest, behind code that would not pass on a skip."""


def pytest_configure(config: pytest.Config) -> None:
    """With ``--no-scans``, skip a test when it starts a process or a scan: there is no list to keep up to date."""
    if not config.getoption(NO_SCANS):
        return

    def skip_if_started(event: str, _arguments: tuple[Any, ...]) -> None:
        if event in STARTS and "PYTEST_CURRENT_TEST" in os.environ:
            pytest.skip(NO_SCANS)

    def skip(*_arguments: Any) -> NoReturn:
        pytest.skip(NO_SCANS)

    sys.addaudithook(skip_if_started)
    Launcher.execute = skip  # type: ignore[method-assign]  # what all runs of a scan pass through


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``--no-scans``, skip the tests that use one of `PROCESS_FIXTURES`."""
    if config.getoption(NO_SCANS):
        for item in items:
            if not {*PROCESS_FIXTURES}.isdisjoint(getattr(item, "fixturenames", ())):
                item.add_marker(pytest.mark.skip(reason=NO_SCANS))


Register = Callable[[Backend], None]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Register:
    """Adds a backend for the time of a test."""

    def add(backend: Backend) -> None:
        monkeypatch.setitem(BACKENDS._items, backend.name, backend)

    return add


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure times in few rounds and calls, in this process and its forks: tests do not depend on exact times.

    They are nine tenths of the scan of a small model otherwise, and more where other programs use the cores.
    """
    monkeypatch.setattr(rounds, "ROUNDS_SECONDS", 0.0)
    for module in (event_times, turns):
        monkeypatch.setattr(module, "TURN_SECONDS", 1e-9)  # above 0: a call on one core is timed too
    monkeypatch.setattr(turns, "ONE_CORE_SECONDS", 0.05)
    monkeypatch.setattr(turns, "WORK_STEPS", 1000)


@pytest.fixture(autouse=True)
def code_in_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Execute printed code in a fork: a fresh interpreter imports torch, two thirds of the scan of a small model."""
    monkeypatch.setattr(printed_code, "METHOD", "fork")


@pytest.fixture(scope="module", autouse=True)
def freed_memory_is_given_back() -> Iterator[None]:
    """Or each later fork copies its page tables: with what the models of torchvision leave, 48 ms instead of 30."""
    yield
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with the file of that name in ``tests/goldens``; ``pytest --update-goldens`` writes it instead."""

    def check(name: str, text: str) -> None:
        path = ROOT / "tests" / "goldens" / name
        if request.config.getoption("--update-goldens"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
        assert path.read_text(encoding="utf-8") == text, "pytest --update-goldens, then read the diff"

    return check


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a user's file: ``write("text", name="mymodel.py")``."""

    def write_file(text: str, name: str = "mymodel.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder as the current one. Imports from it, and from those of other tests, are forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    forget_modules(tmp_path.parent)
    yield tmp_path
    forget_modules(tmp_path.parent)


def forget_modules(folder: Path) -> None:
    """Forget the imports from a folder: a file of the same name elsewhere is then imported as in a new process."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(folder)):
            del sys.modules[name]


class Done(NamedTuple):
    """What a call of the command left behind."""

    returncode: int
    stdout: str
    stderr: str


Call = Callable[..., Done]


@pytest.fixture
def call(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Call:
    """Call the command in this process, in the repository's root: ``call("scan", path)``.

    A process of its own would import torch anew, which takes 2.5 seconds; :func:`call_process` is for where that is
    the point.
    """

    features()  # imported once, not in each process that a scan forks

    def call_main(*arguments: str | Path, folder: Path = ROOT) -> Done:
        capfd.readouterr()
        kept = os.dup(1)
        with (
            monkeypatch.context() as patch,
            open(1, "w", encoding="utf-8", closefd=False) as stdout,  # as in a process of its own: workers redirect it
            open(2, "w", encoding="utf-8", closefd=False) as stderr,
        ):
            patch.setattr("lowprec_check.cli.main._end_workers_when_terminated", list)
            patch.setattr(sys, "argv", ["lowprec-check", *map(str, arguments)])
            patch.setattr(sys, "stdout", stdout)
            patch.setattr(sys, "stderr", stderr)
            patch.setattr(sys, "path", list(sys.path))
            patch.chdir(folder)
            try:
                with pytest.raises(SystemExit) as ended:
                    main()
            finally:
                os.dup2(kept, 1)  # which the command keeps for itself
                os.close(kept)
                forget_modules(tmp_path_factory.getbasetemp())
        return Done(int(ended.value.code or 0), *capfd.readouterr())

    return call_main


class Scanned(NamedTuple):
    """What a scan printed, and the result that it saved."""

    done: Done
    result: ScanResult


SharedScan = Callable[..., Scanned]


@pytest.fixture
def shared_scan(call: Call, tmp_path_factory: pytest.TempPathFactory) -> SharedScan:
    """Scan with the command once for all tests, also of other workers: ``shared_scan(path)``, with options if needed.

    For tests that only read what it found. A test of how a scan is run scans itself.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers

    def scan_once(*arguments: str | Path) -> Scanned:
        name = hashlib.sha256(json.dumps([*map(str, arguments)]).encode()).hexdigest()[:16]
        saved, printed = folder / f"scan-{name}.json", folder / f"scan-{name}.printed"
        with open(folder / f"scan-{name}.lock", "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                if not printed.exists():
                    done = call("scan", *arguments, "--json", saved)
                    assert saved.exists(), done.stderr
                    printed.write_text(json.dumps(done), encoding="utf-8")
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)  # closing it is not enough: forks may have it too
        return Scanned(Done(*json.loads(printed.read_text(encoding="utf-8"))), ScanResult.load(saved))

    return scan_once


def call_process(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Call the command as users do, in a process of its own, in the repository's root."""
    command = [sys.executable, "-m", "lowprec_check", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, **options)


HEARS_SIGNALS = "import signal as s; s.signal(s.SIGINT, s.default_int_handler); s.signal(s.SIGHUP, s.SIG_DFL)\n"
"""The first line of a program that a test sends signals: a shell's background jobs ignore some of them."""

INSTALLED = bool(importlib.metadata.entry_points(group="pytest11", name="lowprec"))
PLUGIN = "lowprec" if INSTALLED else "lowprec_check.pytest_plugin.hooks"


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project of the user's in which pytest loads our plugin, installed or not."""
    monkeypatch.setenv("PYTEST_ADDOPTS", f"-p {PLUGIN}")
    monkeypatch.setenv("COLUMNS", "130")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # files are rewritten within a second
    return pytester


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_autocast_dtype("cpu", torch.bfloat16)  # torch's default, whatever another test left
    threads = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == threads  # with more, tests that run at once wait for each other
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()


class Mlp(nn.Module):
    """Three layers, everything supported in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.fixture
def mlp() -> Mlp:
    torch.manual_seed(0)
    return Mlp().eval()


def run_bare(model: nn.Module, args: tuple[Any, ...], precision: str) -> Any:
    """Simply run the cast model: the truth that a scan is held to. Casts ``model`` in place."""
    dtype = {"half": torch.half, "bfloat16": torch.bfloat16}.get(precision)
    context: Any = contextlib.nullcontext()
    if dtype is not None:
        model = model.to(dtype)
        args = tuple(a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
    elif precision != "fp32":
        context = torch.autocast("cpu", dtype=torch.half if precision.endswith("fp16") else torch.bfloat16)
    torch.manual_seed(0)
    with torch.no_grad(), context:
        return model(*args)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A running browser; skips the test where there is none."""
    from browser import chromium  # this folder is on the path only after this file was loaded

    with chromium() as found:
        yield found


@pytest.fixture
def page_of(tmp_path: Path) -> Callable[[ScanResult], Path]:
    """Write the page of a result."""

    def write_page(result: ScanResult) -> Path:
        path = tmp_path / "report.html"
        path.write_text(render(result, "html"), encoding="utf-8")
        return path

    return write_page
