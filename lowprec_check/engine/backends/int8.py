"""Quantization to int8 after training, static or of linear layers, by torchao or the extension."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any, ClassVar

from lowprec_check.engine.quantize.library import (
    NEWEST,
    calibrating,
    fitting_torchao,
    library,
    missing,
    quantization_code,
    torchao_fits,
)
from lowprec_check.schema.axes import Backend, Code, Example
from lowprec_check.schema.measures import LayerError
from lowprec_check.schema.precisions import BF16, Precision
from lowprec_check.schema.run_key import RunKey

if TYPE_CHECKING:
    from lowprec_check.schema.scan_result import ModelInfo


class Quantizing(Backend):
    """A backend that quantizes to int8."""

    project = "pytorch/ao"
    setup_budget = 240.0
    # the libraries register operators and passes, or set what is constant in all that is compiled
    changes_process = True
    tolerance = 0.1
    lowers_precision = True


class Int8(Quantizing):
    """Quantizes convolutions and linear layers; the rest stays in fp32, or in bf16 by autocast."""

    name = "int8"
    summary = "static quantization to int8: torchao's PT2E and inductor, or Intel's extension on torch 2.8"
    aliases = ("qint8", "quantized")
    calibrates = True

    def skip_reason(self, precision: Precision, device: str, memory_format: str) -> str | None:
        """The quantizers are for x86 CPUs, and quantize fp32 weights."""
        if device != "cpu":
            return f"int8 quantizes for the CPU; its quantizer does not apply to {device}"
        if platform.machine().lower() not in ("x86_64", "amd64"):
            return f"int8 quantizes for x86 CPUs, and this machine is {platform.machine()}"
        if precision.kind == "autocast" and precision.format != BF16:
            what = "beside int8 layers, the rest of the model can run in fp32 or bf16"
            return f"{what}, not in {precision.format.short}: use autocast-bf16"
        if precision.kind not in ("reference", "autocast"):
            return "int8 quantizes fp32 weights, which a cast has rounded already: use fp32 or autocast-bf16"
        if library() is None:
            return f"int8 cannot run here: {missing()}"
        return None

    def prepare(self, model: Any, example: Example) -> Any:
        """The quantized model, calibrated on the inputs for that; the first call compiles it."""
        from lowprec_check.engine.quantize.library import quantize

        return quantize(model, (example.args, example.kwargs), example.calibration)

    def layer_errors(self, prepared: Any, model: Any, example: Example) -> list[LayerError]:
        """The error of each quantized layer, on the calibration inputs."""
        errors: list[LayerError] = prepared.layer_errors(model, example.calibration)
        return errors

    def code(self, key: RunKey, model: ModelInfo) -> Code:
        """The same calls of the library."""
        return quantization_code(key, model)


class Int8Linear(Quantizing):
    """Quantizes the weights of linear layers by a config of torchao, and compiles the model."""

    config: ClassVar[str]
    """A class of ``torchao.quantization``."""
    freezes: ClassVar[bool] = True
    """Whether the compiler may take the weights for constants."""

    def skip_reason(self, precision: Precision, device: str, memory_format: str) -> str | None:
        """It is for weights in fp32 or bf16 on the CPU, without autocast."""
        if device != "cpu":
            return f"{self.name} is for the CPU here; on {device}, use torchao in your file"
        if precision.name not in ("fp32", "bfloat16"):
            return f"{self.name} computes the rest of the model in fp32 or bf16: use fp32 or bfloat16"
        if self.calibrates and fitting_torchao() != NEWEST:
            return f"SmoothQuant needs torchao {NEWEST}, and with it torch 2.11 or later"
        if torchao_fits():
            return None
        return f"{self.name} cannot run here: {missing()}"

    def prepare(self, model: Any, example: Example) -> Any:
        """The quantized model, which its first call compiles."""
        from lowprec_check.engine.quantize.torchao_linear import quantize_linear

        calibration = example.calibration if self.calibrates else None
        return quantize_linear(model, self.config, calibration, freezes=self.freezes)

    def layer_errors(self, prepared: Any, model: Any, example: Example) -> list[LayerError]:
        """The error of each linear layer, on the calibration inputs."""
        from lowprec_check.engine.quantize.torchao_linear import linear_errors

        return linear_errors(model, prepared._orig_mod, example.calibration)

    def code(self, key: RunKey, model: ModelInfo) -> Code:
        """The same calls of torchao."""
        smooth = (
            f'quantize_(model, SmoothQuantConfig({self.config}(), "prepare"))',
            "with torch.no_grad():",
            *(f"    {line}" for line in calibrating(key, model, "model(")),
            f'quantize_(model, SmoothQuantConfig({self.config}(), "convert"))',
        )
        return Code(
            imports=(
                *(["import torch._inductor.config"] if self.freezes else []),
                *(["from torchao.prototype.smoothquant import SmoothQuantConfig"] if self.calibrates else []),
                f"from torchao.quantization import {self.config}, quantize_",
            ),
            before=(
                *(smooth if self.calibrates else [f"quantize_(model, {self.config}())"]),
                *(["torch._inductor.config.freezing = True  # the weights are constants"] if self.freezes else []),
                "model = torch.compile(model)",
            ),
        )


class WeightOnly(Int8Linear):
    """Weights in int8, activations as they are."""

    name = "int8-weight-only"
    summary = "torchao: weights of linear layers in int8"
    aliases = ("int8-weights", "w8a16")
    config = "Int8WeightOnlyConfig"
    freezes = False  # in fp32, constants would be what the weights in int8 stand for, in fp32


class Dynamic(Int8Linear):
    """Weights and activations in int8, the activations by the range of each row."""

    name = "int8-dynamic"
    summary = "torchao: linear layers in int8, activations by the range of each row"
    aliases = ("dynamic", "w8a8")
    config = "Int8DynamicActivationInt8WeightConfig"


class SmoothQuant(Dynamic):
    """The same after SmoothQuant."""

    name = "int8-smoothquant"
    summary = "int8-dynamic after SmoothQuant, on the calibration inputs"
    aliases = ("smoothquant", "smooth-quant")
    calibrates = True


INT8, WEIGHT_ONLY, DYNAMIC, SMOOTHQUANT = Int8(), WeightOnly(), Dynamic(), SmoothQuant()
