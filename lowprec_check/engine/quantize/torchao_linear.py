"""Linear layers quantized to int8 by a config of torchao: weights alone, or activations too, by ranges of each call; the error of each layer."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lowprec_check.engine.quantize.quantized import Calibration, SquaredError, nothing_to_quantize, quiet
from lowprec_check.schema.measures import LayerError


def quantize_linear(model: nn.Module, config: str, calibration: Calibration | None) -> Any:
    """A copy with weights in int8, compiled with constant weights; with ``calibration``, smoothed on it (SmoothQuant).

    ``config`` is the name of a class of ``torchao.quantization``. Raises :class:`UsageError` if there is no linear layer.
    """
    if not any(isinstance(module, nn.Linear) for module in model.modules()):
        raise nothing_to_quantize(model, "linear layers")
    quantized = copy.deepcopy(model)
    with quiet(), torch.no_grad():
        import torch._inductor.config as inductor
        import torchao.quantization as library

        made = getattr(library, config)()
        if calibration is None:
            library.quantize_(quantized, made)
        else:
            from torchao.prototype.smoothquant import SmoothQuantConfig

            library.quantize_(quantized, SmoothQuantConfig(made, "prepare"))
            for args, kwargs in calibration():
                quantized(*args, **kwargs)
            library.quantize_(quantized, SmoothQuantConfig(made, "convert"))
        inductor.freezing = True
        return torch.compile(quantized)


def linear_errors(fp32: nn.Module, quantized: nn.Module, calibration: Calibration) -> list[LayerError]:
    """Relative L2 errors of the outputs of the linear layers over all calls of ``calibration``, in the order of the modules."""
    layers = [name for name, module in fp32.named_modules() if isinstance(module, nn.Linear)]
    local, accumulated = defaultdict[str, SquaredError](SquaredError), defaultdict[str, SquaredError](SquaredError)
    for args, kwargs in calibration():
        expected, found = (_called(model, layers, args, kwargs) for model in (fp32, quantized))
        for name in layers:
            for (given, wanted), (_, output) in zip(expected[name], found[name], strict=False):
                accumulated[name].add(output, wanted)
                with torch.no_grad():
                    local[name].add(quantized.get_submodule(name)(*given), wanted)
    return [
        LayerError(module=name, op="linear", local=local[name].rel_l2, accumulated=accumulated[name].rel_l2)
        for name in layers
    ]


def _called(model: nn.Module, layers: list[str], args: Any, kwargs: Any) -> dict[str, list[tuple[Any, Any]]]:
    """By layer, the inputs and outputs of its calls in one call of ``model``."""
    found = defaultdict[str, list[tuple[Any, Any]]](list)

    def keep(name: str) -> Callable[..., None]:
        return lambda _, given, output: found[name].append((tuple(each.clone() for each in given), output.clone()))

    handles = [model.get_submodule(name).register_forward_hook(keep(name)) for name in layers]
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return found
