"""Compares a quantized model, and each of its layers, with the unquantized one in its worker."""

from __future__ import annotations

from torch import nn

from lowprec_check.core.feature_hooks import Feature, Measurement
from lowprec_check.core.plain_part import PlainPart
from lowprec_check.core.preparation import OnBackend, in_eager_mode
from lowprec_check.engine.model.plain_run import output_tensors, run_once
from lowprec_check.features.quantize.layer_errors import weight_bytes
from lowprec_check.schema.axes import BACKENDS
from lowprec_check.torchkit.output_comparison import compare_outputs


def compare_with_unquantized(part: PlainPart) -> None:
    """Report the errors of the layers that a backend quantized, and of the output."""
    task, call = part.task, part.ready.call
    if not isinstance(call, OnBackend) or not task.measured:
        return
    # A layer may be why it fails.
    failed, model = part.report.so_far.failed, getattr(call.prepared, "model", None)
    if failed and not isinstance(model, nn.Module):
        return
    with part.ready.context():
        part.report.add(layer_errors=call.layer_errors())
    if failed or not BACKENDS.get(task.backend).lowers_precision or part.too_slow:
        return
    if isinstance(model, nn.Module):
        sizes = weight_bytes(model), weight_bytes(part.ready.model)
        if part.report.run.without_kernels is None:
            part.report.add(weight_bytes=sizes[0], unquantized_bytes=sizes[1])
    part.rewind()
    output, _ = run_once(in_eager_mode(part.ready, part.target), part.target.args, part.target.kwargs, task.seed)
    compared = compare_outputs(part.outputs[0], output_tensors(output))
    if compared.compared:
        part.report.add(unquantized_error=compared.error.rel_l2)


class Quantize(Feature):
    """What quantization does to the output, and by which layers."""

    measurements = (Measurement(50, "comparing the layers", compare_with_unquantized),)


QUANTIZE = Quantize()
