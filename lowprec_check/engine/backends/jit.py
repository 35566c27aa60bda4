"""``torch.jit.trace`` and ``freeze`` of a model, as a backend, a function and code to paste."""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any

from lowprec_check.schema.axes import Backend, Code, Example
from lowprec_check.schema.backend_checks import StateChanged
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import RunKey
from lowprec_check.schema.statements import some

if TYPE_CHECKING:
    from lowprec_check.schema.scan_result import ModelInfo


class Jit(Backend):
    """Traces the model and freezes the graph."""

    name = "jit"
    summary = "torch.jit.trace and freeze"
    project = "pytorch/pytorch"
    aliases = ("trace", "torchscript")
    setup_budget = 600.0

    def prepare(self, model: Any, example: Example) -> Any:
        """The frozen graph; raises what ``torch.jit`` raises, as in training mode."""
        return frozen_trace(model, example)

    def code(self, key: RunKey, model: ModelInfo) -> Code:
        """Trace, freeze; inside the context, so that the graph has the casts of autocast."""
        return Code(inside=frozen_trace_code(model, key))


JIT = Jit()

_WARM_UP_CALLS = 2
"""The first call profiles the graph, the second optimizes it: the last bits may differ."""


def frozen_trace(model: Any, example: Example) -> Any:
    """An ``nn.Module`` in eval mode as a frozen graph, after the calls that optimize it. Without
    autocast's cache of weights: the graph would hold a cast weight of another call as an input.
    Raises what torch raises if the model cannot be traced.
    """
    import torch

    from lowprec_check.torchkit.output_comparison import same_bits
    from lowprec_check.torchkit.pytree import map_tensors

    # A trace calls the model: what that changes is compared with before.
    cached, before = torch.is_autocast_cache_enabled(), _state(model)
    torch.set_autocast_cache_enabled(False)
    try:
        args, kwargs = map_tensors((example.args, example.kwargs), torch.clone)
        given: dict[str, Any] = {"example_inputs": args}
        if kwargs:  # torch.jit.trace takes arguments of one kind
            bound = inspect.signature(model.forward).bind(*args, **kwargs)
            given = {"example_kwarg_inputs": dict(bound.arguments)}
        traced: Any = torch.jit.trace(model, **given, check_trace=False, strict=False)
        frozen = torch.jit.freeze(traced)
        for _ in range(_WARM_UP_CALLS):
            frozen(*map_tensors(example.args, torch.clone), **map_tensors(example.kwargs, torch.clone))
    finally:
        torch.set_autocast_cache_enabled(cached)
    changed = []
    for name, value in _state(model).items():
        other = before.get(name)
        if isinstance(value, list) and isinstance(other, list):
            is_same = same_bits(value, other)
        else:
            is_same = type(value) is type(other) and bool(value == other)
        if not is_same:
            changed.append(name)
    if changed:
        text = f"tracing calls the model, which changes {some(changed, 4)}, so the graph starts from changed values"
        warnings.warn(text, StateChanged, stacklevel=2)
    return frozen


def _state(model: Any) -> dict[str, Any]:
    """What modules keep besides parameters: copies of tensors, and numbers, in their attributes."""
    import torch

    from lowprec_check.torchkit.pytree import stored

    kept: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in {**vars(module), **module._buffers}.items():
            at, is_tensor = f"{path}.{name}".lstrip("."), isinstance(value, torch.Tensor)
            if is_tensor and value.layout == torch.strided and not isinstance(value, torch.nn.Parameter):
                kept[at] = [part.detach().clone() for part in stored([value])]
            elif isinstance(value, (int, float)) and name != "training":
                kept[at] = value
    return kept


def frozen_trace_code(model: ModelInfo, key: RunKey) -> tuple[str, ...]:
    """The lines that do the same inside the context of the call."""
    args, kwargs = model.arguments
    example = args
    if args == "()":
        example = f"example_kwarg_inputs={kwargs}"
    autocast = PRECISIONS.get(key.precision).kind == "autocast"
    return (
        *(["torch.set_autocast_cache_enabled(False)  # autocast restores it"] if autocast else []),
        f"model = torch.jit.freeze(torch.jit.trace(model, {example}, check_trace=False, strict=False))",
        f"for _ in range({_WARM_UP_CALLS}):  # the graph is optimized",
        f"    {model.call}",
    )
