"""Properties of an op that the recorder needs before it runs, and constants in the code that vanish in a narrow dtype."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from lowprec_check.engine.core.floating_dtypes import NARROW
from lowprec_check.engine.core.op_kernels import is_explicit

if TYPE_CHECKING:
    from lowprec_check.engine.trace.dispatched_call import DispatchedCall


# -- Numbers in the code that are not zero and become zero in a narrow dtype: ``x + 1e-8``, ``clamp(min=1e-8)`` in
# fp16
#
# They are found from the arguments of an op, without an input that shows the effect.

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


# -- Properties of an op that the recorder needs before it runs, read once per overload from its schema and tags

_SKIPPED = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::empty_permuted",
        "aten::_efficientzerotensor",
        "aten::is_pinned",
        "aten::sym_size",
        "aten::sym_stride",
        "aten::sym_numel",
        "aten::sym_storage_offset",
        "prim::device",
        "prim::layout",
    }
)

# Ops that move or select values without arithmetic: their local error is 0 by definition.
_MOVES = frozenset(
    "aten::" + name
    for name in [
        "cat",
        "stack",
        "index",
        "index_select",
        "gather",
        "embedding",
        "clone",
        "copy_",
        "contiguous",
        "constant_pad_nd",
        "roll",
        "flip",
        "repeat",
        "index_put_",
        "scatter_",
        "fill_",
        "zero_",
        "zeros",
        "ones",
        "zeros_like",
        "ones_like",
        "full",
        "full_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "arange",
        "scalar_tensor",
        "lift_fresh_copy",
        "slice_scatter",
        "select_scatter",
        "masked_select",
        "take",
        "repeat_interleave",
        "permute_copy",
        "view_copy",
        "where",
        "masked_fill_",
        "unfold_backward",
        "channel_shuffle",
        "pixel_shuffle",
        "pixel_unshuffle",
        "tril",
        "triu",
        "eye",
        "relu",
        "relu_",
        "neg",
        "neg_",
        "abs",
        "max_pool2d_with_indices",
        "masked_fill",
        "masked_scatter",
        "unbind_copy",
        "split_with_sizes_copy",
        "nan_to_num",
        "clamp_min",
        "clamp_min_",
        "hardtanh",
    ]
)

_CASTS = frozenset({"aten::_to_copy", "aten::to", "prims::convert_element_type"})

# Legacy ops that write their running statistics, which their schema does not declare.
_UNDECLARED_WRITES = {
    "aten::native_batch_norm": (3, 4),
    "aten::cudnn_batch_norm": (3, 4),
    "aten::miopen_batch_norm": (3, 4),
    "aten::batch_norm_update_stats": (1, 2),
}

# Ops with the tag of those that change how a tensor shows its storage, which give it another one.
_RESIZES = frozenset({"aten::resize_", "aten::resize_as_", "aten::set_", "aten::rename_"})

_FUSED = frozenset({"aten::_transformer_encoder_layer_fwd", "aten::_native_multi_head_attention"})

TRAINING = 5

# Ops that return (values, indices): the reference's values are gathered along ``dim`` by the indices chosen here.
_SELECTIONS = frozenset(
    "aten::" + name
    for name in ["topk", "sort", "max", "min", "median", "nanmedian", "kthvalue", "mode", "cummax", "cummin"]
)


class OpTraits(NamedTuple):
    """Properties of one overload."""

    name: str
    """``aten.mm.default``."""
    packet: str
    """``aten::mm``."""
    skipped: bool
    """Allocates without writing, or reads metadata: nothing to compare."""
    view: bool
    """Returns an alias and writes nothing; or changes how a tensor shows its storage (``transpose_``)."""
    mutable: bool
    written: tuple[int | str, ...]
    """Positions and names of the arguments that the op writes to."""
    random: bool
    may_draw: bool
    """Uses random numbers, or is another package's, which need not declare it."""
    in_training: bool
    """Writes only in training mode, its argument number :data:`TRAINING`."""
    moves: bool
    """Does no arithmetic."""
    casts: bool
    """``_to_copy`` and the like: the local error is what the cast loses."""
    selects: bool
    calls_ops: bool
    """Its kernel calls other ops, to which autocast applies."""
    computes: bool
    """Can add an error unless it :func:`draws`: does not only move or cast values."""
    number_slots: Slots
    """The arguments that may hold a number that it takes in the dtype of its tensors."""


@functools.cache
def traits(func: OpOverload) -> OpTraits:
    """Return the traits of ``func``, computed once."""
    schema = func._schema
    packet = schema.name
    written: tuple[int | str, ...] = _UNDECLARED_WRITES.get(packet) or tuple(
        argument.name if argument.kwarg_only else index
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    moves, casts = packet in _MOVES, packet in _CASTS
    random = torch.Tag.nondeterministic_seeded in func.tags
    in_place_view = torch.Tag.inplace_view in func.tags and packet not in _RESIZES
    aliased = any(returned.alias_info is not None for returned in schema.returns)
    return OpTraits(
        name=str(func),
        packet=packet,
        skipped=packet in _SKIPPED,
        view=in_place_view or (aliased and not written),
        mutable=bool(written) and not in_place_view,
        written=() if in_place_view else written,
        random=random,
        may_draw=random or not packet.startswith(("aten::", "prims::")),
        in_training=packet in _UNDECLARED_WRITES and packet != "aten::batch_norm_update_stats",
        moves=moves,
        casts=casts,
        selects=packet in _SELECTIONS and len(schema.returns) == 2,
        calls_ops=not packet.startswith(("aten::", "prims::")) or packet in _FUSED or is_explicit(func),
        computes=not (moves or casts),
        number_slots=number_slots(schema),
    )


def draws(func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Whether this call uses random numbers; attention with a dropout of 0 has the tag but does not."""
    if not traits(func).random:
        return False
    for index, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            value = args[index] if index < len(args) else kwargs.get(argument.name, 0.0)
            return value != 0
        if argument.name in ("train", "training"):
            value = args[index] if index < len(args) else kwargs.get(argument.name, False)
            return bool(value)
    return True
