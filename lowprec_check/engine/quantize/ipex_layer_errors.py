"""The error of each layer that Intel's extension quantized against the same layer in fp32.

The extension runs a converted layer as a function, out of reach of hooks. So the matrix products of the converted model, before it is
traced, are compared with those of the prepared one, which computes in fp32 and has its batch norms folded too, in the order they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lowprec_check.engine.core.dispatch_mode import AutocastKeys, DispatchMode, run_op
from lowprec_check.engine.quantize.squared_error import SquaredError
from lowprec_check.schema.axes import Call
from lowprec_check.schema.measures import LayerError

_PRODUCTS = {"convolution": "convolution", "addmm": "linear", "mm": "linear"}
"""Operators that compute a layer, and the layer's kind."""

OnProduct = Callable[[str, tuple[Any, ...], Tensor, bool], None]
"""Gets the operator's name, its arguments, its output, and whether its weight was quantized just before."""


def layer_errors(fp32: nn.Module, converted: nn.Module, calls: Iterable[Call]) -> list[LayerError]:
    """Relative L2 errors of the outputs of the quantized layers over all ``calls``, in the order they are called.

    ``fp32`` is the prepared model. Empty if the two models do not call the same operators.
    """
    modules = {
        parameter.data_ptr(): name.rpartition(".")[0]
        for name, parameter in fp32.named_parameters()
        if parameter.numel()
    }
    errors: dict[int, tuple[str, str, SquaredError]] = {}
    for args, kwargs in calls:
        expected: list[tuple[str, str, Tensor]] = []
        found: list[str] = []

        def keep(op: str, given: tuple[Any, ...], output: Tensor, _: bool, expected: Any = expected) -> None:
            places = [modules[tensor.data_ptr()] for tensor in _tensors(given) if tensor.data_ptr() in modules]
            expected.append((op, places[0] if places else "", output.clone()))

        def compare(
            op: str, _: tuple[Any, ...], output: Tensor, quantized: bool, expected: Any = expected, found: Any = found
        ) -> None:
            found.append(op)
            index = len(found) - 1
            if not quantized or index >= len(expected) or expected[index][2].shape != output.shape:
                return
            _, module, reference = expected[index]
            errors.setdefault(index, (module, _PRODUCTS[op], SquaredError()))[2].add(output, reference)

        with torch.no_grad():
            with torch.autocast("cpu", enabled=False), _Products(keep):
                fp32(*args, **kwargs)
            with _Products(compare):
                converted(*args, **kwargs)
        if [op for op, _, _ in expected] != found:
            return []
    return [
        LayerError(module=module, op=op, accumulated=error.rel_l2) for _, (module, op, error) in sorted(errors.items())
    ]


class _Products(DispatchMode):
    """Reports each matrix product."""

    def __init__(self, report: OnProduct) -> None:
        super().__init__()
        self._report = report
        self._quantized = False

    def handle(self, func: Any, args: Any, kwargs: Any, keys: AutocastKeys) -> Any:
        """Run the op, and report it if it is a product."""
        output = run_op(func, args, kwargs, keys)
        name = func.overloadpacket.__name__
        if name == "quantize_per_channel":
            self._quantized = True
        elif name in _PRODUCTS:
            self._report(name, args, output, self._quantized)
            self._quantized = False
        return output


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor) and value.layout == torch.strided]
