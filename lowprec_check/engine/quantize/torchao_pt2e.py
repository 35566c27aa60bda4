"""Static quantization by torchao's PT2E flow with the x86 quantizer, compiled by inductor; the error of each layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from lowprec_check.engine.core.pytree import leaves
from lowprec_check.engine.quantize.quantized import Calibration, SquaredError, nothing_to_quantize, quiet
from lowprec_check.errors import UsageError
from lowprec_check.schema.axes import Call
from lowprec_check.schema.measures import LayerError

# -- The error of each quantized layer of a PT2E graph against the same graph in fp32
#
# The fp32 graph is the prepared one, in which batch norms are folded as in the converted one. torchao's numeric debugger
# compares with the unfolded graph instead: for a convolution before a batch norm, that is another tensor.

_OBSERVER = "activation_post_process"


def layer_errors(fp32: GraphModule, converted: GraphModule, calls: Iterable[Call]) -> list[LayerError]:
    """Relative L2 errors of the layers' outputs over all ``calls``, in the order of the graph.

    ``fp32`` is a prepared graph, not yet calibrated; both are run, in the current context and without autocast.
    """
    layers = quantized_layers(converted)
    sources = {layer: source for layer in layers if (source := _source(layer)) is not None}
    values: dict[str, Tensor] = {}
    accumulated = {layer.name: SquaredError() for layer in layers}
    local = {layer.name: SquaredError() for layer in layers}

    def keep(name: str, value: Tensor) -> None:
        values[name] = value.clone()  # an in-place op may follow

    def compare(name: str, value: Tensor) -> None:
        accumulated[name].add(value, values[name])

    wanted = {layer.name for layer in layers} | {source.name for source in sources.values()}
    _without_observers(fp32)
    watched_fp32 = _watched(fp32, wanted, keep)
    watched = _watched(converted, {layer.name for layer in layers}, compare)
    with torch.no_grad():
        for args, kwargs in calls:
            values.clear()
            with torch.autocast("cpu", enabled=False):
                watched_fp32(*args, **kwargs)
            watched(*args, **kwargs)
            for layer, source in sources.items():
                local[layer.name].add(_alone(converted, layer, values[source.name]), values[layer.name])
    return [
        LayerError(module=_module(layer), op=_op(layer), local=local[layer.name].rel_l2, accumulated=error.rel_l2)
        for layer, error in zip(layers, accumulated.values(), strict=True)
    ]


def quantized_layers(converted: GraphModule) -> list[Node]:
    """The nodes that get a weight in int8: convolutions and linear layers."""
    return [
        node
        for node in converted.graph.nodes
        if node.op == "call_function" and any(_is_dequantized_weight(given) for given in node.all_input_nodes)
    ]


def _is_dequantized_weight(node: Node) -> bool:
    return "dequantize_per_channel" in str(node.target)


def _source(layer: Node) -> Node | None:
    """The node whose output is quantized for ``layer``; ``None`` if that is not directly before it."""
    dequantize = layer.args[0]
    quantize = dequantize.args[0] if isinstance(dequantize, Node) and dequantize.args else None
    source = quantize.args[0] if isinstance(quantize, Node) and quantize.args else None
    is_pair = "dequantize_per_tensor" in str(getattr(dequantize, "target", "")) and "quantize_per_tensor" in str(
        getattr(quantize, "target", "")
    )
    return source if is_pair and isinstance(source, Node) else None


def _alone(converted: GraphModule, layer: Node, source: Tensor) -> Tensor:
    """The output of ``layer``, in int8, for the fp32 values of its input."""
    dequantize: Any = layer.args[0]
    quantize: Any = dequantize.args[0]
    known: dict[Node, Any] = {quantize.args[0]: source}

    def value(node: Node) -> Any:
        if node not in known:
            known[node] = _evaluate(converted, node, value)
        return known[node]

    result: Tensor = value(layer)
    return result


def _evaluate(graph: GraphModule, node: Node, value: Callable[[Node], Any]) -> Any:
    if node.op == "get_attr":
        found: Any = graph
        for part in str(node.target).split("."):
            found = getattr(found, part)
        return found
    args = torch.fx.node.map_arg(node.args, value)
    kwargs = torch.fx.node.map_arg(node.kwargs, value)
    target: Any = node.target
    return target(*args, **kwargs)


def _without_observers(prepared: GraphModule) -> None:
    for name, _ in list(prepared.named_children()):
        if name.startswith(_OBSERVER):
            setattr(prepared, name, nn.Identity())


class _Watch(nn.Module):
    """Passes each value of a node to a function."""

    def __init__(self, name: str, report: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self._node_name, self._report = name, report

    def forward(self, value: Tensor) -> Tensor:
        """The value."""
        self._report(self._node_name, value)
        return value


def _watched(module: GraphModule, names: set[str], report: Callable[[str, Tensor], None]) -> GraphModule:
    """A graph on the same tensors that reports the values of the nodes ``names``."""
    graph = copy.deepcopy(module.graph)
    watching = GraphModule(module, graph)
    for original, node in zip(module.graph.nodes, list(graph.nodes), strict=True):
        if original.name in names:  # a copy may be renamed
            watch = f"_watch_{original.name}"
            watching.add_submodule(watch, _Watch(original.name, report))
            with graph.inserting_after(node):
                graph.call_module(watch, (node,))
    watching.recompile()
    return watching


def _module(node: Node) -> str:
    """The path of the innermost module whose ``forward`` called it, ``layer1.0.conv1``; empty for the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path.removeprefix("L['self'].").removeprefix("L__self__.")


def _op(node: Node) -> str:
    """``conv2d``."""
    return str(node.target).removeprefix("aten.").partition(".")[0]


# -- Static quantization by torchao's PT2E flow with the x86 quantizer, compiled by inductor


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
