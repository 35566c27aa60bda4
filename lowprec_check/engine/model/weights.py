"""The weights of a model: loaded from a file, or random ones scaled so that the output is not 0."""

from __future__ import annotations

import importlib
import json
import math
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.parameter import is_lazy

from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.engine.model.streamed_weights import saved_tensors, stream_weights
from lowprec_check.engine.model.target import Target
from lowprec_check.errors import UsageError, first_line, message_of, one_line
from lowprec_check.schema.statements import counted
from lowprec_check.torchkit.dispatch_mode import AutocastKeys, DispatchMode, run_op
from lowprec_check.torchkit.pytree import map_tensors
from lowprec_check.torchkit.source_location import call_model

# -- A state dict from a file: tensors only, no code in the file is run

_INSIDE = ("state_dict", "model_state_dict", "model", "module", "params")
"""Keys under which training scripts save a state dict beside other values."""

_PREFIXES = ("module.", "_orig_mod.", "model.")
"""Prefixes that ``DataParallel``, ``torch.compile`` and Lightning add to names."""


def load_weights(model: nn.Module, path: str) -> list[str]:
    """Load the state dict in ``path`` into ``model``, and return the code that does it."""
    state, code = _read(path)
    # A file of a training script may hold a state dict beside other values
    if not _is_state(state):
        states = [key for key, value in state.items() if _is_state(value)]
        usual = [key for key in _INSIDE if key in states]
        if not usual and len(states) != 1:
            several = f"several state dicts ({', '.join(map(str, states))})"
            what = several if states else "no state dict (tensors by name)"
            raise UsageError(f"{path} holds {what}.", "Save one: torch.save(model.state_dict(), FILE).")
        key = (usual or states)[0]
        state, code = state[key], [*code[:-1], f"{code[-1]}[{json.dumps(key)}]"]
    expected = model.state_dict(keep_vars=True)
    # Without prefixes that no name of the model has
    names, removed = {name: name for name in state}, ""
    while not any(name in expected for name in names.values()):
        prefix = next((start for start in _PREFIXES if all(name.startswith(start) for name in names.values())), None)
        if prefix is None:
            names, removed = {name: name for name in state}, ""
            break
        names = {old: name.removeprefix(prefix) for old, name in names.items()}
        removed += f'.removeprefix("{prefix}")'
    state, state_code = {name: state[old] for old, name in names.items()}, "state"
    if removed:
        state_code = f"{{name{removed}: value for name, value in state.items()}}"
    tied = _check_names(path, expected, {name: tensor.shape for name, tensor in state.items()})
    model.load_state_dict(state, strict=not tied)
    return [*code, _loading_code(state_code, tied)]


def _loading_code(state: str, tied: list[str]) -> str:
    return f"model.load_state_dict({state}{', strict=False' if tied else ''})"


def _check_names(path: str, expected: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """The names of tied tensors that the file has under others; raises if ``shapes`` do not fit."""
    saved = {id(tensor) for name, tensor in expected.items() if name in shapes}
    lacking = [name for name in expected if name not in shapes]
    tied = [name for name in lacking if id(expected[name]) in saved]
    missing = [name for name in lacking if name not in tied]
    unknown = [name for name in shapes if name not in expected]
    other = [
        f"{name}: {tuple(shapes[name])} instead of {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in shapes and not is_lazy(tensor) and tuple(shapes[name]) != tensor.shape  # a lazy one fits any shape
    ]
    problems = [
        f"{len(names)} of {total} {what} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
        for names, total, what in (
            (missing, len(expected), "names of the model are missing in the file"),
            (unknown, len(shapes), "names in the file are unknown to the model"),
            (other, len(expected), "tensors have another shape"),
        )
        if names
    ]
    if problems:
        hint = "Make the model as it was when it was saved."
        raise UsageError(f"{path} does not fit the model: {'; '.join(problems)}.", hint)
    return tied


def stream_file(model: nn.Module, path: str) -> list[str]:
    """Let ``model`` read weights from a ``.safetensors`` file on use; returns code to load them."""
    shapes = {name: saved.shape for name, saved in saved_tensors(Path(path)).items()}
    tied = _check_names(path, model.state_dict(keep_vars=True), shapes)
    stream_weights(model, [Path(path)])
    return [*_safetensors_code(path), _loading_code("state", tied)]


def _safetensors_code(path: str) -> list[str]:
    return ["from safetensors.torch import load_file", f"state = load_file({json.dumps(path)})"]


def _read(path: str) -> tuple[dict[str, Any], list[str]]:
    """What the file holds, and the code that reads it."""
    advice = "Only weights are loaded. Save them with torch.save(model.state_dict(), FILE), or as .safetensors."
    try:
        if path.endswith(".safetensors"):
            load_file = importlib.import_module("safetensors.torch").load_file
            return load_file(path), _safetensors_code(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
        code = [f'state = torch.load({json.dumps(path)}, map_location="cpu", weights_only=True)']
        return content if isinstance(content, dict) else {}, code
    except ModuleNotFoundError:
        raise UsageError("safetensors is not installed.", "pip install safetensors") from None
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", message_of(error))
        why = "torch.load does not accept it with weights_only=True"
        if named:
            why = f"it holds an object of {named[1]}"
        raise UsageError(f"{path} is not a file of weights: {why}.", advice) from None
    except Exception as error:
        raise UsageError(f"Cannot read weights from {path}: {first_line(message_of(error))}", advice) from None


def _is_state(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(item, Tensor) for item in value.values())


# -- Random weights, scaled so that the signal neither vanishes nor explodes on the way
#
# As in layer-sequential unit-variance initialization (Mishkin and Matas 2016, "All you need is a
# good init", arXiv:1511.06422), each op that multiplies by a weight is scaled when it first runs,
# before its result is used; here in one forward pass. Weights that are all zero (the last BatchNorm
# of a block, LayerScale, heads) are drawn anew first.
#
# Only ops whose result is out of bounds are scaled, and not to unit variance: there, the errors of
# 16 bits are larger than with the models' own weights (reports/results.md).

SMALLEST, TARGET, LARGEST = 1 / 64, 1 / 8, 4.0
"""A layer whose output has a root mean square out of these bounds is scaled to the target."""


class _Roles(NamedTuple):
    """Which arguments of an op may be a weight, and which is what is added."""

    weights: tuple[int, ...]
    bias: int | None = None


_PRODUCTS = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "_grouped_mm"), _Roles((0, 1))),
    **dict.fromkeys(("addmm", "addmv", "baddbmm"), _Roles((1, 2), 0)),
    **dict.fromkeys(("linear", "convolution", "_convolution"), _Roles((1,), 2)),
    "embedding": _Roles((0,)),
}
"""Ops that sum over products with a weight, by the name of the aten op."""

_BATCH_NORMS = ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training")
_FACTORS = {
    **dict.fromkeys(("mul", "mul_"), _Roles((0, 1))),
    **dict.fromkeys((*_BATCH_NORMS, "native_group_norm"), _Roles((1,), 2)),
    "native_layer_norm": _Roles((2,), 3),
    "_fused_rms_norm": _Roles((2,)),
}
"""Ops that multiply each channel by a weight."""


def scale_weights(target: Target, seed: int, output_rms: float) -> Target:
    """Scale the weights of ``target.model`` in place by a call on its inputs, with a note.

    The note says what the root mean square of the output was; ``seed`` draws the weights that are
    zero. Nothing else changes. Raises :class:`UsageError` if the call fails.
    """
    scaler, snapshot = _Scaler(target.model, seed), Snapshot(target.model, target.inputs)
    threads, fast = torch.get_num_threads(), torch.backends.mha.get_fastpath_enabled()
    # The fast path is one op with the weights of several layers
    torch.backends.mha.set_fastpath_enabled(False)
    # Each process that loads the model scales it, and sums of several threads may differ
    torch.set_num_threads(1)
    try:
        args, kwargs = (map_tensors(part, lambda tensor: tensor.detach().clone()) for part in target.inputs)
        with torch.no_grad(), scaler:
            call_model(target.model, args, kwargs)
    except Exception as error:
        why = one_line(error)
        hint = "Give trained weights with --weights, or other inputs with --inputs."
        raise UsageError(f"The weights could not be scaled, since the model fails: {why}", hint) from None
    finally:
        torch.set_num_threads(threads)
        torch.backends.mha.set_fastpath_enabled(fast)
        snapshot.restore()
    if not scaler.scaled + scaler.redrawn:
        return target
    setup = (*target.setup, "# the scan scaled these random weights: with them the output vanishes")
    redrawn = ""
    if scaler.redrawn:
        redrawn = f", {counted(scaler.redrawn, 'weight')} of zeros drawn anew"
    note = (
        f"random weights of {scaler.scaled} of {counted(scaler.layers, 'layer')} were scaled{redrawn}: with the "
        f"initial ones the output is {output_rms:.0e} (rms); all figures are those of the scaled weights"
    )
    return target._replace(weights="scaled", notes=(*target.notes, note), setup=setup)


class _Scaler(DispatchMode):
    """Scales the weights of each op when it runs, and its result with them."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        super().__init__()
        self.layers = self.scaled = self.redrawn = 0
        self._generator = torch.Generator().manual_seed(seed)
        self._weights = {
            parameter.untyped_storage().data_ptr()
            for parameter in model.parameters()
            if parameter.layout == torch.strided and parameter.is_floating_point() and parameter.numel()
        }
        # The elements that were scaled, by storage: a weight keeps the scale of its first use
        self._done: dict[int, list[range]] = {}

    def handle(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], keys: AutocastKeys) -> Any:
        """Run the op; if it multiplies by weights that are new, scale them and the result."""
        name = func._schema.name.removeprefix("aten::")
        factors = self._factors(name, args)
        if not factors:
            return run_op(func, args, kwargs, keys)
        # Weights that are all zero
        weight = factors[0]
        is_new = not bool(weight.count_nonzero())
        if is_new:
            self.redrawn += 1
            if name in _FACTORS:
                weight.fill_(1.0)
            else:
                weight.copy_(torch.randn(weight.shape, generator=self._generator))
        result = run_op(func, args, kwargs, keys)
        output = result if isinstance(result, Tensor) else result[0]
        rms = 0.0
        if output.numel() and output.is_floating_point():
            rms = float(torch.linalg.vector_norm(output, dtype=torch.float64)) / math.sqrt(output.numel())
        if rms and math.isfinite(rms):
            self.layers += 1
            for tensor in factors:
                self._done.setdefault(tensor.untyped_storage().data_ptr(), []).append(_elements(tensor))
            if not SMALLEST <= rms <= LARGEST or (is_new and name in _PRODUCTS):
                self.scaled += 1
                for tensor in (*factors, output):
                    tensor.mul_(TARGET / rms)
        return result

    def _factors(self, name: str, args: tuple[Any, ...]) -> list[Tensor]:
        """The weight, and the bias if any, that the result of an op is proportional to."""
        roles = _PRODUCTS.get(name) or _FACTORS.get(name)
        if roles is None:
            return []
        operands = [args[index] for index in roles.weights if index < len(args)]
        weights = [operand for operand in operands if self._is_weight(operand)]
        if len(weights) != 1:
            return []
        # A product multiplies each channel of an activation by a factor, as LayerScale
        others = [operand for operand in operands if operand is not weights[0] and isinstance(operand, Tensor)]
        is_vector = weights[0].numel() == max(weights[0].shape, default=1)
        is_scale = len(others) == 1 and is_vector and others[0].numel() > weights[0].numel()
        if name in ("mul", "mul_") and not is_scale:
            return []
        factors = list(weights)
        if roles.bias is not None and roles.bias < len(args) and isinstance(args[roles.bias], Tensor):
            factors.append(args[roles.bias])
        return factors if all(self._is_weight(tensor) and not self._is_done(tensor) for tensor in factors) else []

    def _is_weight(self, value: Any) -> bool:
        if not isinstance(value, Tensor) or value.layout != torch.strided or not value.is_floating_point():
            return False
        overlaps = any(size > 1 and stride == 0 for size, stride in zip(value.shape, value.stride(), strict=True))
        return not overlaps and value.untyped_storage().data_ptr() in self._weights

    def _is_done(self, tensor: Tensor) -> bool:
        elements = _elements(tensor)
        done = self._done.get(tensor.untyped_storage().data_ptr(), [])
        return any(elements.start < other.stop and other.start < elements.stop for other in done)


def _elements(tensor: Tensor) -> range:
    """The positions in its storage from the first to the last element."""
    start = int(tensor.storage_offset())
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return range(start, start + last + 1)
