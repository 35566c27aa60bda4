"""Numbers in the code that are not zero and become zero in a narrow dtype: ``x + 1e-8``, ``clamp(min=1e-8)`` in fp16.

They are found from the arguments of an op, without an input that shows the effect.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowprec_check.engine.core.floating_dtypes import NARROW

if TYPE_CHECKING:
    from lowprec_check.engine.trace.dispatched_call import DispatchedCall

Slots = tuple[tuple[int, str], ...]
"""Positions and names of arguments."""

_COMPARED = frozenset(["lt", "le", "gt", "ge", "eq", "ne"])
"""They take the number in the dtype of the tensor: ``0 < 1e-8`` is false in fp16."""

_BOUNDS = ("min", "max")

_ARGUMENTS: dict[str, tuple[str, ...]] = {
    # The result is rounded to the dtype of the output: 0 + 1e-8 is 0.
    **dict.fromkeys(["add", "sub", "rsub"], ("other",)),
    **dict.fromkeys(["_foreach_add", "_foreach_sub"], ("scalar", "scalars")),
    # The result is the number itself, or lies at it.
    **dict.fromkeys(["clamp", "clamp_min", "clamp_max"], _BOUNDS),
    **dict.fromkeys(["_foreach_maximum", "_foreach_minimum"], ("scalar", "scalars")),
    **dict.fromkeys(["_foreach_clamp_min", "_foreach_clamp_max"], ("scalar", "scalars")),
    "hardtanh": ("min_val", "max_val"),
    "threshold": ("threshold", "value"),
    **dict.fromkeys(["fill", "masked_fill", "constant_pad_nd"], ("value",)),
    **dict.fromkeys(["full", "full_like", "new_full"], ("fill_value",)),
    "logit": ("eps",),
    "scalar_tensor": ("s",),
    "nan_to_num": ("nan", "posinf", "neginf"),
    **dict.fromkeys(_COMPARED, ("other",)),
}
"""By op, in place or not: the arguments that it takes in the dtype of its tensors.

Observed on a CPU and on CUDA. Products and quotients are left out: their kernels take the number in fp32, and ``6e4 * 1e-8`` is
not 0 in fp16. So are a sum with ``alpha``, and the ``eps`` of normalizations and fused optimizers, which compute in fp32.
"""


_ON_THE_CPU = frozenset(["logit"])
"""Ops whose kernel for CUDA takes the number in fp32."""


def number_slots(schema: torch.FunctionSchema) -> Slots:
    """The arguments of an op that may hold such a number."""
    wanted = _ARGUMENTS.get(_name(schema), ())
    return tuple((index, found.name) for index, found in enumerate(schema.arguments) if found.name in wanted)


def vanished_constant(call: DispatchedCall, outputs: list[Tensor]) -> float | None:
    """The first number among the arguments that is not zero and rounds to zero in the dtype that the op takes it in.

    ``outputs`` are those of the call. ``None`` if there is none, or the dtype is not narrow.
    """
    slots = call.traits.number_slots
    if not slots or call.kwargs.get("alpha", 1) != 1:
        return None
    name = _name(call.func._schema)
    tensors = call.inputs if name in _COMPARED else outputs
    if not tensors or tensors[0].dtype not in NARROW or (name in _ON_THE_CPU and tensors[0].device.type != "cpu"):
        return None
    limit = _rounds_to_zero(tensors[0].dtype)
    numbers = (number for index, name in slots for number in _numbers(call, index, name))
    return next((number for number in numbers if 0 < abs(number) <= limit), None)


def _name(schema: torch.FunctionSchema) -> str:
    """``clamp`` of ``aten::clamp_``."""
    return str(schema.name).removeprefix("aten::").removesuffix("_")


def _numbers(call: DispatchedCall, index: int, name: str) -> Iterator[float]:
    value: Any = call.args[index] if index < len(call.args) else call.kwargs.get(name)
    if isinstance(value, (int, float)):
        yield float(value)
    elif isinstance(value, (list, tuple)):
        yield from (float(item) for item in value if isinstance(item, (int, float)))
    elif isinstance(value, Tensor) and name in _BOUNDS and _is_constant(value):
        yield float(value)


def _is_constant(bound: Tensor) -> bool:
    """Whether a bound is a number that a function made into a tensor, as ``cosine_similarity`` does.

    One on an accelerator is not read: that would wait for the device.
    """
    return bound.ndim == 0 and bound.device.type == "cpu" and bound.dtype in (torch.float32, torch.float64)


@functools.cache
def _rounds_to_zero(dtype: torch.dtype) -> float:
    """The largest number that rounds to zero: half the smallest subnormal one, a tie that goes to even."""
    limits = torch.finfo(dtype)
    return float(limits.tiny * limits.eps / 2)
