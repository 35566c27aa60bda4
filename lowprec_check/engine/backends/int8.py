"""Post-training static quantization to int8, by torchao's PT2E on newer torch, by Intel's extension on torch 2.8."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

from lowprec_check.engine.quantize.library import library, missing, quantization_code
from lowprec_check.schema.axes import Backend, Code, Example
from lowprec_check.schema.measures import LayerError
from lowprec_check.schema.precisions import BF16, Precision
from lowprec_check.schema.run_key import RunKey
from lowprec_check.schema.scan_result import ModelInfo


class Int8(Backend):
    """Quantizes weights and activations of convolutions and linear layers; the rest stays in fp32, or bf16 by autocast."""

    name = "int8"
    project = "pytorch/ao"
    summary = "static quantization to int8: torchao's PT2E and inductor, or Intel's extension on torch 2.8"
    aliases = ("qint8", "quantized")
    setup_budget = 240.0
    changes_process = True  # both libraries register operators and passes, the extension overrides autocast's kernels
    tolerance = 0.1
    lowers_precision = True

    def skip_reason(self, precision: Precision, device: str, memory_format: str) -> str | None:
        """The quantizers are for x86 CPUs, and quantize fp32 weights."""
        if device != "cpu":
            return f"int8 quantizes for the CPU; its quantizer does not apply to {device}"
        if platform.machine().lower() not in ("x86_64", "amd64"):
            return f"int8 quantizes for x86 CPUs, and this machine is {platform.machine()}"
        if precision.kind == "autocast" and precision.format != BF16:
            other = precision.format.short
            return (
                f"beside int8 layers, the rest of the model can run in fp32 or bf16, not in {other}: use autocast-bf16"
            )
        if precision.kind not in ("reference", "autocast"):
            return "int8 quantizes fp32 weights, which a cast has rounded already: use fp32 or autocast-bf16"
        return f"int8 cannot run here: {missing()}" if library() is None else None

    def prepare(self, model: Any, example: Example) -> Callable[..., Any]:
        """The quantized model, calibrated on ``example.calibration()``; the first call compiles it."""
        from lowprec_check.engine.core.devices import kept_generators
        from lowprec_check.engine.quantize.library import quantize

        with kept_generators():
            return quantize(model, (example.args, example.kwargs), example.calibration)

    def layer_errors(self, prepared: Any, model: Any, example: Example) -> list[LayerError]:
        """The error of each quantized layer, on the calibration inputs."""
        found: list[LayerError] = prepared.layer_errors(model, example.calibration)
        return found

    def code(self, key: RunKey, model: ModelInfo) -> Code:
        """The same calls of the library."""
        return quantization_code(model)


INT8 = Int8()
