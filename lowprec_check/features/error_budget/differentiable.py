"""Runs ops on the reference so that derivatives lead through them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional

from lowprec_check.core.trace.dispatched_call import (
    DispatchedCall,
    attention_by_any_kernel,
    named_arguments,
    run_wide,
)
from lowprec_check.core.trace.ops import Args, Kwargs, outputs_of

# A replacement counts only if its results are this close to the op's, relative to the largest.
_CLOSE = 1e-4


def run_differentiable(call: DispatchedCall, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """Like :func:`run_wide`, with replacements for ops that have no derivative formula."""
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
    replaced = replacement(**named_arguments(call.func, args, kwargs))
    for index, (differentiable, result) in enumerate(zip(replaced, results, strict=False)):
        largest = float(result.abs().max()) if result.numel() else 0.0
        if differentiable.shape == result.shape and torch.allclose(differentiable, result, _CLOSE, _CLOSE * largest):
            results[index] = differentiable
    return results


@functools.cache
def _without_out(func: OpOverload) -> OpOverload | None:
    """The overload of ``func`` that returns what ``func`` writes to ``out``, if it has one."""
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
    """Multi-head attention on (batch, length, width); true elements of the mask are left out."""
    parts = zip((query, key, value), qkv_weight.split(embed_dim), qkv_bias.split(embed_dim), strict=True)
    q, k, v = (
        functional.linear(tensor, weight, bias).unflatten(-1, (num_head, -1)).transpose(1, 2)
        for tensor, weight, bias in parts
    )
    scores = q @ k.transpose(-1, -2) / (q.shape[-1] ** 0.5)
    if mask is not None:
        if mask_type == _PADDING:
            mask = mask[:, None, None]
        scores = scores.masked_fill(mask, float("-inf"))
    weights = scores.softmax(-1)
    out = functional.linear((weights @ v).transpose(1, 2).flatten(2), proj_weight, proj_bias)
    if need_weights:
        return [out, weights.mean(1) if average_attn_weights else weights]
    return [out]


# The type of a mask of shape (batch, length); others fit the scores as they are.
_PADDING = 1


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
    attention = (embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, False, False, mask_type)

    def attend(x: Tensor) -> Tensor:
        return _attention(x, x, x, *attention)[0]

    def feed_forward(x: Tensor) -> Tensor:
        hidden = functional.linear(x, ffn_weight_1, ffn_bias_1)
        activation = functional.gelu if use_gelu else functional.relu
        return functional.linear(activation(hidden), ffn_weight_2, ffn_bias_2)

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.layer_norm(x, (embed_dim,), weight, bias, eps)

    if norm_first:
        x = src + attend(norm(src, norm_weight_1, norm_bias_1))
        return [x + feed_forward(norm(x, norm_weight_2, norm_bias_2))]
    x = norm(src + attend(src), norm_weight_1, norm_bias_1)
    return [norm(x + feed_forward(x), norm_weight_2, norm_bias_2)]


def _cpu_attention(attn_mask: Tensor | None = None, **named: Any) -> list[Tensor]:
    # Its op has no derivative for the mask.
    return attention_by_any_kernel(named, attn_mask)


# Functions with derivatives, for ops that have none on some of their inputs or on all.
_REPLACEMENTS: dict[str, Callable[..., list[Tensor]]] = {
    "aten::_native_multi_head_attention": _attention,
    "aten::_transformer_encoder_layer_fwd": _encoder_layer,
    # Its op has a derivative only if asked for more results.
    "aten::_scaled_dot_product_efficient_attention": lambda attn_bias, **named: attention_by_any_kernel(
        named, attn_bias
    ),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _cpu_attention,
}
