"""The code to paste that quantizes a model."""

from __future__ import annotations

from lowprec_check.schema.axes import Code
from lowprec_check.schema.scan_result import ModelInfo


def torchao_code(model: ModelInfo) -> Code:
    """Code for torchao's PT2E and inductor."""
    args, kwargs = _example(model)
    given = f"{args}, {kwargs}" if kwargs != "{}" else args
    return Code(
        imports=(
            "import torch._inductor.config",
            "from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e",
            "from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (",
            "    X86InductorQuantizer,",
            "    get_default_x86_inductor_quantization_config,",
            ")",
        ),
        before=("torch._inductor.config.freezing = True  # without it, no int8 kernels",),
        inside=(
            f"exported = torch.export.export(model, {given}, strict=True).module()",
            "quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())",
            "prepared = prepare_pt2e(exported, quantizer)",
            *_calibrate(model),
            "model = torch.compile(convert_pt2e(prepared))  # its first call compiles",
        ),
    )


def ipex_code(model: ModelInfo) -> Code:
    """Code for Intel's extension."""
    args, kwargs = _example(model)
    prepared = f"example_inputs={args}" if args != "()" else f"example_kwarg_inputs={kwargs}"
    return Code(
        imports=("import copy", "import intel_extension_for_pytorch as ipex"),
        inside=(
            'with torch.autocast("cpu", enabled=False):  # the ranges are those of fp32',
            "    mapping = ipex.quantization.default_static_qconfig_mapping",
            "    # a copy: prepare changes the memory format of the weights",
            f"    prepared = ipex.quantization.prepare(copy.deepcopy(model), mapping, {prepared}, inplace=True)",
            *(f"    {line}" for line in _calibrate(model)),
            "model = ipex.quantization.convert(prepared)",
            f"model = torch.jit.trace(model, {prepared.replace('example_inputs=', '')}, strict=False, check_trace=False)",
            "model = torch.jit.freeze(model)",
            "for _ in range(2):  # TorchScript compiles in the first calls",
            f"    {model.call}",
        ),
    )


def _example(model: ModelInfo) -> tuple[str, str]:
    """The positional and keyword arguments of the call, as code."""
    if model.call == "model(**inputs)":
        return "()", "dict(inputs)"
    return ("(inputs,)", "{}") if model.call == "model(inputs)" else ("tuple(inputs)", "{}")


def _calibrate(model: ModelInfo) -> tuple[str, ...]:
    if not model.calibration:
        return (model.call.replace("model(", "prepared("),)
    call = model.call.replace("model(", "prepared(").replace("inputs", "batch")
    return (f"for batch in {model.calibration}:", f"    {call}")
