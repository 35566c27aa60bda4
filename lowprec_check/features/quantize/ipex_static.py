"""Static quantization by Intel's extension: prepare, calibrate, convert, trace, freeze."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowprec_check.errors import UsageError, encodable, message_of, type_name
from lowprec_check.features.quantize.quantized import Calibration, nothing_to_quantize
from lowprec_check.schema.axes import Call
from lowprec_check.schema.measures import LayerError
from lowprec_check.torchkit.compiled import quiet

WARM_UP_CALLS = 2
"""Calls until TorchScript has compiled the fused int8 kernels."""


class IpexModel:
    """A model converted by the extension, a frozen trace."""

    def __init__(self, traced: Any) -> None:
        self._traced, self._calls = traced, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output, not of the first calls, which TorchScript profiles: their bits differ."""
        while self._calls < WARM_UP_CALLS:
            self._calls += 1
            with quiet():
                self._traced(*args, **kwargs)
        return self._traced(*args, **kwargs)

    def layer_errors(self, model: nn.Module, calibration: Calibration) -> list[LayerError]:
        """None: the extension runs its layers as functions, out of reach of hooks."""
        return []

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
    return IpexModel(traced)


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
