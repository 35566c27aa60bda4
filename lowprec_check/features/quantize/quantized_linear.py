"""Linear layers quantized to a format, by torchao or emulated, and what each adds to the error."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

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
from lowprec_check.torchkit.devices import seed_everything
from lowprec_check.torchkit.pytree import leaves, map_tensors

MOST_ALONE = 4
"""So many layers are quantized alone, those with the largest errors by themselves."""


class QuantizedLinear:
    """A model with linear layers in a format, called as the model is."""

    def __init__(self, model: nn.Module, call: Callable[..., Any], emulated: str | None) -> None:
        self.model, self._call = model, call
        self.emulated = emulated
        """Why its values are computed without kernels of the format; ``None`` if they are not."""

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
    emulated. Raises :class:`UsageError` if it quantizes no layer, and ``keep`` is empty.
    """
    emulated = why_emulated(format, device)
    quantized = copy.deepcopy(model)
    with quiet(), torch.no_grad():
        import torchao.quantization as torchao

        is_taken = layer_filter(format.multiple_of, keep)
        if not any(is_taken(module, name) for name, module in quantized.named_modules()) and not keep:
            raise nothing_to_quantize(model, format.name, "linear layers", format.multiple_of)
        config = configuration(format, device, emulated=emulated is not None)
        if config is None:
            functions: Any = emulation
            functions.emulate(quantized, getattr(functions, format.emulation or ""), is_taken)
        elif format.smooths:
            from torchao.prototype.smoothquant import SmoothQuantConfig

            torchao.quantize_(quantized, SmoothQuantConfig(config, "prepare"), is_taken)
            for args, kwargs in calibration():
                quantized(*args, **kwargs)
            torchao.quantize_(quantized, SmoothQuantConfig(config, "convert"), is_taken)
        else:
            torchao.quantize_(quantized, config, is_taken)
        if emulated is not None or not compiles:
            return QuantizedLinear(quantized, quantized, emulated)
        import torch._inductor.config as inductor

        inductor.freezing = format.freezes and device == "cpu"
        return QuantizedLinear(quantized, torch.compile(quantized), None)


def why_emulated(format: Format, device: str) -> str | None:
    """Why ``device``, a type, has no kernels of ``format``; ``None`` if it has."""
    if device not in format.devices:
        return format.needs()
    if device == "cuda" and torch.cuda.get_device_capability() < format.capability:
        return f"{format.needs()}; this is {'.'.join(map(str, torch.cuda.get_device_capability()))}"
    return None


def configuration(format: Format, device: str, *, emulated: bool) -> Any:
    """The configuration of torchao; ``None`` if values are emulated without one."""
    if emulated and format.emulation is not None:
        return None
    names: dict[str, Any] = {"torch": torch}
    exec("\n".join(format.imports), names)
    return eval(format.config_on(device, emulated=emulated), names)


def layer_filter(multiple_of: tuple[int, int] = (1, 1), keep: Collection[str] = ()) -> Callable[[nn.Module, str], bool]:
    """Whether a module of a name is quantized: torchao's linear layers whose ``in_features`` and
    ``out_features`` are ``multiple_of`` two numbers, but those of ``keep``.
    """
    from torchao.quantization.quant_api import _is_linear

    of_inputs, of_outputs = multiple_of

    def is_taken(module: nn.Module, name: str) -> bool:
        if not isinstance(module, nn.Linear) or not _is_linear(module) or name in keep:
            return False
        return module.in_features % of_inputs == 0 and module.out_features % of_outputs == 0

    return is_taken


def linear_errors(
    model: nn.Module, quantized: nn.Module, calibration: Calibration, format: Format, keep: Collection[str] = ()
) -> list[LayerError]:
    """The error of each quantized layer over all calls of ``calibration``, and its outliers, in the
    order of the modules; and why others are not quantized. A layer that is not called has none.
    """
    is_taken, is_linear = layer_filter(format.multiple_of, keep), layer_filter()
    modules: Any = model.named_modules()
    linear = {name: module for name, module in modules if is_linear(module, name)}
    taken = [name for name, module in linear.items() if is_taken(module, name)]
    local, accumulated = defaultdict[str, SquaredError](SquaredError), defaultdict[str, SquaredError](SquaredError)
    activations = defaultdict[str, OutlierCounter](OutlierCounter)
    for number, call in enumerate(calibration()):
        expected = defaultdict[str, list[Tensor]](list)

        def compare_alone(name: str, args: Any, kwargs: Any, output: Any, expected: Any = expected) -> None:
            expected[name].append(output.clone())
            activations[name].add(next(iter((*args, *kwargs.values()))))
            local[name].add(quantized.get_submodule(name)(*args, **kwargs), output)

        def compare(name: str, _: Any, __: Any, output: Any, expected: Any = expected) -> None:
            # A model whose control flow depends on values may call a layer otherwise.
            if expected[name] and expected[name][0].shape == output.shape:
                accumulated[name].add(output, expected[name].pop(0))

        _call_watched(model, taken, call, number, compare_alone)
        _call_watched(quantized, taken, call, number, compare)
    alone = _errors_alone(model, quantized, sorted(local, key=lambda name: -(local[name].rel_l2 or 0.0)), calibration)
    errors = []
    for name, module in linear.items():
        if name in local:
            weights = OutlierCounter()
            weights.add(module.weight.detach())
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
        elif name not in taken and name not in keep:
            needed = "multiples of {} and {}".format(*format.multiple_of)
            left = f"{module.in_features} → {module.out_features} features are not {needed}"
            errors.append(LayerError(module=name, op="linear", left=left))
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
    """By layer, the error of the output if it alone is quantized, of the first few ``layers``."""
    call = next(iter(calibration()))

    def output() -> list[Tensor]:
        seed_everything(0)
        with torch.no_grad():
            return [tensor.clone() for _, tensor in leaves(model(*call[0], **call[1])) if tensor.is_floating_point()]

    errors: dict[str, float | None] = {}
    expected = output() if layers else []
    for name in layers[:MOST_ALONE]:
        parent_name, _, child = name.rpartition(".")
        if not child:
            continue
        parent = model.get_submodule(parent_name)
        layer = getattr(parent, child)
        setattr(parent, child, quantized.get_submodule(name))
        try:
            error = SquaredError()
            for value, reference in zip(output(), expected, strict=True):
                error.add(value, reference)
            errors[name] = error.rel_l2
        finally:
            setattr(parent, child, layer)
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
