"""What an op does, read once per overload; and the tensors and dtypes among its arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from lowprec_check.schema.precisions import formats
from lowprec_check.torchkit.floating_dtypes import NARROW, is_float, torch_dtype
from lowprec_check.torchkit.op_kernels import is_explicit
from lowprec_check.torchkit.pytree import map_values

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

TEXTS = 10_000  # how many different texts of dtypes or shapes are kept: rows of equal calls share them

TRAINING = 5  # the position of ``training`` in legacy batch norms


class OpTraits(NamedTuple):
    """Properties of one overload."""

    name: str  # ``aten.mm.default``
    packet: str  # ``aten::mm``
    of_torch: bool  # is torch's own, not another package's
    skipped: bool  # allocates without writing, or reads metadata: nothing to compare
    view: bool  # returns an alias and writes nothing, or changes how a tensor shows its storage (``t_``)
    mutable: bool
    written: tuple[int | str, ...]  # positions and names of the arguments that the op writes to
    random: bool  # has the tag of ops that use random numbers; attention with a dropout of 0 has it too
    may_draw: bool  # is ``random``, or another package's, which need not declare it
    in_training: bool  # writes only in training mode, its argument number :data:`TRAINING`
    moves: bool  # does no arithmetic
    casts: bool  # ``_to_copy`` and the like: the local error is what the cast loses
    selects: bool
    calls_ops: bool  # its kernel calls other ops, to which autocast applies
    computes: bool  # can add an error unless it draws random numbers: does not only move or cast values
    number_slots: tuple[tuple[int, str], ...]
    """Positions and names of arguments for a number that it takes in the dtype of its tensors."""
    workspaces: tuple[int, ...]
    """Positions of what the forward op left for its derivative: in fp32, oneDNN's LSTM reads and
    writes past its end.
    """


_WORKSPACES = ("workspace", "reserve", "reserveSpace")


@functools.cache
def traits(func: OpOverload) -> OpTraits:
    """The traits of ``func``."""
    schema = func._schema
    packet = schema.name
    numbers = _NUMBERS_IN_LOW.get(packet.removeprefix("aten::").removesuffix("_"), ())
    written: tuple[int | str, ...] = _UNDECLARED_WRITES.get(packet) or tuple(
        argument.name if argument.kwarg_only else index
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    of_torch = packet.startswith(("aten::", "prims::"))
    moves, casts = packet in _MOVES, packet in _CASTS
    random = torch.Tag.nondeterministic_seeded in func.tags
    in_place_view = torch.Tag.inplace_view in func.tags and packet not in _RESIZES
    aliased = any(returned.alias_info is not None for returned in schema.returns)
    return OpTraits(
        name=str(func),
        packet=packet,
        of_torch=of_torch,
        skipped=packet in _SKIPPED,
        view=in_place_view or (aliased and not written),
        mutable=bool(written) and not in_place_view,
        written=() if in_place_view else written,
        random=random,
        may_draw=random or not of_torch,
        in_training=packet in _UNDECLARED_WRITES and packet != "aten::batch_norm_update_stats",
        moves=moves,
        casts=casts,
        selects=packet in _SELECTIONS and len(schema.returns) == 2,
        calls_ops=not of_torch or packet in _FUSED or is_explicit(func),
        computes=not (moves or casts),
        number_slots=tuple((index, a.name) for index, a in enumerate(schema.arguments) if a.name in numbers),
        workspaces=tuple(index for index, a in enumerate(schema.arguments) if a.name in _WORKSPACES),
    )


def _aten(*names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names)


# Ops that copy all values of a tensor to a new one.
COPIES = _aten("clone", "contiguous", "permute_copy", "view_copy")

# Ops with nothing to compare: they allocate without writing, or read metadata.
_SKIPPED = frozenset({"prim::device", "prim::layout"}) | _aten(
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"),
    *("_efficientzerotensor", "is_pinned", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset"),
)

# Ops that move or select values without arithmetic: their local error is 0 by definition.
_MOVES = COPIES | _aten(
    *("cat", "stack", "repeat", "repeat_interleave", "unbind_copy", "split_with_sizes_copy", "copy_"),
    *("index", "index_select", "gather", "embedding", "take", "masked_select", "where", "tril", "triu"),
    *("index_put_", "scatter_", "slice_scatter", "select_scatter", "masked_scatter", "masked_fill", "masked_fill_"),
    *("zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "eye"),
    *("fill_", "zero_", "arange", "scalar_tensor", "constant_pad_nd", "nan_to_num", "lift_fresh_copy"),
    *("roll", "flip", "channel_shuffle", "pixel_shuffle", "pixel_unshuffle", "unfold_backward"),
    *("relu", "relu_", "neg", "neg_", "abs", "clamp_min", "clamp_min_", "hardtanh", "max_pool2d_with_indices"),
)
_CASTS = frozenset({"aten::_to_copy", "aten::to", "prims::convert_element_type"})

# Legacy ops that write their running statistics, which their schema does not declare.
_UNDECLARED_WRITES = {
    "aten::native_batch_norm": (3, 4),
    "aten::cudnn_batch_norm": (3, 4),
    "aten::miopen_batch_norm": (3, 4),
    "aten::batch_norm_update_stats": (1, 2),
}

# They have the tag of ops that change how a tensor shows its storage, but give it another one.
_RESIZES = _aten("resize_", "resize_as_", "set_", "rename_")

# Ops of torch whose kernels call other ops, to which autocast applies.
_FUSED = _aten("_transformer_encoder_layer_fwd", "_native_multi_head_attention")

# Ops that return (values, indices): the reference takes its values at the indices chosen here.
_SELECTIONS = _aten("topk", "sort", "max", "min", "median", "nanmedian", "kthvalue", "mode", "cummax", "cummin")

# They take a number in the dtype of the tensor: ``0 < 1e-8`` is false in fp16.
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
COMPARISONS = _aten(*_COMPARISONS, *(f"{name}_" for name in _COMPARISONS))

# By op, in place or not: the arguments that it takes in the dtype of its tensors, as observed on a
# CPU and on CUDA. Products and quotients are left out: their kernels take the number in fp32, and
# ``6e4 * 1e-8`` is not 0 in fp16. So are a sum with ``alpha``, and the ``eps`` of normalizations
# and fused optimizers, which compute in fp32.
_NUMBERS_IN_LOW: dict[str, tuple[str, ...]] = {
    # The result is rounded to the dtype of the output: 0 + 1e-8 is 0.
    **dict.fromkeys(["add", "sub", "rsub"], ("other",)),
    **dict.fromkeys(["_foreach_add", "_foreach_sub"], ("scalar", "scalars")),
    # The result is the number itself, or lies at it.
    **dict.fromkeys(["clamp", "clamp_min", "clamp_max"], ("min", "max")),
    **dict.fromkeys(["_foreach_maximum", "_foreach_minimum"], ("scalar", "scalars")),
    **dict.fromkeys(["_foreach_clamp_min", "_foreach_clamp_max"], ("scalar", "scalars")),
    **dict.fromkeys(["maximum", "minimum"], ("other",)),
    "hardtanh": ("min_val", "max_val"),
    "threshold": ("threshold", "value"),
    **dict.fromkeys(["fill", "masked_fill", "constant_pad_nd"], ("value",)),
    **dict.fromkeys(["full", "full_like", "new_full"], ("fill_value",)),
    "logit": ("eps",),
    "scalar_tensor": ("s",),
    "nan_to_num": ("nan", "posinf", "neginf"),
    **dict.fromkeys(_COMPARISONS, ("other",)),
}


def map_args(args: Args, kwargs: Kwargs, function: Callable[[Any], Any]) -> tuple[Args, Kwargs]:
    """Apply ``function`` to every tensor and dtype among the arguments, also in lists."""
    mapped = tuple([map_values(value, function) for value in args])
    return mapped, {key: map_values(value, function) for key, value in kwargs.items()} if kwargs else {}


def tensors_in(args: Args, kwargs: Kwargs) -> list[Tensor]:
    """All tensors among the arguments, those in lists included."""
    tensors: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, Tensor):
                    tensors.append(item)
                elif isinstance(item, (list, tuple)):
                    tensors += [inner for inner in item if isinstance(inner, Tensor)]
    return tensors


def outputs_of(out: Any) -> list[Tensor]:
    """The strided tensors that an op returned, in order."""
    if isinstance(out, Tensor):
        return [out] if out.layout == torch.strided else []
    if isinstance(out, (list, tuple)):
        return [tensor for item in out for tensor in outputs_of(item)]
    return []


def has_narrow_dtype(args: Args, kwargs: Kwargs) -> bool:
    """Whether a narrow dtype is passed as an argument (``dtype=torch.half``)."""
    return any(isinstance(value, torch.dtype) and value in NARROW for value in (*args, *kwargs.values()))


def dtype_names(tensors: Iterable[Tensor]) -> list[str]:
    """Names of the floating and complex dtypes, sorted: ``["bfloat16", "float32"]``."""
    return sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors if is_float(tensor)})


def dtype_flow(inputs: list[Tensor], outputs: list[Tensor]) -> str:
    """Floating dtypes in, an arrow, floating dtypes out: ``bf16+f32→bf16``."""
    return _flow(tuple([t.dtype for t in inputs]), tuple([t.dtype for t in outputs]))


@functools.lru_cache(TEXTS)
def _flow(inputs: tuple[torch.dtype, ...], outputs: tuple[torch.dtype, ...]) -> str:
    return f"{_joined(inputs)}→{_joined(outputs)}"


def _joined(dtypes: tuple[torch.dtype, ...]) -> str:
    floating = {dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex}
    return "+".join(sorted(_short_names().get(dtype) or str(dtype).removeprefix("torch.") for dtype in floating))


@functools.cache
def _short_names() -> dict[torch.dtype, str]:
    """``f16`` for ``torch.float16``: the mark of each dtype's first float format; and of fp64."""
    names = {torch.float64: "f64"}
    for format_ in formats():
        names.setdefault(torch_dtype(format_), format_.mark)
    return names


def shape_text(outputs: list[Tensor]) -> str:
    """The shape of the first tensor, ``4×64×56×56``; empty if there is none."""
    return _shape_text(outputs[0].shape) if outputs else ""


@functools.lru_cache(TEXTS)
def _shape_text(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))
