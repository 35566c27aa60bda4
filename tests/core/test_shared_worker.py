"""One worker for all runs of a scan: each row is what a process of its own would give, whatever ran before it."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
import torch
from conftest import EXAMPLES, Call
from torch import Tensor, nn

from lowprec_check import Run, ScanResult, scan
from lowprec_check.core.launcher import Launcher
from lowprec_check.core.messages import Reporter
from lowprec_check.core.mode import Mode
from lowprec_check.core.scan import scan_target
from lowprec_check.core.tasks import RunTask, open_task_files
from lowprec_check.core.trace import journal
from lowprec_check.engine.model import target_source
from lowprec_check.engine.model.memory import free_weights
from lowprec_check.engine.model.target import Target, make_target
from lowprec_check.engine.model.target_source import TargetSource, cuda_asked_in_a_fork, load_here
from lowprec_check.engine.model.target_spec import TargetSpec
from lowprec_check.process import Isolation
from lowprec_check.schema.options import ScanOptions
from lowprec_check.torchkit import devices, isolation
from lowprec_check.torchkit.isolation import isolation_on

HEAD = """
import itertools, os, signal, subprocess, sys, threading, time
import torch
from torch import nn
from torch.nn import functional

torch.manual_seed(0)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = itertools.count()

    def forward(self, x):
        x = functional.relu(self.linear(x))
        if x.dtype == torch.bfloat16:
            misbehave(self, x)
        return x * 2.0

"""
TAIL = """
model = Model().eval()
inputs = torch.randn(4, 8)
"""
RESTORED = {
    "nothing": "pass",
    "an exception": "raise ValueError('not in bfloat16')",
    "its own attribute": "model.factor = 3.0",
    "a hook on all modules": "nn.modules.module.register_module_forward_hook("
    "lambda module, inputs, output: output * 3)",
    "its own forward": "model.forward = lambda x: x * 0",
    "a hook on itself": "model.linear.register_forward_hook(lambda module, inputs, output: output * 3)",
    "the default dtype": "torch.set_default_dtype(torch.float64)",
    "a new namespace of ops": "getattr(torch.ops, f'made_by_use_{id(x)}')",
    "the first code of Dynamo": "import torch._dynamo.mutation_guard as guard; guard.install_generation_tagging_new()",
}
"""What a model does in bfloat16 that the snapshot restores, or that changes nothing for other runs."""
LEFT = {
    "values of a parameter": "model.linear.weight.data.add_(1.0)",
    "a function of torch": "functional.relu = torch.sin",
    "a method of a class of torch": "nn.Linear.forward = lambda self, x: x * 0",
    "a method of its class": "Model.forward = lambda self, x: x * 0",
    "a layer of its own": "model.linear = nn.Identity()",
    "the default device": "torch.set_default_device('meta')",
    "a switch of a backend": "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False",
    "flushing of denormals": "torch.set_flush_denormal(True)",
    "an environment variable": "os.environ['MODEL_IS_SET'] = '1'",
    "the current folder": "os.chdir('/')",
    "a thread": "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    "a process": "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])",
}
"""What it does that a process keeps: the worker is not used again."""
DEADLY = {
    "SIGSEGV": ("os.kill(os.getpid(), signal.SIGSEGV)", "crashed"),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", "crashed"),
    "an exit": ("os._exit(3)", "crashed"),
    "sys.exit": ("sys.exit(3)", "error"),
    "a hang": ("time.sleep(600)", "timeout"),
}

SMALL_INPUTS = {"spade_decoder": ("1x64x4x4",)}
"""Shapes for the example with convolutions, which are slow in half on a processor without arithmetic for it."""


def source_of(folder: Path, line: str) -> TargetSource:
    path = folder / f"{folder.name}.py"
    path.write_text(f"{HEAD}def misbehave(model, x):\n    {line}\n{TAIL}")
    return load_here(TargetSpec(str(path)), 0)


def scanned(source: TargetSource, isolation: Isolation | None, **options: Any) -> ScanResult:
    """Without times, which rows are not compared by."""
    settings: dict[str, Any] = {"precisions": ["bfloat16", "half"], "plan": False, "device": "cpu", "times": "off"}
    return scan_target(source, isolation, ScanOptions(**{**settings, "further_inputs": 1, **options}))


def facts(run: Run) -> tuple[Any, ...]:
    """All that a row says, but for times, and which ops were too slow to run twice on this machine."""
    error = run.exception and (run.exception.type, run.exception.message, run.exception.source)
    calls = [(row.op, row.module) for row in run.op_calls.rows()]
    gaps = [(gap.op, gap.module, gap.kind) for gap in run.gaps]
    return run.status, run.reason, error, run.output_error, run.complete, run.perturbed, run.notes, gaps, calls


def same_rows(one: ScanResult, other: ScanResult) -> None:
    for row, expected in zip(one.runs, other.runs, strict=True):
        assert facts(row) == facts(expected)


@pytest.mark.parametrize("name", RESTORED)
def test_a_run_that_is_restored_shares_its_worker(tmp_path: Path, name: str) -> None:
    source = source_of(tmp_path, RESTORED[name])
    expected = scanned(source, "fork")
    result = scanned(source, "shared")
    same_rows(result, expected)
    assert (source.kept.started, source.kept.left) == (1, [])
    assert result.options["isolation"] == "shared"


@pytest.mark.parametrize("name", LEFT)
def test_a_worker_with_leftovers_is_not_used_again(tmp_path: Path, name: str) -> None:
    source = source_of(tmp_path, LEFT[name])
    expected = scanned(source, "fork")
    same_rows(scanned(source, "shared"), expected)
    assert source.kept.left
    assert source.kept.started > 1


@pytest.mark.parametrize("name", DEADLY)
def test_a_worker_that_dies_costs_its_row_only(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SECONDS", math.inf)  # how often a worker that hangs has told its calls is a time
    line, status = DEADLY[name]
    source = source_of(tmp_path, line)
    options = {"budget": 1.0} if status == "timeout" else {}
    result = scanned(source, "shared", **options)
    assert [run.status for run in result.runs] == ["ok", status, "ok"]
    same_rows(result, scanned(source, "fork", **options))


@pytest.mark.slow
def test_rows_are_those_of_fresh_interpreters(tmp_path: Path) -> None:
    source = source_of(tmp_path, LEFT["a function of torch"])
    one = {"precisions": ["bfloat16"]}  # each run takes two interpreters
    same_rows(scanned(source, "shared", **one), scanned(source, "spawn", **one))


@pytest.mark.slow
# ResNet-50 takes half of the time of all; its layers are also those of the decoder.
@pytest.mark.parametrize("path", [p for p in EXAMPLES if p.stem != "cifar_resnet50"], ids=lambda path: path.stem)
def test_rows_of_examples_are_those_of_processes_of_their_own(path: Path) -> None:
    source = load_here(TargetSpec(str(path), SMALL_INPUTS.get(path.stem, ())), 0)
    options: dict[str, Any] = {"precisions": ["half", "autocast-bf16"], "budget": 120.0}  # a cast, and autocast
    one, other = (scanned(source, isolation, **options) for isolation in ("shared", "fork"))
    assert all(run.complete for run in one.runs)
    same_rows(one, other)


@pytest.mark.slow
def test_a_model_with_state_that_cannot_be_rewound_has_a_worker_for_each_job(tmp_path: Path) -> None:
    path = tmp_path / "counts.py"
    path.write_text(HEAD.replace("x * 2.0", "x + next(self.calls)") + "def misbehave(model, x):\n    pass\n" + TAIL)
    source = load_here(TargetSpec(str(path)), 0)
    same_rows(scanned(source, "shared"), scanned(source, "fork"))
    assert source.kept.started > len(("fp32", "bfloat16", "half"))


def test_the_command_shares_a_worker(call: Call, tmp_path: Path) -> None:
    saved = tmp_path / "scan.json"
    path = tmp_path / f"{tmp_path.name}.py"
    path.write_text(f"{HEAD}def misbehave(model, x):\n    pass\n{TAIL}")
    done = call("scan", path, "-p", "half", "--times", "off", "--isolation", "shared", "--no-plan", "--json", saved)
    assert done.returncode == 0, done.stderr
    assert ScanResult.load(saved).options["isolation"] == "shared"


# -- on an accelerator


@pytest.mark.parametrize(
    ("device", "best", "chosen"),
    [
        ("cpu", "fork", "fork"),
        ("cpu", "spawn", "spawn"),
        ("cuda", "fork", "shared"),
        ("xpu:1", "spawn", "shared"),
        ("cuda", "none", "none"),
    ],
)
def test_runs_share_a_worker_on_an_accelerator_by_default(device: str, best: Isolation, chosen: Isolation) -> None:
    assert isolation_on(device, best) == chosen


class FakeAccelerator:
    """Fails for good in the process in which the op ran, as CUDA does after an assertion in a kernel."""

    @staticmethod
    def break_down() -> None:
        os.environ["BROKEN_IN"] = str(os.getpid())  # a snapshot does not restore it
        FakeAccelerator.synchronize()

    @staticmethod
    def synchronize() -> None:
        if os.environ.get("BROKEN_IN") == str(os.getpid()):
            raise RuntimeError("CUDA error: device-side assert triggered")

    @staticmethod
    def manual_seed_all(seed: int) -> None: ...

    @staticmethod
    def get_rng_state_all() -> list[torch.Tensor]:
        return []

    @staticmethod
    def set_rng_state_all(states: list[torch.Tensor]) -> None: ...


class Breaks(nn.Module):
    """In half, breaks the device; everything that follows fails, as the restoring of the model would."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.half:
            FakeAccelerator.break_down()
        return self.linear(x)


def break_in_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks have the accelerator; this process is taken not to use it, or it would start fresh interpreters."""
    monkeypatch.setattr(devices, "initialized", lambda: iter([FakeAccelerator]))
    for module in (isolation, target_source):
        monkeypatch.setattr(module, "accelerator_in_use", lambda: False)


def test_a_broken_device_costs_its_row_only(monkeypatch: pytest.MonkeyPatch) -> None:
    break_in_forks(monkeypatch)
    source = TargetSource(make_target(Breaks().eval(), torch.ones(2, 8)))
    result = scanned(source, "shared", precisions=["half", "bfloat16"], times="on")
    assert [run.status for run in result.runs] == ["ok", "error", "ok"]
    assert "device-side assert" in str(result.runs[1].exception)
    assert any("device-side assert" in left for left in source.kept.left)


def fails_on_the_device(mode: Mode, task: RunTask, target: Target, report: Reporter) -> None:
    FakeAccelerator.break_down()


def test_a_device_that_breaks_outside_of_a_call_is_an_error_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    break_in_forks(monkeypatch)
    monkeypatch.setattr(Mode, "run", fails_on_the_device)
    source = TargetSource(make_target(Breaks().eval(), torch.ones(2, 8)))
    with open_task_files() as files:
        outcome = Launcher(source, "shared").do(RunTask(precision="half", device="cpu", files=files, mode=Mode()))
    source.close()
    assert outcome.run is not None
    assert outcome.run.status == "error"
    assert "device-side assert" in str(outcome.run.exception)


def test_weights_that_are_freed_keep_their_shapes_and_ties() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].weight = model[0].weight
    expected = [(name, tensor.shape) for name, tensor in (*model.named_parameters(), *model.named_buffers())]
    free_weights(model)
    assert {tensor.device.type for tensor in model.parameters()} == {"cpu"}  # nothing of it is on an accelerator
    free_weights(model, lambda tensor: True)
    assert [(name, tensor.shape) for name, tensor in (*model.named_parameters(), *model.named_buffers())] == expected
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
    assert model[1].weight is model[0].weight


# -- one task after another


def counts_calls(mode: Mode, task: RunTask, target: Target, report: Reporter) -> None:
    if task.precision == "autocast-fp16":
        os.kill(os.getpid(), signal.SIGKILL)
    target.model.calls = getattr(target.model, "calls", 0) + 1  # type: ignore[assignment]
    so_far = task.begun().with_fields(status="ok", notes=[task.precision, str(os.getpid())])
    report.update(msgspec.structs.replace(so_far, is_judged=True))


def test_a_shared_worker_does_one_task_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mode, "run", counts_calls)  # forks have it too
    source = TargetSource(make_target(nn.Linear(2, 2).eval(), torch.ones(1, 2)))
    with open_task_files() as files:
        launcher, notes = Launcher(source, "shared"), []
        one = RunTask(precision="half", device="cpu", files=files, mode=Mode())
        for precision in ("half", "bfloat16", "autocast-fp16"):
            outcome = launcher.do(dataclasses.replace(one, precision=precision))
            notes.append(outcome.run.notes if outcome.run else (outcome.ended, str(outcome.reason)))
        after = launcher.do(one)
    assert after.run is not None
    last = int(after.run.notes[1])
    assert psutil.pid_exists(last)
    source.close()
    assert not psutil.pid_exists(last)
    (first, process), (second, same), (ended, reason) = notes
    assert (first, second, ended) == ("half", "bfloat16", "crashed")
    assert process == same != str(os.getpid())
    assert "SIGKILL" in reason
    assert (after.run.notes[0], after.run.notes[1] != process) == ("half", True)
    assert source.kept.started == 2


def test_scan_accepts_the_isolation() -> None:
    result = scan(nn.Linear(4, 4).eval(), torch.ones(1, 4), precisions="half", isolation="shared", plan=False)
    assert [run.status for run in result.runs] == ["ok", "ok"]


def test_a_program_that_has_asked_for_its_gpu_forks_only_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.cuda.is_available()`` is enough for CUDA to refuse a fork, though nothing is initialized."""
    this = os.getpid()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: os.getpid() != this)
    source = TargetSource(make_target(nn.Linear(8, 8), torch.ones(2, 8)))
    assert source.isolation_of_functions(None, "cpu") == "fork"
    assert source.isolation_of_functions(None, None) == "none"
    assert (source.best_on("cpu"), source.method) == ("fork", "fork")
    assert (source.best_on("cuda"), source.method) == ("none", "spawn")
    assert scanned(TargetSource(source.target), None).options["isolation"] == "fork"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the command does not fork")
def test_what_files_ask_about_a_gpu_when_they_are_imported_is_asked_in_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.utils._triton.has_triton()``, which torchao calls, would initialize it, and no fork could use it then."""
    properties = lambda _device=None: SimpleNamespace(major=9, minor=0, name="GPU", asked_in=os.getpid(), uuid=object())  # noqa: E731
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with cuda_asked_in_a_fork():
        kept = torch.cuda.get_device_properties
        assert torch.cuda.get_device_capability() == (9, 0)
        assert torch.cuda.get_device_name() == "GPU"
        assert torch.cuda.current_device() == 0
        assert kept(0).asked_in != os.getpid()
        assert {kept(device).asked_in for device in (None, "cuda:0", torch.device("cuda"))} == {kept(0).asked_in}
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        assert kept(0).asked_in == os.getpid()
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert torch.cuda.get_device_properties is properties
    assert kept(0).asked_in == os.getpid()  # a class may have kept it


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="there may be a GPU")
def test_a_question_about_a_gpu_that_is_not_there_fails_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    for name, arguments in (("get_device_properties", (0,)), ("current_device", ())):
        with cuda_asked_in_a_fork(), pytest.raises(AssertionError, match="not compiled with CUDA"):
            getattr(torch.cuda, name)(*arguments)
