"""ONNX Runtime: the graph of ``torch.export`` as an ONNX model, run by the CPU provider."""

from __future__ import annotations

import contextlib
import re
import tempfile
from pathlib import Path
from typing import Any

from lowprec_check.engine.backends.exported import GraphBackend, gaps_at
from lowprec_check.errors import message_of


def in_onnxruntime(graph):
    """What runs an ONNX model on arrays."""
    import onnxruntime
    import torch

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    data, cpu = graph.model_proto.SerializeToString(), ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(data, options, providers=cpu)
    names = [given.name for given in session.get_inputs()]
    return lambda arrays: session.run(None, dict(zip(names, arrays)))


class OnnxRuntime(GraphBackend):
    """Exports the model to ONNX."""

    name = "onnxruntime"
    summary = "ONNX Runtime's CPU provider"
    aliases = ("ort", "onnx")
    title = "ONNX Runtime"
    project = "microsoft/onnxruntime"
    packages = ("onnxruntime", "onnxscript")
    computes_in = {"fp32": "fp32", "half": "fp16"}
    instead = "no bf16 kernels on a CPU and no autocast: use fp32 or half"
    functions = (in_onnxruntime,)
    loading = "in_onnxruntime(torch.onnx.export(program, dynamo=True, verbose=False))"

    def load(self, program: Any, precision: str) -> Any:
        """The session; of a model in fp16, with the ops that it computes in fp32 as ``gaps``."""
        import torch

        graph = torch.onnx.export(program, dynamo=True, verbose=False)
        run: Any = in_onnxruntime(graph)
        if precision == "fp16":
            message = "ONNX Runtime has no fp16 kernel on the CPU: it computes this op in fp32, between two casts"
            run.gaps = gaps_at(program, _ops_in_fp32(graph), "missing-kernel", message, "float16")
        return run

    def missing_ops(self, error: Exception, program: Any) -> list[str]:
        """Ops without an ONNX function; a stand-in for each lets the exporter find the next."""
        import torch
        from onnxscript import opset18

        # The exporter names one op at a time: each gets a stand-in, until all are named.
        stand_ins: dict[Any, Any] = {}
        while found := re.search(
            r"No ONNX function found for <OpOverload\(op='(\w+)\.(\w+)', overload='(\w+)'\)>", message_of(error)
        ):
            namespace, name, overload = found.groups()
            op = getattr(getattr(getattr(torch.ops, namespace), name), overload)
            if op in stand_ins:
                break
            outputs = len(op._schema.returns)

            def stand_in(given: Any, *_: Any, outputs: int = outputs, **__: Any) -> Any:
                values = tuple(opset18.Identity(given) for _ in range(outputs))
                if outputs > 1:
                    return values
                return values[0]

            stand_ins[op] = stand_in
            try:
                torch.onnx.export(program, dynamo=True, verbose=False, custom_translation_table=stand_ins)
            except Exception as later:
                error = later
            else:
                break
        return [str(op) for op in stand_ins]


def _ops_in_fp32(graph: Any) -> list[str]:
    """The ops of an fp16 model for which the CPU provider has no fp16 kernel: around each, it
    inserts casts to fp32 and back. Found by a session for one node of each kind and dtypes, alone:
    casts between two such nodes are removed.
    """
    import onnx
    import onnxruntime
    from onnxscript.ir import serde

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    # One node for each kind of op and dtypes tells for all of that kind.
    kinds: dict[Any, list[Any]] = {}
    for node in graph.model.graph:
        kinds.setdefault((node.domain, node.op_type, *(each and each.dtype for each in node.inputs)), []).append(node)
    casted: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder, "prepared.onnx"))
        for node, *others in kinds.values():
            sides = ({each.name: each for each in values if each} for values in (node.inputs, node.outputs))
            inputs, outputs = ([serde.serialize_value(each) for each in side.values()] for side in sides)
            alone = onnx.helper.make_graph([serde.serialize_node(node)], node.op_type, inputs, outputs)
            model = onnx.helper.make_model(alone, opset_imports=graph.model_proto.opset_import)
            with contextlib.suppress(Exception):  # it needs the value of an input
                onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
                prepared = onnx.load(options.optimized_model_filepath).graph.node
                if any(each.name.startswith("InsertedPrecisionFreeCast") for each in prepared):
                    casted += [node, *others]
    places = (each.metadata_props.get("namespace", "") for each in casted)
    return [place.split(": ")[-1] for place in places]


ONNXRUNTIME = OnnxRuntime()
