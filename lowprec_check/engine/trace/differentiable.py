"""Runs an op so that derivatives lead through it: ops without a derivative formula are replaced by ones that have one.

A replacement counts only if it gives the results of the op; otherwise the op is run as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional

from lowprec_check.engine.trace.dispatched_call import DispatchedCall
from lowprec_check.engine.trace.op_arguments import Args, Kwargs, outputs_of
from lowprec_check.engine.trace.wide_run import run_wide

_CLOSE = 1e-4


def run_differentiable(call: DispatchedCall, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """Like :func:`run_wide`, with derivatives where there are any."""
    without_out = _without_out(call.func)
    if without_out is not None:
        written = {argument.name for argument in call.func._schema.arguments if argument.is_out}
        return outputs_of(without_out(*args, **{key: value for key, value in kwargs.items() if key not in written}))
    replacement = _REPLACEMENTS.get(call.traits.packet)
    if replacement is None:
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


_REPLACEMENTS: dict[str, Callable[..., list[Tensor]]] = {
    "aten::_native_multi_head_attention": _attention,
    "aten::_transformer_encoder_layer_fwd": _encoder_layer,
    "aten::_scaled_dot_product_efficient_attention": _efficient_attention,
}
