"""Which library quantizes here, what to install if there is none, and the code to paste."""

from __future__ import annotations

from typing import Literal

from lowprec_check.engine.core.compiled import MinorVersion, installed_version, minor_version
from lowprec_check.engine.stack.intel_extension import extension_problem
from lowprec_check.schema.axes import Code
from lowprec_check.schema.scan_result import ModelInfo

# -- Which library quantizes here, and what to install if there is none
#
# Versions are read from the packages' metadata: with another torch than its own, importing Intel's extension ends the process.

Library = Literal["ipex", "torchao"]

FITTING = {(2, 6): "0.12.0", (2, 7): "0.12.0", (2, 8): "0.13.0", (2, 9): "0.15.0", (2, 10): "0.16.0"}
"""The torchao for a minor version of torch, by torchao's own table of the torch that each release was built with."""

NEWEST = "0.18.0"
"""The torchao for torch 2.11 and later. 0.16 and 0.17 fail in ``convert_pt2e`` on torch 2.13."""


def library() -> Library | None:
    """What quantizes on the installed torch: Intel's extension if it fits, else torchao if it does; ``None`` if neither."""
    if extension_problem() is None:
        return "ipex"
    return "torchao" if _torchao_fits() else None


def missing() -> str:
    """What to install, if :func:`library` is ``None``."""
    installed, needed = version_of("torchao"), f"pip install torchao=={fitting_torchao()}"
    torch = ".".join(map(str, version_of("torch") or ()))
    if installed is None:
        return f"it needs torchao, which is not installed: {needed}"
    return f"torchao {'.'.join(map(str, installed))} does not fit torch {torch}: {needed}"


def fitting_torchao() -> str:
    """The version of torchao for the installed torch."""
    torch = version_of("torch")
    return FITTING.get(torch, NEWEST) if torch is not None else NEWEST


def version_of(package: str) -> MinorVersion | None:
    """Major and minor version of an installed package; ``None`` if it is not installed."""
    return minor_version(installed_version(package))


def _torchao_fits() -> bool:
    """Whether torchao is installed, is not older than what fits, and is not so new that this torch lacks what it imports."""
    installed, torch, oldest = version_of("torchao"), version_of("torch"), minor_version(fitting_torchao())
    if installed is None or torch is None or oldest is None:
        return False
    newest_torch_of_table = max(FITTING)
    return installed >= oldest if torch > newest_torch_of_table else installed == oldest


# -- The code to paste that quantizes a model


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
