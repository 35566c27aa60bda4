"""Static quantization by torchao's PT2E flow with the x86 quantizer, compiled by inductor."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from lowprec_check.engine.core.pytree import leaves
from lowprec_check.engine.quantize.pt2e_layer_errors import layer_errors, quantized_layers
from lowprec_check.engine.quantize.quantized import Calibration, nothing_to_quantize
from lowprec_check.engine.quantize.quiet import quiet
from lowprec_check.errors import UsageError
from lowprec_check.schema.axes import Call
from lowprec_check.schema.measures import LayerError


class TorchaoModel:
    """A model converted by PT2E, an fx graph; compiled at its first call."""

    def __init__(self, converted: GraphModule, example: Call | None) -> None:
        self.converted = converted
        self._example = example
        self._compiled: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output; the first call compiles."""
        return self._first_call(args, kwargs) if self._compiled is None else self._compiled(*args, **kwargs)

    def _first_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        import torch._inductor.config as inductor  # imports Dynamo

        # Without freezing, inductor finds no int8 kernels. As an option of torch.compile, it would not reach Dynamo.
        with quiet(), inductor.patch(freezing=True):
            compiled = torch.compile(self.converted)
            output = compiled(*args, **kwargs)
        self._compiled, self._example = compiled, (args, kwargs)
        return output

    def layer_errors(self, model: nn.Module, calibration: Calibration) -> list[LayerError]:
        """The error of every quantized layer against ``model`` in fp32."""
        if self._example is None:
            raise UsageError("The model was loaded from a file and not called yet.", "Call it once.")
        with quiet():
            fp32 = _prepared(model, self._example)
            return layer_errors(fp32, self.converted, calibration())

    def save(self, path: str | Path, extra: dict[str, str]) -> None:
        """Write the graph by ``torch.export.save``."""
        if self._example is None:
            raise UsageError("The model was loaded from a file and not called yet.", "Call it once, or copy its file.")
        args, kwargs = self._example
        with quiet(), torch.no_grad():
            program = torch.export.export(self.converted, args, kwargs)
            torch.export.save(program, path, extra_files=extra)


def quantize_with_torchao(model: nn.Module, example: Call, calibration: Calibration) -> TorchaoModel:
    """Export, insert observers, calibrate, convert; raises :class:`UsageError` if no layer is quantized."""
    with quiet(), torch.no_grad():
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

        prepared = _prepared(model, example)
        for number, (args, kwargs) in enumerate(calibration(), 1):
            _check_shapes(number, (args, kwargs), example)
            prepared(*args, **kwargs)
        converted: GraphModule = convert_pt2e(prepared)
    if not quantized_layers(converted):
        raise nothing_to_quantize(model)
    return TorchaoModel(converted, example)


def load_torchao(path: str | Path, extra: Iterable[str]) -> tuple[TorchaoModel, dict[str, str]]:
    """The model that :meth:`TorchaoModel.save` wrote, and its texts."""
    with quiet():
        import torchao.quantization.pt2e.quantize_pt2e  # noqa: F401 - registers the operators of the graph

        texts = dict.fromkeys(extra, "")
        module: Any = torch.export.load(path, extra_files=texts).module()
    return TorchaoModel(module, None), texts


def _prepared(model: nn.Module, example: Call) -> GraphModule:
    """The exported graph with batch norms folded and observers inserted; it computes in fp32."""
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    args, kwargs = example
    with torch.no_grad():
        # Strict: of a non-strict graph, the quantizer finds no module on torch 2.8, and on 2.13 fails on one that is called twice.
        exported = torch.export.export(model, args, kwargs, strict=True).module()
        quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
        prepared: GraphModule = prepare_pt2e(exported, quantizer)
    return prepared


def _check_shapes(number: int, call: Call, example: Call) -> None:
    """Raise :class:`UsageError` unless the tensors have the shapes and dtypes that the graph was exported for."""
    found, expected = (dict(_described(given)) for given in (call, example))
    if found != expected:
        raise UsageError(
            f"Batch {number} of `calibration` holds {_listed(found)}, but the inputs are {_listed(expected)}; "
            "the quantized model is bound to their shapes.",
            "Yield batches with the shapes and dtypes of `inputs`.",
        )


def _described(call: Call) -> Iterable[tuple[str, str]]:
    for path, tensor in leaves(call):
        yield path, _text(tensor)


def _text(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _listed(described: dict[str, str]) -> str:
    return ", ".join(described.values()) or "no tensor"
