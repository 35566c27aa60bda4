"""Derivatives of the reference: ops run so that derivatives lead through them, and gradients with respect to storages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import Variable
from torch.nn import functional

from lowprec_check.engine.trace.dispatched_call import DispatchedCall, run_wide
from lowprec_check.engine.trace.op_arguments import Args, Kwargs, outputs_of

# -- Gradients of an output with respect to storages: parts of them are read, cleared and added to in any layout


class Part(NamedTuple):
    """The part of a storage that a tensor shows; complex values count as pairs of real ones."""

    storage: int
    """Identifies the storage for as long as a run takes."""
    size: int
    """Real numbers in the whole storage."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_complex: bool
    is_conj: bool
    is_neg: bool
    device: torch.device
    wide: torch.dtype
    """The dtype of gradients."""

    @classmethod
    def of(cls, storage: int, tensor: Tensor, wide: torch.dtype = torch.float32) -> Part:
        """The part of ``storage`` that ``tensor`` shows."""
        is_complex = tensor.is_complex()
        count = tensor.untyped_storage().nbytes() // tensor.element_size() * (2 if is_complex else 1)
        return cls(
            storage,
            count,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            is_complex,
            tensor.is_conj(),
            tensor.is_neg(),
            tensor.device,
            wide,
        )

    def views(self, buffer: Tensor) -> Tensor:
        """This part in ``buffer``, (directions, real numbers), as the storage holds it: (directions, *shape)."""
        step = buffer.shape[1]
        if self.is_complex:
            buffer, step = torch.view_as_complex(buffer.view(len(buffer), -1, 2)), step // 2
        return buffer.as_strided(
            (len(buffer), *self.shape), (step, *self.stride), buffer.storage_offset() + self.offset
        )

    def as_seen(self, stored: Tensor) -> Tensor:
        """Values of the storage as the tensor shows them, conjugated and negated; also the other way round."""
        stored = stored.conj() if self.is_conj else stored
        return -stored if self.is_neg else stored

    @property
    def is_whole(self) -> bool:
        """Whether it shows every element of its storage."""
        size = 1
        for length in self.shape:
            size *= length
        return size * (2 if self.is_complex else 1) >= self.size and not self.overlaps

    @property
    def overlaps(self) -> bool:
        """Whether some elements may be shown several times."""
        expected = 1
        for step, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size > 1:
                if step < expected:
                    return True
                expected = step * size
        return False


def pulled_back(
    values: Sequence[Tensor], leaves: Sequence[Tensor], gradients: Sequence[Tensor], *, retain_graph: bool = False
) -> tuple[Tensor | None, ...]:
    """The gradients of ``leaves``, given those of ``values``, which have their shapes; ``None`` for a leaf that is not reached.

    Like :func:`torch.autograd.grad` with ``grad_outputs``, which imports sympy at its first call: that takes seconds.
    """
    given = tuple(gradient.to(value.dtype) for value, gradient in zip(values, gradients, strict=True))
    found: tuple[Tensor | None, ...] = Variable._execution_engine.run_backward(
        tuple(values), given, retain_graph, False, tuple(leaves), True, accumulate_grad=False
    )
    return found


class GradientBuffers:
    """One gradient per storage and direction."""

    def __init__(self, directions: int) -> None:
        self.directions = directions
        self._by_storage: dict[int, Tensor] = {}

    def add(self, part: Part, gradients: Tensor, direction: int | None = None) -> None:
        """Add gradients, (directions, *shape of the part), or that of one direction.

        NaN and Inf, which derivatives have where a function has none, count as 0.
        """
        with torch.no_grad():
            buffer = self._buffer(part)
            buffer = buffer if direction is None else buffer[direction : direction + 1]
            values = _finite(part.as_seen(gradients.detach() if direction is None else gradients.detach()[None]))
            if values.is_complex() and not part.is_complex:
                values = values.real
            if part.overlaps:
                buffer += _scattered(part, values, buffer)
            else:
                part.views(buffer).add_(values)

    def take(self, part: Part) -> Tensor | None:
        """The gradients of a part that an op wrote, cleared there: earlier values do not reach the output."""
        buffer = self._by_storage.get(part.storage)
        if buffer is None:
            return None
        with torch.no_grad():
            if part.is_whole:
                del self._by_storage[part.storage]
                return part.as_seen(part.views(buffer))
            taken = part.as_seen(part.views(buffer).clone())
            part.views(buffer).zero_()
            return taken

    def _buffer(self, part: Part) -> Tensor:
        known = self._by_storage.get(part.storage)
        if known is None or known.shape[1] < part.size:  # an op has resized it
            new = torch.zeros(self.directions, part.size, dtype=part.wide, device=part.device)
            if known is not None:
                new[:, : known.shape[1]] = known
            known = self._by_storage[part.storage] = new
        return known


def _finite(gradient: Tensor) -> Tensor:
    if gradient.is_complex():
        return torch.view_as_complex(torch.view_as_real(gradient.resolve_conj()).nan_to_num(0.0, 0.0, 0.0))
    return gradient.nan_to_num(0.0, 0.0, 0.0)


def _scattered(part: Part, gradients: Tensor, buffer: Tensor) -> Tensor:
    """The gradients of the whole storage for those of a part that shows elements several times."""
    with torch.enable_grad():
        leaf = torch.zeros_like(buffer).requires_grad_()
        shown = part.views(leaf)
        [gradient] = pulled_back([shown], [leaf], [gradients])
        return torch.zeros_like(leaf) if gradient is None else gradient


# -- Runs an op so that derivatives lead through it: ops without a derivative formula are replaced by ones that
# have one
#
# A replacement counts only if it gives the results of the op; otherwise the op is run as it is.

_CLOSE = 1e-4


def run_differentiable(call: DispatchedCall, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """Like :func:`run_wide`, with derivatives where there are any."""
    without_out = _without_out(call.func)
    if without_out is not None:
        written = {argument.name for argument in call.func._schema.arguments if argument.is_out}
        return outputs_of(without_out(*args, **{key: value for key, value in kwargs.items() if key not in written}))
    replacement = _REPLACEMENTS.get(call.traits.packet)
    mask = kwargs.get("attn_mask")
    if replacement is None or (replacement is _cpu_attention and (mask is None or not mask.requires_grad)):
        return run_wide(call, args, kwargs)
    with torch.no_grad():
        results = run_wide(call, args, kwargs)
    names = [argument.name for argument in call.func._schema.arguments]
    replaced = replacement(**dict(zip(names, args, strict=False)), **kwargs)
    return [
        mine if mine.shape == its.shape and torch.allclose(mine, its, _CLOSE, _CLOSE * _largest(its)) else its
        for mine, its in zip(replaced, results, strict=False)
    ] + results[len(replaced) :]


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


@functools.cache
def _without_out(func: OpOverload) -> OpOverload | None:
    """The overload of ``func`` that returns what ``func`` writes to ``out``, which has no derivative; ``None`` if it has no ``out``."""
    schema = func._schema
    wanted = [(a.name, str(a.type)) for a in schema.arguments if not a.is_out]
    if len(wanted) == len(schema.arguments):
        return None
    packet = func.overloadpacket
    for name in packet.overloads():
        other: OpOverload = getattr(packet, name)
        if [(a.name, str(a.type)) for a in other._schema.arguments] == wanted:
            return other
    return None


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> list[Tensor]:
    """Multi-head attention; tensors of shape (batch, length, width). A true element of the mask is left out."""
    parts = zip((query, key, value), qkv_weight.split(embed_dim), qkv_bias.split(embed_dim), strict=True)
    q, k, v = (
        functional.linear(tensor, weight, bias).unflatten(-1, (num_head, -1)).transpose(1, 2)
        for tensor, weight, bias in parts
    )
    scores = q @ k.transpose(-1, -2) / (q.shape[-1] ** 0.5)
    if mask is not None:
        scores = scores.masked_fill(mask[:, None, None] if mask_type == _PADDING else mask, float("-inf"))
    weights = scores.softmax(-1)
    out = functional.linear((weights @ v).transpose(1, 2).flatten(2), proj_weight, proj_bias)
    return [out, weights.mean(1) if average_attn_weights else weights] if need_weights else [out]


_PADDING = 1
"""The type of a mask of shape (batch, length); others are added to the scores as they are."""


def _encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> list[Tensor]:
    """The fused layer of :class:`torch.nn.TransformerEncoderLayer`."""
    attention = (embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, False, False, mask_type)

    def attend(x: Tensor) -> Tensor:
        return _attention(x, x, x, *attention)[0]

    def feed_forward(x: Tensor) -> Tensor:
        hidden = functional.linear(x, ffn_weight_1, ffn_bias_1)
        hidden = functional.gelu(hidden) if use_gelu else functional.relu(hidden)
        return functional.linear(hidden, ffn_weight_2, ffn_bias_2)

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.layer_norm(x, (embed_dim,), weight, bias, eps)

    if norm_first:
        x = src + attend(norm(src, norm_weight_1, norm_bias_1))
        return [x + feed_forward(norm(x, norm_weight_2, norm_bias_2))]
    x = norm(src + attend(src), norm_weight_1, norm_bias_1)
    return [norm(x + feed_forward(x), norm_weight_2, norm_bias_2)]


def _efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, **options: Any
) -> list[Tensor]:
    """Attention by the function that chooses a kernel; that of the op has a derivative only if asked for more results."""
    dropout, causal = options.get("dropout_p", 0.0), options.get("is_causal", False)
    return [
        functional.scaled_dot_product_attention(
            query, key, value, attn_bias, dropout, causal, scale=options.get("scale")
        )
    ]


def _cpu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> list[Tensor]:
    """Attention by the function that chooses a kernel; that of the op has no derivative for the mask."""
    return [functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)]


_REPLACEMENTS: dict[str, Callable[..., list[Tensor]]] = {
    "aten::_native_multi_head_attention": _attention,
    "aten::_transformer_encoder_layer_fwd": _encoder_layer,
    "aten::_scaled_dot_product_efficient_attention": _efficient_attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _cpu_attention,
}
