"""Linear layers quantized to a format, by torchao or emulated, and what each adds to the error."""

from __future__ import annotations

import contextlib
import copy
import math
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from lowprec_check.errors import UsageError
from lowprec_check.features.quantize import emulation
from lowprec_check.features.quantize.formats import Format
from lowprec_check.features.quantize.quantized import (
    Calibration,
    OutlierCounter,
    SquaredError,
    nothing_to_quantize,
)
from lowprec_check.schema.axes import Call
from lowprec_check.schema.measures import LayerError
from lowprec_check.torchkit.compiled import quiet
from lowprec_check.torchkit.devices import module_of, seed_everything
from lowprec_check.torchkit.pytree import leaves, map_tensors

MOST_ALONE = 4
"""So many layers are quantized alone, those with the largest errors by themselves."""


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
                    module.register_forward_pre_hook(lambda _, args: tuple(map(Tensor.contiguous, args)))
        if None not in layers.values() and not keep:
            raise nothing_to_quantize(model, format.name, "linear layers", filter(None, layers.values()))
        if emulated is not None or not compiles:
            return QuantizedLinear(quantized, quantized, emulated, layers)
        import torch._inductor.config as inductor

        inductor.freezing = format.freezes and device == "cpu"
        return QuantizedLinear(quantized, torch.compile(quantized), None, layers)


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


def linear_errors(model: nn.Module, quantized: QuantizedLinear, calibration: Calibration) -> list[LayerError]:
    """The error of each quantized layer over all calls of ``calibration``, and its outliers, in the
    order of the modules; and why others are not quantized. A layer that is not called has none;
    that of one whose kernel raises an exception is not finite.
    """
    # an encoder's would pass nested tensors, and pass layers by
    torch.backends.mha.set_fastpath_enabled(False)
    taken = [name for name, why in quantized.layers.items() if why is None]
    local, accumulated = defaultdict[str, SquaredError](SquaredError), defaultdict[str, SquaredError](SquaredError)
    activations = defaultdict[str, OutlierCounter](OutlierCounter)
    for number, call in enumerate(calibration()):
        expected = defaultdict[str, list[Tensor]](list)

        def compare_alone(name: str, args: Any, kwargs: Any, output: Any, expected: Any = expected) -> None:
            expected[name].append(output.to("cpu", copy=True))  # of all layers, a device may hold too few
            activations[name].add(next(iter((*args, *kwargs.values()))))
            value = torch.full_like(output, math.nan)
            with contextlib.suppress(Exception):
                value = quantized.model.get_submodule(name)(*args, **kwargs)
            local[name].add(value, output)

        def compare(name: str, _: Any, __: Any, output: Any, expected: Any = expected) -> None:
            # A model whose control flow depends on values may call a layer otherwise.
            if expected[name] and expected[name][0].shape == output.shape:
                accumulated[name].add(output, expected[name].pop(0).to(output.device))

        _call_watched(model, taken, call, number, compare_alone)
        with contextlib.suppress(Exception):
            _call_watched(quantized.model, taken, call, number, compare)
    # an error that is not finite is the largest
    sizes = {name: math.inf if error.rel_l2 is None else error.rel_l2 for name, error in local.items()}
    worst = sorted(sizes, key=lambda name: -sizes[name])[:MOST_ALONE]
    alone = _errors_alone(model, quantized.model, worst, calibration)
    errors = []
    for name, why in quantized.layers.items():
        if name in local:
            layer: Any = model.get_submodule(name)
            weights = OutlierCounter()
            weights.add(layer.weight.detach())
            errors.append(
                LayerError(
                    module=name,
                    op="linear",
                    local=local[name].rel_l2,
                    accumulated=accumulated[name].rel_l2,
                    alone=alone.get(name),
                    weights=weights.outliers(),
                    activations=activations[name].outliers(),
                )
            )
        elif why is not None:
            errors.append(LayerError(module=name, op="linear", left=why))
    return errors


def _call_watched(
    model: nn.Module, layers: list[str], call: Call, seed: int, report: Callable[[str, Any, Any, Any], None]
) -> None:
    """Call ``model``, and ``report`` the name, arguments and output of each call of ``layers``."""
    is_busy = False

    def hook(name: str) -> Callable[..., None]:
        def watch(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            nonlocal is_busy
            # A layer that is reported on may call another one.
            if not is_busy:
                is_busy = True
                report(name, *map_tensors((args, kwargs, output), Tensor.detach))
                is_busy = False

        return watch

    handles = [model.get_submodule(name).register_forward_hook(hook(name), with_kwargs=True) for name in layers]
    seed_everything(seed)  # a model that draws random numbers draws the same
    try:
        with torch.no_grad():
            model(*call[0], **call[1])
    finally:
        for handle in handles:
            handle.remove()


def _errors_alone(
    model: nn.Module, quantized: nn.Module, layers: list[str], calibration: Calibration
) -> dict[str, float | None]:
    """By layer, the error of the output if it alone is quantized; ``None`` if its shape changes."""
    call = next(iter(calibration()))

    def output() -> list[Tensor]:
        seed_everything(0)
        with torch.no_grad():
            return [tensor.clone() for _, tensor in leaves(model(*call[0], **call[1])) if tensor.is_floating_point()]

    errors: dict[str, float | None] = {}
    expected = output() if layers else []
    for name in layers:
        layer = model.get_submodule(name)
        places = [place for place, module in model.named_modules(remove_duplicate=False) if module is layer and place]
        try:
            for place in places:
                model.set_submodule(place, quantized.get_submodule(place))
            values = output() if places else []
        except Exception:
            values = []
        finally:
            for place in places:
                model.set_submodule(place, layer)
        if [value.shape for value in values] == [value.shape for value in expected]:
            error = SquaredError()
            for value, reference in zip(values, expected, strict=True):
                error.add(value, reference)
            errors[name] = error.rel_l2
    return errors


def weight_bytes(model: nn.Module) -> int:
    """The bytes of all parameters and buffers, each storage once; of a quantized one, its parts."""
    storages: dict[int, int] = {}
    pending: list[Any] = [*model.parameters(), *model.buffers()]
    while pending:
        tensor = pending.pop()
        if hasattr(tensor, "__tensor_flatten__"):
            pending += [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        elif isinstance(tensor, Tensor) and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
