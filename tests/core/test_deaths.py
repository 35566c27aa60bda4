"""What a death of a worker proves: an op is blamed only if the process dies in it again."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowprec_check import Run, ScanResult, scan


class Dies(nn.Module):
    """``dies`` in a custom op, in half; the op's calls are counted in a file, across processes."""

    def __init__(self, folder: Path, name: str, *, layers: int = 3) -> None:
        super().__init__()
        self.folder, self.op = folder, getattr(torch.ops.deaths, name)
        self.layers = nn.ModuleList(Layer(self, number) for number in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(nn.Module):
    def __init__(self, root: Dies, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(8, 8), number
        self.path, self.op = str(root.folder), root.op

    def forward(self, x: Tensor) -> Tensor:
        return self.op(self.linear(x), self.path, self.number)


def happens_once(path: str, what: str) -> bool:
    try:
        os.close(os.open(Path(path) / what, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


@torch.library.custom_op("deaths::killed_once", mutates_args=())
def killed_once(x: Tensor, path: str, number: int) -> Tensor:
    """Another process kills this one, once."""
    if x.dtype == torch.half and number == 1 and happens_once(path, "killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    return x.clone()


@torch.library.custom_op("deaths::crashes_once", mutates_args=())
def crashes_once(x: Tensor, path: str, number: int) -> Tensor:
    if x.dtype == torch.half and happens_once(path, "crashed"):
        os.kill(os.getpid(), signal.SIGSEGV)
    return x.clone()


@torch.library.custom_op("deaths::crashes", mutates_args=())
def crashes(x: Tensor, path: str, number: int) -> Tensor:
    if x.dtype == torch.half and number != 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    return x.clone()


@torch.library.custom_op("deaths::crashes_anywhere", mutates_args=())
def crashes_anywhere(x: Tensor, path: str, number: int) -> Tensor:
    """In another layer each time, as after a write to wrong memory."""
    if x.dtype == torch.half:
        file = Path(path) / "deaths"
        deaths = file.stat().st_size if file.exists() else 0
        if deaths % 3 == number:
            file.write_bytes(bytes(deaths + 1))
            os.kill(os.getpid(), signal.SIGSEGV)
    return x.clone()


for name in ("killed_once", "crashes_once", "crashes", "crashes_anywhere"):
    getattr(torch.ops.deaths, name)(torch.ones(1), "", 0)  # the first call imports, which every worker would do again


def scanned(folder: Path, name: str) -> tuple[ScanResult, Run]:
    result = scan(Dies(folder, name), torch.ones(2, 8), precisions="half", plan=False)
    return result, result.runs[1]


def blamed(result: ScanResult) -> list[tuple[str | None, str | None]]:
    return [(found.op, found.module) for found in result.diagnostics if found.code == "LP107"]


def test_a_process_killed_once_in_the_plain_part_is_run_again(tmp_path: Path) -> None:
    result, run = scanned(tmp_path, "killed_once")
    assert (tmp_path / "killed").exists()
    assert (run.status, run.complete, blamed(result)) == ("ok", True, [])
    assert any("killed by SIGKILL" in note and "once" in note for note in run.notes)


def test_a_crash_that_does_not_happen_again_is_a_crash_without_a_place(tmp_path: Path) -> None:
    result, run = scanned(tmp_path, "crashes_once")
    assert (run.status, run.complete) == ("crashed", True)
    assert "SIGSEGV" in str(run.reason)
    assert "in one of two attempts" in str(run.reason)
    assert all(not op for op, _ in blamed(result))


def test_an_op_that_crashes_again_is_blamed_where_it_does(tmp_path: Path) -> None:
    result, run = scanned(tmp_path, "crashes")
    assert run.status == "crashed"
    assert "in deaths.crashes.default of layers.0" in str(run.reason)
    assert {gap.module for gap in run.gaps if gap.kind == "crash"} == {"layers.0", "layers.2"}
    assert run.complete
    assert [row.outcome for row in run.op_calls.rows() if row.op.startswith("deaths")] == ["emulated", "ok", "emulated"]
    assert blamed(result)


def test_a_process_that_dies_in_another_op_each_time_blames_none(tmp_path: Path) -> None:
    result, run = scanned(tmp_path, "crashes_anywhere")
    assert run.status == "crashed"
    assert not [gap for gap in run.gaps if gap.kind == "crash"]
    assert not run.complete
    assert "deaths." not in str(run.reason).replace("test_deaths.py", "")
    assert all(not op for op, _ in blamed(result))


class KilledWhenInstrumented(nn.Module):
    """Another process kills it once while the op-by-op analysis is in a layer norm."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = str(folder)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = norm(x)
        if x.dtype == torch.half and torch._C._len_torch_dispatch_stack() and happens_once(self.folder, "killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        return x


def test_a_process_killed_once_in_the_analysis_loses_nothing(tmp_path: Path) -> None:
    result = scan(KilledWhenInstrumented(tmp_path), torch.randn(2, 8), precisions="half", plan=False)
    run = result.runs[1]
    assert (tmp_path / "killed").exists()
    assert (run.status, run.complete, blamed(result)) == ("ok", True, [])
    assert sum("layer_norm" in row.op for row in run.op_calls.rows()) == 12


class Many(nn.Module):
    def __init__(self, calls: int) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), calls

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        for _ in range(self.calls):
            x = x * 1.0
        return x


@pytest.mark.slow
def test_what_was_recorded_before_the_budget_ended_is_kept() -> None:
    options: dict[str, Any] = {"precisions": "half", "plan": False, "times": "off", "further_inputs": 0}
    options["explain"] = "all"
    result = scan(Many(30_000), torch.ones(2, 8), budget=1.5, **options)
    run = result.runs[1]
    assert run.status == "ok"
    assert not run.complete
    assert not run.emulated
    ops = [row.op for row in run.op_calls.rows()]
    assert ops[0] == "aten.addmm.default"
    assert 1000 < len(ops) < 30_000
    [found] = [found for found in result.diagnostics if found.code == "LP905" and found.precision == "half"]
    assert re.search("the budget of 1.5 s ended, (at|after) op", found.message)
    assert "aten.mul.Tensor" in found.message
    assert "test_deaths.py" in found.message
