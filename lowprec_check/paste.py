"""The code that a user pastes to run a model as recommended: pure PyTorch, nothing of ours. Never imports torch."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

_DTYPES = {
    "half": "torch.float16",
    "bfloat16": "torch.bfloat16",
    "autocast-fp16": "torch.float16",
    "autocast-bf16": "torch.bfloat16",
}

_KEEP_UNDER_AUTOCAST = """\
def in_fp32(module):  # outside autocast, on fp32 inputs
    forward = module.forward
    up = lambda t: t.float() if t.is_floating_point() else t

    def wrapped(*args, **kwargs):
        args, kwargs = tree_map_only(torch.Tensor, up, (args, kwargs))
        with torch.autocast("{device}", enabled=False):
            return forward(*args, **kwargs)

    module.forward = wrapped
"""

_KEEP_UNDER_CAST = """\
def in_fp32(module):  # fp32 weights and inputs, outputs back in {dtype}
    module.float()
    forward = module.forward
    up = lambda t: t.float() if t.is_floating_point() else t
    down = lambda t: t.to({dtype}) if t.dtype == torch.float32 else t

    def wrapped(*args, **kwargs):
        args, kwargs = tree_map_only(torch.Tensor, up, (args, kwargs))
        return tree_map_only(torch.Tensor, down, forward(*args, **kwargs))

    module.forward = wrapped
"""


def paste(precision: str, device: str, call: str, keep_fp32: Sequence[str] = ()) -> str:
    """Code that runs ``model`` on ``inputs`` in ``precision``; ``call`` is e.g. ``model(*inputs)``."""
    lines = ["import torch"]
    if keep_fp32 or not precision.startswith("autocast"):
        lines.append("from torch.utils._pytree import tree_map_only")
    lines.append("")
    kind = device.partition(":")[0]
    if kind != "cpu":
        lines.append(f'model = model.to("{device}")  # and the inputs')
    if precision.startswith("autocast"):
        lines += _keep(_KEEP_UNDER_AUTOCAST.format(device=kind), keep_fp32)
        lines.append(f'with torch.no_grad(), torch.autocast("{kind}", dtype={_DTYPES[precision]}):')
        lines.append(f"    output = {call}")
        return "\n".join(lines)
    dtype = _DTYPES[precision]
    lines.append(f"model = model.to({dtype})")
    lines += _keep(_KEEP_UNDER_CAST.format(dtype=dtype), keep_fp32)
    lines.append(f"cast = lambda t: t.to({dtype}) if t.is_floating_point() else t")
    lines.append("inputs = tree_map_only(torch.Tensor, cast, inputs)")
    lines.append("with torch.no_grad():")
    lines.append(f"    output = {call}")
    return "\n".join(lines)


def _keep(definition: str, modules: Sequence[str]) -> list[str]:
    if not modules:
        return []
    names = textwrap.wrap(", ".join(f'"{module}"' for module in modules), 90)
    listed = (
        [f"for name in [{names[0]}]:"] if len(names) == 1 else ["for name in [", *(f"    {n}" for n in names), "]:"]
    )
    return [definition, *listed, "    in_fp32(model.get_submodule(name))", ""]
