"""The error of each quantized layer of a PT2E graph against the same graph in fp32.

The fp32 graph is the prepared one, in which batch norms are folded as in the converted one. torchao's numeric debugger
compares with the unfolded graph instead: for a convolution before a batch norm, that is another tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from lowprec_check.engine.quantize.squared_error import SquaredError
from lowprec_check.schema.axes import Call
from lowprec_check.schema.measures import LayerError

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
