"""Linear layers quantized to a format, by torchao or emulated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lowprec_check.errors import UsageError, type_name
from lowprec_check.features.quantize import emulation
from lowprec_check.features.quantize.formats import Format
from lowprec_check.schema.axes import Call
from lowprec_check.torchkit.compiled import quiet
from lowprec_check.torchkit.devices import module_of

Calibration = Callable[[], Iterable[Call]]
"""Returns the calls that a model is calibrated on."""


def nothing_to_quantize(
    model: nn.Module, name: str = "int8", what: str = "convolutions and linear layers", why_left: Iterable[str] = ()
) -> UsageError:
    """The error where no layer was quantized: the row would be fp32 under another name."""
    why = "; ".join(list(dict.fromkeys(why_left))[:3])
    if why:
        return UsageError(f"{name} quantizes no layer of {type_name(model)}: {why}.", "Use another backend.")
    return UsageError(f"{name} quantizes {what}, and found none in {type_name(model)}.", "Use another backend.")


class QuantizedLinear:
    """A model with linear layers in a format, called as the model is."""

    def __init__(
        self, model: nn.Module, call: Callable[..., Any], emulated: str | None, layers: dict[str, str | None]
    ) -> None:
        self.model, self._call = model, call
        self.emulated = emulated
        """Why its values are computed without kernels of the format; ``None`` if they are not."""
        self.layers = layers
        """Why each linear layer was left alone; ``None`` if it is quantized. None of those kept."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output; the first call compiles."""
        return self._call(*args, **kwargs)


def quantize_linear(
    model: nn.Module,
    format: Format,
    device: str,
    calibration: Calibration,
    keep: Collection[str] = (),
    *,
    compiles: bool = True,
) -> QuantizedLinear:
    """A copy with linear layers in ``format``, but those that ``keep`` names, compiled unless it is
    emulated. Raises :class:`UsageError` if the device can neither compute nor emulate it, or if it
    quantizes no layer, and ``keep`` is empty.
    """
    emulated = why_emulated(format, device)
    if emulated is not None and not format.can_be_emulated:
        raise UsageError(f"{emulated}.", "Use another backend.")
    quantized = copy.deepcopy(model)
    # a module that is in several places is kept in all of them
    kept = {quantized.get_submodule(name) for name in keep}
    with quiet(), torch.no_grad():
        import torchao.quantization as torchao
        from torchao.quantization.quant_api import _is_linear

        layers = {
            name: _why_left(module, name, format, emulated=emulated is not None)
            for name, module in quantized.named_modules()
            if isinstance(module, nn.Linear) and _is_linear(module) and module not in kept
        }
        taken = {quantized.get_submodule(name) for name, why in layers.items() if why is None}

        def is_taken(module: nn.Module, _: str) -> bool:
            # torchao visits a module in each of its places, though it is quantized already
            return module in taken and type(module.weight) is nn.Parameter

        if format.is_passed_by:
            torch.backends.mha.set_fastpath_enabled(False)
        config = configuration(format, device, emulated=emulated is not None)
        if config is None:
            functions: Any = emulation
            functions.emulate(quantized, getattr(functions, format.emulation or ""), is_taken)
        elif format.smooths:
            _smooth(quantized, config, is_taken, calibration)
            for name, why in layers.items():
                if why is None and type(quantized.get_submodule(name).weight) is nn.Parameter:
                    layers[name] = "calibration does not call it"
        else:
            torchao.quantize_(quantized, config, is_taken)
            if format.contiguous:
                for module in taken:
                    module.register_forward_pre_hook(_contiguous, with_kwargs=True)
        if None not in layers.values() and not keep:
            raise nothing_to_quantize(model, format.name, "linear layers", filter(None, layers.values()))
        if emulated is not None or not compiles:
            return QuantizedLinear(quantized, quantized, emulated, layers)
        import torch._inductor.config as inductor

        inductor.freezing = format.freezes and device == "cpu"
        return QuantizedLinear(quantized, torch.compile(quantized), None, layers)


def _contiguous(_: nn.Module, args: Any, kwargs: Any) -> Any:
    """The arguments of a layer with contiguous tensors. One with a forward of its own takes any."""
    return tree_map_only(Tensor, Tensor.contiguous, (args, kwargs))


def why_emulated(format: Format, device: str) -> str | None:
    """Why ``device``, a type, has no kernels of ``format``; ``None`` if it has."""
    if device not in format.devices:
        return format.needs()
    if device == "cuda":
        capability = module_of(torch.device(device)).get_device_capability()
        if capability < format.capability:
            return f"{format.needs()}; this is {'.'.join(map(str, capability))}"
    return None


def configuration(format: Format, device: str, *, emulated: bool) -> Any:
    """The configuration of torchao; ``None`` if values are emulated without one."""
    if emulated and format.emulation is not None:
        return None
    names: dict[str, Any] = {"torch": torch}
    exec("\n".join(format.imports), names)
    return eval(format.config_on(device, emulated=emulated), names)


def _why_left(module: nn.Linear, name: str, format: Format, *, emulated: bool) -> str | None:
    """Why ``format`` leaves a linear layer alone; ``None`` if it does not."""
    of_inputs, of_outputs = format.multiple_of
    if type(module.weight) is not nn.Parameter:
        return "its weight is not a plain parameter"
    has_own_forward = getattr(module.forward, "__func__", None) is not nn.Linear.forward
    if emulated and format.emulation is not None and has_own_forward:
        return "its forward is not that of nn.Linear"
    # a plain layer takes its place
    has_hooks = module._forward_hooks or module._forward_pre_hooks
    if format.smooths and (type(module) is not nn.Linear or has_own_forward or has_hooks):
        return "it has a class, a forward or hooks of its own"
    if module.in_features % of_inputs or module.out_features % of_outputs:
        needed = f"multiples of {of_inputs} and {of_outputs}"
        return f"{module.in_features} → {module.out_features} features are not {needed}"
    if not emulated and module.weight.shape == format.misread:
        return "torchao fails on a weight of 128 × 128 with one scale"
    if format.smooths and not name:
        return "it is the model itself, and SmoothQuant replaces layers within one"
    return None


def _smooth(model: nn.Module, config: Any, is_taken: Callable[..., bool], calibration: Calibration) -> None:
    """Quantize layers, with outliers moved into weights, unless ``calibration`` calls them not."""
    from torchao.prototype.smoothquant import SmoothQuantConfig, SmoothQuantObservedLinear
    from torchao.quantization import quantize_

    quantize_(model, SmoothQuantConfig(config, "prepare"), is_taken)
    for args, kwargs in calibration():
        model(*args, **kwargs)
    for module in model.modules():
        if isinstance(module, SmoothQuantObservedLinear):
            # as rows: torchao joins them, and batches may differ in length
            module.obs.inputs = [values.reshape(-1, values.shape[-1]) for values in module.obs.inputs]
            if not module.obs.inputs:
                module.__class__ = nn.Linear
    quantize_(
        model, SmoothQuantConfig(config, "convert"), lambda module, _: isinstance(module, SmoothQuantObservedLinear)
    )
