"""The hardware and which precisions it accelerates. May initialize a device, so it runs in a separate process if possible."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

import torch

from lowprec_check.engine.core.package_versions import IPEX, installed_version, minor_version
from lowprec_check.engine.model import device as devices
from lowprec_check.schema.devices import accelerators
from lowprec_check.schema.precisions import LOW_FORMATS

CPU_FEATURES = ("avx2", "avx512", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_fp16")


def environment(device: str | None = None) -> dict[str, Any]:
    """Versions, CPU features, accelerated dtypes, accelerators, IPEX; raises ``UsageError`` if ``device`` is not available."""
    chosen = devices.resolve(device)
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": str(chosen),
        "device_name": devices.name_of(chosen) if chosen.type != "cpu" else _cpu_name(),
        "default_autocast": str(devices.default_autocast_dtype(chosen))[6:],
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_features": [feature for feature in CPU_FEATURES if _has(feature)],
        **{f"{low.short}_accelerated": _accelerates(chosen, low.short) for low in LOW_FORMATS},
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "accelerators": [_describe(kind) for kind in accelerators() if devices.is_available(kind)],
        "torchvision": installed_version("torchvision"),
        "ipex": installed_version(IPEX),
        "ipex_fits": ipex_fits(),
    }


def _has(feature: str) -> bool | None:
    test = getattr(torch.cpu, f"_is_{feature}_supported", None)
    if test is None:
        return None
    return bool(test())


def _accelerates(device: torch.device, kind: str) -> bool | None:
    """Whether the hardware computes matrix products in this dtype; ``None`` if this torch cannot report it."""
    if device.type != "cpu":
        module = devices.module_of(device)
        test = getattr(module, "is_bf16_supported", None)
        return bool(test()) if kind == "bf16" and test is not None else True
    test = getattr(torch.ops.mkldnn, f"_is_mkldnn_{kind}_supported", None)
    return bool(test()) if test is not None else None


def _describe(kind: str) -> str:
    module = devices.module_of(torch.device(kind))
    count = module.device_count() if hasattr(module, "device_count") else 1
    try:
        name = devices.name_of(torch.device(kind))
    except RuntimeError:  # in a fork of a process that has asked for its accelerators
        name = "not used here"
    return f"{kind} ×{count}: {name}"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def ipex_fits() -> bool | None:
    """Whether the installed Intel extension matches this torch; ``None`` if it is not installed.

    The versions are compared without importing it: with another torch, its import ends the process.
    """
    version = installed_version(IPEX)
    if version is None:
        return None
    return minor_version(version) == minor_version(torch.__version__) and sys.platform.startswith("linux")


def version() -> str:
    """The installed version of this package."""
    return installed_version("lowprec-check") or "0+unknown"
