"""The backends that quantize: one for each format of linear layers, and static int8."""

from __future__ import annotations

import inspect
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from lowprec_check.features.quantize.formats import FORMATS, Format
from lowprec_check.features.quantize.libraries import (
    calibrating,
    fitting_torchao,
    kept_lines,
    library,
    missing,
    quantization_code,
    torchao_fits,
)
from lowprec_check.schema.axes import Backend, Code, Example, device_type
from lowprec_check.schema.measures import LayerError
from lowprec_check.schema.precisions import BF16, Precision
from lowprec_check.schema.registry import choices
from lowprec_check.schema.run_key import RunKey

if TYPE_CHECKING:
    from lowprec_check.schema.scan_result import ModelInfo


class Quantizing(Backend):
    """A backend that quantizes."""

    project = "pytorch/ao"
    setup_budget = 240.0
    # the libraries register operators and passes, or set what is constant in all that is compiled
    changes_process = True
    tolerance = 0.1
    lowers_precision = True
    keeps_layers = True

    def code(self, key: RunKey, model: ModelInfo) -> Code:
        """The same calls of the library."""
        return self.code_keeping(key, model, ())


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
        """The quantized model, calibrated on the inputs for that, which its first call compiles."""
        from lowprec_check.features.quantize.libraries import quantize

        quantized = quantize(model, (example.args, example.kwargs), example.calibration, example.keep)
        return getattr(quantized, "converted", quantized) if example.is_trial else quantized

    def layer_errors(self, prepared: Any, model: Any, example: Example) -> list[LayerError]:
        """The error of each quantized layer, on the calibration inputs."""
        errors: list[LayerError] = prepared.layer_errors(model, example.calibration)
        return errors

    def code_keeping(self, key: RunKey, model: ModelInfo, layers: Sequence[str]) -> Code:
        """The same, without the ``layers``."""
        return quantization_code(key, model, layers)


class OfFormat(Quantizing):
    """Quantizes linear layers to a format by a configuration of torchao, and compiles the model."""

    form: ClassVar[Format]

    def skip_reason(self, precision: Precision, device: str, memory_format: str) -> str | None:
        """What the rest of the model cannot run in; what is missing; a device without kernels."""
        form = self.form
        if precision.name not in form.precisions:
            shorts = {"fp32": "fp32", "bfloat16": "bf16"}
            rest = choices([shorts[name] for name in form.precisions])
            return f"{self.name} computes the rest of the model in {rest}: use {choices(list(form.precisions))}"
        if form.torchao is not None and fitting_torchao() != form.torchao:
            return f"{self.name} needs torchao {form.torchao}, and with it torch 2.11 or later"
        if not torchao_fits():
            return f"{self.name} cannot run here: {missing()}"
        if device not in form.devices and not form.can_be_emulated:
            return f"{self.name} has kernels for {choices(list(form.devices), 'and')} only"
        return None

    def prepare(self, model: Any, example: Example) -> Any:
        """The quantized model, which its first call compiles, unless it is emulated."""
        from lowprec_check.features.quantize.quantized_linear import quantize_linear

        compiles = not example.is_trial
        return quantize_linear(model, self.form, example.device, example.calibration, example.keep, compiles=compiles)

    def layer_errors(self, prepared: Any, model: Any, example: Example) -> list[LayerError]:
        """The error of each linear layer, on the calibration inputs."""
        from lowprec_check.features.quantize.layer_errors import linear_errors

        return linear_errors(model, prepared, example.calibration)

    def code_keeping(self, key: RunKey, model: ModelInfo, layers: Sequence[str]) -> Code:
        """The same, without the ``layers``."""
        from lowprec_check.features.quantize import emulation

        form, device = self.form, device_type(key.device)
        lines = _filter_lines(form, device, layers)
        imports = [
            "from torchao.quantization import quantize_",
            "from torchao.quantization.quant_api import _is_linear",
        ]
        config = form.config_on(device, emulated=False)
        quantized = [f"quantize_(model, {config}, filter_fn=is_quantized)"]
        if form.smooths:
            quantized = [
                f'quantize_(model, SmoothQuantConfig({config}, "prepare"), filter_fn=is_quantized)',
                "with torch.no_grad():",
                *(f"    {line}" for line in calibrating(key, model, "model(")),
                "for module in model.modules():",
                "    if isinstance(module, SmoothQuantObservedLinear):",
                "        # as rows: batches may differ in length",
                "        module.obs.inputs = [x.reshape(-1, x.shape[-1]) for x in module.obs.inputs]",
                "        if not module.obs.inputs:",
                "            module.__class__ = torch.nn.Linear  # calibration does not call it",
                "is_observed = lambda module, name: isinstance(module, SmoothQuantObservedLinear)",
                f'quantize_(model, SmoothQuantConfig({config}, "convert"), filter_fn=is_observed)',
            ]
        if form.freezes and device == "cpu":
            imports.append("import torch._inductor.config")
            quantized.append("torch._inductor.config.freezing = True  # the weights are constants")
        quantized.append("model = torch.compile(model)")
        emulated = [f"quantize_(model, {form.config_on(device, emulated=True)}, filter_fn=is_quantized)"]
        if form.emulation is not None:
            lines += [inspect.getsource(getattr(emulation, form.emulation)), inspect.getsource(emulation.emulate)]
            emulated = [f"emulate(model, {form.emulation}, is_quantized)"]
        if form.is_passed_by:
            lines.append("torch.backends.mha.set_fastpath_enabled(False)  # it reads weights past the layers")
        if form.contiguous:
            imports.append("from torch.utils._pytree import tree_map_only")
            lines += ["def contiguous(module, args, kwargs):"]
            lines += ["    return tree_map_only(torch.Tensor, torch.Tensor.contiguous, (args, kwargs))"]
            lines += ["for name, module in model.named_modules():", "    if is_quantized(module, name):"]
            hook = "module.register_forward_pre_hook(contiguous, with_kwargs=True)"
            lines += [f"        {hook}  # torchao takes no others"]
        if device not in form.devices:
            lines += [f"# emulated; {form.needs()}: {quantized[0]}", *emulated]
        elif form.can_be_emulated:
            lines += [f"if torch.cuda.get_device_capability() >= {form.capability}:"]
            lines += [*(f"    {line}" for line in quantized), "else:  # emulated"]
            lines += [f"    {line}" for line in emulated]
        else:
            lines += quantized
        code = "\n".join(lines)
        imports += [
            line for line in form.imports if any(name in code for name in line.partition("import ")[2].split(", "))
        ]
        return Code(imports=tuple(imports), before=tuple(lines))


def _filter_lines(form: Format, device: str, layers: Sequence[str]) -> list[str]:
    """A function ``is_quantized`` to paste."""
    # a weight that is computed or quantized already is no plain parameter
    conditions = ["_is_linear(module)", "type(module.weight) is torch.nn.Parameter"]
    if form.smooths:
        # a plain layer takes its place
        conditions.append('type(module) is torch.nn.Linear and "forward" not in vars(module)')
        conditions.append("not (module._forward_hooks or module._forward_pre_hooks)")
    for name, number in zip(("in_features", "out_features"), form.multiple_of, strict=True):
        if number > 1:
            conditions.append(f"module.{name} % {number} == 0")
    if form.misread is not None and device in form.devices:
        has_no_kernels = f"torch.cuda.get_device_capability() < {form.capability}"
        conditions.append(f"(module.weight.shape != {form.misread} or {has_no_kernels})  # torchao fails on it")
    kept = kept_lines(layers)
    if kept:
        conditions.append("module not in map(model.get_submodule, kept)")
    joined = "\n        and ".join(conditions)
    return [*kept, "def is_quantized(module, name):", f"    return (\n        {joined}\n    )"]


def _backend(form: Format) -> Backend:
    attributes = {
        "form": form,
        "name": form.name,
        "summary": form.summary,
        "aliases": form.aliases,
        "calibrates": form.smooths,
        "__doc__": OfFormat.__doc__,
    }
    backend: Backend = type(OfFormat.__name__, (OfFormat,), attributes)()
    return backend


BACKENDS = (Int8(), *map(_backend, FORMATS))
"""What the registry of backends finds here."""
