"""Devices that this machine lacks: every function the code calls exists in ``torch.xpu`` and similar modules."""

from __future__ import annotations

import ast

import pytest
import torch
from conftest import ROOT

from lowprec_check import scan
from lowprec_check.core.mode import Mode
from lowprec_check.core.reference_errors import failed_reference
from lowprec_check.engine.model.prepared import autocast_problem
from lowprec_check.engine.model.target import make_target
from lowprec_check.errors import UsageError
from lowprec_check.features.prediction.run import StandIn
from lowprec_check.schema.measures import PredictedDevice
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.verdict import ExceptionInfo
from lowprec_check.torchkit import devices

FILES = ("torchkit/devices.py", "core/machine.py")
"""The files that may use a device module."""


def device_module_calls() -> set[str]:
    """The attributes of device modules that these files use: of ``module``, ``module_of(…)``, ``torch.xpu``."""
    found = set()
    for file in FILES:
        for node in ast.walk(ast.parse((ROOT / "lowprec_check" / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and _is_device_module(node.value):
                found.add(node.attr)
            if (
                (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Name)
                    and node.func.id in ("getattr", "hasattr")
                )
                and _is_device_module(node.args[0])
                and isinstance(node.args[1], ast.Constant)
            ):
                found.add(node.args[1].value)
    return found


def _is_device_module(node: ast.expr) -> bool:
    if isinstance(node, ast.Name):
        return node.id == "module"
    if isinstance(node, ast.Attribute):
        is_setting = isinstance(node.value, ast.Attribute) and node.value.attr == "backends"
        return node.attr in ("xpu", "cuda") and not is_setting
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("module_of", "devices.module_of")


def test_every_device_call_exists_in_torch_xpu() -> None:
    calls = device_module_calls()
    assert {"synchronize", "memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"} <= calls
    assert {"is_available", "get_device_name", "device_count", "is_bf16_supported"} <= calls
    calls |= {"is_initialized", "manual_seed_all"}  # used by name in seed.py and isolation.py
    for module in (torch.xpu, torch.cuda):
        assert not {name for name in calls if not hasattr(module, name)}


def test_mps_has_the_required_functions() -> None:
    assert hasattr(torch.mps, "synchronize")
    assert hasattr(torch.mps, "is_available")


def test_resolve_finds_devices_by_name() -> None:
    assert devices.resolve(None).type == "cpu"
    assert devices.resolve("cpu") == torch.device("cpu")
    for name in ("toaster", "meta", "cpu:x"):
        with pytest.raises(UsageError, match="Unknown device"):
            devices.resolve(name)


def test_the_cpu_uses_the_same_functions() -> None:
    cpu = torch.device("cpu")
    result, seconds = devices.timed(cpu, lambda: 7)
    assert result == 7
    assert seconds >= 0
    assert devices.peak_memory(cpu, lambda: None) is None
    assert devices.default_autocast_dtype(cpu) == torch.bfloat16


def test_torch_cuda_is_used_only_in_a_few_files() -> None:
    package = ROOT / "lowprec_check"
    named = {path for path in package.rglob("*.py") if "torch.cuda" in path.read_text(encoding="utf-8")}
    assert named == {
        package / "engine" / "model" / "target_source.py",  # in a comment
        package / "features" / "quantize" / "further_backends.py",  # in printed code
        package / "torchkit" / "devices.py",
        package / "torchkit" / "dispatch_mode.py",  # whether a graph is captured, asked at each call
    }


@pytest.mark.parametrize(
    ("device", "hint"),
    [
        ("xpu:0", "set PYTORCH_ENABLE_XPU_FALLBACK=1 to run it on the CPU, or scan with --device cpu"),
        ("mps", "set PYTORCH_ENABLE_MPS_FALLBACK=1 to run it on the CPU, or scan with --device cpu"),
        ("cuda", "If the op has no kernel on cuda, scan with --device cpu."),
    ],
)
def test_the_fallback_variable_is_suggested_only_for_devices_that_have_one(device: str, hint: str) -> None:
    raised = ExceptionInfo(type="NotImplementedError", message="no kernel", module=None, source=None)
    target = make_target(torch.nn.Linear(2, 2), torch.ones(1, 2))
    message, found = failed_reference(raised, target, Mode(), device)
    assert f"fails in fp32 on {device}" in message
    assert hint in found


def test_a_prediction_needs_a_cpu_kernel_of_each_custom_op() -> None:
    library = torch.library.Library("only_on_cuda", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x * 2, "CUDA")
    with pytest.raises(NotImplementedError) as raised:
        torch.ops.only_on_cuda.double(torch.ones(1))
    error = ExceptionInfo(type="NotImplementedError", message=str(raised.value), module=None, source=None)
    target = make_target(torch.nn.Linear(2, 2), torch.ones(1, 2))
    device = PredictedDevice(name="cuda", torch="2.11", kernels="", autocast="2.11")
    _, hint = failed_reference(error, target, StandIn(device), "cuda")
    assert hint == "A prediction runs on the CPU: register a CPU kernel of only_on_cuda::double."


def test_what_runs_is_known_without_a_gpu_being_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process that forks workers: asking torch for autocast to bf16 on CUDA would initialize it."""

    def fail(*args: object, **options: object) -> None:
        raise AssertionError("autocast was entered")

    monkeypatch.setattr(torch, "autocast", fail)
    monkeypatch.setattr(torch.amp, "autocast", fail)
    names = [precision for precision in PRECISIONS if precision.kind == "autocast"]
    assert len(names) >= 2
    assert [autocast_problem(precision, "cuda") for precision in names] == [None] * len(names)


def test_a_model_with_weights_in_half_that_fails_in_fp32_is_told_why() -> None:
    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = torch.nn.Linear(2, 2).half()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.encoder(x.half()).float()

    with pytest.raises(UsageError) as raised:
        scan(Mixed(), torch.ones(1, 2), precisions=["half"], plan=False)
    assert "Some of its weights are in 16 bits as given, as encoder.weight is" in str(raised.value.hint)
