"""What quantization does to linear layers: errors, outliers, and the bytes of the weights."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lowprec_check.features.quantize.quantized_linear import Calibration, QuantizedLinear
from lowprec_check.schema.axes import Call
from lowprec_check.schema.measures import LayerError, Outliers
from lowprec_check.torchkit.devices import seed_everything
from lowprec_check.torchkit.pytree import leaves, map_tensors

# -- A relative L2 error over several tensors


_PART = 1 << 24
"""So many values are compared at once."""


class SquaredError:
    """Adds up ‖y − r‖² and ‖r‖² in fp64 over pairs of tensors."""

    def __init__(self) -> None:
        self._error = self._reference = 0.0
        self._pairs = 0

    def add(self, value: Tensor, reference: Tensor) -> None:
        """Add a pair of tensors of one shape."""
        # in parts: in fp64, the output of a vocabulary is large
        for values, references in zip(value.reshape(-1).split(_PART), reference.reshape(-1).split(_PART), strict=True):
            wide = references.double()
            self._error += float((values.double() - wide).square().sum())
            self._reference += float(wide.square().sum())
        self._pairs += 1

    @property
    def rel_l2(self) -> float | None:
        """Relative L2 error of all pairs (0/0 is 0); ``None`` if infinite, NaN, or no pair."""
        if not self._pairs:
            return None
        if not self._reference:
            return None if self._error else 0.0
        found = math.sqrt(self._error / self._reference)
        return found if math.isfinite(found) else None


SIGMAS = 6.0
"""A value further from the mean, in standard deviations, is an outlier."""


class OutlierCounter:
    """Counts outliers of tensors whose last dimension are channels."""

    def __init__(self) -> None:
        self._outliers = self._values = 0
        self._largest: Tensor | None = None
        """The largest magnitude of each channel."""

    def add(self, values: Tensor) -> None:
        """Add the values of a tensor."""
        if not values.numel() or not values.is_floating_point():
            return
        wide = values.float()
        far = (wide - wide.mean()).abs() > SIGMAS * wide.std(correction=0)
        self._outliers += int(far.sum())
        self._values += values.numel()
        largest = wide.abs().reshape(-1, wide.shape[-1]).amax(0)
        if self._largest is not None:
            largest = torch.maximum(largest, self._largest)
        self._largest = largest

    def outliers(self) -> Outliers | None:
        """What was counted; ``None`` without values, or if the largest are all zero or NaN."""
        if self._largest is None:
            return None
        channel = int(self._largest.argmax())
        times = float(self._largest[channel] / self._largest.median())
        if not math.isfinite(times):
            return None
        return Outliers(share=self._outliers / self._values, channel=channel, times=times)


# -- The errors of linear layers

MOST_ALONE = 4
"""So many layers are quantized alone, those with the largest errors by themselves."""


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
            output = _first_tensor(output)
            expected[name].append(output.to("cpu", copy=True))  # of all layers, a device may hold too few
            activations[name].add(_first_tensor((args, kwargs)))
            value = torch.full_like(output, math.nan)
            with contextlib.suppress(Exception):
                value = _first_tensor(quantized.model.get_submodule(name)(*args, **kwargs))
            local[name].add(value, output)

        def compare(name: str, _: Any, __: Any, output: Any, expected: Any = expected) -> None:
            output = _first_tensor(output)
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


def _first_tensor(value: Any) -> Tensor:
    """The tensor that a layer takes, or returns; one with a forward of its own may have others."""
    return next(tensor for _, tensor in leaves(value))


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
