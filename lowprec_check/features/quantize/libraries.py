"""The library that quantizes on the installed torch: name, installation, calls, code to paste."""

from __future__ import annotations

import zipfile
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lowprec_check.analysis.snippet import conversion_of, convert_nested
from lowprec_check.catalog.versions import installed_version
from lowprec_check.errors import UsageError
from lowprec_check.features.quantize.formats import NEWEST
from lowprec_check.schema.axes import Call, Code
from lowprec_check.schema.run_key import RunKey
from lowprec_check.torchkit.installation import extension_problem, minor_version

if TYPE_CHECKING:
    from torch import nn

    from lowprec_check.features.quantize.quantized_linear import Calibration
    from lowprec_check.features.quantize.static_int8 import Quantized
    from lowprec_check.schema.scan_result import ModelInfo

Library = Literal["ipex", "torchao"]

FITTING = {(2, 6): "0.12.0", (2, 7): "0.12.0", (2, 8): "0.13.0", (2, 9): "0.15.0", (2, 10): "0.16.0"}
"""The torchao for a minor version of torch, by torchao's own table."""


def library() -> Library | None:
    """Intel's extension if it fits the installed torch, else torchao if it does."""
    if extension_problem() is None:
        return "ipex"
    if torchao_fits():
        return "torchao"
    return None


def torchao_fits() -> bool:
    """Whether the installed torchao fits the installed torch."""
    torch, torchao = (minor_version(installed_version(package)) for package in ("torch", "torchao"))
    fitting = minor_version(fitting_torchao())
    if torch is None or torchao is None or fitting is None:
        return False
    # a torchao that is too new for a torch of the table imports what it lacks
    if torch > max(FITTING):
        return torchao >= fitting
    return torchao == fitting


def missing() -> str:
    """What to install, unless :func:`torchao_fits`."""
    needed = f"pip install torchao=={fitting_torchao()}"
    torch, torchao = (minor_version(installed_version(package)) for package in ("torch", "torchao"))
    if torchao is None:
        return f"it needs torchao, which is not installed: {needed}"
    return f"torchao {'.'.join(map(str, torchao))} does not fit torch {'.'.join(map(str, torch or ()))}: {needed}"


def fitting_torchao() -> str:
    """The version of torchao for the installed torch."""
    torch = minor_version(installed_version("torch"))
    if torch is not None:
        return FITTING.get(torch, NEWEST)
    return NEWEST


def quantize(model: nn.Module, example: Call, calibration: Calibration, keep: Collection[str] = ()) -> Quantized:
    """Quantize a copy of ``model`` in the current context (autocast); ``model`` is left unchanged.
    ``example`` is a call of it, to whose shapes the result is bound; ``keep`` names modules that
    are not quantized. Raises :class:`UsageError` if no library is installed that can, the model is
    in training mode, or no layer of it can be quantized, and ``keep`` is empty.
    """
    from lowprec_check.torchkit.compiled import check_in_eval_mode

    check_in_eval_mode(model, "static quantization")
    found = library()
    if found is None:
        raise UsageError(f"int8 cannot run here: {missing()}.")
    if found == "ipex":
        from lowprec_check.features.quantize.static_int8 import quantize_with_ipex

        return quantize_with_ipex(model, example, calibration)
    from lowprec_check.features.quantize.static_int8 import quantize_with_torchao

    return quantize_with_torchao(model, example, calibration, keep)


def load(path: str | Path, extra: Iterable[str]) -> tuple[Quantized, dict[str, str]]:
    """What :meth:`Quantized.save` wrote, with texts named ``extra``; else :class:`UsageError`."""
    try:
        with zipfile.ZipFile(path) as file:
            is_script = any(name.partition("/")[2].startswith("code/") for name in file.namelist())
    except (OSError, zipfile.BadZipFile) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a saved model"
        raise UsageError(f"Cannot load {path}: {reason}.") from None
    if library() != ("ipex" if is_script else "torchao"):
        needed = "Intel's extension and the torch that fits it" if is_script else "torchao"
        raise UsageError(f"Cannot load {path}: it was quantized by {needed}, which this environment lacks.")
    if is_script:
        from lowprec_check.features.quantize.static_int8 import load_ipex

        return load_ipex(path, extra)
    from lowprec_check.features.quantize.static_int8 import load_torchao

    return load_torchao(path, extra)


def calibrating(key: RunKey, model: ModelInfo, called: str) -> tuple[str, ...]:
    """The code that calls ``called`` (``prepared(``) on the calibration data of ``key``."""
    call = model.call.replace("model(", called)
    if not model.calibration:
        return (call,)
    lines = [line for text in convert_nested(conversion_of(key), "batch") for line in text.splitlines()]
    return f"for batch in {model.calibration}:", *(f"    {line}" for line in (*lines, call.replace("inputs", "batch")))


def kept_lines(layers: Sequence[str]) -> list[str]:
    """The code that lists the ``layers`` that are not quantized, as ``kept``; none if none are."""
    if not layers:
        return []
    return ["kept = [  # in the precision of the rest", *(f'    "{name}",' for name in layers), "]"]


def quantization_code(key: RunKey, model: ModelInfo, layers: Sequence[str] = ()) -> Code:
    """The code to paste that quantizes ``model`` by the :func:`library`, for the run of ``key``,
    without the ``layers``.
    """
    keeping = []
    if layers:
        keeping = ["for name in kept:", "    quantizer.set_module_name_qconfig(name, None)"]
    args, kwargs = model.arguments
    traced, example = args, f"example_inputs={args}"
    if args == "()":
        traced = example = f"example_kwarg_inputs={kwargs}"
    calibrate = calibrating(key, model, "prepared(")
    if library() == "ipex":
        return Code(
            imports=("import copy", "import intel_extension_for_pytorch as ipex"),
            inside=(
                'with torch.autocast("cpu", enabled=False):  # the ranges are those of fp32',
                "    mapping = ipex.quantization.default_static_qconfig_mapping",
                "    # a copy: prepare changes the memory format of the weights",
                f"    prepared = ipex.quantization.prepare(copy.deepcopy(model), mapping, {example}, inplace=True)",
                *(f"    {line}" for line in calibrate),
                "model = ipex.quantization.convert(prepared)",
                f"model = torch.jit.trace(model, {traced}, strict=False, check_trace=False)",
                "model = torch.jit.freeze(model)",
                "for _ in range(2):  # TorchScript compiles in the first calls",
                f"    {model.call}",
            ),
        )
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
            f"exported = torch.export.export(model, {args}, {kwargs}, strict=True).module()",
            "quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())",
            *kept_lines(layers),
            *keeping,
            "prepared = prepare_pt2e(exported, quantizer)",
            *calibrate,
            "model = torch.compile(convert_pt2e(prepared))  # its first call compiles",
        ),
    )
