"""Static quantization by Intel's extension: prepare, calibrate, convert, trace, freeze."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowprec_check.engine.quantize.ipex_layer_errors import layer_errors
from lowprec_check.engine.quantize.quantized import Calibration, nothing_to_quantize
from lowprec_check.engine.quantize.quiet import quiet
from lowprec_check.errors import UsageError, encodable, message_of, type_name
from lowprec_check.schema.axes import Call
from lowprec_check.schema.measures import LayerError

WARM_UP_CALLS = 2
"""Calls until TorchScript has compiled the fused int8 kernels."""


class IpexModel:
    """A model converted by the extension, a frozen trace."""

    def __init__(self, traced: Any, converted: nn.Module | None = None, example: Call = ((), {})) -> None:
        self._traced, self._converted, self._example = traced, converted, example
        self._calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output. The first call compiles: TorchScript profiles the first ones and would give other bits in them."""
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
    """Insert observers into a copy, calibrate, convert, trace; raises :class:`UsageError` if the model cannot be traced."""
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
            name = encodable(type(model).__name__)
            raise UsageError(
                f"torch.jit.trace, which int8 by Intel's extension needs, fails on {name}: "
                f"{type_name(error)}: {message_of(error)}"
            ) from error
    if not any(node.kind().startswith("aten::quantize_per") for node in traced.inlined_graph.nodes()):
        raise nothing_to_quantize(model)
    return IpexModel(traced, converted, example)


def _prepared(model: nn.Module, example: Call) -> nn.Module:
    """A copy with batch norms folded and observers inserted; it computes in fp32."""
    import intel_extension_for_pytorch as ipex

    args, kwargs = example
    with torch.autocast("cpu", enabled=False):
        # prepare changes the memory format of the weights of the model that it is given, also if it copies it.
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
