"""The worker process of a sweep: reads names of operators from stdin, writes results to stdout, one per line.

The output of operators goes to stderr. Before every call the breadcrumb is updated, so that a crash can be located.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from typing import Any, BinaryIO

import msgspec
import torch

from lowprec_check.catalog.records import LOW, Dtype, Header
from lowprec_check.engine.core.installation import IPEX, cpu_info, extension_problem, installed_version
from lowprec_check.engine.sweep.calls import Setting
from lowprec_check.engine.sweep.measure import OperatorMeasurement
from lowprec_check.engine.sweep.messages import Answer, CannotMeasure, Fault, Hello, Task
from lowprec_check.engine.sweep.samples import load_operators
from lowprec_check.errors import UsageError, traceback_of
from lowprec_check.process.breadcrumb import Breadcrumb
from lowprec_check.schema.base import Struct, encoded

FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "avx_ne_convert")


def main() -> None:
    """Process tasks until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--extension")
    parser.add_argument("--breadcrumb", required=True)
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    try:
        operators, header, setting = _prepare(options)
    except UsageError as error:
        _send(answers, CannotMeasure(error.message, error.hint))
        return
    _send(answers, Hello(header, list(operators)))
    breadcrumb = Breadcrumb.open(options.breadcrumb)
    for line in sys.stdin.buffer:
        task = msgspec.json.decode(line, type=Task)

        def enter(cell: str, detail: str, name: str = task.op) -> None:
            breadcrumb.enter(name, cell, detail)

        try:
            operator = operators[task.op]
            found = OperatorMeasurement(task.op, operator, setting, task.lost, enter, brief=task.brief).measure()
            _send(answers, Answer(found.record, found.times))
        except Exception as error:
            _send(answers, Fault(task.op, traceback_of(error)))


def _send(stream: BinaryIO | Any, message: Struct) -> None:
    stream.write(encoded(message, msgspec.json.encode) + b"\n")


def _prepare(options: argparse.Namespace) -> tuple[dict[str, Any], Header, Setting]:
    torch.set_num_threads(1)
    extension = _load_extension(options.extension)
    device = options.device
    if device != "cpu" and not getattr(torch, device).is_available():
        raise UsageError(f"Device {device!r} is not available.", "Pass --device cpu.")
    operators = load_operators()
    setting = Setting(device, options.samples, _autocast_dtypes(device), _widest(device))
    header = Header(
        device=device,
        torch=torch.__version__.partition("+")[0],
        capability=_capability(device),
        hardware=_hardware(device),
        features=[name for name in FEATURES if name in cpu_info("flags").split()] if device == "cpu" else [],
        extension=extension,
        autocast=list(setting.autocast),
        samples=options.samples,
        ops=len(operators),
    )
    return operators, header, setting


def _load_extension(name: str | None) -> str | None:
    """Import Intel's extension if its version matches this torch; otherwise its import would end the process."""
    if name is None:
        return None
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


def _autocast_dtypes(device: str) -> tuple[Dtype, ...]:
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


def _widest(device: str) -> torch.dtype:
    try:
        torch.ones(2, dtype=torch.float64, device=device).add(1).cpu()
    except Exception:
        return torch.float32
    return torch.float64


def _capability(device: str) -> str:
    if device == "cpu":
        return torch.backends.cpu.get_cpu_capability().lower()
    if device == "cuda":
        return "sm_{}{}".format(*torch.cuda.get_device_capability())
    properties = getattr(torch, device).get_device_properties(0)
    return str(getattr(properties, "architecture", device))


def _hardware(device: str) -> str:
    if device != "cpu":
        return str(getattr(torch, device).get_device_name(0))
    return cpu_info("model name") or "unknown"


if __name__ == "__main__":
    main()
