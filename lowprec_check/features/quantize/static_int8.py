"""Static quantization to int8: by torchao's PT2E and inductor, or by Intel's extension."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from lowprec_check.errors import UsageError, encodable, message_of, type_name
from lowprec_check.features.quantize.layer_errors import SquaredError
from lowprec_check.features.quantize.quantized_linear import Calibration, nothing_to_quantize
from lowprec_check.schema.axes import Call
from lowprec_check.schema.measures import LayerError
from lowprec_check.torchkit.compiled import quiet
from lowprec_check.torchkit.devices import seed_everything
from lowprec_check.torchkit.pytree import leaves


class Quantized(Protocol):
    """A quantized model, called as the model is, in its context (autocast), without gradients."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the model; the first call compiles it."""

    def layer_errors(self, model: nn.Module, calibration: Calibration) -> list[LayerError]:
        """The error of every quantized layer against fp32, on the inputs of ``calibration``."""

    def save(self, path: str | Path, extra: dict[str, str]) -> None:
        """Write the converted model, and ``extra``, texts by name."""


# -- By torchao


def quantize_with_torchao(
    model: nn.Module, example: Call, calibration: Calibration, keep: Collection[str] = ()
) -> TorchaoModel:
    """Export, observe, calibrate, convert, without the modules that ``keep`` names;
    :class:`UsageError` if no layer is quantized, and ``keep`` is empty.
    """
    with quiet(), torch.no_grad():
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

        prepared = _prepared(model, example, keep)
        expected = _described(example)
        for number, (args, kwargs) in enumerate(calibration(), 1):
            found = _described((args, kwargs))
            if found != expected:
                raise UsageError(
                    f"Batch {number} of `calibration` holds {', '.join(found.values()) or 'no tensor'}, but the inputs "
                    f"are {', '.join(expected.values()) or 'no tensor'}; the quantized model is bound to their shapes.",
                    "Yield batches with the shapes and dtypes of `inputs`.",
                )
            prepared(*args, **kwargs)
        converted: GraphModule = convert_pt2e(prepared)
    if not quantized_layers(converted) and not keep:
        raise nothing_to_quantize(model)
    return TorchaoModel(converted, example)


def _described(call: Call) -> dict[str, str]:
    """By path, the shapes and dtypes that a graph is exported for."""
    return {path: f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}" for path, value in leaves(call)}


def load_torchao(path: str | Path, extra: Iterable[str]) -> tuple[TorchaoModel, dict[str, str]]:
    """The model that :meth:`TorchaoModel.save` wrote, and its texts."""
    with quiet():
        import torchao.quantization.pt2e.quantize_pt2e  # noqa: F401 - registers the operators of the graph

        texts = dict.fromkeys(extra, "")
        module: Any = torch.export.load(path, extra_files=texts).module()
    return TorchaoModel(module, None), texts


class TorchaoModel:
    """A model converted by PT2E, an fx graph; compiled at its first call."""

    def __init__(self, converted: GraphModule, example: Call | None) -> None:
        self.converted = converted
        self._example = example
        self._compiled: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output; the first call compiles."""
        if self._compiled is not None:
            return self._compiled(*args, **kwargs)
        import torch._inductor.config as inductor  # imports Dynamo

        # Without freezing, inductor finds no int8 kernels. As an option of torch.compile, it would
        # not reach Dynamo.
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
            return layer_errors(_prepared(model, self._example), self.converted, calibration())

    def save(self, path: str | Path, extra: dict[str, str]) -> None:
        """Write the graph by ``torch.export.save``."""
        if self._example is None:
            raise UsageError("The model was loaded from a file and not called yet.", "Call it once, or copy its file.")
        args, kwargs = self._example
        with quiet(), torch.no_grad():
            program = torch.export.export(self.converted, args, kwargs)
            torch.export.save(program, path, extra_files=extra)


def _prepared(model: nn.Module, example: Call, keep: Collection[str] = ()) -> GraphModule:
    """The exported graph with batch norms folded and observers inserted; it computes in fp32."""
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    args, kwargs = example
    with torch.no_grad():
        # Strict: of a non-strict graph, the quantizer finds no module on torch 2.8, and on 2.13
        # fails on one that is called twice.
        exported = torch.export.export(model, args, kwargs, strict=True).module()
        quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
        for name in keep:
            quantizer.set_module_name_qconfig(name, None)
        prepared: GraphModule = prepare_pt2e(exported, quantizer)
    return prepared


# -- The error of each quantized layer against the same graph in fp32
#
# The fp32 graph is the prepared one, in which batch norms are folded as in the converted one.
# torchao's numeric debugger compares with the unfolded graph instead: for a convolution before a
# batch norm, that is another tensor.


def layer_errors(fp32: GraphModule, converted: GraphModule, calls: Iterable[Call]) -> list[LayerError]:
    """Relative L2 errors of the layers' outputs over all ``calls``, in the order of the graph.
    ``fp32`` is a prepared graph, not yet calibrated; both are run, in the current context and
    without autocast.
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

    for name, _ in list(fp32.named_children()):
        if name.startswith("activation_post_process"):  # an observer
            setattr(fp32, name, nn.Identity())
    watched_fp32 = _watched(fp32, {layer.name for layer in layers} | {source.name for source in sources.values()}, keep)
    watched = _watched(converted, {layer.name for layer in layers}, compare)
    with torch.no_grad():
        for number, (args, kwargs) in enumerate(calls):
            values.clear()
            seed_everything(number)
            with torch.autocast("cpu", enabled=False):
                watched_fp32(*args, **kwargs)
            seed_everything(number)  # a model that draws random numbers draws the same
            watched(*args, **kwargs)
            for layer, source in sources.items():
                alone = _evaluated(Interpreter(converted), layer, {source: values[source.name]})
                local[layer.name].add(alone, values[layer.name])
    found = []
    for layer in layers:
        stack = list((layer.meta.get("nn_module_stack") or {}).values())  # the innermost module is last
        path = ""
        if stack:
            path = str(stack[-1][0]).removeprefix("L['self'].").removeprefix("L__self__.")
        op = str(layer.target).removeprefix("aten.").partition(".")[0]
        local_error, error = local[layer.name].rel_l2, accumulated[layer.name].rel_l2
        found.append(LayerError(module=path, op=op, local=local_error, accumulated=error))
    return found


def quantized_layers(converted: GraphModule) -> list[Node]:
    """The nodes that get a weight in int8: convolutions and linear layers."""
    return [
        node
        for node in converted.graph.nodes
        if node.op == "call_function"
        and any("dequantize_per_channel" in str(given.target) for given in node.all_input_nodes)
    ]


def _source(layer: Node) -> Node | None:
    """The node whose output is quantized for ``layer``, if that is directly before it."""
    node = layer
    for kind in ("dequantize_per_tensor", "quantize_per_tensor", ""):  # the last may be any
        before = next(iter(node.args), None)
        if not isinstance(before, Node) or kind not in str(before.target):
            return None
        node = before
    return node


def _evaluated(interpreter: Interpreter, node: Node, known: dict[Node, Any]) -> Any:
    """The value of ``node``, and of those that it needs, which are added to the values."""
    if node not in known:
        for given in node.all_input_nodes:
            _evaluated(interpreter, given, known)
        interpreter.env = known
        known[node] = interpreter.run_node(node)
    return known[node]


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


# -- By Intel's extension: prepare, calibrate, convert, trace, freeze

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

        prepared = _prepared_by_ipex(model, example)
        with torch.autocast("cpu", enabled=False):  # the ranges are those of fp32
            for args, kwargs in calibration():
                prepared(*args, **kwargs)
        converted = ipex.quantization.convert(prepared)
        try:
            args, kwargs = example
            inputs = {"example_inputs": args} if args else {"example_kwarg_inputs": kwargs}
            traced = torch.jit.freeze(torch.jit.trace(converted, **inputs, strict=False, check_trace=False))
        except Exception as error:
            what = f"torch.jit.trace, which int8 by Intel's extension needs, fails on {encodable(type(model).__name__)}"
            raise UsageError(f"{what}: {type_name(error)}: {message_of(error)}") from error
    if not any(node.kind().startswith("aten::quantize_per") for node in traced.inlined_graph.nodes()):
        raise nothing_to_quantize(model)
    return IpexModel(traced)


def _prepared_by_ipex(model: nn.Module, example: Call) -> nn.Module:
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


def load_ipex(path: str | Path, extra: Iterable[str]) -> tuple[IpexModel, dict[str, str]]:
    """The model that :meth:`IpexModel.save` wrote, and its texts."""
    with quiet():
        import intel_extension_for_pytorch  # noqa: F401 - registers the operators of the trace

        found: dict[str, Any] = dict.fromkeys(extra, "")
        traced = torch.jit.load(path, _extra_files=found)
    texts = {name: text.decode() if isinstance(text, bytes) else text for name, text in found.items()}
    return IpexModel(traced), texts
