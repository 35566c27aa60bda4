"""Static quantization by Intel's extension, and the error of each layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowprec_check.errors import UsageError, encodable, message_of, type_name
from lowprec_check.features.quantize.quantized import Calibration, SquaredError, nothing_to_quantize
from lowprec_check.schema.axes import Call
from lowprec_check.schema.measures import LayerError
from lowprec_check.torchkit.compiled import quiet
from lowprec_check.torchkit.devices import seed_everything
from lowprec_check.torchkit.dispatch_mode import AutocastKeys, DispatchMode, run_op

# -- The error of each layer that Intel's extension quantized against the same layer in fp32
#
# The extension runs a converted layer as a function, out of reach of hooks. So the matrix products
# of the converted model, before it is traced, are compared with those of the prepared one, which
# computes in fp32 and has its batch norms folded too, in the order they are called.

_PRODUCTS = {"convolution": "convolution", "addmm": "linear", "mm": "linear"}
"""Operators that compute a layer, and the layer's kind."""

OnProduct = Callable[[str, tuple[Any, ...], Tensor, bool], None]
"""Gets the operator, its arguments and output, and whether its weight was just quantized."""


def layer_errors(fp32: nn.Module, converted: nn.Module, calls: Iterable[Call]) -> list[LayerError]:
    """Relative L2 errors of the outputs of the quantized layers over all ``calls``, in the order
    they are called. ``fp32`` is the prepared model. Empty if the two models do not call the same
    operators.
    """
    parameters = [(name, parameter) for name, parameter in fp32.named_parameters() if parameter.numel()]
    modules = {parameter.data_ptr(): name.rpartition(".")[0] for name, parameter in parameters}
    errors: dict[int, tuple[str, str, SquaredError]] = {}
    for number, (args, kwargs) in enumerate(calls):
        expected: list[tuple[str, str, Tensor]] = []
        found: list[str] = []

        def keep(op: str, given: tuple[Any, ...], output: Tensor, _: bool, expected: Any = expected) -> None:
            strided = [value for value in given if isinstance(value, Tensor) and value.layout == torch.strided]
            places = [modules[tensor.data_ptr()] for tensor in strided if tensor.data_ptr() in modules]
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
            seed_everything(number)
            with torch.autocast("cpu", enabled=False), _Products(keep):
                fp32(*args, **kwargs)
            seed_everything(number)  # a model that draws random numbers draws the same
            with _Products(compare):
                converted(*args, **kwargs)
        if [op for op, _, _ in expected] != found:
            return []
    found_errors = [errors[index] for index in sorted(errors)]
    return [LayerError(module=module, op=op, accumulated=error.rel_l2) for module, op, error in found_errors]


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


# -- Static quantization by Intel's extension: prepare, calibrate, convert, trace, freeze

WARM_UP_CALLS = 2
"""Calls until TorchScript has compiled the fused int8 kernels."""


class IpexModel:
    """A model converted by the extension, a frozen trace."""

    def __init__(self, traced: Any, converted: nn.Module | None = None, example: Call = ((), {})) -> None:
        self._traced, self._converted, self._example = traced, converted, example
        self._calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output, not of the first calls, which TorchScript profiles: their bits differ."""
        while self._calls < WARM_UP_CALLS:
            self._calls += 1
            with quiet():
                self._traced(*args, **kwargs)
        return self._traced(*args, **kwargs)

    def layer_errors(self, model: nn.Module, calibration: Calibration) -> list[LayerError]:
        """The error of every quantized layer against ``model`` in fp32."""
        if self._converted is None:
            raise UsageError("The model was loaded from a file, without what it was traced from.")
        with quiet(), torch.no_grad():
            return layer_errors(_prepared(model, self._example), self._converted, calibration())

    def save(self, path: str | Path, extra: dict[str, str]) -> None:
        """Write the trace by ``torch.jit.save``."""
        with quiet():
            torch.jit.save(self._traced, path, _extra_files=extra)


def quantize_with_ipex(model: nn.Module, example: Call, calibration: Calibration) -> IpexModel:
    """Observe, calibrate, convert, trace; raises :class:`UsageError` if it cannot be traced."""
    with quiet(), torch.no_grad():
        import intel_extension_for_pytorch as ipex

        prepared = _prepared(model, example)
        with torch.autocast("cpu", enabled=False):  # the ranges are those of fp32
            for args, kwargs in calibration():
                prepared(*args, **kwargs)
        converted = ipex.quantization.convert(prepared)
        try:
            traced = _traced(converted, *example)
        except Exception as error:
            what = f"torch.jit.trace, which int8 by Intel's extension needs, fails on {encodable(type(model).__name__)}"
            raise UsageError(f"{what}: {type_name(error)}: {message_of(error)}") from error
    if not any(node.kind().startswith("aten::quantize_per") for node in traced.inlined_graph.nodes()):
        raise nothing_to_quantize(model)
    return IpexModel(traced, converted, example)


def _prepared(model: nn.Module, example: Call) -> nn.Module:
    """A copy with batch norms folded and observers inserted; it computes in fp32."""
    import intel_extension_for_pytorch as ipex

    args, kwargs = example
    with torch.autocast("cpu", enabled=False):
        # prepare changes the memory format of the weights of the model that it is given, also if it
        # copies it.
        prepared: nn.Module = ipex.quantization.prepare(
            copy.deepcopy(model),
            ipex.quantization.default_static_qconfig_mapping,
            example_inputs=args or None,
            example_kwarg_inputs=None if args else kwargs,
            inplace=True,
        )
    return prepared


def _traced(converted: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = {"example_inputs": args} if args else {"example_kwarg_inputs": kwargs}
    return torch.jit.freeze(torch.jit.trace(converted, **given, strict=False, check_trace=False))


def load_ipex(path: str | Path, extra: Iterable[str]) -> tuple[IpexModel, dict[str, str]]:
    """The model that :meth:`IpexModel.save` wrote, and its texts."""
    with quiet():
        import intel_extension_for_pytorch  # noqa: F401 - registers the operators of the trace

        found: dict[str, Any] = dict.fromkeys(extra, "")
        traced = torch.jit.load(path, _extra_files=found)
    texts = {name: text.decode() if isinstance(text, bytes) else text for name, text in found.items()}
    return IpexModel(traced), texts
