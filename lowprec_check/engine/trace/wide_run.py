"""Runs an op call again on wide (fp32 or fp64) arguments."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lowprec_check.engine.core.floating_dtypes import is_narrow
from lowprec_check.engine.trace.dispatched_call import DispatchedCall
from lowprec_check.engine.trace.op_arguments import Args, Kwargs

_ATTENTION_IN_16_BITS = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_cudnn_attention",
)
"""Kernels for 16 bits only. In fp32 the first raises, and the second returns wrong values (torch 2.11, H200)."""


_WORKSPACES = ("workspace", "reserve", "reserveSpace")
"""Arguments that the forward op leaves for its derivative. With inputs in fp32, oneDNN's LSTM reads and writes past the end of it."""


def _reads_narrow_workspace(call: DispatchedCall) -> bool:
    given = zip(call.func._schema.arguments, call.args, strict=False)
    return any(
        argument.name in _WORKSPACES and isinstance(value, Tensor) and value.dtype == torch.uint8 and value.numel() > 0
        for argument, value in given
    ) and any(map(is_narrow, call.inputs))


def run_wide(call: DispatchedCall, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """The results of the op on other arguments, in the order of :meth:`DispatchedCall.results`.

    An attention kernel for 16 bits is replaced by the function that chooses a kernel: its output alone is returned. Raises
    ``RuntimeError`` for a derivative that reads bytes which the forward op left in the layout of the low precision.
    """
    if _reads_narrow_workspace(call):
        raise RuntimeError("its workspace has the layout of the low precision")
    call.wide_seconds = None
    if call.traits.packet not in _ATTENTION_IN_16_BITS:
        started = time.perf_counter()
        out = call.func(*args, **kwargs)
        call.wide_seconds = time.perf_counter() - started
        return call.results(out, args, kwargs)
    names = [argument.name for argument in call.func._schema.arguments]
    given: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
    query, key, value = given["query"], given["key"], given["value"]
    attended: Tensor = scaled_dot_product_attention(
        query,
        key,
        value,
        given.get("attn_bias"),
        given.get("dropout_p", 0.0),
        given.get("is_causal", False),
        scale=given.get("scale"),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return [attended]
