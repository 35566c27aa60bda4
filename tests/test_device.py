"""Devices that are not here: every call the code makes exists in ``torch.xpu`` and its siblings."""

from __future__ import annotations

import ast

import pytest
import torch
from conftest import ROOT

from lowprec_check.engine.model import device as devices
from lowprec_check.errors import UsageError

ROOMS = ("engine/model/device.py", "engine/machine.py")
"""The files that may speak to a device module."""


def device_module_calls() -> set[str]:
    """What these files take from a device module: of a variable ``module``, of ``module_of(…)``, of ``torch.xpu``."""
    found = set()
    for room in ROOMS:
        for node in ast.walk(ast.parse((ROOT / "lowprec_check" / room).read_text(encoding="utf-8"))):
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
        return node.attr in ("xpu", "cuda")
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "module_of"


def test_every_device_call_exists_in_torch_xpu() -> None:
    calls = device_module_calls()
    assert {"synchronize", "memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"} <= calls
    assert {"is_available", "get_device_name", "device_count", "is_bf16_supported"} <= calls
    calls |= {"is_initialized", "manual_seed_all"}  # asked of both by name in worker.py and precision.py
    for module in (torch.xpu, torch.cuda):
        assert not {name for name in calls if not hasattr(module, name)}


def test_mps_has_what_is_not_optional() -> None:
    assert hasattr(torch.mps, "synchronize")
    assert hasattr(torch.mps, "is_available")


def test_resolve() -> None:
    assert devices.resolve(None).type == "cpu"
    assert devices.resolve("cpu") == torch.device("cpu")
    for name in ("toaster", "meta", "cpu:x"):
        with pytest.raises(UsageError, match="Unknown device"):
            devices.resolve(name)


def test_cpu_through_the_same_path() -> None:
    cpu = torch.device("cpu")
    result, seconds = devices.timed(cpu, lambda: 7)
    assert result == 7
    assert seconds >= 0
    assert devices.peak_memory(cpu, lambda: None) is None
    assert devices.default_autocast_dtype(cpu) == torch.bfloat16


def test_no_vendor_is_named_outside_the_device_room() -> None:
    engine = ROOT / "lowprec_check" / "engine"
    named = {path for path in engine.parent.rglob("*.py") if "torch.cuda" in path.read_text(encoding="utf-8")}
    assert named == {
        engine / "load.py",  # a comment on an environment variable
        engine / "model" / "device.py",
        engine / "core" / "seed.py",
        engine / "run" / "isolation.py",
        engine / "sweep" / "worker.py",  # knows nothing of this package but the sweep
    }
