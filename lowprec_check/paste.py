"""The code that a user pastes to run a model as recommended: pure PyTorch, nothing of ours. Never imports torch."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from lowprec_check.results import ModelInfo

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


def paste(precision: str, device: str, model: ModelInfo, keep_fp32: Sequence[str] = ()) -> str:
    """Code that runs ``model`` on ``inputs`` in ``precision``, both as the user's file defines them."""
    kind, autocast = device.partition(":")[0], precision.startswith("autocast")
    lines = ["import torch"]
    if keep_fp32 or (model.castable and not autocast):
        lines.append("from torch.utils._pytree import tree_map_only")
    lines += ["", *model.setup]
    if kind != "cpu":
        lines.append(f'model = model.to("{device}")  # and the inputs')
    if autocast:
        lines += _keep(_KEEP_UNDER_AUTOCAST.format(device=kind), keep_fp32)
        lines.append(f'with torch.no_grad(), torch.autocast("{kind}", dtype={_DTYPES[precision]}):')
    else:
        lines.append(f"model = model.{precision}()")
        lines += _keep(_KEEP_UNDER_CAST.format(dtype=_DTYPES[precision]), keep_fp32)
        lines += _cast_inputs(_DTYPES[precision], castable=model.castable)
        lines.append("with torch.no_grad():")
    return "\n".join([*lines, f"    output = {model.call}"])


def _cast_inputs(dtype: str, *, castable: bool) -> list[str]:
    if not castable:
        return [f"# cast the floating tensors inside your inputs to {dtype} here"]
    cast = f"cast = lambda t: t.to({dtype}) if t.is_floating_point() else t"
    return [cast, "inputs = tree_map_only(torch.Tensor, cast, inputs)"]


def _keep(definition: str, modules: Sequence[str]) -> list[str]:
    if not modules:
        return []
    names = textwrap.wrap(", ".join(f'"{module}"' for module in modules), 90)
    listed = (
        [f"for name in [{names[0]}]:"] if len(names) == 1 else ["for name in [", *(f"    {n}" for n in names), "]:"]
    )
    return [definition, *listed, "    in_fp32(model.get_submodule(name))", ""]
