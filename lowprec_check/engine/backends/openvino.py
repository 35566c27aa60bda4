"""OpenVINO: the graph of ``torch.export``, converted and compiled for the CPU."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from typing import Any

from lowprec_check.engine.backends.exported import GraphBackend
from lowprec_check.errors import message_of
from lowprec_check.schema.precisions import Precision


def in_openvino(program, precision):
    """What runs a graph in OpenVINO on arrays of the shapes that it was exported with."""
    import openvino
    import torch

    graph = openvino.convert_model(program)
    graph.reshape({place: tuple(given.shape) for place, given in enumerate(program.example_inputs[0])})
    options = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = openvino.compile_model(graph, "CPU", options)
    return lambda arrays: compiled(arrays).to_tuple()


class OpenVINO(GraphBackend):
    """Converts and compiles the model; autocast is OpenVINO's hint, with fp32 weights."""

    name = "openvino"
    summary = "OpenVINO's CPU plugin"
    title = "OpenVINO"
    project = "openvinotoolkit/openvino"
    packages = ("openvino",)
    computes_in = {"fp32": "f32", "autocast-bf16": "bf16", "autocast-fp16": "f16"}
    instead = "OpenVINO lowers the precision of an fp32 model itself, as autocast-bf16 and autocast-fp16 do"
    functions = (in_openvino,)
    loading = 'in_openvino(program, "{precision}")'

    def skip_reason(self, precision: Precision, device: str, memory_format: str) -> str | None:
        """Also if this CPU lacks instructions for ``precision``: OpenVINO would use fp32."""
        reason = super().skip_reason(precision, device, memory_format)
        if reason is not None or precision.kind == "reference" or precision.format.short.upper() in _capabilities():
            return reason
        return f"OpenVINO computes in fp32 on this CPU, which has no {precision.format.short} instructions"

    def load(self, program: Any, precision: str) -> Any:
        """The compiled graph."""
        return in_openvino(program, precision)

    def missing_ops(self, error: Exception, program: Any) -> list[str]:
        """Those without a conversion."""
        unsupported = re.search(r"No conversion rule found for operations: (.*)", message_of(error))
        if unsupported:
            return unsupported[1].split(", ")
        return []


@functools.cache
def _capabilities() -> list[str]:
    """What OpenVINO computes in on this CPU, ``BF16``; asked in a process of its own."""
    ask = "import openvino; print(*openvino.Core().get_property('CPU', 'OPTIMIZATION_CAPABILITIES'))"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False, timeout=60)
    # FP16 also stands for weights stored in fp16
    return done.stdout.split()


OPENVINO = OpenVINO()
