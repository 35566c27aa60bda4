"""Linear layers quantized by a config of torchao, and the error of each."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lowprec_check.engine.quantize.quantized import Calibration, SquaredError, nothing_to_quantize, quiet
from lowprec_check.schema.axes import Call
from lowprec_check.schema.measures import LayerError
from lowprec_check.torchkit.devices import seed_everything
from lowprec_check.torchkit.pytree import map_tensors


def quantize_linear(model: nn.Module, config: str, calibration: Calibration | None, *, freezes: bool) -> Any:
    """A copy with weights in int8, compiled, with constant weights if it ``freezes``; with
    ``calibration``, smoothed on it (SmoothQuant). ``config`` is the name of a class of
    ``torchao.quantization``. Raises :class:`UsageError` if it quantizes no linear layer.
    """
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
        if not quantized_layers(quantized):
            raise nothing_to_quantize(model, "linear layers")
        inductor.freezing = freezes
        return torch.compile(quantized)


def quantized_layers(model: nn.Module) -> list[str]:
    """The linear layers with a quantized weight; torchao leaves their subclasses alone."""
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    plain = (nn.Parameter, torch.Tensor, type(None))
    return [name for name, module in linear.items() if type(getattr(module, "weight", None)) not in plain]


def linear_errors(fp32: nn.Module, quantized: nn.Module, calibration: Calibration) -> list[LayerError]:
    """Relative L2 errors of the outputs of the quantized layers over all calls of ``calibration``,
    in the order of the modules; a layer that is not called has none.
    """
    layers = quantized_layers(quantized)
    local, accumulated = defaultdict[str, SquaredError](SquaredError), defaultdict[str, SquaredError](SquaredError)
    for number, call in enumerate(calibration()):
        expected, found = (_called(model, layers, call, number) for model in (fp32, quantized))
        for name in layers:
            for (args, kwargs, wanted), (*_, output) in zip(expected[name], found[name], strict=False):
                accumulated[name].add(output, wanted)
                with torch.no_grad():
                    local[name].add(quantized.get_submodule(name)(*args, **kwargs), wanted)
    return [
        LayerError(module=name, op="linear", local=local[name].rel_l2, accumulated=accumulated[name].rel_l2)
        for name in layers
        if name in local
    ]


def _called(model: nn.Module, layers: list[str], call: Call, seed: int) -> dict[str, list[tuple[Any, Any, Any]]]:
    """By layer, what each of its calls in one call of ``model`` gets and returns."""
    found = defaultdict[str, list[tuple[Any, Any, Any]]](list)

    def keep(name: str) -> Callable[..., None]:
        return lambda _, *call: found[name].append(map_tensors(call, lambda tensor: tensor.detach().clone()))

    handles = [model.get_submodule(name).register_forward_hook(keep(name), with_kwargs=True) for name in layers]
    args, kwargs = call
    seed_everything(seed)  # a model that draws random numbers draws the same
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return found
