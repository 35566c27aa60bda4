"""The code that a user pastes to run a model as recommended: pure PyTorch, nothing of ours. Never imports torch.

It does what :mod:`lowprec_check.engine.model.keep_fp32` does, bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from lowprec_check.schema.scan_result import ModelInfo

_DTYPES = {
    "half": "torch.float16",
    "bfloat16": "torch.bfloat16",
    "autocast-fp16": "torch.float16",
    "autocast-bf16": "torch.bfloat16",
}

_UNDER_AUTOCAST = """\
def keep_in_fp32(model, names):  # outside autocast, on fp32 inputs
    from functools import partial

    def outside_autocast(forward, *args, **kwargs):
        with torch.autocast("{device}", enabled=False):
            return forward(*args, **kwargs)

    up = lambda t: t.float() if t.dtype == {dtype} else t
    enter = lambda module, args, kwargs: tree_map_only(torch.Tensor, up, (args, kwargs))
    for module in map(model.get_submodule, names):
        module.forward = partial(outside_autocast, module.forward)
        module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)

keep_in_fp32(model, {names})
"""

_UNDER_CAST = """\
def cast_except(model, names):  # these keep exact weights; inputs up to fp32, outputs back
    state = lambda module: [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
    up = lambda t: t.float() if t.dtype == {dtype} else t
    down = lambda t: t.to({dtype}) if t.dtype == torch.float32 else t
    enter = lambda module, args, kwargs: tree_map_only(torch.Tensor, up, (args, kwargs))
    leave = lambda module, args, output: tree_map_only(torch.Tensor, down, output)
{untie}    kept = [model.get_submodule(name) for name in names]
    exact = [[t.detach().clone() for t in state(module)] for module in kept]
    model.{cast}()
    for module, values in zip(kept, exact):
        module.float()
        for tensor, value in zip(state(module), values):
            tensor.detach().copy_(value)
        module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
        module.register_forward_hook(leave)

cast_except(model, {names})
"""

_UNTIE = """\
    for path in {paths}:  # shared with modules in {dtype}: a copy of its own
        owner, _, name = path.rpartition(".")
        owner = model.get_submodule(owner)
        setattr(owner, name, torch.nn.Parameter(getattr(owner, name).detach().clone()))
"""


def paste(
    precision: str, device: str, model: ModelInfo, keep_fp32: Sequence[str] = (), untied: Sequence[str] = ()
) -> str:
    """Code that runs ``model`` on ``inputs`` in ``precision``, both as the user's file defines them."""
    kind, dtype = device.partition(":")[0], _DTYPES[precision]
    autocast = precision.startswith("autocast")
    body = [*model.setup]
    if kind != "cpu":
        body.append(f'model = model.to("{device}")  # and the inputs')
    if autocast:
        if keep_fp32:
            body.append(_UNDER_AUTOCAST.format(device=kind, dtype=dtype, names=_listed(keep_fp32)))
        body.append(f'with torch.no_grad(), torch.autocast("{kind}", dtype={dtype}):')
    else:
        body.append(_cast(precision, dtype, keep_fp32, untied))
        body.append(_cast_inputs(dtype, castable=model.castable))
        body.append("with torch.no_grad():")
    imports = ["import torch"]
    if any("tree_map_only" in part for part in body):
        imports.append("from torch.utils._pytree import tree_map_only")
    return "\n".join([*imports, "", *body, f"    output = {model.call}"])


def _cast(precision: str, dtype: str, keep: Sequence[str], untied: Sequence[str]) -> str:
    if not keep:
        return f"model = model.{precision}()"
    untie = _UNTIE.format(paths=_listed(untied, indent=4), dtype=dtype) if untied else ""
    return _UNDER_CAST.format(cast=precision, dtype=dtype, untie=untie, names=_listed(keep))


def _cast_inputs(dtype: str, *, castable: bool) -> str:
    if not castable:
        return f"# cast the floating tensors inside your inputs to {dtype} here"
    narrow = f"lambda t: t.to({dtype}) if t.is_floating_point() else t"
    return f"inputs = tree_map_only(\n    torch.Tensor, {narrow}, inputs\n)"


def _listed(names: Sequence[str], *, indent: int = 0) -> str:
    """A list literal of strings, folded between items where it is long."""
    rows, row = [], ""
    for name in names:
        item = f"{json.dumps(name)}, "
        if row and len(row) + len(item) > 90:
            rows.append(row)
            row = ""
        row += item
    rows.append(row)
    if len(rows) == 1:
        return f"[{row.removesuffix(', ')}]"
    margin = " " * indent
    return "\n".join(["[", *(f"{margin}    {row.rstrip()}" for row in rows), f"{margin}]"])
