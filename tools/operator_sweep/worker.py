"""The worker of a full sweep: `lowprec_check.engine.sweep.operator_worker` with a full measurement and a header."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from lowprec_check.catalog.records import LOW, Dtype, Header
from lowprec_check.catalog.versions import installed_version
from lowprec_check.engine.sweep.failures import Raised
from lowprec_check.engine.sweep.operator_worker import Caller, Enter, options_of, serve, torch_version
from lowprec_check.errors import UsageError
from lowprec_check.torchkit.installation import IPEX, cpu_info, extension_problem
from tools.operator_sweep.measure import FullMeasurement
from tools.operator_sweep.messages import FullAnswer, FullHello

FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "avx_ne_convert")


def load_extension() -> str:
    """Import Intel's extension if its version matches this torch; otherwise its import would end the process."""
    version = installed_version(IPEX)
    if version is None:
        raise UsageError(
            "Intel Extension for PyTorch is not installed.",
            "pip install torch==2.8.0 intel-extension-for-pytorch==2.8.0",
        )
    if extension_problem() is not None:
        raise UsageError(
            f"Intel Extension for PyTorch {version} does not match torch {torch.__version__}.",
            f"Install the extension for torch {torch.__version__}.",
        )
    import intel_extension_for_pytorch  # noqa: F401

    return f"ipex {version.partition('+')[0]}"


def autocast_dtypes(device: str) -> tuple[Dtype, ...]:
    """The dtypes that autocast supports on the device; for others it disables itself or raises."""
    supported: list[Dtype] = []
    for dtype in LOW:
        low = getattr(torch, dtype)
        try:
            with torch.autocast(device, dtype=low):
                product = torch.ones(2, 2, device=device) @ torch.ones(2, 2, device=device)
        except Exception:
            continue
        if product.dtype == low:
            supported.append(dtype)
    return tuple(supported)


def capability_of(device: str) -> str:
    """``avx512``, ``sm_90``."""
    if device == "cpu":
        return torch.backends.cpu.get_cpu_capability().lower()
    if device == "cuda":
        return "sm_{}{}".format(*torch.cuda.get_device_capability())
    properties = getattr(torch, device).get_device_properties(0)
    return str(getattr(properties, "architecture", device))


def hardware_of(device: str) -> tuple[str, list[str]]:
    """The name of the device, and the features of a CPU."""
    if device != "cpu":
        return str(getattr(torch, device).get_device_name(0)), []
    flags = cpu_info("flags").split()
    return cpu_info("model name") or "unknown", [feature for feature in FEATURES if feature in flags]


def main() -> None:
    """Measure operators until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--extension")
    options = options_of(parser)
    extension: list[str] = []
    autocast: list[Dtype] = []

    def prepare() -> None:
        if options.extension is not None:
            extension.append(load_extension())

    def greet(operators: dict[str, Any]) -> FullHello:
        autocast.extend(autocast_dtypes(options.device))
        hardware, features = hardware_of(options.device)
        header = Header(
            device=options.device,
            torch=torch_version(),
            capability=capability_of(options.device),
            hardware=hardware,
            features=features,
            extension=next(iter(extension), None),
            autocast=autocast,
            samples=options.samples,
            ops=len(operators),
        )
        return FullHello(header.torch, list(operators), header)

    def answer(op: str, caller: Caller, lost: dict[str, Raised], enter: Enter) -> FullAnswer:
        measurement = FullMeasurement(op, caller, options.samples, lost, enter, autocast=tuple(autocast))
        return FullAnswer(measurement.measure(), measurement.times())

    serve(options, greet, answer, prepare=prepare)


if __name__ == "__main__":
    main()
