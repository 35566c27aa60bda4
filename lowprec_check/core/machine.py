"""The hardware and which precisions it accelerates; may initialize a device: best in a fork."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import Any

import torch

from lowprec_check.catalog.predictable import predicted_device
from lowprec_check.catalog.versions import installed_version, release_of
from lowprec_check.engine.model.target_source import TargetSource
from lowprec_check.errors import UsageError
from lowprec_check.process import Isolation
from lowprec_check.schema.axes import accelerators, device_of
from lowprec_check.schema.base import Struct
from lowprec_check.schema.measures import PredictedDevice
from lowprec_check.schema.precisions import LOW_FORMATS
from lowprec_check.torchkit import devices
from lowprec_check.torchkit.installation import IPEX, cpu_info, extension_problem, prepack_problem
from lowprec_check.torchkit.isolation import isolated, isolation_on

CPU_FEATURES = ("avx2", "avx512", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_fp16")


class Machine(Struct, frozen=True, kw_only=True):
    """Where a scan runs, and the device that it predicts, if that is not here."""

    environment: dict[str, Any]
    predicted: PredictedDevice | None = None

    @property
    def runs_on(self) -> str:
        """The device that runs happen on."""
        if self.predicted is not None:
            return "cpu"
        return str(self.environment["device"])


def machine_and_isolation(
    source: TargetSource, isolation: Isolation | None, device: str | None, find: Callable[[], Machine]
) -> tuple[Machine, Isolation]:
    """What ``find`` returns, where ``device`` may be initialized, and how runs are isolated."""
    where: Isolation = "none"
    if torch.accelerator.current_accelerator() is not None:  # else there is nothing that could be initialized
        where = source.isolation_of_functions(isolation, device)
    machine = isolated(find, where, Machine)
    isolation = isolation or isolation_on(machine.runs_on, source.best_on(machine.runs_on))
    if machine.predicted is not None and isolation not in ("fork", "spawn"):
        raise UsageError(
            f"A prediction needs a new process for each run, which the isolation {isolation!r} does not give.",
            "Choose fork or spawn.",
        )
    source.isolated_by(isolation)
    return machine, isolation


def machine_for(device: str | None, torch_version: str | None, *, predict: bool) -> Machine:
    """The machine of a scan on ``device``; runs are predicted if it is missing, or ``predict``."""
    installed = str(torch.__version__)
    predicted: PredictedDevice | None = None
    if device is None:
        return Machine(environment=environment())
    if predict or not devices.is_available(device_of(device).name):  # asked for, or the device is not here
        predicted = predicted_device(device_of(device).name, torch_version or installed, installed)
    elif torch_version is not None and release_of(torch_version) != release_of(installed):
        raise UsageError(
            f"{device_of(device).name} is here with torch {release_of(installed)}, so the scan would measure that.",
            f"Add --predict to predict for torch {torch_version}.",
        )
    if predicted is None:
        return Machine(environment=environment(device))
    here = environment("cpu") | {"device": predicted.name, "device_name": "predicted on a CPU"}
    # What a device that is not here accelerates is not known.
    if predicted.name != "cpu":
        here |= {"default_autocast": "float16", **{f"{low.short}_accelerated": None for low in LOW_FORMATS}}
    return Machine(environment=here, predicted=predicted)


def environment(device: str | None = None) -> dict[str, Any]:
    """Versions, CPU features, accelerated dtypes, accelerators; fails without ``device``."""
    chosen, ipex = devices.resolve(device), installed_version(IPEX)
    if chosen.type != "cpu":
        name = devices.name_of(chosen)
    else:
        name = cpu_info("model name") or platform.processor() or platform.machine()
    described = []
    for kind in filter(devices.is_available, accelerators()):
        module = devices.module_of(torch.device(kind))
        count = module.device_count() if hasattr(module, "device_count") else 1
        try:
            product = devices.name_of(torch.device(kind))
        except RuntimeError:  # in a fork of a process that has asked for its accelerators
            product = "not used here"
        described.append(f"{kind} ×{count}: {product}")
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": str(chosen),
        "device_name": name,
        "default_autocast": str(devices.default_autocast_dtype(chosen))[6:],
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_features": [name for name in CPU_FEATURES if getattr(torch.cpu, f"_is_{name}_supported", bool)()],
        **{f"{low.short}_accelerated": _accelerates(chosen, low.short) for low in LOW_FORMATS},
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "accelerators": described,
        **{package: installed_version(package) for package in ("torchvision", "timm", "transformers")},
        "ipex": ipex,
        "ipex_fits": ipex and extension_problem() is None,
        "ipex_limit": ipex and prepack_problem("bfloat16"),
    }


def _accelerates(device: torch.device, kind: str) -> bool | None:
    """Whether the hardware computes matrix products in this dtype; ``None`` if unknown."""
    if device.type == "cpu":
        test = getattr(torch.ops.mkldnn, f"_is_mkldnn_{kind}_supported", None)
        return bool(test()) if test is not None else None
    # Accelerators compute in half; some can be asked about bfloat16.
    test = getattr(devices.module_of(device), "is_bf16_supported", None)
    if kind == "bf16" and test is not None:
        return bool(test())
    return True
